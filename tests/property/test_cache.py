"""Key/value caches against slow Python ones, and a windowed target across the edge of its ring."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from pairwise import name, pairwise
from told import MODES, TEXTS, cut, told, unused, with_drafter

import specjax
from specjax import testing
from specjax.core.cache import DenseKV, RingKV, positions
from specjax.layers.attention import attend
from specjax.types import tree_bytes

B, G, C, Q_MAX, WINDOW, SLOTS = 3, 1, 2, 4, 5, 48
WIDE = 13  # an extend chunk longer than the ring of WINDOW + Q_MAX slots


def make(kind: str):
    if kind == "dense":
        return DenseKV.create(B, G, SLOTS, C, jnp.float32)
    return RingKV.create(B, G, WINDOW, Q_MAX, C, jnp.float32)


@functools.partial(jax.jit, static_argnames="mode")
def extend(cache, k, v, pos, valid, mode):
    return cache.extend(k, v, pos, valid, mode)


@jax.jit
def attended(keys, values, pos, key_pos, windowed):
    q = jnp.ones((B, pos.shape[1], G, C))
    full, near = (attend(q, keys, values, pos, key_pos, 1.0, w) for w in (None, WINDOW))
    return jnp.where(windowed, near, full)


class Slow:
    """What each row has committed: a dict from position to the number that was written there."""

    def __init__(self):
        self.rows = [{} for _ in range(B)]

    def visible(self, row: int, at: int, window: int | None) -> dict[int, float]:
        """Numbers a query at a position must see, each once."""
        low = -1 if window is None else at - window
        return {p: n for p, n in self.rows[row].items() if low < p <= at}

    def write(self, row: int, start: int, numbers) -> None:
        """Cut back to ``start`` and write on from there."""
        self.rows[row] = {p: n for p, n in self.rows[row].items() if p < start}
        self.rows[row].update({start + i: float(n) for i, n in enumerate(numbers)})


class Walk:
    """A random life of a cache: chunks, verified blocks and rejections, rows at their own places."""

    def __init__(self, kind: str, seed: int):
        self.kind, self.rng = kind, np.random.default_rng(seed)
        self.window = WINDOW if kind == "ring" else None
        self.cache, self.slow, self.serial = make(kind), Slow(), 0
        self.length = np.zeros(B, int)  # committed positions per row

    def block(self, width: int):
        """Keys and values that are unlike any others; values carry their serial number."""
        numbers = self.serial + 1 + np.arange(B * width).reshape(B, width)
        self.serial += B * width
        k = self.rng.standard_normal((B, width, G, C)).astype(np.float32)
        return numbers, k, np.broadcast_to(numbers[..., None, None], (B, width, G, C)).astype(np.float32)

    def step(self, mode: str, width: int, valid):
        """Run a block from each row's own length and check what every valid query sees."""
        numbers, k, v = self.block(width)
        pos = self.length[:, None] + np.arange(width)
        keys, values, key_pos, self.cache = extend(
            self.cache, k, v, pos.astype(np.int32), np.asarray(valid), mode
        )
        key_pos = positions(key_pos)
        for b in range(B):
            self.slow.write(b, self.length[b], numbers[b, : valid[b]])
            for i in range(valid[b]):
                wanted = self.slow.visible(b, pos[b, i], self.window)
                assert self.seen(values[b], key_pos[b], pos[b, i]) == sorted(wanted.items())
        return keys, values, key_pos, pos

    def seen(self, values, key_pos, at: int) -> list[tuple[int, float]]:
        """(position, number) of every key that the position mask shows, doubles included."""
        key_pos = np.asarray(key_pos)
        ok = (key_pos >= 0) & (key_pos <= at)
        ok &= key_pos > at - self.window if self.window else ok
        return sorted(zip(key_pos[ok].tolist(), np.asarray(values)[0, ok, 0].tolist(), strict=True))

    def extend(self, width: int):
        """A chunk of prefill: some rows have fewer valid positions, some none."""
        valid = self.rng.integers(0, width + 1, B)
        if self.length.max() + width <= SLOTS:
            self.step("extend", width, valid)
            self.length += valid

    def verify(self, width: int):
        """A block of drafts: everything is written, ``emitted`` of it stays (0: a finished row)."""
        if self.length.max() + width > SLOTS:
            return
        self.step("verify", width, np.full(B, width))
        emitted = self.rng.integers(0, width + 1, B)
        self.cache = self.cache.commit(jnp.asarray(emitted, jnp.int32))
        self.length += emitted
        for b in range(B):
            self.slow.write(b, self.length[b], [])


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.sampled_from([1, 4, WIDE])),
        st.tuples(st.just("verify"), st.sampled_from([1, Q_MAX])),
    ),
    min_size=3,
    max_size=14,
)


