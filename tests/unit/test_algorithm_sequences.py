"""Sums over responses whose tokens lie anywhere."""

from __future__ import annotations

import pytest
import torch

from megagrpo.algorithm.policy_losses import GmpoConfig, GspoConfig, PolicyInputs
from megagrpo.algorithm.sequences import Sequences

INDEX = torch.tensor([1, 0, 1, 1, 0])
SEQUENCES = Sequences(INDEX, torch.tensor([2.0, 3.0, 0.0]))


def test_sums_means_and_shares_are_by_response():
    values = torch.tensor([1.0, 20.0, 3.0, 5.0, 40.0])
    assert SEQUENCES.sum(values).tolist() == [60.0, 9.0, 0.0]
    assert SEQUENCES.mean(values).tolist() == [30.0, 3.0, 0.0]
    assert SEQUENCES.of_tokens(SEQUENCES.sum(INDEX == 1)).tolist() == [3.0, 0.0, 3.0, 3.0, 0.0]
    assert SEQUENCES.shares().sum().item() == pytest.approx(2)


def test_sums_are_exact_where_float32_would_depend_on_the_order():
    values = torch.tensor([1e8, 0.0, 1.0, -1e8, 0.0])
    order = [0, 3, 2, 1, 4]
    sums = [Sequences(INDEX[order], SEQUENCES.tokens).sum(values[order]), SEQUENCES.sum(values)]
    assert [each.tolist() for each in sums] == [[0.0, 1.0, 0.0]] * 2


def test_losses_by_response_keep_the_type_of_their_logprobs():
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -0.25, -1.5], requires_grad=True)
    for method in (GspoConfig(), GmpoConfig()):
        inputs = PolicyInputs(logprobs, logprobs.detach() - 0.1, torch.ones(5), SEQUENCES)
        found = method.of_tokens(inputs)
        assert found.loss.dtype == found.ratio.dtype == torch.float32
        assert found.loss.requires_grad
