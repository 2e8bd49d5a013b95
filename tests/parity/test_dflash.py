"""DFlash and DFlash2 against dflash 0.1.0, transformers' candidate generator and speculators 0.9.

The network is compared row by row; whole generations are compared in tokens and accepted counts, since a
wrong layout, tap or mask leaves a drafter that runs and is seldom right.
"""

import dataclasses
import functools
import warnings

import dflash.model as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from parity import block_reference as ref

import specjax
from specjax import calls
from specjax.core import loop, round as rnd
from specjax.drafters import dflash2

TAPS = [0, 1]
KINDS = {
    "full": (("full_attention",) * 2, {}),
    "sliding": (("sliding_attention", "full_attention"), {}),
    "both ways": (("sliding_attention",) * 2, {"is_causal": False}),
    "causal": (("full_attention",) * 2, {"is_causal": True}),
}
DFLASH2 = {
    "conv_kernel_size": 2,
    "conv_group_size": 8,
    "selector_rank": 6,
    "selector_top_k": 4,
    "output_multiplier": 0.4,
    "final_logit_softcapping": 5.0,
    "input_embedding_scale": 2.0,
}


@functools.cache
def target(vocab: int = ref.VOCAB):
    return ref.target(vocab)


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    return ref.load_target(target(), tmp_path_factory.mktemp("target"))


def drafter(kinds="full", cls="DFlashDraftModel", vocab=ref.VOCAB, block=5, seed=3, **settings):
    layers, more = KINDS[kinds]
    cfg = ref.draft_config(layers, vocab, num_target_layers=ref.LAYERS, **more)
    cfg.dflash_config = {
        "target_layer_ids": TAPS,
        "mask_token_id": vocab - 1,
        "block_size": block,
        **settings,
    }
    return ref.lively(getattr(reference, cls)(cfg), seed)


@pytest.mark.parametrize("kinds", KINDS)
def test_hidden_rows_and_logits(params, tmp_path, kinds):
    """TAP.6: every layer has its own kind, window and direction. TAP.1: ids are outputs of layers."""
    model = drafter(kinds)
    loaded, found = ref.attach(params, ref.save(model, tmp_path / "d"))
    assert (found.name, found.format) == ("dflash", "z-lab")
    assert found.cfg.taps == (1, 2)
    check_rows(model, loaded)


def test_dflash2_rows_and_logits(params, tmp_path):
    model = drafter("both ways", "DFlash2DraftModel", **DFLASH2)
    loaded, found = ref.attach(params, ref.save(model, tmp_path / "d"))
    assert found.cfg.conv is not None
    assert found.cfg.selector.top == 4
    check_rows(model, loaded)


def check_rows(model, loaded, sizes=(1, 11)):
    """A block after one position and one after more than the window."""
    embed = target().get_input_embeddings().weight
    scale = model.config.dflash_config.get("input_embedding_scale", 1.0)
    for s in sizes:
        taps, n = ref.features(s, len(TAPS)), model.block_size
        ids = torch.tensor([7] + [model.mask_token_id] * (n - 1))
        with torch.no_grad():
            hidden = model(
                position_ids=torch.arange(s + n)[None],
                noise_embedding=embed[ids][None] * scale,
                target_hidden=torch.tensor(taps)[None],
            )[0, 1:]
            logits = model.compute_logits(hidden, target().lm_head)
        ours = ref.Block(loaded).run(taps, 7, n - 1)
        ref.close(ours[0], hidden)
        ref.close(ours[1], logits)


def test_dflash2_selects_the_same_tokens(params, tmp_path):
    model = drafter("full", "DFlash2DraftModel", **DFLASH2)
    loaded, found = ref.attach(params, ref.save(model, tmp_path / "d"))
    block, walk = ref.Block(loaded), jax.jit(dflash2.walk, static_argnums=1)
    for seed in range(6):
        hidden, logits = block.run(ref.features(9, len(TAPS), seed), seed, 4)
        with torch.no_grad():
            path, *_ = model.candidate_selector.select(
                torch.tensor(hidden)[None], torch.tensor(logits)[None], torch.tensor([seed]), 0.0
            )
        ours, q = walk(
            loaded.drafter.selector,
            found.cfg.selector,
            jnp.asarray(hidden)[None],
            jnp.asarray(logits)[None],
            jnp.array([seed], jnp.int32),
            None,
            None,
        )
        assert q is None
        assert ours[0].tolist() == path[0].tolist()


