"""Files in, files out. Nothing else in the package opens a weight file."""

from specjax.checkpoints import hub, tokenizer
from specjax.checkpoints.load import LoadedTarget, load_target
from specjax.checkpoints.tree import fill, random_weights

__all__ = ["LoadedTarget", "fill", "hub", "load_target", "random_weights", "tokenizer"]
