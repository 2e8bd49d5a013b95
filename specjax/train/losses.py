"""Losses over the rows of an output head, summed in chunks so that ``[rows, vocabulary]`` never exists whole.

With q the drafter's distribution and p the teacher's (the target's, at temperature 1), a row's terms are:

============= ==================================================== ==========================================
name          value                                                source
============= ==================================================== ==========================================
``ce``        -log q(label)                                        the text itself, no teacher
``kl``        sum p (log p - log q), the forward divergence        gradient of the soft cross entropy
``rkl``       sum q (log q - log p), the reverse one
``jsd``       half KL(p | m) + half KL(q | m), m = (p + q) / 2     Lin 1991
``l1``        sum |q - p|                                          DeepSpec, which does not halve it
``tv``        half of ``l1``: 1 - alpha                            alpha = sum min(p, q), the chance that
                                                                   rejection sampling keeps a draft
``nla``       -log max(alpha, 1e-5)
``lk_hybrid`` w kl + (1 - w) tv, w = exp(-3 alpha), not            arXiv 2602.23881
              differentiated
============= ==================================================== ==========================================

All of it is float32; products of a head are in the weights' type with float32 sums, and so are those of its
gradients: the logits' gradient is rounded to the weights' type. Gradients are taken in the forward pass, chunk by
chunk, so that no logits are kept or made twice.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.layers.linear import linear, precision_of
from specjax.train.types import Terms

#: Terms that compare with the teacher's distribution; the only other one is "ce".
TEACHER_TERMS = ("kl", "rkl", "jsd", "l1", "tv", "nla", "lk_hybrid")
#: Smallest alpha that ``nla`` tells apart, and what ``lk_hybrid`` multiplies alpha by.
ALPHA_MIN, HYBRID_RATE = 1e-5, 3.0
#: Logits below this count as this: a label that is masked out costs much and not infinity.
FLOOR = -1e9


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


def check_terms(terms: Terms, others: tuple[str, ...] = ()) -> Terms:
    """The terms that are of the head's rows; ``others`` are known to the caller.

    ValueError for no terms, an unknown name (the known ones are listed), a name given twice, and a coefficient that is
    not a positive number.
    """
    known = ("ce", *TEACHER_TERMS, *others)
    names = [name for name, _ in terms]
    unknown = sorted(set(names) - set(known))
    if unknown or len(set(names)) != len(names) or not names:
        raise ValueError(f"loss terms {names}: give each once, at least one, of {', '.join(known)}")
    for name, factor in terms:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < float("inf"):
            raise ValueError(
                f"the coefficient of loss term {name!r} must be a positive number, got {factor!r}"
            )
    return tuple((name, float(factor)) for name, factor in terms if name not in others)


def needs_teacher(terms: Terms) -> bool:
    """Whether any of the terms compares with the teacher."""
    return any(name in TEACHER_TERMS for name, _ in terms)


def row_terms(
    names: tuple[str, ...],
    logits: Float[Array, "N V"],
    labels: Int[Array, " N"],
    teacher: Float[Array, "N V"] | None,
) -> dict[str, Float[Array, " N"]]:
    """Each row's terms by name, ``ce`` and ``correct`` (the label has the largest logit) always among them, and with
    a teacher ``alpha``. Logits are float32; no teacher's gradient is taken."""
    logits = jnp.maximum(logits, FLOOR)
    chosen = jnp.arange(logits.shape[-1]) == labels[:, None]  # no gather, whose gradient would be a scatter
    of_label = jnp.sum(jnp.where(chosen, logits, 0), -1)
    total = jax.nn.logsumexp(logits, -1)
    out = {"ce": total - of_label, "correct": of_label >= jnp.max(jax.lax.stop_gradient(logits), -1)}
    if teacher is None:
        return out
    log_q = logits - total[:, None]
    log_p = jax.lax.stop_gradient(jax.nn.log_softmax(jnp.maximum(teacher, FLOOR), -1))
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    l1 = jnp.sum(jnp.abs(q - p), -1)
    alpha = 1 - l1 / 2
    out |= {"l1": l1, "tv": l1 / 2, "alpha": alpha, "nla": -jnp.log(jnp.maximum(alpha, ALPHA_MIN))}
    if {"kl", "lk_hybrid"} & set(names):
        out["kl"] = jnp.sum(p * (log_p - log_q), -1)
        weight = jnp.exp(-HYBRID_RATE * jax.lax.stop_gradient(alpha))
        out["lk_hybrid"] = weight * out["kl"] + (1 - weight) * out["tv"]
    if "rkl" in names:
        out["rkl"] = jnp.sum(q * (log_q - log_p), -1)
    if "jsd" in names:
        log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
        out["jsd"] = jnp.sum(p * (log_p - log_m) + q * (log_q - log_m), -1) / 2
    kept = {"ce", "correct", "alpha", *names}
    return {name: value for name, value in out.items() if name in kept}


def dpace(ce: Float[Array, "M N"], counted: Float[Array, "M N"], smooth: float) -> Float[Array, "M N"]:
    """Weights of a block's rows by D-PACE: the sum over later rows j (and this one) of the chance that all up to j
    are right, each row's chance q of its label being taken as ``(1 - smooth) q + smooth``. Rows that do not count
    (``counted`` 0) have weight 0 and are passed over. Never differentiated."""
    on = counted > 0
    chance = jnp.where(on, (1 - smooth) * jnp.exp(-jax.lax.stop_gradient(ce)) + smooth, 1.0)
    reach = jnp.cumprod(chance, -1) * on
    return jnp.flip(jnp.cumsum(jnp.flip(reach, -1), -1), -1) * on


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
    weights are multiplied by those of :func:`dpace` within each ``group`` rows. ``best``: the ids of so many largest
    logits are among the rows, as ``best`` [N best].

    ValueError for terms as :func:`check_terms` says, and for terms that need a teacher there is none of.
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
