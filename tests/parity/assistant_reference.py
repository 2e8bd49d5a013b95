"""Tiny random Gemma 4 assistants of transformers, and what its candidate generator drafts with them."""

import functools

import torch
import transformers
from parity import gemma_reference
from transformers.generation.candidate_generator import (
    SinglePositionMultiTokenCandidateGenerator as Generator,
)

#: Of one teacher each: keys that are values, and layers that share keys.
TEACHERS = ("gemma4_dense", "gemma4_e2b")
CLUSTERS = {"use_ordered_embeddings": True, "centroid_intermediate_top_k": 3}
K = 4


@functools.cache
def teacher(name: str = "gemma4_dense", vocab: int = 128, seed: int = 0):
    """The target; one of few tokens has attention that counts, else its text falls into a short cycle."""
    more = {} if vocab == 128 else {"vocab_size": vocab, "eos_token_id": None, "tie_word_embeddings": False}
    if vocab != 128:
        more["vocab_size_per_layer_input"] = vocab
    model = gemma_reference.build(name, seed, **more)
    if vocab != 128:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_norm.weight.mul_(3)
            model.lm_head.weight.mul_(3)
    return model


#: Settings that an assistant has in common with its target.
ALIKE = (
    "num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v", "head_dim",
    "global_head_dim", "sliding_window", "rope_parameters", "max_position_embeddings",
)  # fmt: skip


def assistant(name: str = "gemma4_dense", vocab: int = 128, seed: int = 1, unified=False, text=(), **more):
    """A random assistant for a target: two sliding layers and a full one."""
    theirs, stem = gemma_reference.MODELS[name][1], "Gemma4UnifiedAssistant" if unified else "Gemma4Assistant"
    inner = getattr(transformers, "Gemma4UnifiedTextConfig" if unified else "Gemma4TextConfig")(
        vocab_size=vocab,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        layer_types=["sliding_attention"] * 2 + ["full_attention"],
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        **{key: theirs[key] for key in ALIKE} | dict(text),
    )
    config = getattr(transformers, f"{stem}Config")(
        text_config=inner, backbone_hidden_size=theirs["hidden_size"], **more
    )
    inner._attn_implementation = config._attn_implementation = "eager"
    made = getattr(transformers, f"{stem}ForCausalLM")(config).float().eval()
    gemma_reference.fill(made, seed)
    with torch.no_grad():
        made.lm_head.weight.mul_(3)  # logits of about one
        if made.masked_embedding is not None:
            rng = torch.Generator().manual_seed(seed)
            made.masked_embedding.token_ordering.copy_(torch.randperm(vocab, generator=rng))
    made.generation_config.num_assistant_tokens = K
    return made


def fresh(model, ids):
    """The target's states and shared keys for all positions before the last id, in one pass."""
    with torch.no_grad():
        return model(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False)


def greedy(model, prompt, budget: int) -> list[int]:
    """The prompt and what the target alone makes of it."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        mask = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None}
        out = model.generate(ids, do_sample=False, max_new_tokens=budget, **mask)
    return out[0].tolist()


def drafts(model, made, ids: list[int]):
    """(tokens [K], logits [K V]) that the generator gives for a text."""
    ids = torch.tensor([ids])
    config = transformers.GenerationConfig(max_length=1000)
    generator = Generator(made, model.get_input_embeddings(), config)
    kwargs = {"attention_mask": torch.ones_like(ids)}
    out, logits = generator.get_candidates(
        ids, kwargs, fresh(model, ids), is_first_iteration=False, n_last_matches=0
    )
    return out[0, ids.shape[1] :].tolist(), logits[0]


def generate(model, made, prompt, budget, monkeypatch, *, cached=False, told=None):
    """(tokens, accepted counts per round, logits per round) of ``generate`` with the assistant.

    The generator shows its assistant the keys of rejected drafts. Unless ``cached``, it is given those of a fresh pass
    over the committed text in every round. ``told(text)``: what is proposed instead of the assistant's drafts.
    """
    counts, seen, original = [], [], Generator.get_candidates

    def candidates(self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches):
        counts.append(int(n_last_matches))
        if not (is_first_iteration or cached):
            self.is_main_model_prefill, model_outputs = True, fresh(model, input_ids)
        ids, logits = original(
            self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches
        )
        if logits is not None:
            seen.append(logits[0].clone())
            if told is not None:
                text = input_ids[0].tolist()
                spoken = torch.tensor([told(text)[: logits.shape[1]]])
                ids = torch.cat([input_ids, spoken], 1)
        return ids, logits

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(Generator, "get_candidates", candidates)
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            assistant_model=made,
            do_sample=False,
            max_new_tokens=budget,
            eos_token_id=None,
            pad_token_id=0,
            attention_mask=torch.ones_like(ids),
        )
    return out[0, len(prompt) :].tolist(), counts[2:], seen
