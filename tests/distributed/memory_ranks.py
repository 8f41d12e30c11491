"""Memory that a training rank really holds: bytes of the storages behind its models, as the tests of plans measure
them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megagrpo.layout.parallel import rank_grid
from megagrpo.megatron import process
from megagrpo.megatron.state import MOMENTS, parameters_of, parts_of
from megagrpo.megatron.trained_model import Reference, TrainedModel
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import critic_of


def measure_all(cases: list[tuple[Path, Recipe]]) -> list[dict[str, int]]:
    """Measures this rank's memory in each case: a model directory, and a recipe for as many ranks as there are."""
    return [measure(directory, recipe) for directory, recipe in cases]


def measure(directory: Path, recipe: Recipe) -> dict[str, int]:
    """Bytes by the names of train.offload, without what is 0."""
    train, algorithm = recipe.train, recipe.algorithm
    layout, dtype = train.layout.parallel(), getattr(torch, recipe.model.dtype)
    where = rank_grid(layout)[dist.get_rank()]
    process.start_parallel(layout, seed=1)
    try:
        policy = TrainedModel(read_architecture(directory), train, where, directory, dtype, "cpu", train.lora)
        reference: list[torch.Tensor] = []
        if algorithm.kl.coefficient > 0:
            follows = algorithm.reference.update_every_steps is not None
            reference = Reference(policy.chunks, algorithm.reference.share if follows else None).tensors
        critic = None
        if algorithm.critic is not None:
            critic = TrainedModel(critic_of(read_architecture(directory)), train, where, directory, dtype, "cpu")
        found = of_model(policy) | {"reference": size(reference)}
        if critic is not None:
            found["critic"] = sum(of_model(critic).values())
        return {name: held for name, held in found.items() if held}
    finally:
        process.stop_parallel()


def of_model(model: Any) -> dict[str, int]:
    """After a first step, which makes the moments."""
    model.zero_gradients()
    model.optimizer_step(1e-3)
    parameters = list(parameters_of(model.chunks).values())
    weights = {parameter.untyped_storage() for parameter in parameters}
    optimizers = [part.optimizer for part in parts_of(model.optimizer)]
    mains = [main for optimizer in optimizers for group in optimizer.param_groups for main in group["params"]]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    gradients = (
        buffer.grad_data for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    )
    copies = size(main for main in mains if main.untyped_storage() not in weights)
    moments = size(state[name] for state in states for name in MOMENTS if name in state)
    return {"parameters": size(parameters), "gradients": size(gradients), "optimizer": copies + moments}


def size(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors})
