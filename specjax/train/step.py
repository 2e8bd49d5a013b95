"""One optimiser step: pure functions over a training state, compiled once per recipe.

Masters and optimiser are float32; the forward pass runs on a copy in the recipe's dtype. A step whose loss or
gradients are not finite changes no weight, and neither does any later one: the state stays the last good one until
the host looks and stops.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Int

from specjax import registry
from specjax.train import methods, muon
from specjax.train.features import extract, spread
from specjax.train.types import Batch, Features, Metrics, Recipe
from specjax.types import Pair, Shared

_MATRIX = 8192  # longer axes belong to vocabularies


@struct.dataclass
class TrainState:
    """Everything a step changes.

    ``masters``: the trained leaves of the drafter's weights, float32, and None in place of the others, which are in
    ``fixed``. ``bad_step``: the first step that was not finite, -1 = none; ``bad_leaves`` which gradients were not
    then, in the order of ``jax.tree.leaves(masters)``.
    """

    step: Int[Array, ""]
    masters: Any
    fixed: Any
    optimiser: Any
    bad_step: Int[Array, ""]
    bad_leaves: Bool[Array, " leaves"]


def split(weights: Any, frozen: tuple[str, ...]) -> tuple[Any, Any]:
    """(trained, fixed) halves of a weight struct, each with None where the other has a leaf.

    Integer tables are never trained, nor are the fields named in ``frozen`` ("head", or "backbone.head" within another
    struct); ValueError for one that the struct does not have.
    """
    for name in frozen:
        _check_field(weights, name)

    def trained(path, leaf) -> bool:
        where = ".".join(str(getattr(part, "name", getattr(part, "idx", ""))) for part in path) + "."
        fixed = any(where.startswith(f"{name}.") for name in frozen)
        return jnp.issubdtype(leaf.dtype, jnp.floating) and not fixed

    pick = lambda wanted: jax.tree_util.tree_map_with_path(  # noqa: E731
        lambda path, leaf: leaf if trained(path, leaf) == wanted else None, weights
    )
    return pick(True), pick(False)


def _check_field(weights: Any, name: str) -> None:
    first, _, rest = name.partition(".")
    names = [field.name for field in dataclasses.fields(weights)] if dataclasses.is_dataclass(weights) else []
    if first not in names:
        raise ValueError(f"no field(s) {[first]} to freeze; the weights have {sorted(names)}")
    if rest:
        _check_field(getattr(weights, first), rest)


def merge(masters: Any, fixed: Any) -> Any:
    """The whole struct again."""
    return jax.tree.map(lambda a, b: b if a is None else a, masters, fixed, is_leaf=lambda x: x is None)


def cast(weights: Any, dtype: Any) -> Any:
    """Floating leaves in another type."""
    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if floating(x) else x, weights)


def optimiser(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW or Muon behind a clip of the global norm; decay acts on matrices only."""
    if recipe.optimizer == "muon":
        chosen = muon.stacked(schedule(recipe), recipe.betas, recipe.weight_decay, _muon_axes)
    else:
        matrices = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)  # noqa: E731
        chosen = optax.chain(
            optax.scale_by_adam(*recipe.betas),
            optax.add_decayed_weights(recipe.weight_decay, matrices),
            optax.scale_by_learning_rate(schedule(recipe)),
        )
    return optax.chain(optax.clip_by_global_norm(recipe.clip), chosen)


def _muon_axes(path: Any, x: Array) -> tuple[int, ...] | None:
    """Axes that a matrix reads; None, which leaves a leaf to Adam, for vectors and vocabulary tables."""
    if x.ndim < 2 or max(x.shape) > _MATRIX:
        return None
    return (1, 2) if getattr(path[-1], "name", "") == "o" and x.ndim == 3 else (x.ndim - 1,)


def schedule(recipe: Recipe) -> optax.Schedule:
    """Linear warm-up, then a cosine to 0 at the last step."""
    warm = max(1, round(recipe.warmup * recipe.steps))
    return optax.warmup_cosine_decay_schedule(0.0, recipe.learning_rate, warm, max(recipe.steps, warm + 1))


def start(weights: Any, frozen: tuple[str, ...], recipe: Recipe) -> TrainState:
    """The state before the first step. The weights are copied: a step may donate its state."""
    masters, fixed = split(weights, frozen)
    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), masters)
    leaves = len(jax.tree.leaves(masters))
    return TrainState(
        step=jnp.int32(0),
        masters=masters,
        fixed=jax.tree.map(lambda x: jnp.array(x, copy=True), fixed),
        optimiser=optimiser(recipe).init(masters),
        bad_step=jnp.int32(-1),
        bad_leaves=jnp.zeros((leaves,), bool),
    )


