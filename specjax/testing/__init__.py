"""Helpers for tests of specjax and of drafters written for it.

``tiny_params`` makes a small random Llama, ``taught`` one that has learned some talks (its answers can be learned by a
drafter), ``sliding_params`` one with windows and ring caches,
``micro_params`` a table of logits whose law is known exactly. The drafters in capitals misbehave on purpose
and are named ``"specjax.testing:ALWAYS_WRONG"`` and so on; ``TOLD`` takes its script as weights, so that one
compiled program serves all of them; ``corrupted`` scripts any other drafter while its state evolves.
``chisquare`` compares counts with exact probabilities.
"""

from specjax.testing.corrupted import CORRUPTED, corrupted
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
from specjax.testing.micro import micro_params
from specjax.testing.models import tiny_config, tiny_drafter, tiny_params
from specjax.testing.sampled import LIAR, MIXED, POINT, SAMPLED, SELF, Bigram, SelfConfig, bigram
from specjax.testing.sliding import sliding_params
from specjax.testing.stats import chisquare, histogram, joint_law
from specjax.testing.taught import taught
from specjax.testing.told import TOLD, TOLD_VARIABLE, WITNESS, ToldConfig, telling

__all__ = [
    "ALWAYS_RIGHT",
    "ALWAYS_WRONG",
    "CORRUPTED",
    "EVERY_THIRD_WRONG",
    "LIAR",
    "MIXED",
    "POINT",
    "RANDOM_COUNT",
    "SAMPLED",
    "SELF",
    "STOP_INSIDE",
    "TOLD",
    "TOLD_VARIABLE",
    "WITNESS",
    "Bigram",
    "Script",
    "Scripted",
    "SelfConfig",
    "ToldConfig",
    "bigram",
    "chisquare",
    "corrupted",
    "histogram",
    "joint_law",
    "micro_params",
    "script",
    "sliding_params",
    "taught",
    "telling",
    "tiny_config",
    "tiny_drafter",
    "tiny_params",
]
