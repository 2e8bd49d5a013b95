"""Losses of serial drafters: what is summed, what counts, what is learned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serial_tiny
from serial_steps import K, batch_for, features_of, lent, states_of

from specjax.drafters import eagle3_model
from specjax.train import methods, serial
from specjax.train.types import Batch

KIND = "eagle3, reduced"


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def learned(module, p, shared, cfg, recipe, batch, found):
    """((loss, metrics), gradients of the trained leaves)."""
    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    leaves, tree = jax.tree.flatten(p)
    trained = [x for x in leaves if floating(x)]

    def loss(trained):
        rest = iter(trained)
        whole = tree.unflatten([next(rest) if floating(x) else x for x in leaves])
        return module.loss(whole, shared, cfg, recipe, batch, found, jax.random.key(0))

    return jax.value_and_grad(loss, has_aux=True)(trained)


def given(kind: str, batch: Batch | None = None, **changes):
    """Arguments of :func:`learned`."""
    params = serial_tiny.drafted(kind)
    module = methods.method(params.meta.drafter)
    batch = batch_for(params) if batch is None else batch
    recipe = module.recipe(dtype="float32", unroll=K, **changes)
    return (
        module, params.drafter, lent(params), params.meta.drafter_cfg, recipe, batch, features_of(params, batch),
    )  # fmt: skip


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def spelled_out(terms, decay: float):
    """Loss, accuracies and tau of ``KIND`` by loops in float64, from the states of every row."""
    _, p, shared, cfg, _, batch, found = given(KIND)
    states = states_of(p, shared, cfg, batch, found, None, K)
    scores = eagle3_model.logits(p, shared, cfg, states.reshape(-1, states.shape[-1]))
    scores = np.asarray(scores, np.float64).reshape(*states.shape[:3], -1)
    ids = np.asarray(eagle3_model.target_ids(p, cfg))
    tokens, doc, trained = (np.asarray(x) for x in (batch.tokens, batch.doc, batch.trained))
    losses, right, begun = [[] for _ in range(K)], [[] for _ in range(K)], []
    for r, row in np.ndindex(doc.shape):
        right_here: list[bool] = []
        for k in range(K):
            at = row + 2 + k
            if doc[r, row] < 0 or at >= doc.shape[1] or doc[r, at] != doc[r, row] or not trained[r, at]:
                break
            logits = scores[k, r, row]
            log_q, label = log_softmax(logits), np.flatnonzero(ids == tokens[r, at])
            teacher = (
                np.asarray(found.hidden, np.float64)[r, at - 1] @ np.asarray(shared.head, np.float64)[ids].T
            )
            log_p = log_softmax(teacher)
            values = {"kl": np.sum(np.exp(log_p) * (log_p - log_q))}
            if len(label):
                values["ce"] = -log_q[label[0]]
                losses[k].append(sum(factor * values[name] for name, factor in terms))
            hit = ids[np.argmax(logits)] == tokens[r, at]
            right[k].append(hit)
            right_here.append(hit)
        if right_here:
            begun.append(1 + int(np.cumprod(right_here).sum()))
    weights = decay ** np.arange(K)
    total = sum(w * np.mean(x) for w, x in zip(weights, losses, strict=True)) / weights.sum()
    return total, [np.mean(x) for x in right], np.mean(begun)


@pytest.mark.parametrize(
    "terms",
    [
        pytest.param((("kl", 1.0),), id="kl", marks=pytest.mark.long),
        pytest.param((("ce", 0.3), ("kl", 2.0)), id="both"),
    ],
)
def test_loss_and_metrics_are_those_spelled_out(terms):
    """VOC.1, TRD.1: each step's mean over the rows whose label is trained, of the same document and in the draft
    vocabulary, teacher and drafter over that; accuracies count the others as misses."""
    args = given(KIND, terms=terms, decay=0.7)
    (loss, metrics), _ = learned(*args)
    total, right, tau = spelled_out(terms, 0.7)
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    quotient = lambda name: float(metrics[name][0] / metrics[name][1])  # noqa: E731
    np.testing.assert_allclose([quotient(f"accuracy_{k}") for k in range(K)], right, atol=1e-6)
    np.testing.assert_allclose(quotient("tau"), tau, atol=1e-6)
    np.testing.assert_allclose(quotient("loss"), total, rtol=1e-5)


def test_only_some_rows_go_on():
    """Room for all trained rows gives the same loss and gradients as all rows; less takes as many, at random."""
    whole = learned(*given(KIND))
    most = int(np.asarray(given(KIND)[5].trained).sum(1).max())
    some = learned(*given(KIND, answers=most))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), whole, some)
    batch = given(KIND)[5]
    every = serial.choose(batch, None, jax.random.key(0))
    few = [serial.choose(batch, 5, jax.random.key(i)) for i in range(20)]
    assert every.at is None
    for rows in few:
        assert rows.at.shape == (3, 5)
        assert np.all(np.diff(rows.at, axis=1) > 0)
        used = np.take_along_axis(np.asarray(every.used), np.asarray(rows.at), 1)
        assert np.array_equal(used, rows.used)
        assert rows.used.sum() == np.minimum(np.asarray(every.used).sum(1), 5).sum()
    assert len({np.asarray(rows.at[2]).tobytes() for rows in few}) > 10


def test_nothing_trained_is_no_loss():
    """PEER.15: zero under a zero mask, gradients too, and finite."""
    args = list(given(KIND))
    args[5] = args[5].replace(trained=jnp.zeros_like(args[5].trained))
    (loss, metrics), gradients = learned(*args)
    assert float(loss) == 0
    assert all(not np.any(g) for g in gradients)
    assert float(metrics["accuracy_0"][1]) == 0


def test_garbage_beyond_the_documents_changes_nothing():
    """BAT.5, TRD.3: tokens, features and other documents of a row have no effect on a document's loss."""
    args = list(given(KIND))
    padding = np.asarray(args[5].doc) < 0
    before = learned(*args)
    args[5] = args[5].replace(tokens=jnp.where(padding, 5, args[5].tokens))
    wild = jnp.where(padding[..., None], 1e6, 0.0)
    args[6] = jax.tree.map(lambda x: x + wild if x.ndim == 3 else x, args[6].replace(kv=None))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), before, learned(*args))


DEFAULT = ("mtp",)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in DEFAULT else pytest.mark.long) for k in serial_tiny.KINDS]
)
def test_every_weight_is_learned(kind):
    """PEER.15: gradients of all weights are finite, and none is left out but what only chooses or is not read."""
    args = given(kind)
    (loss, metrics), gradients = learned(*args)
    assert np.isfinite(loss)
    assert set(metrics) >= {"loss", "tau", *(f"accuracy_{k}" for k in range(K))}
    names = [
        jax.tree_util.keystr(path)
        for path, x in jax.tree_util.tree_leaves_with_path(args[1])
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    still = [n for n, g in zip(names, gradients, strict=True) if not np.any(g)]
    assert all(np.all(np.isfinite(g)) for g in gradients)
    assert [n for n in still if "clusters" not in n and not n.endswith("mlp.bias")] == []


def test_low_precision():
    """NUM.2: bfloat16 weights give a loss near the float32 one, and bfloat16 gradients."""
    args = list(given(KIND))
    (want, _), _ = learned(*args)
    low = lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    args[1], args[2], args[6] = jax.tree.map(low, (args[1], args[2], args[6]))
    (loss, _), gradients = learned(*args)
    np.testing.assert_allclose(loss, want, rtol=0.1)
    assert {g.dtype for g in gradients} == {jnp.bfloat16.dtype}
