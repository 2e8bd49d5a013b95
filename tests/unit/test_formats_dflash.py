"""DFlash folders of every format: conventions, what is refused, what is assumed and told."""

import dataclasses
import warnings

import block_tiny as tiny
import jax.numpy as jnp
import numpy as np
import pytest
from block_tiny import BLOCK, BODY, DEEPSPEC, SPECULATORS, ZLAB, change, folder, load

from specjax import checkpoints, registry
from specjax.checkpoints import hub
from specjax.checkpoints.formats import block
from specjax.drafters.dflash_config import Convolution, Selection


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_flat_and_nested_settings(tmp_path):
    """CKP.2: the same drafter, wherever its settings are; a contradiction is an error."""
    flat = load(folder(tmp_path / "a", {**ZLAB, **BLOCK}))
    nested = load(folder(tmp_path / "b", {**ZLAB, "dflash_config": BLOCK}))
    assert flat.cfg == nested.cfg
    both = {**ZLAB, **BLOCK, "dflash_config": {**BLOCK, "block_size": 6}}
    with pytest.raises(ValueError, match="block_size is 5 at the config's top level and 6 in dflash_config"):
        load(folder(tmp_path / "c", both))


def test_zlab_conventions(tmp_path):
    """TAP.1: ids are outputs of layers. CKP.1: the layout is assumed, told, and can be changed."""
    path = folder(tmp_path, {**ZLAB, "dflash_config": BLOCK})
    found = load(path)
    cfg = found.cfg
    assert (found.name, found.format, cfg.layout, cfg.k, cfg.taps) == ("dflash", "z-lab", "fill", 4, (1, 2))
    assert any("layout" in note and "'fill'" in note for note in found.notes)
    assert (cfg.causal, cfg.body.windows, cfg.window_from) == ((False, True), (None, 6), "row")
    shift = load(path, layout="shift").cfg
    assert (shift.layout, shift.k) == ("shift", 5)
    assert load(path, k=2, drafting="greedy").cfg.k == 2


def test_zlab_directions(tmp_path):
    """TAP.6: is_causal decides for all layers, then dflash_config.causal; use_swa makes all layers slide."""

    def one(name, top=(), **more):
        config = {**ZLAB, **dict(top), "dflash_config": {**BLOCK, **more}}
        return load(folder(tmp_path / name, config)).cfg

    assert one("a", top={"is_causal": False}).causal == (False, False)
    assert one("b", causal=True).causal == (True, True)
    assert one("c", top={"is_causal": False}, causal=True).causal == (False, False)
    swa = one("d", use_swa=True, swa_window_size=4)
    assert (swa.body.windows, swa.causal) == ((4, 4), (True, True))


def test_deepspec_conventions(tmp_path):
    """Layout "shift", -1 is the embedding's output, every layer sees the whole block. CKP.6: copies of the
    target's tables are borrowed, tables of its own are used."""
    params = tiny.params(own_embed=tiny.VOCAB, own_head=tiny.VOCAB)
    path = folder(tmp_path, {**DEEPSPEC, "target_layer_ids": [-1, 1]}, params)
    found = load(path)
    assert (found.format, found.cfg.layout, found.cfg.k) == ("DeepSpec", "shift", 5)
    assert (found.cfg.taps, found.cfg.causal) == ((0, 2), (False, False))
    assert (found.cfg.own_embed, found.cfg.own_head) == (tiny.VOCAB, tiny.VOCAB)
    np.testing.assert_array_equal(found.weights.head, params.drafter.head)
    target = tiny.target().target
    change(path, embed_tokens__weight=np.asarray(target.embed))
    found = load(path)
    assert (found.cfg.own_embed, found.weights.embed) == (None, None)
    assert found.cfg.own_head == tiny.VOCAB
    change(path, lm_head__weight=None, embed_tokens__weight=np.asarray(params.drafter.embed))
    assert load(path).cfg.own_head is None


