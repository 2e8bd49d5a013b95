"""Tiles of kernels by kind of device, as data.

``sm_90`` is Hopper (H100, H200), ``gfx942`` MI300X and MI325X, ``gfx950`` MI350X and MI355X; ``default`` is for all
others and asks for little. AMD's tiles were chosen by registers and local memory of the compiled code
(``make rocm-check``), not by time: nobody has run them on such a device. ``benchmarks/tune_kernels.py`` measures
candidates.
"""

import dataclasses
from collections.abc import Iterator
from typing import TypeVar

import jax


@dataclasses.dataclass(frozen=True)
class Chip:
    """What limits a kernel: processors, bytes of local memory that a program can have, lanes of a warp."""

    processors: int
    local: int
    lanes: int

    def check(self, warps: int) -> None:
        """ValueError if ``warps`` are more threads than a program may have (1024)."""
        if not 0 < warps * self.lanes <= 1024:
            raise ValueError(f"{warps} warps of {self.lanes} lanes: a program has at most 1024 threads")


CHIPS = {
    "sm_90": Chip(processors=132, local=227 * 1024, lanes=32),
    "gfx942": Chip(processors=304, local=64 * 1024, lanes=64),
    "gfx950": Chip(processors=256, local=160 * 1024, lanes=64),
    "default": Chip(processors=108, local=64 * 1024, lanes=64),
}

LEAST = 16  # the fewest rows or columns that NVIDIA's and AMD's matrix units take

#: What names of devices contain.
KINDS = {
    "gfx942": ("gfx942", "mi300", "mi325"),
    "gfx950": ("gfx950", "mi350", "mi355"),
    "sm_90": ("h100", "h200", "gh200", "h20", "h800", "sm_90"),
}


def kind(name: str | None = None) -> str:
    """The table's name for a device kind (default: that of the first device); ``"default"`` for whatever is unknown."""
    if name is None:
        device = jax.devices()[0]
        name = f"{device.device_kind} {getattr(device, 'compute_capability', '')}"
    lowered = name.lower()
    return next((k for k, parts in KINDS.items() if any(p in lowered for p in parts)), "default")


@dataclasses.dataclass(frozen=True)
class Attention:
    """Block attention: ``keys`` of a tile, ``warps``, ``stages`` of reads under way, programs per processor
    (``resident``), tiles that a program takes at least (``least``)."""

    keys: int
    warps: int
    stages: int
    resident: int = 2
    least: int = 2


#: AMD's data-centre chips, whose tiles are the same until one has been timed.
_CDNA_ATTENTION = {
    (64, 128): Attention(64, 4, 1),
    (128, 64): Attention(32, 4, 1),
    (128, 128): Attention(32, 8, 1, resident=1),
    (256, 64): Attention(16, 8, 1, resident=1),
    (512, 32): Attention(16, 4, 1, resident=1),
}

#: By chip: (largest padded head size, most query rows of a program) -> tiles. The first that is large enough serves.
ATTENTION: dict[str, dict[tuple[int, int], Attention]] = {
    "sm_90": {
        (64, 128): Attention(64, 4, 3),
        (128, 64): Attention(64, 4, 3),
        (128, 128): Attention(64, 8, 3, resident=1),
        (256, 64): Attention(32, 8, 2, resident=1),
        (512, 64): Attention(16, 8, 3, resident=1),
    },
    "gfx942": _CDNA_ATTENTION,
    "gfx950": _CDNA_ATTENTION,
    "default": {
        (128, 64): Attention(32, 4, 1),
        (256, 64): Attention(16, 8, 1, resident=1),
        (512, 32): Attention(16, 4, 1, resident=1),
    },
}


def attention_rows(chip: str, size: int) -> int:
    """The most query rows that a program of this padded head size takes."""
    wide = min(w for w, _ in ATTENTION[chip] if size <= w)
    return max(rows for w, rows in ATTENTION[chip] if w == wide)


