"""Training of DFlash, DFlash2 and DSpark against speculators 0.9: loss and every gradient, from the same weights,
blocks and packed documents.

Where conventions differ: the library divides by the number of drafts, not by the sum of their weights; its label is
the teacher's best token, which the text is made of here; blocks end within their document. In layout "fill" its
recurrent head also takes a step at the anchor's row, which decoding has no use for: "rnn" is compared in "shift".
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from parity import block_reference as ref

from specjax import registry
from specjax.train import block, methods
from specjax.train.types import Batch, Features
from specjax.types import ArraySpec

BOTH = {"sample_from_anchor": True, "speculative_tokens": 5}
#: kind, the library's settings, its losses, ours, and changes of our recipe.
CASES = {
    "ce": ("dflash", {"layers": ("sliding_attention", "full_attention")}, {"ce": 1.0}, (("ce", 1.0),), {}),
    "kl, reduced": ("dflash", {"draft_vocab": 40}, {"kl_div": 1.0}, (("kl", 1.0),), {}),
    "dpace": (
        "dflash",
        {"layers": ("sliding_attention",) * 2, "sliding_window_non_causal": True, **BOTH},
        {"ce": 1.0},
        (("ce", 1.0),),
        {"dpace": 0.5},
    ),
    "selector": (
        "dflash2",
        {
            "layers": ("sliding_attention", "full_attention"),
            "conv_kernel_size": 3,
            "conv_group_size": 8,
            "selector_rank": 6,
            "selector_top_k": 4,
        },
        {"ce": 1.0},
        (("ce", 1.0), ("selector", 1.0)),
        {},
    ),
    "deepspec": (
        "dspark",
        {"markov_rank": 6, **BOTH},
        {"ce": 0.1, "tv": 1.8},
        (("ce", 0.1), ("l1", 0.9), ("confidence", 1.0)),
        {},
    ),
    "gated": (
        "dspark",
        {"markov_rank": 6, "markov_head_type": "gated", "draft_vocab": 40, **BOTH},
        {"lk_hybrid": 1.0, "jsd": 0.5},
        (("lk_hybrid", 1.0), ("jsd", 0.5), ("confidence", 1.0)),
        {},
    ),
    "rnn": (
        "dspark",
        {"markov_rank": 6, "markov_head_type": "rnn", **BOTH},
        {"nla": 1.0, "rkl": 0.2},
        (("nla", 1.0), ("rkl", 0.2), ("confidence", 1.0)),
        {},
    ),
}
T, LENGTHS, ANCHORS = 48, (20, 26), (1, 9, 13, 21, 30, 40)


@functools.cache
def target():
    return ref.target()


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    return ref.load_target(target(), tmp_path_factory.mktemp("target"))


def prepare(model):
    """The library's inputs: features, hidden states before the final norm, and a text that the teacher agrees with."""
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target().get_input_embeddings().weight)
        rows = target().lm_head.weight
        ids = torch.arange(model.draft_vocab_size) * (2 if model.draft_vocab_size < ref.VOCAB else 1)
        model.lm_head.weight.copy_(rows[ids])
        model.verifier_lm_head.weight.copy_(rows[ids])
        taps = torch.tensor(ref.features(T, 2))[None]
        hidden = torch.tensor(ref.features(T, 1, seed=8))[None]
        best = ids[model.verifier_lm_head(model.verifier_norm(hidden)).argmax(-1)]
        tokens = torch.cat([torch.tensor([[5]]), best[:, :-1]], 1)
    return taps, hidden, tokens


