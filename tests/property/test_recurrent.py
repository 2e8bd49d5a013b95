"""Recurrent state with a replay tape: bit for bit a snapshot per position, and exact in decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import hybrid
from pairwise import name, pairwise, product
from tiny_models import VOCAB as CHAT_VOCAB, tokenizer_folder, with_meta
from told import MODES, NEW, PROMPTS, expect_acceptance, told, unused

import specjax
from specjax import registry
from specjax.core.recurrent import Recurrent
from specjax.drafters import draft_model
from specjax.layers import delta
from specjax.targets import qwen3_5
from specjax.types import TapSpec

ROWS, Q_MAX = 3, 6


# ---------------------------------------------------------------- the tape against snapshots


@functools.cache
def _routine(mode: str):
    params = hybrid()
    weights, cfg = params.target.layers[0].mixer, params.meta.target_cfg
    return jax.jit(lambda *args: qwen3_5._recur(weights, cfg, *args, mode))


@functools.cache
def _extend(mode: str):
    params = hybrid()
    run = functools.partial(qwen3_5._recur, params.target.layers[0].mixer, params.meta.target_cfg)
    return jax.jit(lambda cache, inputs, valid: cache.extend(inputs, valid, mode, run))


def empty(dtype=jnp.float32) -> Recurrent:
    cfg = hybrid().meta.target_cfg
    return qwen3_5.init_cache(cfg, ROWS, 8, Q_MAX, dtype)[0]


def inputs(rng, width: int, dtype=jnp.float32) -> qwen3_5.Inputs:
    """Random input of one block; decays from almost none to almost everything."""
    cfg = hybrid().meta.target_cfg
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
        settled = _extend("extend")(cache, block, nothing)[1]  # prefill replays too
        equal(settled.state, memory)
        equal(settled.pending, nothing)


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
    cfg = hybrid().meta.target_cfg
    mixed = rng.standard_normal((ROWS, width, cfg.channels))
    if keys == "same":  # every correction depends on all before it: an inverse by powers would blow up
        mixed[:] = mixed[:1, :1]
    decay = -forgets * rng.random((ROWS, width, cfg.value_heads))
    beta = np.ones_like(decay) if keys == "same" else rng.random(decay.shape)
    gone = np.arange(width) >= np.asarray(valid)[:, None]
    arrays = [np.where(gone[..., None], np.nan, x) for x in (mixed, decay, beta)]
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    return delta.block(*arrays, jnp.asarray(valid), cfg.key_heads, cfg.key_size)


@pytest.mark.parametrize(
    ("width", "size", "keys", "forgets"),
    [(37, 8, "random", 1.0), (64, 64, "same", 0.01), (21, 64, "random", 30.0)],
)
def test_chunks_equal_positions(width, size, keys, forgets):
    """PFX.1, NUM.1: several chunks and part of one, equal keys, decays that underflow, ragged ends."""
    rng = np.random.default_rng(3)
    valid = [width, width // 2, 0]
    block = random_block(rng, width, valid, keys, forgets)
    start = jnp.asarray(rng.standard_normal((ROWS, 2, 8, 8)), jnp.float32)
    want, state = jax.jit(delta.scan_delta)(start, block)
    got, after = jax.jit(functools.partial(delta.chunk_delta, size=size))(start, block)
    scale = float(jnp.abs(want).max())
    for b, n in enumerate(valid):
        np.testing.assert_allclose(got[b, :n], want[b, :n], atol=2e-5 * scale, rtol=0)
    np.testing.assert_allclose(after, state, atol=2e-5 * float(jnp.abs(state).max()), rtol=0)
    np.testing.assert_array_equal(after[2], start[2])  # nothing valid: not a bit


# ---------------------------------------------------------------- decoding


@functools.cache
def plain(moe: bool = False) -> list[list[int]]:
    return specjax.decode(hybrid(moe=moe), PROMPTS, max_new_tokens=NEW, rows=3).tokens


BATCHES = {"one": (1, 1), "ragged": (3, 3), "refill": (5, 3)}
DRIVING = {"loop": ("device", "host"), "rounds": (1, 3, 16), "batch": tuple(BATCHES)}
SCRIPTED = {"mode": (*MODES, "MIXED"), "k": range(1, 9), **DRIVING}


def decodes(case, drafter="TOLD", moe=False):
    """Ids of plain decoding, and the acceptance that belongs to the drafter."""
    count, rows = BATCHES[case["batch"]]
    tokens = plain(moe)
    modes = [case["mode"]] * len(PROMPTS)
    if case["mode"] == "MIXED":
        modes = [MODES[i % 4] for i in range(len(PROMPTS))]
    stop = unused(tokens)
    params = told(modes, tokens, base=hybrid(moe=moe), stop=stop, name=drafter)
    out = specjax.decode(
        params,
        PROMPTS[:count],
        max_new_tokens=NEW,
        rows=rows,
        stop=[stop],
        **{key: case[key] for key in ("k", "loop", "rounds")},
    )
    assert out.tokens == tokens[:count]
    for mode, stats in zip(modes, out.stats, strict=False):
        expect_acceptance(mode, case["k"], 0, stats)


@pytest.mark.parametrize("case", pairwise(SCRIPTED | {"k": (3,), "batch": ("refill",)}), ids=name)
def test_scripted_drafters(case):
    """GRD.1, KVR.5, BAT.4: wrong, right and mixed drafts, both loops, rows refilled."""
    decodes(case)


@pytest.mark.parametrize("mode", ["RANDOM_COUNT", "EVERY_THIRD_WRONG"])
def test_narrow_widths(mode):
    """KVR.6: rounds that verify fewer positions than the tape is wide."""
    decodes({"mode": mode, "k": 4, "loop": "device", "rounds": 16, "batch": "ragged"}, "TOLD_VARIABLE")


def test_features_in_order():
    """KVR.4, I3: hidden states and embeddings reach a drafter for exactly what was committed."""
    params = told(
        ["EVERY_THIRD_WRONG"] * len(PROMPTS), plain(), base=hybrid(), stop=unused(plain()), name="WITNESS"
    )
    out = specjax.decode(params, PROMPTS[:3], max_new_tokens=NEW, rows=3, k=3)
    assert out.tokens == plain()[:3]
    assert all(s.accepted > 0 for s in out.stats)


@pytest.mark.long
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("k", SCRIPTED["k"])
def test_scripted_drafters_all(k, moe):
    """GRD.1, KVR.5: the whole product."""
    for case in product(SCRIPTED | {"k": (k,)}):
        decodes(case, moe=moe)
        decodes(case, "TOLD_VARIABLE", moe=moe)


def test_plain_decoding_equals_whole_passes():
    """TGT: ids without a cache, by one forward pass per token over everything so far."""
    params, size = hybrid(), 48
    family, cfg = registry.target(params.meta.family), params.meta.target_cfg

    @jax.jit
    def best(tokens, length):
        cache = family.init_cache(cfg, 1, size, 1, jnp.float32)
        pos = jnp.arange(size, dtype=jnp.int32)[None]
        out = family.forward(params.target, cfg, tokens, pos, length, cache, TapSpec(), "extend")
        return jnp.argmax(family.unembed(params.target, cfg, out.hidden[0, length[0] - 1]))

    text = np.zeros((1, size), np.int32)
    text[0, : len(PROMPTS[1])] = PROMPTS[1]
    for i in range(len(PROMPTS[1]), len(PROMPTS[1]) + NEW):
        text[0, i] = best(text, jnp.array([i], jnp.int32))
    assert text[0, len(PROMPTS[1]) :][:NEW].tolist() == plain()[1]


# ---------------------------------------------------------------- what cannot be cut back


def test_conversations_start_over():
    """PFX.2: a recurrent state cannot be cut back, so every turn is computed from the beginning, and equals a
    fresh run over the whole conversation."""
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    params = with_meta(hybrid(CHAT_VOCAB), tokenizer_id=tokenizer_folder(), chat_template=template)
    chat = specjax.chat(params, max_new_tokens=8)
    for said in ("hello", "cab"):
        out = chat.send(said)
        assert chat.reused == 0
        again = specjax.decode(params, chat.messages[:-1], max_new_tokens=8)
        assert out.tokens == again.tokens


def test_refused_as_a_draft_model():
    """KVR.5: refused with the reason rather than rolled back wrongly."""
    cfg = hybrid().meta.target_cfg
    with pytest.raises(ValueError, match="cannot take back rejected drafts"):
        draft_model.config({"family": "qwen3_5_text", "model": cfg}, cfg)


def test_texts_are_worth_testing():
    """Every prompt is continued differently, and by many different tokens."""
    assert len({tuple(t) for t in plain()}) == len(PROMPTS)
    assert all(len(set(t)) > 4 for t in plain())
