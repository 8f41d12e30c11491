"""What a training rank really holds: bytes of the storages behind its models, as the tests of plans measure them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megagrpo.recipe.schema import Recipe


@dataclass(frozen=True)
class Measured:
    """Bytes. The fields are those of megagrpo.plan.memory.models.TrainedMemory."""

    parameters: int
    gradients: int
    main_parameters: int
    moments: int
    buffers: int


@dataclass(frozen=True)
class RankMemory:
    policy: Measured
    reference: int
    critic: Measured | None


def measure_all(cases: list[tuple[Path, Recipe]]) -> list[RankMemory]:
    """This rank's memory in each case: a model directory, and a recipe for as many ranks as there are."""
    return [measure(directory, recipe) for directory, recipe in cases]


def measure(directory: Path, recipe: Recipe) -> RankMemory:
    import torch.distributed as dist

    from megagrpo.layout.parallel import rank_grid
    from megagrpo.megatron import process
    from megagrpo.megatron.critic import Critic
    from megagrpo.megatron.reference import Reference
    from megagrpo.megatron.trained_model import TrainedModel
    from megagrpo.weights.families import read_architecture

    train, algorithm = recipe.train, recipe.algorithm
    layout, dtype = train.layout.parallel(), getattr(torch, recipe.model.dtype)
    where = rank_grid(layout)[dist.get_rank()]
    process.start_parallel(layout, seed=1)
    try:
        policy = TrainedModel(
            read_architecture(directory), train, train.optimizer, where, directory, dtype, "cpu", train.lora
        )
        reference: list[torch.Tensor] = []
        if algorithm.kl.coefficient > 0:
            follows = algorithm.reference.update_every_steps is not None
            reference = Reference(policy.chunks, algorithm.reference.share if follows else None).tensors
        critic = None
        if algorithm.critic is not None:
            critic = Critic(algorithm.critic, train, where, directory, dtype, torch.device("cpu")).model
        return RankMemory(of_model(policy), size(reference), None if critic is None else of_model(critic))
    finally:
        process.stop_parallel()


def parameters_of_layers(cases: list[tuple[Path, Recipe]]) -> list[list[list[tuple[str, tuple[int, ...]]]]]:
    """Names and shapes of the parameters of each layer of each model, in the order in which modules register them."""
    from megagrpo.megatron import process
    from megagrpo.megatron.config import transformer_config
    from megagrpo.megatron.model import build_chunks
    from megagrpo.weights.families import read_architecture

    found = []
    for directory, recipe in cases:
        arch, layout = read_architecture(directory), recipe.train.layout.parallel()
        process.start_parallel(layout, seed=1)
        (chunk,) = build_chunks(arch, transformer_config(arch, recipe.train, torch.float32, "cpu"), layout)
        layers = [layer.named_parameters() for layer in chunk.decoder.layers]
        found.append([[(name, tuple(parameter.shape)) for name, parameter in layer] for layer in layers])
        process.stop_parallel()
    return found


def of_model(model: Any) -> Measured:
    """After a first step, which makes the moments."""
    from megagrpo.megatron.state import MOMENTS, parameters_of, parts_of

    model.zero_gradients()
    model.optimizer_step(1e-3)
    parameters = list(parameters_of(model.chunks).values())
    weights = {parameter.untyped_storage() for parameter in parameters}
    optimizers = [part.optimizer for part in parts_of(model.optimizer)]
    mains = [main for optimizer in optimizers for group in optimizer.param_groups for main in group["params"]]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return Measured(
        parameters=size(parameters),
        gradients=size(
            buffer.grad_data for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ),
        main_parameters=size(main for main in mains if main.untyped_storage() not in weights),
        moments=size(state[name] for state in states for name in MOMENTS),
        buffers=size(buffer for chunk in model.chunks for buffer in chunk.module.buffers()),
    )


def size(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages behind them, each once."""
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors})
