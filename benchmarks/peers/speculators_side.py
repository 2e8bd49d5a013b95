"""Training as the speculators package does it: its models, collation, losses, optimiser and step.

Its step is written out in a method of its trainer, which reads from its own data loader; :class:`Side` does the same in
the same order. What is left out is to its favour: no timer, no progress bar, no reading of metrics after every step.
"""

import importlib.machinery
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: Packages that its modules import for reading data sets and asking a server, which is not done here.
_UNUSED = ("datasets", "openai", "openai.types", "openai.types.chat", "openai.types.completion")


def import_package() -> None:
    """Import what is used of it, with empty modules in place of missing packages that are not."""
    made = []
    for name in _UNUSED:
        try:
            __import__(name)
        except ImportError:
            sys.modules[name] = _empty(name)
            made.append(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import speculators.models.dflash.core
        import speculators.models.eagle3.core
        import speculators.train.data
        import speculators.train.optimizers  # noqa: F401
    for name in made:
        del sys.modules[name]


def _empty(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []

    def anything(attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return type(attribute, (Exception,), {})

    module.__getattr__ = anything
    return module


def transformer(kind: str, target: dict[str, Any], layers: int, attention: str) -> Any:
    """Config of a drafter's layers, of the target's sizes."""
    import transformers

    keys = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    config = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind](
        **{key: target[key] for key in keys},
        head_dim=target["hidden_size"] // target["num_attention_heads"],
        num_hidden_layers=layers,
        max_position_embeddings=target["max_position_embeddings"],
        tie_word_embeddings=False,
    )
    config._attn_implementation = attention
    return config


def build(case: Any, target: dict[str, Any], table: np.ndarray, ids: np.ndarray, attention: str) -> Any:
    """A model as its trainer begins with it: random layers, embedding and heads of the target. ``table``: both of
    these [V D]; ``ids``: the draft vocabulary, or all."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    common = {
        "draft_vocab_size": len(ids),
        "speculators_config": SpeculatorsConfig(
            algorithm=case.method,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=7)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="made/for", architectures=["LlamaForCausalLM"]),
        ),
    }
    torch.manual_seed(0)
    if case.method == "eagle3":
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=transformer("llama", target, 1, attention),
            norm_before_fc=True, norm_output=True, eagle_aux_hidden_state_layer_ids=list(case.taps), **common,
        )  # fmt: skip
        model = Eagle3DraftModel(config)
    else:
        config = DFlashSpeculatorConfig(
            transformer_layer_config=transformer("qwen3", target, case.layers, attention),
            block_size=8, aux_hidden_state_layer_ids=list(case.taps), mask_token_id=case.mask_id, **common,
        )  # fmt: skip
        model = DFlashDraftModel(config)
    with torch.no_grad():
        rows = torch.tensor(table)
        model.embed_tokens.weight.copy_(rows)
        model.lm_head.weight.copy_(rows[torch.tensor(ids)])
        model.verifier_lm_head.weight.copy_(rows[torch.tensor(ids)])
        model.verifier_norm.weight.fill_(case.sharpness)
    if len(ids) < len(table):
        marks = torch.zeros(len(table), dtype=torch.bool)
        marks[torch.tensor(ids)] = True
        model.load_vocab_mappings(marks, torch.tensor(ids - np.arange(len(ids))))
    return model.float()


def saved(model: Any) -> Path:
    """A folder of the model's weights as the package writes them."""
    folder = Path(tempfile.mkdtemp())
    model.save_pretrained(folder)
    return folder


class Side:
    """A model in training. ``loss``: names of its loss terms with their factors."""

    def __init__(self, case: Any, model: Any, documents: list[list[dict[str, np.ndarray]]], args: Any):
        from speculators.losses import resolve_loss_config
        from speculators.train.data import CollateFn
        from speculators.train.optimizers import build_optimizers
        from transformers import get_cosine_schedule_with_warmup

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch._dynamo.config.recompile_limit = (
            64  # its steps differ in shape, and eight of them would end compilation
        )
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        fused = "fused" if self.device == "cuda" else "eager"
        loss = {name: (resolve_loss_config(name, fused)[name][0], f) for name, f in case.their_terms.items()}
        self.call = {"loss_config": loss} | case.their_call
        shift = None
        if case.method == "eagle3":
            from speculators.models.eagle3.data import shift_batch as shift
        collate = CollateFn(args.rows * args.length, model.hidden_size, len(case.taps), self.dtype, shift)
        self.batches = [self._placed(collate([self._sample(d) for d in batch])) for batch in documents]
        self.model = model.to(self.device).train()
        config = types.SimpleNamespace(optimizer="adamw", lr=args.learning_rate, weight_decay=0.01)
        (self.optimiser,) = build_optimizers(self.model, config)
        self.schedule = get_cosine_schedule_with_warmup(self.optimiser, args.warmup, args.total)

    def _sample(self, d: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """A document as the package's data set gives it."""
        n = len(d["tokens"])
        return {
            "hidden_states": torch.tensor(d["taps"]),
            "input_ids": torch.tensor(d["tokens"]).long(),
            "verifier_last_hidden_states": torch.tensor(d["hidden"]),
            "loss_mask": torch.tensor(d["trained"]),
            "lengths": torch.tensor([n]),
            "position_ids": torch.arange(n),
        }

    def _placed(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}

    def step(self, i: int) -> torch.Tensor:
        """One step of its trainer; the loss, not waited for."""
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            _, loss, _ = self.model(**self.batches[i % len(self.batches)], **self.call)
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.schedule.step()
        return loss.detach()

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def gib(self) -> float | None:
        """Most memory its tensors took."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else None
