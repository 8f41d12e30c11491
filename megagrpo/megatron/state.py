"""The state of the training ranks: main weights, moments, Adam's step count, random generators. How it is loaded.

Every state is written in the coordinates of the Hugging Face checkpoint:
`exp_avg.model.layers.3.self_attn.q_proj.weight` has the shape of that tensor, and each rank writes the boxes of it
that it holds, by way of host memory (megatron/snapshot.py). The files are in Megatron's dist_checkpointing format,
torch_dist. So a checkpoint has no layout: every layout loads it, with or without experts split and the distributed
optimizer.

It holds routers' biases, which are not trained, and a reference policy that follows the policy. It does not hold what
is known without it: the learning rate (a function of the step), a reference policy that stays as the model was,
padding, and the model's own bfloat16 weights (the main weights, rounded).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from megatron.core.optimizer.layer_wise_optimizer import is_managed_by_layer_wise_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megagrpo.checkpoint.torch_dist import UNPICKLING, TorchCheckpoint
from megagrpo.errors import CheckpointError, Problem
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.model import named_tensors, unwrapped
from megagrpo.weights.boxes import Box, Fill, Manifest, Placement
from megagrpo.weights.families.parts.part import Tensor

FORMAT = 1
REFERENCE = "reference"


@dataclass(frozen=True)
class TrainingState:
    """The trained state of this rank, and where each part of it lies in the checkpoint.

    With adapters, `manifest` and `tensors` are the adapters', and the frozen weights are not part of the state.
    Parameters, gradients and optimizer must be on the device (offload.py) when the state is saved or loaded.
    """

    chunks: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    tensors: Sequence[Tensor]  # of the checkpoint, all that any rank saves: trained ones and routers' biases
    layout: ParallelLayout
    manifest: Manifest
    reference: Mapping[str, torch.Tensor] | None = None  # by storage; None: it stays as the model was
    kind: str = "adam"  # train.optimizer.kind

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {tensor.name: tensor.shape for tensor in self.tensors}

    @cached_property
    def untrained(self) -> frozenset[str]:
        """Returns the names of tensors without moments."""
        return frozenset(tensor.name for tensor in self.tensors if not tensor.trained)

    @cached_property
    def by_muon(self) -> frozenset[str]:
        """Returns the names of this rank's tensors that Muon trains."""
        parameters = parameters_of(self.chunks) if self.kind == "muon" else {}
        matrices = {name for name, parameter in parameters.items() if is_managed_by_layer_wise_optimizer(parameter)}
        return frozenset(its.box.tensor for its in self.manifest.placements if its.storage in matrices)

    def kept_of(self, tensor: str) -> tuple[str, ...]:
        """Returns the kinds of state that checkpoints keep of a tensor of this rank."""
        if tensor in self.untrained:
            return ("param",)
        moments = MUON_MOMENTS if tensor in self.by_muon else ADAM_MOMENTS
        return ("param", *moments, *([REFERENCE] if self.reference is not None else ()))


def load(state: TrainingState, directory: Path) -> None:
    """Replaces this rank's state by the one in `directory`, saved in any layout. Every rank calls it.

    The layout that saved it gets everything back bit for bit, the random generators too; in another layout the
    generators stay as they are. Raises CheckpointError on every rank; nothing is changed if the checkpoint is of
    another model.
    """
    saved, stored = _open(state, directory)
    same_layout = ParallelLayout(**saved["layout"]) == state.layout
    problems: list[Problem] = []
    generators = None
    try:
        tensor = ""
        for key, box, view in views(state):
            if box.tensor != tensor:  # other boxes of a tensor may lie in the same stored chunks
                stored.forget()
                tensor = box.tensor
            view.copy_(stored.read(key, box.start, box.shape))
        stored.forget()
        if same_layout:
            (generators,) = stored.read_object(generators_key())  # Megatron saves objects in lists
    except CheckpointError as error:
        problems += error.problems
    _raise_everywhere(problems)
    set_adam_step(state.optimizer, saved["adam_step"])
    _fill_padding(state)
    publish_main_weights(state.chunks, state.optimizer)
    if generators is not None:
        torch.set_rng_state(generators["torch"])
        torch.cuda.set_rng_state(generators["cuda"])
        get_cuda_rng_tracker().set_states(generators["tensor_parallel"])
        random.setstate(generators["python"])
        numpy.random.set_state(generators["numpy"])


