"""The ranks' side of the conversion tests: what Megatron itself loads from and saves to a torch_dist checkpoint.

Not a test module, so that ranks need not import transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state

from megagrpo.checkpoint.store import SavedFile
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import model, process, state
from megagrpo.megatron.config import transformer_config
from megagrpo.recipe.schema import LayoutConfig, TrainConfig
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files.export import begin_export, finish_export, write_part
from megagrpo.weights.plan import make_plan
from tests.distributed import parity_ranks
from tests.distributed.tiny_training import TinyTraining


def logits_of_torch_dist(
    cases: list[tuple[Path, Path]], layout: ParallelLayout, microbatches: list[list[list[int]]]
) -> list[parity_ranks.RankLogits | None]:
    """For each (model directory, iteration directory), logits of a model that Megatron loaded from the latter."""
    process.start_parallel(layout, seed=1)
    return [
        parity_ranks.logits_of_chunks(loaded(directory, iteration, layout), layout, microbatches)
        for directory, iteration in cases
    ]


def save_torch_dist(cases: list[tuple[Path, Path]], layout: ParallelLayout, dtype: str = "float32") -> None:
    """Loads each model and saves it as Megatron-LM does, into the given directory."""
    process.start_parallel(layout, seed=1)
    for directory, iteration in cases:
        chunks, _ = parity_ranks.load_model(directory, layout, getattr(torch, dtype))
        if torch.distributed.get_rank() == 0:
            iteration.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(sharded(chunks) | {"iteration": 7}, str(iteration))


def save_training(cases: list[tuple[Path, Path]], sizes: dict[str, int]) -> list[tuple[SavedFile, ...]]:
    """Trains each model for a step, and saves the training state into the given directory."""
    files = []
    for directory, saved in cases:
        training = TinyTraining(directory, sizes)
        training.steps(1)
        files.append(state.save(training.state, saved))
        process.stop_parallel()
    return files


def export_training(cases: list[tuple[Path, Path, Path]], sizes: dict[str, int]) -> None:
    """Loads each saved training state, and exports its weights to a Hugging Face directory."""
    for directory, saved, exported in cases:
        training = TinyTraining(directory, sizes, weights=False)
        state.load(training.state, saved)
        weights = model.named_tensors(training.wrapped)
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
    chunks = model.build_chunks(arch, config, layout)
    with torch.no_grad():
        for tensor in model.named_tensors(chunks).values():
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
