"""Prompt lookup: propose what followed an earlier occurrence of the row's last tokens.

No weights and no state. The longest suffix of the row (``lookup_max`` down to ``lookup_min`` tokens) that
also occurs earlier is looked up in the row's own buffer; the tokens after that occurrence are the draft.
Only real tokens are proposed: ``count`` is 0 without a match and less than k near the row's end.

Method: prompt lookup decoding (Saxena, github.com/apoorvumang/prompt-lookup-decoding) in the variant of
vLLM's ``ngram`` method for ``match="earliest"``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.drafters import lookback
from specjax.types import AbsorbIn, Ctx, Proposal, Shared, TapSpec

Match = Literal["recent", "earliest"]

#: Largest draft by default, and what verifying w drafts costs, in plain steps (batch 1; a 135M Llama in
#: float32 on one CPU core, an 8B one in bfloat16 on a data-centre GPU). Costs decide how much is drafted.
DEFAULT_K = {"cpu": 7, "gpu": 7}
COSTS: dict[str, lookback.Costs] = {
    "cpu": ((3, 1.75), (7, 2.0), (15, 2.6)),
    "gpu": ((3, 1.05), (7, 1.08), (15, 1.11)),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Frozen settings: at most ``k`` drafts per round, n-gram lengths, which of several occurrences wins.

    With ``costs`` ((width, cost in plain steps), ...) a row drafts only as much as its recent past says
    is worth verifying (see :mod:`specjax.drafters.lookback`); without, everything up to ``k``.
    """

    k: int
    lookup_max: int
    lookup_min: int
    match: Match = "recent"
    costs: lookback.Costs | None = None

    def __post_init__(self):
        for name in ("k", "lookup_max", "lookup_min"):
            _at_least_one(name, getattr(self, name))
        if self.lookup_min > self.lookup_max:
            raise ValueError(f"lookup_min ({self.lookup_min}) is above lookup_max ({self.lookup_max})")
        if self.match not in get_args(Match):
            raise ValueError(f"match must be one of {get_args(Match)}, got {self.match!r}")


def default(platform: str) -> Config:
    """Settings used when none are given: lengths 3 to 1, most recent occurrence, as many drafts as pay.

    ``platform`` is a jax backend name; one without its own entry is served as a GPU.
    """
    name = platform if platform in DEFAULT_K else "gpu"
    return Config(DEFAULT_K[name], lookup_max=3, lookup_min=1, match="recent", costs=COSTS[name])


def config(hf: Mapping[str, Any], target_cfg: Any = None) -> Config:
    """Config from the keys of vLLM's speculative config, with vLLM's meaning.

    ``num_speculative_tokens`` is required. ``prompt_lookup_max`` and ``prompt_lookup_min`` are 5 and 5
    when both are absent; one alone sets the other. ``match`` ("earliest" as in vLLM, or "recent") is our
    own. ``method`` may be present. Any other key raises ValueError with its name.
    """
    del target_cfg  # any target will do
    given = {key: value for key, value in hf.items() if value is not None}
    unknown = sorted(set(hf) - _KEYS)
    if unknown:
        raise ValueError(f"the n-gram drafter does not know the option(s) {unknown}; known: {sorted(_KEYS)}")
    if given.get("method", "ngram") != "ngram":
        raise ValueError(f"the n-gram drafter was given a config of method {given['method']!r}")
    if "num_speculative_tokens" not in given:
        raise ValueError("the n-gram drafter needs num_speculative_tokens, the drafts per round")
    for key in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
        _at_least_one(key, given.get(key, 1))
    high = given.get("prompt_lookup_max", given.get("prompt_lookup_min", 5))
    low = given.get("prompt_lookup_min", high)
    if low > high:
        raise ValueError(f"prompt_lookup_min ({low}) is above prompt_lookup_max ({high})")
    return Config(given["num_speculative_tokens"], high, low, given.get("match", "earliest"))


_KEYS = {"method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "match"}


def _at_least_one(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def tiny(target_cfg: Any) -> Config:
    """Short n-grams, drafted whenever they match."""
    del target_cfg
    return Config(4, lookup_max=3, lookup_min=1)


def varies(cfg: Config) -> bool:
    """Between none and k tokens."""
    del cfg
    return True


def NEEDS(cfg: Config) -> TapSpec:
    """Nothing: the drafter reads tokens only."""
    del cfg
    return TapSpec()


def abstract(cfg: Config) -> None:
    """No weights."""
    del cfg


def init_state(cfg: Config, rows: int, slots: int, q_max: int, dtype: Any) -> tuple[()]:
    """No state."""
    del cfg, rows, slots, q_max, dtype
    return ()


def draft(
    p: None, shared: Shared | None, cfg: Config, k: int, dstate: tuple[()], ctx: Ctx, keys: Array | None
) -> tuple[Proposal, tuple[()]]:
    """Up to ``k`` tokens per row, copied from after the matched occurrence.

    Tokens at or beyond ``count`` are 0. A proposal is a point mass: no q.
    """
    del p, shared, keys
    follow, run = longest_match(cfg, ctx.tokens, ctx.length)
    wanted = jnp.where(run >= cfg.lookup_min, k, 0)
    if cfg.costs is not None:
        rates = lookback.hit_rates(ctx.tokens, ctx.length, cfg.lookup_max, cfg.match == "recent")
        wanted = jnp.minimum(wanted, lookback.worthwhile(cfg.costs, k, rates, run))
    slot = jnp.arange(k, dtype=jnp.int32)
    count = jnp.clip(jnp.minimum(wanted, ctx.length - follow), 0).astype(jnp.int32)
    index = jnp.minimum(follow[:, None] + slot, ctx.tokens.shape[1] - 1)
    tokens = jnp.take_along_axis(ctx.tokens, index, 1)
    return Proposal(jnp.where(slot < count[:, None], tokens, 0), count), dstate


def longest_match(cfg: Config, tokens: Int[Array, "B T"], length: Int[Array, " B"]):
    """Best earlier occurrence of the row's end: ``(start of its continuation [B], tokens matched [B])``.

    For every index i, ``run[i]`` is how many tokens ending at i equal those ending at the row's last
    token, at most ``lookup_max``: that many shifted comparisons of the buffer, and no loop over matches.
    The longest run is the longest n-gram; ``match`` breaks ties. Tokens beyond ``length`` are ignored.
    """
    size = tokens.shape[1]
    at = jnp.arange(size, dtype=jnp.int32)
    same = jnp.broadcast_to(at < length[:, None] - 1, tokens.shape)
    run = jnp.zeros(tokens.shape, jnp.int32)
    for j in range(min(cfg.lookup_max, size - 1)):
        last = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - j, 0)[:, None], 1)
        shifted = jnp.pad(tokens, ((0, 0), (j, 0)))[:, :size]
        same &= (shifted == last) & (at >= j)
        run += same
    # One integer orders candidates by run first and by place second (an argmax is slower on CPU).
    place = at if cfg.match == "recent" else size - 1 - at
    best = jnp.max(run * size + place, axis=1)
    where = best % size
    where = where if cfg.match == "recent" else size - 1 - where
    return where + 1, best // size


def absorb(p: None, shared: Shared | None, cfg: Config, dstate: tuple[()], block: AbsorbIn) -> tuple[()]:
    """The state as it is: the row's tokens are read where the target keeps them."""
    del p, shared, cfg, block
    return dstate


def min_resume(cfg: Config, high_water: int) -> int:
    """Any length will do."""
    del cfg, high_water
    return 1
