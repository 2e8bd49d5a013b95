"""Rounds of real shapes: weights and states made on the device, the programs that decode, acceptance that is given.

Acceptance is forced here and nowhere else, by replacing the round's acceptance test with one that runs it, throws its
outcome away, and keeps as many drafts as a seeded draw from a profile says.
"""

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from steps_shapes import Method, drafter

from specjax import registry
from specjax.calls import plan
from specjax.checkpoints.tree import is_spec
from specjax.config import Meta
from specjax.core import round as rnd
from specjax.core.cache import RingKV
from specjax.core.liveness import peak_bytes
from specjax.core.loop import Driving, Queue, host_state, run_rounds
from specjax.core.programs import Engine, chunk_program, fill_caches
from specjax.types import LENGTH, NONFINITE, RUNNING, Params, State, tree_bytes

#: Chance that the first 1, 2, ... drafts are all accepted; beyond, three quarters of the one before.
PROFILE = (0.90, 0.80, 0.67, 0.55, 0.44, 0.33, 0.23)
PERIOD = 16  # of the text of a row: n-grams always find what they look for
ROOM = 1024  # tokens that a row can grow by


def survival(k: int) -> list[float]:
    """The profile for ``k`` drafts."""
    return [*PROFILE, *(PROFILE[-1] * 0.75**i for i in range(1, k + 1))][:k]


def forced_tau(k: int) -> float:
    """Tokens per round that the profile gives."""
    return 1 + sum(survival(k))


def force() -> None:
    """From now on rounds that are compiled in this process keep as many drafts as the profile says."""
    if not hasattr(rnd.accept, "real"):
        rnd.accept = functools.wraps(rnd.accept)(functools.partial(_forced, rnd.accept))
        rnd.accept.real = True


def _forced(real, hidden, unembed, proposal, count, active, state, *rest, **more):
    found = real(hidden, unembed, proposal, count, active, state, *rest, **more)
    rows, q = found.out_tokens.shape
    # always 0, which the compiler does not know: what the test computes must not be left out
    zero = (
        jnp.minimum(found.accepted, 0)
        + jnp.minimum(found.emitted, 0)
        + jnp.minimum(found.out_tokens.min(1), 0)
    )
    row, at = jnp.arange(rows, dtype=jnp.uint32), state.length.astype(jnp.uint32)
    odd = [jnp.uint32(n) for n in (2654435761, 2246822519, 3266489917)]
    noise = (at + 1) * odd[0] + row * odd[1]
    for shift, factor in (
        (16, odd[1]),
        (13, odd[2]),
        (16, jnp.uint32(1)),
    ):  # neighbours must have nothing in common
        noise = (noise ^ (noise >> shift)) * factor
    uniform = (noise >> 8).astype(jnp.float32) / 2**24
    kept = jnp.sum(uniform[:, None] < jnp.asarray(survival(q - 1), jnp.float32), 1, dtype=jnp.int32)
    accepted = jnp.minimum(kept, count) + zero
    emitted = jnp.where(active, jnp.minimum(accepted + 1, state.limit - state.length), 0)
    text = (state.length[:, None] + jnp.arange(q)) % PERIOD + PERIOD
    full = active & (state.length + emitted >= state.limit)
    broken = found.reason == NONFINITE
    return dataclasses.replace(
        found,
        accepted=jnp.minimum(accepted, emitted).astype(jnp.int32),
        emitted=jnp.where(broken, 0, emitted).astype(jnp.int32),
        out_tokens=jnp.take_along_axis(state.tokens, text, 1),
        reason=jnp.where(broken, NONFINITE, jnp.where(full, LENGTH, RUNNING)).astype(jnp.int32),
    )


def weights(abstract: Any, dtype: Any, seed: int = 0) -> Any:
    """Random weights, drawn on the device: one program per shape."""
    leaves, tree = jax.tree.flatten(abstract, is_leaf=is_spec)
    key = jax.random.key(seed, impl="rbg")
    made = [_leaf(spec, jax.random.fold_in(key, i), dtype) for i, spec in enumerate(leaves)]
    return jax.tree.unflatten(tree, made)


def _leaf(spec, key, dtype):
    kind = jnp.dtype(spec.dtype or dtype)
    if spec.init != "normal":
        return jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, kind)
    fan_in = spec.shape[-1] * (spec.shape[-2] if spec.axes[-2:] == ("heads", None) else 1)
    return _normal(key, spec.shape, kind, fan_in**-0.5)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key, shape, dtype, scale):
    draw = jnp.bfloat16 if dtype.itemsize == 2 else jnp.float32  # half the memory while it is made
    return (jax.random.normal(key, shape, draw) * scale).astype(dtype)


