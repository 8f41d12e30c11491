"""Estimated work of a sequence, against a count made from the checkpoint's tensors."""

import numpy as np
import pytest

from megagrpo.batching.work import Work, work_of
from megagrpo.weights.families import read_architecture, tensors_of
from tests.tiny_models import make_model


@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3_moe", "deepseek_v3"])
def test_every_matrix_that_a_token_meets_counts_twice(family, tmp_path):
    arch = read_architecture(make_model(family, tmp_path / family))
    weights = 0.0
    for tensor in tensors_of(arch):
        if len(tensor.shape) < 2 or tensor.role == "embedding":
            continue
        share = arch.experts.per_token / arch.experts.count if tensor.expert is not None else 1
        weights += np.prod(tensor.shape) * share
    if arch.tied_embeddings:
        weights += arch.vocab * arch.hidden
    assert work_of(arch).linear == pytest.approx(2 * weights)


def test_attention_counts_half_of_all_pairs():
    work = Work(linear=0.0, quadratic=3.0)
    np.testing.assert_array_equal(work.of(np.array([1, 10])), [3.0, 300.0])