def theirs(model, taps, hidden, tokens, spec, recipe, monkeypatch):
    """The library's loss; gradients are left in the model."""
    from speculators.losses import eager
    from speculators.models.dflash import core

    fixed = torch.tensor(ANCHORS), torch.ones(len(ANCHORS), dtype=torch.bool)
    monkeypatch.setattr(core, "select_anchors", lambda *args: fixed)
    names = {"kl_div": "kl_div_loss", "rkl": "reverse_kl_div_loss", "jsd": "js_div_loss", "ce": "ce_loss",
             "tv": "tv_loss", "nla": "neg_log_acceptance_loss", "lk_hybrid": "lk_hybrid_loss"}  # fmt: skip
    doc, pos = layout()
    more = {} if recipe.dpace is None else {"per_position_loss_weight": "dpace", "dpace_alpha": recipe.dpace}
    if recipe.method == "dspark" or "selector" in dict(recipe.terms):
        more["tv_loss_fn"] = eager.tv_loss
    _, loss, _ = model(
        taps,
        tokens,
        torch.ones(1, T),
        hidden,
        torch.tensor(doc)[None],
        torch.tensor(pos)[None],
        loss_config={name: (getattr(eager, names[name]), factor) for name, factor in spec.items()},
        gamma=recipe.gamma,
        max_anchors=len(ANCHORS),
        **more,
    )
    loss.backward()
    return float(loss.detach())


def layout():
    """Document and position of every token: two documents and padding."""
    doc, pos = np.full(T, -1), np.zeros(T, int)
    for d, (start, n) in enumerate(zip((0, LENGTHS[0]), LENGTHS, strict=True)):
        doc[start : start + n], pos[start : start + n] = d, np.arange(n)
    return doc, pos


@pytest.mark.parametrize(
    "case", [c if c in ("ce", "deepspec") else pytest.param(c, marks=pytest.mark.long) for c in CASES]
)
def test_loss_and_gradients_of_speculators(params, tmp_path, monkeypatch, case):
    """PEER.13, PEER.15."""
    kind, more, spec, terms, changes = CASES[case]
    model = ref.speculator(kind, **more)
    taps, hidden, tokens = prepare(model)
    loaded, found = ref.attach(params, ref.save(model, tmp_path / "d"))
    how = methods.method(found.name)
    recipe = how.recipe(terms=terms, anchors=len(ANCHORS), chunks=2, **changes)
    wanted = theirs(model, taps, hidden, tokens, spec, recipe, monkeypatch)

    doc, pos = layout()
    row = lambda x, kind=jnp.int32: jnp.asarray(np.asarray(x), kind)[None]  # noqa: E731
    batch = Batch(row(tokens[0]), row(doc), row(pos), row(doc >= 0, bool))
    with torch.no_grad():
        normed = model.verifier_norm(hidden).numpy()
    given = Features(
        jnp.asarray(normed),
        {j: jnp.asarray(taps.numpy()[..., 32 * i : 32 * i + 32]) for i, j in enumerate((1, 2))},
    )
    at = jnp.asarray(ANCHORS, jnp.int32)[None]
    monkeypatch.setattr(block, "anchors", lambda *args: block.Anchors(at, at >= 0))
    shared, cfg = ref.Block(loaded).shared, found.cfg
    run = lambda w: how.loss(w, shared, cfg, recipe, batch, given, jax.random.key(0))[0]  # noqa: E731
    loss, slopes = jax.jit(jax.value_and_grad(run, allow_int=True))(loaded.drafter)

    factor = float(jnp.mean(jnp.exp(-jnp.arange(block.max_k(cfg)) / 4))) if recipe.dpace is None else 1.0
    assert float(loss) * factor == pytest.approx(wanted, rel=1e-4)
    check_gradients(model, registry.drafter(found.name).abstract(cfg), slopes, factor)


def check_gradients(model, specs, slopes, factor):
    """Every array's, found by the name it has in files."""
    named, seen = dict(model.named_parameters()), 0
    specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ArraySpec))
    for spec, slope in zip(specs, jax.tree.leaves(slopes), strict=True):
        (name,) = spec.names
        if name not in named or named[name].grad is None:
            continue
        expected = named[name].grad.numpy().reshape(slope.shape)
        np.testing.assert_allclose(
            np.asarray(slope) * factor, expected, atol=1e-4 * max(1, np.abs(expected).max()), err_msg=name
        )
        seen += 1
    assert seen == sum(p.grad is not None for p in named.values()) > 10
