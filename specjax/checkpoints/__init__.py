"""Files in, files out. Nothing else in the package opens a weight file."""

from specjax.checkpoints import hub, known, orbax, tokenizer
from specjax.checkpoints.converter import convert
from specjax.checkpoints.drafter import LoadedDrafter, has_layer, load_drafter
from specjax.checkpoints.exporter import export
from specjax.checkpoints.load import LoadedTarget, load_target
from specjax.checkpoints.nnx import from_nnx
from specjax.checkpoints.tree import fill, random_weights

__all__ = [
    "LoadedDrafter", "LoadedTarget", "convert", "export", "fill", "from_nnx", "has_layer", "hub", "known",
    "load_drafter", "load_target", "orbax", "random_weights", "tokenizer",
]  # fmt: skip
