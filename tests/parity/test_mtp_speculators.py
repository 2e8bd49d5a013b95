"""A layer for multi-token prediction in a folder of its own, as the speculators library writes it, on a Llama in GGUF:
its drafts and their accepted counts are those of the library's own layer, fed anew for every draft."""

import functools
import json
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_files
import torch
import transformers

import specjax
from specjax.config import Meta

with warnings.catch_warnings():  # what the reference imports is deprecated in torch
    warnings.simplefilter("ignore")
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

ATOL = 1e-4  # float32, log-probabilities down to about -10
VOCAB, WIDTH, K = 4, 32, 3
PROMPTS = [[3, 1, 0, 1, 1, 2, 2, 1, 3, 0], [2], [2, 1, 0, 3]]
TARGET = tiny_files.config(num_hidden_layers=1, vocab_size=VOCAB, tie_word_embeddings=True)
LAYER = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4},
}  # fmt: skip
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 1,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
#: model_type -> (class of its config, settings of its own, a seed with rounds of every accepted count)
KINDS = {
    "qwen3": (transformers.Qwen3Config, {}, 3),
    "qwen3_5_text": (transformers.models.qwen3_5.configuration_qwen3_5.Qwen3_5TextConfig, DELTA, 5),
}


class Reference:
    """The library's layer behind a Llama of transformers."""

    def __init__(self, kind: str, folder: Path):
        config, more, seed = KINDS[kind]
        verifier = VerifierConfig(name_or_path="someone/target", architectures=["LlamaForCausalLM"])
        proposal = GreedyTokenProposalConfig(speculative_tokens=K)
        whole = MTPSpeculatorConfig(
            transformer_layer_config=config(**LAYER, **more),
            speculators_config=SpeculatorsConfig(
                algorithm="mtp", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
            ),
        )  # fmt: skip
        model = MTPDraftModel(whole).eval()
        torch.manual_seed(seed)
        with torch.no_grad():
            for x in model.mtp_layers.parameters():
                noise = torch.randn_like(x)
                x.copy_(x + 0.3 * noise if x.ndim == 1 else 1.5 * noise / x.shape[-1] ** 0.5)
        model.save_pretrained(folder)
        self.layer, self.rotary = model.mtp_layers[0], model.rotary_emb
        arrays = tiny_files.tensors(TARGET, seed)
        arrays["model.embed_tokens.weight"] *= 0.5
        self.gguf = tiny_files.gguf_file(folder / "target.gguf", TARGET, arrays)
        target = tiny_files.folder(
            folder / "target", TARGET | {"architectures": ["LlamaForCausalLM"]}, arrays
        )
        self.target = transformers.LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, text: list[int], drafts: list[int] | None = None) -> np.ndarray:
        """[K V] behind a committed text: after it, after its first draft, ... Drafts are the likeliest unless given."""
        head = self.target.lm_head.weight
        states = list(self.target.model(torch.tensor([text[:-1]])).last_hidden_state[0])
        tokens, out = list(text[1:]), []
        for step in range(K):
            pos = torch.arange(len(states))[None]
            mask = torch.full((len(states),) * 2, float("-inf")).triu(1)[None, None]
            done = self.layer(
                hidden_states=torch.stack(states)[None],
                token_embeddings=self.target.model.embed_tokens(torch.tensor([tokens])),
                attention_mask=mask,
                position_ids=pos,
                position_embeddings=self.rotary(torch.zeros(1, len(states), WIDTH), pos),
            )
            states.append(done[0, -1])
            out.append((head @ done[0, -1]).numpy())
            tokens.append(int(out[-1].argmax()) if drafts is None else drafts[step])
        return np.stack(out)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    @functools.cache
    def make(kind: str) -> tuple[Reference, str]:
        folder = tmp_path_factory.mktemp("mtp")
        return Reference(kind, folder), str(folder)

    return make


def load(reference: Reference, folder: str, drafting: str) -> specjax.Params:
    wanted = {"method": "mtp", "model": folder, "draft_sample_method": drafting, "num_speculative_tokens": K}
    return specjax.load(reference.gguf, dtype="float32", speculative_config=wanted)


BOTH = ["qwen3", pytest.param("qwen3_5_text", marks=pytest.mark.long)]


@pytest.mark.parametrize("kind", BOTH)
def test_distributions_of_every_draft(kind, case):
    """TAP.5, TAP.8, CKP.6, DST.2: what sampled drafts were drawn from, each after the drafts before it."""
    reference, folder = case(kind)
    params = load(reference, folder, "probabilistic")
    assert params.meta.drafter_cfg.model.head_dim == 16
    state = specjax.start(params, PROMPTS, k=K, temperature=1.0, seed=1, max_new_tokens=8, ignore_eos=True)
    proposal = jax.jit(lambda params, state: specjax.draft_step(params, state, k=K)[0])(params, state)
    for b, length in enumerate(np.asarray(state.length)):
        text, drafts = state.tokens[b, :length].tolist(), proposal.tokens[b].tolist()
        wanted = torch.log_softmax(torch.tensor(reference.logits(text, drafts)), -1).numpy()
        assert np.ptp(wanted) > 3
        np.testing.assert_allclose(np.log(proposal.q[b]), wanted, atol=ATOL, rtol=0)


def accepted(reference: Reference, prompt: list[int], answer: list[int]) -> list[int]:
    """How many of the library's drafts are right in each round; the answer's first token is the prefill's."""
    at, out = 1, []
    while at < len(answer):
        room = len(answer) - at - 1  # the last token is the target's own
        right = reference.logits(prompt + answer[:at]).argmax(-1)[:room] == answer[at : at + min(K, room)]
        out.append(int(np.cumprod(right).sum()))
        at += out[-1] + 1
    return out


@pytest.mark.parametrize("kind", BOTH)
def test_accepted_counts_of_whole_texts(kind, case):
    """GRD.1, KVR.3, MET.2: ids of plain decoding, in the rounds that the library's drafts allow on that text."""
    reference, folder = case(kind)
    options = {"max_new_tokens": 60, "ignore_eos": True, "rows": 2}
    plain = specjax.decode(specjax.load(reference.gguf, dtype="float32"), PROMPTS, **options)
    drafted = specjax.decode(load(reference, folder, "greedy"), PROMPTS, **options)
    assert drafted.tokens == plain.tokens
    counts = [accepted(reference, *pair) for pair in zip(PROMPTS, plain.tokens, strict=True)]
    for right, stats in zip(counts, drafted.stats, strict=True):
        assert (stats.rounds, stats.emitted) == (len(right), 59)
        assert stats.accepted_at == tuple(sum(n > i for n in right) for i in range(K))
    assert {0, 1, 2, 3} <= {n for right in counts for n in right}


def test_settings_survive_saving(case):
    """CKP.7."""
    meta = load(*case("qwen3"), "greedy").meta
    assert Meta.from_json(json.loads(json.dumps(meta.to_json()))) == meta


def test_experts_of_qwen3_are_refused(case, tmp_path):
    """TAP.8: no such layer is published."""
    reference, folder = case("qwen3")
    config = json.loads((Path(folder) / "config.json").read_text())
    config["transformer_layer_config"] |= tiny_files.QWEN3_MOE
    bare = tiny_files.folder(
        tmp_path / "moe", config, {"mtp_layers.0.input_proj.weight": np.ones((WIDTH, 2 * WIDTH))}
    )
    with pytest.raises(ValueError, match=r"of the family 'qwen3_moe'; known: .* dense layers of Qwen3"):
        load(reference, str(bare), "greedy")
