"""Tiny random block drafters of other packages, saved as those packages save them, and their answers."""

import contextlib
import dataclasses
import functools
import importlib
import io
import logging
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from specjax import checkpoints, registry
from specjax.checkpoints import hub
from specjax.config import Meta
from specjax.drafters import dflash
from specjax.types import Ctx, Params

VOCAB, WIDTH, LAYERS = 97, 32, 3
COMMON = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "rope_theta": 1e6}


def target(vocab: int = VOCAB, seed: int = 0):
    """A Qwen3 of three layers."""
    config = transformers.Qwen3Config(
        vocab_size=vocab,
        num_hidden_layers=LAYERS,
        max_position_embeddings=512,
        rope_parameters=ROPE,
        **COMMON,
    )
    config._attn_implementation = "eager"
    model = lively(transformers.Qwen3ForCausalLM(config), seed)
    with torch.no_grad():
        for layer in model.model.layers:  # attention that counts: else the text falls into a short cycle
            layer.self_attn.q_norm.weight.mul_(4)
            layer.self_attn.o_proj.weight.mul_(3)
    return model


def draft_config(kinds=("full_attention", "full_attention"), vocab: int = VOCAB, **more):
    """Transformer settings of a drafter with one layer per kind; sliding ones see six positions."""
    slides = "sliding_attention" in kinds
    config = transformers.Qwen3Config(
        vocab_size=vocab,
        num_hidden_layers=len(kinds),
        layer_types=list(kinds),
        use_sliding_window=slides,
        sliding_window=6 if slides else None,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        **COMMON,
    )
    for name, value in more.items():
        setattr(config, name, value)
    return config


def lively(model, seed: int):
    """Float32, with no weight at its trivial initial value."""
    rng = torch.Generator().manual_seed(seed)
    draw = lambda p: torch.randn(p.shape, generator=rng)  # noqa: E731
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 and "norm" in name:
                p.copy_(1 + 0.2 * draw(p))
            elif name.endswith("embed_tokens.weight") or "codebook" in name:
                p.copy_(draw(p))
            elif name.endswith(("lm_head.weight", "markov_w2.weight")):
                p.copy_(draw(p) * 3 / p.shape[-1] ** 0.5)
            elif "base_kernel" in name:
                p.copy_(0.5 * draw(p))
            else:
                p.copy_(draw(p) * (1.5 / p.shape[-1] ** 0.5 if p.ndim > 1 else 0.3))
    return model.float().eval()


