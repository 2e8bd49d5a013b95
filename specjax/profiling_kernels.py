"""Kernels in a trace, and the operations of a compiled program that they come from.

A device names what it runs: a fusion's kernel has the name of its operation, with "_" for "." and "-", a Pallas kernel
that of its ``pallas_call`` and perhaps a number, a library's kernel the library's. Beside it XLA notes the operation's
own name (``hlo_op``), except in command buffers (CUDA graphs), where that is the buffer's. So programs to be traced are
compiled without them (:func:`specjax.core.platform.traced_options`), which makes nothing but starting a kernel slower;
where they are traced with them all the same, names of kernels are what counts.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

#: What only holds other operations, or moves nothing.
HOLDERS = ("while", "conditional", "call", "tuple", "get-tuple-element", "parameter", "bitcast", "constant")

_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_PATH = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_PALLAS = re.compile(r"(\w+)/pallas_call")
_ARRAY = re.compile(r"\b(pred|[sufb]\w*?\d+\w*)\[([\d,]*)\]")
_BITS = re.compile(r"(\d+)")
_NUMBER = re.compile(r"(?:[._]\d+)+$")


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a compiled program. ``path``: where it comes from, named scopes and primitives between slashes.
    ``bytes`` that it reads and writes; slices of large arrays count whole. ``kernel``: a ``pallas_call``'s name."""

    name: str
    path: str
    bytes: int
    kernel: str = ""


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that ran: the kernel's own name (on a CPU the operation's), and what XLA notes with it, if anything."""

    name: str
    operation: str | None
    module: str | None
    seconds: float
    on_device: bool = True


class Operations:
    """The operations of a compiled program that are run as such, found by what a trace calls them."""

    def __init__(self, text: str):
        found = re.match(r"HloModule ([\w.\-]+)", text)
        self.module = found[1] if found else ""
        self.holders: set[str] = set()
        self.by_name = {one.name: one for one in self._read(text)}
        self._aliases: dict[str, list[Operation]] = {}
        for one in self.by_name.values():
            for alias in {_plain(one.name), one.kernel} - {""}:
                self._aliases.setdefault(alias, []).append(one)

    def _read(self, text: str) -> Iterator[Operation]:
        sizes: dict[str, int] = {}
        lines = [match for line in text.splitlines() if (match := _LINE.match(line))]
        for match in lines:
            sizes[match[1]] = _size(match[2])
        for match in lines:
            name, _, kind, rest = match.groups()
            if kind in HOLDERS:
                self.holders.add(name)
                continue
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            path = found[1] if (found := _PATH.search(rest)) else ""
            kernel = found[1] if kind == "custom-call" and (found := _PALLAS.search(path)) else ""
            yield Operation(name, path, sizes[name] + sum(sizes.get(x, 0) for x in operands), kernel)

    def of(self, event: Event) -> tuple[Operation, ...]:
        """Operations that an event may be a run of: one, if XLA noted it; several, where the kernel's name is all there
        is and they share one; none for what comes from elsewhere or from a library."""
        if event.operation in self.by_name:
            return (self.by_name[event.operation],)
        plain = _plain(event.name)
        return tuple(self._aliases.get(plain) or self._aliases.get(_NUMBER.sub("", plain), ()))

    def mine(self, events: Iterable[Event]) -> Iterator[tuple[Event, tuple[Operation, ...]]]:
        """Events of this program with their operations. Of a device, everything but other programs' kernels; of a host,
        what is known by name."""
        for event in events:
            if event.module not in (None, self.module) or event.operation in self.holders:
                continue
            found = self.of(event)
            if found or event.on_device:
                yield event, found


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _size(shapes: str) -> int:
    total = 0
    for kind, dims in _ARRAY.findall(shapes):
        bits = _BITS.search(kind)
        one = 1 if kind == "pred" or bits is None else max(1, int(bits[1]) // 8)
        total += one * int(np.prod([int(d) for d in dims.split(",") if d] or [1]))
    return total


def traced(run: Callable[[], Any], folder: Path, perfetto: bool = False) -> list[Event]:
    """Events of ``run()``, which gives arrays to wait for, traced into ``folder``; made if it is not there.

    ``perfetto``: write a file for https://ui.perfetto.dev as well. Raises OSError when the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = lambda: set(folder.glob("plugins/profile/*/*.xplane.pb"))  # noqa: E731
    before = files()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # else the host's own calls fill the trace
    with jax.profiler.trace(str(folder), create_perfetto_trace=perfetto, profiler_options=options):
        jax.block_until_ready(run())
    data = [jax.profiler.ProfileData.from_file(str(path)) for path in sorted(files() - before)]
    return list(events([plane for one in data for plane in one.planes]))


