"""torch_dist between megagrpo and Megatron itself: real ranks load what we write, and we read what they save."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megagrpo.checkpoint.store import CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.convert.hugging_face import to_hugging_face
from megagrpo.convert.megatron import to_megatron
from megagrpo.convert.verify import verify
from megagrpo.layout.parallel import ParallelLayout
from tests.distributed.test_parity_logits import MICROBATCHES, SEQUENCES, assemble
from tests.rank_group import run_ranks
from tests.safetensors_files import assert_same_files
from tests.tiny_models import FAMILIES, WITH_EXPERTS, make_model, reference_logits

LAYOUTS = {
    "tensor": ParallelLayout(tensor=2, expert_tensor=2),
    "pipeline": ParallelLayout(pipeline=2),
    "tensor and pipeline": ParallelLayout(tensor=2, pipeline=2, expert_tensor=2),
    "virtual pipeline": ParallelLayout(pipeline=2, virtual_pipeline=2),
    "expert": ParallelLayout(data=2, expert=2),
}


# The layout with most kinds of cuts in every test run; the others, which cost as much each, in the long one.
IN_TURN = [name if name == "tensor and pipeline" else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    return {family: make_model(family, parent / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def converted(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("torch_dist")
    return {family: to_megatron(model, parent / family).directory for family, model in models.items()}


@pytest.fixture(scope="module")
def references(models: dict[str, Path]) -> dict[str, list[torch.Tensor]]:
    return {family: reference_logits(model, SEQUENCES) for family, model in models.items()}


def families_for(name: str) -> list[str]:
    """Every family over tensor and pipeline together, and each in one of the two alone."""
    if name == "expert":
        return list(WITH_EXPERTS)
    return list(FAMILIES)[{"tensor": slice(0, None, 2), "pipeline": slice(1, None, 2)}.get(name, slice(None))]


@pytest.mark.parametrize("name", IN_TURN)
def test_megatron_loads_what_was_converted(
    name: str, models: dict[str, Path], converted: dict[str, Path], references: dict[str, list[torch.Tensor]]
) -> None:
    layout, families = LAYOUTS[name], families_for(name)
    cases = [(models[family], converted[family] / "iter_0000000") for family in families]
    by_rank = run_ranks(
        layout.ranks, "tests.distributed.convert_ranks:logits_of_torch_dist", cases, layout, MICROBATCHES
    )
    for index, family in enumerate(families):
        ours = assemble([results[index] for results in by_rank], layout)
        for got, wanted in zip(ours, references[family], strict=True):
            np.testing.assert_allclose(got, wanted.numpy(), rtol=0, atol=2e-5, err_msg=family)


@pytest.mark.parametrize("name", IN_TURN)
def test_what_megatron_saved_is_converted_bit_by_bit(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    layout, families = LAYOUTS[name], families_for(name)
    cases = [(models[family], tmp_path / family / "iter_0000007") for family in families]
    run_ranks(layout.ranks, "tests.distributed.convert_ranks:save_torch_dist", cases, layout)
    for family in families:
        (tmp_path / family / "latest_checkpointed_iteration.txt").write_text("7")
        done = to_hugging_face(tmp_path / family, tmp_path / f"{family}.hf", model=models[family])
        assert not done.left_out
        assert_same_files(models[family], tmp_path / f"{family}.hf")


def test_a_training_checkpoint_is_converted_as_the_run_would_export_it(models: dict[str, Path], tmp_path: Path) -> None:
    families, sizes = ["qwen2_tied", "deepseek_v3"], {"tensor": 2, "expert_tensor": 2}
    stores = {family: CheckpointStore(tmp_path / family, keep_last=1) for family in families}
    saving = {family: store.begin(4) for family, store in stores.items()}
    ranks = "tests.distributed.convert_ranks"
    files = run_ranks(2, f"{ranks}:save_training", [(models[family], saving[family]) for family in families], sizes)
    cases = []
    for index, family in enumerate(families):
        recipe = {"model": {"path": str(models[family])}}
        state = TrainerState(4, weight_version=5, data_cursor={}, recipe=recipe)
        saved = stores[family].commit(state, [file for of_rank in files for file in of_rank[index]])
        cases.append((models[family], saved.rank_directory, tmp_path / f"{family}.exported"))
    run_ranks(1, f"{ranks}:export_training", cases, {})
    for family in families:
        exported = tmp_path / f"{family}.exported"
        to_hugging_face(tmp_path / family, tmp_path / f"{family}.hf")
        to_megatron(tmp_path / family / "step_000004", tmp_path / f"{family}.megatron")
        assert_same_files(exported, tmp_path / f"{family}.hf")
        assert not verify(exported, tmp_path / f"{family}.megatron").differences
        assert verify(exported, models[family]).differences
