"""The table of benchmarks/training.py: a row for each way to recompute, and no model left of the row before."""

from __future__ import annotations

import contextlib
import gc
import io
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel

from benchmarks import training
from tests.rank_group import run_ranks


@pytest.mark.long
def test_each_row_begins_with_free_memory_also_after_one_that_had_too_little() -> None:
    [(text, models_before)] = run_ranks(1, table_of_a_tiny_model, joined=False)
    _, _, *rows = text.splitlines()
    ways = training.recompute_ways(training.CPU_TABLE[0]["tiny"]["num_hidden_layers"])
    assert ways.keys() == {"none", "selective", "mlp", "layers: 1", "full"}
    assert [way in row for way, row in zip(ways, rows, strict=True)] == [True] * len(ways)
    assert ["out of memory" in row for row in rows] == [way == "selective" for way in ways]
    assert models_before == [0] * len(ways)


def table_of_a_tiny_model(rank: int, store: str) -> tuple[str, list[int]]:
    """Returns the printed table, and the number of models before each row. The second row has no memory."""
    measure, found = training.measure, []

    def measured(*args: Any) -> training.Measured | None:
        found.append(sum(isinstance(its, DistributedDataParallel) for its in gc.get_objects()))
        with contextlib.ExitStack() as patched:
            if len(found) == 2:
                patched.callback(setattr, training, "of_rank", training.of_rank)
                training.of_rank = no_memory
            return measure(*args)

    training.measure = measured
    gc.disable()  # what the table collects itself
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        training.table("cpu", *training.CPU_TABLE, 1)
    return text.getvalue(), found


def no_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("no memory")
