"""Audit: does drafting change the output? Plain and speculative decoding of the same prompts, compared."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import registry, views
from specjax.calls import plan
from specjax.generate import decode
from specjax.metrics import Stats
from specjax.results import Completion, Result
from specjax.types import Params, TapSpec

#: float32 near-tie: where two runs differ, their two candidates' logits lie at most this far apart.
NEAR_TIE = 2e-4


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt (with ``n`` samples: one of them). ``position`` counts generated tokens; ``gap`` is the
    float32 difference of the two candidates' logits where the outputs part, before penalties and noise
    (None when identical)."""

    prompt: int
    identical: bool
    position: int | None = None
    plain_token: int | None = None
    speculative_token: int | None = None
    gap: float | None = None

    @property
    def first_divergence(self) -> int | None:
        return self.position

    @property
    def logit_gap(self) -> float | None:
        return self.gap

    def __str__(self) -> str:
        if self.identical:
            return f"prompt {self.prompt}: identical"
        if self.gap is None:
            return f"prompt {self.prompt}: one output ends at token {self.position}, the other goes on"
        return (
            f"prompt {self.prompt}: differs at token {self.position}: plain {self.plain_token}, speculative "
            f"{self.speculative_token}, float32 logit gap {self.gap:.3g}"
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """Outcome of :func:`audit`."""

    rows: list[Row]
    dtype: str
    plain: Stats
    speculative: Stats

    @property
    def identical(self) -> bool:
        """Every prompt gave the same ids."""
        return all(row.identical for row in self.rows)

    @property
    def changed(self) -> int:
        """Prompts whose output changed."""
        return sum(not row.identical for row in self.rows)

    @property
    def near_ties(self) -> int:
        """Changed prompts whose first difference is a near-tie (gap <= 2e-4)."""
        return sum(row.gap is not None and row.gap <= NEAR_TIE for row in self.rows)

    def __str__(self) -> str:
        head = (
            f"{len(self.rows)} prompt(s), {self.dtype}: {len(self.rows) - self.changed} identical, "
            f"{self.changed} changed ({self.near_ties} near-ties with a gap <= {NEAR_TIE:g})"
        )
        spec = self.speculative
        lines = [head, f"speculative: tau {spec.tau:.2f}, {spec.accepted} of {spec.proposed} drafts accepted"]
        lines += [str(row) for row in self.rows if not row.identical]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return views.report_html(self)

    def __rich__(self) -> Any:
        return views.report_table(self)


def audit(params: Params, prompts: Any, **options: Any) -> Report:
    """See :func:`specjax.audit`."""
    if params.meta.drafter is None:
        raise ValueError("nothing to audit: params have no drafter")
    if options.get("rule", "auto") in ("auto", None):
        options = options | {"rule": "match"}
    call = plan(params, prompts, **options)
    if call.program.rule != "match" and "temperature" in call.program.flags:
        raise ValueError(
            f"rule={call.program.rule!r} keeps the distribution, not the ids: audit greedily or with rule='match'"
        )
    alone = {name: value for name, value in options.items() if name not in ("k", "rule")}
    plain, spec = _decode(without_drafter(params), prompts, alone), _decode(params, prompts, options)
    groups = enumerate(zip(plain.completions, spec.completions, strict=True))
    rows = [compare(params, i, a, b) for i, pair in groups for a, b in zip(*pair, strict=True)]
    dtype = str(jax.tree.leaves(params.target)[0].dtype)
    return Report(rows, dtype, plain.total, spec.total)


def _decode(params: Params, prompts: Any, options: dict[str, Any]) -> Result:
    out = decode(params, prompts, **options)
    if any(c.finish_reason == "interrupted" for group in out.completions for c in group):
        raise KeyboardInterrupt  # half an audit would call cut outputs different
    return out


def without_drafter(params: Params) -> Params:
    """The same target, plain."""
    meta = dataclasses.replace(params.meta, drafter=None, drafter_cfg=None, drafter_notes=(), rule="auto")
    return dataclasses.replace(params, drafter=None, meta=meta)


def compare(params: Params, index: int, plain: Completion, spec: Completion) -> Row:
    """Two answers to prompt ``index``, the first one plain: where they part, and the logit gap there."""
    if plain.tokens == spec.tokens:
        return Row(index, True)
    n = min(len(plain.tokens), len(spec.tokens))
    at = next((i for i in range(n) if plain.tokens[i] != spec.tokens[i]), n)
    if at == n:  # one is a prefix of the other: only a different stop can do that
        return Row(index, False, at)
    logits = prefix_logits(params, plain.prompt_tokens + plain.tokens[:at])
    a, b = plain.tokens[at], spec.tokens[at]
    return Row(index, False, at, a, b, float(abs(logits[a] - logits[b])))


def prefix_logits(params: Params, tokens: list[int]) -> np.ndarray:
    """float32 logits ``[V]`` after ``tokens``, computed in float32 whatever the weights' dtype."""
    width = 64
    while width < len(tokens):
        width *= 2
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(tokens)] = tokens
    run = _prefix_program(params.meta.family, params.meta.target_cfg, width)
    return np.asarray(run(params.target, padded, np.array([len(tokens)], np.int32)))


@functools.lru_cache(maxsize=16)
def _prefix_program(family: str, cfg: Any, width: int):
    module = registry.target(family)

    def run(weights, tokens, length):
        wide = jax.tree.map(
            lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, weights
        )
        cache = module.init_cache(cfg, 1, width, 1, jnp.float32)
        pos = jnp.arange(width)[None]
        out = module.forward(wide, cfg, tokens, pos, length, cache, TapSpec(), "extend")
        last = jnp.take_along_axis(out.hidden, length[:, None, None] - 1, 1)
        return module.unembed(wide, cfg, last)[0, 0]

    return jax.jit(run)
