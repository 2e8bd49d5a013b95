"""Drafters written by specjax and read by the packages whose layouts they are in: the same names and shapes as these
write themselves, and the same numbers."""

import dataclasses
import json
import warnings

import dflash.model as zlab
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_files
import torch
import transformers
from families import HYBRID_MOE
from pairwise import name, pairwise
from parity import assistant_reference, block_reference as ref, test_assistant as assistants
from parity.test_dflash import check_rows, target as qwen3
from parity.test_eagle3 import ATOL, LENGTH, STEPS, VARIANTS, ours, reference, target
from safetensors import safe_open

import specjax
from specjax import checkpoints, registry, testing
from specjax.checkpoints.writers.tensors import named
from specjax.drafters import dflash, dspark, eagle3, mtp, mtp_model, serial
from specjax.types import ArraySpec

LONG = pytest.mark.long
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
#: Keys that packages add and nobody reads: versions, classes of their own, and the older spelling of rope.
APART = {"auto_map", "transformers_version", "rope_theta", "rope_scaling", "partial_rotary_factor"}
#: Defaults of transformers that say nothing of a drafter.
UNSAID = {"bos_token_id", "eos_token_id", "pad_token_id", "router_aux_loss_coef", "output_router_logits"}


def drafted(base, method: str, cfg, ids=None):
    """A target with a random drafter, no weight at its trivial value; ``ids``: its draft vocabulary."""
    params, rng = testing.tiny_drafter(base, method, 1, cfg), np.random.default_rng(1)

    def lively(spec: ArraySpec, x):
        if spec.names[0] == "d2t":
            return jnp.asarray(ids - np.arange(len(ids)), jnp.int32)
        if spec.init != "normal":
            return x + 0.3 * rng.standard_normal(x.shape).astype(np.float32)
        return x * (3 if spec.names[0] == "lm_head.weight" else 1)

    specs = registry.drafter(method).abstract(cfg)
    weights = jax.tree.map(lively, specs, params.drafter, is_leaf=lambda x: isinstance(x, ArraySpec))
    return dataclasses.replace(params, drafter=weights)


def library():
    """The speculators package without its log."""
    ref._library("eagle3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from speculators import SpeculatorModel, SpeculatorModelConfig
    return SpeculatorModel, SpeculatorModelConfig


def read(folder):
    """The model that the speculators package makes of a folder; its own attention is compiled, this is not."""
    model, config = library()
    found = config.from_pretrained(folder)
    found.transformer_layer_config._attn_implementation = "eager"
    return model.from_pretrained(folder, config=found).eval()


def written_alike(mine, model, folder):
    """Names, shapes and types of tensors, and keys of the config, equal those the package writes."""
    theirs = ref.save(model, folder)
    tensors = []
    for where in (mine, theirs):
        with safe_open(where / "model.safetensors", "np") as file:
            pieces = {n: file.get_slice(n) for n in file.keys()}  # noqa: SIM118
            tensors.append({n: (tuple(p.get_shape()), p.get_dtype()) for n, p in pieces.items()})
    assert tensors[0] == tensors[1]
    a, b = (json.loads((where / "config.json").read_text()) for where in (mine, theirs))
    assert same_keys(a, b)
    nested = "transformer_layer_config"
    if nested in a:
        assert same_keys(a.pop(nested), b.pop(nested))
    common = {key: a[key] for key in a if key in b and key not in APART}
    assert {key: b[key] for key in common} == common


def same_keys(a, b) -> bool:
    assert set(a) - APART == set(b) - APART - UNSAID
    return True


def eagle3_drafter(case, taps=(1, 2, 4), draft: int = 40, **layers):
    hf = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 48, "vocab_size": 96, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    settings = {
        "transformer": hf | layers, "taps": taps, "qk_norm": case["body"] == "qwen3", "k": 5,
        "norm_before_residual": case["before_residual"], "norm_output": case["norm_output"],
        "norm_before_fc": case["norms"] == "norm_before_fc", "fc_norm": case["norms"] == "fc_norm",
        "draft_vocab_size": draft, "reduced": draft < 96, "own_head": layers.pop("own_head", True),
    }  # fmt: skip
    cfg = eagle3.config(settings, target().meta.target_cfg)
    ids = np.sort(np.random.default_rng(3).permutation(96)[:draft])
    return drafted(target(), "eagle3", cfg, ids)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    """The target as a folder: the package looks at it when it reads an EAGLE-3 drafter."""
    folder = tmp_path_factory.mktemp("verifier")
    base = target()
    weights = named(base.target, registry.target("llama").abstract(base.meta.target_cfg), None)
    hf = testing.models.tiny_config(vocab=96, width=32, layers=5) | {"architectures": ["LlamaForCausalLM"]}
    return str(tiny_files.folder(folder, hf, {n: np.ascontiguousarray(t.make()) for n, t in weights.items()}))


def check_eagle3(params, verifier, folder):
    specjax.export(params, folder / "mine", "speculators", "float32", target=verifier)
    model = read(folder / "mine")
    rng, cfg = np.random.default_rng(1), params.meta.drafter_cfg
    features = 2 * rng.standard_normal((LENGTH, len(cfg.taps) * 32)).astype(np.float32)
    tokens = rng.integers(0, 96, LENGTH + 1)
    loaded = checkpoints.LoadedDrafter("eagle3", cfg, params.drafter, "", (), "")
    wanted, got = reference(model, features, tokens), ours(loaded, features, tokens)
    assert np.abs(wanted).max() > 1
    for k in range(STEPS):
        np.testing.assert_allclose(
            got[k, : LENGTH - k], wanted[k, : LENGTH - k], atol=ATOL, rtol=0, err_msg=f"{k}"
        )
    written_alike(folder / "mine", model, folder / "theirs")


PAIRS = pairwise(VARIANTS)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=name(c), marks=() if c in PAIRS[:2] else LONG) for c in PAIRS],
)
def test_eagle3_in_speculators(case, verifier, tmp_path):
    """TRN.3, PEER.21: three steps, all but the first on the drafter's own recycled state."""
    check_eagle3(eagle3_drafter(case), verifier, tmp_path)


