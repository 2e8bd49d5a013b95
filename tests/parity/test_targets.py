"""Targets loaded from safetensors give transformers' logits and residuals, however they are fed."""

import numpy as np
import pytest
from parity import feeding, reference

#: Variants that differ in single layers only: fed whole, and not in every other way as well.
WHOLE_ONLY = {"llama3_rope", "llama_bias", "qwen3_yarn", "qwen3_moe_mixed"}


@pytest.fixture(scope="module", params=list(reference.MODELS))
def any_case(request, tmp_path_factory):
    return _case(request, tmp_path_factory)


@pytest.fixture(scope="module", params=[m for m in reference.MODELS if m not in WHOLE_ONLY])
def case(request, tmp_path_factory):
    return _case(request, tmp_path_factory)


def _case(request, tmp_path_factory):
    model = reference.build(request.param)
    folder = reference.save(model, tmp_path_factory.mktemp(request.param))
    ids = np.random.default_rng(1).integers(0, 128, (3, 21))
    return feeding.load(folder), reference.answer(model, ids)


def test_full_forward(any_case):
    feeding.whole(*any_case)


def test_one_position_at_a_time(case):
    feeding.one_by_one(*case)


def test_blocks_at_ragged_offsets(case):
    """Rows of different length: a right-padded prompt, then blocks that begin at each row's own end."""
    feeding.ragged_blocks(*case)


def test_after_rollback(case):
    """KVR: rejected entries of a block leave no trace."""
    feeding.rollbacks(*case)


def test_rows_do_not_touch_each_other(case):
    """BAT."""
    feeding.rows_apart(*case)
