"""How many tokens to draft: what past rounds say about every width. Pure functions on the host.

A round with N drafts gives ``tokens(chances, N)`` tokens in ``seconds(measured, N)``; the width with the most tokens
per second is chosen, and plain decoding (N = 0) whenever none is faster. Chances and seconds come from rounds that are
over (:mod:`specjax.core.pace`), so a width never depends on the tokens it is used for.
"""

import itertools
from collections.abc import Mapping, Sequence

#: Widths a self-tuned call chooses from, beside 0 and the drafter's own.
BUCKETS = (1, 3, 7, 15)

#: A width that was measured replaces the present one when it promises this much more, one that must be compiled
#: first when it promises that much more.
GAIN, GAIN_UNSEEN = 1.02, 1.06

#: Beyond the widest width measured a round is taken to grow by this part of the slope before: products of more rows
#: cost less and less per row. A guess that is too low costs one chunk, in which it is measured.
SLOPE_BEYOND = 0.5


def buckets(own: int, most: int) -> tuple[int, ...]:
    """Draft widths in ascending order: :data:`BUCKETS` up to ``most``, and the drafter's own."""
    return tuple(sorted({w for w in (*BUCKETS, own) if 1 <= w <= most}))


def tokens(chances: Sequence[float], width: int) -> float:
    """Expected tokens of a round with ``width`` drafts, the target's own among them. ``chances[i]``: that draft i is
    kept when those before it are."""
    total, reach = 1.0, 1.0
    for chance in chances[:width]:
        reach *= chance
        total += reach
    return total


def seconds(measured: Mapping[int, float], width: int) -> float:
    """Seconds of a round of a width: measured, or from a line through its neighbours. Needs two widths for that;
    with one, that one's."""
    if width in measured:
        return measured[width]
    below, above = [w for w in measured if w < width], [w for w in measured if w > width]
    if below and above:
        low, high = max(below), min(above)
        return measured[low] + (width - low) * _slope(measured, low, high)
    known = sorted(measured)
    if not below:
        return measured[known[0]]
    slope = _slope(measured, known[-2], known[-1]) if len(known) > 1 else 0.0
    return measured[known[-1]] + (width - known[-1]) * SLOPE_BEYOND * max(slope, 0.0)


def _slope(measured: Mapping[int, float], low: int, high: int) -> float:
    return (measured[high] - measured[low]) / (high - low)


def speeds(
    chances: Sequence[float], measured: Mapping[int, float], widths: Sequence[int]
) -> dict[int, float]:
    """Tokens per second and row of plain decoding (0) and of every width."""
    return {w: tokens(chances, w) / seconds(measured, w) for w in (0, *widths)}


def choose(
    chances: Sequence[float], measured: Mapping[int, float], widths: Sequence[int], current: int = 0
) -> int:
    """The width to go on with, 0 for plain decoding; ``measured`` holds seconds of a round, 0 among them.

    Never a width whose predicted speed is below plain decoding's. ``current`` is kept unless another is better by
    :data:`GAIN` (by :data:`GAIN_UNSEEN` if its seconds are only estimated).
    """
    speed = speeds(chances, measured, widths)
    worth = {w: s for w, s in speed.items() if s >= speed[0]}
    seen = {w: s for w, s in worth.items() if w in measured}
    best = max(seen, key=lambda w: seen[w])
    if current in seen and seen[best] < GAIN * seen[current]:
        best = current
    unseen = {w: s for w, s in worth.items() if w not in measured and s > GAIN_UNSEEN * seen[best]}
    return max(unseen, key=lambda w: unseen[w]) if unseen else best


def thresholds(
    chances: Sequence[float], inner: Mapping[int, float], speed: float, width: int
) -> tuple[float, ...]:
    """Per draft of a round: the least chance of it and all before it being kept at which it is worth verifying.

    ``inner``: seconds of a round by the drafts it verified; ``speed``: tokens per second and row. Where a wider
    verification begins, the drafts it adds must pay for it: the first one's chance, times one plus what those behind it
    are worth in its case. Elsewhere 0: there is nothing to save. Rows of a batch share the price and multiply the gain,
    so their number does not matter.
    """
    cut, edges = [0.0] * width, sorted({w for w in inner if w < width} | {width})
    for low, high in itertools.pairwise(edges):
        price = max(inner.get(high, inner[low]) - inner[low], 0.0) * speed
        cut[low] = float(min(price / tokens(chances[low + 1 :], high - low - 1), 1.0))
    return tuple(cut)
