"""A run over two Ray nodes that loses one of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megagrpo.errors import EXIT_NODE_LOST
from tests.loop import demo_run, small_run
from tests.loop.ray_nodes import RayNodes
from tests.loop.test_stopping import wait_for

LOSS_SECONDS = 300.0
"""From the death of a node to the end of the run: Ray's own verdict on the node, and the end of what is left. It takes
20 s on a machine that does nothing else."""


@pytest.mark.long
@pytest.mark.timeout(2 * small_run.RUN_SECONDS)
def test_over_two_nodes_the_demo_loses_one_and_the_same_command_continues_and_learns_to_carry(
    adder: str, grpo: tuple[Path, demo_run.Metrics], tmp_path: Path
) -> None:
    overrides = (
        f"track.directory={tmp_path}",
        adder,
        *demo_run.UNTIL_LEARNT,
        "train.total_steps=40",
        "checkpoint.every_steps=5",
    )
    run = tmp_path / "adder_cpu"
    with RayNodes(cpus_per_node=1) as cluster:
        cluster.start_worker()
        process = small_run.start(demo_run.RECIPES / "adder_cpu.yaml", *overrides, environment=cluster.environment)
        wait_for(run / "checkpoints" / "step_000005", process)
        cluster.kill_worker()
        killed = time.monotonic()
        assert f"({cluster.worker})" in small_run.end(process, EXIT_NODE_LOST)
        assert time.monotonic() - killed < LOSS_SECONDS

        cluster.start_worker()
        printed = small_run.train(demo_run.RECIPES / "adder_cpu.yaml", *overrides, environment=cluster.environment)
    assert "continuing after step" in printed
    metrics = small_run.metrics(run)
    shares = demo_run.solved(metrics)
    assert shares[max(shares)] >= demo_run.GOAL
    on_one_node = small_run.stable(grpo[1])
    assert small_run.stable(metrics) == {step: on_one_node[step] for step in metrics}