def weights_of(state: TrainState, dtype: Any) -> Any:
    """The drafter's weights as they decode."""
    return cast(merge(state.masters, state.fixed), dtype)


@dataclasses.dataclass(frozen=True)
class Step:
    """What selects a compiled step; calling it does one. ``pair`` names target and drafter with their configs.
    ``mesh``: devices that a batch's rows are spread over; None: one."""

    pair: Pair
    recipe: Recipe
    mesh: jax.sharding.Mesh | None = None

    @property
    def method(self) -> Any:
        return methods.method(self.recipe.method)

    def shared(self, target: Any) -> Shared:
        """What the target lends, in the recipe's dtype."""
        lent = registry.target(self.pair.family).shared(target, self.pair.target_cfg)
        return cast(lent, self.recipe.dtype)

    def features(self, target: Any, batch: Batch) -> Features:
        """What the method reads of the target, in the recipe's dtype."""
        needs = self.method.needs(self.pair.drafter_cfg)
        run = lambda batch, target: extract(target, self.pair, batch, needs, self.recipe.dtype)  # noqa: E731
        return spread(run, self.mesh)(batch, target)

    def matches(self, state: TrainState, target: Any, batch: Batch, k: int) -> Bool[Array, "R T k"]:
        """Which drafts are right, for every anchor of a batch."""
        weights, cfg = weights_of(state, self.recipe.dtype), self.pair.drafter_cfg

        def run(batch, weights, target):
            features = dataclasses.replace(self, mesh=None).features(target, batch)
            return self.method.matches(weights, self.shared(target), cfg, batch, features, k)

        return spread(run, self.mesh)(batch, weights, target)

    def __call__(
        self, state: TrainState, target: Any, batch: Batch, features: Features | None
    ) -> tuple[TrainState, Metrics]:
        """One step on ``recipe.rows`` packed rows; the key follows from seed and step number.

        ``features`` None: they are made inside the step.
        """
        key = jax.random.fold_in(jax.random.key(self.recipe.seed), state.step)
        grads, metrics = self._accumulated(state, target, batch, features, key)
        updates, opt = optimiser(self.recipe).update(grads, state.optimiser, state.masters)
        found = [jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]
        finite = functools.reduce(jnp.logical_and, found, jnp.isfinite(metrics["loss"][0]))
        good = finite & (state.bad_step < 0)
        kept = lambda new, old: jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)  # noqa: E731
        first_bad = ~finite & (state.bad_step < 0)
        metrics["gradient_norm"] = (optax.tree.norm(grads), jnp.float32(1))
        after = TrainState(
            step=state.step + 1,
            masters=kept(optax.apply_updates(state.masters, updates), state.masters),
            fixed=state.fixed,
            optimiser=kept(opt, state.optimiser),
            bad_step=jnp.where(first_bad, state.step, state.bad_step),
            bad_leaves=jnp.where(first_bad, ~jnp.stack(found), state.bad_leaves),
        )
        return after, metrics

    def _accumulated(self, state, target, batch, features, key) -> tuple[Any, Metrics]:
        """Mean gradients and summed metrics over the recipe's parts of a batch."""
        parts = self.recipe.accumulate
        one = functools.partial(self._gradients, state, target)
        if parts == 1:
            return one(batch, features, key)
        # every parts-th row: rows that are spread over devices stay so
        cut = lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)  # noqa: E731
        xs = jax.tree.map(cut, (batch, features))
        keys = jax.random.split(key, parts)
        first = jax.eval_shape(one, *jax.tree.map(lambda x: x[0], (*xs, keys)))
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), first)

        def add(total, part):
            return jax.tree.map(jnp.add, total, one(*part)), None

        (grads, metrics), _ = jax.lax.scan(add, zero, (*xs, keys))
        return jax.tree.map(lambda g: g / parts, grads), metrics

    def _gradients(self, state, target, batch, features, key) -> tuple[Any, Metrics]:
        shared = self.shared(target)
        features = self.features(target, batch) if features is None else features

        def loss(masters):
            weights = cast(merge(masters, state.fixed), self.recipe.dtype)
            return self.method.loss(weights, shared, self.pair.drafter_cfg, self.recipe, batch, features, key)

        grads, metrics = jax.grad(loss, has_aux=True)(state.masters)
        return grads, metrics


@functools.cache
def compiled(step: Step) -> tuple[Any, Any]:
    """The jitted step, which takes its state over, and the jitted :meth:`Step.matches`; one pair per process."""
    return jax.jit(step.__call__, donate_argnums=0), jax.jit(step.matches, static_argnames="k")
