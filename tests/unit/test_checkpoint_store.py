"""Checkpoints on disk are atomic, found again and never lost to a failed save; and which recipes continue from one."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from megagrpo.checkpoint.store import MANIFEST, CheckpointStore, SavedFile, describe
from megagrpo.checkpoint.trainer_state import FIXED, TrainerState, allow_changes
from megagrpo.errors import EXIT_USER_ERROR, CheckpointError, RecipeError
from tests.small_disk import small_disk
from tests.tiny_run import recipe_with


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
    store.confirm()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000005", "step_000006"]


def test_the_newest_whose_weights_were_of_use_is_kept_however_many_follow_in_however_many_starts(
    tmp_path: Path,
) -> None:
    def names() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    save(store, 2)
    assert names() == ["step_000001", "step_000002"], "the first is the likeliest to be whole"
    store.confirm()
    assert names() == ["step_000002"]
    for step in (3, 4, 5):  # none of them makes finite numbers
        store = CheckpointStore(tmp_path, keep_last=1)
        save(store, step)
    assert names() == ["step_000002", "step_000005"]
    assert store.since_confirmed() == (tmp_path / "step_000002", [tmp_path / "step_000005"])
    assert newest(store) == (5, ())
    CheckpointStore(tmp_path, keep_last=1).confirm()
    assert names() == ["step_000005"], "a run that continues, after its first step"
    assert store.since_confirmed() == (tmp_path / "step_000005", [])


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


@pytest.mark.parametrize("file", ["a\0b", "/dev/zero", "../pipe", MANIFEST])
def test_a_checkpoint_with_files_that_cannot_be_read_is_passed_over(tmp_path: Path, file: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    save(store, 5)
    manifest = save(store, 10) / MANIFEST
    os.mkfifo(tmp_path / "pipe")
    if file == MANIFEST:
        manifest.unlink()
        manifest.symlink_to(tmp_path / "pipe")
    else:
        content = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(content | {"files": [{"path": file, "size_bytes": 0, "blake2b": ""}]}))
    step, (warning,) = newest(store)
    assert (step, "step_000010" in warning) == (5, True)


def test_if_every_checkpoint_is_damaged_the_error_names_each(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (5, 10):
        (save(store, step) / "rank/.metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"(?s)step_000010.*\.metadata has 0 bytes.*7.*step_000005") as said:
        store.latest_complete()
    assert said.value.exit_code == EXIT_USER_ERROR


def test_a_file_that_a_rank_said_it_wrote_but_is_not_there_stops_the_commit(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 5)
    files = write_rank_files(store.begin(10), b"weights")
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp"):
        store.commit(state(10), [*files, SavedFile("__1_0.distcp", 7, "")])
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


def test_a_full_disk_is_a_checkpoint_error_and_leaves_the_previous_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 5)
    files = write_rank_files(store.begin(10), b"weights")
    with small_disk(100), pytest.raises(CheckpointError, match="File too large"):
        store.commit(state(10), files)
    assert newest(store) == (5, ())
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


def test_a_file_in_the_way_of_the_directory_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="checkpoint of step 1"):
        CheckpointStore(tmp_path / "checkpoints", keep_last=1).begin(1)


# --- the trainer's state, and the recipe that continues from it -------------------------------------------------------


def test_trainer_state_without_a_field_that_was_added_has_its_default_and_an_unknown_or_lost_field_is_refused() -> None:
    values = json.loads(state(3).to_json())
    del values["unlogged"]
    assert TrainerState.from_json(json.dumps(values)).unlogged is None
    for wrong, named in ((values | {"moon_phase": 0.5}, "moon_phase"), ({"step": 3}, "weight_version")):
        with pytest.raises(CheckpointError, match=named):
            TrainerState.from_json(json.dumps(wrong))


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", -1), ("step", 2**80), ("weight_version", -1), ("episodes", 2**80), ("evaluations_without_best", -1)]
    + [("kl_coefficient", value) for value in (math.nan, math.inf, -0.5)],
)
def test_a_number_of_the_trainers_state_that_cannot_be_is_refused(field: str, value: float) -> None:
    values = json.loads(state(3).to_json()) | {field: value}
    with pytest.raises(CheckpointError, match=f"trainer.json: {field}"):
        TrainerState.from_json(json.dumps(values))


def recipe() -> dict[str, Any]:
    return recipe_with("data.train=[{path: a.parquet}, {path: b.parquet, amount: 100}]").model_dump(mode="json")


def test_layout_learning_rate_and_run_length_may_change() -> None:
    new = recipe()
    new["train"]["layout"]["tensor"] = 2
    new["train"]["optimizer"]["lr"] = 1e-5
    new["train"]["total_steps"] = 20
    new["model"]["dtype"] = "float32"
    del new["cluster"]["device"]
    allow_changes(recipe(), new)


def test_a_checkpoint_with_the_settings_of_all_advantages_may_be_continued() -> None:
    saved = recipe()
    saved["algorithm"]["advantage"] |= {"discount": 1.0, "trace": 1.0}
    allow_changes(saved, recipe())
    saved["algorithm"]["advantage"] |= {"arguments": {"scale": 2}}  # of a function of the user's own
    with pytest.raises(RecipeError):
        allow_changes(saved, recipe())


def test_model_seed_and_data_may_not_change_and_all_are_named_at_once() -> None:
    new = recipe()
    new["seed"] = 1
    new["model"]["path"] = "other"
    new["data"]["train"][1]["amount"] = 200
    new["data"]["train"][0]["path"] = "c.parquet"
    with pytest.raises(RecipeError) as refused:
        allow_changes(recipe(), new)
    found = [problem.where for problem in refused.value.problems]
    assert found == ["seed", "model.path", "data.train[0].path", "data.train[1].amount"]
    assert "100, as in the run so far" in refused.value.problems[3].needed
    assert refused.value.problems[3].given == "200"


def test_a_file_added_to_the_data_and_a_key_that_was_not_given_are_refused() -> None:
    new, saved = recipe(), recipe()
    new["data"]["train"].append({"path": "c.parquet", "amount": "all"})
    with pytest.raises(RecipeError, match=r"data\.train"):
        allow_changes(recipe(), new)
    del saved["seed"]
    with pytest.raises(RecipeError, match="not given, as in the run so far"):
        allow_changes(saved, recipe())


def test_a_run_of_a_version_with_one_optimizer_continues_with_adam_alone() -> None:
    saved, new = recipe(), recipe()
    del saved["train"]["optimizer"]["kind"]
    allow_changes(saved, new)
    new["train"]["optimizer"]["kind"] = "muon"
    with pytest.raises(RecipeError, match=r"train\.optimizer\.kind"):
        allow_changes(saved, new)


@pytest.mark.parametrize("key", FIXED)
def test_every_fixed_key_is_a_key_of_the_recipe_and_may_not_change(key: str) -> None:
    value: Any = recipe()
    saved: dict[str, Any] = {"x": 1}
    new: dict[str, Any] = {"x": 2}
    for part in key.split("."):
        value = value[part]
    for part in reversed(key.split(".")):
        saved, new = {part: saved}, {part: new}
    with pytest.raises(RecipeError):
        allow_changes(saved, new)


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"[" * 9999, b"3"])
def test_a_trainer_state_that_is_not_readable_is_named(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"runs/a/trainer.json"):
        TrainerState.from_json(content, "runs/a/trainer.json")