def test_deepspec_tied_head(tmp_path):
    """TAP.8: a tied head is the drafter's own embedding."""
    config = {**DEEPSPEC, "tie_word_embeddings": True}
    found = load(folder(tmp_path, config, tiny.params(own_embed=tiny.VOCAB)))
    np.testing.assert_array_equal(found.weights.head, found.weights.embed)


def test_speculators_conventions(tmp_path):
    """Ids are inputs of layers; the window stands at the anchor; only sliding layers can be causal."""
    found = load(folder(tmp_path / "a", SPECULATORS))
    cfg = found.cfg
    assert (found.format, found.made_for, cfg.taps, cfg.layout) == ("speculators", "a/b", (1, 2), "fill")
    assert (cfg.causal, cfg.window_from) == ((False, True), "anchor")
    both = load(folder(tmp_path / "b", {**SPECULATORS, "sliding_window_non_causal": True}))
    assert both.cfg.causal == (False, False)
    assert not found.notes


@pytest.mark.parametrize(("tokens", "layout"), [(5, "shift"), (4, "fill")])
def test_speculators_layout_of_old_files(tmp_path, tokens, layout):
    """CKP.1: without sample_from_anchor the number of proposed tokens decides, and that is told."""
    config = without(SPECULATORS, "sample_from_anchor", "sliding_window_non_causal")
    config["speculators_config"] = {"proposal_methods": [{"speculative_tokens": tokens}]}
    found = load(folder(tmp_path, config))
    assert (found.cfg.layout, found.cfg.k) == (layout, tokens)
    assert any("sample_from_anchor" in note for note in found.notes)
    assert found.cfg.causal == (False, True)


