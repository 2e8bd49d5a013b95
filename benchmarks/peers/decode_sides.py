"""Other libraries' decoding of the same weights: transformers with a static cache, the dflash package, flashspec.

Every side has ``run(ids, n)``, which gives the new ids, seconds and the number of rounds. Weights are shared with jax
where the device allows it: a tensor is a view of the array.
"""

import inspect
import time
from typing import Any

import jax
import numpy as np
import torch

from specjax import registry
from specjax.checkpoints.tree import is_spec
from specjax.types import Params

Outcome = tuple[list[int], float, int]


def device() -> str:
    return "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"


def synchronise() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()


def tensor(x: Any) -> torch.Tensor:
    """A jax array as a tensor on the same device."""
    return torch.from_dlpack(x) if device() == "cuda" else torch.from_numpy(np.array(x, np.float32))


def hf_config(cfg: Any, family: str) -> Any:
    """transformers' config of a dense Llama or Qwen3 target."""
    import transformers

    kind = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[family]
    return kind(
        vocab_size=cfg.vocab_size, hidden_size=cfg.hidden_size, intermediate_size=cfg.mlp_size,
        num_hidden_layers=cfg.num_layers, num_attention_heads=cfg.heads, num_key_value_heads=cfg.kv_heads,
        head_dim=cfg.head_dim, max_position_embeddings=cfg.max_positions, rms_norm_eps=cfg.eps,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope.theta}, tie_word_embeddings=cfg.tied,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def model(params: Params) -> Any:
    """The target in transformers, with the same weights."""
    import transformers

    cfg, family = params.meta.target_cfg, params.meta.family
    config = hf_config(cfg, family)
    dtype = (
        torch.float32 if device() == "cpu" else getattr(torch, str(jax.tree.leaves(params.target)[0].dtype))
    )
    with torch.device(device()):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    specs = jax.tree.leaves(registry.target(family).abstract(cfg), is_leaf=is_spec)
    own, given = made.state_dict(), {}
    for spec, x in zip(specs, jax.tree.leaves(params.target), strict=True):
        (name,) = spec.names
        given[name] = tensor(x).reshape(own[name].shape)
    if cfg.tied:
        given["lm_head.weight"] = given["model.embed_tokens.weight"]
    missing = made.load_state_dict(given, strict=False, assign=True)
    assert not missing.missing_keys, missing
    assert not missing.unexpected_keys, missing
    made.tie_weights()
    made.generation_config.eos_token_id = None
    return made.requires_grad_(False)


class Static:
    """transformers with a static cache, greedy, one compiled forward pass per width."""

    def __init__(self, made: Any, length: int, mode: str = "reduce-overhead"):
        self.model, self.length = made, length
        compiled = device() == "cuda"
        self.forward = torch.compile(made.forward, mode=mode) if compiled else made.forward
        self._cache: Any = None
        named = inspect.signature(type(made).forward).parameters
        self._takes = "cache" if "cache" in named else "past_key_values"  # the name has changed

    def prefill(self, ids: list[int]) -> torch.Tensor:
        """The prompt in the cache, and the next token. The cache stays the same arrays: graphs are bound to them."""
        from transformers import StaticCache

        if self._cache is None:
            self._cache = StaticCache(config=self.model.config, max_cache_len=self.length)
        else:
            self._cache.reset()
        x = torch.tensor([ids], device=device())
        out = self.model(
            x, use_cache=True, **{self._takes: self._cache}, position_ids=self._positions(0, len(ids))
        )
        return out.logits[:, -1:].argmax(-1)

    def step(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Logits of a block at ``position`` (of its first token)."""
        if device() == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        at = position + torch.arange(tokens.shape[1], device=device())[None]
        out = self.forward(tokens, position_ids=at, use_cache=True, **{self._takes: self._cache})
        return out.logits

    def __call__(self, ids: list[int], n: int) -> Outcome:
        with torch.inference_mode():
            token, got = self.prefill(ids), []
            synchronise()
            began = time.perf_counter()
            for i in range(n):
                got.append(token.clone())
                if i < n - 1:
                    position = torch.tensor([[len(ids) + i]], device=device())
                    token = self.step(token, position)[:, -1:].argmax(-1)
            out = torch.cat(got, 1)[0].tolist()
        return out, time.perf_counter() - began, n - 1

    def width(self, ids: list[int], w: int, turns: int) -> float:
        """Milliseconds of a block of ``w`` tokens after the prompt, the cache put back each time."""
        with torch.inference_mode():
            self.prefill(ids)
            tokens = torch.randint(0, 100, (1, w), device=device())
            position = torch.tensor([[len(ids)]], device=device())
            lengths = [x.cumulative_length for x in self._cache.layers if hasattr(x, "cumulative_length")]
            took = 0.0
            for i in range(-3, turns):
                for length in lengths:
                    length.fill_(len(ids)) if torch.is_tensor(length) else None
                synchronise()
                began = time.perf_counter()
                self.step(tokens, position)
                synchronise()
                took += time.perf_counter() - began if i >= 0 else 0.0
        return 1e3 * took / turns

    @staticmethod
    def _positions(start: int, n: int) -> torch.Tensor:
        return torch.arange(start, start + n, device=device())[None]


class Generate:
    """transformers' own ``generate``."""

    def __init__(self, made: Any, **options: Any):
        self.model, self.options = made, options

    def __call__(self, ids: list[int], n: int) -> Outcome:
        x = torch.tensor([ids], device=device())
        synchronise()
        began = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                x, attention_mask=torch.ones_like(x), do_sample=False, max_new_tokens=n, min_new_tokens=n,
                **self.options,
            )  # fmt: skip
        new = out[0, len(ids) :].tolist()
        return new, time.perf_counter() - began, n - 1


