"""A run over two nodes, one of which is lost, continues on a repaired cluster with the same numbers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megagrpo.errors import EXIT_NODE_LOST
from tests.cluster.two_nodes import WORKER, TwoNodes
from tests.loop import small_run

OVERRIDES = ["track.mlflow=null", "checkpoint.every_steps=1"]
RUN_SECONDS = 240.0
LOSS_SECONDS = 60.0
"""From the death of a node to the end of the run: Ray's own verdict on the node, and the end of what is left."""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_lost_node_ends_the_run_with_its_name_and_the_same_command_continues(
    inputs: Path, finished: tuple[Path, str], tmp_path: Path
) -> None:
    recipe_file = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path)
    run = tmp_path / "small"
    with TwoNodes() as cluster:
        process = cluster.start("train", str(recipe_file), *OVERRIDES)
        try:
            deadline = time.monotonic() + RUN_SECONDS
            while not (run / "checkpoints" / "step_000001").exists():
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline
                time.sleep(0.005)
            cluster.kill_worker()
            killed = time.monotonic()
            printed, _ = process.communicate(timeout=RUN_SECONDS)
        finally:
            process.kill()
        assert process.returncode == EXIT_NODE_LOST, printed
        assert f"({WORKER})" in printed
        assert time.monotonic() - killed < LOSS_SECONDS, printed

        cluster.start_worker()
        process = cluster.start("train", str(recipe_file), *OVERRIDES)
        try:
            printed, _ = process.communicate(timeout=RUN_SECONDS)
        finally:
            process.kill()
        assert process.returncode == 0, printed
    assert "continuing after step" in printed
    assert small_run.stable(small_run.metrics(run)) == small_run.stable(small_run.metrics(finished[0]))
