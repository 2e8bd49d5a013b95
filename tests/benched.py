"""A row of a measurement whose every figure is worked out by hand in docs/benchmarks.md."""

from specjax import metrics
from specjax.bench import rows
from specjax.bench.rows import Costs, Row, Spread, Timed
from specjax.metrics import RoundRecord, Stats

#: Two prompts in a batch, 4 drafts per round (proposed, accepted, emitted), the trace of docs/benchmarks.md.
FIRST = [RoundRecord(4, 4, 5), RoundRecord(4, 1, 2), RoundRecord(4, 2, 2)]  # the last one ends at EOS
SECOND = [RoundRecord(4, 0, 1), RoundRecord(4, 3, 4)]


def traced() -> list[Stats]:
    one = Stats.from_rounds(FIRST, new_tokens=10, prefill_seconds=0.25, decode_seconds=0.75)
    return [one, Stats.from_rounds(SECOND, new_tokens=6, prefill_seconds=0.25, decode_seconds=0.5)]


def row(**changes) -> Row:
    """The trace as a row: speculative 16 tokens in 1 s, plain 16 tokens in 2 s."""
    stats = traced()
    drafted = [Timed.of(stats)]
    plain = [Timed(16, 14, (9, 5), 0.25, 1.75)]
    values = {
        "method": "mine", "drafter": "folder", "dataset": "set", "checksum": "0", "prompts": 2, "k": 4, "batch": 2,
        "temperature": 0.0, "rule": "match", "max_new_tokens": 16, "ignore_eos": False, "chat_template": "model",
        "dtype": "float32", "max_len": 64, "repeats": 1, "stats": metrics.merge(stats),
        "finished": 1.0, "speed": Spread.of([rows.speed(drafted)]), "plain_speed": Spread.of([rows.speed(plain)]),
        "ratio": Spread.of([rows.speed(drafted) / rows.speed(plain)]),
        "decode_ratio": Spread.of([rows.decode_speed(drafted) / rows.decode_speed(plain)]),
        "by_prompt": (2.0, 2.0, 2.0), "first_token_ms": 250.0, "plain_first_token_ms": 250.0,
        "call_ms": rows.call_ms(drafted), "plain_call_ms": rows.call_ms(plain), "busy": rows.busy(drafted),
        "plain_busy": rows.busy(plain), "drift": Spread(1.0, 1.0, 1.0),
        "costs": Costs(plain_ms=200.0, round_ms=250.0, widths=((4, 1.0),), verify_ms=210.0, draft_ms=30.0),
        "checked": "greedy", "identical": 2, "near_ties": 0, "largest_gap": 0.0, "unexplained": 0, "target_bytes": 1,
        "drafter_bytes": 1, "state_bytes": 1, "peak_bytes": None, "compile_seconds": 1.0,
        "plain_compile_seconds": 1.0, "seconds": 5.0, "facts": {"device": "toy", "devices": 1, "versions": {}},
    }  # fmt: skip
    return Row(**(values | changes))
