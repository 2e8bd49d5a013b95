"""The most temporary memory a program holds at once, told from its trace, without compiling it.

Operations are walked in the order they were traced in, and what is alive after each is added up, after what XLA does:

* products, gathers, sorts and the like read arrays and write one;
* operations on single elements are made part of what reads them: they own nothing, but keep alive what they read; a
  result that is read more than once is written;
* sums and maxima take in what they read;
* views cost nothing;
* an update of a part of an array happens in place if nobody else reads the array, and so does a loop's carry;
* arguments cost nothing, nor does a result that takes the place of a donated one.
"""

import collections
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

#: Read whole arrays and write one. What is in no list is taken for an operation on single elements.
_WHOLE = {
    "dot_general", "ragged_dot_general", "conv_general_dilated", "sort", "top_k", "gather", "cumsum", "cumprod",
    "cummax", "cumlogsumexp", "triangular_solve", "cholesky", "pallas_call", "shard_map", "custom_call", "ffi_call",
    "fft",
}  # fmt: skip
_REDUCING = {"argmax", "argmin", "reduce"}  # and all that begin with "reduce_"
_RANDOM = {"random_bits", "threefry2x32"}
_VIEWS = {"reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient", "optimization_barrier"}
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # parameters of operations that are programs themselves


def peak_bytes(function: Callable, *args: Any, donated: int) -> int:
    """Bytes that ``function(*args)`` needs beside its arguments, of which number ``donated`` is given up to results.

    Arguments may be ``jax.ShapeDtypeStruct``; nothing is compiled or allocated.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    memory, sizes = _Memory(), [len(jax.tree.leaves(arg)) for arg in args]
    first = sum(sizes[:donated])
    given = jaxpr.invars[first : first + sizes[donated]]
    inputs = {var: _Value(frozenset(), True) for var in jaxpr.invars}
    inputs |= {var: _Value(memory.new(0), True) for var in given}
    _Walk(memory, jaxpr, inputs, _taking_over(jaxpr.outvars, given)).run()
    return memory.peak


class _Value(NamedTuple):
    """What an array lies in: its own block if it is ``written``, else all that it is to be made of. No block: an
    argument that is only read."""

    blocks: frozenset[int]
    written: bool


class _Memory:
    """Blocks with the number of values that hold them, and the sum of those that are held."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.holders: list[int] = []
        self.now = self.peak = 0

    def new(self, size: int) -> frozenset[int]:
        self.sizes.append(size)
        self.holders.append(0)
        self.now += size
        self.peak = max(self.peak, self.now)
        return frozenset([len(self.sizes) - 1])

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.holders[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                self.now -= self.sizes[block]


class _Walk:
    """One pass over the operations of a jaxpr. ``inputs``: values of its arguments; ``placed``: results whose memory
    is there already."""

    def __init__(
        self, memory: _Memory, jaxpr: Any, inputs: Mapping[Any, _Value], placed: Collection[Any]
    ) -> None:
        self.memory, self.jaxpr, self.placed = memory, jaxpr, set(placed)
        self.steps = _needed(jaxpr)
        self.results = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
        self.reads = collections.Counter(var for step in self.steps for var in set(_variables(step.invars)))
        self.last = {var: i for i, step in enumerate(self.steps) for var in _variables(step.invars)}
        self.at = 0
        self.values: dict[Any, _Value] = {}
        for var in jaxpr.constvars:
            self._set(var, _Value(frozenset(), True))
        for var, value in inputs.items():
            self._set(var, value)

    def run(self) -> list[_Value]:
        """Values of the results; the caller holds them."""
        for var in [v for v in self.values if v not in self.last and v not in self.results]:
            self._forget(var)
        for i, step in enumerate(self.steps):
            self.at = i
            self._step(step)
            for var in {*_variables(step.invars), *step.outvars} - self.results:
                if self.last.get(var, self.at) == self.at:
                    self._forget(var)
        found = [self._get(var) for var in self.jaxpr.outvars]
        for value in found:
            self.memory.hold(value.blocks)
        for var in list(self.values):
            self._forget(var)
        return found

    def _step(self, step: Any) -> None:
        name = step.primitive.name
        if name in ("while", "scan"):
            self._loop(step)
        elif name == "cond":
            self._branches(step)
        elif name not in _WHOLE and any(key in step.params for key in _INNER):
            self._call(step)
        elif name in _VIEWS or _adds_axes(step):
            for var, out in zip(step.invars, step.outvars, strict=True):
                self._set(out, self._get(var))
        elif name == "dynamic_update_slice" or name.startswith("scatter"):
            for var in step.invars if name.startswith("scatter") else step.invars[:1]:
                self._written(var)
            self._set(step.outvars[0], self._in_place(step, step.invars[0], step.outvars[0]))
        elif name in _WHOLE:
            for var in step.invars:
                self._written(var)
            for out in step.outvars:
                self._write(out)
        elif name in _RANDOM and jax.default_backend() == "cpu":
            self._random(step)
        elif name in _REDUCING or (name.startswith("reduce_") and name != "reduce_precision"):
            for out in step.outvars:
                self._write(out)
        else:
            self._elements(step)

    def _elements(self, step: Any) -> None:
        sources = frozenset().union(*(self._get(var).blocks for var in step.invars))
        for out in step.outvars:
            if out in self.placed:
                self._write(out)
            else:
                self._set(out, _Value(sources, False))

    def _random(self, step: Any) -> None:
        """On a CPU a loop over two arrays of the result's size."""
        for var in step.invars:
            self._written(var)
        scratch = self.memory.new(2 * sum(map(_size, step.outvars)))
        self.memory.hold(scratch)
        for out in step.outvars:
            self._write(out)
        self.memory.drop(scratch)

    def _call(self, step: Any) -> None:
        inner = next(step.params[key] for key in _INNER if key in step.params)
        inner = getattr(inner, "jaxpr", inner)
        inputs = {a: self._get(b) for a, b in zip(inner.invars, step.invars, strict=True)}
        placed = [a for a, b in zip(inner.outvars, step.outvars, strict=True) if b in self.placed]
        self._take(step.outvars, _Walk(self.memory, inner, inputs, _variables(placed)).run())

    def _loop(self, step: Any) -> None:
        """One turn; what it carries stays where it is, and a scan's results are set aside before the first one."""
        consts, carry, rest, body = _parts(step)
        for var in step.invars:
            self._written(var)
        held = [self._in_place(step, var, out) for var, out in zip(carry, step.outvars, strict=False)]
        for value in held:
            self.memory.hold(value.blocks)
        for out in step.outvars[len(held) :]:
            self._write(out)
        given = [*map(self._get, consts), *held, *(self._get(var)._replace(written=False) for var in rest)]
        inputs = dict(zip(body.invars, given, strict=True))
        for value in _Walk(self.memory, body, inputs, _variables(body.outvars[: len(held)])).run():
            self.memory.drop(value.blocks)
        self._take(step.outvars[: len(held)], held)

    def _branches(self, step: Any) -> None:
        for var in step.invars:
            self._written(var)
        for out in step.outvars:
            self._write(out)
        for branch in step.params["branches"]:
            inputs = dict(zip(branch.jaxpr.invars, map(self._get, step.invars[1:]), strict=True))
            walk = _Walk(self.memory, branch.jaxpr, inputs, _variables(branch.jaxpr.outvars))
            for value in walk.run():
                self.memory.drop(value.blocks)

    # ------------------------------------------------------------ values of variables

    def _get(self, var: Any) -> _Value:
        return _Value(frozenset(), True) if isinstance(var, Literal) else self.values[var]

    def _set(self, var: Any, value: _Value) -> None:
        self.memory.hold(value.blocks)
        self.values[var] = value
        if value.blocks and self.reads[var] > 1:
            self._written(var)

    def _forget(self, var: Any) -> None:
        if var in self.values:
            self.memory.drop(self.values.pop(var).blocks)

    def _take(self, outs: Iterable[Any], values: Iterable[_Value]) -> None:
        """Results that somebody holds already."""
        for out, value in zip(outs, values, strict=True):
            self._set(out, value)
            self.memory.drop(value.blocks)

    def _write(self, var: Any) -> None:
        self._set(var, _Value(self.memory.new(0 if var in self.placed else _size(var)), True))

    def _written(self, var: Any) -> None:
        """Make an array of what was only part of others so far."""
        before = self._get(var)
        if not before.written:
            self._write(var)
            self.memory.drop(before.blocks)

    def _in_place(self, step: Any, var: Any, out: Any) -> _Value:
        """Where ``out`` is written when it is ``var`` but for a part."""
        value = self._get(var)
        last = value.blocks and self.last[var] == self.at and var not in self.results
        if last and sum(other is var for other in step.invars) == 1:
            return value
        return _Value(self.memory.new(0 if out in self.placed else _size(out)), True)


def _adds_axes(step: Any) -> bool:
    """Whether a broadcast repeats nothing."""
    return step.primitive.name == "broadcast_in_dim" and _size(step.invars[0]) == _size(step.outvars[0])


def _parts(step: Any) -> tuple[list[Any], list[Any], list[Any], Any]:
    """Variables a loop only reads, those it carries, those it goes along, and its body."""
    p, given = step.params, step.invars
    if step.primitive.name == "while":
        start = p["cond_nconsts"] + p["body_nconsts"]
        return given[p["cond_nconsts"] : start], given[start:], [], p["body_jaxpr"].jaxpr
    start = p["num_consts"] + p["num_carry"]
    return given[: p["num_consts"]], given[p["num_consts"] : start], given[start:], p["jaxpr"].jaxpr


def _needed(jaxpr: Any) -> list[Any]:
    """Operations that some result depends on, in order."""
    wanted, steps = set(_variables(jaxpr.outvars)), []
    for step in reversed(jaxpr.eqns):
        if step.effects or wanted.intersection(step.outvars):
            wanted.update(_variables(step.invars))
            steps.append(step)
    return steps[::-1]


def _taking_over(results: Iterable[Any], given: Iterable[Any]) -> list[Any]:
    """Results that find a donated array of their shape and type."""
    kind = lambda var: (var.aval.shape, var.aval.dtype)  # noqa: E731
    free, found = collections.Counter(map(kind, given)), []
    for var in dict.fromkeys(_variables(results)):
        if free[kind(var)] > 0:
            free[kind(var)] -= 1
            found.append(var)
    return found


def _variables(given: Iterable[Any]) -> list[Any]:
    return [var for var in given if not isinstance(var, Literal)]


def _size(var: Any) -> int:
    shape, dtype = getattr(var.aval, "shape", None), getattr(var.aval, "dtype", None)
    return 0 if shape is None or dtype is None else math.prod(shape) * dtype.itemsize
