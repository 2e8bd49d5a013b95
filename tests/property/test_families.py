"""Speculative ids equal plain ids on targets of every kind of cache and feed-forward block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import CONFIGS, SCRIPTED, decodes, plain, target
from pairwise import name as case_name, pairwise
from told import NEW, PROMPTS, told, unused

import specjax
from specjax import registry
from specjax.types import TapSpec

DEFAULT = SCRIPTED | {"k": (3,), "batch": ("refill",)}  # the whole product is long


@pytest.mark.parametrize("name", ["hybrid", "latent"])
@pytest.mark.parametrize("case", pairwise(DEFAULT), ids=case_name)
def test_scripted_drafters(name, case):
    """GRD.1, KVR.5, BAT.4: wrong, right and mixed drafts, both loops, rows refilled."""
    decodes(case, name)


@pytest.mark.parametrize("mode", ["RANDOM_COUNT", "EVERY_THIRD_WRONG"])
def test_narrow_widths(mode):
    """KVR.6: rounds that verify fewer positions than the tape is wide."""
    case = {"mode": mode, "k": 4, "loop": "device", "rounds": 16, "batch": "ragged"}
    decodes(case, "hybrid", "TOLD_VARIABLE")


def test_features_in_order():
    """KVR.4, I3: hidden states and embeddings reach a drafter for exactly what was committed."""
    tokens = plain("hybrid")
    modes = ["EVERY_THIRD_WRONG"] * len(PROMPTS)
    params = told(modes, tokens, base=target("hybrid"), stop=unused(tokens), name="WITNESS")
    out = specjax.decode(params, PROMPTS[:3], max_new_tokens=NEW, rows=3, k=3)
    assert out.tokens == tokens[:3]
    assert all(s.accepted > 0 for s in out.stats)


@pytest.mark.parametrize("name", ["hybrid", "latent"])
def test_a_draft_that_overflows_changes_nothing(name):
    """NUM.1, KVR.5: what a wrong draft puts on a tape or into a latent is not finite; plain decoding never sees that
    token, so speculative decoding must not suffer from it."""
    base, tokens = target(name), plain(name)
    bad = unused([*tokens, *PROMPTS])
    for value in (np.nan, np.inf, 3e38):
        embed = base.target.embed.at[bad].set(value)
        broken = base.replace(target=base.target.replace(embed=embed))
        for at in (0, 2):
            params = told("STOP_INSIDE", tokens, base=broken, stop=bad, at=at)
            out = specjax.decode(params, PROMPTS, max_new_tokens=NEW, rows=3, k=3, stop=[unused(tokens)])
            assert out.tokens == tokens
            assert (out.total.accepted > 0) == (at > 0)  # adversarial at 0


NARROW = (1, 4, 8)  # widths with narrower ones beside them


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "k"),
    [(name, k) for name in CONFIGS for k in SCRIPTED["k"] if name != "hybrid_moe" or k in NARROW],
)
def test_scripted_drafters_all(name, k):
    """GRD.1, KVR.5, KVR.6: every mode at every width; loops and batches, which are programs of their own, take turns
    with the widths, and the rounds of a chunk, which are the loop's affair, go with k. Experts make no difference to
    what is cached."""
    loops, batches = SCRIPTED["loop"], SCRIPTED["batch"]
    for turn in (k, k + 3):
        driving = {
            "loop": loops[turn % 2],
            "batch": batches[turn // 2 % 3],
            "rounds": SCRIPTED["rounds"][k % 3],
        }
        for mode in SCRIPTED["mode"]:
            decodes({"mode": mode, "k": k, **driving}, name)
            if k in NARROW:
                decodes({"mode": mode, "k": k, **driving}, name, "TOLD_VARIABLE")


@pytest.mark.parametrize("name", ["hybrid", "latent", pytest.param("hybrid_moe", marks=pytest.mark.long)])
def test_plain_decoding_equals_whole_passes(name):
    """Ids without a cache: one forward pass per token over everything so far."""
    params, size, prompt = target(name), 48, PROMPTS[1]
    family, cfg = registry.target(params.meta.family), params.meta.target_cfg

    @jax.jit
    def best(tokens, length):
        cache = family.init_cache(cfg, 1, size, 1, jnp.float32)
        pos = jnp.arange(size, dtype=jnp.int32)[None]
        out = family.forward(params.target, cfg, tokens, pos, length, cache, TapSpec(), "extend")
        return jnp.argmax(family.unembed(params.target, cfg, out.hidden[0, length[0] - 1]))

    text = np.zeros((1, size), np.int32)
    text[0, : len(prompt)] = prompt
    for i in range(len(prompt), len(prompt) + NEW):
        text[0, i] = best(text, jnp.array([i], jnp.int32))
    assert text[0, len(prompt) :][:NEW].tolist() == plain(name)[1]


@pytest.mark.parametrize("name", ["hybrid", "latent"])
def test_texts_are_worth_testing(name):
    """Every prompt is continued differently, and by several different tokens."""
    assert len({tuple(t) for t in plain(name)}) == len(PROMPTS)
    assert all(len(set(t)) > 4 for t in plain(name))
