"""torch_dist between megagrpo and Megatron itself: real ranks load what we write, and we read what they save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state

from megagrpo.checkpoint.store import CheckpointStore, SavedFile
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.convert.hugging_face import to_hugging_face
from megagrpo.convert.megatron import to_megatron
from megagrpo.convert.verify import verify
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import process, state
from megagrpo.megatron.config import transformer_config
from megagrpo.megatron.model import build_chunks, named_tensors
from megagrpo.recipe.schema import LayoutConfig, TrainConfig
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files.export import begin_export, finish_export, write_part
from megagrpo.weights.plan import make_plan
from tests.distributed.conftest import Tiny
from tests.distributed.layouts import ROWS
from tests.distributed.parity_ranks import RankLogits, load_model, logits_of_chunks
from tests.distributed.test_parity_logits import MICROBATCHES, assemble, references
from tests.distributed.tiny_training import TinyTraining
from tests.rank_group import run_ranks
from tests.safetensors_files import assert_same_files
from tests.tiny_models import TINY_FAMILIES, WITH_EXPERTS

# The row with most kinds of cuts in every test run; the others, which cost as much each, in the long one.
IN_TURN = [
    "tensor, unequal",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in ("virtual, context", "expert, data", "expert over tensor", "unequal, data")
    ),
]


def layout_and_models(name: str, tiny: Tiny) -> tuple[ParallelLayout, list[Path]]:
    """A row for families with experts, or for all of them at once where it does not share experts out."""
    layout = ROWS[name].of("qwen3_moe")
    return layout, [tiny(family) for family in (TINY_FAMILIES if layout.expert == 1 else WITH_EXPERTS)]


@pytest.mark.parametrize("name", IN_TURN)
def test_megatron_loads_what_was_converted(name: str, tiny: Tiny, tmp_path: Path) -> None:
    layout, models = layout_and_models(name, tiny)
    cases = [(model, to_megatron(model, tmp_path / model.name).directory / "iter_0000000") for model in models]
    by_rank = run_ranks(layout.ranks, logits_of_torch_dist, cases, layout, MICROBATCHES)
    for index, model in enumerate(models):
        ours = assemble([results[index] for results in by_rank], layout)
        for got, wanted in zip(ours, references(model), strict=True):
            np.testing.assert_allclose(got, wanted.numpy(), rtol=0, atol=2e-5, err_msg=model.name)


@pytest.mark.parametrize("name", IN_TURN)
def test_what_megatron_saved_is_converted_bit_by_bit(name: str, tiny: Tiny, tmp_path: Path) -> None:
    layout, models = layout_and_models(name, tiny)
    cases = [(model, tmp_path / model.name / "iter_0000007") for model in models]
    run_ranks(layout.ranks, save_torch_dist, cases, layout)
    for model in models:
        (tmp_path / model.name / "latest_checkpointed_iteration.txt").write_text("7")
        done = to_hugging_face(tmp_path / model.name, tmp_path / f"{model.name}.hf", model=model)
        assert not done.left_out
        assert_same_files(model, tmp_path / f"{model.name}.hf")


def test_a_training_checkpoint_is_converted_as_the_run_would_export_it(tiny: Tiny, tmp_path: Path) -> None:
    families, layout = ["qwen2_tied", "deepseek_v3"], ParallelLayout(tensor=2, expert_tensor=2)
    stores = {family: CheckpointStore(tmp_path / family, keep_last=1) for family in families}
    saving = {family: store.begin(4) for family, store in stores.items()}
    files = run_ranks(2, save_training, [(tiny(family), saving[family]) for family in families], layout)
    cases = []
    for index, family in enumerate(families):
        recipe = {"model": {"path": str(tiny(family))}}
        state = TrainerState(4, weight_version=5, data_cursor={}, recipe=recipe)
        saved = stores[family].commit(state, [file for of_rank in files for file in of_rank[index]])
        cases.append((tiny(family), saved.rank_directory, tmp_path / f"{family}.exported"))
    run_ranks(1, export_training, cases)
    for family in families:
        exported = tmp_path / f"{family}.exported"
        to_hugging_face(tmp_path / family, tmp_path / f"{family}.hf")
        to_megatron(tmp_path / family / "step_000004", tmp_path / f"{family}.megatron")
        assert_same_files(exported, tmp_path / f"{family}.hf")
        assert not verify(exported, tmp_path / f"{family}.megatron").differences
        assert verify(exported, tiny(family)).differences


# --- on ranks ---------------------------------------------------------------------------------------------------------


def logits_of_torch_dist(
    cases: list[tuple[Path, Path]], layout: ParallelLayout, microbatches: list[list[list[int]]]
) -> list[RankLogits | None]:
    """For each (model directory, iteration directory), logits of a model that Megatron loaded from the latter."""
    process.start_parallel(layout, seed=1)
    return [
        logits_of_chunks(loaded(directory, iteration, layout), layout, microbatches) for directory, iteration in cases
    ]


def save_torch_dist(cases: list[tuple[Path, Path]], layout: ParallelLayout, dtype: str = "float32") -> None:
    """Loads each model and saves it as Megatron-LM does, into the given directory."""
    process.start_parallel(layout, seed=1)
    for directory, iteration in cases:
        chunks, _ = load_model(directory, layout, getattr(torch, dtype))
        if torch.distributed.get_rank() == 0:
            iteration.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(sharded(chunks) | {"iteration": 7}, str(iteration))


def save_training(cases: list[tuple[Path, Path]], layout: ParallelLayout) -> list[tuple[SavedFile, ...]]:
    """Trains each model for a step, and saves the training state into the given directory."""
    files = []
    for directory, saved in cases:
        training = TinyTraining(directory, layout)
        training.steps(1)
        files.append(state.save(training.state, saved))
        process.stop_parallel()
    return files


def export_training(cases: list[tuple[Path, Path, Path]]) -> None:
    """Loads each saved training state, and exports its weights to a Hugging Face directory."""
    for directory, saved, exported in cases:
        training = TinyTraining(directory, weights=False)
        state.load(training.state, saved)
        weights = named_tensors(training.wrapped)
        if torch.distributed.get_rank() == 0:
            begun = begin_export(exported, directory, training.architecture, "float32")
            write_part(begun, make_plan([training.state.manifest], begun.files), 0, weights)
            finish_export(begun)
        process.stop_parallel()


def loaded(directory: Path, iteration: Path, layout: ParallelLayout) -> list[torch.nn.Module]:
    """The model's chunks on this rank with weights that only the checkpoint can have given them."""
    arch = read_architecture(directory)
    config = transformer_config(arch, TrainConfig(layout=LayoutConfig(**vars(layout))), torch.float32, "cpu")
    if arch.experts is not None and not arch.experts.dense_layers:
        config.moe_layer_freq = 1  # Megatron-LM's default; with a list, each layer has keys of its own
    chunks = build_chunks(arch, config, layout)
    with torch.no_grad():
        for tensor in named_tensors(chunks).values():
            tensor.fill_(float("nan"))
    common = dist_checkpointing.load_common_state_dict(str(iteration))
    assert (common["args"].num_layers, common["args"].hidden_size) == (arch.layers, arch.hidden)
    metadata = common["content_metadata"] | {"dp_cp_group": parallel_state.get_data_parallel_group(True)}
    found = dist_checkpointing.load(sharded(chunks, metadata), str(iteration), strict="raise_unexpected")
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(found[name(chunks, index)], strict=True)
    return chunks


def sharded(chunks: list[torch.nn.Module], metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    return {name(chunks, index): chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}


def name(chunks: list[torch.nn.Module], index: int) -> str:
    return "model" if len(chunks) == 1 else f"model{index}"