OTHERS = {
    "borrowed head": {"own_head": False},
    "whole vocabulary": {"draft": 96, "own_head": False},
    "two layers": {"num_hidden_layers": 2, "taps": (0, 3)},
    "bias": {"attention_bias": True},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        }
    },
    "yarn rope": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
}  # fmt: skip


@pytest.mark.parametrize(
    "other", [pytest.param(o, marks=() if o == "borrowed head" else LONG) for o in OTHERS]
)
def test_other_eagle3_in_speculators(other, verifier, tmp_path):
    """TRN.3, PEER.21: copies of the target's tables, and rope that old and new readers read alike."""
    case = {"body": "qwen3", "before_residual": True, "norms": "fc_norm", "norm_output": True}
    check_eagle3(eagle3_drafter(case, **OTHERS[other]), verifier, tmp_path)


@LONG
def test_the_verifier_is_found(tmp_path):
    """PEER.21: a folder that names its target is loaded with it, as the package does by itself."""
    teacher = ref.target()
    base = ref.load_target(teacher, tmp_path / "target")
    hf = ref.draft_config().to_dict()
    settings = {
        "transformer": hf,
        "taps": (0, 1, 2),
        "qk_norm": True,
        "own_head": False,
        "draft_vocab_size": 97,
    }
    params = drafted(base, "eagle3", eagle3.config(settings, base.meta.target_cfg))
    specjax.export(params, tmp_path / "mine", "speculators", "float32", target=str(tmp_path / "target"))
    found = read(tmp_path / "mine")
    assert found.config.speculators_config.verifier.architectures == ["Qwen3ForCausalLM"]
    np.testing.assert_array_equal(
        found.embed_tokens.weight.detach(), teacher.model.embed_tokens.weight.detach()
    )
    np.testing.assert_array_equal(found.lm_head.weight.detach(), teacher.lm_head.weight.detach())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return ref.load_target(qwen3(), tmp_path_factory.mktemp("target"))


BODY = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 2, "rope_theta": 5e4,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def block_settings(layout="fill", causal=(False, False), draft=None, layers=(), **more):
    head = {} if draft is None else {"draft_vocab": draft, "own_head": True, "head_rows": draft}
    return {
        "transformer": {**BODY, **dict(layers)}, "layout": layout, "block_size": 5, "mask_id": 96, "taps": (1, 2),
        "fc_width": 64, "causal": causal, "vocab_size": 97, **head, **more,
    }  # fmt: skip


