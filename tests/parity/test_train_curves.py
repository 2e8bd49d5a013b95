"""Twenty optimiser steps beside speculators 0.9: the same losses and, at the end, the same weights.

Its model, loss, AdamW and cosine schedule as its trainer builds them, in float32; our compiled step, from the same
weights, features, texts and masks. Where conventions differ our recipe says the same: its EAGLE-3 loss is a sum over
steps, its blocks' a mean over drafts whatever they weigh (a coefficient here), and its optimiser decays vectors too
(moved into a group of their own there).
"""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packing
import pytest
import torch
import transformers
from parity import block_reference as blocks
from parity.eagle3_package import DRAFT, VOCAB, WIDTH, build

from specjax import checkpoints, testing
from specjax.train import methods, step
from specjax.train.types import Batch, Features, Recipe
from specjax.types import Pair, Params, Shared

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

STEPS = 20
OPTIMISER: dict[str, Any] = {
    "steps": STEPS, "learning_rate": 3e-3, "warmup": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.01, "clip": 1.0,
    "dtype": "float32", "source": "online", "optimizer": "adamw",
}  # fmt: skip
#: Share of every weight's own change, and of every loss, that the two may differ by.
LOSS, WEIGHTS = 1e-4, 1e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """Both sides of a run. ``calls``: arguments of the package's model, step by step."""

    model: torch.nn.Module
    calls: list[dict[str, Any]]
    params: Params
    recipe: Recipe
    frozen: tuple[str, ...]
    given: list[tuple[Batch, Features]]
    load: Any  # weights of the package's model as ours


def theirs(case: Case) -> list[float]:
    """Losses of the package's training, which changes the model."""
    from speculators.train.optimizers import build_optimizers

    r = case.recipe
    config = types.SimpleNamespace(optimizer="adamw", lr=r.learning_rate, weight_decay=r.weight_decay)
    (optimiser,) = build_optimizers(case.model, config)
    (group,) = optimiser.param_groups
    vectors = [p for p in group["params"] if p.ndim == 1]
    optimiser = torch.optim.AdamW(
        [{"params": [p for p in group["params"] if p.ndim > 1]}, {"params": vectors, "weight_decay": 0.0}],
        **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
    )
    schedule = transformers.get_cosine_schedule_with_warmup(optimiser, round(r.warmup * r.steps), r.steps)
    losses = []
    for call in case.calls:
        _, loss, _ = case.model(**call)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), r.clip)
        optimiser.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


def ours(case: Case, **changes: Any) -> tuple[list[float], Any]:
    """Losses and trained weights; ``changes`` of the recipe."""
    recipe = dataclasses.replace(case.recipe, **changes)
    state = step.start(case.params.drafter, case.frozen, recipe)
    one, _ = step.compiled(step.Step(case.params.meta.pair, recipe))
    losses = []
    for batch, features in case.given:
        state, metrics = one(state, case.params.target, batch, features)
        losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
    return losses, step.merge(state.masters, state.fixed)


def compare(case: Case) -> list[float]:
    """The package's losses, which are ours."""
    wanted, (found, weights) = theirs(case), ours(case)
    np.testing.assert_allclose(found, wanted, rtol=LOSS)
    assert np.mean(wanted[-4:]) < 0.98 * np.mean(wanted[:4])
    compared = 0
    for begun, mine, other in zip(
        *map(jax.tree.leaves, (case.params.drafter, weights, case.load())), strict=True
    ):
        begun, mine, other = (np.asarray(x, np.float64) for x in (begun, mine, other))
        moved = np.linalg.norm(other - begun)
        assert np.linalg.norm(mine - other) <= WEIGHTS * moved
        compared += moved > 0
    assert compared > 10
    return wanted


