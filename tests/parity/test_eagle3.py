"""EAGLE-3 drafters loaded from folders give the logits of speculators, recycled steps included."""

import functools
import json

import eagle3_tiny as tiny
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eagle3_reference import Slow
from pairwise import name, product
from parity.eagle3_package import VOCAB, WIDTH, build
from safetensors.numpy import load_file, save_file

from specjax import checkpoints, testing
from specjax.drafters import eagle3, eagle3_model as model, serial
from specjax.types import AbsorbIn, Shared

#: The reference passes a name that the installed transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

ATOL = 1e-4  # float32, logits of about +-5
LENGTH, STEPS = 14, 3
VARIANTS = {
    "body": ("llama", "qwen3"),
    "before_residual": (False, True),
    "norms": ("none", "norm_before_fc", "fc_norm"),
    "norm_output": (False, True),
}
OTHERS = {
    "two layers": {"num_hidden_layers": 2},
    "bias": {"attention_bias": True},
    "one tap": {"taps": [3]},
    "five taps": {"taps": [0, 1, 2, 3, 4]},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        }
    },
    "whole vocabulary": {"draft": VOCAB},
}  # fmt: skip


def reference(found, features: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Logits [STEPS LENGTH Vd]; row i pairs feature i with token i + 1, and token i + 1 + k in step k."""
    seen = []
    hook = found.lm_head.register_forward_hook(lambda _, args, out: seen.append(out[0].numpy()))
    with torch.no_grad():
        found(
            torch.tensor(features)[None],
            torch.tensor(tokens[1:])[None],
            document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            ttt_steps=STEPS,
        )
    hook.remove()
    return np.stack(seen)


@functools.cache
def target():
    return testing.tiny_params(vocab=VOCAB, width=WIDTH, layers=5)


def load(folder, **settings):
    meta = target().meta
    lent = Shared(target().target.embed, target().target.head)
    source = checkpoints.hub.resolve(folder)
    return checkpoints.load_drafter(source, meta.target_cfg, lent, jnp.float32, settings=settings)


def ours(loaded, features: np.ndarray, tokens: np.ndarray, base=None) -> np.ndarray:
    """The same logits, from cached passes: batch row b absorbs b + 1 pairs and goes on from there."""
    p, cfg, rows, base = loaded.weights, loaded.cfg, LENGTH, base or target()
    lent = Shared(base.target.embed, base.target.head)
    keep = jnp.arange(1, rows + 1)
    every = lambda x: jnp.broadcast_to(jnp.asarray(x), (rows, *np.shape(x)))  # noqa: E731
    parts = np.split(features, len(cfg.taps), -1)
    block = AbsorbIn(
        every(tokens[:LENGTH].astype(np.int32)),
        every(tokens[1 : LENGTH + 1].astype(np.int32)),
        every(np.arange(LENGTH, dtype=np.int32)),
        keep,
        None,
        {tap: every(x) for tap, x in zip(cfg.taps, parts, strict=True)},
        "extend",
    )
    empty = eagle3.init_state(cfg, rows, LENGTH + STEPS, STEPS + 1, jnp.float32)
    held = eagle3.absorb(p, lent, cfg, empty, block)
    state, cache, out = held.feedback, held.cache, []
    padded = jnp.asarray(np.pad(tokens, (0, STEPS)), jnp.int32)
    for step in range(STEPS):
        if step:
            at = serial.drafted((keep - 1 + step)[:, None])
            embedded = serial.embed(p.embed, lent.embed, padded[keep + step][:, None], p.norm.dtype)
            y, cache = model.run(p, cfg, embedded, state[:, None], at, cache)
            state = model.recycled(p, cfg, y)
        out.append(np.asarray(model.logits(p, lent, cfg, state)))
    return np.stack(out)


def compare(found, folder, steps: int = STEPS):
    found.save_pretrained(folder)
    loaded = load(folder)
    taps = len(loaded.cfg.taps)
    rng = np.random.default_rng(1)
    features = rng.standard_normal((LENGTH, taps * WIDTH)).astype(np.float32) * 2
    tokens = rng.integers(0, VOCAB, LENGTH + 1)
    wanted, got = reference(found, features, tokens), ours(loaded, features, tokens)
    assert np.abs(wanted).max() > 3
    for k in range(steps):  # the last k rows of step k have no token any more
        np.testing.assert_allclose(
            got[k, : LENGTH - k], wanted[k, : LENGTH - k], atol=ATOL, rtol=0, err_msg=f"{k}"
        )
    return loaded


@pytest.mark.parametrize("case", product(VARIANTS), ids=name)
def test_logits_of_speculators(case, tmp_path):
    """TAP.8: every norm and residual variant, three steps, all but the first on the drafter's own recycled state."""
    compare(build(case), tmp_path)


@pytest.mark.parametrize("other", OTHERS)
def test_logits_of_other_shapes(other, tmp_path):
    """TAP.3, TAP.7, CKP.6: further layers, biases, other numbers of taps, scaled rope, a vocabulary that is whole."""
    case = {"body": "llama", "before_residual": True, "norms": "fc_norm", "norm_output": True}
    loaded = compare(build(case, **OTHERS[other]), tmp_path)
    assert (loaded.cfg.k, loaded.made_for, loaded.notes) == (5, "made/for", ())
    assert loaded.cfg.reduced == (other != "whole vocabulary")


def test_logits_of_sliding_layers(tmp_path):
    """TAP.6: a window in one of two layers. Later steps are left out: in training the window does not move with
    them."""
    case = {"body": "qwen3", "before_residual": False, "norms": "none", "norm_output": False}
    window = {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "use_sliding_window": True,
    }
    loaded = compare(build(case, **window), tmp_path, steps=1)
    assert loaded.cfg.body.windows == (4, None)


@pytest.mark.parametrize("kind", ["qwen3, 3.1", "reduced", "latent", "latent, two layers"])
def test_logits_of_the_authors_layout(kind, tmp_path):
    """TAP.8, CKP.6: ``midlayer`` files, which no package here builds, and latent attention as DeepSeek writes it
    (every head's keys and values made and kept), in float64."""
    layer, given = tiny.KINDS[kind]
    base, tensors = tiny.target(), tiny.published(tiny.drafted(kind))
    tensors = {name.replace("layers.0.", "midlayer."): np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    flags = {k: v for k, v in given.items() if k not in ("qk_norm", "latent", "reduced")}
    hf = (
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": tiny.VOCAB}
        | tiny.LAYER
        | layer
        | flags
    )
    (tmp_path / "config.json").write_text(json.dumps(hf | {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}))
    lent = Shared(base.target.embed, base.target.head)
    source = checkpoints.hub.resolve(tmp_path)
    loaded = checkpoints.load_drafter(source, base.meta.target_cfg, lent, jnp.float32)
    rng = np.random.default_rng(1)
    taps, tokens = rng.standard_normal((LENGTH, 3 * tiny.WIDTH)), rng.integers(0, tiny.VOCAB, LENGTH + 1)
    got = ours(loaded, taps.astype(np.float32), tokens, base)
    keep = ("norm_before_residual", "norm_output", "logit_scale")
    slow = Slow(
        load_file(tmp_path / "model.safetensors"),
        tiny.LAYER | layer,
        lent.embed,
        **{k: v for k, v in flags.items() if k in keep},
    )
    logits, states = slow.absorb(slow.fuse(np.split(taps, 3, -1)), tokens)
    for row in reversed(range(LENGTH)):
        slow.cut(row + 1)
        wanted, state = logits[row], states[row]
        for step in range(min(STEPS, LENGTH - row)):
            if step:
                wanted, state = slow.row(state, int(tokens[row + 1 + step]), row + step)
            np.testing.assert_allclose(got[step, row], wanted, atol=ATOL, rtol=0, err_msg=f"{row} {step}")