# --- boxes ------------------------------------------------------------------------------------------------------------


def _held(state: TrainingState) -> Iterator[tuple[Placement, StateShard]]:
    """Yields this rank's placements of buffers, and of parameters that have state on this rank."""
    shards, parameters = shards_of(state.optimizer), parameters_of(state.chunks)
    weights = named_tensors(state.chunks)
    for placement in state.manifest.placements:
        if placement.box.tensor in state.untrained:
            weight = weights[placement.storage]
            yield placement, StateShard(0, weight.numel(), {"param": weight.view(-1)})
            continue
        shard = shards.get(parameters[placement.storage])
        if shard is not None:
            yield placement, shard
        if state.reference is not None:
            weight = state.reference[placement.storage]
            yield placement, StateShard(0, weight.numel(), {REFERENCE: weight.view(-1)})


def views(state: TrainingState) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """Yields (key, box, view of a shard) for each box that this rank's shards hold, for each kind of state."""
    for placement, shard in _held(state):
        shape = state.manifest.storages[placement.storage].shape
        for box, view in boxes_in_range(placement, shape, shard.start, shard.stop):
            for name, flat in shard.tensors.items():
                yield f"{name}.{box.tensor}", box, _strided(flat, view)


def _strided(flat: torch.Tensor, view: Strided) -> torch.Tensor:
    shape, strides, offset = view
    return torch.as_strided(flat, shape, strides, flat.storage_offset() + offset)


def _fill_padding(state: TrainingState) -> None:
    """Sets local elements that no box covers, such as vocabulary padding, to their stated value, without moments."""
    shards, parameters = shards_of(state.optimizer), parameters_of(state.chunks)
    for fill in state.manifest.fills:
        shard = shards.get(parameters[fill.storage])
        if shard is None:
            continue
        for view in fills_in_range(fill, state.manifest.storages[fill.storage].shape, shard.start, shard.stop):
            for name, flat in shard.tensors.items():
                _strided(flat, view).fill_(fill.value if name == "param" else 0.0)


def _open(state: TrainingState, directory: Path) -> tuple[dict[str, Any], TorchCheckpoint]:
    """Reads what rank 0 saved for all ranks, and opens the tensors.

    Raises the same CheckpointError on every rank if any rank cannot read the checkpoint, or if a tensor that it needs
    is missing or has another shape.
    """
    problems: list[Problem] = []
    try:
        common = dict(torch.load(directory / COMMON_STATE_FNAME, weights_only=True))
        stored = TorchCheckpoint(directory)
    except CheckpointError as error:
        problems += error.problems
    except (OSError, *UNPICKLING) as error:
        given = f"{type(error).__name__}: {error}".splitlines()[0]
        problems = [Problem(f"{directory / COMMON_STATE_FNAME} cannot be read", given)]
    else:
        kind = common.get("optimizer", "adam")
        if common.get("format") != FORMAT:
            problems.append(Problem(f"format of {directory}", f"{common.get('format')}", f"{FORMAT}"))
        elif kind != state.kind:
            fix = f"train.optimizer.kind: {kind}, or start a new run from exported weights"
            problems.append(Problem(f"optimizer of {directory}", kind, f"train.optimizer.kind: {state.kind}", fix))
            _raise_everywhere(problems)
        for tensor in sorted({placement.box.tensor for placement in state.manifest.placements}):
            for key in (f"{name}.{tensor}" for name in state.kept_of(tensor)):
                shape = stored.tensors[key].shape if key in stored.tensors else "nothing"
                if shape != state.shapes[tensor]:
                    problems.append(Problem(f"{directory}: {key}", f"{shape}", f"{state.shapes[tensor]}"))
    _raise_everywhere(problems)
    return common, stored


