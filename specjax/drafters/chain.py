"""Several drafters in order of priority: per row, the first one that has something to propose speaks.

``drafter=("ngram", "folder")`` copies where the text repeats itself and asks the learned drafter elsewhere.
Every child takes in every block, whoever spoke, so that all stay in step with the text. A child with weights
runs only in rounds in which the ones before it leave some row without a proposal.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import registry
from specjax.types import AbsorbIn, Ctx, Proposal, Shared, TapSpec


@dataclasses.dataclass(frozen=True)
class Config:
    """Frozen settings: names of the children and their configs, first to last. ``k`` is the widest of theirs."""

    drafters: tuple[str, ...]
    configs: tuple[Any, ...]

    def __post_init__(self):
        if not self.drafters or len(self.drafters) != len(self.configs):
            raise ValueError(f"a chain of {len(self.drafters)} drafters with {len(self.configs)} configs")
        if "chain" in self.drafters:
            raise ValueError("a chain holds drafters, not chains: name them all in one sequence")

    @property
    def k(self) -> int:
        return max(cfg.k for cfg in self.configs)

    @property
    def children(self) -> tuple[tuple[Any, Any], ...]:
        """(module, config) of each child."""
        return tuple(
            (registry.drafter(name), cfg) for name, cfg in zip(self.drafters, self.configs, strict=True)
        )


def config(settings: Mapping[str, Any], target_cfg: Any) -> Config:
    """Config from ``drafters`` (names) and ``configs`` (their frozen configs)."""
    del target_cfg  # the children have checked it
    return Config(tuple(settings["drafters"]), tuple(settings["configs"]))


def from_json(data: Mapping[str, Any], target_cfg: Any) -> Config:
    """Config from a saved one."""
    from specjax.config import drafter_config

    pairs = zip(data["drafters"], data["configs"], strict=True)
    return Config(
        tuple(data["drafters"]), tuple(drafter_config(name, cfg, target_cfg) for name, cfg in pairs)
    )


def tiny(target_cfg: Any) -> Config:
    """The n-gram drafter before a draft model."""
    names = ("ngram", "draft_model")
    return Config(names, tuple(registry.drafter(name).tiny(target_cfg) for name in names))


def varies(cfg: Config) -> bool:
    """As soon as children differ in width, or one of them varies."""
    widths = {child.k for _, child in cfg.children}
    return len(widths) > 1 or any(module.varies(child) for module, child in cfg.children)


def NEEDS(cfg: Config) -> TapSpec:
    """What any child reads."""
    wanted = TapSpec()
    for module, child in cfg.children:
        wanted |= module.NEEDS(child)
    return wanted


def abstract(cfg: Config) -> tuple[Any, ...]:
    """The children's weights in order, None for one without."""
    return tuple(module.abstract(child) for module, child in cfg.children)


def init_state(cfg: Config, rows: int, slots: int, q_max: int, dtype: Any) -> tuple[Any, ...]:
    """The children's states in order."""
    return tuple(module.init_state(child, rows, slots, q_max, dtype) for module, child in cfg.children)


def ready(p: tuple[Any, ...], shared: Shared, cfg: Config) -> tuple[Any, ...]:
    """The children's, each in its own way."""
    return tuple(
        module.ready(weights, shared, child) if hasattr(module, "ready") else weights
        for weights, (module, child) in zip(p, cfg.children, strict=True)
    )


def draft(
    p: tuple[Any, ...],
    shared: Shared,
    cfg: Config,
    k: int,
    dstate: tuple[Any, ...],
    ctx: Ctx,
    keys: Array | None,
) -> tuple[Proposal, tuple[Any, ...]]:
    """Per row the proposal of the first child that has one; ``source`` is its index.

    No child drafts more than its own k. Rows of children that report no q are points.
    """
    proposals, states = [], []
    silent = ctx.live
    for i, (module, child) in enumerate(cfg.children):
        run = _Child(module, p[i], shared, child, min(k, child.k), ctx, keys)
        always = i == 0 or p[i] is None
        proposal, state = run(dstate[i]) if always else _if_any(silent, run, dstate[i])
        proposals.append(_widened(proposal, k))
        states.append(state)
        silent = silent & (proposal.count == 0)
    return _merged(proposals, shared.head.shape[0]), tuple(states)