class Target:
    """A shape's config and weights."""

    def __init__(self, name: str, hf: dict[str, Any], dtype: Any, shapes_only: bool = False):
        self.name, self.family = name, hf["model_type"]
        module = registry.target(self.family)
        self.cfg, self.dtype = module.config(hf), dtype
        self._make = (lambda *args: jax.eval_shape(lambda: weights(*args))) if shapes_only else weights
        self.weights = self._make(module.abstract(self.cfg), dtype)

    def params(self, how: Method) -> Params:
        """With a method's drafter. ValueError where the target has none of the kind."""
        name, cfg = drafter(how, self.cfg)
        meta = Meta(family=self.family, target_cfg=self.cfg, drafter=name, drafter_cfg=cfg, name=self.name)
        specs = None if name is None else registry.drafter(name).abstract(cfg)
        own = None if specs is None else self._make(specs, self.dtype, 1)
        return Params(self.weights, own, meta)


class Contender:
    """One method on one shape, batch and context: its compiled rounds, and states to run them on."""

    def __init__(
        self, target: Target, how: Method, batch: int, context: int, room: int = ROOM, ragged: bool = False
    ):
        self.how, self.batch, self.context, self.room = how, batch, context, room
        least = context // 8 if ragged else context
        self.contexts = np.linspace(least, context, batch).astype(int) if batch > 1 else np.array([context])
        params = target.params(how)
        tokens = 5 + np.arange(PERIOD)[None] * 97 + 13 * np.arange(batch)[:, None]
        text = tokens[:, np.arange(context) % PERIOD] % target.cfg.vocab_size
        text[:, 0] = how.k + 1  # different tokens in a verified block, for "c"
        options = {} if how.name == "plain" else {"k": how.k}
        prompts = [row[:n].tolist() for row, n in zip(text, self.contexts, strict=True)]
        self.call = plan(
            params, prompts, max_new_tokens=room, rows=batch, ignore_eos=True, verbose=False, **options
        )
        self.program = dataclasses.replace(self.call.program, rows=batch)
        self.engine = Engine(self.program, (params.target, params.drafter))
        self.host = host_state(self.program, list(self.call.jobs))
        self.shapes = jax.eval_shape(functools.partial(fill_caches, self.program), self.host)
        self._fill = jax.jit(functools.partial(_filled, self.program))

    def bytes(self) -> tuple[int, int, int]:
        """Of weights, of the state, and (estimated from a trace) of what a round needs beside them."""
        run, rounds = chunk_program(self.program)
        beside = peak_bytes(run, self.engine.weights, self.shapes, rounds, donated=1)
        return tree_bytes(self.engine.weights), tree_bytes(self.shapes), beside

    def compile(self) -> "Contender":
        """Compile ahead; in threads where there are several."""
        self.engine.compile_chunk(self.shapes)
        self._fill = self._fill.lower(self.host).compile()
        return self

    def state(self, distinct: int | None = None) -> State:
        """A fresh state at the context, caches full of noise."""
        host = self.host
        if distinct is not None:
            tokens = host.tokens.copy()
            tokens[:, 0] = distinct
            host = dataclasses.replace(host, tokens=tokens)
        return self._fill(host)

    def time(self, calls: int, distinct: int | None = None) -> tuple[float, float]:
        """Milliseconds per round of whole device calls, as decoding makes them, and without what a call costs."""
        state, _ = self.engine.chunk(self.state(distinct), 2)
        long, state = self._chunks(state, self.program.rounds, calls)
        short, state = self._chunks(state, 4, calls)
        n = self.program.rounds
        slope = (n * long - 4 * short) / (n - 4) if n > 4 else long
        return 1e3 * long, 1e3 * slope

    def _chunks(self, state: State, rounds: int, calls: int) -> tuple[float, State]:
        jax.block_until_ready(state)
        ran, began = 0, time.perf_counter()
        for _ in range(calls):
            state, emit = self.engine.chunk(state, rounds)
            jax.block_until_ready(emit)
            ran += rounds
        seconds = time.perf_counter() - began
        if not (np.asarray(emit.emitted) > 0).all(1)[:rounds].all():
            raise RuntimeError(f"{self.how}: rows ended before their time; logits that are not finite?")
        return seconds / ran, state

    def driven(self) -> float:
        """Milliseconds per round of decoding: device calls, one read-back each, and what the host does between."""
        for job in self.call.jobs:
            job.tokens, job.rounds, job.drafted, job.reason = [], [], [], None
        state = jax.block_until_ready(self.state())
        rows: list[Any] = list(self.call.jobs)
        began = time.perf_counter()
        for _ in run_rounds(self.engine, self.engine, state, rows, Queue(), Driving()):
            pass
        seconds = time.perf_counter() - began
        job = self.call.jobs[0]
        self.tau = sum(emitted for _, _, emitted, _ in job.rounds) / len(job.rounds)
        return 1e3 * seconds / max(len(job.rounds) for job in self.call.jobs)


