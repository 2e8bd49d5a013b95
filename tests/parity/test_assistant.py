"""Gemma 4 assistants against transformers: logits of several drafts, and whole generations in tokens and counts.

transformers shows the assistant the keys of rejected drafts as well. Where that matters it is given a fresh pass over
the committed text instead; where every draft is right nothing is changed. Windows are shorter than the texts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import assistant_reference as ref, block_reference as files

import specjax
from specjax import calls, registry
from specjax.core import loop, round as rnd
from specjax.drafters import assistant, assistant_model as model
from specjax.types import Ctx

LONG = pytest.mark.long
K, FEW, PROMPT = ref.K, 5, [1, 2, 0, 1, 3]
CASES = {
    "keys_are_values": ("gemma4_dense", {}),
    "shared_layers": ("gemma4_e2b", {"num_centroids": 16, **ref.CLUSTERS}),
    "unified": ("gemma4_dense", {"unified": True, "tie_word_embeddings": False, "text": {"sliding_window": 6}}),
}  # fmt: skip


def load(teacher, made, folder, **settings):
    """The target with an assistant, both from folders."""
    target = files.load_target(teacher, folder / "target")
    return files.attach(target, files.save(made, folder / "assistant"), **{"k": K, **settings})


@functools.cache
def ours(meta, steps: int = K):
    """Compiled: (logits [B K V], greedy tokens [B K]) of a round."""
    cfg, family = meta.drafter_cfg, registry.target(meta.family)

    @jax.jit
    def run(params, state):
        anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, 1)[:, 0]
        view = functools.partial(family.kv_view, params.target, meta.target_cfg, state.target)
        ctx = Ctx(state.tokens, state.length, anchor, ~state.done, None, view)
        shared = family.shared(params.target, meta.target_cfg)
        seen, token, fed, out = model.look(params.drafter, cfg, ctx), anchor, state.drafter.feedback, []
        for _ in range(steps):
            normed = model.run(params.drafter, cfg, shared, seen, token, fed)
            out.append(model.logits(params.drafter, cfg, normed))
            token, fed = jnp.argmax(out[-1], -1).astype(jnp.int32), model.recycled(params.drafter, normed)
        proposal, _ = assistant.draft(params.drafter, shared, cfg, steps, state.drafter, ctx, None)
        return jnp.stack(out, 1), proposal.tokens

    return run


def close(mine, theirs):
    """Equal but for tokens outside the chosen clusters, which transformers puts one below the rest."""
    mine, theirs = np.asarray(mine), np.asarray(theirs)
    chosen = np.isfinite(mine)
    for step, (row, keep) in enumerate(zip(theirs, chosen, strict=True)):
        np.testing.assert_allclose(mine[step, keep], row[keep], atol=1e-4, rtol=0, err_msg=f"draft {step}")
        assert keep.all() or (row[~keep] == row.min()).all()


@pytest.mark.parametrize(
    "case", ["shared_layers", *(pytest.param(c, marks=LONG) for c in CASES if c != "shared_layers")]
)
def test_logits_of_every_draft(tmp_path, case):
    """TAP.6, TAP.8, CKP.6: texts shorter, as long and longer than the window; scaled input, head in two stages."""
    name, more = CASES[case]
    made = ref.assistant(name, **more)
    teacher = ref.teacher(name)
    params, found = load(teacher, made, tmp_path)
    assert (found.name, found.format) == ("assistant", "transformers")
    ids, lengths = np.random.default_rng(0).integers(0, 128, 30).tolist(), (2, 8, 9, 10, 11, 30)
    anchors = [{ids[n - 1]: 1e9} for n in lengths]
    state = specjax.start(
        params, [ids[: n - 1] for n in lengths], k=K, logit_bias=anchors, max_new_tokens=9, max_len=48
    )
    assert state.length.tolist() == list(lengths)
    mine, drafted = ours(params.meta)(params, state)
    for row, n in enumerate(lengths):
        tokens, logits = ref.drafts(teacher, made, ids[:n])
        close(mine[row], logits)
        assert drafted[row].tolist() == tokens


def our_counts(params, prompt, budget):
    """Tokens and accepted counts per round of ours."""
    call = calls.plan(params, [prompt], max_new_tokens=budget, ignore_eos=True)
    jobs = list(loop.serve(*call.engines(), call.jobs, call.drive))
    return jobs[-1].tokens, [r[2] - 1 for r in jobs[-1].rounds]


BUDGET = 60


#: Seeds of target and assistant for which a random assistant is right now and then, in texts that do not cycle at once.
SEEDS = {"gemma4_e2b": (0, 1), "gemma4_dense": (1, 2)}


@pytest.mark.long
@pytest.mark.parametrize("name", SEEDS)
def test_generation_accepts_the_same_counts(tmp_path, monkeypatch, name):
    """PEER.9, KVR.3: the candidate generator's tokens and matches, round after round; the last, which it shortens,
    apart."""
    teacher, made = ref.teacher(name, FEW, SEEDS[name][0]), ref.assistant(name, FEW, SEEDS[name][1])
    params, _ = load(teacher, made, tmp_path)
    tokens, counts, _ = ref.generate(teacher, made, PROMPT, BUDGET, monkeypatch)
    mine, accepted = our_counts(params, PROMPT, BUDGET)
    assert mine == tokens
    assert accepted[: len(counts)] == counts
    assert {0, 1, 2} < {*counts}
    assert sum(n > 0 for n in counts) >= 10


@pytest.mark.long
def test_accepted_counts_show_faults(tmp_path):
    """TAP.6: the comparison notices a position that is one off, and a window that is two off."""
    teacher, made = ref.teacher("gemma4_e2b", FEW, 0), ref.assistant("gemma4_e2b", FEW, 1)
    right = our_counts(load(teacher, made, tmp_path)[0], PROMPT, BUDGET)[1]
    short = dict(made.config.text_config.to_dict(), sliding_window=6)
    for change in ({"position_offset": 0}, {"text": short}):
        assert our_counts(load(teacher, made, tmp_path, **change)[0], PROMPT, BUDGET)[1] != right


def spoiled(truth, seed=0):
    """Drafts that are right up to a random place."""
    rng = np.random.default_rng(seed)

    def told(text):
        drafts = truth[len(text) : len(text) + K]
        for i in range(int(rng.integers(0, K + 1)), len(drafts)):
            drafts[i] = (drafts[i] + 1) % 128
        return drafts

    return told


@pytest.mark.parametrize("cached", [False, pytest.param(True, marks=LONG)])
@pytest.mark.parametrize("case", ["keys_are_values", pytest.param("shared_layers", marks=LONG)])
def test_every_round_of_an_oracle(tmp_path, monkeypatch, case, cached):
    """KVR.3, KVR.4: with drafts right up to a random place, every round's logits are those of a fresh pass, and the
    counts the generator's. With drafts that are all right they are also its own, from its cache."""
    (name, more), budget = CASES[case], 30
    made, teacher = ref.assistant(name, **more), ref.teacher(name)
    params, _ = load(teacher, made, tmp_path)
    truth, spoken = ref.greedy(teacher, PROMPT, budget + K + 1), []
    oracle = spoiled(truth) if not cached else lambda text: truth[len(text) : len(text) + K]

    def told(text):
        spoken.append(oracle(text))
        return spoken[-1]

    tokens, counts, logits = ref.generate(
        teacher, made, PROMPT, budget, monkeypatch, cached=cached, told=told
    )
    assert tokens == truth[len(PROMPT) :][:budget]
    assert {*counts} >= ({K} if cached else {*range(K + 1)})
    replay(params, budget, spoken, counts, logits)


def replay(params, budget, spoken, counts, logits):
    """Our rounds with the same drafts: the same logits before each and the same counts."""
    pair, weights = params.meta.pair, (params.target, params.drafter)
    state = specjax.start(params, [PROMPT], k=K, max_new_tokens=budget, ignore_eos=True)
    verify = jax.jit(lambda state, proposal: rnd.verify(pair, weights, state, proposal)[:2])
    for drafts, count, theirs in zip(spoken, counts, logits, strict=False):
        if len(theirs) < K:  # the generator shortens its last block
            break
        close(ours(params.meta)(params, state)[0][0], theirs)
        proposal = specjax.Proposal(np.array([drafts], np.int32), np.array([K], np.int32))
        state, verdict = verify(state, proposal)
        assert int(verdict.accepted[0]) == count
