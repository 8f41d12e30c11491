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

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.checkpoint.store import CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.model_rank import SftRank
from tests.distributed.conftest import Tiny
from tests.distributed.step_case import Case, conversations, make_sft_recipe
from tests.distributed.step_ranks import on_ranks, sft_steps, with_noise, write
from tests.rank_group import RankGroupError


def save_twice_and_die(rank: SftRank, batch: RankBatch, _: None, root: Path, victim: int, moment: float) -> None:
    """Save step 1; save step 2 while a step is trained, in which `victim` is killed after `moment` of the time that the
    first save took."""
    store = CheckpointStore(root, keep_last=1)
    seconds = 0.0
    for step in (1, 2):
        sft_steps(rank, batch, 1)
        if dist.get_rank() == 0:
            store.begin(step)
        dist.barrier()
        if step == 2 and dist.get_rank() == victim:
            threading.Timer(moment * seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        started = time.monotonic()
        rank.take_snapshot()
        directory = root / f".saving_step_{step:06d}" / "rank"
        if step == 2:
            threading.Thread(target=rank.write_snapshot, args=(directory,), daemon=True).start()
            sft_steps(rank, batch, 10_000)
        files = write(rank, directory)
        seconds = time.monotonic() - started
        gathered = [files, ()]
        dist.all_gather_object(gathered, files)
        if dist.get_rank() == 0:
            store.commit(TrainerState(step, step, {}, {}), [file for part in gathered for file in part])
        dist.barrier()


def second_step(rank: SftRank, batch: RankBatch, _: None, saved: Path | None = None) -> list[float]:
    if saved is None:
        return sft_steps(rank, batch, 2)[2:]
    with_noise(rank).load(saved)
    return sft_steps(rank, batch, 1)


@pytest.fixture(scope="module")
def case(tiny: Tiny) -> Case:
    return conversations(tiny("qwen2_tied"))


@pytest.fixture(scope="module")
def expected(case: Case) -> list[float]:
    return on_ranks(second_step, make_sft_recipe(ParallelLayout()), case)[0]


@pytest.mark.parametrize(("victim", "moment"), [(0, 0.2), (1, 0.5), (0, 0.8)])
def test_a_rank_killed_while_saving_leaves_the_previous_checkpoint(
    victim: int, moment: float, case: Case, expected: list[float], tmp_path: Path
) -> None:
    with pytest.raises(RankGroupError):
        on_ranks(save_twice_and_die, make_sft_recipe(ParallelLayout(pipeline=2)), case, tmp_path, victim, moment)
    found = CheckpointStore(tmp_path, keep_last=1).latest_complete()
    assert found is not None
    assert found.state.step == 1
    assert found.warnings == ()
    (resumed,) = on_ranks(second_step, make_sft_recipe(ParallelLayout()), case, found.rank_directory)
    assert resumed == pytest.approx(expected, rel=5e-6)


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
    assert len(kept) <= 5  # one more until the newest is confirmed, and one that is being deleted
