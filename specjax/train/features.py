"""What training reads of the target: one forward pass over packed rows, and the flat form in which it is kept.

A document's features do not depend on what it is packed with, so they can be computed once, kept by document and
handed out again in rows of another packing (:mod:`specjax.train.sources`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax import registry
from specjax.train import packed
from specjax.train.types import Batch, Features
from specjax.types import KVView, Pair, TapSpec

KINDS = ("full", "sliding")

#: Attention scores of a pass in bytes, beyond which rows are run in parts.
SCORE_BYTES = 4 << 30


def check(pair: Pair, batch: Batch) -> None:
    """ValueError where the target cannot run the rows as they are packed, or would not tell. Reads the batch."""
    doc = np.asarray(batch.doc)
    if doc.max(initial=-1) > 0 and not packed.packable(pair):
        raise ValueError(
            f"{pair.family} targets keep a recurrent state that runs through a whole row, and rows hold up to "
            f"{doc.max() + 1} documents: pack one document per row"
        )
    longest, limit = int(np.asarray(batch.pos).max(initial=-1)) + 1, pair.target_cfg.max_positions
    if longest > limit:
        raise ValueError(f"a document of {longest} tokens is beyond the {limit} positions of the target")


def extract(target: Any, pair: Pair, batch: Batch, needs: TapSpec, dtype: Any = None) -> Features:
    """Features of a batch: traced, never differentiated, zero in padding (``kv``: position -1 there).

    ``target``: weights of the target of ``pair``, in the type to compute in. ``needs``: the taps, and whether keys and
    values; ``hidden`` is always there. ``dtype``: of the features; None: as computed. Rows that :func:`check` refuses
    give wrong numbers here. ValueError when keys and values are asked of a target that lends none.
    """
    target, rows, length = jax.lax.stop_gradient(target), *batch.tokens.shape
    at_once = _rows_at_once(rows, 4 * pair.target_cfg.heads * length**2)
    if at_once == rows:
        out = _forward(target, pair, needs, dtype, batch)
    else:
        parts = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), batch)
        out = jax.lax.map(lambda part: _forward(target, pair, needs, dtype, part), parts)
        out = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)
    # what reads them must not change how they are computed: they are the same numbers from every source
    return jax.lax.stop_gradient(jax.lax.optimization_barrier(out))


def spread(run: Callable[..., Any], mesh: jax.sharding.Mesh | None) -> Callable[..., Any]:
    """``run(batch, *others)`` of rows that have nothing to do with one another: every device of the mesh does its own,
    and nothing travels. The result's arrays have rows first, as the batch has; None: as it is."""
    if mesh is None:
        return run

    def split(batch: Batch, *others: Any) -> Any:
        specs = (jax.P("data"), *(jax.P() for _ in others))
        return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=jax.P("data"), check_vma=False)(
            batch, *others
        )

    return split


