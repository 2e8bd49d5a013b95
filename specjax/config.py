"""Frozen settings and their validation. Everything here runs on the host, before anything compiles."""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax import registry
from specjax.core.platform import backend
from specjax.types import Pair, Rule

TOKEN_BUCKET_LIMIT = 1024  # token buffers: powers of two up to here, multiples above
TOKEN_BUCKET_MIN = 64
STOP_BUCKET = 8
PREFILL_MIN = 16
REFILL_SIZES = (1, 8, 64)
#: Float32 attention scores of one layer in a prefill pass; about two temporaries of this size are alive.
SCORE_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meta:
    """Static half of :class:`specjax.Params`: names, configs and text-side facts (no arrays)."""

    family: str
    target_cfg: Any
    drafter: str | None = None
    drafter_cfg: Any = None
    drafter_notes: tuple[str, ...] = ()  # assumptions made where the drafter's files are silent
    rule: str = "auto"  # acceptance rule of calls that name none
    tokenizer_id: str = ""
    chat_template: str | None = None
    eos_ids: tuple[int, ...] = ()
    generation: tuple[tuple[str, Any], ...] = ()  # the file's generation defaults, sorted
    name: str = ""
    defaults: tuple[
        tuple[str, Any], ...
    ] = ()  # options of calls that do not name them (k, rows): specjax.tune

    @property
    def pair(self) -> Pair:
        """Static description that compiled programs depend on."""
        return Pair(self.family, self.target_cfg, self.drafter, self.drafter_cfg)

    def to_json(self) -> dict[str, Any]:
        """Plain dict for ``json``; :meth:`from_json` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Meta":
        """Rebuild from :meth:`to_json`'s dict; lists become tuples, config classes come from the registry."""
        data = dict(data)
        data["target_cfg"] = from_dict(registry.target(data["family"]).Config, data["target_cfg"])
        if data.get("drafter"):
            data["drafter_cfg"] = drafter_config(data["drafter"], data["drafter_cfg"], data["target_cfg"])
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"saved meta has fields this version does not know: {unknown}")
        return cls(**{k: v if k.endswith("_cfg") else _tuples(v) for k, v in data.items()})


def drafter_config(name: str, data: Mapping[str, Any], target_cfg: Any) -> Any:
    """A drafter's frozen config from its JSON dict, through its own ``from_json`` if it has one."""
    module = registry.drafter(name)
    rebuild = getattr(module, "from_json", None)
    return rebuild(data, target_cfg) if rebuild else from_dict(module.Config, data)