def attention(chip: str, size: int, rows: int) -> Iterator[Attention]:
    """The tiles for a padded head size and query rows, then smaller ones, for where the first do not fit."""
    found = next((t for (wide, most), t in ATTENTION[chip].items() if size <= wide and rows <= most), None)
    while found is not None:
        yield found
        if found.stages > 1:
            found = dataclasses.replace(found, stages=found.stages - 1)
        else:
            found = dataclasses.replace(found, keys=found.keys // 2) if found.keys > 16 else None


@dataclasses.dataclass(frozen=True)
class Projection:
    """Features times the weights of keys and values: ``rows`` of a weight, ``depth`` columns at a time, in ``parts``
    along the columns."""

    rows: int
    depth: int
    parts: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Injection:
    """KV injection: tiles by the most tokens they serve (more are a matrix product of XLA), and the last kernel's
    tokens and warps."""

    projection: dict[int, Projection]
    tokens: int = 4
    warps: int = 2

    def project(self, tokens: int) -> Projection | None:
        """Tiles for this many tokens; None = a matrix product of XLA."""
        return next((tile for most, tile in self.projection.items() if tokens <= most), None)


_CDNA_INJECTION = Injection({16: Projection(64, 128, 4, 4, 2), 64: Projection(64, 64, 2, 4, 2)})

INJECTION: dict[str, Injection] = {
    "sm_90": Injection({16: Projection(64, 128, 4, 4, 4), 64: Projection(64, 64, 2, 4, 4)}),
    "gfx942": _CDNA_INJECTION,
    "gfx950": _CDNA_INJECTION,
    "default": Injection({16: Projection(32, 64, 4, 4, 2), 64: Projection(32, 64, 2, 4, 1)}),
}


Deep = TypeVar("Deep", "Projection", "Product", "Head")


def _and_smaller(tile: Deep) -> Iterator[Deep]:
    """A tile, then such with fewer reads under way and less depth."""
    yield tile
    for stages, depth in ((2, 64), (1, 32)):
        yield dataclasses.replace(tile, stages=min(tile.stages, stages), depth=min(tile.depth, depth))


def injection(chip: str) -> Iterator[Injection]:
    """The tiles, then such with fewer reads under way and less depth."""
    found = INJECTION[chip]
    sizes, tiles = found.projection, map(_and_smaller, found.projection.values())
    for chosen in zip(*tiles, strict=True):
        yield dataclasses.replace(found, projection=dict(zip(sizes, chosen, strict=True)))


@dataclasses.dataclass(frozen=True)
class Product:
    """Few rows times a large weight: ``rows`` of the weight (halves of gate and of up), ``depth`` columns at a time,
    ``warps``, ``stages`` of reads under way, at most ``fill`` programs per processor, at least ``least`` columns for a
    program."""

    rows: int
    depth: int
    warps: int
    stages: int
    fill: int = 3
    least: int = 512


#: By chip and bytes of a number. Three programs with three reads of 16 KiB under way fill a processor of Hopper, all
#: programs at once.
PRODUCT: dict[str, dict[int, Product]] = {
    "sm_90": {2: Product(64, 128, 4, 4), 4: Product(32, 32, 4, 4)},
    "gfx942": {2: Product(64, 128, 4, 2, fill=2), 4: Product(32, 32, 4, 2, fill=2)},
    "gfx950": {2: Product(64, 128, 4, 2, fill=3), 4: Product(32, 32, 4, 2, fill=2)},
    "default": {2: Product(32, 64, 4, 2, fill=2), 4: Product(32, 32, 4, 1, fill=2)},
}


def product(chip: str, itemsize: int) -> Iterator[Product]:
    """The tiles for numbers of so many bytes, then such with fewer reads under way and less depth."""
    return _and_smaller(PRODUCT[chip][itemsize])


def chip_of(platform: str) -> str:
    """The chip whose tiles a program for a platform has: this machine's if it is of the platform."""
    chip = kind()
    return (
        chip
        if chip.startswith("gfx") == (platform == "rocm")
        else {"cuda": "sm_90", "rocm": "gfx942"}[platform]
    )


@dataclasses.dataclass(frozen=True)
class Head:
    """A head of which the best id is wanted: ``rows`` of it for a program, ``depth`` columns at a time, ``warps``,
    ``stages`` of reads under way."""

    rows: int
    depth: int
    warps: int
    stages: int


#: By chip and bytes of a number.
HEAD: dict[str, dict[int, Head]] = {
    "sm_90": {2: Head(64, 128, 4, 4), 4: Head(32, 32, 4, 4)},
    "gfx942": {2: Head(64, 128, 4, 2), 4: Head(32, 32, 4, 2)},
    "gfx950": {2: Head(64, 128, 4, 2), 4: Head(32, 32, 4, 2)},
    "default": {2: Head(32, 64, 4, 2), 4: Head(32, 32, 4, 1)},
}


def head(chip: str, itemsize: int) -> Iterator[Head]:
    """The tile for numbers of so many bytes, then such with fewer reads under way and less depth."""
    return _and_smaller(HEAD[chip][itemsize])


@dataclasses.dataclass(frozen=True)
class Walk:
    """DSpark's walk: ``rows`` of the table for a tile, at most so many ``programs``, ``warps``, ``stages``."""

    rows: int
    programs: int
    warps: int
    stages: int


#: By chip: largest bytes of a row of the table -> tiles.
WALK: dict[str, dict[int, Walk]] = {
    "sm_90": {512: Walk(32, 256, 4, 4), 2048: Walk(16, 256, 4, 3)},
    "gfx942": {512: Walk(32, 256, 4, 2), 2048: Walk(16, 256, 4, 1)},
    "gfx950": {512: Walk(32, 256, 4, 2), 2048: Walk(16, 256, 4, 1)},
    "default": {2048: Walk(16, 128, 4, 1)},
}


def walk(chip: str, width: int) -> Iterator[Walk]:
    """Tiles for rows of so many bytes, then smaller ones."""
    found = next(tile for most, tile in WALK[chip].items() if width <= most)
    yield found
    yield dataclasses.replace(found, rows=16, stages=1)