SPECULATORS = {
    "reduced": ("dflash", {"draft_vocab": 40}),
    "sliding": ("dflash", {"layers": ("sliding_attention", "full_attention")}),
    "both ways": (
        "dflash",
        {
            "layers": ("sliding_attention",) * 2,
            "sliding_window_non_causal": True,
            "sample_from_anchor": True,
            "speculative_tokens": 5,
        },
    ),
    "dflash2": (
        "dflash2",
        {
            "layers": ("sliding_attention", "full_attention"),
            "conv_kernel_size": 3,
            "conv_group_size": 8,
            "selector_rank": 6,
            "selector_top_k": 4,
        },
    ),
}


@pytest.mark.parametrize("case", SPECULATORS)
def test_speculators_rows_and_logits(params, tmp_path, monkeypatch, case):
    """TAP.1: ids are inputs of layers. VOC.1: the head is over the reduced vocabulary. CKP.1: drafts come from the rows
    that the library trains for them."""
    kind, more = SPECULATORS[case]
    model = ref.speculator(kind, **more)
    taps, ids, hidden, logits = ref.speculator_rows(model, target(), monkeypatch)
    loaded, found = ref.attach(params, ref.save(model, tmp_path / "d"))
    assert (found.format, found.made_for) == ("speculators", "someone/target")
    assert found.cfg.taps == (1, 2)
    assert found.cfg.draft_vocab == more.get("draft_vocab")
    first = found.cfg.first
    assert first == ref.first_row(model, monkeypatch)
    for i, anchor in enumerate((2, 11)):
        ours = ref.Block(loaded).run(taps[:anchor], int(ids[anchor]), 5 - first)
        ref.close(ours[0], hidden[i, first:])
        ref.close(ours[1], logits[i, first:])


