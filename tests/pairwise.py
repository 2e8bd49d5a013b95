"""Covering selections: few cases in which every pair of option values still occurs together."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Cases in which every pair of values of two factors occurs, if any allowed case has it.

    Greedy and deterministic: each case starts from the first pair not met yet and takes, factor by factor,
    the value that meets most new pairs (of equal ones the least used so far).
    """
    everything = [(c, _pairs(c)) for c in product(factors) if allowed(c)]
    open_pairs = dict.fromkeys(pair for _, pairs in everything for pair in pairs)
    chosen: list[Case] = []
    used = {name: dict.fromkeys(range(len(values)), 0) for name, values in factors.items()}
    while open_pairs:
        first = next(iter(open_pairs))
        left = [(c, pairs) for c, pairs in everything if first in pairs]
        for name, values in factors.items():
            gain = {i: _gain(left, name, v, open_pairs) for i, v in enumerate(values)}
            best = max(gain, key=lambda i: (gain[i], -used[name][i], -i))
            left = [(c, pairs) for c, pairs in left if c[name] == values[best]]
            used[name][best] += 1
        case, pairs = left[0]
        chosen.append(case)
        for pair in pairs:
            open_pairs.pop(pair, None)
    return chosen


def product(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Every combination."""
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def name(case: Case) -> str:
    """Short test id."""
    return "-".join(
        f"{key}={value}" if isinstance(value, int | float) else str(value) for key, value in case.items()
    )


def _pairs(case: Case) -> list[tuple]:
    return [tuple(sorted(two)) for two in itertools.combinations(((k, repr(v)) for k, v in case.items()), 2)]


def _gain(cases: list[tuple[Case, list[tuple]]], name: str, value: Any, open_pairs) -> int:
    """Most new pairs that a case with this value can still meet; -1 when none is left."""
    return max((sum(p in open_pairs for p in pairs) for c, pairs in cases if c[name] == value), default=-1)
