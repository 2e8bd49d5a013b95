"""Serial drafters stepped as decoding steps them: absorbed text, then one cached pass per draft.

What training must reproduce, for every anchor of a text: batch row b has absorbed the pairs 0 to b.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packing

from specjax import registry
from specjax.drafters import assistant, assistant_model, eagle3, eagle3_model, mtp, mtp_model, serial
from specjax.train import features, methods, serial as unrolled
from specjax.train.methods import assistant as training_assistant
from specjax.train.serial import Rows
from specjax.train.types import Batch
from specjax.types import AbsorbIn, Ctx, KVView, Pair, Params, TapSpec

K, LENGTH = 4, 24
#: Documents longer than the windows there are; one of a single token.
LENGTHS = [[14, 9], [3, 1, 11], [22]]


def lent(params: Params):
    return registry.target(params.meta.family).shared(params.target, params.meta.target_cfg)


@functools.partial(jax.jit, static_argnums=(1, 3))
def _extract(target, pair, batch, needs):
    return features.extract(target, pair, batch, needs)


def features_of(params: Params, batch: Batch):
    """All of the target's features of a batch."""
    cfg = params.meta.target_cfg
    pair = Pair(params.meta.family, cfg)
    return _extract(
        params.target, pair, batch, TapSpec(tuple(range(cfg.num_layers + 1)), hidden=True, kv=True)
    )


def alone(batch: Batch, found, row: int, document: int, length: int):
    """(tokens, features) of one document cut out of its row, padded to ``length``."""
    batch, found = jax.device_get((batch, found))  # nothing is compiled for the lengths of texts
    at = np.flatnonzero(batch.doc[row] == document)
    cut = lambda x: np.pad(x[row, at], ((0, length - len(at)), *((0, 0),) * (x.ndim - 2)))  # noqa: E731
    view = lambda v: KVView(  # noqa: E731
        cut(v.k.swapaxes(1, 2)).swapaxes(0, 1)[None],
        cut(v.v.swapaxes(1, 2)).swapaxes(0, 1)[None],
        np.arange(length, dtype=np.int32)[None],
    )
    parts = found.replace(
        hidden=cut(found.hidden),
        taps={j: cut(x) for j, x in found.taps.items()},
        kv=None if found.kv is None else {kind: view(v) for kind, v in found.kv.items()},
    )
    return at, cut(batch.tokens), parts


@functools.partial(jax.jit, static_argnums=(2, 5))
def stepped(p, shared, cfg, tokens, found, k: int):
    """(states [k N D] with the text's tokens fed, drafts [N k] with its own) for every anchor 1 to N of a text of
    ``N + 1 + k`` or more tokens; what lies beyond a text's end is to be ignored."""
    module, step = {
        eagle3.Config: (eagle3, _eagle3),
        mtp.Config: (mtp, _mtp),
        assistant.Config: (assistant, _assistant),
    }[type(cfg)]
    n = tokens.shape[0] - k
    every = lambda x: jnp.broadcast_to(x, (n, *x.shape))  # noqa: E731
    keep = jnp.arange(1, n + 1)
    block = AbsorbIn(
        every(tokens[:n]),
        every(tokens[1 : n + 1]),
        every(jnp.arange(n, dtype=jnp.int32)),
        keep,
        every(found.hidden[:n]),
        {j: every(x[:n]) for j, x in found.taps.items()},
        "extend",
    )
    held = module.absorb(p, shared, cfg, module.init_state(cfg, n, n + k, k + 1, p.norm.dtype), block)
    views = lambda kind: jax.tree.map(lambda x: every(x[0]), found.kv[kind])  # noqa: E731
    ctx = Ctx(every(tokens), keep + 1, tokens[1 : n + 1], jnp.ones(n, bool), None, views)
    drafts = module.draft(p, shared, cfg, k, held, ctx, None)[0].tokens
    fed = jnp.stack([tokens[1 + i : 1 + i + n] for i in range(k)])  # token p + 1 + i of row p
    return jnp.stack(step(p, shared, cfg, held, ctx, keep, fed)), drafts


def _eagle3(p, shared, cfg, held, ctx, keep, fed):
    state, cache, out = held.feedback, held.cache, [held.feedback]
    for i, tokens in enumerate(fed[1:], 1):
        embedded = serial.embed(p.embed, shared.embed, tokens[:, None], p.norm.dtype)
        at = serial.drafted((keep - 1 + i)[:, None])
        y, cache = eagle3_model.run(p, cfg, embedded, state[:, None], at, cache)
        state = eagle3_model.recycled(p, cfg, y)
        out.append(state)
    return out


def _mtp(p, shared, cfg, held, ctx, keep, fed):
    state, cache, out = held.feedback, held.cache, [held.feedback]
    for i, tokens in enumerate(fed[1:], 1):
        embedded = serial.embed(p.embed, shared.embed, tokens[:, None], p.norm.dtype)
        state, cache = mtp_model.run(
            p, cfg, embedded, state[:, None], serial.drafted((keep - 1 + i)[:, None]), cache
        )
        out.append(state)
    return out


def _assistant(p, shared, cfg, held, ctx, keep, fed):
    seen, state, out = assistant_model.look(p, cfg, ctx), held.feedback, []
    for tokens in fed:
        out.append(assistant_model.run(p, cfg, shared, seen, tokens, state))
        state = assistant_model.recycled(p, out[-1])
    return out


def leading(right: Any) -> np.ndarray:
    """How many are true before the first that is not."""
    return np.cumprod(np.asarray(right), -1, dtype=int).sum(-1)


def batch_for(params, seed: int = 0):
    vocab = params.meta.target_cfg.vocab_size
    return packing.packed(packing.random_rows(vocab, LENGTHS, seed), LENGTH)


@functools.partial(jax.jit, static_argnums=(2, 6))
def states_of(p, shared, cfg, batch, found, index, k: int):
    """States of every step of the rows ``index`` (None: all)."""
    rows = Rows(index, batch.doc >= 0 if index is None else jnp.ones(index.shape, bool))
    name = type(cfg).__module__.rpartition(".")[2].removesuffix("_config")
    if name == "assistant":
        return jnp.stack(training_assistant.unroll(p, shared, cfg, batch, found, rows, k))
    module = methods.method(name)
    return jnp.stack(
        unrolled.unroll(module.net(p, shared, cfg), batch, module.feature(p, cfg, batch, found), rows, k)
    )


@functools.partial(jax.jit, static_argnums=(0, 3, 6))
def matches_of(module, p, shared, cfg, batch, found, k: int):
    return module.matches(p, shared, cfg, batch, found, k)