def test_values_left_out(tmp_path):
    """Old configs leave out what equals a library's default: sizes come from the tensors, taps from the
    format's rule, and the rule is told."""
    inner = {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    inner |= {"layer_types": BODY["layer_types"], "sliding_window": 6}
    small = load(folder(tmp_path / "a", {**SPECULATORS, "transformer_layer_config": inner}))
    assert small.cfg == load(folder(tmp_path / "b", SPECULATORS)).cfg
    with pytest.raises(ValueError, match=r"taps the residual stream after \(2, 1, -1\) layers"):
        load(folder(tmp_path / "c", without(SPECULATORS, "aux_hidden_state_layer_ids")))
    no_size = {**ZLAB, "dflash_config": without(BLOCK, "block_size")}
    found = load(folder(tmp_path / "d", no_size))
    assert found.cfg.rows == 16
    assert any("block_size; 16" in note for note in found.notes)


@pytest.mark.parametrize(
    ("layers", "ids"),
    [
        (36, (1, 9, 17, 25, 33)),
        (40, (1, 10, 19, 28, 37)),
        (48, (1, 12, 23, 34, 45)),
        (62, (1, 16, 30, 44, 59)),
    ],
)
def test_default_taps(layers, ids):
    """Halves round to even."""
    assert block.default_taps(layers, 5) == ids
    assert block.default_taps(layers, 1) == (layers // 2,)


def test_dflash2_files(tmp_path):
    """Both spellings of the codebooks; the tensors and the config must agree."""
    params = tiny.params(conv=Convolution(2, 8), selector=Selection(6, 4))
    said = {**BLOCK, "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
    torch_names = {
        f"candidate_selector_{w}_codebook": f"candidate_selector.{w}_codebook.weight"
        for w in ("predecessor", "successor")
    }
    for i, names in enumerate(({}, torch_names)):
        found = load(folder(tmp_path / str(i), {**ZLAB, "dflash_config": said}, params, **names))
        assert (found.cfg.conv, found.cfg.selector) == (Convolution(2, 8), Selection(6, 4))
        np.testing.assert_array_equal(found.weights.selector.successor, params.drafter.selector.successor)
    wrong = {**ZLAB, "dflash_config": {**said, "conv_group_size": 4}}
    with pytest.raises(ValueError, match="conv_group_size=4, the tensors say 8"):
        load(folder(tmp_path / "w", wrong, params))
    alone = {**ZLAB, "dflash_config": {**BLOCK, "selector_rank": 6}}
    with pytest.raises(ValueError, match="selector_rank=6, the tensors say there is none"):
        load(folder(tmp_path / "n", alone))


REFUSED = {
    "taps outside (TAP.2)": ({"target_layer_ids": [0, 2]}, r"after \(1, 3\) layers, but the target has 2"),
    "too many taps (TAP.2, TAP.7)": (
        {"target_layer_ids": [0, 1, 1]},
        "fc reads 64 channels, but 3 taps of a target of width 32 make 96",
    ),
    "no mask (CKP.5)": ({"mask_token_id": None}, "mask token id must be given"),
    "mask outside (CKP.5)": (
        {"mask_token_id": 24},
        "mask token id 24 is outside the embedding, which has 24",
    ),
    "sinks (TAP.8)": ({"attention_sink_bias": True}, "attention_sink_bias=True"),
    "block of one": ({"block_size": 1}, "no row left"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_settings(tmp_path, case):
    said, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        load(folder(tmp_path, {**ZLAB, "dflash_config": {**BLOCK, **said}}))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_target_layers": 36}, "made for a target of 36 layers, this one has 2"),
        ({"vocab_size": 151936}, "vocabulary of 151936"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "magic"}}, "unknown rope type 'magic'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised with 'fp8'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_refused_bodies(tmp_path, more, message):
    """VOC.4, TAP.3: a drafter for another target or with layers that are not implemented."""
    with pytest.raises(ValueError, match=message):
        load(folder(tmp_path, {**ZLAB, **more, "dflash_config": BLOCK}))


def test_other_widths_need_own_tables(tmp_path):
    """TAP.7: a drafter as wide as the target, or with tables of its own; both widths are named."""
    shape = dataclasses.replace(tiny.params().meta.drafter_cfg.body, hidden_size=16)
    config = {**DEEPSPEC, "hidden_size": 16}
    own = tiny.params(body=shape, own_embed=tiny.VOCAB, own_head=tiny.VOCAB)
    assert load(folder(tmp_path / "a", config, own)).cfg.body.hidden_size == 16
    with pytest.raises(ValueError, match="16 wide and uses the target's output head, which is 32 wide"):
        load(change(tmp_path / "a" / "d", lm_head__weight=None))


def test_settings_by_name(tmp_path):
    """A setting that does not exist, and a k the block does not give, are named."""
    path = folder(tmp_path, {**ZLAB, "dflash_config": BLOCK})
    with pytest.raises(ValueError, match=r"does not know the setting\(s\) \['windw'\]"):
        load(path, windw=3)
    with pytest.raises(ValueError, match="k must be from 1 to 4"):
        load(path, k=5)
    with pytest.raises(ValueError, match="layout must be one of"):
        load(path, layout="side")


def test_unknown_flags_and_tensors_are_told(tmp_path):
    """TAP.8, CKP.4: a flag or tensor nobody knows gives a warning, a missing tensor an error with its name."""
    path = folder(tmp_path / "a", {**ZLAB, "dflash_config": {**BLOCK, "norm_twice": True}})
    with pytest.warns(UserWarning, match="norm_twice"):
        load(path)
    path = folder(tmp_path / "b", {**ZLAB, "dflash_config": BLOCK})
    change(path, extra__weight=np.zeros(3, np.float32))
    with pytest.warns(UserWarning, match=r"extra\.weight"):
        load(path)
    change(path, extra__weight=None, layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load(path)


IDS = np.array([1, 2, 3, 5, 8, 13, 20, 21, 22, 0])


def reduced(tmp_path, offsets=None, marks=None, **more):
    """A speculators folder with a reduced vocabulary of ten ids."""
    params = tiny.params(draft_vocab=10, own_head=10)
    path = folder(tmp_path, {**SPECULATORS, "draft_vocab_size": 10, **more}, params)
    t2d = np.isin(np.arange(tiny.VOCAB), IDS) if marks is None else marks
    return change(path, d2t=IDS - np.arange(10) if offsets is None else offsets, t2d=t2d)


def test_reduced_vocabulary(tmp_path):
    """VOC.1: offsets; zeros are the identity."""
    found = load(reduced(tmp_path / "a"))
    assert found.cfg.draft_vocab == 10
    ids = registry.drafter("dflash").target_ids(found.weights)
    assert ids.tolist() == IDS.tolist()
    zeros = load(reduced(tmp_path / "b", np.zeros(10, np.int64), np.arange(tiny.VOCAB) < 10))
    assert registry.drafter("dflash").target_ids(zeros.weights).tolist() == list(range(10))


def test_broken_vocabulary_maps(tmp_path):
    """VOC.2 and d2t against t2d, its own length and the target's vocabulary."""
    with pytest.raises(ValueError, match="no map between them"):
        load(change(reduced(tmp_path / "a"), d2t=None))
    with pytest.raises(ValueError, match="t2d marks 0 target ids"):
        load(reduced(tmp_path / "b", marks=np.zeros(tiny.VOCAB, bool)))
    with pytest.raises(ValueError, match="another id of the target's vocabulary"):
        load(reduced(tmp_path / "c", np.full(10, 20)))
    with pytest.raises(ValueError, match="d2t maps 10 ids, the config says 9"):
        load(reduced(tmp_path / "e", draft_vocab_size=9))
    with pytest.raises(ValueError, match="output head of its own"):
        load(change(reduced(tmp_path / "f"), lm_head__weight=None))


def test_whole_vocabulary_with_a_map(tmp_path):
    """A map that is the identity over the whole vocabulary is no map."""
    path = change(folder(tmp_path, SPECULATORS), d2t=np.zeros(tiny.VOCAB, np.int64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(path).cfg.draft_vocab is None


def test_names_of_folders_mean_nothing(tmp_path):
    """CKP.3: what a drafter is follows from its config."""
    assert (
        load(folder(tmp_path / "qwen3-eagle3-mtp-assistant", ZLAB | {"dflash_config": BLOCK})).name
        == "dflash"
    )


def test_other_kinds(tmp_path):
    """CKP.3: the kind is named before weights are allocated; kinds and classes that are not supported too."""
    path = folder(tmp_path / "a", {**ZLAB, "dflash_config": BLOCK})
    params = tiny.target()
    with pytest.raises(ValueError, match="holds a drafter of kind dflash"):
        checkpoints.load_drafter(
            hub.resolve(path), params.meta.target_cfg, tiny.shared(params), jnp.float32, method="eagle3"
        )
    with pytest.raises(ValueError, match="kind 'xpress' are not supported"):
        load(folder(tmp_path / "b", {**SPECULATORS, "speculators_model_type": "xpress"}))
    with pytest.raises(ValueError, match=r"Gemma 4 layers has: .*layers\.0\.layer_scalar"):
        load(folder(tmp_path / "c", {**DEEPSPEC, "architectures": ["Gemma4DSparkModel"]}))


def test_rope_flat_or_nested(tmp_path):
    """TAP.4: the same drafter; a contradiction is told."""
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    one = load(folder(tmp_path / "a", {**ZLAB, "dflash_config": BLOCK}))
    two = load(folder(tmp_path / "b", {**without(ZLAB, "rope_theta"), **nested, "dflash_config": BLOCK}))
    assert one.cfg == two.cfg
    with pytest.raises(ValueError, match="rope_theta is 5 at top level"):
        load(folder(tmp_path / "c", {**ZLAB, **nested, "rope_theta": 5, "dflash_config": BLOCK}))
