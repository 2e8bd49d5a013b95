"""Learned drafters on Gemma targets decode exactly while every ring wraps: ordinary layers and Gemma 4's."""

import dataclasses
import functools

import gemma_tiny
import pytest

import specjax
from specjax import registry, testing
from specjax.layers.rope import RopeConfig

PROMPTS = [[5, 1, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 2, 4], [2]]
NEW = 40
#: So few tokens that a random drafter is right now and then.
VOCAB = 12
ROPE = RopeConfig(4, 1e3, "proportional", span=8)
GEMMA = {"flavour": "gemma4", "values_from_keys": True, "qk_norm": True, "head_dim": 8, "rope": ROPE}


@functools.cache
def target(name: str):
    """A Gemma target of few tokens, whose heads weigh keys unevenly."""
    made = testing.tiny_params(2, hf=gemma_tiny.CONFIGS[name] | {"vocab_size": VOCAB}, sharpness=30.0)
    return gemma_tiny.uneven(made, name)


@functools.cache
def plain(name: str):
    return specjax.decode(target(name), PROMPTS, max_new_tokens=NEW, ignore_eos=True, rows=3).tokens


def drafted(name: str, drafter: str, gemma: bool):
    """The target with a random drafter: its ``tiny`` one, or that with Gemma 4 layers."""
    base = target(name)
    cfg = registry.drafter(drafter).tiny(base.meta.target_cfg)
    if gemma:
        windows = (None,) * cfg.body.layers
        more = {"input_scale": base.meta.target_cfg.embed_scale, "softcap": 30.0}
        cfg = dataclasses.replace(cfg, body=dataclasses.replace(cfg.body, windows=windows, **GEMMA), **more)
    return testing.tiny_drafter(base, drafter, 3, cfg)


SOON = {
    ("gemma3", "eagle3", False), ("gemma4_moe", "eagle3", True), ("gemma4_moe", "dflash", False),
    ("gemma4_moe", "dspark", True),
}  # fmt: skip
CASES = [
    pytest.param(*case, marks=() if case in SOON else pytest.mark.long, id=f"{case[0]}, {case[1]}, {case[2]}")
    for name in gemma_tiny.CONFIGS
    for drafter in ("eagle3", "dflash", "dspark")
    for case in ((name, drafter, False), (name, drafter, True))
]


@pytest.mark.parametrize(("name", "drafter", "gemma"), CASES)
def test_ids_are_those_of_plain_decoding(name, drafter, gemma):
    """GRD.1, KVR.1, KVR.2: drafts are accepted and rejected at every place, far beyond the windows."""
    params = drafted(name, drafter, gemma)
    out = specjax.decode(params, PROMPTS, max_new_tokens=NEW, ignore_eos=True, rows=3)
    assert out.tokens == plain(name)
    assert 0 < out.total.accepted < out.total.proposed
    assert len({t for tokens in out.tokens for t in tokens}) > 5  # no short cycle


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["eagle3", "dspark"])
@pytest.mark.parametrize("name", gemma_tiny.CONFIGS)
def test_refilled_rows_and_host_loop(name, drafter):
    """GRD.1, BAT.4: rows that are replaced leave nothing in a drafter of Gemma 4 layers."""
    params = drafted(name, drafter, True)
    for options in ({"rows": 2}, {"rows": 1, "loop": "host"}, {"rows": 3, "k": 1}):
        out = specjax.decode(params, PROMPTS, max_new_tokens=NEW, ignore_eos=True, **options)
        assert out.tokens == plain(name), options


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["eagle3", "dflash"])
def test_sampled_ids_are_those_of_plain_sampling(drafter):
    """GRD.2: under the rule "match" the seeded draws are plain decoding's."""
    options = {
        "max_new_tokens": NEW,
        "ignore_eos": True,
        "rows": 3,
        "temperature": 1.5,
        "seed": 4,
        "rule": "match",
    }
    wanted = specjax.decode(target("gemma4_moe"), PROMPTS, **options).tokens
    assert specjax.decode(drafted("gemma4_moe", drafter, True), PROMPTS, **options).tokens == wanted
