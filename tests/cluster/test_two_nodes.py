"""Runs over two nodes: the demo learns, and a run that loses a node continues on a repaired cluster."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megagrpo.errors import EXIT_NODE_LOST
from tests.cluster.two_nodes import WORKER, TwoNodes
from tests.loop import small_run
from tests.loop.warm_model import REPOSITORY, warm_model

OVERRIDES = ["track.mlflow=null", "checkpoint.every_steps=1"]
RUN_SECONDS = 240.0
LOSS_SECONDS = 60.0
"""From the death of a node to the end of the run: Ray's own verdict on the node, and the end of what is left."""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demo_learns_to_carry_over_two_nodes(tmp_path: Path) -> None:
    recipe_file = REPOSITORY / "yaml_recipes" / "adder_cpu.yaml"
    model, output = f"model.path={warm_model()}", f"track.directory={tmp_path}"
    with TwoNodes() as cluster:
        process = cluster.start("train", str(recipe_file), model, output, "track.mlflow=null", "train.total_steps=40")
        try:
            printed, _ = process.communicate(timeout=2 * RUN_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0, printed
    metrics = small_run.metrics(tmp_path / recipe_file.stem)
    assert metrics[max(metrics)]["eval/mean@1"] >= 0.9


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
