"""A whole asynchronous run in which one process after another is killed or stopped ends as if nothing had happened.

The faults and their order come from a seed, which is printed. One comes after every few steps, in whatever phase the
run then is. The run waits where it would come too far before its next fault.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megagrpo.trainer.batches import read_batch
from tests.loop import small_run
from tests.loop.altered_runs import open_gate

FIRST = 2
BETWEEN = 6
"""Steps from one fault to the next. There are twice as many after the last: its remedy is part of the run."""
ROOM = BETWEEN - 2
"""Steps that the run may make before a fault that is due has come."""
MAX_STALENESS = 2
ADDRESSEE_SECONDS = 300.0
"""For an engine that is starting to be there, and for what a run leaves to be gone."""
KINDS = {"engine": "ray::EngineActor", "training rank": "ray::RankActor", "reward worker": "worker_process"}
"""Words in the command line of each kind of process."""
FAULTS = [("kill", "driver"), *((how, kind) for kind in KINDS for how in ("kill", "stop"))]
MARGIN = 0.1
"""The held-out score is 0.06 at the start; undisturbed runs with seeds 3, 4 and 5 all end with 1.0."""


def recipe(inputs: Path, output: Path, name: str, steps: int) -> Path:
    values = small_run.recipe(inputs, output, name)
    values["schedule"] = {"kind": "async", "max_staleness": MAX_STALENESS}
    values["rollout"] |= {"engines": 2, "samples_per_prompt": 8}
    values["algorithm"]["kl"]["coefficient"] = 0.0
    values["train"]["optimizer"]["lr"] = 1e-2
    values["reward"]["timeout_seconds"] = 5.0
    values["train"]["total_steps"] = steps
    values["eval"]["every_steps"] = steps
    values["checkpoint"] |= {"every_steps": 4, "keep_batches": steps}
    values["weights"] = {"timeout_seconds": 10.0}
    values["cluster"] |= {"placement": "disaggregated", "step_timeout_seconds": 30.0, "restarts_max": 10}
    return small_run.write(values, output)


class Disturbed:
    """The process of a run that is started again when it is killed, and all that it starts. They share a place for
    temporary files, by which they are known."""

    def __init__(self, recipe_file: Path, directory: Path, place: Path) -> None:
        self._recipe, self._directory, self._place = recipe_file, directory, place
        self._printed, self.gate = directory.with_suffix(".log"), directory.with_suffix(".gate")
        self.shared: set[Path] = set()
        """Files in shared memory that they have mapped."""
        open_gate(self.gate, FIRST)
        self.start()

    def start(self) -> None:
        with self._printed.open("a") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.loop.altered_runs", "gate", self.gate, "train", self._recipe],
                stdout=printed,
                stderr=printed,
                cwd=small_run.REPOSITORY,
                env=small_run.own_environment() | {"TMPDIR": str(self._place)},
            )

    def printed(self) -> str:
        return self._printed.read_text()

    def step(self) -> int:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return max(small_run.metrics(self._directory))
        return 0

    def wait_for(self, moment: Callable[[], bool], what: str, seconds: float) -> None:
        """Fails with all that was printed if the run ends before, or at the deadline."""
        deadline = time.monotonic() + seconds
        while not moment():
            assert self.process.poll() is None, f"{what}: the run has ended\n{self.printed()}"
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s\n{self.printed()}"
            time.sleep(0.1)

    def family(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR", "").startswith(str(self._place)):
                    yield process

    def of_kind(self, kind: str) -> list[psutil.Process]:
        """Returns the running processes of a kind."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                running = process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
                if running and KINDS[kind] in " ".join(process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def look_at_shared_memory(self) -> None:
        for process in self.family():
            with contextlib.suppress(OSError):  # it has ended
                mapped = re.findall(r"/dev/shm/\S+", Path(f"/proc/{process.pid}/maps").read_text())
                self.shared |= {path for path in map(Path, mapped) if path.exists()}

    def disturb(self, how: str, kind: str, chance: random.Random) -> None:
        self.look_at_shared_memory()
        print(f"after step {self.step()}: {how} {kind}", flush=True)
        if kind == "driver":
            self.process.kill()
            self.process.wait()
            self.start()
            return
        self.wait_for(lambda: bool(self.of_kind(kind)), f"a {kind} to {how}", ADDRESSEE_SECONDS)
        with contextlib.suppress(psutil.Error):
            chance.choice(self.of_kind(kind)).send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def left(self) -> list[dict[str, object]]:
        """Its processes that are there after some time, or nothing as soon as there is none."""
        deadline, known = time.monotonic() + ADDRESSEE_SECONDS, ["pid", "ppid", "status", "cmdline"]
        while (family := list(self.family())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [process.as_dict(known) for process in family if process.is_running()]

    def end(self) -> None:
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path: Ray makes sockets in it."""
    directory = Path(tempfile.mkdtemp(prefix="mc-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def trained(run: Path, steps: int) -> list[str]:
    """Ids of the prompts of all steps."""
    return sorted(group.prompt.id for step in range(1, steps + 1) for group in read_batch(run, step).sampled.groups)


def oldest(run: Path, steps: int) -> int:
    """The greatest staleness of a token that was trained."""
    return max(
        step - 1 - int(sample.versions.min())
        for step in range(1, steps + 1)
        for group in read_batch(run, step).sampled.groups
        for sample in group.samples
    )


@pytest.mark.soak
@pytest.mark.timeout(2 * small_run.RUN_SECONDS)
def test_a_run_ends_as_if_nothing_had_happened_whatever_is_killed_or_stopped_in_it(tmp_path: Path, place: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "1"))
    chance, faults = random.Random(seed), list(FAULTS)
    chance.shuffle(faults)
    print(f"seed {seed}: {faults}")
    small_run.make_inputs(tmp_path)
    steps = FIRST + BETWEEN * (len(faults) + 1)
    run = Disturbed(recipe(tmp_path, tmp_path, "disturbed", steps), tmp_path / "disturbed", place)
    try:
        for due, (how, kind) in zip(range(FIRST, steps, BETWEEN), faults, strict=False):
            open_gate(run.gate, due + ROOM)
            # Later than where any earlier fault was: a driver that was started again has made a step, as a rank that is
            # lost while a run starts ends it.
            run.wait_for(lambda due=due: run.step() >= due, "the next fault", small_run.RUN_SECONDS)
            time.sleep(chance.random())  # so that it may come in any phase of a step
            run.disturb(how, kind, chance)
        open_gate(run.gate, steps)
        code = run.process.wait(small_run.RUN_SECONDS)
        assert code == 0, run.printed()
        assert run.left() == []
    finally:
        print(run.printed())
        run.end()
    assert not [path for path in run.shared if path.exists()]
    # Megatron imports wandb where that is installed, whose own directories stay where it is killed.
    assert {path.name for path in place.iterdir() if "wandb" not in path.name} <= {"ray"}
    written = [path.name for path in (tmp_path / "disturbed").rglob("*") if path.name != ".metadata"]
    assert not [name for name in written if name.startswith(".") or ".part" in name]

    small_run.train(recipe(tmp_path, tmp_path, "undisturbed", steps))
    ours, theirs = tmp_path / "disturbed", tmp_path / "undisturbed"
    entries = small_run.metrics(ours)
    assert sorted(entries) == list(range(steps + 1))
    assert trained(ours, steps) == trained(theirs, steps)
    assert oldest(ours, steps) <= MAX_STALENESS
    assert max(entry.get("staleness/max", 0.0) for entry in entries.values()) <= MAX_STALENESS
    score = small_run.metrics(theirs)[steps]["eval/sums/mean@1"]
    print(f"the held-out score: {entries[steps]['eval/sums/mean@1']}, undisturbed: {score}")
    assert entries[steps]["eval/sums/mean@1"] >= score - MARGIN