def save(model, folder: Path) -> Path:
    """``save_pretrained`` without its progress bar."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


def load_target(model, folder: Path) -> Params:
    """The target, loaded from a folder it is saved to."""
    loaded = checkpoints.load_target(hub.resolve(save(model, folder)), jnp.float32)
    return Params(loaded.weights, None, Meta(family=loaded.family, target_cfg=loaded.cfg, name="tiny"))


def attach(params: Params, folder: Path, **settings):
    """Params with the drafter of a folder, and what the loader found."""
    meta = params.meta
    shared = registry.target(meta.family).shared(params.target, meta.target_cfg)
    found = checkpoints.load_drafter(
        hub.resolve(folder), meta.target_cfg, shared, jnp.float32, settings=settings
    )
    meta = Meta(
        family=meta.family, target_cfg=meta.target_cfg, drafter=found.name, drafter_cfg=found.cfg, name="tiny"
    )
    return Params(params.target, found.weights, meta), found


def features(n: int, taps: int, seed: int = 1) -> np.ndarray:
    """``[n, taps * WIDTH]`` random target features."""
    return np.random.default_rng(seed).standard_normal((n, taps * WIDTH)).astype(np.float32)


class Block:
    """Our draft pass over given features: hidden rows and logits of a block after ``n`` positions."""

    def __init__(self, params: Params):
        self.module, meta = dflash, params.meta
        self.cfg, self.p = meta.drafter_cfg, getattr(params.drafter, "backbone", params.drafter)
        self.shared = registry.target(meta.family).shared(params.target, meta.target_cfg)

    def run(self, taps: np.ndarray, anchor: int, n: int):
        """(hidden [N D], logits [N V]) of the ``n`` last rows."""
        hidden, logits = _run(self.p, self.shared, self.cfg, n, jnp.asarray(taps), jnp.array([anchor]))
        return np.asarray(hidden), np.asarray(logits)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _run(p, shared, cfg, n, taps, anchor):
    s = taps.shape[0]
    state = dflash.init_state(cfg, 1, s + cfg.rows + 3, cfg.rows, jnp.float32)
    state = dflash.inject(p, cfg, state, taps[None], jnp.arange(s)[None], jnp.array([s]), "extend")
    ctx = dataclasses.replace(context(0, s), anchor=anchor)
    hidden = dflash.drafting_rows(p, shared, cfg, n, state, ctx)
    return hidden[0], dflash.unembed(p, shared, cfg, hidden)[0]


def context(anchor: int, before: int) -> Ctx:
    """What a drafter sees of a row whose anchor follows ``before`` tokens."""
    return Ctx(
        tokens=jnp.zeros((1, before + 8), jnp.int32),
        length=jnp.array([before + 1], jnp.int32),
        anchor=jnp.array([anchor], jnp.int32),
        live=jnp.array([True]),
        temperature=None,
        kv_view=lambda kind: None,
    )


def close(ours, theirs, atol: float = 1e-4) -> None:
    """Equal within ``atol``."""
    theirs = theirs.detach().numpy() if isinstance(theirs, torch.Tensor) else np.asarray(theirs)
    assert np.abs(np.asarray(jax.device_get(ours)) - theirs).max() <= atol


def _library(kind: str):
    """A package of the library, which logs a lot and imports what warns."""
    from loguru import logger

    logger.disable("speculators")
    logging.getLogger("speculators").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"speculators.models.{kind}")


def speculator(kind: str, layers=("full_attention",) * 2, draft_vocab: int = VOCAB, taps=(1, 2), **more):
    """A drafter of the speculators library for :func:`target`; its draft ids are every other target id."""
    package = _library(kind)
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    stem = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}[kind]
    inner = draft_config(layers)
    inner._attn_implementation = "eager"
    config = getattr(package, f"{stem}SpeculatorConfig")(
        transformer_layer_config=inner,
        draft_vocab_size=draft_vocab,
        block_size=5,
        aux_hidden_state_layer_ids=list(taps),
        mask_token_id=VOCAB - 1,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[
                GreedyTokenProposalConfig(speculative_tokens=more.pop("speculative_tokens", 4))
            ],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="someone/target", architectures=["Qwen3ForCausalLM"]),
        ),
        **more,
    )
    model = lively(getattr(package, f"{stem}DraftModel")(config), 13)
    if draft_vocab < VOCAB:
        ids = torch.arange(draft_vocab) * 2
        marks = torch.zeros(VOCAB, dtype=torch.bool)
        marks[ids] = True
        model.load_vocab_mappings(marks, ids - torch.arange(draft_vocab))
    return model


def speculator_rows(model, teacher, monkeypatch, anchors=(2, 11)):
    """The library's training pass at fixed anchors: features ``[T W]``, ids ``[T]``, and hidden rows and logits
    ``[anchors N ...]``."""
    from speculators.models.dflash import core

    with torch.no_grad():
        model.embed_tokens.weight.copy_(teacher.get_input_embeddings().weight)
        if model.draft_vocab_size == VOCAB:
            model.lm_head.weight.copy_(teacher.lm_head.weight)
    fixed = torch.tensor(anchors), torch.ones(len(anchors), dtype=torch.bool)
    monkeypatch.setattr(core, "select_anchors", lambda *args: fixed)
    total = 20
    taps = features(total, len(model.target_layer_ids))
    ids = torch.arange(total)[None] * 5 % VOCAB
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            torch.tensor(taps)[None],
            ids,
            torch.ones(1, total),
            torch.zeros(1, total, WIDTH),
            torch.zeros(1, total, dtype=torch.long),
            max_anchors=len(anchors),
        )
    split = lambda x: x.reshape(len(anchors), model.block_size, -1)  # noqa: E731
    return taps, ids[0], split(hidden), split(logits)


def first_row(model, monkeypatch) -> int:
    """Which row of a block the library trains to predict the token after the anchor: the one whose teacher is the
    target's prediction at the anchor. The target's states tell their position, and its head reads it."""
    from speculators.models.dflash import core

    anchor, total = 7, 20
    with torch.no_grad():
        model.verifier_norm.weight.fill_(1)
        model.verifier_lm_head.weight.copy_(torch.eye(*model.verifier_lm_head.weight.shape))
    fixed = torch.tensor([anchor]), torch.ones(1, dtype=torch.bool)
    monkeypatch.setattr(core, "select_anchors", lambda *args: fixed)
    with torch.no_grad():
        teacher = model._backbone_forward(
            torch.zeros(1, total, len(model.target_layer_ids) * WIDTH),
            torch.zeros(1, total, dtype=torch.long),
            torch.ones(1, total),
            torch.eye(total, WIDTH)[None],
            torch.zeros(1, total, dtype=torch.long),
            max_anchors=1,
        )[2]
    return teacher[0].argmax(-1).tolist().index(anchor)
