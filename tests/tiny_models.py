"""One small target shared by the tests of the API, so that they share compiled programs too.

Its 265 ids belong to the small tokenizer of ``tiny_files`` (four special ones, all bytes, five merges), but
only ``SPOKEN`` ones are ever likely: letters, tokens of several letters, and two characters of two bytes.
Programs are shared between calls of the same row count, token buffer, ``k``, ``logprobs`` and options:
most tests use ``OPTIONS``.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny_files

from specjax import registry, testing
from specjax.drafters import ngram
from specjax.types import Params, TapSpec

VOCAB = 265
CONTEXT = 128
EOS = 2  # <|im_end|>, never spoken by itself
SPOKEN = "he ll hell hello 12 a b c o h e l 1 2 Ġ ! Ã © ¨"
PROMPTS = [
    [70, 71, 72, 70, 71, 72],
    [90],
    [100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111],
    [80, 81, 80, 81, 80],
    [75, 200, 31],
]
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "logprobs": True}


@functools.cache
def tokenizer_folder() -> str:
    """Tokenizer id of the model."""
    folder = tempfile.mkdtemp(prefix="specjax-tokenizer-")
    tiny_files.small_tokenizer().save_pretrained(folder)
    return str(Path(folder).resolve())


def token(letters: str) -> int:
    """Id of a token by its entry in the vocabulary ("hello", "Ġ" for a space, "Ã" for the byte C3)."""
    return tiny_files.vocabulary()["ggml.tokens"].index(letters)


@functools.cache
def target(**config: Any) -> Params:
    """The target without a drafter; ``config`` replaces keys of its config.json."""
    config = {"max_positions": CONTEXT} | config
    params = testing.tiny_params(
        vocab=VOCAB, layers=1, num_attention_heads=2, num_key_value_heads=1, eos_ids=(EOS,), **config
    )
    spoken = jnp.zeros((VOCAB, 1)).at[np.array([token(w) for w in SPOKEN.split()])].set(1.0)
    weights = params.target.replace(head=params.target.head * spoken)
    meta = dataclasses.replace(
        params.meta, tokenizer_id=tokenizer_folder(), chat_template=tiny_files.CHATML, name="small"
    )
    return Params(weights, None, meta)


def with_drafter(params: Params, name: str, cfg: Any, weights: Any = None) -> Params:
    """The same target with a drafter."""
    meta = dataclasses.replace(params.meta, drafter=name, drafter_cfg=cfg)
    return params.replace(drafter=weights, meta=meta)


def with_meta(params: Params, **changes: Any) -> Params:
    """Other facts about the text side; none of them changes what is compiled."""
    return params.replace(meta=dataclasses.replace(params.meta, **changes))


def uncompiled(params: Params, salt: int) -> Params:
    """The same weights under a config of its own, for which nothing has been compiled yet."""
    cfg = dataclasses.replace(params.meta.target_cfg, eps=1e-5 * (1 + salt / 1000))
    return with_meta(params, target_cfg=cfg)


@functools.cache
def ngram_params(k: int = 3, **config: Any) -> Params:
    """With prompt lookup of 3 to 1 tokens, always drafting up to ``k``."""
    return with_drafter(target(**config), "ngram", ngram.Config(k, lookup_max=3, lookup_min=1))


@functools.cache
def told(mode: str = "EVERY_THIRD_WRONG", drafter: str = "TOLD", k: int = 4) -> Params:
    """With a drafter that knows the greedy continuations of ``PROMPTS`` and spoils them."""
    known = [(p, greedy(p, CONTEXT - len(p))[0]) for p in PROMPTS]
    weights = testing.telling(known, mode, size=CONTEXT, texts=8)
    cfg = testing.ToldConfig(k, VOCAB, texts=8, size=CONTEXT)
    return with_drafter(target(), f"specjax.testing:{drafter}", cfg, weights)


def greedy(prompt: Sequence[int], new: int) -> tuple[list[int], list[float]]:
    """What the target says after a prompt and the log-probabilities, by whole forward passes: no cache, no
    loop, no code of the library but the model."""
    return _greedy(tuple(prompt), new)


@functools.cache
def _greedy(prompt: tuple[int, ...], new: int) -> tuple[list[int], list[float]]:
    tokens, scores = list(prompt), []
    for _ in range(new):
        logits = whole_pass(target(), tokens)[-1]
        tokens.append(int(np.argmax(logits)))
        scores.append(float(logits[tokens[-1]] - np.logaddexp.reduce(logits)))
    return tokens[len(prompt) :], scores


def whole_pass(params: Params, tokens: Sequence[int]) -> np.ndarray:
    """float32 logits at every position of a sequence, in one pass."""
    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(tokens)] = tokens
    run = _whole(params.meta.family, params.meta.target_cfg)
    return np.asarray(run(params.target, padded))[: len(tokens)]


def scores_of(params: Params, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """Raw log-softmax of ``tokens`` after ``prompt``, from one whole pass."""
    logits = whole_pass(params, [*prompt, *tokens])[len(prompt) - 1 : -1].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logprobs[np.arange(len(tokens)), np.asarray(tokens, int)]


@functools.cache
def _whole(family: str, cfg: Any):
    module = registry.target(family)

    def run(weights, tokens):
        cache = module.init_cache(cfg, 1, CONTEXT, 1, jnp.float32)
        pos = jnp.arange(CONTEXT, dtype=jnp.int32)[None]
        full = jnp.full((1,), CONTEXT, jnp.int32)
        out = module.forward(weights, cfg, tokens, pos, full, cache, TapSpec(), "extend")
        return module.unembed(weights, cfg, out.hidden)[0]

    return jax.jit(run)
