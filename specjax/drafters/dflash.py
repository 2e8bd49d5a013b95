"""DFlash and DFlash2: a whole block of drafts from one parallel pass, conditioned on the target's features.

The block is the anchor followed by mask tokens. Context is injected, not computed: for every committed
position before the anchor the target's taps are fused into one vector, each layer projects that to a key
and a value, and those are cached. The block's own keys and values are used once and forgotten.

Paper: Chen, Liang, Liu, "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036).
Checkpoints: z-lab, DeepSpec, speculators and transformers (``specjax.checkpoints.formats``).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import DenseKV, marked
from specjax.drafters import body, dflash2, pick
from specjax.drafters.body import Layer, layer_specs, norm, output, turn
from specjax.drafters.dflash_config import Config, check_k, checked, config, max_k, tiny_fields
from specjax.kernels import kv_injection_op
from specjax.kernels.block_attention_op import View, attend_block, own_visible
from specjax.layers import head as heads
from specjax.layers.linear import linear
from specjax.layers.rope import rope_angles
from specjax.types import AbsorbIn, ArraySpec, Ctx, Mode, Proposal, Shared, TapSpec

__all__ = [
    "NEEDS", "Config", "Weights", "absorb", "abstract", "checked", "config", "draft", "init_state", "max_k",
    "min_resume", "tiny", "varies",
]  # fmt: skip

State = tuple[DenseKV, ...]


@struct.dataclass
class Weights:
    """All weights; None where the target's are used or the drafter has no such part.

    ``E`` rows of the drafter's own embedding, ``U`` rows of its head, ``W`` = taps * width of the target.
    """

    embed: Float[Array, "E D"] | None
    mask: Float[Array, " D"] | None
    fc: Float[Array, "D W"]
    hidden_norm: Float[Array, " D"]
    layers: tuple[Layer, ...]
    convs: tuple[dflash2.LayerConvs, ...] | None
    norm: Float[Array, " D"]
    head: Float[Array, "U D"] | None
    d2t: Int[Array, " U"] | None  # offsets: draft id i is target id i + d2t[i]
    selector: dflash2.Selector | None


def tiny(target_cfg: Any) -> Config:
    """Two small layers, blocks of five rows, four drafts."""
    return Config(**tiny_fields(target_cfg))


def varies(cfg: Config) -> bool:
    """Always k."""
    del cfg
    return False


def NEEDS(cfg: Config) -> TapSpec:
    """The taps that are fused."""
    return TapSpec(tuple(sorted(set(cfg.taps))))


def abstract(cfg: Config) -> Weights:
    """Weight struct of ArraySpecs, under the names all formats share."""
    d, shape = cfg.body.hidden_size, cfg.body
    table = lambda rows, name: ArraySpec((rows, d), ("vocab", None), (name,)) if rows else None  # noqa: E731
    one = lambda name: ArraySpec((d,), (None,), (name,), "ones")  # noqa: E731
    return Weights(
        embed=table(cfg.own_embed, "embed_tokens.weight"),
        mask=ArraySpec((d,), (None,), ("mask_embedding",)) if cfg.mask_embedding else None,
        fc=ArraySpec((d, len(cfg.taps) * cfg.tap_width), (None, None), ("fc.weight",)),
        hidden_norm=one("hidden_norm.weight"),
        layers=tuple(layer_specs(shape, f"layers.{i}.") for i in range(shape.layers)),
        convs=None
        if cfg.conv is None
        else tuple(dflash2.conv_specs(cfg.conv, d, f"layers.{i}.") for i in range(shape.layers)),
        norm=one("norm.weight"),
        head=table(cfg.own_head, "lm_head.weight"),
        d2t=ArraySpec((cfg.draft_vocab,), (None,), ("d2t",), "zeros", dtype="int32")
        if cfg.draft_vocab
        else None,
        selector=None if cfg.selector is None else dflash2.selector_specs(cfg.selector, cfg.vocab, d),
    )


def init_state(cfg: Config, rows: int, slots: int, q_max: int, dtype: Any) -> State:
    """Keys and values of the injected context, one dense cache per layer."""
    del q_max
    shape = (rows, cfg.body.kv_heads, slots, cfg.body.head_dim, dtype)
    return tuple(DenseKV.create(*shape) for _ in range(cfg.body.layers))


def absorb(p: Weights, shared: Shared, cfg: Config, dstate: State, block: AbsorbIn) -> State:
    """The state with the context of the block's first ``keep`` positions injected."""
    del shared
    features = jnp.concatenate([block.taps[j] for j in cfg.taps], -1)
    return inject(p, cfg, dstate, features, block.pos, block.keep, block.mode)


