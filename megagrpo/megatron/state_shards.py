"""Where Megatron's optimizers keep the training state of each parameter on this rank, in one form for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, MegatronOptimizer

from megagrpo.megatron.model import unwrapped

MOMENTS = ("exp_avg", "exp_avg_sq")
STATES = ("param", *MOMENTS)


@dataclass(frozen=True)
class StateShard:
    """The state of elements start .. stop of a parameter's memory: all of it, or a data rank's part.

    `tensors` are the float32 main weights and Adam's moments by their names in STATES, each flat [stop - start] and a
    view of the optimizer's own memory, so writing into them is loading.
    """

    start: int
    stop: int
    tensors: Mapping[str, torch.Tensor]


def parameters_of(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """All parameters by the names of their storages in the rank's manifest: chunk{c}.{name in that GPTModel}."""
    return {f"chunk{c}.{name}": p for c, chunk in enumerate(chunks) for name, p in unwrapped(chunk).named_parameters()}


def shards_of(optimizer: MegatronOptimizer) -> dict[torch.nn.Parameter, StateShard]:
    """The state that this rank holds, by model parameter. Parameters whose state lies on other ranks only are absent.

    Moments that do not exist yet, before the first step, are made: zeros, as the first step would.
    """
    shards = {}
    for part in parts_of(optimizer):
        _make_missing_moments(part)
        for parameter, main, start, stop in _main_weights(part):
            state = part.optimizer.state[main]
            flat = {"param": main, **{name: state[name] for name in MOMENTS}}
            shards[parameter] = StateShard(start, stop, {k: tensor.detach().view(-1) for k, tensor in flat.items()})
    return shards


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers inside: experts and dense weights have one each. Empty ones are left out."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in parts if not part.is_stub_optimizer]


def adam_steps(optimizer: MegatronOptimizer) -> set[int]:
    """Adam's step counts on this rank: one number, unless something is wrong; none before the first step."""
    steps: set[int] = set()
    for part in parts_of(optimizer):
        if _counts_by_parameter(part):
            steps |= {int(state["step"]) for state in part.optimizer.state.values() if "step" in state}
        else:
            steps |= {int(group["step"]) for group in part.optimizer.param_groups if "step" in group}
    return steps


def set_adam_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Set every step count. Torch's Adam counts in a tensor of each parameter, which must never be shared."""
    for part in parts_of(optimizer):
        _make_missing_moments(part)
        if _counts_by_parameter(part):
            for state in part.optimizer.state.values():
                state["step"] = torch.tensor(float(step), dtype=torch.float32)
        else:
            for group in part.optimizer.param_groups:
                group["step"] = step


def publish_main_weights(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Make the model's weights equal to the main weights, on all data ranks. Every rank calls it."""
    for part in parts_of(optimizer):
        if isinstance(part, DistributedOptimizer | Float16OptimizerWithFloat16Params):
            part._copy_main_params_to_model_params()
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


def _main_weights(part: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int, int]]:
    """(model parameter, its float32 main weights, start, stop) for everything that this optimizer updates."""
    if isinstance(part, DistributedOptimizer):
        # Not by model_param_group_index_map: it is wrong where a bfloat16 model has a float32 parameter (a value head).
        models = [*part.model_fp32_groups, *part.model_float16_groups]
        shards = [*part.shard_fp32_groups, *part.shard_fp32_from_float16_groups]
        for parameters, mains in zip(models, shards, strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                held = part._get_model_param_range_map(parameter)["param"]
                yield parameter, main, held.start, held.end
        return
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                yield parameter, main, 0, main.numel()
        float32 = part.fp32_from_fp32_groups
    else:
        float32 = [group["params"] for group in part.optimizer.param_groups]
    for parameters in float32:
        for parameter in parameters:
            yield parameter, parameter, 0, parameter.numel()


def _make_missing_moments(part: MegatronOptimizer) -> None:
    part.init_state_fn(part.optimizer, part.config)
    if _counts_by_parameter(part):
        for state in part.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))


def _counts_by_parameter(part: MegatronOptimizer) -> bool:
    return isinstance(part.optimizer, torch.optim.Adam)  # AdamW is one; the fused ones count by group
