"""Checkpoints on disk: atomic, found again, thinned out, and never lost to a failed save."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo.checkpoint.store import MANIFEST, CheckpointStore, SavedFile, describe
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.errors import CheckpointError


def state(step: int, evaluation: dict[str, float] | None = None) -> TrainerState:
    return TrainerState(
        step, weight_version=step + 1, data_cursor={"row": 3}, recipe={"seed": 0}, evaluation=evaluation
    )


def save(
    store: CheckpointStore, step: int, evaluation: dict[str, float] | None = None, content: bytes = b"weights"
) -> Path:
    directory = store.begin(step)
    return store.commit(state(step, evaluation), write_rank_files(directory, content)).path


def newest(store: CheckpointStore) -> tuple[int, tuple[str, ...]]:
    """The step of the newest whole checkpoint, and the warnings about those that were passed over."""
    found = store.latest_complete()
    assert found is not None
    return found.state.step, found.warnings


def write_rank_files(directory: Path, content: bytes) -> list[SavedFile]:
    for name in ("__0_0.distcp", ".metadata"):
        (directory / name).write_bytes(content)
    return [describe(directory, path) for path in sorted(directory.iterdir())]


def test_the_newest_complete_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    assert store.latest_complete() is None
    save(store, 5)
    save(store, 10, {"mean@1": 0.5})
    found = store.latest_complete()
    assert found is not None
    assert found.state == state(10, {"mean@1": 0.5})
    assert found.warnings == ()
    assert (found.rank_directory / "__0_0.distcp").read_bytes() == b"weights"
    assert found.path.name == "step_000010"


def test_what_a_killed_run_left_is_ignored_and_removed_by_the_next_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 5)
    write_rank_files(store.begin(10), b"half")
    (tmp_path / "step_000011").mkdir()  # no manifest: not one that we completed
    assert newest(store) == (5, ())
    store.begin(12)
    assert not (tmp_path / ".saving_step_000010").exists()


def test_a_kill_while_a_damaged_checkpoint_is_replaced_loses_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 5).rename(tmp_path / ".replaced_step_000005")
    store.remove_leftovers()
    assert newest(store) == (5, ())


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best="mean@1")
    for step, value in [(1, 0.2), (2, 0.9), (3, 0.4), (4, 0.5), (5, float("nan"))]:
        save(store, step, {"mean@1": value})
    save(store, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000005", "step_000006"]


def test_a_checkpoint_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 5)
    save(store, 5, content=b"new")
    assert (tmp_path / "step_000005/rank/__0_0.distcp").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


@pytest.mark.parametrize("file", ["rank/__0_0.distcp", "rank/.metadata", "trainer.json", MANIFEST])
@pytest.mark.parametrize("how", ["truncate", "flip", "remove"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, file: str, how: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    save(store, 5)
    damaged = save(store, 10) / file
    content = damaged.read_bytes()
    if how == "truncate":
        damaged.write_bytes(content[:-1])
    elif how == "flip":
        damaged.write_bytes(content[:3] + bytes([content[3] ^ 1]) + content[4:])
    else:
        damaged.unlink()
    step, warnings = newest(store)
    assert step == 5
    if not (file == MANIFEST and how == "remove"):  # without its manifest it is a leftover, not a checkpoint
        assert len(warnings) == 1
        assert "step_000010" in warnings[0]
        assert file.removeprefix("rank/") in warnings[0]


def test_if_every_checkpoint_is_damaged_the_error_names_each(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (5, 10):
        (save(store, step) / "rank/.metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"(?s)step_000010.*\.metadata has 0 bytes instead of 7.*step_000005"):
        store.latest_complete()


def test_a_file_that_a_rank_said_it_wrote_but_is_not_there_stops_the_commit(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 5)
    files = write_rank_files(store.begin(10), b"weights")
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp"):
        store.commit(state(10), [*files, SavedFile("__1_0.distcp", 7, "")])
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


FILL_THE_DISK = """
import resource, signal, sys
from pathlib import Path
from tests.unit.test_checkpoint_store import CheckpointError, CheckpointStore, state, write_rank_files
store = CheckpointStore(Path(sys.argv[1]), keep_last=1)
files = write_rank_files(store.begin(10), b"weights")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    store.commit(state(10), files)
except CheckpointError as error:
    sys.exit(f"refused: {error}")
"""


def test_a_full_disk_is_a_checkpoint_error_and_leaves_the_previous_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 5)
    command = [sys.executable, "-c", FILL_THE_DISK, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "refused: checkpoint error" in done.stderr
    assert "File too large" in done.stderr
    assert newest(store) == (5, ())
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written_is_a_checkpoint_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="Permission denied"):
        CheckpointStore(tmp_path, keep_last=1).begin(1)


def test_a_file_in_the_way_of_the_directory_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="checkpoint of step 1"):
        CheckpointStore(tmp_path / "checkpoints", keep_last=1).begin(1)


def test_trainer_state_from_another_version_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="weight_version"):
        TrainerState.from_json('{"step": 3}')


def test_trainer_state_from_before_a_field_was_added_has_its_default_and_a_later_one_is_refused() -> None:
    values = json.loads(state(3).to_json())
    del values["unlogged"]
    assert TrainerState.from_json(json.dumps(values)).unlogged is None
    with pytest.raises(CheckpointError, match="moon_phase"):
        TrainerState.from_json(json.dumps(values | {"moon_phase": 0.5}))
