"""Small targets of every kind that hosts drafters, drafters of every kind on them, and rounds whose outcome is told.

A pair of target and drafter needs two compiled programs here: a prefill of any texts from nothing, and a round in which
the drafter drafts for itself while the target is shown drafts that are right up to a chosen place. So the drafter goes
through any pattern of rejections, every count is known beforehand, and what it would have said can be compared with
what it says after a fresh prefill.
"""

import dataclasses
import functools
from typing import Any

import families
import gemma_tiny
import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import calls, registry, testing
from specjax.core import loop, programs, round as rnd
from specjax.drafters import eagle3, mtp
from specjax.types import Proposal

VOCAB, K = 8, 3
#: name -> ``config.json``: attention over everything, windows of six, recurrent layers, experts, latent attention.
HOSTS: dict[str, dict[str, Any]] = {
    "dense": testing.tiny_config(layers=1),
    "ring": gemma_tiny.CONFIGS["gemma3"]
    | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "recurrent": families.HYBRID,
    "experts": testing.tiny_config(layers=1)
    | {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "latent": families.LATENT | {"num_hidden_layers": 1, "first_k_dense_replace": 0},
}
LATENT_BODY = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
#: Every registered drafter, and kinds of one that are another network altogether.
KINDS = (*registry.DRAFTERS, "eagle3, latent")
#: An assistant reads keys of heads, and latent attention keeps none.
PAIRS = [(kind, host) for host in HOSTS for kind in KINDS if (kind, host) != ("assistant", "latent")]
#: Pairs beyond a dense target, without the kinds that differ in their network alone.
OTHERS = [(kind, host) for kind, host in PAIRS if host != "dense" and kind in registry.DRAFTERS]


def every_other(kind: str, host: str) -> bool:
    """The fields of one colour on the board of pairs: each kind on two or three hosts, each host with four or five
    kinds."""
    return (KINDS.index(kind) + list(HOSTS).index(host)) % 2 == 0


#: Ragged rows with their own sampling values; the second and the last are greedy.
PROMPTS = [[3], [1, 2, 3, 4, 5, 6, 7, 0, 1], [1, 2], [5] * 6, [7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3]]
SAMPLED = {"temperature": [1.0, 0.0, 0.7, 1.3, 0.0], "seed": [1, 2, 3, 4, 5], "ignore_eos": True}


@functools.cache
def target(host: str, vocab: int = VOCAB, sharpness: float = 3.0):
    """Params without a drafter; at temperature 1 draws are spread out."""
    more = {"vocab_size": vocab, "max_position_embeddings": 512}
    return testing.tiny_params(3, hf=HOSTS[host] | more, sharpness=sharpness)


def drafted(base: specjax.Params, kind: str) -> specjax.Params:
    """The target with a random drafter of a kind: its ``tiny`` config, or a variant of that."""
    name, _, variant = kind.partition(", ")
    cfg = registry.drafter(name).tiny(base.meta.target_cfg)
    if variant:
        cfg = VARIANTS[variant](name, cfg, base.meta.target_cfg)
    return testing.tiny_drafter(base, name, 1, cfg)


def latent(name: str, cfg: Any, target_cfg: Any) -> Any:
    """An EAGLE-3 drafter of Kimi's kind, or an MTP layer of DeepSeek's, with experts."""
    wide, vocab = target_cfg.hidden_size, target_cfg.vocab_size
    if name == "mtp":
        model = registry.target("deepseek_v3").config(
            families.LATENT | {"hidden_size": wide, "vocab_size": vocab}
        )
        return mtp.config({"family": "deepseek_v3", "model": model, "k": 3}, target_cfg)
    layer = {"hidden_size": wide, "intermediate_size": 16, "vocab_size": vocab, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    settings = {"transformer": layer | heads | LATENT_BODY, "taps": cfg.taps, "latent": True}
    return eagle3.config(settings, target_cfg)


def gemma(name: str, cfg: Any, target_cfg: Any) -> Any:
    """Layers of Gemma 4."""
    layers = dataclasses.replace(cfg.body, flavour="gemma4", values_from_keys=True, qk_norm=True)
    return dataclasses.replace(cfg, body=layers, softcap=30.0, input_scale=4.0)


def recurrent_head(name: str, cfg: Any, target_cfg: Any) -> Any:
    """DSpark with the head that has a state."""
    return dataclasses.replace(cfg, markov=dataclasses.replace(cfg.markov, kind="rnn"))


VARIANTS = {"latent": latent, "gemma": gemma, "rnn": recurrent_head}


@functools.cache
def plain(host: str, new: int, rows: int = len(PROMPTS)) -> list[list[int]]:
    """Continuations without drafts."""
    options = {name: value if name == "ignore_eos" else value[:rows] for name, value in SAMPLED.items()}
    return specjax.decode(target(host), PROMPTS[:rows], max_new_tokens=new, rows=rows, **options).tokens


class Rounds:
    """The two programs of a pair, for the first ``rows`` prompts and texts of up to ``size`` tokens."""

    def __init__(self, kind: str, host: str, rows: int = len(PROMPTS), size: int = 64):
        self.params, self.rows, self.size = drafted(target(host), kind), rows, size
        new = size - max(map(len, PROMPTS))
        self.truth = [p + t for p, t in zip(PROMPTS, plain(host, new, rows), strict=False)]
        options = {name: value if name == "ignore_eos" else value[:rows] for name, value in SAMPLED.items()}
        call = calls.plan(
            self.params, PROMPTS[:rows], k=K, rule="match", max_new_tokens=new, rows=rows, **options
        )
        program = dataclasses.replace(call.program, tokens=size)
        self.blank = loop.host_state(program, call.jobs)
        self.weights, pair = (self.params.target, self.params.drafter), program.pair

        @jax.jit
        def begin(weights, blank):
            state = programs.fill_caches(program, blank)
            return rnd.prefill(pair, weights, state, jnp.zeros(rows, jnp.int32), size, "match")[0]

        @jax.jit
        def one(weights, state, told, count):
            own, state = rnd.draft(pair, weights, state, K)
            state, verdict, _ = rnd.verify(pair, weights, state, Proposal(told, count), "match")
            return state, own, verdict

        self._begin, self._one = begin, one

    def prefilled(self, texts=None):
        """State after the prompts, or after other texts with room behind them, every text in the row after its own."""
        blank = self.blank
        if texts is not None:
            tokens, length = np.zeros_like(blank.tokens), np.array([len(t) for t in texts], np.int32)
            for row, text in zip(tokens, texts, strict=True):
                row[: len(text)] = text
            limit = np.full_like(length, self.size)
            blank = dataclasses.replace(blank, tokens=tokens, length=length, prompt_len=length, limit=limit)
            blank = jax.tree.map(lambda x: np.roll(x, 1, 0), blank)
        return self._begin(self.weights, blank)

    def round(self, state, right, count):
        """(state, what the drafter proposed, verdict) of a round whose drafts are right up to ``right``."""
        told = np.zeros((self.rows, K), np.int32)
        for row, text, n in zip(told, self.truth, np.asarray(state.length), strict=True):
            row[: len(text[n : n + K])] = text[n : n + K]
        wrong = np.arange(K) >= np.asarray(right)[:, None]
        told = np.where(wrong, (told + 1) % VOCAB, told).astype(np.int32)
        return self._one(self.weights, state, told, np.asarray(count, np.int32))

    def fresh(self, texts):
        """What the drafter proposes after a prefill of texts from nothing, the last token of each being drawn; every
        text lies in the row after its own."""
        state = self.prefilled([text[:-1] for text in texts])
        assert committed(state) == [texts[-1], *texts[:-1]]
        return self.round(state, np.zeros(self.rows), np.zeros(self.rows))[1]


def committed(state) -> list[list[int]]:
    """Tokens of every row."""
    return [
        row[:n].tolist() for row, n in zip(np.asarray(state.tokens), np.asarray(state.length), strict=True)
    ]


def script(rounds: int, rows: int, seed: int = 0, few: bool = False):
    """(drafts that are right, drafts that are proposed), each [rounds, rows]: never any, some, all, all or none, and
    some of a varying number. ``few``: mostly none, for long walks."""
    rng = np.random.default_rng(seed)
    some = rng.choice(K + 1, (rounds, 5), p=(0.85, 0.05, 0.05, 0.05) if few else (0.4, 0.2, 0.2, 0.2))
    every = K * (rng.random(rounds) < (0.1 if few else 0.5))
    right = np.stack(
        [some[:, 0] * few, some[:, 1], some[:, 2] if few else np.full(rounds, K), every, some[:, 4]], 1
    )
    count = np.full_like(right, K)
    count[:, 4] = np.maximum(rng.integers(0, K + 1, rounds), right[:, 4])
    return right[:, :rows], count[:, :rows]


def same(cached: Proposal, fresh: Proposal, row: int, other: int) -> int:
    """Asserts that rows of two proposals are one, probabilities included; returns how many tokens that are."""
    n = int(cached.count[row])
    assert n == int(fresh.count[other])
    assert cached.tokens[row, :n].tolist() == fresh.tokens[other, :n].tolist()
    for name in ("q", "confidence"):
        mine, anew = getattr(cached, name), getattr(fresh, name)
        assert (mine is None) == (anew is None)
        if mine is not None:
            np.testing.assert_allclose(mine[row, :n], anew[other, :n], atol=1e-4, rtol=0)
    return n


def walk(pair: Rounds, rounds: int, every: int = 1, few: bool = False):
    """Rounds of all kinds: exact counts and texts in each, the drafter's own words against fresh ones every so often.

    Returns (last state, tokens compared, proposals that differ from the row's last one compared).
    """
    state = pair.prefilled()
    compared, changed, last = 0, 0, [[]] * pair.rows
    for i, (right, count) in enumerate(zip(*script(rounds, pair.rows, few=few), strict=True)):
        texts, done = committed(state), np.asarray(state.done)
        after, own, verdict = pair.round(state, right, count)
        room = np.asarray(state.limit - state.length)
        wanted = np.where(done, 0, np.minimum(right, np.minimum(count, room - 1)))
        assert np.where(done, 0, verdict.accepted).tolist() == wanted.tolist(), i
        assert np.asarray(verdict.emitted).tolist() == np.where(done, 0, wanted + 1).tolist(), i
        for b, text in enumerate(texts):
            assert text == pair.truth[b][: len(text)], (i, b)
        if i % every == every - 1:
            again = pair.fresh(texts)
            for b in np.flatnonzero(~done):
                compared += same(own, again, b, (b + 1) % pair.rows)
                said = own.tokens[b, : int(own.count[b])].tolist()
                changed, last[b] = changed + (said != last[b]), said
        assert all(a == b for a, b, d in zip(texts, committed(after), done, strict=True) if d)
        state = after
    return state, compared, changed
