"""Decode speed on one pinned CPU thread, float32, beside transformers: same process, A B A B.

    python benchmarks/decode.py [--tokens 96] [--repeats 5] [--out FILE]

Contenders on SmolLM2-135M-Instruct (same dequantised weights, greedy, end of text ignored):
transformers plain and with prompt lookup, specjax plain and with the n-gram drafter. Prompt sets:
benchmarks/prompts. Ratios of tokens per second, prefill included, compilation excluded; ids of plain and
n-gram decoding are compared. Quote ratios; absolute times depend on the machine.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
import warnings
from pathlib import Path

os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})  # before any thread pool exists
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from common import commit, cpu_name  # noqa: E402

import specjax  # noqa: E402

HERE = Path(__file__).parent
SETS = ("code_edit", "gsm_style", "nothing_matches")


def prompts(name: str) -> list[str]:
    """First user turns of a prompt file."""
    lines = (HERE / "prompts" / f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines]


def torch_model(params: specjax.Params) -> transformers.LlamaForCausalLM:
    """The same weights in transformers."""
    c, w = params.meta.target_cfg, params.target
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.mlp_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        max_position_embeddings=c.max_positions, rms_norm_eps=c.eps, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        bos_token_id=1, eos_token_id=None, pad_token_id=2,
    )  # fmt: skip
    state = {"model.embed_tokens.weight": w.embed, "model.norm.weight": w.norm}
    for i, layer in enumerate(w.layers):
        names = {
            "self_attn.q_proj": layer.q, "self_attn.k_proj": layer.k, "self_attn.v_proj": layer.v,
            "self_attn.o_proj": layer.o, "mlp.gate_proj": layer.gate, "mlp.up_proj": layer.up,
            "mlp.down_proj": layer.down, "input_layernorm": layer.attn_norm,
            "post_attention_layernorm": layer.mlp_norm,
        }  # fmt: skip
        state |= {f"model.layers.{i}.{name}.weight": x for name, x in names.items()}
    model = transformers.LlamaForCausalLM(config).eval()
    own = model.state_dict()
    loaded = {k: torch.from_numpy(np.array(v)).reshape(own[k].shape) for k, v in state.items()}
    missing = model.load_state_dict(loaded, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"}, missing
    assert not missing.unexpected_keys, missing
    return model


class Torch:
    """transformers' generate."""

    def __init__(self, model, **options):
        self.model, self.options = model, options

    def __call__(self, ids: list[int], n: int):
        x = torch.tensor([ids])
        began = time.perf_counter()
        with torch.no_grad():
            out = self.model.generate(
                x, attention_mask=torch.ones_like(x), do_sample=False, max_new_tokens=n, **self.options
            )
        return out[0, len(ids) :].tolist(), time.perf_counter() - began, None


class Ours:
    """specjax.decode; seconds without compilation."""

    def __init__(self, params, **options):
        self.params, self.options = params, options

    def __call__(self, ids: list[int], n: int):
        out = specjax.decode(self.params, ids, max_new_tokens=n, ignore_eos=True, max_len=512, **self.options)
        return out.tokens, out.stats.prefill_seconds + out.stats.decode_seconds, out.stats


def run(contenders: dict, sets: dict, tokens: int, repeats: int) -> list[dict]:
    """Rows of (set, prompt, repeat, contender): alternating contenders on each prompt."""
    rows = []
    for name, rows_of_ids in sets.items():
        chosen = [k for k in contenders if name == "code_edit" or k != "transformers prompt lookup"]
        for i, ids in enumerate(rows_of_ids):
            for contender in chosen:  # warm up: compile, allocate
                contenders[contender](ids, 4 if i else tokens)
            for repeat in range(repeats):
                for contender in chosen:
                    out, seconds, stats = contenders[contender](ids, tokens)
                    row = {"set": name, "prompt": i, "repeat": repeat, "contender": contender}
                    row |= {"tokens": len(out), "seconds": seconds, "ids": out}
                    if stats is not None:
                        row |= {"tau": stats.tau, "rounds": stats.rounds, "accepted": stats.accepted}
                        row |= {"proposed": stats.proposed}
                    rows.append(row)
            print(name, i, *(f"{c}: {speed(rows, name, c, i):.1f}" for c in chosen), flush=True)
    return rows