PARTS = {"conv": (3, 8), "selector": (6, 4)}
HEADS = {"markov_rank": 6, "markov_rows": 97, "confidence": True, "confidence_markov": True}
BLOCKS = {
    "dflash": ("dflash", {}),
    "dflash, reduced": ("dflash", {"draft": 40, "layout": "shift"}),
    "dflash, sliding": ("dflash", {"layers": SLIDING, "causal": (True, False), "window_from": "anchor"}),
    "dflash, both ways": ("dflash", {"layers": SLIDING, "window_from": "anchor"}),
    "dflash2": ("dflash", {"layers": SLIDING, "window_from": "anchor", **PARTS}),
    "dspark, vanilla": ("dspark", {"layout": "shift", **HEADS}),
    "dspark, gated, reduced": ("dspark", {"draft": 40, **HEADS, "markov_kind": "gated"}),
    "dspark, rnn": ("dspark", {**HEADS, "markov_kind": "rnn", "confidence_markov": False}),
}
SHORT = ("dflash, reduced", "dflash2", "dspark, gated, reduced")


def block_drafter(base, case):
    method, settings = BLOCKS[case]
    cfg = {"dflash": dflash, "dspark": dspark}[method].config(
        block_settings(**settings), base.meta.target_cfg
    )
    return drafted(base, method, cfg, 2 * np.arange(40))


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in SHORT else LONG) for c in BLOCKS])
def test_blocks_in_speculators(base, case, tmp_path, monkeypatch):
    """TRN.3, PEER.21: rows and logits of blocks, corrections and confidences."""
    params = block_drafter(base, case)
    specjax.export(params, tmp_path / "mine", "speculators", "float32", target="")
    model, cfg = read(tmp_path / "mine"), params.meta.drafter_cfg
    taps, ids, hidden, logits = ref.speculator_rows(model, qwen3(), monkeypatch)
    for i, anchor in enumerate((2, 11)):
        mine = ref.Block(params).run(taps[:anchor], int(ids[anchor]), 5 - cfg.first)
        ref.close(mine[0], hidden[i, cfg.first :])
        ref.close(mine[1], logits[i, cfg.first :])
    check_heads(model, params)
    written_alike(tmp_path / "mine", model, tmp_path / "theirs")


def check_heads(model, params):
    """Every weight of the heads lands in its place; what they compute is compared where they are read."""
    theirs = {n: x.detach().numpy() for n, x in model.state_dict().items()}
    specs = registry.drafter(params.meta.drafter).abstract(params.meta.drafter_cfg)
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ArraySpec))
    for spec, x in zip(leaves, jax.tree.leaves(params.drafter), strict=True):
        np.testing.assert_array_equal(theirs[spec.names[0]].reshape(x.shape), x)


def mtp_config(kind, target_cfg):
    """A layer of Qwen3's kind, or of Qwen3.5's, with or without experts."""
    if kind == "qwen3":
        return mtp.config({"family": "qwen3", "model": target_cfg, "k": 3}, target_cfg)
    if kind == "qwen3_5_text":
        return mtp.tiny(target_cfg)
    model = registry.target(kind).config(HYBRID_MOE | {"vocab_size": 97})
    return mtp.config({"family": kind, "model": model, "k": 3}, target_cfg)


@pytest.mark.parametrize(
    "kind", ["qwen3", *(pytest.param(f"qwen3_5{k}_text", marks=LONG) for k in ("", "_moe"))]
)
def test_mtp_in_speculators(base, kind, tmp_path):
    """TRN.3, PEER.21: Qwen3.5's norms are stored minus one, its experts as two tensors."""
    cfg = mtp_config(kind, base.meta.target_cfg)
    params = drafted(base, "mtp", cfg)
    specjax.export(params, tmp_path / "mine", "speculators", "float32", target="")
    model = read(tmp_path / "mine")
    rng, layer = np.random.default_rng(0), model.mtp_layers[0]
    embedded, feature = rng.standard_normal((2, 1, 9, 32)).astype(np.float32)
    pos = torch.arange(9)[None]
    with torch.no_grad():
        wanted = layer(
            hidden_states=torch.tensor(feature),
            token_embeddings=torch.tensor(embedded),
            attention_mask=torch.full((9, 9), float("-inf")).triu(1)[None, None],
            position_ids=pos,
            position_embeddings=model.rotary_emb(torch.zeros(1, 9, 32), pos),
        )
    np.testing.assert_allclose(mtp_rows(params, embedded, feature), wanted[0], atol=ATOL, rtol=0)
    written_alike(tmp_path / "mine", model, tmp_path / "theirs")


