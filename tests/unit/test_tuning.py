"""``specjax.tune``: against a full sweep on made-up machines, and on the tiny model for what it leaves behind."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_models import PROMPTS, greedy, ngram_params, target, told
from typer.testing import CliRunner

import specjax
from specjax import cli, tuning
from specjax.config import Meta
from specjax.core import width as choice
from specjax.tuning import Reading


def verified(k: int) -> float:
    return float(np.interp(k, [0, 1, 3, 7, 15], [1, 1.36, 1.77, 2.26, 2.6]))


MACHINES = {
    "cpu, one by one": (lambda k: verified(k) + 0.15 * k, 7),
    "cpu, one pass": (lambda k: verified(k) + 0.45, 15),
    "gpu, one by one": (lambda k: 1.05 + 0.05 * k, 7),
    "gpu, one pass": (lambda k: 1.25 + 0.005 * k, 15),
    "large batch": (lambda k: 1.1 + 0.25 * k, 7),
}


class World:
    """Six drafters whose chances fall off in different ways; readings of 96 tokens per prompt, 1 % noise in time."""

    def __init__(self, machine: str, seed: int):
        self.cost, self.widest = MACHINES[machine]
        self.rng = rng = np.random.default_rng(seed)
        first, fall = rng.uniform(0.4, 0.93, 6), rng.uniform(0, 0.04, 6)
        self.chances = {f"m{i}": [max(first[i] - fall[i] * j, 0.1) for j in range(15)] for i in range(6)}
        self.decoded = 0

    def read(self, method, k, sample):
        noise = 1 + 0.01 * abs(self.rng.standard_normal())
        if method is None:
            return Reading(95 * len(sample), (), noise, 1 / noise)
        self.decoded += len(sample)
        rounds, tokens, kept = 0, 0, np.zeros(k, int)
        while tokens < 95 * len(sample):
            run = int(np.cumprod(self.rng.random(k) < self.chances[method][:k]).sum())
            rounds, tokens = rounds + 1, tokens + run + 1
            kept[:run] += 1
        seconds = self.cost(k) * noise
        return Reading(rounds, tuple(kept.tolist()), seconds, tokens / (rounds * seconds))

    def speed(self, method, k):
        return choice.tokens(self.chances[method], k) / self.cost(k) if method else 1.0


@pytest.mark.parametrize("machine", MACHINES)
def test_close_to_a_sweep_with_a_fifth_of_its_runs(machine):
    """Six drafters, sixteen prompts: within 3 % of the best that a sweep would find."""
    shares = []
    for seed in range(6):
        world = World(machine, seed)
        found = tuning.search(dict.fromkeys(world.chances, (5, world.widest)), 16, world.read)
        swept = [world.speed(m, k) for m in world.chances for k in tuning.SWEPT if k <= world.widest]
        shares.append(world.speed(found.method, found.k) / max(1.0, *swept))
        assert world.decoded == round(16 * found.runs) <= 16 * found.sweep / 5
        assert found.sweep == len(swept)
    assert min(shares) >= 0.97


def test_plain_where_no_drafter_is_faster():
    world = World("cpu, one by one", 0)
    world.chances = dict.fromkeys(world.chances, [0.1] * 15)
    found = tuning.search(dict.fromkeys(world.chances, (5, 7)), 16, world.read)
    assert (found.method, found.k, found.ratio) == (None, 0, 1.0)
    assert "chosen: plain decoding" in str(found)


def drafters():
    return {"right": told("ALWAYS_RIGHT", k=7), "wrong": told("ALWAYS_WRONG", k=7)}


def test_params_keep_the_choice(monkeypatch):
    """The choice is what calls use that name neither k nor rows, is written and read with the params, and changes no
    id. (Times of the tiny model are made up: wall-clock time is no test's business.)"""
    from specjax import tuning_run

    real = tuning_run._Lab.read

    def timed(self, method, k, sample):
        reading = real(self, method, k, sample)
        seconds = 1.0 if method is None else 1.5
        tau = 1 + sum(reading.kept) / reading.rounds if method else 1.0
        return dataclasses.replace(reading, round_seconds=seconds, speed=tau / seconds)

    monkeypatch.setattr(tuning_run._Lab, "read", timed)
    tuned = specjax.tune(target(), PROMPTS, methods=drafters(), max_new_tokens=40, ignore_eos=True)
    assert (tuned.method, tuned.k, tuned.rows) == ("right", 7, 1)
    assert dict(tuned.params.meta.defaults) == {"k": 7, "rows": 1}
    assert "right: drafts kept" in str(tuned)
    meta = tuned.params.meta
    assert Meta.from_json(json.loads(json.dumps(meta.to_json()))) == meta
    out = specjax.decode(tuned.params, PROMPTS, max_new_tokens=40)
    assert out.tokens == [greedy(p, 40)[0] for p in PROMPTS]
    assert len(out.total.proposed_at) == 7
    named = specjax.explain(tuned.params, PROMPTS, k=2, rows=3).program
    assert (named.k, named.rows) == (2, 3)


def test_defaults_do_not_ask_a_plain_target_to_draft():
    params = target()
    meta = dataclasses.replace(params.meta, defaults=(("k", 5), ("rows", 2)))
    program = specjax.explain(params.replace(meta=meta), PROMPTS).program
    assert (program.k, program.rows) == (0, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": 0}, "rows"),
        ({"rows": 99}, "99"),
        ({"methods": []}, "no method"),
        ({"max_new_tokens": 1}, "at least 2"),
    ],
)
def test_errors_come_before_anything_runs(options, said):
    with pytest.raises(ValueError, match=said):
        specjax.tune(ngram_params(), PROMPTS, **options)


def test_command_line(monkeypatch, tmp_path):
    """Options reach the call under their names; what is not given is not passed on."""
    seen = {}

    def tune(params, prompts, **options):
        seen.update(options, params=params, prompts=len(prompts.prompts))
        return "the report"

    monkeypatch.setattr(specjax, "load", lambda name, **options: (name, options), raising=False)
    monkeypatch.setattr(specjax, "tune", tune, raising=False)
    command = [
        "tune",
        "toy",
        "--rows",
        "1,4",
        "--methods",
        "ngram,eagle3",
        "--limit",
        "3",
        "--max-new-tokens",
        "9",
    ]
    result = CliRunner().invoke(cli.app, command)
    assert (result.exit_code, result.stdout) == (0, "the report\n"), result.output
    assert seen == {
        "params": ("toy", {}), "prompts": 3, "rows": [1, 4], "methods": ["ngram", "eagle3"], "max_new_tokens": 9,
    }  # fmt: skip
