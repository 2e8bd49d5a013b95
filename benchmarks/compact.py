"""How near compact storage comes to a drafter's weights, beside tables of sixteen values.

For every large matrix of a drafter the relative error (norm of the difference by norm of the matrix) at 4.5 bits per
weight. ``groups``: for every 64 weights 16 values from the least to the largest, scale and offset in float16;
``searched``: the scale and offset of least squares, from many starts; ``compact``: specjax's own (docs/formats.md).

    python benchmarks/compact.py smollm2-135m FOLDER [FOLDER ...]
"""

import argparse

import numpy as np

import specjax
from specjax import registry
from specjax.checkpoints import compact
from specjax.checkpoints.writers.tensors import named

GROUP = 64
STARTS = np.linspace(0.7, 1.0, 9)


def groups(x: np.ndarray) -> np.ndarray:
    """Sixteen values from the least to the largest of each group."""
    g = x.reshape(-1, GROUP)
    low = half(g.min(1, keepdims=True))
    return on_grid(g, half((g.max(1, keepdims=True) - low) / 15), low).reshape(x.shape)


def searched(x: np.ndarray) -> np.ndarray:
    """Sixteen values of the scale and offset with the smallest error of each group that was found."""
    g = x.reshape(-1, GROUP)
    low, high = g.min(1, keepdims=True), g.max(1, keepdims=True)
    best, found = np.full((len(g), 1), np.inf), np.zeros_like(g)
    for a in STARTS:
        for b in STARTS:
            offset, scale = low * a, (high * b - low * a) / 15
            for _ in range(3):
                offset, scale = fitted(g, np.clip(np.rint((g - offset) / scale), 0, 15), scale)
            back = on_grid(g, half(scale), half(offset))
            error = np.square(g - back).sum(1, keepdims=True)
            found, best = np.where(error < best, back, found), np.minimum(error, best)
    return found.reshape(x.shape)


def fitted(g: np.ndarray, steps: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Offset and scale of least squares for steps that are given."""
    mean, centre = steps.mean(1, keepdims=True), g.mean(1, keepdims=True)
    spread = np.square(steps - mean).sum(1, keepdims=True)
    slope = ((steps - mean) * (g - centre)).sum(1, keepdims=True) / np.maximum(spread, 1e-9)
    scale = np.where(slope > 0, slope, scale)
    return centre - scale * mean, scale


def on_grid(g: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    return np.clip(np.rint((g - offset) / scale), 0, 15) * scale + offset


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def error(x: np.ndarray, back: np.ndarray) -> float:
    return float(np.linalg.norm(x - back) / np.linalg.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("folders", nargs="+")
    args = parser.parse_args()
    for folder in args.folders:
        params = specjax.load(args.target, drafter=folder, dtype="float32")
        specs = registry.drafter(params.meta.drafter).abstract(params.meta.drafter_cfg)
        tensors = named(params.drafter, specs, None)
        stored, entries = compact.pack(tensors)
        read = compact.reader(folder, entries, lambda name, stored=stored: stored[name].make())
        weights = sum(np.prod(t.shape) for t in tensors.values())
        size = sum(np.prod(t.shape) * t.dtype.itemsize for t in stored.values())
        print(f"\n{folder}: {params.meta.drafter}, {weights / 1e6:.2f} M weights, {size / 2**20:.2f} MiB")
        print(
            "| matrix | shape | groups | searched | compact | bits |\n| --- | --- | --- | --- | --- | --- |"
        )
        for name, tensor in tensors.items():
            x = tensor.make()
            if x.ndim < 2 or x.size < compact.SMALL or x.size % GROUP:
                continue
            errors = " | ".join(
                f"{error(x, y):.2%}" for y in (groups(x), searched(x), np.asarray(read(name)))
            )
            bits = 8 * stored[name].shape[0] / x.size
            print(f"| `{name}` | {x.shape[0]} x {x.shape[1]} | {errors} | {bits:.3f} |", flush=True)


if __name__ == "__main__":
    main()