@pytest.mark.parametrize("kind", ["dense", "ring"])
@settings(max_examples=40)
@given(actions=ACTIONS, seed=st.integers(0, 2**31))
def test_queries_see_what_is_committed(kind, actions, seed):
    """KVR.1, KVR.2, I2: every query sees each committed position (of its window) once, with the value last
    written there, and nothing else: ragged rows, padding, chunks longer than the ring, wraps, rejections of
    a part of a block and of all of it."""
    walk = Walk(kind, seed)
    for action, width in actions:
        getattr(walk, action)(width)


@pytest.mark.parametrize("kind", ["dense", "ring"])
@pytest.mark.parametrize("emitted", range(Q_MAX + 1))
def test_rejections_at_the_wrap(kind, emitted):
    """KVR.2: blocks of the largest width, all of them cut to ``emitted``, three times around the ring."""
    walk = Walk(kind, 0)
    walk.extend(4)
    for _ in range(8 if emitted else 3):
        walk.step("verify", Q_MAX, np.full(B, Q_MAX))
        walk.length += emitted
        for b in range(B):
            walk.slow.write(b, walk.length[b], [])


def poisoned(cache, length):
    """Every entry at or beyond a row's length spoiled; of a ring, every entry but the last window.

    Keys may be NaN; values are large: a cache never holds one that is not finite.
    """
    if isinstance(cache, DenseKV):
        bad = np.arange(SLOTS) >= length[:, None]
    else:
        pos = np.asarray(cache.pos)
        bad = (pos < 0) | (pos >= length[:, None]) | (pos < length[:, None] - WINDOW)
    spoil = lambda x, value: jnp.where(bad[:, None, :, None], value, x)  # noqa: E731
    return cache.replace(k=spoil(cache.k, jnp.nan), v=spoil(cache.v, 1e30))


@pytest.mark.parametrize("kind", ["dense", "ring"])
@settings(max_examples=25)
@given(actions=ACTIONS, seed=st.integers(0, 2**31), mode=st.sampled_from(["extend", "verify"]))
def test_garbage_has_no_influence(kind, actions, seed, mode):
    """I2, BAT.5: NaN in slots that hold nothing committed does not reach valid queries, whether the block is
    verified or a padded chunk."""
    walk = Walk(kind, seed)
    for action, width in actions:
        getattr(walk, action)(width)
    walk.length = np.minimum(walk.length, SLOTS - 4)  # room for one more block
    if isinstance(walk.cache, RingKV) and np.any(walk.length < np.asarray(walk.cache.pos).max(1) - 3):
        return  # a ring cannot be cut back that far
    _, k, v = walk.block(4)
    pos = jnp.asarray(walk.length[:, None] + np.arange(4), jnp.int32)
    valid = np.full(B, 4) if mode == "verify" else walk.rng.integers(0, 5, B)
    outs = []
    for cache in (walk.cache, poisoned(walk.cache, walk.length)):
        keys, values, key_pos, _ = extend(cache, k, v, pos, valid, mode)
        outs.append(np.asarray(attended(keys, values, pos, key_pos, kind == "ring")))
    inside = np.arange(4) < valid[:, None]
    assert np.all(np.isfinite(outs[1][inside]))
    np.testing.assert_array_equal(outs[0][inside], outs[1][inside])


