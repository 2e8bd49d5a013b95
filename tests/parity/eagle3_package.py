"""EAGLE-3 drafters of the speculators package, with random weights."""

import warnings

import numpy as np
import torch

with warnings.catch_warnings():  # what the reference imports is deprecated in torch
    warnings.simplefilter("ignore")
    from speculators.models.eagle3 import core

VOCAB, DRAFT, WIDTH = 96, 40, 32


def build(case: dict, taps=(1, 2, 4), draft: int = DRAFT, **layers):
    """A drafter of the package with no weight at its trivial value."""
    import transformers
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    kind = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[case["body"]]
    shape = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    inner = kind(**shape | layers)
    inner._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=5)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=inner,
        draft_vocab_size=draft,
        norm_before_residual=case["before_residual"],
        norm_before_fc=case["norms"] == "norm_before_fc",
        fc_norm=case["norms"] == "fc_norm",
        norm_output=case["norm_output"],
        eagle_aux_hidden_state_layer_ids=list(taps),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="made/for", architectures=["LlamaForCausalLM"]),
        ),
    )
    found = core.Eagle3DraftModel(config).float().eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in found.parameters():
            p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5 if p.ndim > 1 else 1 + 0.3 * torch.randn_like(p))
        found.lm_head.weight.mul_(3)
    if draft != VOCAB:
        ids = np.sort(np.random.default_rng(3).permutation(VOCAB)[:draft])
        marks = torch.zeros(VOCAB, dtype=torch.bool)
        marks[ids] = True
        found.load_vocab_mappings(marks, torch.tensor(ids - np.arange(draft)))
    return found