def mtp_rows(params, embedded, feature):
    """Output of the layer at every position."""
    cfg, n = params.meta.drafter_cfg, embedded.shape[1]
    pos, every = jnp.arange(n, dtype=jnp.int32)[None], jnp.full((1,), n, jnp.int32)

    @jax.jit
    def row(last):
        place = serial.Place(pos=pos, valid=every, last=last, mode="extend")
        kv = mtp_model.create_cache(cfg, 1, n, jnp.float32)
        return mtp_model.run(params.drafter, cfg, jnp.asarray(embedded), jnp.asarray(feature), place, kv)[0][
            0
        ]

    return np.stack([row(jnp.full((1,), i, jnp.int32)) for i in range(n)])


ZLAB = {
    "full": {},
    "sliding": {"layers": SLIDING, "causal": (True, False)},
    "causal": {"causal": (True, True)},
    "dflash2": {"layers": SLIDING, **PARTS, "input_scale": 2.0, "output_multiplier": 0.4, "softcap": 5.0},
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "dflash2" else LONG) for c in ZLAB])
def test_blocks_in_the_dflash_package(base, case, tmp_path):
    """TRN.3, PEER.21: rows and logits of blocks after contexts shorter and longer than the window."""
    params = drafted(base, "dflash", dflash.config(block_settings(**ZLAB[case]), base.meta.target_cfg))
    specjax.export(params, tmp_path / "mine", "zlab", "float32")
    stem = "DFlash2DraftModel" if case == "dflash2" else "DFlashDraftModel"
    model = getattr(zlab, stem).from_pretrained(tmp_path / "mine").eval()
    check_rows(model, params)
    if case != "dflash2":  # torch's way of saving calls the codebooks otherwise than published files
        written_alike(tmp_path / "mine", model, tmp_path / "theirs")


@LONG
@pytest.mark.parametrize("case", ["keys_are_values", "shared_layers"])
def test_assistants_in_transformers(case, tmp_path):
    """TRN.3, PEER.21: logits of every draft, which transformers reads from the target's keys and values."""
    kind, more = assistants.CASES[case]
    teacher, first = assistant_reference.teacher(kind), assistant_reference.assistant(kind, **more)
    params, _ = assistants.load(teacher, first, tmp_path)
    params = dataclasses.replace(params, drafter=jax.tree.map(shaken, params.drafter))
    specjax.export(params, tmp_path / "mine", "transformers", "float32")
    made = transformers.Gemma4AssistantForCausalLM.from_pretrained(
        tmp_path / "mine", attn_implementation="eager"
    )
    assert made.generation_config.num_assistant_tokens == assistants.K
    ids = np.random.default_rng(0).integers(0, 128, 30).tolist()
    anchor = [{ids[-1]: 1e9}]
    state = specjax.start(params, [ids[:-1]], k=assistants.K, logit_bias=anchor, max_new_tokens=9, max_len=48)
    mine, drafted = assistants.ours(params.meta)(params, state)
    tokens, logits = assistant_reference.drafts(teacher, made, ids)
    assistants.close(mine[0], logits)
    assert drafted[0].tolist() == tokens
    held = [tensors(tmp_path / "mine"), tensors(ref.save(made, tmp_path / "theirs"))]
    assert held[0] == held[1]


def shaken(x):
    """Other weights than those the reference was made with; tables of integers are kept."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x + 0.05 * np.random.default_rng(x.size).standard_normal(x.shape).astype(np.float32)


def tensors(folder):
    with safe_open(folder / "model.safetensors", "np") as file:
        pieces = {n: file.get_slice(n) for n in file.keys()}  # noqa: SIM118
        return {n: (tuple(p.get_shape()), p.get_dtype()) for n, p in pieces.items()}


def test_a_published_drafter_comes_back(base, tmp_path):
    """PEER.16, PEER.21: one written by its package, read, written by specjax, is the same file."""
    made = ref.speculator(
        "dspark", draft_vocab=40, markov_rank=6, markov_head_type="rnn", sample_from_anchor=True
    )
    first = ref.save(made, tmp_path / "first")
    target = ref.save(qwen3(), tmp_path / "target")
    checkpoints.convert(first, tmp_path / "own", target, dtype="same")
    checkpoints.convert(tmp_path / "own", tmp_path / "back", target, "speculators", "same")
    pair = [dict(_arrays(tmp_path / name)) for name in ("first", "back")]
    assert set(pair[0]) == set(pair[1])
    for key, x in pair[0].items():
        assert x.dtype == pair[1][key].dtype
        np.testing.assert_array_equal(x, pair[1][key])


def _arrays(folder):
    with safe_open(folder / "model.safetensors", "np") as file:
        yield from ((n, file.get_tensor(n)) for n in file.keys())  # noqa: SIM118
