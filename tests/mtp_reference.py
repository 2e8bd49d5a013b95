"""Qwen's layer for multi-token prediction written down a second time: float64 numpy, one row at a time, straight from
the tensors of a file.

Row p is the pair (state of position p, token at p + 1); it stands at p. Every norm's weight is stored minus one.
"""

from typing import Any

import numpy as np
from eagle3_reference import rms, silu, softmax


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Slow:
    """One layer. ``hf``: the target's keys; tensors under the names behind ``mtp.``."""

    def __init__(self, tensors: dict[str, np.ndarray], hf: dict[str, Any], embed, head):
        self.t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
        self.hf, self.embed, self.head = hf, np.asarray(embed, np.float64), np.asarray(head, np.float64)
        self.cache: list[tuple[np.ndarray, np.ndarray]] = []

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms(x, 1 + self.t[name + ".weight"], self.hf.get("rms_norm_eps", 1e-6))

    def row(self, state: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
        """(logits, recycled state) of the next row."""
        p = "layers.0."
        halves = self.norm(self.embed[token], "pre_fc_norm_embedding"), self.norm(state, "pre_fc_norm_hidden")
        x = self.t["fc.weight"] @ np.concatenate(halves)
        x = x + self.attention(self.norm(x, p + "input_layernorm"), p + "self_attn.")
        x = x + self.feed(self.norm(x, p + "post_attention_layernorm"), p + "mlp.")
        out = self.norm(x, "norm")
        return self.head @ out, out

    def attention(self, u: np.ndarray, p: str) -> np.ndarray:
        """Every head of the query projection holds the query, then its gate; a quarter of the channels turn."""
        hf, t = self.hf, self.t
        n, g, c = hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"]
        both = (t[p + "q_proj.weight"] @ u).reshape(n, 2 * c)
        q, gate = both[:, :c], both[:, c:]
        k, v = ((t[p + f"{w}_proj.weight"] @ u).reshape(g, c) for w in "kv")
        place = len(self.cache)
        q, k = (self.turned(self.norm(x, p + f"{w}_norm"), place) for x, w in ((q, "q"), (k, "k")))
        self.cache.append((k, v))
        keys, values = (np.repeat(np.stack(x), n // g, 1) for x in zip(*self.cache, strict=True))
        weights = softmax(np.einsum("hc,shc->hs", q, keys) / c**0.5)
        mixed = np.einsum("hs,shc->hc", weights, values) * sigmoid(gate)
        return t[p + "o_proj.weight"] @ mixed.reshape(-1)

    def turned(self, x: np.ndarray, place: int) -> np.ndarray:
        rope = self.hf["rope_parameters"]
        r = int(x.shape[-1] * rope["partial_rotary_factor"])
        angle = place * rope["rope_theta"] ** (-np.arange(0, r, 2) / r)
        a, b, rest = x[:, : r // 2], x[:, r // 2 : r], x[:, r:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def feed(self, y: np.ndarray, p: str) -> np.ndarray:
        """A gated block; or the best experts, whose weights sum to one, and a shared one with a gate of its own."""
        if p + "gate.weight" not in self.t:
            return self.gated(y, p)
        chances = softmax(self.t[p + "gate.weight"] @ y)
        best = np.argsort(-chances)[: self.hf["num_experts_per_tok"]]
        out = sum(chances[e] * self.gated(y, f"{p}experts.{e}.") for e in best) / chances[best].sum()
        shared = self.gated(y, p + "shared_expert.")
        return out + sigmoid(self.t[p + "shared_expert_gate.weight"] @ y) * shared

    def gated(self, y: np.ndarray, p: str) -> np.ndarray:
        gate, up, down = (self.t[f"{p}{w}_proj.weight"] for w in ("gate", "up", "down"))
        return down @ (silu(gate @ y) * (up @ y))
