"""The training pass of block drafters against decoding, and the masks counted out."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_blocks as tiny
from block_tiny import shared
from packing import packed
from train_blocks import method

import specjax
from specjax.drafters import dflash
from specjax.train import block, evaluate, features
from specjax.types import Pair


def all_anchors(batch):
    """Every candidate, as block.Anchors and as a list of (row, index)."""
    good = np.asarray(block.candidates(batch))
    places = block.anchors(batch, good.shape[1], jax.random.key(0))
    pairs = [(r, int(t)) for r, t in zip(*np.nonzero(good), strict=True)]
    assert pairs == [(r, int(t)) for r in range(len(good)) for t in places.at[r][places.real[r]]]
    return places, pairs


def quick(*kinds):
    """All kinds, those not named being long."""
    return [k if k in kinds else pytest.param(k, marks=pytest.mark.long) for k in tiny.KINDS]


@pytest.mark.parametrize("kind", quick("fill", "anchor window", "dflash2", "gemma4"))
def test_rows_are_those_of_decoding(kind):
    """TRD.4, PEER.13: every block of packed documents, whatever the layout, windows, directions and parts; padding
    holds NaN and leaves no trace."""
    p, batch = tiny.params(kind), tiny.batch()
    cfg = p.meta.drafter_cfg
    given, (places, pairs) = tiny.features(cfg, batch), all_anchors(batch)
    run = jax.jit(lambda f: block.rows(tiny.backbone(p), shared(p), cfg, batch, f, places.at))
    ours = run(given)[places.real]
    np.testing.assert_allclose(ours, tiny.decoded_rows(p, batch, given, pairs), atol=3e-5)


@pytest.mark.parametrize(("kind", "causal"), [("fill", False), ("anchor window", True)])
def test_attention_equals_a_dense_mask(kind, causal):
    """PEER.13: outputs and gradients of context and blocks are those of dense attention over all keys side by side, the
    mask being counted out pair by pair."""
    cfg = dataclasses.replace(tiny.params(kind).meta.drafter_cfg, causal=(causal, causal))
    batch, keys = tiny.batch(), jax.random.split(jax.random.key(0), 5)
    places, _ = all_anchors(batch)
    (r, a), t, n, g, c = places.at.shape, batch.doc.shape[1], cfg.rows, 2, 4
    draw = lambda i, *shape: jax.random.normal(keys[i], shape)  # noqa: E731
    arrays = (
        draw(0, r, a, n, 4, c),
        draw(1, r, t, g, c),
        draw(2, r, t, g, c),
        draw(3, r, a, n, g, c),
        draw(4, r, a, n, g, c),
    )
    doc, pos, at = (np.asarray(x) for x in (batch.doc, batch.pos, places.at))
    start = np.take_along_axis(pos, at, 1)
    weight = jnp.cos(jnp.arange(arrays[0].size)).reshape(arrays[0].shape)

    for layer, window in enumerate((None, 6)):
        seen = np.zeros((r, a, n, t + a * n), bool)
        for i, m, row in itertools.product(range(r), range(a), range(n)):
            place = start[i, m] + row
            oldest = -1 if window is None else start[i, m] - window if kind != "fill" else place - window + 1
            for key in range(t):
                same = doc[i, key] == doc[i, at[i, m]]
                seen[i, m, row, key] = same and oldest <= pos[i, key] < start[i, m]
            for other in range(n):
                near = window is None or kind != "fill" or abs(other - row) < window
                seen[i, m, row, t + m * n + other] = near and (not causal or other <= row)

        def ours(arrays, layer=layer):
            q, k, v, own_k, own_v = arrays
            same = doc[:, None, :] == np.take_along_axis(doc, at, 1)[:, :, None]
            reach = dflash.context_seen(
                cfg, layer, jnp.asarray(start)[:, :, None, None], batch.pos[:, None, None]
            )
            own = (own_k, own_v, dflash.block_visible(cfg, layer))
            return jnp.sum(weight * block.attend_blocks(q, (k, v, same[:, :, None] & reach), own, 0.4))

        def dense(arrays, seen=seen):
            q, k, v, own_k, own_v = arrays
            k, v = (jnp.concatenate([x, y.reshape(r, a * n, g, c)], 1) for x, y in ((k, own_k), (v, own_v)))
            k, v = (jnp.repeat(x, 2, 2) for x in (k, v))
            scores = jnp.where(seen[:, :, :, None], jnp.einsum("ranhc,rshc->ranhs", q, k) * 0.4, -jnp.inf)
            return jnp.sum(weight * jnp.einsum("ranhs,rshc->ranhc", jax.nn.softmax(scores), v))

        value, slopes = jax.jit(jax.value_and_grad(ours))(arrays)
        wanted, expected = jax.jit(jax.value_and_grad(dense))(arrays)
        np.testing.assert_allclose(value, wanted, rtol=1e-4)
        for x, y in zip(slopes, expected, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)


def test_anchors_are_drawn_among_candidates():
    """Positions whose next token is trained and of the same document, each as often as the next, ascending; all of them
    where there are fewer than asked for."""
    batch = tiny.batch()
    tokens, doc, trained = (np.asarray(x) for x in (batch.tokens, batch.doc, batch.trained))
    ok = [
        [t for t in range(35) if doc[r, t] >= 0 and doc[r, t] == doc[r, t + 1] and trained[r, t + 1]]
        for r in range(3)
    ]
    draw = jax.jit(lambda key: block.anchors(batch, 12, key))
    counts = np.zeros(tokens.shape, int)
    for key in jax.random.split(jax.random.key(1), 300):
        found = draw(key)
        for r in range(3):
            at = np.asarray(found.at[r][found.real[r]])
            assert (np.diff(at) > 0).all()
            assert len(at) == 12
            counts[r, at] += 1
    for r in range(3):
        assert np.flatnonzero(counts[r]).tolist() == ok[r]
        share = counts[r, ok[r]] / 300
        assert np.abs(share - 12 / len(ok[r])).max() < 0.12
    few = block.anchors(batch, 1000, jax.random.key(0))
    assert few.at.shape == (3, 36)
    assert few.real.sum(1).tolist() == [len(x) for x in ok]
    nothing = dataclasses.replace(batch, trained=jnp.zeros_like(batch.trained))
    assert not block.anchors(nothing, 5, jax.random.key(0)).real.any()


def test_labels():
    """TRD.1: draft i of a block is the token i + 1 behind its anchor, in either layout; nothing counts behind an
    untrained token or the document's end, and the anchor of the answer's first token is the prompt's last."""
    batch = packed([[(range(10), 3), (range(20, 26), 1)], [(range(30, 39), 0)]], 18)
    hole = np.asarray(batch.trained).copy()
    hole[1, 5] = False
    batch = dataclasses.replace(batch, trained=jnp.asarray(hole))
    for kind in ("fill", "shift"):
        cfg = tiny.params(kind).meta.drafter_cfg
        places, pairs = all_anchors(batch)
        assert pairs[0] == (0, 2)
        found = jax.tree.map(
            lambda x, real=places.real: np.asarray(x)[np.asarray(real)], block.labels(batch, cfg, places)
        )
        for (r, t), tokens, previous, counted in zip(pairs, *found, strict=True):
            last = next(
                e
                for e in range(t, 18)
                if e == 17 or batch.doc[r, e + 1] != batch.doc[r, t] or not hole[r, e + 1]
            )
            n = min(4, last - t)
            assert counted.tolist() == [True] * n + [False] * (4 - n)
            assert tokens[:n].tolist() == batch.tokens[r, t + 1 : t + 1 + n].tolist()
            assert previous[:n].tolist() == batch.tokens[r, t : t + n].tolist()
        hidden = jnp.arange(36.0).reshape(2, 18, 1)
        taught = block.teacher(hidden, cfg, places)[places.real][..., 0]
        assert taught[0].tolist() == [2, 3, 4, 5]


