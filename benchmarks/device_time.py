"""Time of kernels on a device: sums of CUPTI's records, with a cold cache; elsewhere wall time, and said so."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

try:
    from jax.experimental.mosaic.gpu import profiler

    _EXT = profiler.mosaic_gpu_lib._mosaic_gpu_ext
except (ImportError, AttributeError):
    _EXT = None

JUNK = 1 << 27  # bytes read between measurements: more than a cache holds


class Timing(NamedTuple):
    """Microseconds of the median run, all runs, and the kernels of one run."""

    median: float
    runs: list[float]
    kernels: list[tuple[str, float]]
    method: str


class Clock:
    """Measures calls, each after reading what fills the caches."""

    def __init__(self, junk: int = JUNK):
        self.junk = jnp.ones(junk, jnp.bfloat16)
        read = jax.jit(lambda x: jnp.sum(x.astype(jnp.float32)))
        self._flush = read.lower(self.junk).compile()
        self._cupti = jax.default_backend() == "gpu" and _EXT is not None
        self._flushes = 0
        if self._cupti:
            try:
                self.flush()
                self._flushes = len(self._records(self.flush, 1))
            except Exception as error:
                print(f"no CUPTI ({error}): wall time instead", flush=True)
                self._cupti = False

    def flush(self):
        return jax.block_until_ready(self._flush(self.junk))

    def __call__(self, call: Callable[[], Any], runs: int = 5) -> Timing:
        """``call`` starts the work and returns its arrays. It is run once before it is measured."""
        jax.block_until_ready(call())
        if not self._cupti:
            return self._wall(call, runs)

        def both():
            self._flush(self.junk)
            return call()

        records = self._records(both, runs)
        each, rest = divmod(len(records), runs)
        if rest or each <= self._flushes:
            return self._wall(call, runs)
        split = [records[i * each + self._flushes : (i + 1) * each] for i in range(runs)]
        sums = [sum(t for _, t in one) for one in split]
        middle = sorted(range(runs), key=sums.__getitem__)[runs // 2]
        return Timing(statistics.median(sums), sums, split[middle], "device")

    def _wall(self, call, runs: int) -> Timing:
        took = []
        for _ in range(runs):
            self.flush()
            began = time.perf_counter()
            jax.block_until_ready(call())
            took.append(1e6 * (time.perf_counter() - began))
        return Timing(statistics.median(took), took, [], "wall")

    @staticmethod
    def _records(call, runs: int) -> list[tuple[str, float]]:
        _EXT._cupti_init()
        try:
            for _ in range(runs):
                last = call()  # what came before may have been given away
            jax.block_until_ready(last)
        finally:
            records = _EXT._cupti_get_timings(False)
        return [(name, 1e3 * ms) for name, ms in records]


def compile_all(jobs: dict[Any, tuple[Callable, tuple]], workers: int = 14) -> dict[Any, Any]:
    """Compiled programs, or the exceptions that stood in the way, of (function, shapes); on a GPU in threads."""

    def one(job):
        function, shapes = job
        try:
            function = function if hasattr(function, "lower") else jax.jit(function)
            return function.lower(*shapes).compile()
        except Exception as error:
            return error

    if jax.default_backend() == "cpu":
        return {key: one(job) for key, job in jobs.items()}
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(jobs, pool.map(one, jobs.values()), strict=True))


def shapes_of(tree):
    """Arrays as shapes."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def short(error: Exception) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:160]}"
