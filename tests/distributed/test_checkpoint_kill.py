"""Processes killed with signal 9 while they save: the previous checkpoint is whole and a run continues from it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megagrpo.checkpoint.store import CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import state
from tests.distributed.conftest import Tiny
from tests.distributed.tiny_training import TinyTraining
from tests.rank_group import RankGroupError, run_ranks


def save_twice_and_die(model: Path, root: Path, victim: int, moment: float) -> None:
    """Save step 1; begin to save step 2, in which `victim` is killed after `moment` of the time that the first took."""
    training = TinyTraining(model, ParallelLayout(pipeline=2))
    store = CheckpointStore(root, keep_last=1)
    seconds = 0.0
    for step in (1, 2):
        training.step()
        if dist.get_rank() == 0:
            store.begin(step)
        dist.barrier()
        if step == 2 and dist.get_rank() == victim:
            threading.Timer(moment * seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        started = time.monotonic()
        files = state.save(training.state, root / f".saving_step_{step:06d}" / "rank")
        seconds = time.monotonic() - started
        gathered = [files, ()]
        dist.all_gather_object(gathered, files)
        if step == 2:
            time.sleep(3600)  # the save was quicker than the first one: it is killed before the commit
        if dist.get_rank() == 0:
            store.commit(TrainerState(step, step, {}, {}), [file for part in gathered for file in part])
        dist.barrier()


def load_and_step(model: Path, directory: Path) -> tuple[float, float]:
    training = TinyTraining(model, weights=False)
    state.load(training.state, directory)
    return training.step()


def second_step(model: Path) -> tuple[float, float]:
    return TinyTraining(model).steps(2)[1]


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return tiny("qwen2_tied")


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[float, float]:
    return run_ranks(1, second_step, model)[0]


@pytest.mark.parametrize(("victim", "moment"), [(0, 0.2), (1, 0.5), (0, 0.8)])
def test_a_rank_killed_while_saving_leaves_the_previous_checkpoint(
    victim: int, moment: float, model: Path, expected: tuple[float, float], tmp_path: Path
) -> None:
    with pytest.raises(RankGroupError):
        run_ranks(2, save_twice_and_die, model, tmp_path, victim, moment)
    store = CheckpointStore(tmp_path, keep_last=1)
    found = store.latest_complete()
    assert found is not None
    assert found.state.step == 1
    assert found.warnings == ()
    assert run_ranks(1, load_and_step, model, found.rank_directory)[0] == pytest.approx(expected, rel=0, abs=2e-6)


COMMIT_FOR_EVER = """
import sys
from pathlib import Path
from megagrpo.checkpoint.store import CheckpointStore, describe
from megagrpo.checkpoint.trainer_state import TrainerState
store = CheckpointStore(Path(sys.argv[1]), keep_last=2, keep_best="mean@1")
for step in range(1, 10_000):
    directory = store.begin(step)
    (directory / "__0_0.distcp").write_bytes(bytes(100_000))
    state = TrainerState(step, step, {}, {}, evaluation={"mean@1": -abs(step - 3.0)})
    store.commit(state, [describe(directory, path) for path in directory.iterdir()])
    print(step, flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_driver_killed_at_any_moment_has_lost_no_committed_checkpoint(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMIT_FOR_EVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "1\n"
        time.sleep(random.Random(seed).uniform(0.0, 0.3))
        driver.kill()
        committed = [1, *map(int, driver.stdout.read().split())]
    store = CheckpointStore(tmp_path, keep_last=2, keep_best="mean@1")
    store.remove_leftovers()
    found = store.latest_complete()
    assert found is not None
    assert found.warnings == ()
    assert found.state.step in (committed[-1], committed[-1] + 1)  # killed between the rename and the print
    assert not list(tmp_path.glob(".*"))
    kept = {int(path.name.removeprefix("step_")) for path in tmp_path.iterdir()}
    assert found.state.step < 3 or 3 in kept
    assert len(kept) <= 4
