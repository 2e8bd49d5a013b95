"""Weight structs of Gemma 4 and where checkpoints keep them."""

from flax import struct
from jaxtyping import Array, Float

from specjax.targets import decoder, gemma
from specjax.targets.ffn import moe_specs
from specjax.targets.gemma4_config import Config
from specjax.types import ArraySpec


@struct.dataclass
class Moe:
    """Experts beside the plain feed-forward block. ``dense_norm`` is that block's, ``norm`` and ``post_norm``
    stand before and after the experts."""

    router_scale: Float[Array, " D"]
    router: Float[Array, "E D"]
    expert_scale: Float[Array, " E"]
    gate: Float[Array, "E F D"]
    up: Float[Array, "E F D"]
    down: Float[Array, "E D F"]
    dense_norm: Float[Array, " D"]
    norm: Float[Array, " D"]
    post_norm: Float[Array, " D"]


@struct.dataclass
class Gate:
    """Where a layer takes in its own input of size ``P``."""

    gate: Float[Array, "P D"]
    project: Float[Array, "D P"]
    norm: Float[Array, " D"]


@struct.dataclass
class Inputs:
    """What inputs per layer are made of: a table, ``L`` inputs to a token, and a projection of its embedding."""

    embed: Float[Array, "V LP"]
    project: Float[Array, "LP D"]
    norm: Float[Array, " P"]


@struct.dataclass
class Layer:
    """Weights of one decoder layer. ``k`` and ``k_norm`` are None where keys and values are an earlier layer's,
    ``v`` also where values are made of ``k``."""

    attn_norm: Float[Array, " D"]
    q: Float[Array, "H C D"]
    k: Float[Array, "G C D"] | None
    v: Float[Array, "G C D"] | None
    o: Float[Array, "D H C"]
    q_norm: Float[Array, " C"]
    k_norm: Float[Array, " C"] | None
    post_attn_norm: Float[Array, " D"]
    mlp_norm: Float[Array, " D"]
    gate: Float[Array, "F D"]
    up: Float[Array, "F D"]
    down: Float[Array, "D F"]
    post_mlp_norm: Float[Array, " D"]
    moe: Moe | None
    per_layer: Gate | None
    scalar: Float[Array, "1"]


@struct.dataclass
class Weights(decoder.Weights):
    """All weights of the model. ``per_layer``: where its layers take inputs of their own."""

    per_layer: Inputs | None


def abstract(cfg: Config) -> Weights:
    """Weight struct of ArraySpecs."""
    return Weights(
        layers=tuple(_layer(cfg, i, f"model.layers.{i}.") for i in range(cfg.num_layers)),
        per_layer=_inputs(cfg) if cfg.per_layer_size else None,
        **decoder.outer_specs(cfg),
    )


def _layer(cfg: Config, index: int, prefix: str) -> Layer:
    kind, d, own = cfg.kind(index), cfg.hidden_size, index < cfg.cached
    parts = "qo" if not own else "qko" if cfg.values_only(index) else "qkvo"
    norms = {
        "attn_norm": ("input_layernorm", d),
        "q_norm": ("self_attn.q_norm", kind.head_dim),
        "post_attn_norm": ("post_attention_layernorm", d),
        "mlp_norm": ("pre_feedforward_layernorm", d),
        "post_mlp_norm": ("post_feedforward_layernorm", d),
    }
    specs: dict[str, ArraySpec | None] = {
        "k_norm": None,
        **gemma.norm_specs(norms, prefix, "ones"),
        **gemma.mlp_specs(cfg, cfg.dense_of(index), prefix),
        **gemma.head_specs(cfg, kind, prefix, parts),
    }
    if own:
        specs |= gemma.norm_specs({"k_norm": ("self_attn.k_norm", kind.head_dim)}, prefix, "ones")
    return Layer(
        moe=_moe(cfg, prefix) if cfg.experts else None,
        per_layer=_gate(cfg, prefix) if cfg.per_layer_size else None,
        scalar=ArraySpec((1,), (None,), (prefix + "layer_scalar",), "ones"),
        **specs,
    )


def _moe(cfg: Config, prefix: str) -> Moe:
    """Experts fused (``experts.gate_up_proj [E 2F D]``, gate rows first) or one by one."""
    e, d = cfg.experts, cfg.hidden_size
    block = moe_specs(d, cfg.expert_size, e, prefix)
    norms = {
        "dense_norm": ("post_feedforward_layernorm_1", d),
        "norm": ("pre_feedforward_layernorm_2", d),
        "post_norm": ("post_feedforward_layernorm_2", d),
    }
    return Moe(
        router_scale=ArraySpec((d,), (None,), (prefix + "router.scale",), "ones"),
        router=ArraySpec((e, d), (None, None), (prefix + "router.proj.weight",)),
        expert_scale=ArraySpec((e,), (None,), (prefix + "router.per_expert_scale",), "ones"),
        gate=block.gate,
        up=block.up,
        down=block.down,
        **gemma.norm_specs(norms, prefix, "ones"),
    )


def _gate(cfg: Config, prefix: str) -> Gate:
    d, p = cfg.hidden_size, cfg.per_layer_size
    return Gate(
        gate=ArraySpec((p, d), (None, None), (prefix + "per_layer_input_gate.weight",)),
        project=ArraySpec((d, p), (None, None), (prefix + "per_layer_projection.weight",)),
        norm=ArraySpec((d,), (None,), (prefix + "post_per_layer_input_norm.weight",), "ones"),
    )


def _inputs(cfg: Config) -> Inputs:
    p, every = cfg.per_layer_size, cfg.num_layers * cfg.per_layer_size
    return Inputs(
        embed=ArraySpec((cfg.vocab_size, every), ("vocab", None), ("model.embed_tokens_per_layer.weight",)),
        project=ArraySpec(
            (every, cfg.hidden_size), (None, None), ("model.per_layer_model_projection.weight",)
        ),
        norm=ArraySpec((p,), (None,), ("model.per_layer_projection_norm.weight",), "ones"),
    )


def skipped(cfg: Config) -> dict[str, str]:
    """Beginnings of tensor names that are not read, and why."""
    parts = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    strays = {
        f"model.layers.{i}.self_attn.{part}": "this layer reads keys and values of an earlier one"
        for i in range(cfg.cached, cfg.num_layers)
        for part in parts
    }
    return gemma.SKIPPED | strays