def _rows_at_once(rows: int, bytes_per_row: int) -> int:
    """The largest divisor of ``rows`` whose scores are within the limit, at least 1."""
    fitting = max(1, min(rows, SCORE_BYTES // max(bytes_per_row, 1)))
    return next(n for n in range(fitting, 0, -1) if rows % n == 0)


def _forward(target: Any, pair: Pair, needs: TapSpec, dtype: Any, batch: Batch) -> Features:
    family, cfg, real = registry.target(pair.family), pair.target_cfg, batch.doc >= 0
    cache = packed.caches(pair, batch.doc, batch.pos, family.shared(target, cfg).embed.dtype)
    valid = jnp.sum(real, 1, dtype=jnp.int32)
    out = family.forward(
        target, cfg, batch.tokens, batch.pos, valid, cache, TapSpec(tuple(sorted(needs.taps))), "extend"
    )
    clean = lambda x: jnp.where(real[..., None], x, 0).astype(dtype or x.dtype)  # noqa: E731
    lent = None
    if needs.kv:
        pos, heads = jnp.where(real, batch.pos, -1), real[:, None]
        zeroed = lambda x: jnp.where(heads[..., None], x, 0).astype(dtype or x.dtype)  # noqa: E731
        views = _views(family, target, cfg, out.cache)
        lent = {kind: KVView(zeroed(view.k), zeroed(view.v), pos) for kind, view in views.items()}
    return Features(clean(out.hidden), {j: clean(x) for j, x in out.taps.items()}, lent)


def _views(family: Any, target: Any, cfg: Any, cache: Any) -> dict[str, KVView]:
    """Keys and values of every kind of layer the target lends any of."""
    found, refused = {}, []
    for kind in KINDS:
        try:
            found[kind] = family.kv_view(target, cfg, cache, kind)
        except ValueError as error:
            refused.append(str(error))
    if not found:
        raise ValueError(f"keys and values are needed, but: {'; '.join(refused)}")
    return found


class Field(NamedTuple):
    """One part of a token's record: columns ``start`` to ``start + width``. ``heads``: 0, or of keys and values."""

    name: str  # "hidden", "tap.7", "full.k", ...
    start: int
    width: int
    heads: int = 0


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the features of a token lie in a flat record ``[width]`` of one type. Static."""

    fields: tuple[Field, ...]
    dtype: str

    @property
    def width(self) -> int:
        last = self.fields[-1]
        return last.start + last.width

    @property
    def bytes_per_token(self) -> int:
        return self.width * jnp.dtype(self.dtype).itemsize


def layout(target: Any, pair: Pair, needs: TapSpec, dtype: Any = None) -> Layout:
    """Layout of what :func:`extract` gives; ``target`` may be shapes alone. Nothing is computed."""
    ids = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    batch = Batch(ids, ids, ids, jax.ShapeDtypeStruct((1, 2), jnp.bool_))
    shapes = jax.eval_shape(lambda t, b: extract(t, pair, b, needs, dtype), target, batch)
    fields, start = [], 0
    for name, x in _parts(shapes):
        heads = x.shape[1] if x.ndim == 4 else 0
        width = x.shape[-1] * max(heads, 1)
        fields.append(Field(name, start, width, heads))
        start += width
    kinds = {str(x.dtype) for _, x in _parts(shapes)}
    return Layout(tuple(fields), kinds.pop() if len(kinds) == 1 else "float32")


def _parts(features: Features) -> list[tuple[str, Any]]:
    """Arrays of features by name, in the order in which they are stored."""
    parts = [("hidden", features.hidden)] + [(f"tap.{j}", x) for j, x in sorted(features.taps.items())]
    for kind, view in sorted((features.kv or {}).items()):
        parts += [(f"{kind}.k", view.k), (f"{kind}.v", view.v)]
    return parts


def flatten(features: Features, shape: Layout) -> Float[Array, "R T W"]:
    """Records of all tokens."""
    rows, length = features.hidden.shape[:2]
    by_token = lambda x: x.swapaxes(1, 2) if x.ndim == 4 else x  # noqa: E731
    flat = [by_token(x).reshape(rows, length, -1).astype(shape.dtype) for _, x in _parts(features)]
    return jnp.concatenate(flat, -1)


def unflatten(
    records: Float[Array, "R T W"],
    shape: Layout,
    needs: TapSpec,
    doc: Int[Array, "R T"],
    pos: Int[Array, "R T"],
) -> Features:
    """Features again; of a layout with more than is needed, what is needed."""
    got = {f.name: _field(records, f) for f in shape.fields}
    kinds = [k for k in KINDS if f"{k}.k" in got] if needs.kv else []
    at = jnp.where(doc >= 0, pos, -1)
    lent = {kind: KVView(got[f"{kind}.k"], got[f"{kind}.v"], at) for kind in kinds}
    return Features(got["hidden"], {j: got[f"tap.{j}"] for j in sorted(needs.taps)}, lent or None)


def _field(records: Float[Array, "R T W"], field: Field) -> Array:
    x = records[..., field.start : field.start + field.width]
    return x.reshape(*x.shape[:2], field.heads, -1).swapaxes(1, 2) if field.heads else x