def generated(model, teacher, prompt, budget, monkeypatch):
    """Tokens and emitted counts per round of the package's own loop."""
    monkeypatch.setattr(reference, "_cuda_time", lambda: 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the package passes the cache by its old name
        out = reference.dflash_generate(
            model, teacher, torch.tensor([prompt]), budget, None, 0.0, return_stats=True
        )
    return out.output_ids[0, len(prompt) :].tolist(), out.acceptance_lengths


def our_counts(params, prompt, budget, **options):
    """Tokens and emitted counts per round of ours."""
    call = calls.plan(params, [prompt], max_new_tokens=budget, ignore_eos=True, **options)
    jobs = list(loop.serve(*call.engines(), call.jobs, call.drive))
    return jobs[-1].tokens, [r[2] for r in jobs[-1].rounds]


#: With so few ids a random drafter is right now and then, and counts mean something.
FEW = 4


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return ref.load_target(target(FEW), tmp_path_factory.mktemp("few"))


PROMPT, BUDGET = [1, 2, 0, 1, 3], 60


def check_generation(few, folder, model, monkeypatch, **settings):
    """Tokens and counts of both loops; the last round, which the package shortens, apart."""
    loaded, found = ref.attach(few, ref.save(model, folder), **settings)
    theirs = generated(model, target(FEW), PROMPT, BUDGET, monkeypatch)
    ours = our_counts(loaded, PROMPT, BUDGET)
    assert ours[0] == theirs[0]
    assert ours[1][:-1] == theirs[1][: len(ours[1]) - 1]
    assert sum(n > 1 for n in ours[1]) >= 8
    return found, ours[1]


def test_generation_accepts_the_same_counts(few, tmp_path, monkeypatch):
    """PEER.9: anchor, masks, positions and context are the package's, round after round."""
    check_generation(few, tmp_path / "d", drafter("sliding", vocab=FEW, seed=5), monkeypatch)


@pytest.mark.long
def test_accepted_counts_show_faults(few, tmp_path, monkeypatch):
    """CKP.1: the comparison notices a wrong layout, a tap off by one and another mask id."""
    model = drafter("sliding", vocab=FEW, seed=5)
    found, right = check_generation(few, tmp_path / "d", model, monkeypatch)
    for change in ({"layout": "shift"}, {"taps": tuple(t - 1 for t in found.cfg.taps)}, {"mask_id": 0}):
        wrong, _ = ref.attach(few, tmp_path / "d", k=4, **change)
        assert our_counts(wrong, PROMPT, BUDGET)[1] != right


@pytest.mark.long
def test_dflash2_generation_accepts_the_same_counts(few, tmp_path, monkeypatch):
    model = drafter("full", "DFlash2DraftModel", FEW, seed=2, **{**DFLASH2, "selector_top_k": 3})
    check_generation(few, tmp_path / "d", model, monkeypatch)


def test_every_round_of_a_corrupted_oracle(params, tmp_path, monkeypatch):
    """KVR.3, KVR.4: with drafts right up to a random place, every block pass equals the package's cached one."""
    model, prompt, budget = drafter("sliding", seed=8), [5, 9, 33, 2, 60, 11, 4], 70
    loaded, _ = ref.attach(params, ref.save(model, tmp_path / "d"))
    with torch.no_grad():
        ids = torch.tensor([prompt])
        truth = target().generate(ids, do_sample=False, max_new_tokens=budget + 8, eos_token_id=None)
    truth, rng = truth[0].tolist(), np.random.default_rng(0)
    passes, proposed, forward = [], [], model.forward

    def recorded(*args, **kwargs):
        hidden = forward(*args, **kwargs)
        start = int(kwargs["position_ids"][0, -hidden.shape[1]])
        drafts = truth[start + 1 : start + 5]
        for i in range(int(rng.integers(0, 5)), 4):
            drafts[i] = (drafts[i] + 1) % ref.VOCAB
        passes.append(hidden[0, 1:].clone())
        proposed.append(drafts)
        return hidden

    def told(hidden, head):
        drafts = torch.tensor(proposed[-1][: hidden.shape[1]])
        return torch.nn.functional.one_hot(drafts, ref.VOCAB).float()[None]

    monkeypatch.setattr(model, "forward", recorded)
    monkeypatch.setattr(model, "compute_logits", told)
    tokens, emitted = generated(model, target(), prompt, budget, monkeypatch)
    assert tokens == truth[len(prompt) : len(prompt) + budget]
    assert set(emitted) == {1, 2, 3, 4, 5}
    replay(loaded, prompt, budget, proposed[:-1], passes, emitted)


def replay(loaded, prompt, budget, proposed, passes, emitted):
    """Our rounds with the same drafts: the same counts, and the same hidden rows before each."""
    block, pair = ref.Block(loaded), loaded.meta.pair
    weights = (loaded.target, loaded.drafter)
    state = specjax.start(loaded, [prompt], max_new_tokens=budget, ignore_eos=True)

    @jax.jit
    def step(state, drafts):
        ctx = ref.context(0, 1)
        anchor = state.tokens[0, state.length[0] - 1]
        ctx = dataclasses.replace(ctx, length=state.length, anchor=anchor[None])
        rows = block.module.drafting_rows(block.p, block.shared, block.cfg, 4, state.drafter, ctx)
        proposal = specjax.Proposal(drafts, np.array([4], np.int32))
        state, verdict, _ = rnd.verify(pair, weights, state, proposal)
        return state, verdict.emitted[0], rows[0]

    for drafts, hidden, count in zip(proposed, passes, emitted, strict=False):
        if len(hidden) < 4:  # the reference shortens its last block
            break
        state, n, rows = step(state, np.array([drafts], np.int32))
        ref.close(rows, hidden)
        assert int(n) == count


def test_transformers_candidate_generator(few, tmp_path, monkeypatch):
    """Tokens and matches of ``generate(speculation_type="dflash")``, with a sliding layer."""
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=ref.WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        block_size=5,
        mask_token_id=FEW - 1,
        target_layer_ids=TAPS,
    )
    model = ref.lively(transformers.MuseGlimmerAssistantModel(config), 11)
    loaded, found = ref.attach(few, ref.save(model, tmp_path / "d"))
    assert (found.format, found.cfg.body.windows) == ("transformers", (7, None))
    matches, generator = [], transformers.generation.DFlashTokenCandidateGenerator

    def note(self, input_ids, scores, num_matches):
        matches.append(int(num_matches))

    monkeypatch.setattr(generator, "update_candidate_strategy", note)
    with torch.no_grad():
        out = target(FEW).generate(
            torch.tensor([PROMPT]),
            assistant_model=model,
            speculation_type="dflash",
            do_sample=False,
            max_new_tokens=BUDGET,
            eos_token_id=None,
            attention_mask=torch.ones(1, 5, dtype=torch.long),
            pad_token_id=0,
        )
    ours = our_counts(loaded, PROMPT, BUDGET)
    assert ours[0] == out[0, len(PROMPT) :].tolist()
    assert ours[1][:-1] == [n + 1 for n in matches[1 : len(ours[1])]]  # its first call drafts nothing
    assert sum(n > 1 for n in ours[1]) >= 6