def from_dict(cls: type, data: Mapping[str, Any]) -> Any:
    """Frozen dataclass from a JSON dict, nested dataclasses included, lists as tuples."""
    hints = typing.get_type_hints(cls)
    out = {}
    for field in dataclasses.fields(cls):
        if field.name not in data:
            continue
        value, kinds = data[field.name], (hints[field.name], *typing.get_args(hints[field.name]))
        nested = next((k for k in kinds if dataclasses.is_dataclass(k)), None)
        out[field.name] = (
            from_dict(nested, value) if nested and isinstance(value, Mapping) else _tuples(value)
        )
    unknown = sorted(set(data) - {f.name for f in dataclasses.fields(cls)})
    if unknown:
        raise ValueError(f"{cls.__module__}.{cls.__name__} has no field(s) {unknown}")
    return cls(**out)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything that selects compiled code. A value not in here never recompiles.

    ``rows`` B, ``tokens`` T (buffer length), ``k`` drafts per round, ``rounds`` R (size of the record of
    one chunk), ``flags`` which sampling options exist, ``n_stop`` width of the stop id table, ``kernels`` which
    implementation of operations is asked for (:mod:`specjax.kernels.dispatch`), ``auto`` that rounds have any width
    up to ``k`` (:mod:`specjax.core.pace`).
    """

    pair: Pair
    rows: int
    tokens: int
    k: int
    rounds: int
    rule: Rule | None
    logprobs: bool
    flags: tuple[str, ...]
    n_stop: int
    dtype: str
    kernels: str = "auto"
    auto: bool = False

    @property
    def q_max(self) -> int:
        """Widest verified block."""
        return self.k + 1

    @property
    def slots(self) -> int:
        """Cache slots S: a verified block may begin at the last token."""
        return self.tokens + self.q_max

    @property
    def widths(self) -> tuple[int, ...]:
        """Draft widths compiled beside ``k``: narrow rounds must not pay for wide ones."""
        pair = self.pair
        if pair.drafter is None:
            return ()
        if not (self.cuts or registry.drafter(pair.drafter).varies(pair.drafter_cfg)):
            return ()
        return tuple(w for w in (0, 3, 7, 15) if w < self.k)

    @property
    def cuts(self) -> bool:
        """Whether drafts are left out that their drafter doubts, from a chance on that each chunk is given."""
        if not self.auto or self.pair.drafter is None:
            return False
        confident = getattr(registry.drafter(self.pair.drafter), "confident", None)
        return confident is not None and confident(self.pair.drafter_cfg)


def acceptance_rule(meta: Meta, rule: str | None) -> Rule | None:
    """The rule of a call: the one given, else that of the params; None leaves it to the proposal ("auto").

    Raises ValueError for a name that is none.
    """
    chosen, known = meta.rule if rule is None else rule, ("auto", *typing.get_args(Rule))
    if chosen not in known:
        raise ValueError(f"rule must be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}, got {chosen!r}")
    return None if chosen == "auto" else typing.cast(Rule, chosen)


def token_bucket(n: int) -> int:
    """Token buffer length for ``n`` tokens: few distinct sizes, so few compilations."""
    size = TOKEN_BUCKET_MIN
    while size < n and size < TOKEN_BUCKET_LIMIT:
        size *= 2
    return size if size >= n else -(-n // TOKEN_BUCKET_LIMIT) * TOKEN_BUCKET_LIMIT


def row_bucket(jobs: int, most: int) -> int:
    """Rows decoded at once for ``jobs`` sequences, at most ``most``.

    On accelerators the next power of two: an idle row is nearly free there, another program costs a minute.
    """
    if backend() == "cpu":
        return min(jobs, most)
    return min(1 << (jobs - 1).bit_length(), most)


def prefill_bucket(n: int, chunk: int) -> int:
    """Prefill width for a prompt of ``n`` tokens, at most ``chunk``."""
    size = PREFILL_MIN
    while size < n and size < chunk:
        size *= 2
    return min(size, chunk)


def refill_groups(n: int, rows: int) -> list[int]:
    """Sizes of the batches in which ``n`` prompts are prefilled for free rows of a batch of ``rows``.

    There are few sizes, since each is a program of its own; all but the smallest are at least half full.
    """
    sizes, groups = [s for s in REFILL_SIZES if s == 1 or 2 * s <= rows], []
    while n > 0:
        groups.append(max(s for s in sizes if s <= 2 * n or s == 1))
        n -= groups[-1]
    return groups


def bounded_chunk(program: Program, chunk: int) -> int:
    """The largest power of two up to ``chunk`` whose attention scores of one layer stay under
    :data:`SCORE_BYTES` in a prefill pass, but at least 16."""
    per_position = 4 * program.rows * program.pair.target_cfg.heads * program.slots
    while chunk > PREFILL_MIN and chunk * per_position > SCORE_BYTES:
        chunk //= 2
    return chunk


FLOAT32_MAX, FLOAT32_TINY = 3.4028234e38, 1.1754944e-38
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one request, validated. See :func:`specjax.decode` for their meaning."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self):
        _integer("max_new_tokens", self.max_new_tokens, 0)
        _number("temperature", self.temperature, 0.0, math.inf)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _number("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _number("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        _integer("seed", self.seed, 0)

    def flags(self) -> set[str]:
        """Sampling options that are in use (these are static; their values are not)."""
        on = {k for k, off in (FILTERS | PENALTIES).items() if getattr(self, k) != off}
        if self.temperature == 0:  # filters keep the largest logit, so greedy rows do not need them
            on -= set(FILTERS)
        else:
            on.add("temperature")
        if self.logit_bias:
            on.add("logit_bias")
        return on


def _integer(name: str, value: Any, low: int, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if value > high:
        raise ValueError(f"{name} must be at most {high}, got {value}")


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= FLOAT32_MAX:
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if value < low or value > high or (open_low and value < low + FLOAT32_TINY):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must be in {bracket}{low}, {high}], got {value}")


def positive(name: str, value: Any) -> int:
    """A whole number of at least one, or ValueError."""
    _integer(name, value, 1)
    return value


def as_config_dict(value: Any) -> dict[str, Any]:
    """A speculative config given as dict, JSON text or path of a JSON file."""
    if isinstance(value, Mapping):
        return dict(value)
    text = str(value)
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text("utf-8")
        except OSError as error:
            raise ValueError(
                f"speculative_config is neither a JSON object nor a readable file: {error}"
            ) from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"speculative_config is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"speculative_config must be a JSON object, got {type(data).__name__}")
    return data


def per_request(name: str, value: Any, n: int) -> list[Any]:
    """One value per request: a scalar is repeated, a sequence must have ``n`` entries."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != n:
            raise ValueError(
                f"{name} has {len(value)} values for {n} prompt(s); give one value or one per prompt"
            )
        return list(value)
    return [value] * n
