"""Logits of every family in every layout equal those of transformers on each sequence alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from megagrpo.layout.parallel import ParallelLayout
from tests.distributed.conftest import Tiny
from tests.distributed.parity_ranks import RankLogits, logits_of_models
from tests.rank_group import run_ranks
from tests.tiny_models import DIMENSIONS, FAMILIES, WITH_EXPERTS, make_model, reference_logits

VOCAB = DIMENSIONS["vocab_size"]
LENGTHS = [[17, 1, 40, 3], [2, 31], [5, 5, 5, 64, 1, 9], [80, 12]]
GENERATOR = np.random.default_rng(0)
MICROBATCHES = [[GENERATOR.integers(0, VOCAB, n).tolist() for n in lengths] for lengths in LENGTHS]
SEQUENCES = [tokens for microbatch in MICROBATCHES for tokens in microbatch]

LAYOUTS = {
    "one rank": ParallelLayout(),
    "tensor": ParallelLayout(tensor=2, expert_tensor=2),
    "pipeline": ParallelLayout(pipeline=2),
    "tensor and pipeline": ParallelLayout(tensor=2, pipeline=2, expert_tensor=2),
    "virtual pipeline": ParallelLayout(pipeline=2, virtual_pipeline=2),
    "context": ParallelLayout(context=2),
    "data": ParallelLayout(data=2),
    "tensor and context": ParallelLayout(tensor=2, context=2, expert_tensor=2),
    "all": ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2, context=2, expert=2, expert_tensor=2),
}
EXPERT_LAYOUTS = {
    "expert": ParallelLayout(data=2, expert=2),
    "expert over tensor": ParallelLayout(tensor=2, expert=2, expert_tensor=1),
    "expert and expert tensor": ParallelLayout(tensor=2, data=2, expert=2, expert_tensor=2),
    "expert and context": ParallelLayout(context=2, expert=2),
}


@cache
def references(directory: Path, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return reference_logits(directory, SEQUENCES, dtype)


def check(directories: list[Path], layout: ParallelLayout) -> None:
    for directory, ours in zip(directories, logits_of(directories, layout), strict=True):
        for row, (got, wanted) in enumerate(zip(ours, references(directory), strict=True)):
            np.testing.assert_allclose(got, wanted.numpy(), rtol=0, atol=2e-5, err_msg=f"{directory}, sequence {row}")


def logits_of(directories: list[Path], layout: ParallelLayout, dtype: str = "float32") -> list[list[np.ndarray]]:
    """By model and sequence: [tokens, vocab]."""
    by_rank = run_ranks(layout.ranks, logits_of_models, directories, layout, MICROBATCHES, dtype)
    return [assemble([results[index] for results in by_rank], layout) for index in range(len(directories))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_family_agrees_with_transformers(name: str, tiny: Tiny) -> None:
    layout = LAYOUTS[name]
    with_experts = [tiny(family) for family in WITH_EXPERTS]
    dense = [tiny(family) for family in FAMILIES if family not in WITH_EXPERTS]
    if layout.expert == 1:
        check(dense + with_experts, layout)
    else:  # the dense families have no experts to split
        check(with_experts, layout)
        check(dense, replace(layout, expert=1))


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_experts_agree_with_transformers(name: str, tiny: Tiny) -> None:
    check([tiny(family) for family in WITH_EXPERTS], EXPERT_LAYOUTS[name])


@pytest.mark.parametrize(
    ("family", "layers", "layout"),
    [
        ("qwen2_tied", 5, ParallelLayout(pipeline=3, last_stage_layers=1)),
        ("qwen3", 6, ParallelLayout(pipeline=2, virtual_pipeline=2, first_stage_layers=4)),
        ("deepseek_v3", 5, ParallelLayout(pipeline=2, first_stage_layers=3, expert=2, tensor=2)),
    ],
    ids=str,
)
def test_stages_of_unequal_length_agree_with_transformers(
    family: str, layers: int, layout: ParallelLayout, tiny: Tiny
) -> None:
    check([tiny(family, num_hidden_layers=layers)], layout)


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tensor=2, data=2, expert=2)], ids=str)
def test_plainer_kinds_of_deepseek_v3_agree_with_transformers(layout: ParallelLayout, tmp_path: Path) -> None:
    """Queries without a latent, a rotary embedding without scaling, one group of experts."""
    changes = {"q_lora_rank": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "n_group": 1}
    check([make_model("deepseek_v3", tmp_path / "plain", **changes, topk_group=1, first_k_dense_replace=0)], layout)


def test_bfloat16_is_as_near_to_float32_as_transformers_in_bfloat16(tiny: Tiny) -> None:
    directories = [tiny("llama"), tiny("qwen3")]
    for layout in (ParallelLayout(), ParallelLayout(tensor=2, expert_tensor=2)):
        for directory, ours in zip(directories, logits_of(directories, layout, "bfloat16"), strict=True):
            exact, theirs = references(directory), references(directory, torch.bfloat16)
            error = rms([got - wanted.numpy() for got, wanted in zip(ours, exact, strict=True)])
            error_of_theirs = rms([(got - wanted).numpy() for got, wanted in zip(theirs, exact, strict=True)])
            assert 0.5 * error_of_theirs < error < 1.25 * error_of_theirs


def rms(differences: list[np.ndarray]) -> float:
    return float(np.sqrt(np.mean(np.concatenate(differences) ** 2)))


def assemble(by_rank: list[RankLogits | None], layout: ParallelLayout) -> list[np.ndarray]:
    """Logits [tokens, vocab] of each sequence, without padded columns. Each tensor rank must have each token once."""
    vocab = -(-VOCAB // layout.tensor) * layout.tensor
    logits = [np.full((len(tokens), vocab), np.nan, dtype=np.float32) for tokens in SEQUENCES]
    width = vocab // layout.tensor
    for part in by_rank:
        if part is None:
            continue
        columns = slice(part.tensor_rank * width, (part.tensor_rank + 1) * width)
        for row in np.unique(part.rows):
            of_row = part.rows == row
            assert np.isnan(logits[row][part.positions[of_row], columns]).all(), "computed twice"
            logits[row][part.positions[of_row], columns] = part.logits[of_row]
    return [of_sequence[:, :VOCAB] for of_sequence in logits]
