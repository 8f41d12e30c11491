"""torch_dist between megagrpo and Megatron itself: real ranks load what we write, and we read what they save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.checkpoint.store import CheckpointStore, SavedFile
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.convert.targets import to_hugging_face, to_megatron
from megagrpo.convert.verify import verify
from megagrpo.errors import ModelError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import process
from megagrpo.megatron.config import transformer_config
from megagrpo.megatron.model import build_chunks, named_tensors, unwrapped
from megagrpo.megatron.model_rank import SftRank
from megagrpo.recipe.schema import LayoutConfig, TrainConfig
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files.export import begin_export
from tests.distributed.conftest import Tiny
from tests.distributed.layouts import ROWS, soak
from tests.distributed.parity_ranks import RankLogits, load_model, logits_of_chunks
from tests.distributed.step_case import conversations, make_sft_recipe
from tests.distributed.step_ranks import export, on_ranks, save, sft_steps
from tests.distributed.test_parity_logits import MICROBATCHES, assemble, references
from tests.rank_group import run_ranks
from tests.safetensors_files import assert_same_files
from tests.tiny_models import COMPOSITES, TINY_FAMILIES, USUAL_FAMILIES

# The row with most kinds of cuts in every test run; the others, which cost as much each, in the long one.
IN_TURN = [
    "tensor, unequal",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("virtual, context", "expert, data")),
    *soak("expert over tensor", "unequal, data"),
]


MEGATRONS: dict[str, dict[str, Any]] = {
    family: {"rms_norm_eps": 1e-6} if family in ("kimi_k2", "glm4_moe_lite") else {}
    for family in (
        *USUAL_FAMILIES, "dots1", "glm4_moe_lite", "kimi_k2", "phi3", "qwen2_moe", "qwen3_moe_mixed", "seed_oss",
    )
}  # fmt: skip
"""Families whose parts Megatron-LM has, and changes of their configs: its norms of latents have one epsilon."""


def layout_and_models(name: str, tiny: Tiny) -> tuple[ParallelLayout, list[Path]]:
    """A row for families with experts, or for all of them at once where it does not share experts out."""
    layout, families = ROWS[name].of("qwen3_moe"), USUAL_FAMILIES if name == IN_TURN[0] else MEGATRONS
    models = [tiny(family, **MEGATRONS[family]) for family in families]
    return layout, [model for model in models if layout.expert == 1 or read_architecture(model).experts]


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


@pytest.mark.parametrize("family", ["qwen2_tied", "deepseek_v3"])
def test_a_training_checkpoint_is_converted_as_the_run_would_export_it(family: str, tiny: Tiny, tmp_path: Path) -> None:
    model, run, exported = tiny(family), tmp_path / "run", tmp_path / "exported"
    store = CheckpointStore(run, keep_last=1)
    recipe = make_sft_recipe(ParallelLayout(tensor=2, expert_tensor=2))
    files = on_ranks(save_and_export, recipe, conversations(model), store.begin(4), model, exported)
    state = TrainerState(4, weight_version=5, data_cursor={}, recipe={"model": {"path": str(model)}})
    store.commit(state, [file for of_rank in files for file in of_rank])
    to_hugging_face(run, tmp_path / "hf")
    to_megatron(run / "step_000004", tmp_path / "megatron")
    assert_same_files(exported, tmp_path / "hf")
    assert not verify(exported, tmp_path / "megatron").differences
    assert verify(exported, model).differences


@pytest.mark.long
@pytest.mark.parametrize("experts", [False, True])
def test_every_family_comes_back_from_training_checkpoints_and_from_torch_dist(
    experts: bool, tiny: Tiny, tmp_path: Path
) -> None:
    models = {family: tiny(family, **MEGATRONS.get(family, {})) for family in [*TINY_FAMILIES, *COMPOSITES]}
    models = {family: model for family, model in models.items() if (read_architecture(model).experts > 0) == experts}
    stores = {family: CheckpointStore(tmp_path / family, keep_last=1) for family in models}
    cases = [(model, stores[family].begin(4)) for family, model in models.items()]
    layout = ParallelLayout(tensor=2, pipeline=2, expert=2 if experts else 1)
    by_rank = run_ranks(layout.ranks, save_states, cases, layout)
    for number, (family, model) in enumerate(models.items()):
        state = TrainerState(4, weight_version=5, data_cursor={}, recipe={"model": {"path": str(model)}})
        stores[family].commit(state, [file for files in by_rank for file in files[number]])
        run, torch_dist = tmp_path / family, tmp_path / f"{family}.megatron"
        to_hugging_face(run, tmp_path / f"{family}.hf")
        assert_same_files(model, tmp_path / f"{family}.hf")
        assert not verify(model, run).differences
        if lacking := read_architecture(model).only_local:
            with pytest.raises(ModelError, match=lacking):
                to_megatron(run, torch_dist)
            continue
        to_megatron(run, torch_dist)
        to_hugging_face(torch_dist, tmp_path / f"{family}.back")
        assert_same_files(model, tmp_path / f"{family}.back")


# --- on ranks ---------------------------------------------------------------------------------------------------------


def logits_of_torch_dist(
    cases: list[tuple[Path, Path]], layout: ParallelLayout, microbatches: list[list[list[int]]]
) -> list[RankLogits | None]:
    """For each (model directory, iteration directory), logits of a model that Megatron loaded from the latter."""
    process.start_parallel(layout, seed=1)
    return [
        logits_of_chunks(loaded(directory, iteration, layout), read_architecture(directory), layout, microbatches)
        for directory, iteration in cases
    ]


def save_torch_dist(cases: list[tuple[Path, Path]], layout: ParallelLayout, dtype: str = "float32") -> None:
    """Loads each model and saves it as Megatron-LM does, into the given directory."""
    process.start_parallel(layout, seed=1)
    for directory, iteration in cases:
        chunks = [unwrapped(chunk) for chunk in load_model(directory, layout, dtype).chunks]
        if torch.distributed.get_rank() == 0:
            iteration.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(sharded(chunks) | {"iteration": 7}, str(iteration))


def save_states(cases: list[tuple[Path, Path]], layout: ParallelLayout) -> list[tuple[SavedFile, ...]]:
    """Loads each model and saves a training state of it in the given directory. Returns the files of each."""
    process.start_parallel(layout, seed=1)
    saved = []
    for directory, into in cases:
        model = load_model(directory, layout)
        model.take_snapshot()
        files, contents = model.snapshot.write(into, "")
        of_ranks: list[Any] = [None] * layout.ranks
        torch.distributed.all_gather_object(of_ranks, contents)
        first = torch.distributed.get_rank() == 0
        saved.append((files, *(model.snapshot.finish(into, "", of_ranks) if first else ())))
    return saved


def save_and_export(
    rank: SftRank, batch: RankBatch, _: None, saving: Path, model: Path, exported: Path
) -> tuple[SavedFile, ...]:
    """Trains for a step, saves the training state, and exports the weights to a Hugging Face directory."""
    sft_steps(rank, batch, 1)
    files = save(rank, saving)
    export(rank, lambda: begin_export(exported, model, rank.policy.architecture, "float32"))
    return files


def loaded(directory: Path, iteration: Path, layout: ParallelLayout) -> list[torch.nn.Module]:
    """The model's chunks on this rank with weights that only the checkpoint can have given them."""
    arch = read_architecture(directory)
    config = transformer_config(arch, TrainConfig(layout=LayoutConfig(**vars(layout))), torch.float32, "cpu")
    if all(kind.mlp.experts for kind in arch.kinds):
        config.moe_layer_freq = 1  # Megatron-LM's default; with a list, each layer has keys of its own
    chunks = build_chunks(arch, config, layout)
    with torch.no_grad():
        for tensor in named_tensors(chunks).values():
            tensor.fill_(float("nan"))
    common = dist_checkpointing.load_common_state_dict(str(iteration))
    assert (common["args"].num_layers, common["args"].hidden_size) == (len(arch.layers), arch.hidden)
    metadata = common["content_metadata"] | {"dp_cp_group": parallel_state.get_data_parallel_group(True)}
    found = dist_checkpointing.load(sharded(chunks, metadata), str(iteration), strict="raise_unexpected")
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(found[name(chunks, index)], strict=True)
    return chunks


def sharded(chunks: list[torch.nn.Module], metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    return {name(chunks, index): chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}


def name(chunks: list[torch.nn.Module], index: int) -> str:
    return "model" if len(chunks) == 1 else f"model{index}"
