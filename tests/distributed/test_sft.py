"""A step of supervised fine-tuning is the same in plain torch and in layouts of every kind."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.batching.microbatch import RankBatch, TrainSequence
from megagrpo.batching.rank_batches import make_rank_batches
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.schema import SftRecipe
from tests.distributed.grpo_case import assemble, in_checkpoint, load_reference
from tests.distributed.grpo_ranks import boxes
from tests.rank_group import run_ranks
from tests.tiny_models import make_model

LR, LONGEST, IGNORED = 1e-2, 64, -100
LENGTHS = [9, 64, 2, 33, 17, 40, 5, 12, 58]
LAYOUTS = {
    "tensor and data": ParallelLayout(tensor=2, data=2),
    "pipeline and context": ParallelLayout(pipeline=2, context=2),
}


def make_recipe(layout: ParallelLayout) -> SftRecipe:
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
        sequences.append(TrainSequence(random.integers(0, vocabulary, length), mask, nobody, group=row, row=row))
    return sequences


def call(recipe: SftRecipe, directory: str, store: str, batches: list[RankBatch]) -> dict[str, Any]:
    """On every rank: gradients, an update, and the loss after it."""
    import torch.distributed as dist

    from megagrpo.megatron import process
    from megagrpo.megatron.sft_rank import SftRank
    from megagrpo.megatron.state_shards import parameters_of

    number = dist.get_rank()
    dist.barrier()  # a rank that leaves while another still connects to a third makes that one fail
    process.stop()  # the harness's group; an SftRank makes its own
    rank = SftRank(recipe, number, f"file://{store}", directory, "cpu")
    try:
        rank.load_batch(batches[rank.where.data])
        rank.compute_gradients()
        gradients = boxes(rank, {name: p.main_grad for name, p in parameters_of(rank.policy.chunks).items()})
        return {"gradients": gradients, "before": rank.evaluate(), "update": rank.update(LR), "after": rank.evaluate()}
    finally:
        rank.close()


def on_ranks(recipe: SftRecipe, directory: Path, sequences: list[TrainSequence]) -> list[dict[str, Any]]:
    layout = recipe.train.layout.parallel()
    batches = make_rank_batches(sequences, layout=layout, minibatches=1, tokens_per_microbatch=LONGEST, seed=0)
    store = directory.parent / f"store-{uuid.uuid4().hex}"
    return run_ranks(layout.ranks, f"{__name__}:call", recipe, str(directory), str(store), batches)


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
    gradients = in_checkpoint(directory)({name: p.grad.clone() for name, p in model.named_parameters()})
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0).step()

    ranks = on_ranks(make_recipe(layout), directory, sequences)
    (update,) = [rank["update"] for rank in ranks if rank["update"]]
    (before,) = [rank["before"] for rank in ranks if rank["before"]]
    (after,) = [rank["after"] for rank in ranks if rank["after"]]
    assert update.loss.mean == pytest.approx(loss.item(), rel=1e-5)
    assert before == update.loss
    assert before.tokens == sum(int(sequence.loss_mask.sum()) for sequence in sequences)
    assert update.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    with torch.no_grad():
        assert after.mean == pytest.approx(cross_entropy(model, sequences).item(), rel=1e-4)
    found = assemble([rank["gradients"] for rank in ranks])
    largest = max(np.abs(values).max() for values in gradients.values())
    for name, values in gradients.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-6 * largest, err_msg=name)
