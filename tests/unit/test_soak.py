"""Ten thousand tokens through a batch whose rows are refilled all the while."""

import gc

import jax
import numpy as np
import pytest
from jax import monitoring
from tiny_models import ngram_params, target

from specjax import calls
from specjax.core import loop, programs
from specjax.types import tree_bytes

ROWS, COUNT, TOKENS = 16, 152, 10_000
#: Batches' worth of state that may be alive at once: the one that is decoded, the one before it while it is given
#: away, and rows that are being put in.
STATES = 3


def work() -> tuple[list[list[int]], list[int]]:
    """Prompts of 1 to 16 tokens, one prefill width, and budgets of 50 to 87, in an order in which rows fall free alone
    and together."""
    rng = np.random.default_rng(11)
    prompts = [rng.integers(70, 110, rng.integers(1, 17)).tolist() for _ in range(COUNT)]
    budgets = [int(n) for n in rng.integers(50, 88, COUNT)]
    budgets[20:44] = [60] * 24  # many that end together
    return prompts, budgets


def run(params, prompts, budgets, watch=None) -> list[loop.Job]:
    call = calls.plan(params, prompts, max_new_tokens=budgets, rows=ROWS, max_len=128, ignore_eos=True)
    ended = 0
    for job in loop.serve(*call.engines(), call.jobs, call.drive):
        ended += bool(job.reason)
        if watch is not None and job.reason and not ended % 10:
            watch()
    return call.jobs


def live() -> tuple[int, int]:
    gc.collect()
    arrays = [x for x in jax.live_arrays() if not x.is_deleted()]
    return len(arrays), tree_bytes(arrays)


def state_bytes(params, prompt) -> int:
    """Bytes of everything that belongs to the rows of a batch."""
    program = calls.plan(params, [prompt] * ROWS, max_new_tokens=8, rows=ROWS, max_len=128).program
    host = loop.host_state(program, [None] * ROWS)
    return tree_bytes(jax.eval_shape(lambda h: programs.fill_caches(program, h), host))


@pytest.mark.long
def test_soak():
    """KVR.6, BAT.3, PRF.3: ids equal plain decoding's, nothing is compiled on the way, and what is alive on the device
    neither grows with the tokens nor stays behind."""
    prompts, budgets = work()
    assert sum(budgets) >= TOKENS
    plain = run(target(), prompts, budgets)
    params = ngram_params()
    run(params, prompts[:60], budgets[:60])  # compiles: rows refilled alone and in groups
    size = state_bytes(params, prompts[0])
    compiled, seen = [], []

    def note(event, seconds, **more):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(more.get("fun_name", event))

    before = live()
    monitoring.register_event_duration_secs_listener(note)
    try:
        jobs = run(params, prompts, budgets, lambda: seen.append(live()))
    finally:
        monitoring.unregister_event_duration_listener(note)
    assert sum(len(job.tokens) for job in jobs) >= TOKENS
    assert [job.tokens for job in jobs] == [job.tokens for job in plain]
    assert not compiled, compiled
    assert len(seen) == COUNT // 10
    assert max(bytes_ for _, bytes_ in seen) <= before[1] + STATES * size
    assert live()[1] <= before[1] + size // ROWS  # a key, a count: nothing of a row's size
    assert sum(job.rounds != [] for job in jobs) == COUNT
