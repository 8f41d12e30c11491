"""Logits of every family in every layout of its kind equal those of transformers on each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from megagrpo.layout.parallel import ParallelLayout
from tests.distributed.conftest import Tiny
from tests.distributed.layouts import KINDS, ROWS, soak
from tests.distributed.parity_ranks import RankLogits, logits_of_models
from tests.ling_model import make_ling
from tests.rank_group import run_ranks
from tests.tiny_models import DIMENSIONS, make_model, reference_logits

VOCAB = DIMENSIONS["vocab_size"]
OFTEN = ("one rank", "all", "unequal, data", "context, data")
LENGTHS = [[17, 1, 40, 3], [2, 31], [5, 5, 5, 64, 1, 9], [80, 12]]
GENERATOR = np.random.default_rng(0)
MICROBATCHES = [[GENERATOR.integers(0, VOCAB, n).tolist() for n in lengths] for lengths in LENGTHS]
SEQUENCES = [tokens for microbatch in MICROBATCHES for tokens in microbatch]


@cache
def references(directory: Path, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return reference_logits(directory, SEQUENCES, dtype)


def check(
    directories: list[Path], layout: ParallelLayout, layer_spec: str = "auto", theirs: list[Path] | None = None
) -> None:
    """`theirs` are directories that transformers can load, by default the same."""
    logits = logits_of(directories, layout, layer_spec=layer_spec)
    for directory, ours, reference in zip(directories, logits, theirs or directories, strict=True):
        for row, (got, wanted) in enumerate(zip(ours, references(reference), strict=True)):
            np.testing.assert_allclose(got, wanted.numpy(), rtol=0, atol=2e-5, err_msg=f"{directory}, sequence {row}")


def logits_of(
    directories: list[Path], layout: ParallelLayout, dtype: str = "float32", layer_spec: str = "auto"
) -> list[list[np.ndarray]]:
    """By model and sequence: [tokens, vocab]."""
    arguments = directories, layout, MICROBATCHES, dtype, layer_spec
    fused = layer_spec == "transformer_engine"
    by_rank = run_ranks(layout.ranks, logits_of_models, *arguments, transformer_engine=fused)
    return [assemble([results[index] for results in by_rank], layout) for index in range(len(directories))]


# Whole steps (test_step_parity.py) show the forward passes of one family in every row.
@pytest.mark.parametrize("name", [*OFTEN, *soak(*(name for name in ROWS if name not in OFTEN))])
def test_every_family_agrees_with_transformers(name: str, tiny: Tiny) -> None:
    row = ROWS[name]
    families = [family for family, kind in KINDS.items() if kind == row.kind or name == "one rank"]
    check([tiny(family, **row.changes) for family in families], row.layout)


@pytest.mark.parametrize("name", ["one rank", pytest.param("all", marks=pytest.mark.long)])
def test_ling_agrees_with_a_glm_of_the_same_weights(name: str, tmp_path: Path) -> None:
    ling, glm = make_ling(tmp_path)
    check([ling], ROWS[name].layout, theirs=[glm])


@pytest.mark.parametrize("name", ["one rank", "expert over tensor"])
def test_plainer_kinds_of_deepseek_v3_agree_with_transformers(name: str, tmp_path: Path) -> None:
    """Queries without a latent, a rotary embedding without scaling, one group of experts."""
    changes = {"q_lora_rank": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "n_group": 1}
    check(
        [make_model("deepseek_v3", tmp_path / "plain", **changes, topk_group=1, first_k_dense_replace=0)],
        ROWS[name].layout,
    )


def test_bfloat16_is_as_near_to_float32_as_transformers_in_bfloat16(tiny: Tiny) -> None:
    directories = [tiny("llama"), tiny("qwen3")]
    for name in ("one rank", "tensor"):
        layout = ROWS[name].layout
        for directory, ours in zip(directories, logits_of(directories, layout, "bfloat16"), strict=True):
            exact, theirs = references(directory), references(directory, torch.bfloat16)
            error = rms([got - wanted.numpy() for got, wanted in zip(ours, exact, strict=True)])
            error_of_theirs = rms([(got - wanted).numpy() for got, wanted in zip(theirs, exact, strict=True)])
            assert 0.5 * error_of_theirs < error < 1.25 * error_of_theirs


def rms(differences: list[np.ndarray]) -> float:
    return float(np.sqrt(np.mean(np.concatenate(differences) ** 2)))


def assemble(
    by_rank: Sequence[RankLogits | None], layout: ParallelLayout, sequences: list[list[int]] = SEQUENCES
) -> list[np.ndarray]:
    """Logits [tokens, vocab] of each sequence, without padded columns. Each tensor rank must have each token once."""
    vocab = -(-VOCAB // layout.tensor) * layout.tensor
    logits = [np.full((len(tokens), vocab), np.nan, dtype=np.float32) for tokens in sequences]
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
