"""Losses over the rows of an output head, summed in chunks so that ``[rows, vocabulary]`` never exists whole.

Terms (:mod:`specjax.train.terms`) are float32. Products of a head are in the weights' type with float32 sums, and so
are those of its gradients: the logits' gradient is rounded to the weights' type. Gradients are taken in the forward
pass, chunk by chunk, so that no logits are kept or made twice.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.layers.linear import linear, precision_of
from specjax.train.terms import check_terms, dpace, needs_teacher, row_terms
from specjax.train.types import Terms


@dataclasses.dataclass(frozen=True)
class Transform:
    """How products of a head become logits: times ``scale``, then softly capped.

    ``rows``: how many rows of the head are tokens, the rest is padding; None: all.
    """

    scale: float = 1.0
    softcap: float | None = None
    rows: int | None = None

    def __call__(self, products: Float[Array, "N V"]) -> Float[Array, "N V"]:
        out = products if self.scale == 1.0 else products * self.scale
        return out if self.softcap is None else self.softcap * jnp.tanh(out / self.softcap)

    @property
    def plain(self) -> bool:
        """Whether logits are the products."""
        return self.scale == 1.0 and self.softcap is None

    def tokens(self, head: Float[Array, "V D"]) -> int:
        """Rows of a head that are tokens."""
        return head.shape[0] if self.rows is None else min(self.rows, head.shape[0])


class _Plan(NamedTuple):
    """What selects the compiled code; hashable."""

    terms: Terms
    student: Transform
    teacher: Transform
    train_head: bool
    chunks: int
    group: int
    smooth: float | None
    best: int


class _Trained(NamedTuple):
    """What gradients are of."""

    hidden: Float[Array, "N D"]
    vectors: Float[Array, "N R"] | None
    table: Float[Array, "V R"] | None
    head: Float[Array, "V D"] | None  # None: frozen


class _Fixed(NamedTuple):
    """What no gradient is of."""

    labels: Int[Array, " N"]
    weights: Float[Array, " N"]
    teacher: Float[Array, "N D"] | None
    teacher_head: Float[Array, "V D"] | None
    head: Float[Array, "V D"] | None  # None: trained


def head_loss(
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    labels: Int[Array, " N"],
    weights: Float[Array, " N"],
    terms: Terms,
    *,
    teacher: tuple[Float[Array, "N E"], Float[Array, "W E"]] | None = None,
    student_transform: Transform = Transform(),
    teacher_transform: Transform = Transform(),
    extra: tuple[Float[Array, "N R"], Float[Array, "U R"]] | None = None,
    train_head: bool = False,
    chunks: int = 1,
    dpace_smooth: float | None = None,
    group: int = 1,
    best: int = 0,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Sum over rows of weight times terms, and what each row was: ``correct`` (bool), ``ce``, every term by its name,
    with a teacher ``alpha``, and ``weight``. The rows carry no gradient.

    ``hidden``: the drafter's rows after its final norm. ``labels`` are rows of ``head``: draft ids in a reduced
    vocabulary. Rows of weight 0 do not count, whatever they hold, nor do those whose label is no token of both heads.
    ``teacher``: the target's hidden rows and its head, whose rows are those of ``head``: in a reduced vocabulary the
    caller takes the rows, and the distribution is over these. If one head has fewer rows (of tokens), the other's
    further ones are padding. ``extra``: vectors and a table whose product is added to the logits behind the
    student's transform (a low-rank correction); both are trained. ``train_head``: whether ``head`` is; otherwise it
    gets no gradient. ``chunks``: parts the rows are done in, each a multiple of ``group`` rows. ``dpace_smooth``:
    weights are multiplied by those of D-PACE within each ``group`` rows. ``best``: the ids of so many largest logits
    are among the rows, as ``best`` [N best].

    ValueError for terms that :func:`specjax.train.terms.check_terms` refuses, and for terms that need a teacher there
    is none of.
    """
    terms = check_terms(terms)
    if needs_teacher(terms) and teacher is None:
        raise ValueError(
            f"loss terms {[n for n, _ in terms if n != 'ce']} compare with a teacher; none was given"
        )
    taught, taught_head = (None, None) if teacher is None else teacher
    vectors, table = (None, None) if extra is None else extra
    size = student_transform.tokens(head)
    if taught_head is not None:
        size = min(size, teacher_transform.tokens(taught_head))
    head, table, taught_head = _first(head, size), _first(table, size), _first(taught_head, size)
    counted = (weights != 0) & (labels >= 0) & (labels < size)
    weights = jnp.where(counted, weights.astype(jnp.float32), 0)
    labels = jnp.clip(labels, 0, size - 1)
    blank = lambda x: None if x is None else jnp.where(counted[:, None], x, 0)  # noqa: E731
    plan = _Plan(terms, student_transform, teacher_transform, train_head, chunks, group, dpace_smooth, best)
    trained = _Trained(blank(hidden), blank(vectors), table, head if train_head else None)
    fixed = _Fixed(labels, weights, blank(taught), taught_head, None if train_head else head)
    loss, rows = _summed(plan, trained, jax.lax.stop_gradient(fixed))
    return loss, jax.lax.stop_gradient(rows)


