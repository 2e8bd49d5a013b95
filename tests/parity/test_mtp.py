"""MTP layers read from a target's own files give what transformers' ``MtpModel`` gives on them: logits of every step,
and the tokens and accepted counts of ``generate(use_mtp=True)``.

transformers 5.24 has the module for DeepSeek-V3 only; built on a Qwen3.5 model it is made of that model's own layer
and norms, and its loader reads the same ``mtp.*`` names.
"""

import functools
import json

import jax
import jax.numpy as jnp
import mtp_files
import numpy as np
import pytest
import torch
import transformers
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

import specjax
from specjax import registry
from specjax.drafters import mtp, mtp_model as model, serial
from specjax.types import AbsorbIn

#: What the reference does itself while it loads and generates.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

ATOL = 1e-4  # float32, logits of about +-5
LENGTH, STEPS = 11, 3
TOKENS = np.random.default_rng(3).integers(0, mtp_files.VOCAB, LENGTH + STEPS + 1)
CLASSES = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def main_model(folder):
    """The target in transformers, told that it has one MTP layer and where the tensors are."""
    hf = json.loads((folder / "config.json").read_text())
    found = getattr(transformers, CLASSES[hf["model_type"]]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    found.config.num_mtp_layers = 1
    if hasattr(found.config, "layer_types") and found.config.layer_types:
        found.config.mtp_layer_types = ["full_attention"]
    layers = hf["num_hidden_layers"]
    found._keys_to_ignore_on_load_unexpected = [r"^mtp.*", rf"model\.layers\.{layers}.*", r"^model\.mtp.*"]
    return found.eval()


@functools.cache
def loaded(folder, k: int = STEPS):
    config = {"k": k, "drafting": "greedy"}
    return specjax.load(folder, drafter="mtp", dtype="float32", drafter_config=config)


@torch.no_grad()
def reference(folder, hidden: np.ndarray) -> np.ndarray:
    """Logits [STEPS LENGTH V]: row p pairs state p with token p + 1, and goes on with its own state and the next."""
    main = main_model(folder)
    heads = MtpModel.from_pretrained(main)
    out = np.zeros((STEPS, LENGTH, mtp_files.VOCAB), np.float32)
    for p in range(LENGTH):
        cache = MtpCache(config=main.config.get_mtp_config())
        state, ids = torch.tensor(hidden[None, : p + 1]), torch.tensor(TOKENS[None, 1 : p + 2])
        pos = torch.arange(1, p + 2)[None]
        for step in range(STEPS):
            state = heads.forward_layer(0, state, pos, cache, input_ids=ids)[:, -1:]
            out[step, p] = heads._project_to_logits(state)[0, 0].numpy()
            ids, pos = torch.tensor(TOKENS[None, p + 2 + step, None]), torch.tensor([[p + 2 + step]])
    return out


def ours(params, hidden: np.ndarray) -> np.ndarray:
    """The same from cached passes: batch row b absorbs b + 1 pairs and goes on from there."""
    p, cfg, meta = params.drafter, params.meta.drafter_cfg, params.meta
    lent = registry.target(meta.family).shared(params.target, meta.target_cfg)
    every = lambda x: jnp.broadcast_to(jnp.asarray(x), (LENGTH, *np.shape(x)))  # noqa: E731
    keep, ids = jnp.arange(1, LENGTH + 1, dtype=jnp.int32), jnp.asarray(TOKENS, jnp.int32)
    at = every(np.arange(LENGTH, dtype=np.int32))
    block = AbsorbIn(every(ids[:LENGTH]), every(ids[1 : LENGTH + 1]), at, keep, every(hidden), {}, "extend")

    @jax.jit
    def run(p, lent):
        state = mtp.init_state(cfg, LENGTH, LENGTH + STEPS, STEPS + 1, jnp.float32)
        held = mtp.absorb(p, lent, cfg, state, block)
        table, now, cache = model.head(p, lent, cfg), held.feedback, held.cache
        out = [model.logits(table, now)]
        for step in range(1, STEPS):
            place = serial.drafted((keep - 1 + step)[:, None])
            embedded = serial.embed(p.embed, lent.embed, ids[keep + step][:, None], p.norm.dtype)
            now, cache = model.run(p, cfg, embedded, now[:, None], place, cache)
            out.append(model.logits(table, now))
        return jnp.stack(out)

    return np.asarray(run(p, lent))


@pytest.mark.parametrize("kind", ["qwen", "qwen, experts", "deepseek"])  # other names: the same weights
def test_logits_of_transformers(kind, tmp_path):
    """TAP.5, TAP.8, CKP.6: embedding first, norms, gate or latent attention, dense or experts with a shared one; the
    normed state is recycled; nothing is special about position 0."""
    folder = mtp_files.folder(tmp_path / "m", kind)
    hidden = np.random.default_rng(4).standard_normal((LENGTH, 32)).astype(np.float32)
    wanted, got = reference(folder, hidden), ours(loaded(folder), hidden)
    assert np.abs(wanted).max() > 3
    np.testing.assert_allclose(got, wanted, atol=ATOL, rtol=0)


@torch.no_grad()
def generated(folder, prompt: list[int], new: int) -> tuple[list[int], list[int]]:
    """(tokens, accepted drafts per round) of transformers."""
    main, accepted = main_model(folder), []
    original = MTPCandidateGenerator.get_candidates

    def spy(self, *args, n_last_matches=None, is_first_iteration=None, **kwargs):
        if not is_first_iteration:
            accepted.append(n_last_matches)
        return original(
            self, *args, n_last_matches=n_last_matches, is_first_iteration=is_first_iteration, **kwargs
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MTPCandidateGenerator, "get_candidates", spy)
        ids = torch.tensor([prompt])
        options = {"use_mtp": True, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = main.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options)
    return out[0, len(prompt) :].tolist(), [int(n) for n in accepted[1:]]


@jax.jit
def one_round(params, state):
    proposal, state = specjax.draft_step(params, state, k=1)
    state, verdict = specjax.verify_step(params, state, proposal)
    return state, verdict.accepted


def test_tokens_and_accepted_counts_of_transformers(tmp_path):
    """GRD.1, KVR.3: the same text by the same rounds, a draft each, right and wrong ones."""
    folder, new = mtp_files.folder(tmp_path / "m", "deepseek"), 40
    params = loaded(folder, 1)
    for prompt in ([6, 5, 4, 3], [0, 1, 2, 3, 4, 5, 6, 5]):
        tokens, accepted = generated(folder, prompt, new)
        state, mine = specjax.start(params, [prompt], k=1, max_new_tokens=new, ignore_eos=True), []
        for _ in accepted:
            state, kept = one_round(params, state)
            mine.append(int(kept[0]))
        n = int(state.length[0])
        assert state.tokens[0, len(prompt) : n].tolist() == tokens[: n - len(prompt)]
        assert n - len(prompt) > 30
        assert mine[:-1] == accepted[:-1]
        assert {*mine} == {0, 1}
