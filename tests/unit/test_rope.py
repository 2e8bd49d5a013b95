"""Rope frequencies equal transformers' own for every kind, and no setting is ignored."""

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specjax.layers.rope import RopeConfig, inverse_frequencies, rope_angles, rope_config, rotate

KINDS = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_betas": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_mscale": {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn_explicit": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25},
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_scaled_frequencies(name, theta):
    settings = {"rope_type": name, "rope_theta": theta} | KINDS[name]
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=256,
        rope_parameters=settings,
    )
    want, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, device="cpu")
    ours = rope_config({"rope_parameters": settings, "max_position_embeddings": 256}, 64)
    np.testing.assert_allclose(inverse_frequencies(ours), want.numpy(), rtol=2e-6)
    assert ours.attention_factor == pytest.approx(factor)
    assert rope_config(flat(settings), 64) == ours


def flat(settings):
    """The older layout: ``rope_theta`` at top level, the rest under ``rope_scaling``."""
    rest = {k: v for k, v in settings.items() if k != "rope_theta"}
    return {"rope_theta": settings["rope_theta"], "rope_scaling": rest, "max_position_embeddings": 256}


def test_default_and_old_spelling():
    plain = rope_config({"rope_theta": 1e5}, 8)
    assert plain == RopeConfig(dims=8, theta=1e5)
    np.testing.assert_allclose(inverse_frequencies(plain), 1e5 ** (-np.arange(4) / 4), rtol=1e-6)
    old = rope_config({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}}, 8)
    assert (old.kind, old.factor) == ("linear", 2.0)
    assert rope_config({"rope_scaling": None}, 8).kind == "default"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "unknown rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"needs \['factor'\]"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2, "surprise": 1}},
            r"unknown rope setting.*surprise",
        ),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta"),
        (
            {"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": {"rope_type": "linear"}},
            "rope_parameters says 'yarn' but rope_scaling says 'linear'",
        ),
    ],
)
def test_refused(config, said):
    with pytest.raises(ValueError, match=said):
        rope_config(config, 8)


def test_rotation_is_half_split_and_relative():
    cfg = RopeConfig(dims=8, theta=100.0)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, 3, 2, 8)), jnp.float32)
    pos = jnp.array([[0, 5, 9]])
    got = rotate(x, *rope_angles(cfg, pos))
    angle = np.asarray(pos)[0, :, None] * inverse_frequencies(cfg)
    for t in range(3):
        for j in range(4):
            c, s = np.cos(angle[t, j]), np.sin(angle[t, j])
            a, b = x[0, t, :, j], x[0, t, :, j + 4]
            np.testing.assert_allclose(got[0, t, :, j], a * c - b * s, atol=1e-5)
            np.testing.assert_allclose(got[0, t, :, j + 4], b * c + a * s, atol=1e-5)
    shifted = rotate(x, *rope_angles(cfg, pos + 7))
    dots = lambda y: jnp.einsum("bqhc,bkhc->bhqk", y, y)  # noqa: E731
    np.testing.assert_allclose(dots(got), dots(shifted), atol=1e-4)


def test_partial_rotation_leaves_the_rest():
    cfg = rope_config({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, 8)
    assert cfg.dims == 4
    x = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    out = rotate(x, *rope_angles(cfg, jnp.array([[3, 4]])))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out[..., 4:], x[..., 4:])
    assert (out[..., :4] != x[..., :4]).any()


def test_angles_stay_exact_far_out():
    """float32 angles at positions where bfloat16 would be tens of turns off."""
    cfg = RopeConfig(dims=8, theta=1e4)
    cos, _ = rope_angles(cfg, jnp.array([[131071]]))
    assert cos.dtype == jnp.float32
    want = np.cos(131071 * inverse_frequencies(cfg).astype(np.float64))
    np.testing.assert_allclose(cos[0, 0], want, atol=0.02)


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_proportional_frequencies(factor):
    """Gemma 4's full layers: transformers pads the frequencies of the whole head with zeros."""
    settings = {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "factor": factor,
    }
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=settings
    )
    want, _ = ROPE_INIT_FUNCTIONS["proportional"](config, device="cpu")
    ours = rope_config({"rope_parameters": settings}, 64)
    turning = inverse_frequencies(ours)
    assert (ours.dims, ours.pair, len(turning)) == (16, 32, 8)
    np.testing.assert_allclose(turning, want.numpy()[:8], rtol=2e-6)
    assert (want.numpy()[8:] == 0).all()


def test_proportional_rotation_leaves_the_rest():
    """PEER.14, TAP.5: pairs lie half a head apart, and channels that do not turn keep their bits."""
    settings = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    cfg = rope_config({"rope_parameters": settings}, 16)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 3, 16)), jnp.bfloat16)
    x = x.at[0, 0, 0, 5].set(-0.0)
    cos, sin = rope_angles(cfg, jnp.array([[3, 40]]))
    got = rotate(x, cos, sin, cfg.pair)
    still = [2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15]
    bits = lambda y: np.asarray(y[..., np.array(still)]).view(np.uint16)  # noqa: E731
    np.testing.assert_array_equal(bits(got), bits(x))
    whole = lambda y: jnp.pad(y, ((0, 0), (0, 0), (0, 6)), constant_values=1 if y is cos else 0)  # noqa: E731
    np.testing.assert_array_equal(got, rotate(x, whole(cos), whole(sin)))  # zero frequencies for the rest
