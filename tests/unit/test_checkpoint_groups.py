"""Groups come back from their file exactly as they were, or the file is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from megagrpo.agents.turns import reported
from megagrpo.checkpoint import groups as groups_file
from megagrpo.checkpoint.groups import PENDING, Pending, pending_of, read_groups, write_groups, write_pending
from megagrpo.checkpoint.store import Checkpoint
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.errors import CheckpointError, UnusableCheckpointError
from megagrpo.routes import Routes
from megagrpo.types import AgentRun, Branch, Group, KeptSets, Prompt, Sample, Score, TeacherTokens, Turn
from tests.agent_runs import calculator_run
from tests.small_disk import small_disk
from tests.unit.test_fuzz import damaged, mutated

NAMES = [name for name in groups_file.DTYPES if name != "json"]
fuzz = settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)

OF_PARQUET = {
    "bytes": b"\x00\xff",
    "decimal": Decimal("1.20"),
    "date": date(2024, 2, 29),
    "time": time(1, 2, 3, 4),
    "naive": datetime(2024, 1, 1, 1, 2, 3, 4),
    "zoned": datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
    "offset": datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=2))),
    "utc": datetime(2024, 1, 1, tzinfo=UTC),
    "duration": timedelta(-1, 2, 3),
    "map": [("a", 1), ("b", None)],
}
OF_JSON = {
    "index": 2**70,
    "nested": [{"a": [1.5, -math.inf, True, None]}, [], {}],
    "half of a pair": "\ud800",
    "escaped": "\x00\u2028é",
}


MESSAGES = ({"role": "system", "content": "é"}, {"role": "user", "content": "what?", "at": datetime(2024, 1, 1)})
NOTES = {"math.answer": "é", "math.rule": ""}


def routes(tokens: int, experts: int = 8) -> Routes:
    return Routes.of((np.arange(6 * max(tokens - 1, 0)).reshape(-1, 3, 2) * 7) % experts)


KEPT = KeptSets(np.array([3, 5, 2, 4, 2**20], np.int32), np.array([2, 2, 5], np.int64))


def teacher(tokens: int, k: int) -> TeacherTokens:
    logprobs, ids = -np.arange(tokens) / np.float32(7), np.arange(tokens * k, dtype=np.int32).reshape(tokens, k)
    return TeacherTokens(logprobs.astype(np.float32), ids, (-ids / 3).astype(np.float32))


def sample(prompt: str, index: int, tokens: int, finish: Any = "stop") -> Sample:
    numbers = np.arange(tokens)
    return Sample(
        prompt,
        index,
        (numbers + 100 * index).astype(np.int32),
        np.where(numbers % 3 == 2, -np.inf, -numbers / 7).astype(np.float32),
        (numbers // 4).astype(np.int32),
        finish,
        f"text \x00 of {index} é",
    )


RUN = AgentRun(
    branches=(
        Branch(np.arange(7, dtype=np.int32), np.array([0, 0, 1, 1, 0, 0, 1], bool), routes(7)),
        Branch(np.arange(9, 13, dtype=np.int32), np.array([0, 0, 1, 1], bool)),
        Branch(np.empty(0, np.int32), np.empty(0, bool)),
    ),
    turns=(Turn(0, 0, 2, reward=-0.5), Turn(2, 0, 1), Turn(1, 1, 2, reward=math.inf)),
    messages=({"role": "user", "content": "é", "tool_calls": [{"function": {"arguments": "{}"}}]},),
    reward={"score": 0.1 + 0.2, "é": -0.0},
    counts={"turns": 3.0},
    events=({"kind": "tool", "seconds": 0.25, "error": None}, {"kind": "\ud800", "list": [[{}]]}),
)
GROUPS = [
    Group(
        Prompt("train:1", (5, 6, 7), "gsm8k", "42", "math", OF_PARQUET | OF_JSON, MESSAGES, "<what?>"),
        (
            replace(sample("train:1", 0, 9), routes=routes(3 + 9), teacher=teacher(9, 2)),
            replace(sample("train:1", 1, 3, "length"), kept=KEPT),
            sample("train:1", 2, 0, "abort"),
        ),
        (
            Score(0.1 + 0.2, {"math": 1.0, "é": -0.0}, counted=(1.0, -3.5), solved=True, notes=NOTES, answer="é"),
            Score(None, error="ValueError: \ud800", masked=""),
            Score(-math.inf, masked="cut off", counted=()),
        ),
        sample("train:1", 3, 5),
        Score(0.5),
    ),
    Group(Prompt("train:2", (), "gsm8k", ""), ()),
    Group(
        Prompt("train:3", (1,), "gsm8k", "x", taught=(8, 1)),
        (
            replace(sample("train:3", 3, 4, "abort"), routes=routes(1 + 4, 300)),
            replace(
                sample("train:3", 4, 3),
                kept=KeptSets(np.empty(0, np.int32), np.zeros(3, np.int64)),
                teacher=teacher(3, 0),
            ),
            replace(sample("train:3", 5, 0), routes=routes(1)),
        ),
    ),
    Group(
        Prompt("train:4", (1, 2), "search", "x"),
        (
            replace(sample("train:4", 0, 5), agent=RUN),
            replace(sample("train:4", 1, 0, "abort"), agent=AgentRun((), (), (), error="RuntimeError: \ud800")),
            replace(sample("train:4", 2, 8), agent=calculator_run(counts={})),
        ),
    ),
]


def branches_of(sample: Sample) -> tuple[Branch, ...]:
    return sample.agent.branches if sample.agent else ()


def shown(routes: Routes | None) -> Any:
    return routes and (routes.experts.dtype, routes.experts.tolist(), routes.digest)


def comparable(groups: list[Group]) -> list[Any]:
    return [
        (
            repr(group.prompt),
            (group.scores, group.baseline_score, group.baseline is None),
            [
                *((s.prompt_id, s.index, s.finish, s.text) for s in of),
                *((a.dtype, a.tobytes()) for s in of for a in (s.tokens, s.logprobs, s.versions)),
                *(repr(replace(s.agent, branches=())) for s in of if s.agent),
                *((a.dtype, a.tobytes()) for s in of for b in branches_of(s) for a in (b.tokens, b.trained)),
                *(shown(owner.routes) for s in of for owner in (s, *branches_of(s))),
                *(s.teacher and [(a.dtype, a.tolist()) for a in (s.teacher.logprobs, s.teacher.ids)] for s in of),
                *(s.teacher and s.teacher.ids_logprobs.tolist() for s in of),
                *(s.kept and [(a.dtype, a.tolist()) for a in (s.kept.ids, s.kept.ends)] for s in of),
            ],
        )
        for group in groups
        for of in [group.responses]
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("groups") / "written.safetensors"
    write_groups(path, GROUPS, {"numbers": [3, 4, 5]})
    return path


def test_what_goes_on_after_a_checkpoint_comes_back_apart_from_finished_samples(tmp_path: Path) -> None:
    goes_on = [[], [sample("train:2", 1, 6, "abort")], [sample("train:3", 0, 2, "abort")], []]
    for unfinished in (goes_on, []):
        pending = Pending(GROUPS, [7, 8], [1, 2], 9, {"epoch": 1}, unfinished=lambda of=unfinished: of)  # type: ignore[misc]
        write_pending(tmp_path / "rank" / PENDING, pending)
        found = pending_of(Checkpoint(tmp_path, TrainerState(1, 1, {}, {}, 1)))
        assert found is not None
        assert comparable(list(found.groups)) == comparable(GROUPS)
        for ours, theirs in zip(found.unfinished(), goes_on, strict=True):
            prompt = GROUPS[0].prompt
            assert comparable([Group(prompt, tuple(ours))]) == comparable(
                [Group(prompt, tuple(theirs) if unfinished else ())]
            )
    write_groups(tmp_path / "rank" / PENDING, GROUPS, {"numbers": [], "versions": [], "next_number": 1, "cursor": {}})
    assert pending_of(Checkpoint(tmp_path, TrainerState(1, 1, {}, {}, 1))), "of a version that kept none"


@pytest.mark.parametrize("groups", [GROUPS, [], GROUPS[1:2]], ids=["all", "none", "without samples"])
def test_groups_come_back_exactly_as_they_were(tmp_path: Path, groups: list[Group]) -> None:
    path = tmp_path / "new" / "groups.safetensors"
    write_groups(path, groups, {"numbers": [3]})
    found, notes = read_groups(path, dict)
    assert comparable(found) == comparable(groups)
    assert notes == {"numbers": [3]}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_value_that_would_come_back_as_another_is_refused_by_name(tmp_path: Path) -> None:
    group = Group(Prompt("a", (1,), "", "", "", {"list": [0, {"x": np.float64(1)}]}), ())
    with pytest.raises(CheckpointError, match="needed") as refused:
        write_groups(tmp_path / "x", [group])
    assert refused.value.problems[0].where == "extra_info of prompt a.list[1].x"
    assert not list(tmp_path.iterdir())


def test_values_that_are_too_deep_are_refused(tmp_path: Path) -> None:
    deep: Any = 0
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="deep"):
        write_groups(tmp_path / "x", [Group(Prompt("a", (1,), "", "", "", {"x": deep}), ())])


def test_a_full_disk_leaves_the_file_before_as_it_was(tmp_path: Path, written: Path) -> None:
    path = tmp_path / "groups"
    path.write_bytes(written.read_bytes())
    with small_disk(1000), pytest.raises(CheckpointError, match="cannot be written"):
        write_groups(path, GROUPS)
    assert path.read_bytes() == written.read_bytes()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_directory_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_groups(tmp_path / "renamed" / "batches" / "x", GROUPS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["absent", "", "/dev/zero", "empty"])
def test_what_is_no_file_of_groups_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(UnusableCheckpointError, match="needed"):
        read_groups(tmp_path / name, dict)


def test_a_file_of_another_version_is_refused_by_its_format(written: Path) -> None:
    path = written.with_name("older.safetensors")
    arrays = {name: array for name, array in load_file(written).items() if not name.startswith("branch")}
    save_file(arrays, path, metadata={"format": "megagrpo groups 3"})
    with pytest.raises(UnusableCheckpointError, match="megagrpo groups 3"):
        read_groups(path, dict)


def without(number: int, sample: Sample) -> Sample:
    """Returns what files of format `number` keep of a sample."""
    sample = replace(sample, teacher=None)
    if number > 3:
        return sample
    agent = sample.agent
    if agent is not None:
        agent = replace(agent, branches=tuple(replace(branch, routes=None) for branch in agent.branches))
    return replace(sample, agent=agent, routes=None, kept=None)


@pytest.mark.parametrize("number", [3, 4])
def test_a_file_of_an_earlier_format_is_read_without_what_it_lacks(number: int, written: Path) -> None:
    path, name = written.with_name("before.safetensors"), f"megagrpo groups {number}"
    lacking = groups_file.EARLIER[name]
    arrays = {name: array for name, array in load_file(written).items() if name not in lacking}
    content = json.loads(bytes(arrays["json"]))
    for saved in content["groups"]:
        del saved["taught"]
    arrays["json"] = np.frombuffer(json.dumps(content).encode(), np.uint8)
    save_file(arrays, path, {"format": name, "blake2b": groups_file._checksum(arrays)})
    found, notes = read_groups(path, dict)
    bare = [
        replace(
            group,
            prompt=replace(group.prompt, taught=()),
            samples=tuple(without(number, sample) for sample in group.samples),
            baseline=group.baseline and without(number, group.baseline),
        )
        for group in GROUPS
    ]
    assert comparable(found) == comparable(bare)
    assert notes == {"numbers": [3, 4, 5]}


@pytest.mark.parametrize(
    ("name", "at", "value", "said"),
    [
        ("routes", 5, 9, "another digest"),
        ("routes_digests", 0, 1, "another digest"),
        ("routes_shapes", 3, 3, "routes that are not of their shapes"),
        ("kept_ends", 11, 6, "kept sets"),
        ("kept_ends", 0, 0, "kept sets"),
        ("kept_ids", 0, -1, "kept sets"),
        ("teacher_widths", 0, 3, "teachers' logprobs"),
        ("teacher_widths", 0, -1, "teachers' logprobs"),
        ("teacher_widths", 1, -2, "teachers' logprobs"),
        ("teacher_ids", 0, -1, "below 0"),
    ],
)
def test_routes_kept_sets_and_teachers_that_do_not_belong_to_their_tokens_are_refused(
    written: Path, name: str, at: int, value: int, said: str
) -> None:
    arrays = load_file(written)
    arrays[name][at] = value
    path = written.with_name("other.safetensors")
    save_file(arrays, path, {"format": groups_file.FORMAT, "blake2b": groups_file._checksum(arrays)})
    with pytest.raises(UnusableCheckpointError, match=said):
        read_groups(path, dict)


@pytest.mark.parametrize("rows", [10, 12])
def test_routes_of_another_number_of_tokens_are_refused(tmp_path: Path, rows: int) -> None:
    shifted = replace(sample("train:1", 0, 9), routes=routes(rows + 1))
    write_groups(tmp_path / "groups", [Group(Prompt("train:1", (5, 6, 7), "", ""), (shifted,))])
    with pytest.raises(UnusableCheckpointError, match=f"routes of {rows} tokens, for a sequence of 12"):
        read_groups(tmp_path / "groups", dict)


@fuzz
@given(data=st.data())
def test_damaged_bytes_are_refused(written: Path, data: st.DataObject) -> None:
    path = written.with_name("damaged.safetensors")
    path.write_bytes(data.draw(damaged(written.read_bytes())))
    reads_the_same_or_refuses(path)


def reads_the_same_or_refuses(path: Path) -> None:
    try:
        found, _ = read_groups(path, dict)
    except UnusableCheckpointError as error:
        assert error.problems[0].given  # noqa: PT017
        assert error.problems[0].needed  # noqa: PT017
        return
    assert comparable(found) == comparable(GROUPS)


@fuzz
@given(data=st.data())
def test_foreign_json_behind_a_right_checksum_is_refused_without_a_traceback(
    written: Path, data: st.DataObject
) -> None:
    arrays = load_file(written)
    content = json.dumps(data.draw(mutated(json.loads(bytes(arrays["json"])))))
    read_changed(written, arrays | {"json": np.frombuffer(content.encode(), np.uint8)})


@fuzz
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_foreign_arrays_behind_a_right_checksum_are_refused_without_a_traceback(
    written: Path, data: st.DataObject, name: str
) -> None:
    arrays = load_file(written)
    numbers = arrays[name].tolist()
    at = data.draw(st.integers(0, len(numbers) - 1))
    numbers[at : at + data.draw(st.integers(0, 2))] = data.draw(st.lists(st.integers(-3, 2**30), max_size=2))
    dtype = data.draw(st.sampled_from([arrays[name].dtype] * 5 + [np.dtype(np.float16), np.dtype(np.float64)]))
    with np.errstate(all="ignore"):
        changed = np.array(numbers).astype(dtype)
    read_changed(written, arrays | {name: changed})


@pytest.mark.parametrize(
    "place", ["0 scores", "0 messages", "0 scores 2 masked", "3 samples 0 agent", "3 samples 0 agent events"]
)
def test_a_field_that_is_not_there_is_an_error_that_names_it_and_no_default(written: Path, place: str) -> None:
    arrays = load_file(written)
    content = json.loads(bytes(arrays["json"]))
    *path, field = (int(part) if part.isdigit() else part for part in place.split())
    del reduce(getitem, path, content["groups"])[field]
    lacking = arrays | {"json": np.frombuffer(json.dumps(content).encode(), np.uint8)}
    save_file(
        lacking, written.with_name("lacking"), {"format": groups_file.FORMAT, "blake2b": groups_file._checksum(lacking)}
    )
    with pytest.raises(UnusableCheckpointError, match=f"lacking\n.*required field `{field}`"):
        read_groups(written.with_name("lacking"), dict)


def read_changed(written: Path, arrays: dict[str, np.ndarray]) -> None:
    path = written.with_name("changed.safetensors")
    save_file(arrays, path, metadata={"format": groups_file.FORMAT, "blake2b": groups_file._checksum(arrays)})
    try:
        found, _ = read_groups(path, dict)
    except UnusableCheckpointError:
        return
    for group in found:
        assert len(group.scores) in (0, len(group.samples))
        assert all(len(s.tokens) == len(s.logprobs) == len(s.versions) for s in group.samples)
        prompt = len(group.prompt.tokens)
        assert all(s.routes.tokens == max(prompt + len(s.tokens) - 1, 0) for s in group.samples if s.routes)
        assert all(len(s.kept.ends) == len(s.tokens) for s in group.samples if s.kept)
        assert all(len(s.teacher.logprobs) == len(s.teacher.ids) == len(s.tokens) for s in group.samples if s.teacher)
        for agent, tokens in ((s.agent, len(s.tokens)) for s in group.samples if s.agent):
            assert sum(turn.tokens for turn in agent.turns) == tokens
            assert sum(int(branch.trained.sum()) for branch in agent.branches) == tokens


def test_an_event_that_is_deep_is_told_as_far_as_a_checkpoint_holds_it(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    event = reported({"kind": "state", "value": {"a": 1, "deep": deep}}, 0.5)
    run = replace(RUN, events=(*RUN.events, event))
    group = Group(Prompt("train:4", (1, 2), "search", "x"), (replace(sample("train:4", 0, 5), agent=run),))
    write_groups(tmp_path / "groups", [group])
    ((found,), _) = read_groups(tmp_path / "groups", dict)
    assert found.samples[0].agent is not None
    assert found.samples[0].agent.events[-1] == event
    assert (event["kind"], event["at"], event["value"]["a"]) == ("state", 0.5, 1)
