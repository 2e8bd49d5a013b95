"""A drafter's folder from one layout to another."""

from pathlib import Path

import jax.numpy as jnp

from specjax import registry
from specjax.checkpoints import exporter, hub, known, orbax
from specjax.checkpoints.drafter import LoadedDrafter, load_drafter
from specjax.checkpoints.load import load_tables, load_vectors
from specjax.checkpoints.writers import Target


def convert(
    source: str | Path,
    folder: str | Path,
    target: str | Path,
    layout: str = "own",
    dtype: str = "bfloat16",
    compact: bool | float = False,
    method: str | None = None,
) -> LoadedDrafter:
    """Read a drafter in any layout that :func:`specjax.load` knows and write it in another; what was read is returned.

    Of ``target``, the model the drafter is for, only embedding and head are read. ``method``: the kind of drafter;
    needed for "mtp" where the layer lies in a model's own folder. Everything else as :func:`specjax.export`.
    """
    lent_by = _target(target, layout)
    where = hub.resolve(source)
    loaded = load_drafter(
        where,
        lent_by.cfg,
        lent_by.shared,
        jnp.float32,
        method=method,
        eos_ids=lent_by.eos_ids,
        inside=str(source) == str(target),
        target_name=lent_by.name,
    )
    exporter.write(loaded.name, loaded.cfg, loaded.weights, lent_by, folder, layout, dtype, compact)
    return loaded


def _target(name: str | Path, layout: str) -> Target:
    """Facts and tables of a target, in float32."""
    if str(name) == "tiny":
        from specjax import testing

        params = testing.tiny_params()
    else:
        source = hub.resolve(name)
        if source.kind != "orbax":
            found, shared = load_tables(source, jnp.float32)
            short = known.short_name_of_file(found.family, found.cfg, lambda: load_vectors(source, found))
            public = exporter.public_name(short or str(name), layout)
            return Target(public, found.family, found.cfg, shared, found.eos_ids)
        params = orbax.load(source.path)
    meta = params.meta
    shared = registry.target(meta.family).shared(params.target, meta.target_cfg)
    return Target(exporter.public_name(meta.name, layout), meta.family, meta.target_cfg, shared, meta.eos_ids)