@pytest.mark.parametrize("kind", ["dense", "ring"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_rejected_draft_cannot_spoil_the_rows_before_it(kind, value):
    """I2, NUM.1: keys and values of a draft that are not finite reach the queries that see it and no others."""
    _, k, v = Walk(kind, 1).block(4)
    pos = jnp.tile(jnp.arange(4), (B, 1))
    wanted = attended(
        *extend(make(kind), k, v, pos, np.full(B, 4), "verify")[:2], pos, *_rest(kind, k, v, pos)
    )
    for tensor in ("k", "v", "both"):
        bad_k, bad_v = k.copy(), v.copy()
        if tensor != "v":
            bad_k[:, 2] = np.nan
        if tensor != "k":
            bad_v[:, 2] = value
        keys, values, key_pos, _ = extend(make(kind), bad_k, bad_v, pos, np.full(B, 4), "verify")
        out = attended(keys, values, pos, key_pos, kind == "ring")
        np.testing.assert_array_equal(out[:, :2], wanted[:, :2])
        assert np.all(np.isnan(out[:, 2:]))


def _rest(kind, k, v, pos):
    return extend(make(kind), k, v, pos, np.full(B, 4), "verify")[2], kind == "ring"


@pytest.mark.parametrize("kind", ["dense", "ring"])
def test_rows_are_independent(kind):
    """I6: a row's entries do not change when other rows write or not."""
    walk, other = Walk(kind, 2), Walk(kind, 2)
    for valid in ([4, 4, 4], [4, 2, 0], [1, 4, 3]):
        walk.step("extend", 4, np.array(valid))
        other.step("extend", 4, np.array([valid[0], 0, 4]))
        walk.length += valid
        other.length += [valid[0], 0, 4]
    for a, b in zip(jax.tree.leaves(walk.cache), jax.tree.leaves(other.cache), strict=True):
        assert np.array_equal(a[0], b[0])


def test_ring_memory_is_constant():
    """KVR.1: a ring's size depends on the window and the block, not on the length."""
    cfg = testing.sliding_params((WINDOW,)).meta.target_cfg
    from specjax.testing import sliding

    sizes = {tree_bytes(sliding.init_cache(cfg, B, slots, Q_MAX, jnp.float32)) for slots in (64, 1024)}
    assert len(sizes) == 1
    assert sizes == {B * (WINDOW + Q_MAX) * (2 * cfg.kv_heads * cfg.head_dim + 1) * 4}


@pytest.mark.parametrize("high", [3, 9, 20])
def test_how_far_back_a_cache_can_be_cut(high):
    """PFX.2: from ``min_resume`` on, feeding again from one position earlier sees everything it must; one
    length less would not do for a ring that has wrapped."""
    assert DenseKV.min_resume(high) == 1
    earliest = make("ring").min_resume(high, WINDOW)
    assert earliest == max(1, high - Q_MAX)
    for length in range(max(1, earliest - 1), high + 1):
        walk = Walk("ring", high)
        for _ in range(high):
            walk.step("extend", 1, np.ones(B, int))
            walk.length += 1
        walk.length[:] = length - 1
        if length >= earliest or high <= WINDOW + Q_MAX:
            walk.step("extend", WIDE, np.full(B, 2))
        else:
            with pytest.raises(AssertionError):
                walk.step("extend", WIDE, np.full(B, 2))


def forgets_rejected(self, k, v, pos, valid, mode):
    """An extend that shows entries which the block is about to replace."""
    keys, values, key_pos, cache = right_extend(self, k, v, pos, valid, mode)
    return keys, values, jnp.concatenate([self.pos, key_pos[:, self.pos.shape[1] :]], 1), cache


def small_ring(rows, heads, window, q_max, head_dim, dtype):
    return right_create(rows, heads, window, q_max - 3, head_dim, dtype)


def writes_padding(self, k, v, start, valid):
    return right_write(self, k, v, start, jnp.full_like(valid, k.shape[2]))


right_extend, right_create, right_write = RingKV.extend, RingKV.create, RingKV._write
PLANTED = {"extend": forgets_rejected, "create": small_ring, "_write": writes_padding}


@pytest.mark.parametrize("method", PLANTED)
def test_planted_mistakes_are_found(method, monkeypatch):
    """PEER.1: a ring that shows rejected entries, is too small, or keeps padding fails the walk."""
    monkeypatch.setattr(RingKV, method, PLANTED[method])
    extend.clear_cache()

    def walk():
        for seed in range(20):
            life = Walk("ring", seed)
            for action, width in [("extend", 4), *[("verify", 4), ("extend", WIDE)] * 4]:
                getattr(life, action)(width)

    try:
        with pytest.raises(AssertionError):
            walk()
    finally:
        extend.clear_cache()


# ---------------------------------------------------------------- a windowed target, end to end

LONG = 40  # several times around rings of 5 + k + 1 and 3 + k + 1 slots
PROMPTS = [[3], list(range(20, 1, -1)), [1, 2, 3, 4], [7] * 6, [30, 31, 2, 9, 9]]


@functools.cache
def target(windows=(5, 3)):
    return testing.sliding_params(windows, seed=1)


@functools.cache
def greedy(windows=(5, 3)):
    return specjax.decode(target(windows), PROMPTS, max_new_tokens=LONG, rows=3).tokens


def without_cache(windows, prompt, new: int) -> tuple[list[int], float]:
    """Greedy continuation by whole passes with dense windowed attention; smallest gap of the best two."""
    cfg, p, size = target(windows).meta.target_cfg, target(windows).target, len(prompt) + new
    tokens, gap = [*prompt], np.inf
    logits = _whole(cfg, size)
    for _ in range(new):
        row = jnp.asarray([tokens + [0] * (size - len(tokens))])
        values = np.asarray(logits(p, row)[0, len(tokens) - 1])
        gap = min(gap, np.diff(np.sort(values)[-2:])[0])
        tokens.append(int(values.argmax()))
    return tokens[len(prompt) :], gap


@functools.cache
def _whole(cfg, size: int):
    from specjax.layers.norm import rms_norm
    from specjax.layers.rope import rope_angles, rotate

    @jax.jit
    def run(p, tokens):
        pos = jnp.arange(size)[None]
        x, angles = p.embed[tokens], rope_angles(cfg.rope, pos)
        one = jnp.ones(x.shape[-1:])
        for layer, window in zip(p.layers, cfg.windows, strict=True):
            y = rms_norm(x, one, 1e-5)
            q, k, v = (jnp.einsum("bqd,hcd->bqhc", y, w) for w in (layer.q, layer.k, layer.v))
            scores = (
                jnp.einsum("bqhc,bsgc->bhqs", rotate(q, *angles), rotate(k, *angles)) * cfg.head_dim**-0.5
            )
            back = pos[0][:, None] - pos[0]
            near = (back >= 0) & (back < (window or size))
            weights = jax.nn.softmax(jnp.where(near, scores, -jnp.inf), -1)
            out = jnp.einsum("bhqs,bsgc->bqhc", weights, v)
            x = x + out.reshape(*out.shape[:2], -1) @ layer.o.T
        return rms_norm(x, one, 1e-5) @ p.head.T

    return run


def test_plain_decoding_is_right():
    """KVR.1: rings give what whole passes with a window give, far beyond the window's edge; the prompt of 19
    is longer than the ring."""
    for prompt, tokens in zip(PROMPTS, greedy(), strict=True):
        wanted, gap = without_cache((5, 3), prompt, LONG)
        assert tokens == wanted
        assert gap > 1e-3
        assert len(set(tokens)) > 4


def across_the_edge(case, windows=(5, 3)):
    tokens = greedy(windows)
    stop = unused(tokens)
    drafter = "WITNESS" if case["mode"] in ("ALWAYS_RIGHT", "EVERY_THIRD_WRONG") else "TOLD"
    modes = MODES if case["mode"] == "MIXED" else case["mode"]
    params = told(
        modes,
        tokens,
        base=target(windows),
        prompts=PROMPTS,
        stop=stop,
        at=case["k"] // 2,
        name=drafter,
        size=80,
    )
    count, rows = {"one": (1, 1), "refill": (5, 3)}[case["batch"]]
    out = specjax.decode(
        params, PROMPTS[:count], max_new_tokens=LONG, rows=rows, k=case["k"], loop=case["loop"], rounds=3
    )
    assert out.tokens == tokens[:count]
    adversarial = case["mode"] == "ALWAYS_WRONG" or (case["mode"] == "STOP_INSIDE" and case["k"] == 1)
    assert (out.total.accepted > 0) != adversarial
    assert out.total.accepted == out.total.proposed or case["mode"] != "ALWAYS_RIGHT"


WINDOWED = {"k": (1, 3, 8), "mode": (*MODES, "MIXED"), "loop": ("device", "host"), "batch": ("one", "refill")}


@pytest.mark.parametrize("case", pairwise(WINDOWED), ids=name)
def test_across_the_window_edge(case):
    """KVR.1, KVR.2, GRD.1: draft widths below and above the window, every kind of rejection after wraps."""
    across_the_edge(case)


@pytest.mark.long
@pytest.mark.parametrize(
    "case", pairwise({"windows": ((1,), (2, 0), (0, 7), (16, 3))} | WINDOWED | {"k": (1, 2, 4, 7)}), ids=name
)
def test_across_other_window_edges(case):
    """KVR.1, KVR.2: a window of one, mixtures with full attention, windows longer than the prompt; each with every
    width, mode, loop and batch."""
    across_the_edge(case, case["windows"])


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_prefill_chunks_longer_and_shorter_than_the_ring(chunk):
    """PFX.1, KVR.1: also while other rows of the batch have no prompt left."""
    out = specjax.decode(target(), PROMPTS[:3], max_new_tokens=LONG, rows=3, prefill_chunk=chunk)
    assert out.tokens == greedy()[:3]


def test_stops_and_ngram_on_rings():
    """STP.1: a stop in a block after the wrap; a drafter that looks tokens up."""
    from specjax.drafters import ngram

    params = with_drafter(target(), "ngram", ngram.Config(3, 3, 1))
    for stop in (greedy()[0][30], greedy()[1][17]):
        out = specjax.decode(params, PROMPTS, max_new_tokens=LONG, rows=3, stop=stop)
        assert out.tokens == [cut(row, LONG, [stop])[0] for row in greedy()]
    assert out.total.accepted > 0
    assert len(PROMPTS) <= TEXTS