def _raise_everywhere(problems: Sequence[Problem]) -> None:
    """Raises CheckpointError with the problems of all ranks on each of them, if there are any. Collective."""
    of_ranks: list[Sequence[Problem]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, problems)
    if different := dict.fromkeys(problem for of_rank in of_ranks for problem in of_rank):
        raise CheckpointError(different)


# --- flat ranges as boxes ---------------------------------------------------------------------------------------------
# The distributed optimizer cuts a parameter's memory anywhere, even within a row. A range of a matrix is at most three
# boxes: the end of a row, whole rows, the beginning of a row. So every state of every rank is a set of boxes of
# checkpoint tensors, and a checkpoint made of them does not depend on the layout that wrote it.


Strided = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset (from its begin) of a part of a flat range, in elements, for torch.as_strided."""


def boxes_in_range(
    placement: Placement, storage_shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[Box, Strided]]:
    """Yields boxes of `placement` held by elements start .. stop of its storage (contiguous, of `storage_shape`).

    A view's axes are its box's.
    """
    for region in _regions(tuple(storage_shape), start, stop):
        if (part := placement.within(region)) is not None:
            _, strides, offset = _strides_of(part.at, part.local_shape, storage_shape, start)
            of_box = (strides[part.axes.index(axis)] for axis in range(len(part.box.shape)))
            yield part.box, (part.box.shape, tuple(of_box), offset)


def fills_in_range(fill: Fill, storage_shape: Sequence[int], start: int, stop: int) -> list[Strided]:
    """Returns the parts of `fill` held by elements start .. stop of its storage."""
    filled = Box("", fill.at, fill.shape)
    regions = [filled.intersect(region) for region in _regions(tuple(storage_shape), start, stop)]
    return [_strides_of(part.start, part.shape, storage_shape, start) for part in regions if part is not None]


def _regions(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yields elements start .. stop of a contiguous tensor as axis-aligned regions, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield Box("", (start,), (stop - start,))
        return
    row = prod(shape[1:])
    first_whole, last_whole = -(-start // row), stop // row
    if first_whole > last_whole:  # the range begins and ends within one row
        yield from _within_row(shape, last_whole, start, stop)
        return
    if start < first_whole * row:
        yield from _within_row(shape, first_whole - 1, start, first_whole * row)
    if first_whole < last_whole:
        yield Box("", (first_whole, *(0,) * (len(shape) - 1)), (last_whole - first_whole, *shape[1:]))
    if last_whole * row < stop:
        yield from _within_row(shape, last_whole, last_whole * row, stop)


def _within_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    begin = index * prod(shape[1:])
    for part in _regions(shape[1:], start - begin, stop - begin):
        yield Box("", (index, *part.start), (1, *part.shape))


def _strides_of(at: tuple[int, ...], shape: tuple[int, ...], storage_shape: Sequence[int], start: int) -> Strided:
    strides = tuple(prod(storage_shape[axis + 1 :]) for axis in range(len(storage_shape)))
    return shape, strides, sum(a * s for a, s in zip(at, strides, strict=True)) - start


# --- random generators ------------------------------------------------------------------------------------------------


def generators() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tensor_parallel": get_cuda_rng_tracker().get_states(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
    }


def generators_key() -> str:
    """Returns the key of this rank's generators, as Megatron names an object of one rank: no other layout uses them."""
    return f"generators/shard_{dist.get_rank()}_{dist.get_world_size()}"


# --- optimizers' states -----------------------------------------------------------------------------------------------


