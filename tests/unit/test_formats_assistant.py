"""Folders of Gemma 4 assistants: what is read, how it can be asked for, and what is refused."""

import json

import assistant_tiny as tiny
import jax
import numpy as np
import pytest

import specjax
from specjax import attach, checkpoints, registry


def load(folder, name="gemma4_small", method=None, **settings):
    """What the loader makes of a folder; nothing is to be warned about."""
    params = tiny.target(name)
    lent = registry.target("gemma4").shared(params.target, params.meta.target_cfg)
    source, cfg = checkpoints.hub.resolve(folder), params.meta.target_cfg
    return checkpoints.load_drafter(source, cfg, lent, np.float32, method=method, settings=settings)


def equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("clusters", [{}, tiny.CLUSTERS])
def test_what_is_read(tmp_path, clusters):
    """CKP.4, CKP.6: every tensor, the head from the tied table, an int64 ordering; the number of drafts is assumed."""
    params = tiny.drafted(**clusters)
    found = load(tiny.folder(tmp_path / "d", params))
    assert (found.name, found.format, found.made_for) == ("assistant", "transformers", "")
    assert found.cfg == params.meta.drafter_cfg
    assert equal(found.weights, params.drafter)
    assert found.notes == ("the file does not state how many tokens to draft; 3 is assumed (k=...)",)
    assert load(tmp_path / "d", k=5).notes == ()


def test_the_unified_type_and_an_untied_head(tmp_path):
    """CKP.6: the head that is stored counts when the config does not tie it; stray keys are left out."""
    params, rng = tiny.drafted(), np.random.default_rng(0)
    head = rng.standard_normal((tiny.VOCAB, 16)).astype(np.float32)
    stray = np.zeros((16, 16), np.float32)
    extra = {"lm_head.weight": head, "model.layers.0.self_attn.k_proj.weight": stray}
    unified = {"model_type": "gemma4_unified_assistant", "architectures": None}
    untied = tiny.folder(tmp_path / "untied", params, extra, tie_word_embeddings=False, **unified)
    assert np.array_equal(load(untied).weights.head, head)
    assert equal(load(tiny.folder(tmp_path / "tied", params, extra, **unified)).weights, params.drafter)


def test_asked_for_as_mtp(tmp_path):
    """PEER.9: vLLM calls an assistant "mtp"; any other method is refused, naming what was found."""
    folder = tiny.folder(tmp_path / "d", tiny.drafted())
    for method in ("mtp", "gemma4_mtp", "assistant", None):
        given = {"method": method, "model": str(folder), "num_speculative_tokens": 2}
        plan = attach.plan(None, given, None)
        params = attach.attach(tiny.target(), plan, lambda text: None)
        assert (params.meta.drafter, params.meta.drafter_cfg.k) == ("assistant", 2)
        assert params.meta.drafter_cfg.drafting == "greedy"
    with pytest.raises(
        ValueError, match=r"holds a drafter of kind assistant \(transformers format\), not eagle3"
    ):
        load(folder, method="eagle3")


def test_a_softcap_is_told(tmp_path):
    """TAP.8: transformers' assistant applies none whatever its text_config says; a setting does."""
    text = tiny.TEXT | {"final_logit_softcapping": 30.0}
    folder = tiny.folder(tmp_path / "d", tiny.drafted(), text_config=text)
    assert load(folder).cfg.softcap is None
    assert "final_logit_softcapping is 30.0" in load(folder).notes[1]
    assert load(folder, softcap=30.0, k=3).notes == ()
    assert load(folder, softcap=30.0).cfg.softcap == 30.0


REFUSED = {
    "another target": ({"backbone_hidden_size": 48}, "was made for a target of width 48"),
    "another vocabulary": ({"text_config": tiny.TEXT | {"vocab_size": 60}}, "vocabulary of 60 tokens"),
    "a missing tensor": ({"without": "post_projection.weight"}, r"lacks 1 tensor.*post_projection\.weight"),
    "no head": ({"without": "model.embed_tokens.weight"}, r"lacks 1 tensor.*lm_head\.weight"),
    "no text_config": ({"text_config": None}, r"the config lacks \['text_config'\]"),
    "clusters that are not there": (
        {"use_ordered_embeddings": True, "num_centroids": 3, "centroid_intermediate_top_k": 1},
        "lacks 2 tensor.*masked_embedding",
    ),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
    "experts": ({"text_config": tiny.TEXT | {"enable_moe_block": True}}, "enable_moe_block=True"),
    "wrong width": ({"text_config": tiny.TEXT | {"intermediate_size": 32}}, "has shape"),
}  # fmt: skip
REFUSED_CLUSTERS = {
    "a flag that denies them": ({"use_ordered_embeddings": False}, "use_ordered_embeddings is false, but"),
    "another number": ({"num_centroids": 2}, r"num_centroids is 2, .* has 3 rows"),
    "no order": (
        {"extra": {"masked_embedding.token_ordering": np.zeros(tiny.VOCAB, np.int64)}},
        "must list each of the 6 token ids once",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_CLUSTERS])
def test_what_is_refused(tmp_path, case):
    """CKP.3, CKP.4, TAP.7, TAP.8, VOC.4: naming the folder and what is wrong."""
    clusters = case in REFUSED_CLUSTERS
    changes, message = (REFUSED_CLUSTERS if clusters else REFUSED)[case]
    folder = tiny.folder(tmp_path / "d", tiny.drafted(**(tiny.CLUSTERS if clusters else {})), **changes)
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    assert str(folder) in str(error.value)


def test_what_nobody_knows_is_told(tmp_path):
    """TAP.8, CKP.4: a setting and a tensor that no assistant has."""
    extra = {"model.more.weight": np.zeros(3, np.float32)}
    with (
        pytest.warns(UserWarning, match=r"model\.more\.weight"),
        pytest.warns(UserWarning, match="new_flag"),
    ):
        load(tiny.folder(tmp_path / "d", tiny.drafted(), extra, new_flag=True))


def test_saved_with_its_target(tmp_path):
    """CKP.7: target and assistant as one checkpoint of ours."""
    params = tiny.drafted(**tiny.CLUSTERS)
    specjax.save(params, tmp_path / "both")
    again = specjax.load(tmp_path / "both")
    assert again.meta.drafter_cfg == params.meta.drafter_cfg
    assert equal(again.drafter, params.drafter)
    assert json.dumps(again.meta.to_json())
