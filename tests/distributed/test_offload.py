"""Memory released and restored between phases: really gone, and nothing to see in the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megagrpo.errors import RankError
from megagrpo.megatron.model import named_tensors
from megagrpo.megatron.offload import Offload
from megagrpo.megatron.state import shards_of
from tests.distributed.conftest import Tiny
from tests.distributed.layouts import ROWS, Row
from tests.distributed.tiny_training import TinyTraining
from tests.rank_group import run_ranks

PARTS = ("parameters", "gradients", "optimizer", "reference")


def train(model: Path, row: Row, release: bool) -> dict[str, Any]:
    """Three steps, with everything released and restored before and after each of them if asked."""
    training = TinyTraining(model, row.layout, row.distributed_optimizer, row.dtype)
    reference = [tensor.clone() for tensor in named_tensors(training.wrapped).values()]
    offload = Offload(training.wrapped, training.optimizer, reference)
    steps, held = [], []
    for _ in range(3):
        if release:
            offload.release(PARTS)
            everything = [*named_tensors(training.wrapped).values(), *reference]
            for chunk in training.wrapped:
                everything += [buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            for shard in shards_of(training.optimizer).values() if steps else ():
                everything += shard.tensors.values()
            held.append(sum(tensor.untyped_storage().nbytes() for tensor in everything))
            offload.restore(("reference", "parameters", "optimizer", "gradients"))
        steps.append(training.step())
    return {"steps": steps, "held": held, "tensors": training.tensors(), "reference": reference}


@pytest.mark.parametrize("name", ["tensor", "three stages", "expert, data", "expert over tensor"])
def test_released_memory_is_gone_and_the_numbers_stay_bit_for_bit(name: str, tiny: Tiny) -> None:
    row = ROWS[name]
    without, released = (
        run_ranks(row.layout.ranks, train, tiny(row.family, **row.changes), row, release) for release in (False, True)
    )
    for rank in range(row.layout.ranks):
        assert released[rank]["held"] == [0, 0, 0]
        assert released[rank]["steps"] == without[rank]["steps"]
        assert released[rank]["tensors"].keys() == without[rank]["tensors"].keys()
        for name, tensor in released[rank]["tensors"].items():
            assert torch.equal(tensor, without[rank]["tensors"][name]), name
        assert all(map(torch.equal, released[rank]["reference"], without[rank]["reference"]))


def use_while_released(model: Path) -> tuple[str, list[str]]:
    training = TinyTraining(model)
    offload = Offload(training.wrapped, training.optimizer)
    offload.release(["gradients", "optimizer"])
    offload.release(["optimizer"])
    offload.restore(["parameters", "gradients"])
    offload.require(["parameters", "gradients"])
    try:
        offload.require(PARTS)
    except RankError as error:
        return str(error), sorted(offload._released)
    return "", []


def test_use_of_a_released_part_is_refused_by_name(tiny: Tiny) -> None:
    message, released = run_ranks(1, use_while_released, tiny("qwen2_tied"))[0]
    assert "optimizer released" in message
    assert "gradients" not in message
    assert released == ["optimizer"]
