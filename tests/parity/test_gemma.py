"""Gemma targets loaded from safetensors give transformers' logits and residuals, however they are fed.

The window is shorter than the text, so every case crosses its edge.
"""

import numpy as np
import pytest
from parity import feeding, gemma_reference, reference

#: Fed in every way by default; the others, which differ from these in single settings, fed whole.
EVERY_WAY = ("gemma3", "gemma4_moe", "gemma4_e2b")
long = [pytest.param(m, marks=pytest.mark.long) for m in gemma_reference.MODELS if m not in EVERY_WAY]


@pytest.fixture(scope="module", params=list(gemma_reference.MODELS))
def any_case(request, tmp_path_factory):
    return _case(request.param, tmp_path_factory)


@pytest.fixture(scope="module", params=[*EVERY_WAY, *long])
def case(request, tmp_path_factory):
    return _case(request.param, tmp_path_factory)


def _case(name, tmp_path_factory):
    model = gemma_reference.build(name)
    folder = reference.save(model, tmp_path_factory.mktemp(name))
    ids = np.random.default_rng(1).integers(0, 128, (3, 21))
    return feeding.load(folder), reference.answer(model, ids)


def test_full_forward(any_case):
    """TAP.6: each layer uses its own window and rope."""
    feeding.whole(*any_case)


@pytest.mark.long
def test_one_position_at_a_time(case):
    """KVR.1: across the edge of the window."""
    feeding.one_by_one(*case)


def test_blocks_at_ragged_offsets(case):
    """Rows of different length: a right-padded prompt, then blocks that begin at each row's own end."""
    feeding.ragged_blocks(*case)


def test_after_rollback(case):
    """KVR.2: rejected entries of a block leave no trace."""
    feeding.rollbacks(*case)


def test_rows_do_not_touch_each_other(case):
    """BAT."""
    feeding.rows_apart(*case)
