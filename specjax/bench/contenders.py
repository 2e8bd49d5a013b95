"""Which drafters are measured: names as a command line spells them, loaded one at a time onto one target."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from specjax import attach, identity, zoo
from specjax.checkpoints import known
from specjax.core.platform import backend
from specjax.types import Params


@dataclasses.dataclass(frozen=True)
class Contender:
    """A drafter by name. ``load`` gives params that have it; ``drafter``: how it was asked for."""

    name: str
    drafter: str
    load: Callable[[], Params]


def contenders(target: Params, methods: Any = None) -> list[Contender]:
    """Drafters to measure on a target.

    ``methods``: names ("ngram", a method that the package has a drafter of, a folder or Hub id), each perhaps as
    ``NAME=DRAFTER``, several drafters joined by "+" (a chain); a mapping from names to what :func:`specjax.load` takes
    as ``drafter``, or to params; params with a drafter, or a sequence of any of these. Default: "ngram" and every
    drafter that comes with the package. ValueError for two of one name.
    """
    if methods is None:
        methods = ["ngram", *(one.method for one in zoo.available(target.meta.name))]
    if isinstance(methods, Mapping):
        found = [_one(target, item, name) for name, item in methods.items()]
    else:
        listed = [methods] if isinstance(methods, str | Params) else list(methods)
        found = [_one(target, item) for item in listed]
    if not found:
        raise ValueError("no method to measure: name at least one")
    names = [one.name for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"method names must differ, got {twice} more than once: give names as NAME=DRAFTER")
    return found


def _one(target: Params, item: Any, name: str | None = None) -> Contender:
    if isinstance(item, Params):
        drafter = item.meta.drafter
        if drafter is None:
            raise ValueError("params without a drafter have nothing to measure beside plain decoding")
        label = "+".join(item.meta.drafter_cfg.drafters) if drafter == "chain" else drafter
        return Contender(name or label, label, lambda: item)
    if isinstance(item, str) and name is None:
        name, equals, rest = item.partition("=")
        item = rest if equals and "/" not in name else item
        name = name if equals and "/" not in name else item
    drafter = tuple(item.split("+")) if isinstance(item, str) and "+" in item else item
    settings = None
    if isinstance(drafter, Sequence) and not isinstance(drafter, str):
        drafter = tuple(drafter)
    wanted = attach.plan(drafter, None, settings, target.meta.name)
    if wanted is None:
        raise ValueError(f"method {name!r} names no drafter")
    label = "+".join(map(str, drafter)) if isinstance(drafter, tuple) else str(drafter)
    return Contender(name or label, label, lambda: attach.attach(target, wanted, _silent))


def _silent(text: str) -> None:
    del text


def digest(params: Params) -> str:
    """What identifies a drafter: its settings and the vectors of its weights."""
    return f"{params.meta.drafter} {known.digest([*jax.tree.leaves(params.drafter)])} {params.meta.drafter_cfg!r}"


def target_of(params: Params | Sequence[Params]) -> Params:
    """The target that params share. ValueError where they do not."""
    listed = [params] if isinstance(params, Params) else list(params)
    if not listed or not all(isinstance(one, Params) for one in listed):
        raise ValueError("params must come from specjax.load: one, or a list of them")
    first = listed[0].meta
    for one in listed[1:]:
        if (one.meta.family, one.meta.target_cfg, one.meta.name) != (
            first.family,
            first.target_cfg,
            first.name,
        ):
            raise ValueError(f"params have different targets: {first.name!r} and {one.meta.name!r}")
    return identity.without_drafter(listed[0])


def check_platform(wanted: str | None) -> None:
    """ValueError unless this process runs on the platform asked for ("cpu", "cuda", "rocm")."""
    if wanted not in (None, "cpu", "cuda", "rocm"):
        raise ValueError(f"platform must be cpu, cuda or rocm, got {wanted!r}")
    if wanted is not None and wanted != backend():
        raise ValueError(
            f"platform {wanted} was asked for, but jax runs on {backend()} ({jax.devices()[0].device_kind}): "
            "`specjax doctor` tells what is missing, and JAX_PLATFORMS chooses among what is there"
        )
