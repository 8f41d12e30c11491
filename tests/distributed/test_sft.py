"""A step of supervised fine-tuning is the same in plain torch and in layouts of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.batching.rank_batches import RankBatch, TrainSequence, make_rank_batches
from megagrpo.convert.merge_lora import merge_lora
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.model import named_tensors
from megagrpo.megatron.sft_rank import SftRank
from megagrpo.megatron.state import parameters_of
from megagrpo.recipe.schema import SftRecipe
from megagrpo.recipe.schema.train import LoraConfig
from megagrpo.weights.families import read_architecture
from tests.distributed.grpo_case import assemble, clip_and_step, in_checkpoint, load_reference
from tests.distributed.grpo_ranks import boxes, export_adapter
from tests.rank_group import run_ranks
from tests.safetensors_files import saved
from tests.tiny_models import make_model

LR, LONGEST, IGNORED = 1e-2, 64, -100
LENGTHS = [9, 64, 2, 33, 17, 40, 5, 12, 58]
LAYOUTS = {
    "tensor and data": ParallelLayout(tensor=2, data=2),
    "pipeline and context": ParallelLayout(pipeline=2, context=2),
}


def make_recipe(layout: ParallelLayout, **train: Any) -> SftRecipe:
    sizes = vars(layout) | {"expert_tensor": layout.tensor}
    return SftRecipe.model_validate(
        {
            "kind": "sft",
            "name": "step",
            "model": {"path": "unused", "dtype": "float32"},
            "data": {"train": [{"path": "unused"}], "examples_per_step": len(LENGTHS)},
            "train": {
                "layout": sizes,
                "total_steps": 3,
                "tokens_per_microbatch": LONGEST,
                "distributed_optimizer": False,
                "optimizer": {"lr": LR, "clip_grad": 0.5},
                **train,
            },
        }
    )


def make_sequences(vocabulary: int) -> list[TrainSequence]:
    """Conversations of one or two turns: the assistant's tokens are in one or two runs."""
    random = np.random.default_rng(0)
    sequences = []
    for row, length in enumerate(LENGTHS):
        mask = np.zeros(length, bool)
        mask[1 : 1 + length // 4] = row % 2
        mask[length // 2 :] = True
        nobody = np.zeros(length, np.float32)
        sequences.append(TrainSequence(random.integers(0, vocabulary, length), mask, nobody, row=row))
    return sequences


def call(
    number: int,
    store: str,
    function: Callable[..., Any],
    recipe: SftRecipe,
    directory: str,
    batches: list[RankBatch],
    *args: Any,
) -> Any:
    """`function` on every rank's SftRank, with its batch loaded."""
    rank = SftRank(recipe, number, store, directory, "cpu")
    rank.load_batch(batches[rank.where.data])
    return function(rank, *args)


def step(rank: Any) -> dict[str, Any]:
    """Gradients, an update, and the loss after it."""
    rank.compute_gradients()
    gradients = boxes(rank, {name: p.main_grad for name, p in parameters_of(rank.policy.chunks).items()})
    return {"gradients": gradients, "before": rank.evaluate(), "update": rank.update(LR), "after": rank.evaluate()}


def train_adapters(rank: Any, lora: LoraConfig, exported_in: Path) -> dict[str, Any]:
    """Two updates: the first changes B's alone, which begin with zeros."""
    base, adapters = (
        {name: tensor.clone() for name, tensor in tensors.items()}
        for tensors in (named_tensors(rank.policy.chunks), rank.policy.adapters.tensors())
    )
    update = rank.update(LR)
    rank.update(LR)
    export_adapter(rank, exported_in, lora, "float32")
    return {
        "update": update,
        "after": rank.evaluate(),
        "base stays": all(torch.equal(base[name], now) for name, now in named_tensors(rank.policy.chunks).items()),
        "changed": [not torch.equal(adapters[name], now) for name, now in rank.policy.adapters.tensors().items()],
        "merged": boxes(rank, rank.tensors()),
    }


def on_ranks(
    function: Callable[..., Any], recipe: SftRecipe, directory: Path, sequences: list[TrainSequence], *args: Any
) -> list[dict[str, Any]]:
    layout = recipe.train.layout.parallel()
    batches = make_rank_batches(sequences, layout=layout, minibatches=1, tokens_per_microbatch=LONGEST, seed=0)
    arguments = function, recipe, str(directory), batches, *args
    return run_ranks(layout.ranks, call, *arguments, joined=False)


def cross_entropy(model: torch.nn.Module, sequences: list[TrainSequence]) -> torch.Tensor:
    """As transformers would compute it, one sequence at a time, over the tokens of all of them."""
    losses = []
    for sequence in sequences:
        labels = torch.from_numpy(np.where(sequence.loss_mask, sequence.tokens, IGNORED))[1:]
        logits = model(torch.from_numpy(sequence.tokens)[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none"))
    counted = torch.cat([torch.from_numpy(sequence.loss_mask[1:]) for sequence in sequences])
    return torch.cat(losses)[counted].mean()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2_tied", tmp_path_factory.mktemp("dense") / "qwen2_tied")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_loss_gradients_and_step_are_those_of_plain_torch(directory: Path, layout: ParallelLayout) -> None:
    model = load_reference(directory)
    sequences = make_sequences(model.config.vocab_size)
    loss = cross_entropy(model, sequences)
    loss.backward()
    gradients = in_checkpoint(read_architecture(directory))(
        {name: p.grad.clone() for name, p in model.named_parameters()}
    )
    recipe = make_recipe(layout)
    norm = clip_and_step(list(model.parameters()), recipe.train.optimizer)

    ranks = on_ranks(step, recipe, directory, sequences)
    (update,) = [rank["update"] for rank in ranks if rank["update"]]
    (before,) = [rank["before"] for rank in ranks if rank["before"]]
    (after,) = [rank["after"] for rank in ranks if rank["after"]]
    assert update.loss.mean == pytest.approx(loss.item(), rel=1e-5)
    assert before == update.loss
    assert before.tokens == sum(int(sequence.loss_mask.sum()) for sequence in sequences)
    assert update.grad_norm == pytest.approx(norm, rel=1e-5)
    with torch.no_grad():
        assert after.mean == pytest.approx(cross_entropy(model, sequences).item(), rel=1e-4)
    found = assemble([rank["gradients"] for rank in ranks])
    largest = max(np.abs(values).max() for values in gradients.values())
    for name, values in gradients.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-6 * largest, err_msg=name)


def test_with_adapters_only_these_are_trained_and_the_merged_export_has_the_loss_of_the_ranks(
    directory: Path, tmp_path: Path
) -> None:
    lora = LoraConfig(rank=3, alpha=6.0)
    recipe = make_recipe(ParallelLayout(tensor=2), lora=lora.model_dump())
    sequences = make_sequences(load_reference(directory).config.vocab_size)
    ranks = on_ranks(train_adapters, recipe, directory, sequences, lora, tmp_path / "adapter")
    assert all(rank["base stays"] and all(rank["changed"]) for rank in ranks)

    merge_lora(directory, tmp_path / "adapter", tmp_path / "merged")
    start, exported, adapters = (saved(path) for path in (directory, tmp_path / "merged", tmp_path / "adapter"))
    served = assemble([rank["merged"] for rank in ranks])
    assert exported.keys() == start.keys()
    for name, tensor in exported.items():
        module = "base_model.model." + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in adapters:
            a, b = (adapters[f"{module}.lora_{which}.weight"] for which in "AB")
            torch.testing.assert_close(tensor, start[name] + 2.0 * b @ a, rtol=1e-6, atol=1e-7)
            assert not torch.equal(tensor, start[name]), name
        else:
            assert torch.equal(tensor, start[name]), name
        np.testing.assert_allclose(served[name], tensor, rtol=1e-6, atol=1e-7, err_msg=name)
    (update,) = [rank["update"] for rank in ranks if rank["update"]]
    (after,) = [rank["after"] for rank in ranks if rank["after"]]
    with torch.no_grad():
        assert update.loss.mean == pytest.approx(cross_entropy(load_reference(directory), sequences).item(), rel=1e-5)
        merged = cross_entropy(load_reference(tmp_path / "merged"), sequences).item()
    assert after.mean == pytest.approx(merged, rel=1e-5)
    assert after.mean < update.loss.mean
