"""Jobs on a real Slurm of two nodes: slurm/grpo_70b.sh and slurm/train.sh as a user submits them."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.loop import small_run
from tests.slurm.cluster import NODES, SCRIPTS, Slurm, UnavailableError, edited, overrides, slurm

pytestmark = [pytest.mark.long, pytest.mark.needs("slurm"), pytest.mark.timeout(2 * small_run.RUN_SECONDS)]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """The directory that all nodes see: a checkout's scripts, inputs, and what jobs write."""
    try:
        directory = Path(tempfile.mkdtemp(prefix="slurm", dir="/var/tmp"))
    except OSError as reason:
        pytest.skip(str(reason))
    directory.chmod(0o755)
    for name in ("slurm", "yaml_recipes"):
        (directory / name).symlink_to(small_run.REPOSITORY / name)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def nodes(place: Path) -> Iterator[Slurm]:
    (place / "state").mkdir()
    with ExitStack() as stack:
        try:
            started = stack.enter_context(slurm(place / "state"))
        except UnavailableError as reason:
            pytest.skip(str(reason))
        small_run.make_inputs(place)
        yield started


def recipe(place: Path, name: str, steps: int) -> dict[str, Any]:
    """Two data ranks: nodes have one CPU each, so one rank is on each."""
    values = small_run.recipe(place, place / "runs", name)
    values["train"] |= {"layout": {"data": 2}, "total_steps": steps}
    return values


def submit(nodes: Slurm, place: Path, script: str, *arguments: str, options: tuple[str, ...] = ()) -> int:
    lines = ("#SBATCH --partition=test", f"cd {place}", f"source {sys.prefix}/bin/activate")
    (place / script).write_text(edited(SCRIPTS / script, *lines))
    asked = ("--parsable", "--nodes=2", f"--export=ALL,NODE_TMP={place}/state/disk", *options)
    return int(nodes.command("sbatch", *asked, script, *arguments, cwd=place))


def train(nodes: Slurm, place: Path, values: dict[str, Any], *options: str) -> int:
    return submit(nodes, place, "train.sh", str(small_run.write(values, place)), options=options)


def output(place: Path, job: int) -> str:
    return "".join(path.read_text() for path in place.glob(f"*-{job}.out"))


def newest_step(place: Path, name: str) -> int:
    """The step of the run's newest whole checkpoint; 0 if there is none."""
    saved = (place / "runs" / name / "checkpoints").glob("step_*")
    return max((int(path.name.removeprefix("step_")) for path in saved), default=0)


def wait_until_saved(nodes: Slurm, place: Path, job: int, name: str) -> None:
    def saved_or_over() -> bool:
        assert nodes.job(job)["JobState"] in {"PENDING", "RUNNING"}, output(place, job)
        return newest_step(place, name) > 0

    small_run.wait_until(saved_or_over, f"a checkpoint of {name}")


def nothing_left(nodes: Slurm) -> bool:
    return all(nodes.pids(node) == [nodes.processes[node].pid] for node in NODES)


def test_the_70b_script_trains_on_both_nodes(nodes: Slurm, place: Path) -> None:
    values = recipe(place, "grpo_70b", steps=2)
    job = submit(nodes, place, "grpo_70b.sh", *overrides(values))
    ended = nodes.wait_for_state(job, "COMPLETED", "FAILED")
    printed = output(place, job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), printed
    assert "Ray has 2 of 2 nodes: n1 n2" in printed
    assert newest_step(place, "grpo_70b") == 2
    assert (place / "runs/grpo_70b/hugging_face/model.safetensors").exists()
    logs = place / "runs" / "slurm" / f"{job}_0"
    for node in NODES:
        assert (logs / f"{node}.log").exists()
        assert any("RankActor" in path.read_text() for path in (logs / node).glob("worker-*")), f"no rank on {node}"
    assert not (logs / "token").exists()
    small_run.wait_until(lambda: nothing_left(nodes), "an end of all processes")
    assert not list((place / "state").glob("disk-*/*"))


def test_a_wrong_recipe_ends_the_job_before_ray_starts(nodes: Slurm, place: Path) -> None:
    values = recipe(place, "wrong", steps=2)
    values["train"]["layout"] = {"tensor": 3}
    job = train(nodes, place, values)
    ended = nodes.wait_for_state(job, "COMPLETED", "FAILED")
    printed = output(place, job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0"), printed
    assert "train.layout" in printed
    assert not list((place / "runs" / "slurm" / f"{job}_0").iterdir())


@pytest.mark.soak
def test_before_its_time_limit_the_job_saves_and_the_requeued_job_goes_on_until_it_is_cancelled(
    nodes: Slurm, place: Path
) -> None:
    job = train(nodes, place, recipe(place, "limit", steps=100_000), "--signal=B:USR1@170", "--time=60")
    wait_until_saved(nodes, place, job, "limit")
    hours, minutes, _ = map(int, nodes.job(job)["RunTime"].split(":"))
    nodes.command("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + 3}")
    small_run.wait_until(lambda: nodes.job(job)["Restarts"] == "1", "the job is back in the queue")
    printed = output(place, job)
    assert "got SIGUSR1" in printed
    assert "the run ended with 75" in printed

    done = newest_step(place, "limit")
    nodes.command("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    small_run.wait_until(lambda: f"step {done + 1}/" in output(place, job), "its next step")
    assert f"continuing after step {done} " in output(place, job)
    assert (place / "runs" / "slurm" / f"{job}_1" / "n2.log").exists()

    nodes.command("scancel", str(job))
    ended = nodes.wait_for_state(job, "CANCELLED")
    assert (ended["Restarts"], ended["Requeue"]) == ("1", "1")
    small_run.wait_until(lambda: nothing_left(nodes), "an end of all processes")
    steps = sorted(small_run.metrics(place / "runs" / "limit"))
    assert steps == list(range(len(steps)))
    assert len(steps) > done + 1


@pytest.mark.soak
def test_a_lost_node_ends_the_job_and_the_same_command_continues(nodes: Slurm, place: Path) -> None:
    values = recipe(place, "lost", steps=100_000)
    job = train(nodes, place, values, "--no-requeue")
    wait_until_saved(nodes, place, job, "lost")
    nodes.kill("n2")
    nodes.wait_for_state(job, "COMPLETING", "FAILED", "NODE_FAIL")
    nodes.start_node("n2")
    ended = nodes.wait_for_state(job, "FAILED")
    printed = output(place, job)
    assert ended["ExitCode"] == "4:0", printed
    assert "n2" in printed.partition("node lost")[2]

    job = train(nodes, place, values)
    small_run.wait_until(lambda: "step " in output(place, job).partition("continuing after step")[2], "a step")
    nodes.command("scancel", "--batch", "--signal=TERM", str(job))
    ended = nodes.wait_for_state(job, "FAILED")
    assert (ended["ExitCode"], ended["Restarts"], ended["Requeue"]) == ("75:0", "0", "1"), output(place, job)
