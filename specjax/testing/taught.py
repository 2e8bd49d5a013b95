"""A tiny target that has learned a few talks by heart: its answers have a structure that a drafter can learn."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax import checkpoints, registry
from specjax.checkpoints.tokenizer import BYTES, ByteTokenizer
from specjax.config import Meta
from specjax.testing.models import random_weights, tiny_config
from specjax.train import packed
from specjax.types import Params, TapSpec

#: Rows of the embedding: bytes, the two marks of the byte tokenizer, and some that are in no text.
VOCAB = 264


def taught(
    talks: Sequence[tuple[str, str]],
    *,
    steps: int = 300,
    rows: int = 8,
    learning_rate: float = 6e-3,
    seed: int = 0,
    **config: int,
) -> Params:
    """A float32 Llama of some 0.2 million parameters over bytes, fitted to questions and answers.

    Args:
        talks: (question, answer); each is a row, so all are padded to the longest.
        steps: of Adam, on ``rows`` talks each, by chance; the rate falls from ``learning_rate`` to 0 on a cosine.
        seed: of weights and choices.
        config: sizes, see :func:`specjax.testing.tiny_config`; default: two layers of width 64.

    Raises ValueError for no talks, and for talks longer than the target's positions (512 unless told otherwise).
    """
    if not talks:
        raise ValueError("nothing to learn: talks are (question, answer) pairs")
    hf = tiny_config(VOCAB, **{"width": 64, "layers": 2, "head_dim": 16, **config})
    family, template = registry.target("llama"), checkpoints.tokenizer.get(BYTES).chat_template
    cfg, eos = family.config(hf), (ByteTokenizer.EOS,)
    text = {"tokenizer_id": BYTES, "chat_template": template}
    meta = Meta(family="llama", target_cfg=cfg, eos_ids=eos, name="taught", **text)
    tokens, inside = _encoded(talks)
    if tokens.shape[1] > (limit := hf["max_position_embeddings"]):
        raise ValueError(f"a talk of {tokens.shape[1]} bytes is beyond the {limit} positions of the target")
    order = np.random.default_rng(seed).integers(0, len(talks), (steps, rows))
    target = random_weights(family.abstract(cfg), seed)
    return Params(_fitted(target, meta, tokens[order], inside[order], learning_rate), None, meta)


def _encoded(talks: Sequence[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids ``[N T]`` of whole talks as decoding would have them, padded with 0, and which of them are answers."""
    tokenizer = checkpoints.tokenizer.get(BYTES)
    prompts = [tokenizer.chat([{"role": "user", "content": question}]) for question, _ in talks]
    answers = [[*tokenizer.encode(answer, False), ByteTokenizer.EOS] for _, answer in talks]
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    tokens, inside = np.zeros((len(talks), longest), np.int32), np.zeros((len(talks), longest), bool)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens[i, :end], inside[i, len(prompt) : end] = prompt + answer, True
    return tokens, inside


def _fitted(target: Any, meta: Meta, tokens: np.ndarray, answers: np.ndarray, rate: float) -> Any:
    """Weights after one step per entry of ``tokens [steps R T]``, fitted to the answers."""
    family, cfg, pair = registry.target(meta.family), meta.target_cfg, meta.pair
    steps, rows, width = tokens.shape
    pos = jnp.broadcast_to(jnp.arange(width), (rows, width))
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(rate, steps), b2=0.95)
    )

    def loss(weights, ids, inside):
        cache = packed.caches(pair, jnp.zeros_like(ids), pos, jnp.float32)
        out = family.forward(weights, cfg, ids, pos, jnp.full(rows, width), cache, TapSpec(), "extend")
        logits = family.unembed(weights, cfg, out.hidden)[:, :-1]
        terms = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
        return jnp.mean(terms, where=inside[:, 1:])

    @jax.jit
    def step(weights, state, ids, inside):
        grads = jax.grad(loss)(weights, ids, inside)
        updates, state = optimiser.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    weights, state = target, optimiser.init(target)
    for ids, inside in zip(tokens, answers, strict=True):
        weights, state = step(weights, state, ids, inside)
    return weights
