"""Files in, files out. Nothing else in the package opens a weight file."""

from specjax.checkpoints import hub, orbax, tokenizer
from specjax.checkpoints.load import LoadedTarget, load_target
from specjax.checkpoints.nnx import from_nnx
from specjax.checkpoints.tree import fill, random_weights

__all__ = ["LoadedTarget", "fill", "from_nnx", "hub", "load_target", "orbax", "random_weights", "tokenizer"]
