"""DSpark against speculators 0.9: block rows, corrected logits of every kind of head, and confidences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from parity import block_reference as ref

from specjax.drafters import dflash, dspark

CASES = {
    "vanilla": {"markov_head_type": "vanilla"},
    "gated, reduced": {"markov_head_type": "gated", "draft_vocab": 40},
    "rnn, fill": {"markov_head_type": "rnn", "sample_from_anchor": False},
    "plain confidence": {"layers": ("sliding_attention",) * 2, "confidence_head_with_markov": False},
}


@functools.cache
def target():
    return ref.target()


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    return ref.load_target(target(), tmp_path_factory.mktemp("target"))


@functools.partial(jax.jit, static_argnums=(2, 3))
def proposal(p, shared, cfg, k, taps, anchor, temperature, keys):
    """Ours after the features ``taps``, every row with its own key."""
    s, rows = taps.shape[0], keys.shape[0]
    state = dflash.init_state(cfg, rows, s + cfg.rows, cfg.rows, jnp.float32)
    many = jnp.broadcast_to(taps, (rows, *taps.shape))
    pos, keep = jnp.broadcast_to(jnp.arange(s), (rows, s)), jnp.full((rows,), s, jnp.int32)
    state = dflash.inject(p.backbone, cfg, state, many, pos, keep, "extend")
    ctx = ref.context(0, s)
    ctx = ctx.replace(
        anchor=jnp.broadcast_to(anchor, (rows,)),
        length=jnp.full((rows,), s + 1, jnp.int32),
        temperature=temperature,
    )
    return dspark.draft(p, shared, cfg, k, state, ctx, keys)[0]


@pytest.mark.parametrize("case", CASES)
def test_heads_of_speculators(params, tmp_path, monkeypatch, case):
    """Teacher-forced with our drafts, the library gives our q, our greedy choice and our confidences. CKP.1: from the
    rows that it trains for them."""
    more = {"markov_rank": 6, "sample_from_anchor": True, **CASES[case]}
    model = ref.speculator("dspark", **more)
    anchor = 11
    taps, ids, hidden, logits = ref.speculator_rows(model, target(), monkeypatch, (2, anchor))
    loaded, found = ref.attach(params, ref.save(model, tmp_path / "d"))
    cfg = found.cfg
    assert (found.name, cfg.markov.kind) == ("dspark", more.get("markov_head_type", "vanilla"))
    first, k = cfg.first, dspark.max_k(cfg)
    assert first == ref.first_row(model, monkeypatch)
    block = ref.Block(loaded)
    rows, unary = block.run(taps[:anchor], int(ids[anchor]), k)
    ref.close(rows, hidden[1, first:])
    ref.close(unary, logits[1, first:])

    temperature = jnp.array([0.0, 1.0, 0.6])
    got = proposal(
        loaded.drafter,
        block.shared,
        cfg,
        k,
        jnp.asarray(taps[:anchor]),
        jnp.int32(ids[anchor]),
        temperature,
        jax.random.split(jax.random.key(2), 3),
    )
    for b, heat in enumerate(temperature.tolist()):
        tokens = torch.tensor(np.array(got.tokens[b]), dtype=torch.long)
        previous = torch.cat([ids[anchor : anchor + 1], tokens[:-1]])[None]
        with torch.no_grad():
            bias = model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden[1:, first:])
            corrected = (logits[1:, first:] + bias)[0]
            parts = [hidden[1:, first:]]
            if model.config.confidence_head_with_markov:
                parts.append(model.markov_head.prev_embeddings(previous))
            sure = torch.sigmoid(model.confidence_head(torch.cat(parts, -1)))[0]
        if heat:
            ref.close(got.q[b], torch.softmax(corrected / heat, -1))
        else:
            best = corrected.argmax(-1) * (2 if cfg.draft_vocab else 1)
            assert tokens.tolist() == best.tolist()
        ref.close(got.confidence[b], sure)
    assert got.point.tolist() == [True, False, False]
