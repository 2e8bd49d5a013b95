"""Small targets with block drafters, driven round by round with drafts of the test's choosing."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny_files
from safetensors.numpy import load_file, save_file

import specjax
from specjax import checkpoints, registry, testing
from specjax.checkpoints import hub
from specjax.core import round as rnd
from specjax.drafters import dflash
from specjax.types import ArraySpec, Ctx, Params, Proposal

VOCAB = 24


@functools.cache
def target() -> Params:
    """Two layers; logits far apart."""
    return testing.tiny_params(3, vocab=VOCAB, max_positions=2048)


def params(method: str = "dflash", **changes: Any) -> Params:
    """The target with a drafter of random weights; ``changes`` replace fields of its ``tiny`` config."""
    return testing.tiny_drafter(target(), method, 5, **changes)


def context(length, anchor, temperature=None) -> Ctx:
    """What a block drafter reads of rows."""
    length, anchor = jnp.asarray(length, jnp.int32), jnp.asarray(anchor, jnp.int32)
    rows = length.shape[0]
    live = jnp.ones((rows,), bool)
    return Ctx(jnp.zeros((rows, 8), jnp.int32), length, anchor, live, temperature, _no_view)


def _no_view(kind: str):
    """One function for all contexts: another one would be another program."""


def shared(p: Params):
    """What the target lends."""
    return registry.target(p.meta.family).shared(p.target, p.meta.target_cfg)


def draft(p: Params, k: int, dstate: Any, ctx: Ctx, keys=None) -> Proposal:
    """A proposal from a drafter state."""
    module = registry.drafter(p.meta.drafter)
    return module.draft(p.drafter, shared(p), p.meta.drafter_cfg, k, dstate, ctx, keys)[0]


def anchors(state):
    """Last committed token of every row."""
    return jnp.take_along_axis(state.tokens, state.length[:, None] - 1, 1)[:, 0]


@functools.lru_cache
def _step(pair, k: int):
    """Jitted: one round in which the drafter drafts and ``told`` is verified in its place."""

    def one(weights, state, told, count):
        proposal, state = rnd.draft(pair, weights, state, k)
        given = Proposal(told, count)
        state, verdict, _ = rnd.verify(pair, weights, state, given)
        return state, proposal.tokens, verdict.emitted

    return jax.jit(one)


def forced_rounds(p: Params, prompts, rounds: int, k: int, seed: int = 0):
    """Rounds in which each row's drafts are right up to a random place: a list of (length, anchor, drafts the
    drafter made), and the final state."""
    rng, seen = np.random.default_rng(seed), []
    right = rng.choice([0, 0, 0, 1, 1, 2, k], (rounds, len(prompts)))
    budget = int((right + 1).sum(0).max()) + k + 2
    plain = specjax.decode(target(), prompts, max_new_tokens=budget, ignore_eos=True)
    truth = [[*prompt, *tokens] for prompt, tokens in zip(prompts, plain.tokens, strict=True)]
    state = specjax.start(p, prompts, max_new_tokens=budget, k=k, ignore_eos=True)
    step = _step(p.meta.pair, k)
    for accepted in right:
        lengths = np.asarray(state.length)
        told = np.stack([t[n : n + k] for t, n in zip(truth, lengths, strict=True)])
        wrong = np.arange(k) >= accepted[:, None]
        told = np.where(wrong, (told + 1) % VOCAB, told).astype(np.int32)
        before = (lengths, np.asarray(anchors(state)))
        state, drafts, emitted = step(
            (p.target, p.drafter), state, jnp.asarray(told), jnp.full(accepted.shape, k, jnp.int32)
        )
        assert (np.asarray(emitted) == accepted + 1).all()
        seen.append((*before, np.asarray(drafts)))
    return seen, state


def files(path: Path, p: Params, config: dict[str, Any], **renamed: str) -> Path:
    """Folder with the drafter's weights under the names of its specs and a given config."""
    specs = registry.drafter(p.meta.drafter).abstract(p.meta.drafter_cfg)
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ArraySpec))
    arrays = jax.tree.leaves(p.drafter)
    out = {}
    for spec, array in zip(leaves, arrays, strict=True):
        name = renamed.get(spec.names[0].replace(".", "_"), spec.names[0])
        shape = spec.shape if name.endswith("base_kernel") else tiny_files._flat(name, spec.shape)
        out[name] = np.asarray(array).reshape(shape)
    return tiny_files.folder(path, config, out)


def dflash_rows(p: Params, dstate, ctx: Ctx):
    """Hidden rows that predict drafts."""
    cfg = p.meta.drafter_cfg
    weights = getattr(p.drafter, "backbone", p.drafter)
    return dflash.drafting_rows(weights, shared(p), cfg, dflash.max_k(cfg), dstate, ctx)


#: Configs of every format for the drafters of :func:`params`.
BODY = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 6,
}
BLOCK = {"block_size": 5, "mask_token_id": 23, "target_layer_ids": [0, 1]}
ZLAB = {**BODY, "architectures": ["DFlashDraftModel"], "num_target_layers": 2}
DEEPSPEC = {**BODY, **BLOCK, "architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "speculators_config": {
        "proposal_methods": [{"speculative_tokens": 4}],
        "verifier": {"name_or_path": "a/b"},
    },
    "transformer_layer_config": BODY,
    "aux_hidden_state_layer_ids": [1, 2],
    "block_size": 5,
    "mask_token_id": 23,
    "draft_vocab_size": VOCAB,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
}


def folder(path: Path, config: dict[str, Any], p: Params | None = None, **renamed: str) -> Path:
    """Folder of a DFlash drafter, or of the one of ``p``."""
    return files(path / "d", p or params(), config, **renamed)


def load(path: Path, **settings: Any):
    """What the loader makes of a folder for :func:`target`."""
    p = target()
    return checkpoints.load_drafter(
        hub.resolve(path), p.meta.target_cfg, shared(p), jnp.float32, settings=settings
    )


def change(path: Path, **tensors: Any) -> Path:
    """Add or replace tensors of a folder ("." is written "__"); None removes one."""
    file = path / "model.safetensors"
    arrays = {**load_file(file), **{k.replace("__", "."): v for k, v in tensors.items()}}
    save_file({k: v for k, v in arrays.items() if v is not None}, file)
    return path