def _first(table: Any, size: int) -> Any:
    """The first ``size`` rows; a correction may know fewer, and says nothing of the others."""
    if table is None or table.shape[0] == size:
        return table
    return jnp.pad(table[:size], ((0, max(0, size - table.shape[0])), (0, 0)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(plan: _Plan, trained: _Trained, fixed: _Fixed):
    return _scanned(plan, trained, fixed, False)[0]


def _summed_forward(plan, trained, fixed):
    return _scanned(plan, trained, fixed, True)


def _summed_backward(plan, gradient, given):
    del plan
    factor = given[0]
    return jax.tree.map(lambda g: (factor * g.astype(jnp.float32)).astype(g.dtype), gradient), None


_summed.defvjp(_summed_forward, _summed_backward)


def _scanned(plan: _Plan, trained: _Trained, fixed: _Fixed, differentiate: bool):
    """((loss, rows), gradients of ``trained`` or None): the sum over chunks."""
    n = fixed.labels.shape[0]
    tables = (trained.table, trained.head if plan.train_head else fixed.head, fixed.teacher_head)
    per_row = (trained.hidden, trained.vectors, fixed.labels, fixed.weights, fixed.teacher)

    def one(carry, chunk):
        loss, rows, row_gradients, table_gradients = _chunk(plan, chunk, tables, differentiate)
        carry = jax.tree.map(jnp.add, carry, (loss, table_gradients))
        return carry, (rows, row_gradients)

    zeros = lambda x, on: jnp.zeros(x.shape, jnp.float32) if differentiate and on and x is not None else None  # noqa: E731
    start = (jnp.zeros((), jnp.float32), (zeros(tables[0], True), zeros(tables[1], plan.train_head)))
    pieces = jax.tree.map(lambda x: _split(x, plan), per_row)
    (loss, (d_table, d_head)), (rows, d_rows) = jax.lax.scan(one, start, pieces)
    rows, d_rows = jax.tree.map(lambda x: _joined(x, plan, n), (rows, d_rows))
    if not differentiate:
        return (loss, rows), None
    cast = lambda g, like: None if g is None else g.astype(like.dtype)  # noqa: E731
    d_hidden, d_vectors = d_rows
    return (loss, rows), _Trained(d_hidden, d_vectors, cast(d_table, tables[0]), cast(d_head, tables[1]))


def _split(x: Array, plan: _Plan) -> Array:
    """``[chunks, n, ...]``: chunk c has every ``chunks``-th group, so that rows spread over devices stay spread."""
    unit = plan.chunks * plan.group
    x = jnp.pad(x, ((0, -x.shape[0] % unit), *((0, 0),) * (x.ndim - 1)))
    parts = x.reshape(-1, plan.chunks, plan.group, *x.shape[1:]).swapaxes(0, 1)
    return parts.reshape(plan.chunks, -1, *x.shape[1:])


def _joined(x: Array, plan: _Plan, n: int) -> Array:
    """What :func:`_split` took apart, ``n`` rows."""
    parts = x.reshape(plan.chunks, -1, plan.group, *x.shape[2:]).swapaxes(0, 1)
    return parts.reshape(-1, *x.shape[2:])[:n]


def _chunk(plan: _Plan, per_row, tables, differentiate: bool):
    """Loss, rows, and gradients of the rows' inputs and of the tables (None where there is nothing trained)."""
    hidden, vectors, labels, weights, taught = per_row
    table, head, taught_head = tables
    teacher = None if taught is None else plan.teacher(linear(taught, taught_head, out_dtype=jnp.float32))
    # A correction of plain logits is one product with wider rows: it costs no further pass over the logits.
    joint = vectors is not None and plan.student.plain and vectors.dtype == hidden.dtype
    pairs = [(hidden, head)] if vectors is None else [(hidden, head), (vectors, table)]
    if joint:
        pairs = [(jnp.concatenate([hidden, vectors], -1), jnp.concatenate([head, table], -1))]
    products = [linear(x, w, out_dtype=jnp.float32) for x, w in pairs]

    def total(products):
        logits = plan.student(products[0]) + (products[1] if len(products) > 1 else 0)
        rows = row_terms(tuple(name for name, _ in plan.terms), logits, labels, teacher)
        rows["weight"] = weights
        if plan.best:
            rows["best"] = jax.lax.top_k(jax.lax.stop_gradient(logits), plan.best)[1]
        if plan.smooth is not None:
            fold = lambda x: x.reshape(-1, plan.group)  # noqa: E731
            rows["weight"] = weights * dpace(fold(rows["ce"]), fold(weights), plan.smooth).reshape(-1)
        return jnp.sum(rows["weight"] * sum(factor * rows[name] for name, factor in plan.terms)), rows

    if not differentiate:
        return *total(products), (None, None), (None, None)
    (loss, rows), slopes = jax.value_and_grad(total, has_aux=True)(products)
    slopes = [slope.astype(w.dtype) for slope, (_, w) in zip(slopes, pairs, strict=True)]
    inward = [_product(slope, w, 0).astype(x.dtype) for slope, (x, w) in zip(slopes, pairs, strict=True)]
    if joint:
        inward = jnp.split(inward[0], [hidden.shape[1]], -1)
    d_rows = (inward[0], None if vectors is None else inward[-1])
    d_table = None if vectors is None else _product(slopes[-1].T, vectors, 0)
    return loss, rows, d_rows, (d_table, _product(slopes[0].T, hidden, 0) if plan.train_head else None)


def _product(a: Array, b: Array, axis: int) -> Array:
    """float32 product of ``a``'s last axis with an axis of ``b``."""
    contract = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(
        a, b, contract, precision=precision_of(a.dtype), preferred_element_type=jnp.float32
    )


def mean(total: Float[Array, ""], weight: Float[Array, ""]) -> Float[Array, ""]:
    """``total / weight``; 0 when nothing counts."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1), 0)


def metric(rows: Any, weights: Float[Array, "..."]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum, weight) of per-row values where ``weights`` are not 0, each row counting once."""
    counted = (weights != 0).astype(jnp.float32)
    return jnp.sum(rows.astype(jnp.float32) * counted), jnp.sum(counted)