PROMPTS = [[3, 1, 4, 1], [6, 5], [7, 7, 2, 0, 1, 2, 5]]


@functools.cache
def greedy(new: int):
    """The target's own texts, packed: two in one row."""
    plain = specjax.decode(tiny.target(), PROMPTS, max_new_tokens=new, ignore_eos=True)
    texts = [(prompt + tokens, len(prompt)) for prompt, tokens in zip(PROMPTS, plain.tokens, strict=True)]
    return packed([texts[:2], texts[2:]], 2 * new + 8)


@pytest.mark.parametrize("kind", quick("shift", "vanilla"))
def test_matches_are_what_decoding_accepts(kind):
    """TRD.4: over greedy texts, round by round, every draft that training calls right is accepted and no other."""
    p, new = tiny.params(kind), 60
    batch, meta = greedy(new), p.meta
    k = dflash.max_k(meta.drafter_cfg)
    how = method(kind)
    given = features.extract(p.target, Pair(meta.family, meta.target_cfg), batch, how.needs(meta.drafter_cfg))
    run = jax.jit(lambda f: how.matches(p.drafter, shared(p), meta.drafter_cfg, batch, f, k))
    found = run(given)
    ours = evaluate.acceptance(found, batch, ())
    out = specjax.decode(p, PROMPTS, max_new_tokens=new, ignore_eos=True)
    for training, decoding in zip(ours, out.stats, strict=True):
        assert training.accepted_at == decoding.accepted_at
        assert (training.rounds, training.emitted) == (decoding.rounds, decoding.emitted)
    assert sum(s.accepted for s in ours) > 5
    assert not found[~block.candidates(batch)].any()


def test_matches_come_in_parts(monkeypatch):
    """As many anchors at a time as memory allows, the last part being shorter."""
    p, batch = tiny.params("shift"), tiny.batch()
    cfg, given = p.meta.drafter_cfg, tiny.features(p.meta.drafter_cfg, batch)
    run = lambda k: method("shift").matches(p.drafter, shared(p), cfg, batch, given, k)  # noqa: E731
    whole = run(4)
    monkeypatch.setattr(block, "_LOGITS_AT_ONCE", 3 * 4 * cfg.vocab * 7)
    np.testing.assert_array_equal(run(4), whole)
    monkeypatch.undo()
    np.testing.assert_array_equal(run(2), whole[..., :2])
    with pytest.raises(ValueError, match="k must be from 1 to 4"):
        run(5)
