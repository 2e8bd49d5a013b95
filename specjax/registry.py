"""Two tables: target families by ``model_type``, drafters by method name.

Values are module paths, imported on first use, so that listing a family costs nothing.
"""

import importlib
from typing import Any

TARGETS: dict[str, str] = {
    "llama": "specjax.targets.llama",
    "qwen2": "specjax.targets.llama",
    "qwen3": "specjax.targets.qwen3",
    "qwen3_moe": "specjax.targets.qwen3",
    "qwen3_5": "specjax.targets.qwen3_5",
    "qwen3_5_text": "specjax.targets.qwen3_5",
    "qwen3_5_moe": "specjax.targets.qwen3_5",
    "qwen3_5_moe_text": "specjax.targets.qwen3_5",
    "deepseek_v3": "specjax.targets.deepseek",
    "kimi_k2": "specjax.targets.deepseek",
    "kimi_k25": "specjax.targets.deepseek",
    "gemma3_text": "specjax.targets.gemma3",
    "gemma3": "specjax.targets.gemma3",
    "gemma4_text": "specjax.targets.gemma4",
    "gemma4": "specjax.targets.gemma4",
    "gemma4_unified_text": "specjax.targets.gemma4",
    "gemma4_unified": "specjax.targets.gemma4",
}

DRAFTERS: dict[str, str] = {
    "ngram": "specjax.drafters.ngram",
    "eagle3": "specjax.drafters.eagle3",
    "mtp": "specjax.drafters.mtp",
    "assistant": "specjax.drafters.assistant",
    "dflash": "specjax.drafters.dflash",
    "dspark": "specjax.drafters.dspark",
    "draft_model": "specjax.drafters.draft_model",
    "chain": "specjax.drafters.chain",
}


def target(family: str) -> Any:
    """Module of a target family; raises ValueError listing the known ones."""
    return _resolve(family, TARGETS, "target family (model_type)")


def drafter(name: str) -> Any:
    """Module of a drafter. A dotted name is imported as it is (a drafter from another package);
    ``package.module:name`` takes an object out of a module."""
    return _resolve(name, DRAFTERS, "drafter")


def _resolve(name: str, table: dict[str, str], kind: str) -> Any:
    if name in table:
        return importlib.import_module(table[name])
    if "." in name:
        module, _, attribute = name.partition(":")
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found
    raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(sorted(table))}")