def inject(
    p: Weights,
    cfg: Config,
    dstate: State,
    features: Float[Array, "B Q W"],
    pos: Int[Array, "B Q"],
    keep: Int[Array, " B"],
    mode: Mode,
) -> State:
    """Fuse the taps, project them to every layer's keys and values, and write those at their positions.

    The fused vector is the same for all layers and passes no other norm. After a verification rows at or
    beyond ``keep`` land in slots that are invisible until they are overwritten.
    """
    caches = tuple((kv.k, kv.v) for kv in dstate)
    layers, heads = tuple(body.projections(layer) for layer in p.layers), body.heads(cfg.body)
    written = kv_injection_op.inject(
        fuse(p, cfg, features), layers, caches, pos, keep, heads=heads, mode=mode
    )
    return tuple(DenseKV(*pair) for pair in written)


def fuse(p: Weights, cfg: Config, features: Float[Array, "B Q W"]) -> Float[Array, "B Q D"]:
    """One vector per position, of its taps side by side."""
    return norm(linear(features, p.fc), p.hidden_norm, cfg.body)


def draft(
    p: Weights, shared: Shared, cfg: Config, k: int, dstate: State, ctx: Ctx, keys: Array | None
) -> tuple[Proposal, State]:
    """``k`` drafts per row from one pass over the block; the state is left as it is."""
    check_k(cfg, k)
    hidden = drafting_rows(p, shared, cfg, k, dstate, ctx)
    keys = keys if pick.sampling(cfg.drafting, keys) else None
    ids = target_ids(p)
    if p.selector is None and pick.greedy(keys, ctx.temperature):
        tokens = heads.best(hidden, table(p, shared), cap(cfg))[1]
        return proposal(tokens if ids is None else ids[tokens], None, ids, ctx), dstate
    logits = unembed(p, shared, cfg, hidden)
    if p.selector is not None:
        tokens, q = dflash2.walk(p.selector, cfg.selector, hidden, logits, ctx.anchor, keys, ctx.temperature)
    else:
        tokens, q = independent(logits, ids, keys, ctx.temperature)
    return proposal(tokens, q, ids, ctx), dstate


def independent(
    logits: Float[Array, "B K V"], ids: Array | None, keys: Array | None, temperature: Array | None
) -> tuple[Int[Array, "B K"], Float[Array, "B K V"] | None]:
    """Every position's token (a target id) by itself, and the distributions they were drawn from."""
    every = jax.vmap(pick.pick, in_axes=(1, None, 0, None), out_axes=1)
    tokens, q = every(logits, keys, jnp.arange(logits.shape[1]), temperature)
    return tokens if ids is None else ids[tokens], q


def proposal(tokens: Int[Array, "B K"], q: Array | None, ids: Array | None, ctx: Ctx) -> Proposal:
    """A proposal of all K tokens; rows at temperature 0 are points."""
    count = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    if q is None or ctx.temperature is None:
        return Proposal(tokens, count)
    return Proposal(tokens, count, q, ids, point=ctx.temperature == 0)


def target_ids(p: Weights) -> Int[Array, " U"] | None:
    """Target id of every draft id; None when they are the same."""
    return None if p.d2t is None else jnp.arange(p.d2t.shape[0], dtype=jnp.int32) + p.d2t


def drafting_rows(
    p: Weights, shared: Shared, cfg: Config, k: int, dstate: State, ctx: Ctx
) -> Float[Array, "B K D"]:
    """Final-normed rows that predict the first ``k`` drafts. All N rows run: they were trained together."""
    start = ctx.length - 1
    x = block_inputs(p, shared, cfg, ctx.anchor)
    angles = rope_angles(cfg.body.rope, start[:, None] + jnp.arange(cfg.rows))

    def over_cache(i: int, kv: DenseKV, q, k, v):
        return attend_block(q, kv.k, kv.v, start, start, marked(k, v, k.dtype), view=view(cfg, i))

    for i, kv in enumerate(dstate):
        x = block_layer(p, cfg, i, x, angles, functools.partial(over_cache, i, kv))
    return norm(x[:, cfg.first : cfg.first + k], p.norm, cfg.body)


