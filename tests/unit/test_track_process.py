"""The process that brings a run to its trackers: killed, stopped, and left behind by the driver."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megagrpo.cli import main
from megagrpo.recipe.schema.run import TrackConfig
from megagrpo.track import follower
from megagrpo.track.status import RunStatus
from megagrpo.track.tracked_run import FILE
from megagrpo.track.tracker import Tracker
from megagrpo.track.trackers import TRACKERS
from tests.tiny_run import tracked_recipe
from tests.toy_tracker import FILE as FILE_OF_TOY
from tests.toy_tracker import Toy, ToyConfig, received
from tests.tracker_thread import trackers_in_patient_process
from tests.unit.test_track_others import scalars

REPOSITORY = Path(__file__).resolve().parents[2]
ADDED = f"""
import sys
sys.path.append({str(REPOSITORY)!r})
from megagrpo.track.trackers import TRACKERS
from tests.toy_tracker import Toy
TRACKERS["toy"] = Toy
"""
DRIVER = """
import sys, time
from pathlib import Path
from tests.tiny_run import tracked_recipe
from megagrpo.track.tracker import Tracker
with Tracker(tracked_recipe(Path(sys.argv[1]), tensorboard=True), 10) as tracker:
    tracker.log(0, {"reward/mean": 0.0})
    time.sleep(600)
"""
TOY_DRIVER = f"""{ADDED}
import json
from pathlib import Path
from megagrpo.recipe.schema import Recipe
from megagrpo.track.tracker import Tracker
from tests.tiny_run import tracked_recipe
from tests.tracker_thread import trackers_in_patient_process
from tools.recipe_docs import json_schema, reference
import pytest
trackers_in_patient_process(pytest.MonkeyPatch(), {ADDED!r})
with Tracker(tracked_recipe(Path(sys.argv[1]), toy={{"times": 3}}), 10) as tracker:
    tracker.log(1, {{"reward/mean": 0.5}})
print(*[line for line in reference(Recipe).splitlines() if "track.toy" in line], sep="\\n")
print(json.dumps(json.loads(json_schema(Recipe))["$defs"]["ToyConfig"]))
"""
WANDB_DRIVER = """
import sys, time
from pathlib import Path
from tests.tiny_run import tracked_recipe
from megagrpo.track.tracker import Tracker
with Tracker(tracked_recipe(Path(sys.argv[1]), mlflow={}, wandb={}), 10) as tracker:
    tracker.log(0, {"reward/mean": 0.0})
    while not list(Path(sys.argv[1]).glob("end")):
        time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    trackers_in_patient_process(monkeypatch)