def eagle3(folder) -> Case:
    """Single documents, wholly trained, of tokens that can be drafted: its own rule of what counts is ours there."""
    taps, length, unroll, decay = (1, 2, 4), 26, 3, 0.8
    model = build(
        {"body": "llama", "before_residual": True, "norms": "norm_before_fc", "norm_output": True},
        taps,
        DRAFT,
    )
    params = testing.tiny_params(vocab=VOCAB, width=WIDTH, layers=5)
    lent = Shared(params.target.embed, params.target.head)
    ids = np.flatnonzero(model.t2d.numpy())
    with torch.no_grad():
        model.embed_tokens.weight.copy_(torch.tensor(np.asarray(lent.embed)))
        model.verifier_lm_head.weight.copy_(torch.tensor(np.asarray(lent.head)[ids]))
    model.verifier_norm = torch.nn.Identity()  # the states are normed already

    def load():
        model.save_pretrained(folder)
        source = checkpoints.hub.resolve(folder)
        return checkpoints.load_drafter(source, params.meta.target_cfg, lent, jnp.float32)

    how, loaded = methods.method("eagle3"), load()
    pair = Pair(params.meta.family, params.meta.target_cfg, "eagle3", loaded.cfg)
    scale = sum(decay**k for k in range(unroll))
    recipe = how.recipe(terms=(("kl", scale),), decay=decay, unroll=unroll, answers=None, rows=1, length=length,
                        **OPTIMISER)  # fmt: skip
    given, calls = [], []
    for seed in range(STEPS):
        rng = np.random.default_rng(seed)
        batch = packing.packed([[(rng.choice(ids, length).tolist(), 2)]], length)
        random = lambda rng=rng: rng.standard_normal((1, length, WIDTH)).astype(np.float32) * 2  # noqa: E731
        states = Features(random(), {tap: random() for tap in taps})
        given.append((batch, states))
        joined = np.concatenate([states.taps[tap] for tap in taps], -1)
        calls.append(
            {
                "hidden_states": torch.tensor(joined[:, :-1]),
                "input_ids": torch.tensor(np.asarray(batch.tokens))[:, 1:].long(),
                "document_ids": torch.zeros(1, length - 1, dtype=torch.long),
                "loss_mask": torch.arange(length - 1)[None] + 2 < length,
                "verifier_last_hidden_states": torch.tensor(states.hidden[:, 1:]),
                "ttt_steps": unroll,
                "ttt_step_loss_decay": decay,
                "loss_config": losses_of({"kl_div": 1.0}),
            }
        )
    meta = dataclasses.replace(params.meta, drafter="eagle3", drafter_cfg=loaded.cfg)
    assert meta.pair == pair
    params = Params(params.target, loaded.weights, meta)
    frozen = (*how.frozen(loaded.cfg), "head")  # its copy of the head's rows is not trained there
    return Case(model, calls, params, recipe, frozen, given, lambda: load().weights)


def losses_of(factors: dict[str, float]) -> dict[str, tuple[Any, float]]:
    from speculators.losses import resolve_loss_config

    return {name: (resolve_loss_config(name, "eager")[name][0], factor) for name, factor in factors.items()}


T, DOCUMENTS = 48, ((18, 6), (24, 8))  # tokens, and those of them that are the prompt


