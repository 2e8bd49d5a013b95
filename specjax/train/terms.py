"""The terms a loss is made of: what each row of a head costs.

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

All of it is float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.train.types import Terms

#: Terms that compare with the teacher's distribution; the only other one is "ce".
TEACHER_TERMS = ("kl", "rkl", "jsd", "l1", "tv", "nla", "lk_hybrid")
#: Smallest alpha that ``nla`` tells apart, and what ``lk_hybrid`` multiplies alpha by.
ALPHA_MIN, HYBRID_RATE = 1e-5, 3.0
#: Logits below this count as this: a label that is masked out costs much and not infinity.
FLOOR = -1e9


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
