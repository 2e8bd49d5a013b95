"""A small model of any target family as the drafter of another with the same tokens.

It decodes ahead of the target with a cache of its own: k drafts cost k passes. A pass that is given two tokens
comes first; the second last token of the row is among them because a draft that was accepted as the last of
its round has never been fed. Prompts enter the cache in ``absorb``; in rounds nothing is left to take in, unless
somebody else's drafts were committed (a chain, a proposal of one's own): then the block is fed once more.

Method: speculative decoding with a draft model (Leviathan et al., arXiv 2211.17192).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax import registry
from specjax.drafters.pick import Drafting, check_drafting, pick, sampling
from specjax.types import AbsorbIn, Ctx, Proposal, Shared, TapSpec

DEFAULT_K = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Frozen settings. ``model`` is the config of the family; ``vocab_size`` the target's number of ids."""

    family: str
    model: Any
    vocab_size: int
    k: int = DEFAULT_K
    drafting: Drafting = "probabilistic"

    @property
    def common(self) -> int:
        """Number of ids that both models have."""
        return min(self.vocab_size, self.model.vocab_size)


def config(settings: Mapping[str, Any], target_cfg: Any) -> Config:
    """Config from ``family`` and ``model`` (its config), ``k``, ``drafting``; ``compared`` says that both
    tokenizers were found to agree.

    Raises ValueError for other settings, for a model that cannot be rolled back, and for vocabularies of
    different size whose tokens were not compared.
    """
    known = {"family", "model", "k", "drafting", "compared"}
    if unknown := sorted(set(settings) - known):
        raise ValueError(f"a draft model has no setting(s) {unknown}; known: drafting, k")
    given = {key: settings[key] for key in ("family", "model", "k", "drafting") if key in settings}
    cfg = Config(vocab_size=target_cfg.vocab_size, **given)
    check_drafting(cfg.k, cfg.drafting)
    if cfg.model.vocab_size != cfg.vocab_size and not settings.get("compared"):
        raise ValueError(
            f"the draft model has {cfg.model.vocab_size} token ids, the target {cfg.vocab_size}; different sizes are "
            "only possible when both come with a tokenizer and the tokenizers agree"
        )
    far = 1 << 20
    if registry.target(cfg.family).min_resume(cfg.model, far) >= far:
        raise ValueError(
            f"a {cfg.family} model cannot take back rejected drafts, so it cannot be a draft model"
        )
    return cfg


def from_json(data: Mapping[str, Any], target_cfg: Any) -> Config:
    """Config from a saved one. The family must be a registered one: a file does not choose what is imported."""
    from specjax.config import from_dict

    del target_cfg
    if data["family"] not in registry.TARGETS:
        raise ValueError(f"draft model of family {data['family']!r}; known: {', '.join(registry.TARGETS)}")
    return Config(**{**data, "model": from_dict(registry.target(data["family"]).Config, data["model"])})


def tiny(target_cfg: Any) -> Config:
    """A Llama of one layer with the target's vocabulary."""
    hf = {
        "model_type": "llama",
        "vocab_size": target_cfg.vocab_size,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "max_position_embeddings": target_cfg.max_positions,
        "hidden_act": "silu",
    }
    return config({"family": "llama", "model": registry.target("llama").config(hf)}, target_cfg)


def varies(cfg: Config) -> bool:
    """Always k, up to the end of the model's context."""
    del cfg
    return False


def NEEDS(cfg: Config) -> TapSpec:
    """Nothing of the target but its tokens."""
    del cfg
    return TapSpec()


def abstract(cfg: Config) -> Any:
    """The family's weight struct."""
    return registry.target(cfg.family).abstract(cfg.model)


@struct.dataclass
class Ahead:
    """The family's cache, and the drafts that were fed to it beyond the committed tokens when the row had
    ``length`` of them (-1 = none)."""

    cache: Any
    drafts: Int[Array, "B Q"]
    length: Int[Array, " B"]


def init_state(cfg: Config, rows: int, slots: int, q_max: int, dtype: Any) -> Ahead:
    """Empty cache."""
    cache = registry.target(cfg.family).init_cache(cfg.model, rows, slots, q_max, dtype)
    return Ahead(cache, jnp.full((rows, q_max), -1, jnp.int32), jnp.zeros((rows,), jnp.int32))