def layout() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Document, position and trained tokens of a row."""
    doc, pos, trained = np.full(T, -1, np.int32), np.zeros(T, np.int32), np.zeros(T, bool)
    start = 0
    for d, (n, prompt) in enumerate(DOCUMENTS):
        doc[start : start + n], pos[start : start + n] = d, np.arange(n)
        trained[start + prompt : start + n] = True
        start += n
    return doc, pos, trained


def block(folder, monkeypatch, kind: str) -> Case:
    """Packed documents, every position before a trained token an anchor; the texts are the teacher's own."""
    from speculators.models.dflash import core

    more = {"markov_rank": 6, "sample_from_anchor": True, "speculative_tokens": 5} if kind == "dspark" else {}
    model = blocks.speculator(kind, layers=("sliding_attention", "full_attention"), **more)
    target = blocks.target()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        for head in (model.lm_head, model.verifier_lm_head):
            head.weight.copy_(target.lm_head.weight)
    params, found = blocks.attach(
        blocks.load_target(target, folder / "target"), blocks.save(model, folder / "d")
    )
    doc, pos, trained = layout()
    anchors = np.flatnonzero(np.append(trained[1:], False))
    places = torch.tensor(anchors), torch.ones(len(anchors), dtype=torch.bool)
    monkeypatch.setattr(core, "select_anchors", lambda *args: places)
    how = methods.method(kind)
    drafts = 5 if kind == "dspark" else 4
    ahead = anchors[:, None] + np.arange(1, drafts + 1)
    inside = np.cumprod(trained[ahead], -1) > 0
    share = np.exp(-np.arange(drafts) / 4)
    scale = float((inside * share).sum() / inside.sum())
    terms = {"ce": 0.1, "l1": 0.9, "confidence": 1.0} if kind == "dspark" else {"ce": 1.0}
    recipe = how.recipe(terms=tuple((n, f * scale) for n, f in terms.items()), gamma=4.0, rows=1, length=T,
                        anchors=len(anchors), **OPTIMISER)  # fmt: skip
    # its mask is of the place a draft is read at, which is the token itself only where the anchor drafts nothing
    mask = np.append(trained[1:], False) if kind == "dspark" else trained
    row = lambda x, dtype: np.asarray(x, dtype)[None]  # noqa: E731
    given, calls = [], []
    for seed in range(STEPS):
        taps = torch.tensor(blocks.features(T, 2, seed=seed))[None]
        hidden = torch.tensor(blocks.features(T, 1, seed=seed + 100))[None]
        with torch.no_grad():
            normed = model.verifier_norm(hidden)
            best = model.verifier_lm_head(normed).argmax(-1)
        tokens = torch.cat([torch.tensor([[5]]), best[:, :-1]], 1)
        batch = Batch(row(tokens[0], np.int32), row(doc, np.int32), row(pos, np.int32), row(trained, bool))
        split = {j: taps.numpy()[..., 32 * i : 32 * i + 32] for i, j in enumerate((1, 2))}
        given.append((batch, Features(normed.numpy(), split)))
        calls.append(
            {
                "hidden_states": taps,
                "input_ids": tokens,
                "loss_mask": torch.tensor(row(mask, np.float32)),
                "verifier_last_hidden_states": hidden,
                "document_ids": torch.tensor(row(doc, np.int64)),
                "position_ids": torch.tensor(row(pos, np.int64)),
                "loss_config": losses_of({"ce": 0.1, "tv": 1.8} if kind == "dspark" else {"ce": 1.0}),
                "gamma": 4.0,
                "max_anchors": len(anchors),
            }
            | ({"tv_loss_fn": losses_of({"tv": 1.0})["tv"][0]} if kind == "dspark" else {})
        )

    def load():
        return blocks.attach(params, blocks.save(model, folder / "after"))[0].drafter

    return Case(model, calls, params, recipe, how.frozen(found.cfg), given, load)


def made(kind: str, folder, monkeypatch) -> Case:
    return eagle3(folder) if kind == "eagle3" else block(folder, monkeypatch, kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_twenty_losses_of_speculators(tmp_path, monkeypatch, kind):
    """PEER.15: loss by loss, and the weights they end in."""
    compare(made(kind, tmp_path, monkeypatch))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "change"),
    [("eagle3", {"decay": 0.81}), ("eagle3", {"betas": (0.9, 0.95)}), ("dflash", {"gamma": 4.2})],
)
def test_a_planted_difference_shows(tmp_path, monkeypatch, kind, change):
    """One wrong weight of the loss or of the optimiser is far outside what the two agree to."""
    case = made(kind, tmp_path, monkeypatch)
    wanted, (found, _) = theirs(case), ours(case, **change)
    assert max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True)) > 10 * LOSS
