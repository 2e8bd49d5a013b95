"""Gemma checkpoints in every layout they come in: the weights are the same arrays, and what is left out is listed."""

import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from parity import feeding, gemma_reference, reference
from safetensors.numpy import load_file, save_file

from specjax.checkpoints import drafter, hub, load


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()) and x.dtype == y.dtype, a, b))


def rewritten(folder, target, rename, config=lambda hf: hf):
    """A copy of a folder whose tensors are called (or left out) as ``rename`` says; it may add some."""
    arrays = {}
    for name, x in load_file(folder / "model.safetensors").items():
        arrays |= rename(name, x)
    target.mkdir()
    save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, target / "model.safetensors")
    hf = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config(hf)))
    return target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of the text models alone, as transformers writes them."""
    root = tmp_path_factory.mktemp("gemma")
    names = ("gemma3", "gemma4_dense", "gemma4_moe", "gemma4_e2b")
    return {name: reference.save(gemma_reference.build(name), root / name) for name in names}


VISION3 = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
WHOLE = {
    "gemma3": ("Gemma3", {"vision_config": VISION3 | {"image_size": 56, "patch_size": 14}, "mm_tokens_per_image": 16}),
    "gemma4_dense": ("Gemma4Unified", {"vision_config": None, "audio_config": None}),
    "gemma4_e2b": ("Gemma4", {"vision_config": VISION3 | {"head_dim": 16}, "audio_config": {"num_hidden_layers": 1}}),
}  # fmt: skip


def whole_model(name):
    """A multimodal model around the text model of the same weights."""
    stem, parts = WHOLE[name]
    text = gemma_reference.config(name)
    if stem == "Gemma4Unified":
        text = transformers.Gemma4UnifiedTextConfig(**gemma_reference.MODELS[name][1])
    config = getattr(transformers, f"{stem}Config")(text_config=text, **parts)
    model = getattr(transformers, f"{stem}ForConditionalGeneration")(config).float().eval()
    alone = gemma_reference.build(name)
    state = {k.removeprefix("model."): v for k, v in alone.state_dict().items() if k.startswith("model.")}
    model.model.language_model.load_state_dict(state)
    model.generation_config.eos_token_id = [1, 50, 106]
    return model


@pytest.mark.parametrize("name", WHOLE)
def test_text_part_of_a_multimodal_model(name, folders, tmp_path):
    """The other parts are left out by name, with a reason each, and nothing else is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers' own, about its vision configs
        folder = reference.save(whole_model(name), tmp_path / "m")
    loaded, alone = feeding.load(folder), feeding.load(folders[name])
    assert loaded.cfg == alone.cfg
    assert same(loaded.weights, alone.weights)
    assert loaded.eos_ids == (1, 50, 106)
    stored = load_file(folder / "model.safetensors")
    outside = [n for n in stored if ".language_model." not in f".{n}"]
    assert sum(loaded.skipped.values()) == len(outside)
    assert (name == "gemma4_dense") == (not outside)


def test_older_names_of_gemma3(folders, tmp_path):
    """``language_model.model.``, flat rope keys and a text_config that leaves out what transformers knows."""
    hf = json.loads((folders["gemma3"] / "config.json").read_text())
    rope = hf.pop("rope_parameters")
    flat = {"rope_theta": rope["full_attention"]["rope_theta"], "rope_local_base_freq": 10000.0}
    gone = ("layer_types", "rms_norm_eps", "tie_word_embeddings", "eos_token_id", "_sliding_window_pattern")
    text = {k: v for k, v in hf.items() if k not in gone} | flat | {"sliding_window_pattern": 4}
    whole = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106], "vision_config": {}}
    vision = {"vision_tower.vision_model.post_layernorm.weight": np.ones(3, np.float32)}
    old = rewritten(
        folders["gemma3"], tmp_path / "old", lambda n, x: {f"language_model.{n}": x} | vision, lambda _: whole
    )
    loaded, alone = feeding.load(old), feeding.load(folders["gemma3"])
    assert same(loaded.weights, alone.weights)
    assert loaded.cfg == alone.cfg
    assert (loaded.eos_ids, loaded.skipped) == ((1, 106), {"image encoder": 1})


