"""Drafters with Gemma 4 layers in DeepSpec's layout: files of random weights, and their networks written down a second
time in float64 numpy, straight from the published tensors and config.

Nothing is cached: every call computes all rows. ``faults`` are misreadings of a file, to see that the tests notice.
"""

from typing import Any

import numpy as np
from eagle3_reference import rms, softmax

WIDTH, VOCAB, LAYERS, MASK = 32, 24, 3, 4
#: A target's config as drafters copy it: heads of full-attention layers differ in number and size.
TARGET: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 40,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_global_key_value_heads": 1, "global_head_dim": 16, "attention_k_eq_v": True, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256, "sliding_window": 6, "final_logit_softcapping": 4.0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "tie_word_embeddings": False, "use_bidirectional_attention": None, "enable_moe_block": False,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 100.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    },
}  # fmt: skip
EAGLE3 = {
    **TARGET, "architectures": ["Gemma4Eagle3Model"], "num_hidden_layers": 1, "layer_types": ["full_attention"],
    "target_layer_ids": [-1, 1, 2], "num_target_layers": LAYERS, "ttt_length": 7, "step_loss_decay": 0.8,
    "draft_num_hidden_layers": 1, "target_model_name_or_path": "google/target",
}  # fmt: skip
DSPARK = {
    **TARGET, "architectures": ["Gemma4DSparkModel"], "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2,
    "target_layer_ids": [0, 2], "num_target_layers": LAYERS, "block_size": 4, "mask_token_id": MASK,
    "num_anchors": 512, "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
#: One projection for keys and values, or two.
MERGED: dict[str, Any] = {}
APART = {"attention_k_eq_v": False}


def geometry(hf: dict[str, Any]) -> tuple[int, int, int]:
    """(query heads, key/value heads, channels of a head)."""
    kv = hf["num_global_key_value_heads"] if hf["attention_k_eq_v"] else hf["num_key_value_heads"]
    return hf["num_attention_heads"], kv, hf["global_head_dim"]


def tensors(hf: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under the names and in the shapes of a published file."""
    rng = np.random.default_rng(seed)
    matrix = lambda n, m: rng.standard_normal((n, m)) / m**0.5  # noqa: E731
    vector = lambda n: 1 + 0.3 * rng.standard_normal(n)  # noqa: E731
    (h, g, c), f, eagle = geometry(hf), hf["intermediate_size"], "block_size" not in hf
    out = {
        "embed_tokens.weight": 0.05 * rng.standard_normal((VOCAB, WIDTH)),
        "fc.weight": matrix(WIDTH, len(hf["target_layer_ids"]) * WIDTH),
        "norm.weight": vector(WIDTH),
        "lm_head.weight": 6 * matrix(VOCAB, WIDTH),
        "layers.0.hidden_norm.weight" if eagle else "hidden_norm.weight": vector(WIDTH),
    }
    for i in range(hf["num_hidden_layers"]):
        p, wide = f"layers.{i}.", 2 * WIDTH if eagle and i == 0 else WIDTH
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            out[f"{p}{name}_layernorm.weight"] = vector(WIDTH)
        out[p + "layer_scalar"] = 0.5 + rng.random(1)
        out |= {f"{p}self_attn.{part}_norm.weight": vector(c) for part in "qk"}
        out[p + "self_attn.q_proj.weight"] = matrix(h * c, wide)
        out[p + "self_attn.k_proj.weight"] = matrix(g * c, wide)
        out[p + "self_attn.o_proj.weight"] = matrix(WIDTH, h * c)
        if not hf["attention_k_eq_v"]:
            out[p + "self_attn.v_proj.weight"] = matrix(g * c, wide)
        out |= {f"{p}mlp.{part}_proj.weight": matrix(f, WIDTH) for part in ("gate", "up")}
        out[p + "mlp.down_proj.weight"] = matrix(WIDTH, f)
    if hf.get("markov_rank"):
        r = hf["markov_rank"]
        out |= {"markov_head.markov_w1.weight": rng.standard_normal((VOCAB, r))}
        out |= {"markov_head.markov_w2.weight": matrix(VOCAB, r)}
        out |= {"confidence_head.proj.weight": matrix(1, WIDTH + r), "confidence_head.proj.bias": np.ones(1)}
    return {name: x.astype(np.float32) for name, x in out.items()}


FAULTS = (
    "score scale",
    "whole rope",
    "values as they are",
    "no cap",
    "raw embedding",
    "no scalar",
    "another gelu",
    "norm before",
)


class Slow:
    """The network of one file."""

    def __init__(self, arrays: dict[str, np.ndarray], hf: dict[str, Any], *faults: str):
        self.t = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
        self.hf, self.faults = hf, faults

    def norm(self, x, name: str):
        return rms(x, self.t[name + ".weight"], self.hf["rms_norm_eps"])

    def linear(self, x, name: str):
        return x @ self.t[name + ".weight"].T

    def turn(self, x, pos):
        """Rope of rows [N heads C]: the quickest quarter of the pairs of a whole head turns."""
        c, rope = x.shape[-1], self.hf["rope_parameters"]["full_attention"]
        share = 1.0 if "whole rope" in self.faults else rope["partial_rotary_factor"]
        speed = rope["rope_theta"] ** (-2 * np.arange(c // 2) / c)
        speed[int(share * c / 2) :] = 0
        angle = pos[:, None, None] * speed
        a, b = np.split(x, 2, -1)
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
        )

    def keys_values(self, p: str, u, pos):
        g, c = geometry(self.hf)[1:]
        raw = self.linear(u, p + "self_attn.k_proj").reshape(-1, g, c)
        v = raw if self.hf["attention_k_eq_v"] else self.linear(u, p + "self_attn.v_proj").reshape(-1, g, c)
        if "values as they are" not in self.faults:
            v = rms(v, 1.0, self.hf["rms_norm_eps"])
        return self.turn(self.norm(raw, p + "self_attn.k_norm"), pos), v

    def layer(self, p: str, x, u, pos, seen, before=None):
        """Rows [N D] after one layer. ``u``: what attention reads; ``seen`` [N S]; ``before``: keys and values of
        other rows, which come first."""
        h, g, c = geometry(self.hf)
        q = self.turn(
            self.norm(self.linear(u, p + "self_attn.q_proj").reshape(-1, h, c), p + "self_attn.q_norm"), pos
        )
        k, v = self.keys_values(p, u, pos)
        if before is not None:
            k, v = (np.concatenate(pair) for pair in zip(before, (k, v), strict=True))
        scores = np.einsum("nhc,shc->hns", q, np.repeat(k, h // g, 1))
        scores = scores / c**0.5 if "score scale" in self.faults else scores
        mixed = np.einsum("hns,shc->nhc", softmax(np.where(seen, scores, -np.inf)), np.repeat(v, h // g, 1))
        added = self.linear(mixed.reshape(len(u), -1), p + "self_attn.o_proj")
        if "norm before" in self.faults:  # as in a layer without norms afterwards
            x = x + added
            y = self.norm(x, p + "post_attention_layernorm")
        else:
            x = x + self.norm(added, p + "post_attention_layernorm")
            y = self.norm(x, p + "pre_feedforward_layernorm")
        y = self.linear(
            self.gelu(self.linear(y, p + "mlp.gate_proj")) * self.linear(y, p + "mlp.up_proj"),
            p + "mlp.down_proj",
        )
        x = x + self.norm(y, p + "post_feedforward_layernorm")
        return x if "no scalar" in self.faults else x * self.t[p + "layer_scalar"]

    def gelu(self, x):
        if "another gelu" in self.faults:  # the sigmoid form, further off than the tanh form
            return x / (1 + np.exp(-1.702 * x))
        return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))

    def embed(self, tokens):
        scale = 1.0 if "raw embedding" in self.faults else WIDTH**0.5
        return self.t["embed_tokens.weight"][np.asarray(tokens)] * scale

    def logits(self, hidden):
        out, cap = self.linear(hidden, "lm_head"), self.hf["final_logit_softcapping"]
        return out if "no cap" in self.faults or cap is None else cap * np.tanh(out / cap)

    def eagle(self, features, tokens):
        """(logits, states) [N ...] of rows: features [N D], each with the token after its position."""
        n, p = len(features), "layers.0."
        normed = self.norm(features, p + "hidden_norm")
        u = np.concatenate([self.norm(self.embed(tokens), p + "input_layernorm"), normed], -1)
        out = self.layer(p, features, u, np.arange(n), np.tril(np.ones((n, n), bool)))
        return self.logits(self.norm(out, "norm")), out

    def eagle_chain(self, taps, tokens, drafts):
        """Logits [K V] that the drafts of a round were chosen by, and the state before the first."""
        rows, tokens, seen = np.concatenate(taps, -1) @ self.t["fc.weight"].T, list(tokens), []
        first = None
        for draft in drafts:
            logits, states = self.eagle(rows, tokens)
            first = states[-1] if first is None else first
            seen.append(logits[-1])
            rows, tokens = np.concatenate([rows, states[-1:]]), [*tokens, draft]
        return np.stack(seen), first

    def block(self, taps, anchor):
        """(logits, hidden) [N ...] of a block after the positions of ``taps``."""
        hf, s = self.hf, len(taps[0])
        n = hf["block_size"]
        fused = self.norm(np.concatenate(taps, -1) @ self.t["fc.weight"].T, "hidden_norm")
        x = self.embed([anchor] + [hf["mask_token_id"]] * (n - 1))
        for i in range(hf["num_hidden_layers"]):
            p = f"layers.{i}."
            context = self.keys_values(p, fused, np.arange(s))
            u = self.norm(x, p + "input_layernorm")
            x = self.layer(p, x, u, s + np.arange(n), np.ones((n, s + n), bool), context)
        hidden = self.norm(x, "norm")
        return self.logits(hidden), hidden

    def block_drafts(self, taps, anchor, drafts):
        """(logits, chances) of the drafts of a round: the correction is added to capped logits."""
        logits, hidden = self.block(taps, anchor)
        if "markov_head.markov_w1.weight" not in self.t:
            return logits, None
        before = self.t["markov_head.markov_w1.weight"][[anchor, *drafts[:-1]]]
        sure = self.linear(np.concatenate([hidden, before], -1), "confidence_head.proj")[:, 0] + 1
        return logits + self.linear(before, "markov_head.markov_w2"), 1 / (1 + np.exp(-sure))