@dataclasses.dataclass(frozen=True)
class _Child:
    """One child's ``draft`` with everything but its state."""

    module: Any
    weights: Any
    shared: Shared
    cfg: Any
    k: int
    ctx: Ctx
    keys: Array | None

    def __call__(self, dstate: Any) -> tuple[Proposal, Any]:
        return self.module.draft(self.weights, self.shared, self.cfg, self.k, dstate, self.ctx, self.keys)


def _if_any(rows: Bool[Array, " B"], run: _Child, dstate: Any) -> tuple[Proposal, Any]:
    """``run(dstate)`` if any row wants it, else an empty proposal and the state as it is.

    A loop of at most one turn: XLA copies caches whole on their way through a conditional.
    """
    shape = jax.eval_shape(run, dstate)[0]
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
    once = lambda carry: (jnp.zeros((), bool), *run(carry[2]))  # noqa: E731
    return jax.lax.while_loop(lambda carry: carry[0], once, (jnp.any(rows), empty, dstate))[1:]


def _widened(proposal: Proposal, k: int) -> Proposal:
    pad = lambda x: jnp.pad(x, [(0, 0), (0, k - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])  # noqa: E731
    q = None if proposal.q is None else pad(proposal.q)
    return dataclasses.replace(proposal, tokens=pad(proposal.tokens), q=q, confidence=None)


def _merged(proposals: list[Proposal], vocab: int) -> Proposal:
    """Row by row the first proposal that holds a token."""
    said = jnp.stack([x.count > 0 for x in proposals])
    source = jnp.argmax(said, 0).astype(jnp.int32)  # the first True; 0 when nobody spoke
    tokens = _choose(source, [x.tokens for x in proposals])
    count = _choose(source, [x.count for x in proposals])
    if all(x.q is None for x in proposals):
        return Proposal(tokens, count, source=source)
    q, q_ids = _laws(proposals, source, vocab)
    points = [jnp.full(count.shape, x.q is None) if x.point is None else x.point for x in proposals]
    return Proposal(tokens, count, q, q_ids, _choose(source, points), source)


def _choose(source: Int[Array, " B"], parts: list[Array]) -> Array:
    """``parts[source[b]][b]`` for every row."""
    out = parts[0]
    for i, part in enumerate(parts[1:], 1):
        out = jnp.where((source == i).reshape(-1, *[1] * (out.ndim - 1)), part, out)
    return out


def _laws(proposals: list[Proposal], source, vocab: int) -> tuple[Float[Array, "B K Vq"], Array | None]:
    """q of every row and its ids: as the only child with a q gave it, else over the target's whole vocabulary.

    Rows that are points hold the one-hot row of their token (0 where the draft vocabulary lacks it).
    """
    drawn = [x for x in proposals if x.q is not None]
    ids = drawn[0].q_ids if len(drawn) == 1 else None
    columns = jnp.arange(vocab) if ids is None else ids
    parts = []
    for x in proposals:
        if x.q is None:
            parts.append((x.tokens[..., None] == columns).astype(jnp.float32))
        elif len(drawn) == 1 or x.q_ids is None:
            parts.append(x.q)
        else:
            parts.append(jnp.zeros((*x.tokens.shape, vocab), x.q.dtype).at[..., x.q_ids].set(x.q))
    return _choose(source, parts), ids


def absorb(
    p: tuple[Any, ...], shared: Shared, cfg: Config, dstate: tuple[Any, ...], block: AbsorbIn
) -> tuple[Any, ...]:
    """Every child's state with the block taken in, each shown only what it needs."""
    states = []
    for i, (module, child) in enumerate(cfg.children):
        wanted = module.NEEDS(child)
        part = dataclasses.replace(
            block,
            hidden=block.hidden if wanted.hidden else None,
            taps={j: block.taps[j] for j in wanted.taps},
        )
        states.append(module.absorb(p[i], shared, child, dstate[i], part))
    return tuple(states)


def min_resume(cfg: Config, high_water: int) -> int:
    """The latest of the children's."""
    return max(module.min_resume(child, high_water) for module, child in cfg.children)
