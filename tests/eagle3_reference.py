"""EAGLE-3 written down a second time: float64 numpy, nothing cached in blocks, straight from the published tensors.

``Slow`` takes tensors under the names of published files (``midlayer.`` or ``layers.0.``) and the facts of a config.
Row p is the pair (feature of position p, token at p + 1).
"""

import math
from typing import Any

import numpy as np


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


class Slow:
    """One drafter. ``hf``: transformer keys; ``flags``: norm_before_residual, norm_output, logit_scale."""

    def __init__(
        self, tensors: dict[str, np.ndarray], hf: dict[str, Any], embed=None, head=None, **flags: Any
    ):
        self.t = {
            n.removeprefix("model.").replace("midlayer.", "layers.0."): np.asarray(x)
            for n, x in tensors.items()
        }
        self.t = {n: x.astype(np.int64 if n in ("d2t", "t2d") else np.float64) for n, x in self.t.items()}
        self.hf, self.flags, self.eps = hf, flags, hf.get("rms_norm_eps", 1e-6)
        self.embed = np.asarray(self.t.get("embed_tokens.weight", embed), np.float64)
        self.head = np.asarray(self.t.get("lm_head.weight", head), np.float64)
        self.layers = hf.get("num_hidden_layers", 1)
        self.clear()

    def clear(self) -> None:
        self.cache: list[list[tuple]] = [[] for _ in range(self.layers)]

    def cut(self, rows: int) -> None:
        """Forget the rows from ``rows`` on."""
        self.cache = [kept[:rows] for kept in self.cache]

    def fuse(self, taps: list[np.ndarray]) -> np.ndarray:
        """Features [N D] of taps, each [N H], ascending."""
        taps = [np.asarray(x, np.float64) for x in taps]
        if "fc_norm.0.weight" in self.t:
            taps = [rms(x, self.t[f"fc_norm.{j}.weight"], self.eps) for j, x in enumerate(taps)]
        joined = np.concatenate(taps, -1)
        if "input_norm.weight" in self.t:
            joined = rms(joined, self.t["input_norm.weight"], self.eps)
        return joined @ self.t["fc.weight"].T if "fc.weight" in self.t else joined

    def row(self, feature: np.ndarray, token: int, pos: int) -> tuple[np.ndarray, np.ndarray]:
        """(logits, recycled state) of one more row at ``pos``; its keys and values are kept."""
        t, eps = self.t, self.eps
        normed = rms(feature, t["layers.0.hidden_norm.weight"], eps)
        x = normed if self.flags.get("norm_before_residual") else feature
        u = np.concatenate([rms(self.embed[token], t["layers.0.input_layernorm.weight"], eps), normed])
        for i in range(self.layers):
            p = f"layers.{i}."
            if i:
                u = rms(x, t[p + "input_layernorm.weight"], eps)
            latent = p + "self_attn.kv_a_proj_with_mqa.weight" in t
            x = x + (self.latent if latent else self.heads)(i, p + "self_attn.", u, pos)
            y = rms(x, t[p + "post_attention_layernorm.weight"], eps)
            up = silu(t[p + "mlp.gate_proj.weight"] @ y) * (t[p + "mlp.up_proj.weight"] @ y)
            x = x + t[p + "mlp.down_proj.weight"] @ up
        out = rms(x, t["norm.weight"], eps)
        return self.head @ out * self.flags.get("logit_scale", 1.0), out if self.flags.get(
            "norm_output"
        ) else x

    def project(self, name: str, x: np.ndarray) -> np.ndarray:
        return self.t[name + ".weight"] @ x + self.t.get(name + ".bias", 0.0)

    def heads(self, i: int, p: str, u: np.ndarray, pos: int) -> np.ndarray:
        """Grouped-query attention."""
        hf = self.hf
        n, g = hf["num_attention_heads"], hf["num_key_value_heads"]
        q, k, v = (self.project(f"{p}{w}_proj", u).reshape(m, -1) for w, m in (("q", n), ("k", g), ("v", g)))
        if p + "q_norm.weight" in self.t:
            q, k = (
                rms(q, self.t[p + "q_norm.weight"], self.eps),
                rms(k, self.t[p + "k_norm.weight"], self.eps),
            )
        angle = pos * hf.get("rope_theta", 1e4) ** (-np.arange(0, q.shape[1], 2) / q.shape[1])
        q, k = (self.turn_halves(x, angle) for x in (q, k))
        self.cache[i].append((pos, k, v))
        window = (
            hf.get("sliding_window")
            if hf.get("layer_types", [""] * (i + 1))[i] == "sliding_attention"
            else None
        )
        kept = [(k, v) for at, k, v in self.cache[i] if window is None or at > pos - window]
        keys, values = (np.stack([x[j] for x in kept]) for j in (0, 1))
        keys, values = np.repeat(keys, n // g, 1), np.repeat(values, n // g, 1)
        weights = softmax(np.einsum("hc,shc->hs", q, keys) / math.sqrt(q.shape[1]))
        return self.project(p + "o_proj", np.einsum("hs,shc->hc", weights, values).reshape(-1))

    @staticmethod
    def turn_halves(x, angle):
        a, b = np.split(x, 2, -1)
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
        )

    def latent(self, i: int, p: str, u: np.ndarray, pos: int) -> np.ndarray:
        """DeepSeek's attention as its authors write it: keys and values of every head are made and kept."""
        hf, t = self.hf, self.t
        n, nope, rope = hf["num_attention_heads"], hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
        if p + "q_a_proj.weight" in t:
            low = rms(t[p + "q_a_proj.weight"] @ u, t[p + "q_a_layernorm.weight"], self.eps)
            q = (t[p + "q_b_proj.weight"] @ low).reshape(n, nope + rope)
        else:
            q = (t[p + "q_proj.weight"] @ u).reshape(n, nope + rope)
        both = t[p + "kv_a_proj_with_mqa.weight"] @ u
        low = rms(both[: hf["kv_lora_rank"]], t[p + "kv_a_layernorm.weight"], self.eps)
        kv = (t[p + "kv_b_proj.weight"] @ low).reshape(n, nope + hf["v_head_dim"])
        angle, scale = self.yarn(pos)
        shared = self.turn_pairs(both[hf["kv_lora_rank"] :], angle)
        k = np.concatenate([kv[:, :nope], np.broadcast_to(shared, (n, rope))], -1)
        q = np.concatenate([q[:, :nope], self.turn_pairs(q[:, nope:], angle)], -1)
        self.cache[i].append((pos, k, kv[:, nope:]))
        keys, values = (np.stack([x[j] for x in self.cache[i]]) for j in (1, 2))
        weights = softmax(np.einsum("hc,shc->hs", q, keys) * scale**2 / math.sqrt(nope + rope))
        return t[p + "o_proj.weight"] @ np.einsum("hs,shc->hc", weights, values).reshape(-1)

    @staticmethod
    def turn_pairs(x, angle):
        out = np.empty(x.shape)
        a, b = x[..., 0::2], x[..., 1::2]
        out[..., 0::2] = a * np.cos(angle) - b * np.sin(angle)
        out[..., 1::2] = b * np.cos(angle) + a * np.sin(angle)
        return out

    def yarn(self, pos: int) -> tuple[np.ndarray, float]:
        """(angles of the rope channels, factor of queries and keys) for yarn with equal mscale values, or plain."""
        d, theta, y = self.hf["qk_rope_head_dim"], self.hf.get("rope_theta", 1e4), self.hf.get("rope_scaling")
        free = theta ** (-np.arange(0, d, 2) / d)
        if not y:
            return pos * free, 1.0
        start, log = y["original_max_position_embeddings"], 2 * math.log(theta)
        turns = {n: d * math.log(start / (y[n] * 2 * math.pi)) / log for n in ("beta_fast", "beta_slow")}
        low, high = max(math.floor(turns["beta_fast"]), 0), min(math.ceil(turns["beta_slow"]), d - 1)
        slow = np.clip((np.arange(d // 2) - low) / max(high - low, 0.001), 0, 1)
        mixed = free / y["factor"] * slow + free * (1 - slow)
        return pos * mixed, 0.1 * y["mscale_all_dim"] * math.log(y["factor"]) + 1

    def ids(self) -> np.ndarray:
        """Target id of each draft id."""
        return np.arange(len(self.head)) + self.t.get("d2t", 0)

    def absorb(self, features: np.ndarray, tokens, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Rows ``first`` onwards: ``features[p]`` with ``tokens[p + 1]``. (logits, states) per row."""
        rows = [self.row(features[p], int(tokens[p + 1]), p) for p in range(first, len(features))]
        return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])

    def chain(self, logits, state, pos: int, k: int) -> tuple[list[int], list[np.ndarray]]:
        """``k`` greedy drafts from the row at ``pos``; leaves the cache as it was."""
        rows, drafts, seen, ids = len(self.cache[0]), [], [logits], self.ids()
        for i in range(k):
            drafts.append(int(ids[seen[-1].argmax()]))
            if i < k - 1:
                logits, state = self.row(state, drafts[-1], pos + 1 + i)
                seen.append(logits)
        self.cut(rows)
        return drafts, seen
