"""Recurrent state with a replay tape: bit for bit a snapshot per position."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import target
from tiny_models import VOCAB as CHAT_VOCAB, tokenizer_folder, with_meta

import specjax
from specjax.core import recurrent
from specjax.core.recurrent import Recurrent
from specjax.drafters import draft_model
from specjax.layers import delta
from specjax.targets import qwen3_5
from specjax.types import tree_bytes

ROWS, Q_MAX = 3, 6


# ---------------------------------------------------------------- the tape against snapshots


@functools.cache
def _routine(mode: str):
    params = target()
    weights, cfg = params.target.layers[0].mixer, params.meta.target_cfg
    return jax.jit(lambda *args: qwen3_5._recur(weights, cfg, *args, mode))


@functools.cache
def _extend(mode: str):
    params = target()
    run = functools.partial(qwen3_5._recur, params.target.layers[0].mixer, params.meta.target_cfg)
    return jax.jit(lambda cache, inputs, valid: cache.extend(inputs, valid, mode, run))


def empty(dtype=jnp.float32) -> Recurrent:
    cfg = target().meta.target_cfg
    return qwen3_5.init_cache(cfg, ROWS, 8, Q_MAX, dtype)[0]


def inputs(rng, width: int, dtype=jnp.float32) -> qwen3_5.Inputs:
    """Random input of one block; decays from almost none to almost everything."""
    cfg = target().meta.target_cfg
    draw = lambda size: rng.standard_normal((ROWS, width, size)).astype(np.float32)  # noqa: E731
    decay = -np.exp(2 * draw(cfg.value_heads))
    beta = 1 / (1 + np.exp(-draw(cfg.value_heads)))
    return qwen3_5.Inputs(jnp.asarray(draw(cfg.channels), dtype), jnp.asarray(decay), jnp.asarray(beta))


def snapshots(memory, block: qwen3_5.Inputs):
    """The state before the block and after each of its positions, fed one by one, and the outputs."""
    kept, outs = [memory], []
    for i in range(block.beta.shape[1]):
        one = jax.tree.map(lambda x, i=i: x[:, i : i + 1], block)
        out, memory = _routine("verify")(memory, one, jnp.ones((ROWS,), jnp.int32))
        kept.append(memory)
        outs.append(out)
    return kept, jnp.concatenate(outs, 1)


def chosen(kept, count):
    """Row b of snapshot ``count[b]``."""
    return jax.tree.map(lambda *x: np.stack([np.asarray(x[n])[b] for b, n in enumerate(count)]), *kept)


def equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def spoiled(block, count):
    """The block with NaN in every position at or beyond ``count``: what was rejected may be anything."""
    gone = np.arange(block.beta.shape[1]) >= np.asarray(count)[:, None]
    return jax.tree.map(lambda x: jnp.where(gone[..., None], jnp.nan, x), block)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tape_equals_snapshots(dtype):
    """KVR.5: after any commits, of blocks of any width, the state has the bits of a snapshot taken at the last
    kept position; outputs are those of one position at a time. NUM.1: rejected NaN stays out."""
    rng = np.random.default_rng(0)
    cache, memory = empty(dtype), empty(dtype).state
    nothing = jnp.zeros((ROWS,), jnp.int32)
    for width in (6, 3, 6, 3, 6):
        count = rng.integers(0, width + 1, ROWS)
        block = inputs(rng, width, dtype)
        out, _ = _extend("verify")(cache, block, jnp.full((ROWS,), width))
        _, cache = _extend("verify")(cache, spoiled(block, count), jnp.full((ROWS,), width))
        cache = cache.commit(jnp.asarray(count))
        equal(cache.pending, count)
        kept, outs = snapshots(memory, block)
        equal(out, outs)
        memory = chosen(kept, count)
        settled = _extend("extend")(cache, inputs(rng, Q_MAX, dtype), nothing)[1]  # prefill replays too
        equal(settled.state, memory)
        equal(settled.pending, nothing)


def test_bytes_of_tapes_and_of_what_they_replace():
    """PRF.5: those of the arrays there are, and of the snapshots a block of that width would leave."""
    cfg = target().meta.target_cfg
    cache = qwen3_5.init_cache(cfg, ROWS, 8, Q_MAX, jnp.float32)
    layers = [layer for layer in cache if isinstance(layer, Recurrent)]
    kept, _ = snapshots(layers[0].state, inputs(np.random.default_rng(0), Q_MAX))
    told = recurrent.held({"target": cache, "drafter": ()})
    assert told.state == len(layers) * tree_bytes(kept[0]) == tree_bytes([x.state for x in layers])
    assert told.tape == sum(x.nbytes for x in jax.tree.leaves([layer.tape for layer in layers]))
    assert told.snapshots == len(layers) * tree_bytes(kept[1:])
    dense = [layer for layer in cache if not isinstance(layer, Recurrent)]
    assert recurrent.held(dense) == (0, 0, 0)


def test_shapes_never_depend_on_what_was_kept():
    """KVR.6: one program for every accepted length; a narrow block leaves the tape as wide as it was."""
    cache, rng = empty(), np.random.default_rng(1)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), cache)
    for width in (1, 3, 6):
        cache = _extend("verify")(cache, inputs(rng, width), jnp.full((ROWS,), width))[1].commit(
            jnp.array([0, 1, width])
        )
        assert jax.tree.map(lambda x: (x.shape, x.dtype), cache) == shapes


def test_finished_rows_stand_still():
    """I4: a row that commits nothing keeps its bits through any number of blocks."""
    cache, rng = empty(), np.random.default_rng(2)
    cache = _extend("extend")(cache, inputs(rng, 6), jnp.array([6, 4, 0]))[1]
    before = jax.tree.map(np.asarray, cache.state)
    for _ in range(3):
        cache = _extend("verify")(cache, inputs(rng, 6), jnp.full((ROWS,), 6))[1].commit(jnp.array([0, 6, 0]))
    cache = _extend("verify")(cache, inputs(rng, 6), jnp.full((ROWS,), 6))[1]
    still = jax.tree.map(lambda a, b: (a[[0, 2]], np.asarray(b)[[0, 2]]), before, cache.state)
    jax.tree.map(
        lambda pair: np.testing.assert_array_equal(*pair), still, is_leaf=lambda x: isinstance(x, tuple)
    )
    assert (np.asarray(cache.state.matrix)[1] != before.matrix[1]).any()


# ---------------------------------------------------------------- chunks against positions


def random_block(rng, width, valid, keys="random", forgets=1.0):
    cfg = target().meta.target_cfg
    mixed = rng.standard_normal((ROWS, width, cfg.channels))
    if keys == "same":  # every correction depends on all before it: an inverse by powers would blow up
        mixed[:] = mixed[:1, :1]
    decay = -forgets * rng.random((ROWS, width, cfg.value_heads))
    beta = np.ones_like(decay) if keys == "same" else rng.random(decay.shape)
    gone = np.arange(width) >= np.asarray(valid)[:, None]
    arrays = [np.where(gone[..., None], np.nan, x) for x in (mixed, decay, beta)]
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    return delta.block(*arrays, jnp.asarray(valid), cfg.key_heads, cfg.key_size)


_positions = jax.jit(delta.scan_delta)
_chunks = jax.jit(delta.chunk_delta, static_argnames="size")


@pytest.mark.parametrize(
    ("width", "size", "keys", "forgets"),
    [(60, 16, "random", 1.0), (60, 64, "same", 0.01), (60, 64, "random", 30.0)],
)
def test_chunks_equal_positions(width, size, keys, forgets):
    """PFX.1, NUM.1: several chunks and part of one, equal keys, decays that underflow, ragged ends."""
    rng = np.random.default_rng(3)
    valid = [width, width // 2, 0]
    block = random_block(rng, width, valid, keys, forgets)
    start = jnp.asarray(rng.standard_normal((ROWS, 2, 8, 8)), jnp.float32)
    want, state = _positions(start, block)
    got, after = _chunks(start, block, size=size)
    scale = float(jnp.abs(want).max())
    for b, n in enumerate(valid):
        np.testing.assert_allclose(got[b, :n], want[b, :n], atol=2e-5 * scale, rtol=0)
    np.testing.assert_allclose(after, state, atol=2e-5 * float(jnp.abs(state).max()), rtol=0)
    np.testing.assert_array_equal(after[2], start[2])  # nothing valid: not a bit


# ---------------------------------------------------------------- what cannot be cut back


def test_conversations_start_over():
    """PFX.2: a recurrent state cannot be cut back, so every turn is computed from the beginning, and equals a
    fresh run over the whole conversation."""
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    params = with_meta(target(vocab=CHAT_VOCAB), tokenizer_id=tokenizer_folder(), chat_template=template)
    chat = specjax.chat(params, max_new_tokens=8)
    for said in ("hello", "cab"):
        out = chat.send(said)
        assert chat.reused == 0
        again = specjax.decode(params, chat.messages[:-1], max_new_tokens=8)
        assert out.tokens == again.tokens


def test_refused_as_a_draft_model():
    """KVR.5: refused with the reason rather than rolled back wrongly."""
    cfg = target().meta.target_cfg
    with pytest.raises(ValueError, match="cannot take back rejected drafts"):
        draft_model.config({"family": "qwen3_5_text", "model": cfg}, cfg)
