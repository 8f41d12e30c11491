"""Training ranks that are killed or stopped are started again inside the run, which ends with the same numbers."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from megagrpo.errors import EXIT_NODE_LOST, EXIT_RUN_FAILED
from megagrpo.track.rollout_files import read_rollouts
from tests.loop import small_run
from tests.loop.conftest import Finished, watched
from tests.loop.ray_nodes import RayNodes

NAMED = r"train rank \d, process \d+ on node \S+ \(127\.0\.0\.1\)"


def altered(*alteration: str) -> tuple[str, ...]:
    return "tests.loop.altered_runs", *alteration


@pytest.mark.long
def test_a_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint_with_the_same_engine_and_numbers(
    inputs: Path, finished: Finished, tmp_path: Path
) -> None:
    recipe = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path)
    process = small_run.start(recipe, through=altered("signal_rank", "SIGKILL", "update", "4"))
    run = watched(process, tmp_path / "small")
    assert re.search(NAMED, run.printed)
    assert "it has died" in run.printed
    assert "after step 3: training ranks are lost; they are started again (1 of 3)" in run.printed
    assert "continuing after step 2 from" in run.printed
    assert Counter(run.actors.values()) == {"RankActor": 4, "EngineActor": 1}
    ours, theirs = (small_run.metrics(directory) for directory in (run.directory, finished.directory))
    assert small_run.stable(ours) == small_run.stable(theirs)
    assert read_rollouts(run.directory) == read_rollouts(finished.directory), "each step once"


@pytest.mark.soak
def test_a_stopped_rank_is_named_at_the_deadline_and_without_a_checkpoint_the_run_begins_again(
    inputs: Path, finished: Finished, tmp_path: Path
) -> None:
    values = small_run.recipe(inputs, tmp_path)
    values["checkpoint"]["every_steps"] = 100
    values["cluster"]["step_timeout_seconds"] = 30.0
    recipe = small_run.write(values, tmp_path)
    run = watched(small_run.start(recipe, through=altered("signal_rank", "SIGSTOP", "update", "2")), tmp_path / "small")
    assert len(re.findall(NAMED, run.printed)) == 1
    assert "it does not react: its state is stopped" in run.printed
    assert "continuing after step 0 from the model" in run.printed
    assert Counter(run.actors.values()) == {"RankActor": 4, "EngineActor": 1}
    ours, theirs = (small_run.metrics(directory) for directory in (run.directory, finished.directory))
    assert small_run.stable(ours) == small_run.stable(theirs)


@pytest.mark.soak
def test_ranks_that_die_at_the_same_step_again_and_again_end_the_run_with_the_first_cause(
    inputs: Path, tmp_path: Path
) -> None:
    values = small_run.recipe(inputs, tmp_path)
    values["cluster"]["restarts_max"] = 1
    recipe = small_run.write(values, tmp_path)
    printed = small_run.end(
        small_run.start(recipe, through=altered("signal_ranks", "SIGKILL", "update", "3")), EXIT_RUN_FAILED
    )
    assert printed.count("they are started again (1 of 1)") == 1
    causes = re.findall(r"train rank \d, process (\d+) on", printed)
    assert len(causes) == 2
    assert causes[0] == causes[1]


@pytest.mark.soak
def test_a_node_with_engines_alone_that_is_lost_in_an_update_ends_the_run_with_that_step_saved(
    inputs: Path, tmp_path: Path
) -> None:
    values = small_run.recipe(inputs, tmp_path)
    values["train"] |= {"layout": {"tensor": 1}, "total_steps": 10_000}
    values["checkpoint"]["every_steps"] = 10_000
    values["cluster"]["placement"] = "disaggregated"
    recipe, updating = small_run.write(values, tmp_path), tmp_path / "updating"
    with RayNodes(cpus_per_node=1) as cluster:
        cluster.start_worker()
        through = altered("await_lost_node", str(updating), "update", "3")
        process = small_run.start(recipe, environment=cluster.environment, through=through)
        small_run.wait_until(updating.exists, "the third update", process=process)
        cluster.kill(cluster.worker)
        printed = small_run.end(process, EXIT_NODE_LOST)
    assert f"({cluster.worker})" in printed
    assert "step 3 is saved" in printed, printed
    assert (tmp_path / "small" / "checkpoints" / "step_000003" / "MANIFEST.json").exists()
