"""``specjax.bench``: drafters beside plain decoding on one set of prompts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specjax import calls
from specjax.bench.contenders import check_platform, contenders, target_of
from specjax.bench.data import dataset as _dataset, not_longer
from specjax.bench.measure import measure
from specjax.bench.rows import Row
from specjax.bench.setting import lengths, longer
from specjax.bench.table import Table
from specjax.core.platform import enable_compilation_cache
from specjax.types import Params


def bench(
    params: Params | Sequence[Params],
    dataset: Any = "builtin",
    *,
    methods: Any = None,
    k: Any = None,
    batch: Any = 1,
    temperature: Any = 0.0,
    limit: int | None = None,
    max_prompt_tokens: int | None = None,
    repeats: int = 3,
    platform: str | None = None,
    done: Callable[[Row], None] | None = None,
    **options: Any,
) -> Table:
    """See :func:`specjax.bench`."""
    check_platform(platform)
    data, target = _dataset(dataset, limit), target_of(params)
    data = not_longer(data, max_prompt_tokens, lengths(target, list(data.prompts), options))
    if methods is None:
        listed = [params] if isinstance(params, Params) else list(params)
        methods = _named([one for one in listed if one.meta.drafter is not None]) or None
    enable_compilation_cache()
    rows: list[Row] = []
    for contender in contenders(target, methods):
        one = contender.load()
        for setting in axes(k, batch, temperature):
            calls.width(one.meta, None if setting["k"] == "auto" else setting["k"])
            row = measure(
                one, list(data.prompts), **setting, repeats=repeats, method=contender.name,
                drafter=contender.drafter, dataset=data.name,
                notes=longer(data.left_out, max_prompt_tokens), **options,
            )  # fmt: skip
            rows.append(row)
            if done is not None:
                done(row)
    return Table(tuple(rows))


def _named(listed: Sequence[Params]) -> Mapping[str, Params]:
    """Params by the name of their drafter; those of one name are numbered."""
    names = [
        "+".join(p.meta.drafter_cfg.drafters) if p.meta.drafter == "chain" else p.meta.drafter for p in listed
    ]
    return {
        name if names.count(name) == 1 else f"{name} #{names[: i + 1].count(name)}": one
        for i, (name, one) in enumerate(zip(names, listed, strict=True))
    }


def axes(k: Any, batch: Any, temperature: Any) -> Iterator[dict[str, Any]]:
    """Every combination, single values or sequences of them; k goes round fastest."""
    for b in values("batch", batch):
        for t in values("temperature", temperature):
            for width in values("k", k):
                yield {"k": width, "batch": b, "temperature": float(t)}


def values(name: str, given: Any) -> list[Any]:
    """One or more values, each once."""
    listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not listed:
        raise ValueError(f"{name} needs at least one value")
    return list(dict.fromkeys(listed))
