"""What a decode returns: one :class:`Completion` per sample, gathered in a :class:`Result`."""

import dataclasses
from typing import Any

from specjax import metrics, views
from specjax.metrics import Stats


@dataclasses.dataclass(frozen=True)
class Completion:
    """One generated sequence.

    ``tokens`` ends with the stop id if there was one; ``text`` does not show it. ``drafted[i]`` says
    whether token i came from the drafter. ``finish_reason`` is "stop", "length" or "interrupted" ("nonfinite" in
    the result that a :class:`NonFiniteError` carries).
    ``logprobs`` are the target's raw log-softmax values (None unless asked for).
    """

    text: str | None
    tokens: list[int]
    finish_reason: str
    stats: Stats
    prompt_tokens: list[int]
    drafted: list[bool]
    logprobs: list[float] | None = None
    tokenizer_id: str = dataclasses.field(
        default="", repr=False, compare=False
    )  # splits text into tokens, to tint it

    def _repr_html_(self) -> str:
        return views.completion_html(self)


@dataclasses.dataclass(frozen=True)
class Result:
    """Completions of a call. For one prompt ``text``, ``tokens`` ... are plain values; for a list of
    prompts they are lists in input order, and with ``n > 1`` each entry is a list of n."""

    completions: list[list[Completion]]  # [prompt][sample]
    single: bool

    @property
    def text(self) -> Any:
        return self._each("text")

    @property
    def tokens(self) -> Any:
        return self._each("tokens")

    @property
    def finish_reason(self) -> Any:
        return self._each("finish_reason")

    @property
    def logprobs(self) -> Any:
        return self._each("logprobs")

    @property
    def drafted(self) -> Any:
        return self._each("drafted")

    @property
    def stats(self) -> Any:
        return self._each("stats")

    @property
    def total(self) -> Stats:
        """Counters of the whole call; times are those of the longest sequence."""
        flat = [c.stats for group in self.completions for c in group]
        return metrics.merge(flat, concurrent=True)

    def _each(self, name: str) -> Any:
        rows = [[getattr(c, name) for c in group] for group in self.completions]
        rows = [row[0] if len(row) == 1 else row for row in rows]
        return rows[0] if self.single else rows

    def __str__(self) -> str:
        t = self.total
        head = f"{len(self.completions)} prompt(s), {t.new_tokens} tokens, {t.tokens_per_second:.1f} tokens/s"
        spec = (
            f"tau {t.tau:.2f}, acceptance {t.acceptance_rate:.0%} of {t.proposed} drafts in {t.rounds} rounds"
        )
        texts = [c.text if c.text is not None else str(c.tokens) for g in self.completions for c in g]
        return "\n".join([head + (f" | {spec}" if t.proposed else ""), *texts])

    __repr__ = __str__  # the last line of a console

    def _repr_html_(self) -> str:  # the last line of a notebook's cell
        return views.result_html(self)

    def __rich__(self) -> Any:
        return views.result_table(self)


class NonFiniteError(FloatingPointError):
    """The target's logits were not finite. ``result`` holds what was generated all the same, complete for the
    other prompts; the affected ones end before the bad position with finish_reason "nonfinite"."""

    def __init__(self, message: str, result: Result | None = None):
        super().__init__(message)
        self.result = result


@dataclasses.dataclass(frozen=True)
class Piece:
    """A step of a stream: new text and tokens, which tokens were drafted, running stats, and the finish
    reason (None until the last piece of its prompt)."""

    index: int
    text: str
    tokens: list[int]
    drafted: list[bool]
    stats: Stats
    finish_reason: str | None = None
    logprobs: list[float] | None = None
    tokenizer_id: str = dataclasses.field(default="", repr=False, compare=False)
