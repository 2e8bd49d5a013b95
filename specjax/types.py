"""Pytrees that pass between target, drafter and the round.

Dimension letters, the same in every file: ``B`` rows (sequences), ``K`` drafted tokens, ``Q`` = K+1
verified positions, ``T`` token buffer, ``S`` cache slots, ``V`` vocabulary, ``D`` width, ``H`` query
heads, ``G`` key/value heads, ``C`` head size.

Axis 0 of every array in :class:`State`, in caches and in drafter states is ``B``; there are no scalars
per batch, so a row can be replaced by overwriting index ``b`` of every leaf.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

Mode = Literal["extend", "verify"]
Rule = Literal["match", "reject", "block"]

RUNNING, STOP, LENGTH, NONFINITE = 0, 1, 2, 3
REASONS = {RUNNING: "running", STOP: "stop", LENGTH: "length", NONFINITE: "nonfinite"}


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """One weight before it exists: shape, logical axes, initial value and where a checkpoint keeps it.

    ``axes`` names one logical axis per dimension (``None`` = never sharded). ``names`` lists the
    checkpoint tensor that fills the array; several names are stacked along a new leading axis (experts
    stored one by one). A checkpoint tensor is reshaped to ``shape``; it must hold as many elements.
    ``fused`` names one tensor that may hold the whole stack instead, with ``rows`` = the (start, stop)
    slice of its axis 1 that belongs here (gate and up of fused experts).
    ``init`` is ``"normal"`` (scale 1/sqrt(fan in)), ``"zeros"`` or ``"ones"``. ``dtype`` is given for arrays that
    are never cast (integer tables, bool masks, values that need float32 whatever the model's type).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    names: tuple[str, ...] = ()
    init: Literal["normal", "zeros", "ones"] = "normal"
    fused: str | None = None
    rows: tuple[int, int] | None = None
    dtype: str | None = None

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")


@dataclasses.dataclass(frozen=True)
class TapSpec:
    """What a drafter needs from the target's forward pass (static).

    ``taps``: indices j of the residual stream after j layers, un-normed (0 = embedding output, L = before
    the final norm). ``hidden``: the residual stream after the final norm. ``kv``: a view of the target's
    own keys and values.
    """

    taps: tuple[int, ...] = ()
    hidden: bool = False
    kv: bool = False

    def __or__(self, other: "TapSpec") -> "TapSpec":
        taps = tuple(sorted(set(self.taps) | set(other.taps)))
        return TapSpec(taps, self.hidden or other.hidden, self.kv or other.kv)


Taps = dict[int, Float[Array, "B Q D"]]


@struct.dataclass
class TargetOut:
    """Result of one target forward pass."""

    hidden: Float[Array, "B Q D"]  # after the final norm
    taps: Taps  # keyed by residual index
    cache: Any


@struct.dataclass
class KVView:
    """Keys and values of one target layer, for drafters that attend to them. Of a full layer in decoding slot s holds
    position s."""

    k: Float[Array, "B G S C"]
    v: Float[Array, "B G S C"]
    pos: Int[Array, "B S"]  # -1 = empty slot


@struct.dataclass
class Shared:
    """What the target lends to drafters. With tied weights both fields are the same traced value."""

    embed: Float[Array, "V D"]
    head: Float[Array, "V D"]
    embed_scale: float = struct.field(pytree_node=False, default=1.0)
    softcap: float | None = struct.field(pytree_node=False, default=None)
    logit_scale: float = struct.field(pytree_node=False, default=1.0)


@struct.dataclass
class Sampling:
    """Per-row sampling values. ``None`` means the option is off for every row and costs nothing.

    The *presence* of a field is static (it selects the compiled program), its values are not.
    """

    temperature: Float[Array, " B"] | None = None  # None: every row is greedy
    top_k: Int[Array, " B"] | None = None  # 0 = off
    top_p: Float[Array, " B"] | None = None  # 1 = off
    min_p: Float[Array, " B"] | None = None  # 0 = off
    repetition: Float[Array, " B"] | None = None  # 1 = off; over prompt and output
    presence: Float[Array, " B"] | None = None  # 0 = off; over output
    frequency: Float[Array, " B"] | None = None  # 0 = off; over output
    bias: Float[Array, "B V"] | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature is None

    @property
    def filtered(self) -> bool:
        return not (self.top_k is None and self.top_p is None and self.min_p is None)

    @property
    def penalised(self) -> bool:
        return not (self.repetition is None and self.presence is None and self.frequency is None)


@struct.dataclass
class Counts:
    """Token history that penalties read."""

    prompt: Bool[Array, "B V"]  # token occurs in the prompt
    output: Int[Array, "B V"]  # times emitted so far


@struct.dataclass
class State:
    """Everything a round changes. Built by :func:`specjax.start`; never read it after donating it.

    ``tokens[b, :length[b]]`` is committed. The last committed token (the *anchor*) is not in the target
    cache yet. Slots of ``tokens`` and caches at or beyond these marks are garbage.
    """

    tokens: Int[Array, "B T"]
    length: Int[Array, " B"]
    prompt_len: Int[Array, " B"]
    limit: Int[Array, " B"]  # prompt_len + token budget
    done: Bool[Array, " B"]
    reason: Int[Array, " B"]  # key of REASONS
    request_id: Int[Array, " B"]
    stop_ids: Int[Array, "B n_stop"]  # padded with -1, which no token equals
    key_data: Array | None  # [B, 2] uint32 raw keys; None when every row is greedy
    sampling: Sampling
    counts: Counts | None
    target: Any  # the family's cache
    drafter: Any  # the drafter's own state; () when it has none


@struct.dataclass
class Ctx:
    """What a drafter may read while proposing. Built inside the program, never stored."""

    tokens: Int[Array, "B T"]
    length: Int[Array, " B"]
    anchor: Int[Array, " B"]
    live: Bool[Array, " B"]
    temperature: Float[Array, " B"] | None
    kv_view: Callable[[str], KVView] = struct.field(pytree_node=False)


@struct.dataclass
class Proposal:
    """Drafted tokens. Only ``count`` says which are valid; there are no sentinel ids."""

    tokens: Int[Array, "B K"]
    count: Int[Array, " B"]
    q: Float[Array, "B K Vq"] | None = None  # probabilities the tokens were drawn from
    q_ids: Int[Array, " Vq"] | None = None  # draft id -> target id; None: same vocabulary
    point: Bool[Array, " B"] | None = None  # row is deterministic; None: every row is
    source: Int[Array, " B"] | None = None  # which drafter of a chain spoke; None: the first
    confidence: Float[Array, "B K"] | None = None


@struct.dataclass
class Verdict:
    """What verification decided. ``out_tokens[b, :emitted[b]]`` is committed, nothing else."""

    accepted: Int[Array, " B"]
    out_tokens: Int[Array, "B Q"]
    emitted: Int[Array, " B"]
    reason: Int[Array, " B"]
    logprobs: Float[Array, "B Q"] | None = None


@struct.dataclass
class AbsorbIn:
    """Target features of a block, handed to the drafter. Rows at or beyond ``keep`` leave no trace."""

    tokens: Int[Array, "B Q"]
    next_tokens: Int[Array, "B Q"]  # token at the following position
    pos: Int[Array, "B Q"]
    keep: Int[Array, " B"]
    hidden: Float[Array, "B Q D"] | None
    taps: Taps
    mode: Mode = struct.field(pytree_node=False, default="verify")  # "extend": blocks of any width
    #: Token at the position before the block, where rounds without drafts are taken in at once: a drafter that
    #: runs ahead on its own drafts may never have fed the last one.
    before: Int[Array, " B"] | None = None


@struct.dataclass
class Emit:
    """Record of up to R rounds, read by the host once per chunk."""

    tokens: Int[Array, "R B Q"]
    emitted: Int[Array, "R B"]
    accepted: Int[Array, "R B"]
    proposed: Int[Array, "R B"]
    source: Int[Array, "R B"]
    reason: Int[Array, "R B"]
    request_id: Int[Array, "R B"]
    width: Int[Array, " R"]  # positions per row the target verified in that round
    logprobs: Float[Array, "R B Q"] | None = None


@dataclasses.dataclass(frozen=True)
class Pair:
    """Static description of a target and its drafter: names in the registry and their configs."""

    family: str
    target_cfg: Any
    drafter: str | None = None
    drafter_cfg: Any = None


@struct.dataclass
class Params:
    """Target and drafter weights plus static ``meta``: one pytree for jit, device_put and orbax."""

    target: Any
    drafter: Any = None
    meta: Any = struct.field(pytree_node=False, default=None)

    def __repr__(self) -> str:
        """What it is, without the arrays."""
        name, drafter = (getattr(self.meta, key, None) for key in ("name", "drafter"))
        sizes = [sum(getattr(x, "size", 0) for x in jax.tree.leaves(p)) for p in (self.target, self.drafter)]
        return f"Params({name!r}, drafter={drafter!r}; {sizes[0]:,} and {sizes[1]:,} weights)"


def tree_bytes(tree: Any) -> int:
    """Bytes held by the arrays (or ShapeDtypeStructs) of a pytree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if hasattr(x, "dtype"))
