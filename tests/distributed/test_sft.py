"""A step of supervised fine-tuning is the same in plain torch and in layouts of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.convert.merge_lora import merge_lora
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.model import named_tensors
from megagrpo.megatron.model_rank import SftRank
from megagrpo.recipe.schema import LoraConfig
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files.adapters import adapted_matrices
from tests.distributed.conftest import Tiny
from tests.distributed.layouts import ROWS
from tests.distributed.step_case import (
    LR,
    Case,
    assemble,
    assert_same_step,
    conversations,
    load_reference,
    make_sft_recipe,
    torch_step,
)
from tests.distributed.step_ranks import export_adapter, gather, on_ranks, take_step, the_one, trained_of, weights_of
from tests.safetensors_files import saved

IGNORED = -100


@pytest.fixture(scope="module")
def case(tiny: Tiny) -> Case:
    return conversations(tiny("qwen2_tied"), [9, 64, 2, 33, 17, 40, 5, 12, 58])


def cross_entropy(model: torch.nn.Module, case: Case) -> torch.Tensor:
    """Computes the loss with transformers, one sequence at a time, over the tokens of all of them."""
    losses = []
    for sequence in case.sequences:
        labels = torch.from_numpy(np.where(sequence.loss_mask, sequence.tokens, IGNORED))[1:]
        logits = model(torch.from_numpy(sequence.tokens)[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
    return torch.stack(losses).sum() / case.tokens


def step(rank: SftRank, batch: RankBatch, _: None) -> Any:
    """The loss before, a step, and the loss after it."""
    rank.load_batch(batch)
    before = rank.evaluate()
    return before, take_step(rank.policy, rank.compute_gradients, lambda: rank.update(LR)), rank.evaluate()


@pytest.mark.parametrize("name", ["tensor, data", "unequal, context, expert"])
def test_loss_gradients_and_step_are_those_of_plain_torch(case: Case, name: str) -> None:
    recipe = make_sft_recipe(ROWS[name].of("qwen2_tied"), distributed_optimizer=False)
    model = load_reference(case.directory)
    architecture = read_architecture(case.directory)
    wanted = torch_step(model, cross_entropy(model, case), architecture, recipe.train.optimizer)

    losses_before, steps, losses_after = zip(*on_ranks(step, recipe, case), strict=True)
    assert_same_step(gather(steps), wanted)
    before = the_one(losses_before)
    assert before == the_one(taken.metrics for taken in steps).loss
    assert before.tokens == case.tokens
    with torch.no_grad():
        assert the_one(losses_after).mean == pytest.approx(cross_entropy(model, case).item(), rel=1e-4)


def train_adapters(rank: SftRank, batch: RankBatch, _: None, lora: LoraConfig, exported_in: Path) -> Any:
    """Two updates: the first changes B's alone, which begin with zeros. Weights, and the losses before and after."""
    rank.load_batch(batch)
    base = {name: tensor.clone() for name, tensor in named_tensors(rank.policy.chunks).items()}
    adapters = trained_of(rank.policy)
    first = rank.update(LR)
    rank.update(LR)
    export_adapter(rank, exported_in, lora, "float32")
    assert all(torch.equal(base[name], now) for name, now in named_tensors(rank.policy.chunks).items())
    for (box, old), (_, new) in zip(adapters, trained_of(rank.policy), strict=True):
        assert not np.array_equal(old, new), box
    return weights_of(rank.policy), first, rank.evaluate()


def test_with_adapters_only_these_are_trained_and_the_merged_export_has_the_loss_of_the_ranks(
    case: Case, tmp_path: Path
) -> None:
    lora = LoraConfig(rank=3, alpha=6.0)
    recipe = make_sft_recipe(ParallelLayout(tensor=2), lora=lora.model_dump())
    ranks = on_ranks(train_adapters, recipe, case, lora, tmp_path / "adapter")
    parts, updates, losses = zip(*ranks, strict=True)

    merge_lora(case.directory, tmp_path / "adapter", tmp_path / "merged")
    start, exported, served = saved(case.directory), saved(tmp_path / "merged"), assemble(parts)
    adapted = {matrix.name for matrix in adapted_matrices(read_architecture(case.directory), lora.targets)}
    assert exported.keys() == start.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, start[name]) == (name not in adapted), name
        np.testing.assert_allclose(served[name], tensor, rtol=1e-6, atol=1e-7, err_msg=name)
    before, after = the_one(updates).loss.mean, the_one(losses).mean
    with torch.no_grad():
        wanted = [cross_entropy(load_reference(path), case).item() for path in (case.directory, tmp_path / "merged")]
    assert [before, after] == pytest.approx(wanted, rel=1e-5)
    assert after < before