def draft(
    p: Any, shared: Shared, cfg: Config, k: int, dstate: Ahead, ctx: Ctx, keys: Array | None
) -> tuple[Proposal, Ahead]:
    """k drafts per row, none where they would pass the model's own context. Drawn at the row's temperature with
    q ``[B K V]``, or arg-max without q."""
    del shared
    keys = keys if sampling(cfg.drafting, keys) else None
    start = jnp.maximum(ctx.length - 2, 0)
    pos = start[:, None] + jnp.arange(2, dtype=jnp.int32)
    logits, cache = _pass(p, cfg, jnp.take_along_axis(ctx.tokens, pos, 1), pos, dstate.cache)
    first, q = pick(logits, keys, 0, ctx.temperature)

    def step(carry, i):
        token, cache = carry
        at = (start + 1 + i)[:, None]
        logits, cache = _pass(p, cfg, token[:, None], at, cache)
        token, q = pick(logits, keys, i, ctx.temperature)
        return (token, cache), (token, q)

    (_, cache), (others, more) = jax.lax.scan(step, (first, cache), jnp.arange(1, k, dtype=jnp.int32))
    tokens = jnp.concatenate([first[:, None], others.swapaxes(0, 1)], 1)
    fits = ctx.length + k <= cfg.model.max_positions
    proposal = Proposal(tokens, jnp.where(fits, k, 0).astype(jnp.int32), _whole(cfg, q, more))
    unfed = dstate.drafts.shape[1] - (k - 1)  # the last draft is proposed, but not fed
    drafts = jnp.pad(tokens[:, :-1], ((0, 0), (0, unfed)), constant_values=-1)
    return proposal, Ahead(cache, drafts, ctx.length)


def _pass(p, cfg: Config, tokens: Int[Array, "B N"], pos: Int[Array, "B N"], cache):
    """Logits ``[B common]`` after the last of N tokens per row, and the cache with all of them in it."""
    family, n = registry.target(cfg.family), tokens.shape[1]
    every = jnp.full(pos.shape[:1], n, jnp.int32)
    tokens = jnp.minimum(tokens, cfg.model.vocab_size - 1)
    out = family.forward(p, cfg.model, tokens, pos, every, cache, TapSpec(), "verify")
    logits = family.unembed(p, cfg.model, out.hidden[:, -1:])[:, 0, : cfg.common]
    return logits, family.commit(cfg.model, out.cache, every)


def _whole(cfg: Config, first, more) -> Float[Array, "B K V"] | None:
    """q of all steps over the target's ids."""
    if first is None:
        return None
    q = jnp.concatenate([first[:, None], more.swapaxes(0, 1)], 1)
    return jnp.pad(q, ((0, 0), (0, 0), (0, cfg.vocab_size - cfg.common)))


def absorb(p: Any, shared: Shared, cfg: Config, dstate: Ahead, block: AbsorbIn) -> Ahead:
    """The cache with a block of the prompt in it. In rounds, with a block in it that this drafter did not draft."""
    del shared
    if block.mode == "extend":
        block = block if block.before is None else _with_before(block, block.before)
        return dataclasses.replace(dstate, cache=_feed(p, cfg, block, block.keep, dstate.cache))
    keep = jnp.where(_strange(dstate, block), block.keep, 0)

    def once(carry):
        return jnp.zeros((), bool), _feed(p, cfg, block, keep, carry[1])

    # A loop of at most one turn: XLA copies a cache whole on its way through a conditional.
    some = jnp.any(keep > 0)
    cache = jax.lax.while_loop(lambda carry: carry[0], once, (some, dstate.cache))[1]
    return dataclasses.replace(dstate, cache=cache)


def _with_before(block: AbsorbIn, before: Int[Array, " B"]) -> AbsorbIn:
    """The block and the position before it: a draft that was accepted as the last of its round was never fed."""
    return dataclasses.replace(
        block,
        tokens=jnp.concatenate([before[:, None], block.tokens], 1),
        pos=jnp.concatenate([block.pos[:, :1] - 1, block.pos], 1),
        keep=jnp.where(block.keep > 0, block.keep + 1, 0),
    )


def _strange(dstate: Ahead, block: AbsorbIn) -> Bool[Array, " B"]:
    """Rows whose committed tokens are not what was fed. The last two are fed by the next draft anyway."""
    q = min(block.tokens.shape[1], dstate.drafts.shape[1])
    same = block.next_tokens[:, :q] == dstate.drafts[:, :q]
    decided = jnp.arange(q) < block.keep[:, None] - 2
    return (dstate.length != block.pos[:, 0] + 1) | (decided & ~same).any(1)


def _feed(p, cfg: Config, block: AbsorbIn, keep: Int[Array, " B"], cache):
    """The cache with the first ``keep`` positions of the block in it."""
    tokens = jnp.minimum(block.tokens, cfg.model.vocab_size - 1)
    family = registry.target(cfg.family)
    return family.forward(p, cfg.model, tokens, block.pos, keep, cache, TapSpec(), "extend").cache


def min_resume(cfg: Config, high_water: int) -> int:
    """As for the family."""
    return registry.target(cfg.family).min_resume(cfg.model, high_water)