class DraftPass:
    """A contender's drafting alone, in a device loop."""

    def __init__(self, contender: Contender, turns: int = 16):
        self.contender, self.turns = contender, turns
        pair, k = contender.program.pair, contender.how.k

        def loop(weights, state):
            def turn(i, state):
                proposal, after = rnd.draft(pair, weights, state, k)
                tokens = after.tokens.at[:, -1].set(proposal.tokens.sum(1) % 7)
                return dataclasses.replace(after, tokens=tokens)

            weights = rnd.ready(pair, weights)
            return jax.lax.fori_loop(0, turns, turn, state)

        shapes = (contender.engine.weights, contender.shapes)
        self.run = jax.jit(loop, donate_argnums=1).lower(*shapes)

    def compile(self) -> "DraftPass":
        self.run = self.run.compile()
        return self

    def time(self) -> float:
        """Milliseconds per pass."""
        state = jax.block_until_ready(self.run(self.contender.engine.weights, self.contender.state()))
        began = time.perf_counter()
        jax.block_until_ready(self.run(self.contender.engine.weights, state))
        return 1e3 * (time.perf_counter() - began) / self.turns


def _filled(program, host: State) -> State:
    """Caches of noise, rings that hold the last positions."""
    state, last = fill_caches(program, host), host.length - 2

    def noise(i, x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        parts = [(j + 7) * jax.lax.broadcasted_iota(jnp.int32, x.shape, j) for j in range(x.ndim)]
        return (((sum(parts) + i) % 251 - 125) / 125).astype(x.dtype)

    def ring(x):
        if not isinstance(x, RingKV):
            return x
        slots = jnp.arange(x.pos.shape[1])
        pos = last[:, None] - (last[:, None] - slots) % x.pos.shape[1]
        return dataclasses.replace(x, pos=jnp.where(pos >= 0, pos, -1).astype(x.pos.dtype))

    leaves, tree = jax.tree.flatten((state.target, state.drafter))
    caches = jax.tree.unflatten(tree, [noise(i, x) for i, x in enumerate(leaves)])
    target, dstate = jax.tree.map(ring, caches, is_leaf=lambda x: isinstance(x, RingKV))
    return dataclasses.replace(state, target=target, drafter=dstate)


def bandwidth(size: int = 1 << 29, repeats: int = 10) -> float:
    """Bytes per second of copying 32-bit words on the device, read and written."""
    x = jnp.ones(size, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(x))
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(4):
            y = copy(x)
        jax.block_until_ready(y)
        took.append((time.perf_counter() - began) / 4)
    return 8 * size / statistics.median(took)


class ExpertCount:
    """Distinct experts that a contender's verified block hits, per layer on average. Traced when made, which must not
    happen while others are traced: the layer that is looked into is exchanged meanwhile."""

    def __init__(self, contender: Contender):
        from specjax.targets import ffn, gemma4

        self.contender, self.seen = contender, []
        self.real = ffn.experts
        ffn.experts = gemma4.experts = self._noting
        try:
            self.run = jax.jit(self._count).lower(contender.engine.weights, contender.shapes)
        finally:
            ffn.experts = gemma4.experts = self.real

    def compile(self) -> "ExpertCount":
        self.run = self.run.compile()
        return self

    def __call__(self, distinct: int) -> float:
        """With so many different tokens in the block."""
        state = self.contender.state(distinct)
        return float(np.mean(np.asarray(self.run(self.contender.engine.weights, state)[0])))

    def _noting(self, x, share, ids, gate, *rest):
        self.seen.append(jnp.sum(jnp.bincount(ids.reshape(-1), length=gate.shape[0]) > 0))
        return self.real(x, share, ids, gate, *rest)

    def _count(self, weights, state):
        pair = self.contender.program.pair
        module = registry.target(pair.family)
        proposal, _ = rnd.draft(pair, weights, state, self.contender.how.k)
        anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, 1)
        block = jnp.concatenate([anchor, proposal.tokens], 1)
        pos = state.length[:, None] - 1 + jnp.arange(block.shape[1])
        valid = jnp.full(state.length.shape, block.shape[1], jnp.int32)
        out = module.forward(
            weights[0], pair.target_cfg, block, pos, valid, state.target, rnd.needs(pair), "verify"
        )
        return jnp.stack(self.seen), jnp.sum(out.hidden[:, 0, 0])