MAIN = "master_param"
"""A precision-aware Adam's name for its main weights; others update these themselves."""
ADAM_MOMENTS, MUON_MOMENTS = ("exp_avg", "exp_avg_sq"), ("momentum",)
MOMENTS: Mapping[str, str] = {**{name: name for name in ADAM_MOMENTS}, "momentum_buffer": "momentum"}
"""Names in checkpoints of a parameter's optimizer state, by the optimizers' names."""


@dataclass(frozen=True)
class StateShard:
    """The state of elements start .. stop of a parameter's memory: all of it, or a data rank's part.

    `tensors` are the float32 main weights, `param`, and the moments by their names in checkpoints, each flat
    [stop - start] and a view of the optimizer's own memory: to write into them is to load.
    """

    start: int
    stop: int
    tensors: Mapping[str, torch.Tensor]


def parameters_of(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Returns all parameters by their storages' names in the rank's manifest: chunk{c}.{name in that GPTModel}."""
    return {f"chunk{c}.{name}": p for c, chunk in enumerate(chunks) for name, p in unwrapped(chunk).named_parameters()}


def shards_of(optimizer: MegatronOptimizer) -> dict[torch.nn.Parameter, StateShard]:
    """Returns this rank's state, by model parameter. Parameters whose state lies only on other ranks are absent.

    Before the first step it makes the moments, as zeros, as the first step would.
    """
    shards = {}
    for part in parts_of(optimizer):
        _make_missing_moments(part)
        for parameter, main, start, stop in _main_weights(part):
            state = part.optimizer.state[main]
            flat = {"param": state.get(MAIN, main), **{MOMENTS[name]: state[name] for name in MOMENTS if name in state}}
            shards[parameter] = StateShard(start, stop, {k: tensor.detach().view(-1) for k, tensor in flat.items()})
    return shards


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Returns the inner optimizers that have parameters: one each for experts and dense weights, for Adam and Muon."""
    if isinstance(optimizer, ChainedOptimizer):
        return [part for inner in optimizer.chained_optimizers for part in parts_of(inner)]
    return [] if optimizer.is_stub_optimizer else [optimizer]


def adam_steps(optimizer: MegatronOptimizer) -> set[int]:
    """Returns Adam's step counts on this rank: one number unless something is wrong, none before the first step."""
    steps: set[int] = set()
    for part in parts_of(optimizer):
        if _counts_by_parameter(part):
            steps |= {int(state["step"]) for state in part.optimizer.state.values() if "step" in state}
        else:
            steps |= {int(group["step"]) for group in part.optimizer.param_groups if "step" in group}
    return steps


def set_adam_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Sets every step count. Torch's Adam counts in a tensor for each parameter, which must not be shared."""
    for part in parts_of(optimizer):
        _make_missing_moments(part)
        if _counts_by_parameter(part):
            for state in part.optimizer.state.values():
                state["step"] = torch.tensor(float(step), dtype=torch.float32)
        elif not isinstance(part.optimizer, TensorParallelMuon):
            for group in part.optimizer.param_groups:
                group["step"] = step


def publish_main_weights(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Makes the model's weights equal to the main weights on all data ranks. Every rank calls it."""
    for part in parts_of(optimizer):
        for weights, state in part.optimizer.state.items():
            if MAIN in state:
                weights.data.copy_(state[MAIN])
        if isinstance(part, DistributedOptimizer | Float16OptimizerWithFloat16Params):
            part._copy_main_params_to_model_params()
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


def _main_weights(part: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int, int]]:
    """Yields (model parameter, tensor that the optimizer updates for it, start, stop). The tensor is the float32 main
    weights, or the model's own, whose main weights are then in the optimizer's state."""
    if isinstance(part, DistributedOptimizer):
        # model_param_group_index_map is wrong where a bfloat16 model has a float32 parameter (a value head).
        models = [*part.model_fp32_groups, *part.model_float16_groups]
        aware = part.config.use_precision_aware_optimizer
        narrow = part.shard_float16_groups if aware else part.shard_fp32_from_float16_groups
        shards = [*part.shard_fp32_groups, *narrow]
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
