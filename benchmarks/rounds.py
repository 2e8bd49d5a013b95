"""Where the time of a round goes: drafter pass, absorb, verification, and the rest.

Drafters of SmolLM2's size with random weights: what they propose does not matter, what a pass costs does.
Each part runs alone in a device loop (draft, absorb, verify), all three in another (bare), and the whole round in a
third; the rest is round - bare: committing, keys, records. ``cold`` is what the three parts cost more in one turn
than alone, where their weights stay in the processor's caches. Timed in turn (A B C A B C ...). A part's time is the
smallest of its turns: whatever else the machine does only adds to it, and the rest is a small difference of two large
times. Medians are told beside.

    python benchmarks/rounds.py --out benchmarks/results/<date>-<device>/rounds.json
"""

import argparse
import dataclasses
import functools
import os
import statistics
import time
from pathlib import Path
from typing import Any

if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})  # before any thread pool exists

import common
import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import registry
from specjax.calls import plan
from specjax.config import Program
from specjax.core import programs, round as rnd
from specjax.core.accept import accept
from specjax.core.loop import host_state, prefill_rows
from specjax.drafters.body import Body
from specjax.types import AbsorbIn, Params


def layers(target_cfg: Any, number: int) -> Body:
    """Drafter layers of the target's own width and heads."""
    c = target_cfg
    return Body(
        hidden_size=c.hidden_size, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, mlp_size=c.mlp_size,
        eps=c.eps, rope=c.rope, qk_norm=True, windows=(None,) * number,
    )  # fmt: skip