def add_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the toy to the process, and to this one, whose recipes have their fields already."""
    monkeypatch.setitem(TRACKERS, "toy", Toy)
    monkeypatch.setattr(TrackConfig, "toy", ToyConfig(), raising=False)
    trackers_in_patient_process(monkeypatch, ADDED)


def processes_of(pid: int) -> Iterator[psutil.Process]:
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):  # it has ended
            if "--follow" in child.cmdline():
                yield child


def the_process(before: int = 0) -> psutil.Process:
    """The one of this driver, once it is there, and not the one of before."""
    while not (found := [process for process in processes_of(os.getpid()) if process.pid != before]):
        time.sleep(0.05)
    return found[0]


def kill_and_await(process: psutil.Process) -> None:
    """Kills it. Does not take its status, which is for who started it."""
    process.kill()
    with suppress(psutil.Error):  # that has taken it
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)


def await_step(directory: Path, step: int) -> None:
    """Until TensorBoard has it."""
    record = directory / FILE
    while json.loads(record.read_text())["trackers"].get("tensorboard", {}).get("step", -1) < step:
        time.sleep(0.05)


def test_a_process_that_is_killed_is_started_again_and_brings_each_step_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "psutil.py").write_text("raise RuntimeError('a file of the user, which is no module')")
    recipe, directory = tracked_recipe(tmp_path, tensorboard=True, console="lines"), tmp_path / "runs" / "adder"
    with Tracker(recipe, 10) as tracker:
        for step in range(3):
            tracker.log(step, {"reward/mean": step / 8})
        await_step(directory, 2)
        first = the_process()
        assert os.sched_getscheduler(first.pid) == os.SCHED_IDLE
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # they are the driver's
            first.send_signal(number)
        tracker.log(3, {"reward/mean": 3 / 8})
        await_step(directory, 3)
        kill_and_await(first)
        for step in range(4, 6):
            tracker.log(step, {"reward/mean": step / 8})
        the_process(before=first.pid)
    assert scalars(directory)["reward/mean"] == [(step, step / 8) for step in range(6)]
    assert "it is started again" in capsys.readouterr().out
    assert not list(processes_of(os.getpid()))


def test_a_tracker_of_one_file_and_one_line_gets_each_step_once_over_kills_and_a_resumed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill() -> None:
        """Kills the process while it delivers."""
        had, process = len(received(directory)), the_process()
        while len(received(directory)) < had + 3:
            time.sleep(0.005)
        kill_and_await(process)

    add_toy(monkeypatch)
    recipe, directory = tracked_recipe(tmp_path), tmp_path / "runs" / "adder"
    with Tracker(recipe, 99) as tracker:
        for step in range(1, 41):
            tracker.log(step, {"reward/mean": step / 8})
        kill()
        for step in range(41, 61):
            tracker.log(step, {"reward/mean": step / 8})
        kill()
    with Tracker(recipe, 99, resumed_step=50) as tracker:
        for step in range(51, 71):
            tracker.log(step, {"reward/mean": 1.0})
    assert received(directory) == {str(step): step / 8 if step <= 60 else 1.0 for step in range(1, 71)}
    before = (directory / FILE_OF_TOY).read_text().splitlines()
    assert before[-1] == '["status", "finished"]'
    assert main(["track", "sync", str(directory)]) == 0
    assert "toy: 0 steps brought; it has everything" in capsys.readouterr().out


def test_a_line_in_trackers_gives_recipes_the_field_with_the_tracker_s_settings(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", TOY_DRIVER, str(tmp_path)], capture_output=True, text=True, check=True)
    assert received(tmp_path / "runs" / "adder") == {"1": 1.5}
    assert "### `track.toy`" in ran.stdout
    assert json.loads(ran.stdout[ran.stdout.index("{") :])["properties"]["times"]["minimum"] == 1


def test_a_run_whose_end_a_full_disk_keeps_out_of_its_status_is_ended_at_its_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RunStatus, directory: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    add_toy(monkeypatch)
    with Tracker(tracked_recipe(tmp_path), 10) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
        monkeypatch.setattr(RunStatus, "write", full)
    assert received(tmp_path / "runs" / "adder") == {"1": 0.5}
    assert (tmp_path / "runs" / "adder" / FILE_OF_TOY).read_text().endswith('["status", "interrupted"]\n')


def test_a_process_that_is_stopped_delays_no_step_and_the_end_only_for_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("FINISH_SECONDS", 0.1), ("REPORT_SECONDS", 0.1), ("LEAVE_SECONDS", 2.0)):
        monkeypatch.setattr(follower, name, seconds)
    recipe, directory = tracked_recipe(tmp_path, tensorboard=True, console="lines"), tmp_path / "runs" / "adder"
    with Tracker(recipe, 10) as tracker:
        the_process().send_signal(signal.SIGSTOP)
        for step in range(3):
            tracker.log(step, {"reward/mean": step / 8})
        tracker.rewind(1, unlogged=False)
        tracker.log(2, {"reward/mean": 0.5})
    assert capsys.readouterr().out.count(f"megagrpo track sync {directory}") == 1
    assert not list(processes_of(os.getpid()))
    assert main(["track", "sync", str(directory)]) == 0
    assert scalars(directory)["reward/mean"] == [(0, 0.0), (1, 0.125), (2, 0.5)]


def test_a_report_that_takes_too_long_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "REPORT_SECONDS", 0)
    said: list[str] = []
    follower.write_report(tmp_path, ["MLflow"], said.append)
    assert said == [f"no report for MLflow: not written within 0 s; megagrpo report {tmp_path} makes it"]


@pytest.mark.soak
def test_a_run_that_goes_back_while_no_process_brings_it_keeps_in_tensorboard_what_came_last(tmp_path: Path) -> None:
    recipe, directory = tracked_recipe(tmp_path, tensorboard=True), tmp_path / "runs" / "adder"
    with Tracker(recipe, 10) as tracker:
        for step in range(4):
            tracker.log(step, {"reward/mean": step / 8})
        await_step(directory, 3)
        the_process().send_signal(signal.SIGSTOP)
        tracker.rewind(1, unlogged=False)
        for step in range(2, 6):
            tracker.log(step, {"reward/mean": 1.0})
        the_process().kill()
    assert scalars(directory)["reward/mean"] == [(0, 0.0), (1, 0.125), *((step, 1.0) for step in range(2, 6))]


def test_it_ends_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)])
    try:
        while not (found := list(processes_of(driver.pid))):
            time.sleep(0.05)
        (tmp_path / "runs" / "adder").mkdir(parents=True, exist_ok=True)
        await_step(tmp_path / "runs" / "adder", 0)  # it runs, and is not only being started
    finally:
        driver.kill()
        driver.wait()
    psutil.wait_procs(found, timeout=60)
    assert not found[0].is_running()


@pytest.mark.long
@pytest.mark.parametrize("ending", [False, True])
def test_nothing_is_left_of_wandb_and_the_report_when_the_driver_is_killed(tmp_path: Path, ending: bool) -> None:
    """While the run goes on, and while its end makes the report."""

    def await_process(part: str) -> None:
        while not any(part in " ".join(command) for command in commands()):
            assert driver.poll() is None
            time.sleep(0.05)

    def commands() -> Iterator[list[str]]:
        for process in psutil.Process(driver.pid).children(recursive=True):
            with suppress(psutil.Error):  # it has ended
                yield process.cmdline()

    # Without the address of a wandb-core that other tests have started.
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    command = [sys.executable, "-c", WANDB_DRIVER, str(tmp_path)]
    driver = subprocess.Popen(command, env=own | {"WANDB_MODE": "offline"})
    try:
        await_process("wandb-core")
        if ending:
            (tmp_path / "end").touch()
            await_process(f"report {tmp_path}")
        family = psutil.Process(driver.pid).children(recursive=True)
    finally:
        driver.kill()
        driver.wait()
    _, left = psutil.wait_procs(family, timeout=60)
    assert len(family) > 1
    assert not left
    assert not list((tmp_path / "runs" / "adder").glob("*report.html*"))
