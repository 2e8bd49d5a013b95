"""Losses of training: what they are worth at the ends, and the chunked form against the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.train import losses
from specjax.train.losses import Transform, head_loss
from specjax.train.terms import TEACHER_TERMS, check_terms, dpace, row_terms

ALL = tuple((name, 0.3 + 0.1 * i) for i, name in enumerate(("ce", *TEACHER_TERMS)))
N, D, V, R = 22, 8, 40, 3


def of(name, logits, teacher):
    labels = jnp.argmax(jnp.asarray(teacher), -1)
    return row_terms((name,), jnp.asarray(logits), labels, jnp.asarray(teacher))[name]


def spread(seed=0, rows=6):
    return np.random.default_rng(seed).standard_normal((rows, V)).astype(np.float32) * 5


@pytest.mark.parametrize("name", TEACHER_TERMS)
def test_zero_for_identical_distributions(name):
    """PEER.15: also where a constant is added to all logits, and under a mask of -inf."""
    logits = spread()
    masked = np.where(np.arange(V) % 3 == 0, -np.inf, logits)
    for a, b in ((logits, logits), (logits + 7, logits), (masked, masked)):
        np.testing.assert_allclose(of(name, a, b), 0, atol=2e-6)


@pytest.mark.parametrize("name", ["ce", *TEACHER_TERMS])
def test_finite_for_disjoint_distributions(name):
    """PEER.15: logits 1e4 apart and -inf; values and gradients."""
    left = np.arange(V) < V // 2
    for low in (-1e4, -np.inf):
        a, b = (np.where(on, 0.0, low).astype(np.float32)[None] for on in (left, ~left))
        value, slope = jax.value_and_grad(lambda x, b=b: of(name, x, b).sum())(jnp.asarray(a))
        assert np.isfinite(value)
        assert np.isfinite(slope).all()
        expected = {"l1": 2, "tv": 1, "nla": -np.log(1e-5), "jsd": np.log(2)}
        assert value == pytest.approx(expected[name], abs=1e-5) if name in expected else value > 1e3


def test_alpha_is_the_overlap():
    """The chance that rejection sampling keeps a draft, and what is made of it."""
    a, b = spread(1), spread(2)
    rows = row_terms(TEACHER_TERMS, jnp.asarray(a), jnp.zeros(6, jnp.int32), jnp.asarray(b))
    q, p = (
        np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a.astype(np.float64), b.astype(np.float64))
    )
    overlap = np.minimum(q, p).sum(-1)
    kl = (p * np.log(p / q)).sum(-1)
    weight = np.exp(-3 * overlap)
    expected = {
        "alpha": overlap,
        "tv": 1 - overlap,
        "l1": np.abs(q - p).sum(-1),
        "nla": -np.log(overlap),
        "kl": kl,
        "rkl": (q * np.log(q / p)).sum(-1),
        "lk_hybrid": weight * kl + (1 - weight) * (1 - overlap),
        "ce": -np.log(q[:, 0]),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(rows[name], value, rtol=1e-4, atol=1e-6)
    assert rows["correct"].tolist() == (a.argmax(-1) == 0).tolist()


def inputs(seed=0):
    keys = jax.random.split(jax.random.key(seed), 8)
    draw = lambda i, *shape: jax.random.normal(keys[i], shape)  # noqa: E731
    weights = jax.random.uniform(keys[0], (N,)) * (jnp.arange(N) % 4 > 0)
    labels = jax.random.randint(keys[1], (N,), 0, V)
    trained = (draw(2, N, D), draw(3, V, D), draw(4, N, R), draw(5, V, R))
    return trained, labels, weights, (draw(6, N, D), draw(7, V, D))


def plain(trained, labels, weights, teacher, student=Transform(), taught=Transform()):
    hidden, head, vectors, table = trained
    logits = student(hidden @ head.T) + vectors @ table.T
    rows = row_terms(TEACHER_TERMS, logits, labels, taught(teacher[0] @ teacher[1].T))
    return jnp.sum(weights * sum(factor * rows[name] for name, factor in ALL)), rows


@pytest.mark.parametrize(("chunks", "capped"), [pytest.param(1, False, marks=pytest.mark.long), (5, True)])
def test_chunks_equal_the_plain_form(chunks, capped):
    """PEER.15: loss, rows and gradients, with rows that do not divide into the chunks."""
    trained, labels, weights, teacher = inputs()
    forms = (Transform(2.0, 5.0), Transform(0.5, 9.0)) if capped else (Transform(), Transform())

    def fused(trained):
        hidden, head, vectors, table = trained
        return head_loss(
            hidden, head, labels, weights, ALL, teacher=teacher, student_transform=forms[0],
            teacher_transform=forms[1], extra=(vectors, table), train_head=True, chunks=chunks,
        )  # fmt: skip

    take = lambda f: jax.jit(jax.value_and_grad(f, has_aux=True))(trained)  # noqa: E731
    (loss, rows), slopes = take(lambda t: plain(t, labels, weights, teacher, *forms))
    (ours, our_rows), our_slopes = take(fused)
    np.testing.assert_allclose(ours, loss, rtol=1e-5)
    np.testing.assert_allclose(fused(trained)[0], loss, rtol=1e-5)  # without gradients
    counted = np.asarray(weights) > 0
    for name, values in rows.items():
        np.testing.assert_allclose(our_rows[name][counted], values[counted], rtol=1e-4, atol=1e-5)
    for a, b in zip(our_slopes, slopes, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4 * float(jnp.abs(b).max()))


def test_rows_that_do_not_count():
    """PEER.15: a mask of zeros makes a loss of zero and no gradient, whatever the rows hold; so does a label that is no
    token."""
    (hidden, head, *_), labels, weights, teacher = inputs()
    bad = jnp.where(jnp.arange(N)[:, None] % 4 == 0, jnp.nan, 1.0)  # where the weights are 0

    def loss(hidden, weights, labels=labels):
        taught = (teacher[0] * bad, teacher[1])
        return head_loss(hidden * bad, head, labels, weights, ALL, teacher=taught, chunks=2)[0]

    loss = jax.jit(loss)
    value, slope = jax.value_and_grad(loss)(hidden, weights)
    assert np.isfinite(value)
    assert np.isfinite(slope[1:4]).all()
    for nothing in (
        loss(hidden, weights * 0),
        loss(hidden, weights, labels - V),
        loss(hidden, weights, labels + V),
    ):
        assert nothing == 0
    assert losses.mean(jnp.float32(0), jnp.float32(0)) == 0


def test_a_frozen_head_gets_no_gradient():
    (hidden, head, *_), labels, weights, _ = inputs()
    for train in (False, True):
        slope = jax.grad(
            lambda w, t=train: head_loss(hidden, w, labels, weights, (("ce", 1.0),), train_head=t)[0]
        )
        assert bool(jnp.any(slope(head) != 0)) is train


def test_reduced_vocabulary_and_padding():
    """VOC.3: the teacher's distribution is over the rows given; rows of padding are in neither distribution, and the
    table of a correction may have fewer."""
    (hidden, head, vectors, table), labels, weights, teacher = inputs()
    ids, labels = jnp.array([3, 7, 1, 30, 22]), labels % 5
    few = (teacher[0], teacher[1][ids])
    terms = (("kl", 1.0), ("ce", 1.0))
    whole, rows = head_loss(hidden, head[ids], labels, weights, terms, teacher=few)
    p = jax.nn.softmax(teacher[0] @ few[1].T)
    log_q = jax.nn.log_softmax(hidden @ head[ids].T)
    np.testing.assert_allclose(rows["kl"][1], jnp.sum(p * (jnp.log(p) - log_q), -1)[1], rtol=1e-4)
    padded = jnp.concatenate([head[ids], 1e3 * head[:4]])
    same = [
        head_loss(hidden, padded, labels, weights, terms, teacher=few),
        head_loss(hidden, padded, labels, weights, terms, teacher=few, student_transform=Transform(rows=5)),
        head_loss(
            hidden,
            padded,
            labels,
            weights,
            terms,
            teacher=(few[0], padded),
            teacher_transform=Transform(rows=5),
        ),
    ]
    for loss, _ in same[:2]:
        np.testing.assert_allclose(loss, whole, rtol=1e-5)
    assert same[2][0] != whole
    assert np.isfinite(same[2][0])
    short = head_loss(hidden, head, labels, weights, terms, teacher=teacher, extra=(vectors, table[:9]))[0]
    blank = head_loss(
        hidden, head, labels, weights, terms, teacher=teacher, extra=(vectors, table.at[9:].set(0))
    )
    np.testing.assert_allclose(short, blank[0], rtol=1e-6)


def test_low_precision():
    """bfloat16 rows and heads: losses are those of the rounded values in float32, gradients keep the type."""
    (hidden, head, *_), labels, weights, teacher = inputs()
    low = lambda x: x.astype(jnp.bfloat16)  # noqa: E731
    taught = (low(teacher[0]), low(teacher[1]))
    run = lambda h, w: head_loss(h, w, labels, weights, ALL, teacher=taught, train_head=True, chunks=2)[0]  # noqa: E731
    loss, slopes = jax.value_and_grad(run, (0, 1))(low(hidden), low(head))
    wide = lambda x: low(x).astype(jnp.float32)  # noqa: E731
    taught = (wide(teacher[0]), wide(teacher[1]))
    exact, slow = jax.value_and_grad(run, (0, 1))(wide(hidden), wide(head))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, exact, rtol=1e-5)
    for a, b in zip(slopes, slow, strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.linalg.norm(a.astype(jnp.float32) - b) < 0.01 * np.linalg.norm(b)


def test_dpace_weights():
    """Each row's weight by the definition, summed out; holes are passed over."""
    rng = np.random.default_rng(0)
    ce, on = rng.uniform(0, 3, (4, 5)).astype(np.float32), rng.random((4, 5)) < 0.8
    weights = dpace(jnp.asarray(ce), jnp.asarray(on), 0.4)
    for b, i in np.ndindex(4, 5):
        reach = [np.prod([0.6 * np.exp(-ce[b, m]) + 0.4 for m in range(j + 1) if on[b, m]]) for j in range(5)]
        expected = sum(reach[j] for j in range(i, 5) if on[b, j]) * on[b, i]
        assert weights[b, i] == pytest.approx(expected, rel=1e-5)
    (hidden, head, *_), labels, _, _ = inputs()
    counted, terms = (jnp.arange(20) % 5 != 3) * 1.0, (("ce", 1.0),)
    loss, rows = head_loss(
        hidden[:20], head, labels[:20], counted, terms, chunks=3, group=5, dpace_smooth=0.4
    )
    again = dpace(rows["ce"].reshape(4, 5), counted.reshape(4, 5), 0.4).reshape(-1)
    np.testing.assert_allclose(rows["weight"], again, rtol=1e-5)
    assert loss == pytest.approx(float(jnp.sum(again * rows["ce"])), rel=1e-5)


def test_terms_are_checked():
    for terms, words in (
        ((), "at least one"),
        ((("soft", 1.0),), "ce, kl, rkl"),
        ((("ce", 1.0), ("ce", 2.0)), "each once"),
        ((("ce", 0.0),), "positive number"),
        ((("ce", True),), "positive number"),
    ):
        with pytest.raises(ValueError, match=words):
            check_terms(terms)
    assert check_terms((("ce", 1), ("confidence", 1.0)), ("confidence",)) == (("ce", 1.0),)
    (hidden, head, *_), labels, weights, _ = inputs()
    with pytest.raises(ValueError, match=r"\['kl'\] compare with a teacher"):
        head_loss(hidden, head, labels, weights, (("kl", 1.0),))