def test_shards(tmp_path):
    """CKP.8"""
    one = reference.save(gemma_reference.build("gemma4_moe"), tmp_path / "one")
    many = reference.save(gemma_reference.build("gemma4_moe"), tmp_path / "many", max_shard_size="60KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    assert same(feeding.load(many).weights, feeding.load(one).weights)


def test_experts_one_by_one(folders, tmp_path):
    def split(name, x):
        if name.endswith("experts.gate_up_proj"):
            stem, half = name.removesuffix("gate_up_proj"), x.shape[1] // 2
            gate = {f"{stem}{e}.gate_proj.weight": y[:half] for e, y in enumerate(x)}
            return gate | {f"{stem}{e}.up_proj.weight": y[half:] for e, y in enumerate(x)}
        if name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            return {f"{stem}{e}.down_proj.weight": y for e, y in enumerate(x)}
        return {name: x}

    apart = rewritten(folders["gemma4_moe"], tmp_path / "m", split)
    assert same(feeding.load(apart).weights, feeding.load(folders["gemma4_moe"]).weights)


def test_older_keys_of_gemma4(folders, tmp_path):
    """The two keys of full layers, and of experts, that transformers writes in another way."""

    def older(hf):
        own = hf.pop("per_layer_config")["3"]
        hf["expert_intermediate_size"] = hf.pop("moe_intermediate_size")
        hf["hidden_size_per_layer_input"] = None
        more = {"query_pre_attn_scalar": 256, "num_global_key_value_heads": own["num_key_value_heads"]}
        return hf | more | {"global_head_dim": own["head_dim"]}

    old = rewritten(folders["gemma4_moe"], tmp_path / "m", lambda n, x: {n: x}, older)
    assert feeding.load(old).cfg == feeding.load(folders["gemma4_moe"]).cfg


def test_keys_of_layers_that_have_none(folders, tmp_path):
    """Stray keys and values of layers that read an earlier one's are left out; other strays are reported."""

    def strays(name, x):
        if name.endswith("layers.5.self_attn.q_proj.weight"):
            return {name: x, name.replace("q_proj", "k_proj"): x, name.replace("q_proj", "v_proj"): x}
        return {name: x}

    loaded = feeding.load(rewritten(folders["gemma4_e2b"], tmp_path / "a", strays))
    assert loaded.skipped == {"this layer reads keys and values of an earlier one": 2}
    other = lambda name, x: {name: x, "model.layers.0.surprise": x} if "layers.0." in name else {name: x}  # noqa: E731
    with pytest.warns(UserWarning, match=r"model\.layers\.0\.surprise"):
        feeding.load(rewritten(folders["gemma4_e2b"], tmp_path / "b", other))


def test_a_head_of_its_own_in_a_file_that_says_nothing(folders, tmp_path):
    """Gemma ties embedding and head unless told otherwise; a file with another head contradicts that."""
    head = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float32)
    silent = lambda hf: {k: v for k, v in hf.items() if k != "tie_word_embeddings"}  # noqa: E731
    folder = rewritten(folders["gemma3"], tmp_path / "m", lambda n, x: {n: x, "lm_head.weight": head}, silent)
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs"):
        loaded = feeding.load(folder)
    np.testing.assert_array_equal(loaded.weights.head, head)
    assert feeding.load(rewritten(folders["gemma3"], tmp_path / "n", lambda n, x: {n: x}, silent)).cfg.tied


def test_chat_template_files(folders, tmp_path):
    """Multimodal checkpoints keep the template of their processor in a file of its own."""
    folder = tmp_path / "m"
    shutil.copytree(folders["gemma3"], folder)
    assert feeding.load(folder).chat_template is None
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "b"}))
    assert feeding.load(folder).chat_template == "b"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "a"}))
    assert feeding.load(folder).chat_template == "a"
    (folder / "chat_template.jinja").write_text("c")
    assert feeding.load(folder).chat_template == "c"


def test_a_multimodal_checkpoint_as_draft_model(folders, tmp_path):
    """Its text part drafts; its other parts are left out without a warning."""
    target = feeding.load(folders["gemma3"])

    def config(hf):
        return {
            "model_type": "gemma4",
            "architectures": ["Gemma4ForConditionalGeneration"],
            "text_config": hf,
        }

    tower = {"model.vision_tower.patch_embedder.weight": np.ones(3, np.float32)}
    rename = lambda n, x: {n.replace("model.", "model.language_model.", 1): x} | tower  # noqa: E731
    folder = rewritten(folders["gemma4_e2b"], tmp_path / "m", rename, config)
    found = drafter.load_drafter(hub.resolve(folder), target.cfg, load_shared(target), jnp.float32)
    assert (found.name, found.cfg.family) == ("draft_model", "gemma4")
    assert same(found.weights, feeding.load(folders["gemma4_e2b"]).weights)


def load_shared(loaded):
    return load.registry.target(loaded.family).shared(loaded.weights, loaded.cfg)


def test_bfloat16(folders):
    """NUM.2: bfloat16 weights and caches give bfloat16 residuals and float32 logits, near transformers' own."""
    model = gemma_reference.build("gemma4_moe").bfloat16()
    loaded = feeding.load(folders["gemma4_moe"], jnp.bfloat16)
    ids = np.random.default_rng(1).integers(0, 128, (1, 21))
    module = load.registry.target(loaded.family)

    @jax.jit
    def run(weights, tokens):
        cache = module.init_cache(loaded.cfg, 1, 24, 4, jnp.bfloat16)
        pos, full = jnp.arange(21)[None], jnp.array([21])
        out = module.forward(weights, loaded.cfg, tokens, pos, full, cache, feeding.TapSpec((4,)), "extend")
        return module.unembed(weights, loaded.cfg, out.hidden), out

    logits, out = run(loaded.weights, jnp.asarray(ids, jnp.int32))
    assert (logits.dtype, out.hidden.dtype, out.taps[4].dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    assert all(x.dtype in (jnp.bfloat16, jnp.int32) for x in jax.tree.leaves(out.cache))
    with torch.no_grad():
        want = model(torch.tensor(ids)).logits.float().numpy()
    exact = reference.answer(gemma_reference.build("gemma4_moe"), ids).logits
    error = lambda got: np.sqrt(np.mean((np.asarray(got) - exact) ** 2))  # noqa: E731
    assert error(logits) < 1.5 * error(want)