def block_inputs(p: Weights, shared: Shared, cfg: Config, anchor: Int[Array, " B"]) -> Float[Array, "B N D"]:
    """The anchor's raw embedding, then the mask's."""
    table = shared.embed if p.embed is None else p.embed
    scale = jnp.asarray(cfg.input_scale, table.dtype)
    mask = table[cfg.mask_id] * scale if p.mask is None else p.mask.astype(table.dtype)
    masks = jnp.broadcast_to(mask, (anchor.shape[0], cfg.rows - 1, mask.shape[0]))
    return jnp.concatenate([(table[anchor] * scale)[:, None], masks], 1)


#: ``mix(q, k, v)``: the values each row attends to, given the block's queries, keys and values, all at their
#: positions.
Mix = Callable[
    [Float[Array, "B N H C"], Float[Array, "B N G C"], Float[Array, "B N G C"]], Float[Array, "B N H C"]
]


def block_layer(
    p: Weights,
    cfg: Config,
    i: int,
    x: Float[Array, "B N D"],
    angles: tuple[Float[Array, "B N R"], Float[Array, "B N R"]],
    mix: Mix,
) -> Float[Array, "B N D"]:
    """Layer ``i`` over the rows of blocks; what they see besides themselves is ``mix``'s."""
    layer, shape = p.layers[i], cfg.body
    convs = None if p.convs is None else p.convs[i]

    def attention(n):
        q, k, v = body.heads_of(layer, shape, n)
        return output(layer, mix(turn(q, shape, angles), turn(k, shape, angles), v))

    def mlp(n):
        return body.feed(layer, shape, n)

    normed = body.normed(x, layer.attn_norm, shape)
    added = dflash2.around(convs and convs.attention, cfg.conv, normed, attention)
    x = body.after_attention(layer, shape, x, added)
    added = dflash2.around(convs and convs.mlp, cfg.conv, body.normed(x, layer.mlp_norm, shape), mlp)
    return body.after_mlp(layer, shape, x, added)


def view(cfg: Config, i: int) -> View:
    """What rows of layer ``i`` see: of the context what lies before the anchor, in a sliding layer the last of it."""
    return View(cfg.body.scale, cfg.causal[i], cfg.body.windows[i], cfg.window_from)


def context_seen(cfg: Config, i: int, start: Int[Array, "..."], at: Int[Array, "..."]) -> Bool[Array, "..."]:
    """Which of the positions ``at`` [... 1 S] rows of layer ``i`` see if the anchor is at ``start`` [... 1 1]. The
    last axis but one is the block's N rows, or 1 where all see the same."""
    seen, window = at < start, cfg.body.windows[i]
    if window is None:
        return seen
    if cfg.window_from == "anchor":
        return seen & (at >= start - window)
    return seen & (at > start + jnp.arange(cfg.rows, dtype=start.dtype)[:, None] - window)


def block_visible(cfg: Config, i: int) -> Bool[Array, "N N"]:
    """Rows of the block each row of layer ``i`` sees."""
    return own_visible(view(cfg, i), cfg.rows)


def unembed(p: Weights, shared: Shared, cfg: Config, hidden: Float[Array, "B K D"]) -> Float[Array, "B K V"]:
    """float32 draft logits, over the reduced vocabulary if there is one."""
    logits = heads.logits(hidden, table(p, shared), cap(cfg))
    extra = 0 if p.d2t is not None else cfg.vocab - logits.shape[-1]
    if extra > 0:  # the drafter's own head has fewer padding rows than the target's
        logits = jnp.pad(logits, ((0, 0), (0, 0), (0, extra)), constant_values=-jnp.inf)
    return logits


def table(p: Weights, shared: Shared) -> Float[Array, "V D"]:
    """The head that drafts are read with."""
    return shared.head if p.head is None else p.head


def cap(cfg: Config) -> heads.Cap:
    """How logits are made of products with the head."""
    return heads.Cap(cfg.output_multiplier, cfg.softcap, cfg.vocab)


def min_resume(cfg: Config, high_water: int) -> int:
    """Dense caches can be cut back to any length."""
    del cfg, high_water
    return 1
