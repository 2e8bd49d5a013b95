"""Helpers for tests of specjax and of drafters written for it.

``tiny_params`` makes a small random target; the drafters in capitals misbehave on purpose and are named
``"specjax.testing:ALWAYS_WRONG"`` and so on; ``chisquare`` compares counts with exact probabilities.
"""

from specjax.testing.drafters import (
    ALWAYS_RIGHT,
    ALWAYS_WRONG,
    EVERY_THIRD_WRONG,
    RANDOM_COUNT,
    STOP_INSIDE,
    Script,
    Scripted,
    script,
)
from specjax.testing.models import tiny_config, tiny_params
from specjax.testing.sampled import SAMPLED, SELF, Bigram, SelfConfig, bigram
from specjax.testing.stats import chisquare, histogram, joint_law

__all__ = [
    "ALWAYS_RIGHT",
    "ALWAYS_WRONG",
    "EVERY_THIRD_WRONG",
    "RANDOM_COUNT",
    "SAMPLED",
    "SELF",
    "STOP_INSIDE",
    "Bigram",
    "Script",
    "Scripted",
    "SelfConfig",
    "bigram",
    "chisquare",
    "histogram",
    "joint_law",
    "script",
    "tiny_config",
    "tiny_params",
]