def speed(rows: list[dict], name: str, contender: str, prompt: int) -> float:
    """Median tokens per second of one prompt."""
    mine = [r for r in rows if (r["set"], r["contender"], r["prompt"]) == (name, contender, prompt)]
    return statistics.median(r["tokens"] / r["seconds"] for r in mine)


def ratio(rows: list[dict], name: str, a: str, b: str) -> dict:
    """Median (and quartiles) over prompts of speed a / speed b, each the median of its repeats."""
    number = sorted({r["prompt"] for r in rows if r["set"] == name})
    values = [speed(rows, name, a, i) / speed(rows, name, b, i) for i in number]
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"set": name, "a": a, "b": b, "median": statistics.median(values), "quartiles": [low, high],
            "min": min(values), "per_prompt": values}  # fmt: skip


def identical(rows: list[dict], params: specjax.Params, sets: dict) -> list[dict]:
    """Where plain and n-gram ids differ: first difference and its float32 logit gap."""
    from specjax.identity import prefix_logits

    first = {(r["set"], r["prompt"], r["contender"]): r["ids"] for r in rows if r["repeat"] == 0}
    found = []
    for (name, i, contender), ids in first.items():
        plain = first[name, i, "specjax plain"]
        if contender == "specjax n-gram" and ids != plain:
            at = next(j for j, (x, y) in enumerate(zip(ids, plain, strict=True)) if x != y)
            logits = prefix_logits(params, sets[name][i] + plain[:at])
            gap = float(abs(logits[ids[at]] - logits[plain[at]]))
            found.append({"set": name, "prompt": i, "position": at, "gap": gap})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--limit", type=int, default=None, help="prompts per set")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    running = commit()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    plain = specjax.load("smollm2-135m", dtype="float32")
    spec = specjax.load("smollm2-135m", drafter="ngram", dtype="float32")
    spec = spec.replace(target=plain.target)
    model = torch_model(plain)
    tokenizer = specjax.checkpoints.tokenizer.get(plain.meta.tokenizer_id)
    ask = lambda text: tokenizer.chat([{"role": "user", "content": text}], add_generation_prompt=True)  # noqa: E731
    sets = {
        name: [list(map(int, ask(p))) for p in prompts(name)[: args.limit]] for name in args.sets.split(",")
    }
    contenders = {
        "transformers": Torch(model),
        "specjax plain": Ours(plain),
        "transformers prompt lookup": Torch(model, prompt_lookup_num_tokens=10),
        "specjax n-gram": Ours(spec),
    }
    rows = run(contenders, sets, args.tokens, args.repeats)
    ratios = [ratio(rows, s, "specjax plain", "transformers") for s in sets]
    ratios += [ratio(rows, s, "specjax n-gram", "specjax plain") for s in sets]
    if "code_edit" in sets:
        ratios.append(ratio(rows, "code_edit", "specjax n-gram", "transformers prompt lookup"))
    differing = identical(rows, plain, sets)
    for r in ratios:
        print(f"{r['set']:16} {r['a']} / {r['b']}: median {r['median']:.3f} min {r['min']:.3f}")
    pairs = sum(len(v) for v in sets.values())
    print(f"plain and n-gram ids: {pairs - len(differing)} of {pairs} identical; differing: {differing}")
    if args.out:
        report = {
            "date": datetime.date.today().isoformat(), "commit": running, "device": cpu_name(), "threads": 1,
            "dtype": "float32", "model": "SmolLM2-135M-Instruct (Q4_1 dequantised)", "new_tokens": args.tokens,
            "repeats": args.repeats, "drafter": repr(spec.meta.drafter_cfg),
            "versions": {"python": platform.python_version(), "jax": jax.__version__,
                         "torch": torch.__version__, "transformers": transformers.__version__},
            "ratios": ratios, "differing": differing,
            "rows": [{k: v for k, v in r.items() if k != "ids"} for r in rows],
        }  # fmt: skip
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