def events(planes: Iterable[Any]) -> Iterator[Event]:
    """Everything that ran on devices' streams; if there are none, operations on the host."""
    planes = list(planes)
    lines = [one for plane in planes if plane.name.startswith("/device:") for one in plane.lines]
    # lines derived of streams would count twice
    streams = [one for one in lines if one.name.startswith("Stream")]
    for line in streams or [one for plane in planes for one in plane.lines]:
        for event in line.events:
            stats = {key: str(value) for key, value in event.stats if key in ("hlo_op", "hlo_module")}
            if streams or "hlo_op" in stats:
                seconds = 1e-9 * event.duration_ns
                yield Event(event.name, stats.get("hlo_op"), stats.get("hlo_module"), seconds, bool(streams))


def by_scope(
    found: Iterable[Event], operations: Operations, scope: Callable[[str], str], other: str
) -> dict[str, float]:
    """Seconds summed by ``scope`` of the operations' paths; ``other``: what is no operation's. Times of operations that
    run together are added; a kernel that may be several operations counts for each of them alike."""
    total: dict[str, float] = {}
    for event, ones in operations.mine(found):
        for name in [scope(one.path) for one in ones] or [other]:
            total[name] = total.get(name, 0.0) + event.seconds / max(len(ones), 1)
    return total


def rows(
    found: Iterable[Event], operations: Operations, scope: Callable[[str], str], turns: int, most: int = 25
) -> list[dict[str, Any]]:
    """The kernels that take longest: ``kernel`` (without its number), ``scope``, ``us`` and ``calls`` of one turn of
    ``turns``, ``bytes`` of one call and ``bytes_per_second``. Operations of one kind, scope and size (those of all
    layers, say) are one row. Bytes and scope are None for what is no operation's: libraries' kernels in command
    buffers, copies."""
    total: dict[tuple, list[float]] = {}
    for event, ones in operations.mine(found):
        scopes, sizes = {scope(one.path) for one in ones}, {one.bytes for one in ones}
        only = lambda values: values.pop() if len(values) == 1 else None  # noqa: E731
        name = (ones[0].kernel if ones else "") or _NUMBER.sub("", event.name)
        total.setdefault((name, only(scopes), only(sizes)), []).append(event.seconds)
    found_rows = []
    for (name, where, size), took in total.items():
        row = {"kernel": name, "scope": where, "us": 1e6 * sum(took) / turns, "calls": len(took) / turns}
        speed = None if size is None or not sum(took) else size * len(took) / sum(took)
        found_rows.append(row | {"bytes": size, "bytes_per_second": speed})
    return sorted(found_rows, key=lambda row: -row["us"])[:most]


def table(found: list[dict[str, Any]], turn_ms: float) -> str:
    """The rows as text; shares are those of ``turn_ms``, milliseconds of one turn by the clock."""
    lines = [
        f"{'kernel':44} {'scope':>8} {'us/turn':>9} {'share':>6} {'calls':>6} {'MB/call':>8} {'TB/s':>6}"
    ]
    for row in found:
        size, speed = row["bytes"], row["bytes_per_second"]
        mb = "?" if size is None else f"{size / 1e6:.2f}"
        rate = "?" if speed is None else f"{speed / 1e12:.2f}"
        share = f"{row['us'] / (1e3 * turn_ms):.1%}"
        lines.append(
            f"{row['kernel'][:44]:44} {row['scope'] or '?':>8} {row['us']:9.1f} {share:>6} {row['calls']:6.1f} "
            f"{mb:>8} {rate:>6}"
        )
    return "\n".join(lines)