class DFlash:
    """The dflash package's loop with a drafter of random weights; ``compiled``: its two forward passes are."""

    def __init__(self, made: Any, block: int, layers: int, compiled: bool):
        from dflash.model import DFlashDraftModel, build_target_layer_ids
        from transformers import Qwen3Config

        c = made.config
        config = Qwen3Config(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
            num_hidden_layers=layers, num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim,
            max_position_embeddings=c.max_position_embeddings, tie_word_embeddings=False,
        )  # fmt: skip
        taps = build_target_layer_ids(c.num_hidden_layers, layers)
        config.num_target_layers, config.block_size = c.num_hidden_layers, block
        config.dflash_config = {
            "mask_token_id": c.vocab_size - 1,
            "target_layer_ids": taps,
            "block_size": block,
        }
        config.layer_types = ["full_attention"] * layers
        with torch.device(device()):
            drafter = DFlashDraftModel(config).eval().to(next(made.parameters()).dtype)
        self.target, self.drafter = made, drafter
        self.plain = self.forwards = (made.forward, drafter.forward)
        if compiled and device() == "cuda":
            self.forwards = tuple(torch.compile(forward, dynamic=True) for forward in self.plain)

    def __call__(self, ids: list[int], n: int) -> Outcome:
        from dflash.model import dflash_generate

        rounds = 0

        def counted(*args: Any, **options: Any) -> Any:
            nonlocal rounds
            rounds += 1
            return self.forwards[1](*args, **options)

        self.target.forward, self.drafter.forward = self.forwards[0], counted
        try:
            synchronise()
            began = time.perf_counter()
            out = dflash_generate(
                self.drafter, self.target, torch.tensor([ids], device=device()), n, None, temperature=0.0
            )
            new = out[0, len(ids) :].tolist()
            return new, time.perf_counter() - began, rounds
        finally:
            self.target.forward, self.drafter.forward = self.plain


class FlashSpec:
    """flashspec's prompt lookup, on its compiled path on a GPU."""

    def __init__(self, made: Any, gamma: int, length: int):
        from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
        from flashspec.engine import NgramDrafter, TargetModel
        from flashspec.utils.config import BanditConfig

        where = torch.device(device())
        target = TargetModel("target", where, next(made.parameters()).dtype, model=made)
        config = FlashSpecConfig(
            device=str(where), drafter_strategy="bandit", bandit=BanditConfig(n_arms=1),
            compile="auto" if device() == "cuda" else False, compile_max_cache_len=length,
            sampling=SamplingConfig(temperature=0.0, gamma=gamma),
        )  # fmt: skip
        self.engine = SpeculativeEngine(config, [NgramDrafter()], target)

    def __call__(self, ids: list[int], n: int) -> Outcome:
        x = torch.tensor([ids], device=device())
        synchronise()
        began = time.perf_counter()
        out = self.engine.generate(x, max_new_tokens=n)
        new = out.output_ids[0, : out.n_tokens_generated].tolist()
        return new, time.perf_counter() - began, len(out.arm_steps)
