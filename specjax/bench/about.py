"""What a row says beside speed and acceptance: identity with plain decoding, memory, the rule applied, notes."""

from collections.abc import Sequence
from typing import Any

import jax

from specjax import identity
from specjax.bench.facts import peak_bytes
from specjax.bench.rows import Row
from specjax.bench.setting import Batches, Setting
from specjax.calls import Call
from specjax.core import round as rnd
from specjax.core.loop import host_state, padded
from specjax.core.programs import fill_caches
from specjax.results import Completion
from specjax.types import Params, tree_bytes

#: Plain decoding of a batch varies by more than this factor: the machine did something else as well.
UNEVEN = 1.3
#: Differing prompts whose logit gap is looked at.
LOOKED_AT = 64


def rule_of(call: Call) -> str:
    """The acceptance rule of a call's rounds."""
    if call.program.rule is not None:
        return call.program.rule
    program, weights = call.program, (call.params.target, call.params.drafter)
    host = host_state(program, padded(program, call.jobs))
    ask = lambda w, h: rnd.draft(program.pair, w, fill_caches(program, h), program.k)[0]  # noqa: E731
    return rnd.natural_rule(jax.eval_shape(ask, weights, host))


def identity_of(
    params: Params,
    plain: Sequence[Sequence[Completion]],
    drafted: Sequence[Sequence[Completion]],
    setting: Setting,
    rule: str,
) -> dict[str, Any]:
    """Are the answers plain decoding's? Under the rejection rules samples differ, and only greedy ones are compared."""
    pairs = [pair for a, b in zip(plain, drafted, strict=True) for pair in zip(a, b, strict=True)]
    same = sum(a.tokens == b.tokens for a, b in pairs)
    if setting.temperature > 0 and rule != "match":
        return {"checked": "law", "identical": same, "near_ties": 0, "largest_gap": 0.0, "unexplained": 0}
    differing = [(i, a, b) for i, (a, b) in enumerate(pairs) if a.tokens != b.tokens]
    gaps = [identity.compare(params, i, a, b).gap for i, a, b in differing[:LOOKED_AT]]
    known = [gap for gap in gaps if gap is not None]
    return {
        "checked": "match" if setting.temperature > 0 else "greedy",
        "identical": same,
        "near_ties": sum(gap <= identity.NEAR_TIE for gap in known),
        "largest_gap": max(known, default=0.0),
        "unexplained": len(differing) - len(known),
    }


def memory_of(params: Params, call: Call) -> dict[str, Any]:
    """Bytes of weights, of the state of a call, and of the process."""
    program = call.program
    host = host_state(program, padded(program, call.jobs))
    return {
        "target_bytes": tree_bytes(params.target),
        "drafter_bytes": tree_bytes(params.drafter),
        "state_bytes": tree_bytes(jax.eval_shape(lambda: fill_caches(program, host))),
        "peak_bytes": peak_bytes(),
    }


def notes_of(row: Row, made: Batches) -> list[str]:
    """What somebody who quotes the row has to know."""
    notes = []
    if row.ignore_eos:
        notes.append("end-of-text was ignored: part of the text is none that the model would have written")
    if made.given_ids:
        notes.append("prompts were token ids: if they are random, acceptance says nothing")
    if made.left_out:
        notes.append(f"{made.left_out} prompt(s) behind the last whole batch were left out")
    if not row.stats.proposed:
        notes.append("the drafter proposed nothing")
    if row.checked == "law":
        notes.append(
            f"rule {row.rule!r} keeps the distribution, not the ids: identity is checked at temperature 0"
        )
    if row.unexplained:
        notes.append(f"{row.unexplained} differing prompt(s) without a logit gap that was looked at")
    if row.drift.high > UNEVEN * row.drift.low:
        notes.append(
            f"the machine was uneven: plain decoding of a batch took {row.drift.low:.2f} to {row.drift.high:.2f} times "
            "as long as before"
        )
    if row.costs is not None and row.gap is not None and abs(row.gap) > 0.1:
        notes.append(
            f"tau / R and the measured speed-up differ by {row.gap:+.0%}; a round took {row.call_ms:.2f} ms in decoding"
            f" and {row.costs.round_ms:.2f} alone, a plain one {row.plain_call_ms:.2f} and {row.costs.plain_ms:.2f}"
        )
    return notes