def sized(name: str, target_cfg: Any, k: int) -> Any:
    """The drafter's tiny config at the size a checkpoint for this target would have."""
    tiny = registry.drafter(name).tiny(target_cfg)
    n = target_cfg.num_layers
    taps = (2, n // 2, n - 3)
    changes = {
        "eagle3": {
            "body": layers(target_cfg, 1),
            "taps": taps,
            "head_rows": 8192,
            "reduced": True,
            "own_head": True,
        },
        "dflash": {"body": layers(target_cfg, 5), "taps": taps, "rows": k + 1, "causal": (False,) * 5},
    }
    changes["dspark"] = changes["dflash"] | {"rows": k}
    return dataclasses.replace(tiny, k=k, **changes.get(name, {}))


def with_drafter(params: Params, name: str, k: int) -> Params:
    """The target with a drafter of random weights."""
    module, cfg = registry.drafter(name), sized(name, params.meta.target_cfg, k)
    lent = registry.target(params.meta.family).shared(params.target, params.meta.target_cfg)
    weights = specjax.checkpoints.random_weights(module.abstract(cfg), 1, lent.embed.dtype)
    meta = dataclasses.replace(params.meta, drafter=name, drafter_cfg=cfg)
    return Params(params.target, weights, meta)


class Parts:
    """The parts of a round over one prefilled state, each as a loop of ``n`` turns in one program.

    What a turn computes goes into the next one's input, so that no turn can be left out.
    """

    def __init__(self, params: Params, prompt_tokens: int, rows: int):
        ids = np.random.default_rng(0).integers(5, 40000, (rows, prompt_tokens)).tolist()
        call = plan(params, ids, max_new_tokens=400, rows=rows, ignore_eos=True)
        self.program: Program = dataclasses.replace(call.program, rows=rows)
        call.program = self.program
        engine = call.engines()[0]
        self.weights = (params.target, params.drafter)
        self.state = prefill_rows(engine, host_state(self.program, call.jobs), call.drive.prefill_chunk)[0]
        self.pair, self.k = self.program.pair, self.program.k

    def round(self, weights, state, i):
        """A whole round; the length is put back so that every turn sees the same context."""
        after, _ = programs._round(self.program, weights, state, self._emit(), i * 0)
        return self._rewound(state, after)

    def draft(self, weights, state, i):
        """The drafter's passes."""
        proposal, after = rnd.draft(self.pair, weights, state, self.k)
        tokens = state.tokens.at[:, -1].set(proposal.tokens.sum(1) % 7)
        return dataclasses.replace(after, tokens=tokens)

    def verify(self, weights, state, i):
        """The target's pass over the block, and acceptance."""
        target, cfg = registry.target(self.pair.family), self.pair.target_cfg
        block = jnp.broadcast_to(state.tokens[:, -1:], (state.tokens.shape[0], self.k + 1))
        pos = state.length[:, None] - 1 + jnp.arange(self.k + 1)
        valid = jnp.full(state.length.shape, self.k + 1, jnp.int32)
        out = target.forward(weights[0], cfg, block, pos, valid, state.target, rnd.needs(self.pair), "verify")
        proposal = rnd.Proposal(block[:, 1:], valid - 1)
        unembed = functools.partial(target.unembed, weights[0], cfg)
        verdict = accept(out.hidden, unembed, proposal, valid - 1, ~state.done, state, "match", False)
        taps = sum(jnp.sum(x[:, 0, 0]) for x in out.taps.values()) if out.taps else jnp.float32(0)
        mixed = verdict.out_tokens.sum(1) % 7 + jnp.isnan(taps)
        return dataclasses.replace(state, tokens=state.tokens.at[:, -1].set(mixed), target=out.cache)

    def absorb(self, weights, state, i):
        """The drafter takes in a block of which two positions were kept."""
        q = self.k + 1
        pos = state.length[:, None] - 1 + jnp.arange(q)
        hidden = self._features(state, q)
        wanted = rnd.needs(self.pair)
        block = AbsorbIn(
            jnp.broadcast_to(state.tokens[:, -1:], pos.shape),
            jnp.broadcast_to(state.tokens[:, -1:], pos.shape),
            pos,
            jnp.full(state.length.shape, 2, jnp.int32),
            hidden if wanted.hidden else None,
            dict.fromkeys(wanted.taps, hidden),
        )
        shared = registry.target(self.pair.family).shared(weights[0], self.pair.target_cfg)
        module = registry.drafter(self.pair.drafter)
        dstate = module.absorb(weights[1], shared, self.pair.drafter_cfg, state.drafter, block)
        seen = jax.tree.leaves(dstate)[0].ravel()[0]
        tokens = state.tokens.at[:, -1].add(jnp.isnan(seen.astype(jnp.float32)))
        return dataclasses.replace(state, drafter=dstate, tokens=tokens)

    def bare(self, weights, state, i):
        """Drafter pass, verification and absorb one after the other, and nothing else."""
        for part in (self.draft, self.verify, self.absorb):
            state = part(weights, state, i)
        return state

    def _features(self, state, q):
        width = self.pair.target_cfg.hidden_size
        seed = state.tokens[:, -1:].astype(self.program.dtype)[..., None]
        return jnp.broadcast_to(0.01 * seed + 0.1, (state.tokens.shape[0], q, width))

    def _emit(self):
        return programs._empty_emit(self.program, 1)

    @staticmethod
    def _rewound(before, after):
        return dataclasses.replace(after, length=before.length, done=before.done, reason=before.reason)

    def loop(self, part: str):
        """``run(n)`` -> seconds of n turns of a part, compiled ahead."""
        step = getattr(self, part)

        def turns(weights, state, n):
            return jax.lax.fori_loop(0, n, lambda i, s: step(weights, s, i), state)

        args = (self.weights, self.state, jnp.int32(1))
        compiled = jax.jit(turns).lower(*args).compile()
        jax.block_until_ready(compiled(*args))

        def run(n: int) -> float:
            began = time.perf_counter()
            jax.block_until_ready(compiled(self.weights, self.state, jnp.int32(n)))
            return time.perf_counter() - began

        return run


def measure(params: Params, args, plain: Any) -> dict[str, Any]:
    """Milliseconds per round of each part."""
    parts = Parts(params, args.prompt_tokens, args.rows)
    names = ("round", "bare", "draft", "absorb", "verify")
    loops = {name: parts.loop(name) for name in names} | {"plain": plain}
    ms: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(args.repeats):
        for name, run in loops.items():
            ms[name].append(1e3 * run(args.turns) / args.turns)  # the call itself takes microseconds
    out: dict[str, Any] = {name: min(values) for name, values in ms.items()}
    out["rest"] = out["round"] - out["bare"]
    out["cold"] = out["bare"] - out["draft"] - out["absorb"] - out["verify"]
    out["rest_of_plain"] = out["rest"] / out["plain"]
    out["medians"] = {name: statistics.median(values) for name, values in ms.items()}
    out["k"] = parts.k
    return out


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafters", default="eagle3,dflash,dspark,draft_model")
    parser.add_argument("--k", type=int, default=7)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = specjax.load(args.target, dtype=args.dtype)
    plain = Parts(target, args.prompt_tokens, args.rows).loop("round")
    results = {}
    for name in args.drafters.split(","):
        results[name] = measure(with_drafter(target, name, args.k), args, plain)
        shown = {key: round(value, 3) for key, value in results[name].items() if key != "medians"}
        print(name, shown, flush=True)
    common.write(args.out, args, results)


if __name__ == "__main__":
    main()
