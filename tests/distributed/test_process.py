"""Joining ranks, and Megatron's process groups against our rank grid."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megagrpo.errors import RankError
from megagrpo.layout.parallel import ParallelLayout, RankCoordinates, rank_grid
from megagrpo.megatron import process
from tests.rank_group import RankGroupError, run_ranks

LAYOUTS = [
    ParallelLayout(tensor=2, pipeline=2, data=2, expert_tensor=2),
    ParallelLayout(tensor=2, context=2, data=2, expert=2, expert_tensor=1),
    ParallelLayout(pipeline=2, context=2, data=2, expert=2),
    ParallelLayout(tensor=2, pipeline=2, context=2, expert=2, expert_tensor=2),
    ParallelLayout(data=8, expert=4),
]

# name: (the group's ranks, the coordinates that its members share)
GROUPS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "tensor": (parallel_state.get_tensor_model_parallel_group, ("pipeline", "context", "data")),
    "pipeline": (parallel_state.get_pipeline_model_parallel_group, ("tensor", "context", "data")),
    "context": (parallel_state.get_context_parallel_group, ("tensor", "pipeline", "data")),
    "data": (parallel_state.get_data_parallel_group, ("tensor", "pipeline", "context")),
    "expert": (parallel_state.get_expert_model_parallel_group, ("pipeline", "expert_tensor", "expert_data")),
    "expert_tensor": (parallel_state.get_expert_tensor_parallel_group, ("pipeline", "expert", "expert_data")),
    "expert_data": (parallel_state.get_expert_data_parallel_group, ("pipeline", "expert", "expert_tensor")),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_megatrons_groups_are_those_of_the_rank_grid(layout: ParallelLayout) -> None:
    grid = rank_grid(layout)

    def shared(where: RankCoordinates, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(getattr(where, axis) for axis in axes)

    for where, groups in zip(grid, run_ranks(layout.ranks, groups_of_rank, layout), strict=True):
        for axis, (_, axes) in GROUPS.items():
            members = [other.rank for other in grid if shared(other, axes) == shared(where, axes)]
            assert groups[axis] == members, f"{axis} group of rank {where.rank}"
            assert members.index(where.rank) == getattr(where, axis)


def groups_of_rank(layout: ParallelLayout) -> dict[str, list[int]]:
    process.start_parallel(layout, seed=1)
    with pytest.raises(AssertionError):  # Megatron has made none besides, which only its own checkpoints use
        parallel_state.get_data_parallel_group_gloo()
    all_in_data = ParallelLayout(data=layout.ranks)
    further = process.further_groups(all_in_data, 60)
    assert process.further_groups(all_in_data, 60) is further, "each group holds memory"
    with process.in_groups(further):
        assert dist.get_process_group_ranks(parallel_state.get_data_parallel_group()) == list(range(layout.ranks))
        assert parallel_state.get_pipeline_model_parallel_world_size() == 1
    return {axis: dist.get_process_group_ranks(group()) for axis, (group, _) in GROUPS.items()}


def test_the_default_group_gets_the_deadline_of_the_steps() -> None:
    assert run_ranks(2, deadlines, timeout=500) == [(500.0, 700.0)] * 2


def deadlines() -> tuple[float, float]:
    def of_default_group() -> float:
        return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    joining = of_default_group()
    process.start_parallel(ParallelLayout(data=2), seed=1, timeout_seconds=700)
    return joining, of_default_group()


def test_ranks_that_do_not_come_are_an_error_within_the_deadline() -> None:
    with pytest.raises(RankGroupError) as error:
        run_ranks(1, start_alone, joined=False)
    assert "RankError" in str(error.value)
    assert "could not join the other 1" in str(error.value)
    assert "2 ranks within 1 s" in str(error.value)


def start_alone(rank: int, store: str) -> None:
    process.start(rank, 2, store, "cpu", timeout_seconds=1)


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)])
def test_on_gpus_new_groups_do_not_split_the_communicator_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, device: str, index: int
) -> None:
    """Gives the default group a device of its own, as on GPUs, and makes every group on every rank."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: given.update(index=index))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: given.update(more, backend=backend))
    process.start(0, 128, "env://", device, timeout_seconds=1)
    assert (given["backend"], given["world_size"], given.get("device_id"), given["index"]) == ("nccl", 128, None, index)


def test_a_layout_of_another_size_is_an_error() -> None:
    (message,) = run_ranks(1, start_two_on_one)
    assert "given: 1 ranks" in message
    assert "tensor 2" in message


def start_two_on_one() -> str:
    with pytest.raises(RankError) as error:
        process.start_parallel(ParallelLayout(tensor=2), seed=1)
    return str(error.value)


def test_a_rank_that_raises_ends_the_call_and_the_next_one_works() -> None:
    with pytest.raises(RankGroupError, match="ValueError: on purpose"):
        run_ranks(2, raise_on_rank_1)
    for timeout in (1, 10, 100):  # a busy machine may not even start it in time
        with pytest.raises(RankGroupError) as error:
            run_ranks(2, wait_for_ever, timeout=timeout)
        if "in wait_for_ever" in str(error.value):
            break
    assert "in wait_for_ever" in str(error.value)
    assert run_ranks(2, rank) == [0, 1]


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.barrier()


def wait_for_ever() -> None:
    time.sleep(3600)


def rank() -> int:
    return dist.get_rank()


def test_device_contexts_work_under_the_shim() -> None:
    """transformers builds models inside `with torch.device("meta")`; the shim replaces some of torch's factories."""
    with torch.device("meta"):
        made = [torch.zeros(2), torch.tensor([1.0]), torch.empty(2), torch.ones(2), torch.arange(2)]
    assert {tensor.device.type for tensor in made} == {"meta"}
