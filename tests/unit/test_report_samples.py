"""Samples of a run in a page, and those left out."""

import gzip
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagrpo.cli import main
from megagrpo.evaluation.responses import write_responses
from megagrpo.report import samples
from megagrpo.report.page import LiveReport
from megagrpo.report.run import RunRead, read_run
from megagrpo.report.samples import AGENT, FAILED, MASKED, NO_STEP, sample_data
from tests.sample_runs import HOSTILE, make_samples, response, sample, write_samples

PARTS = [["exact", 0.0], ["length", 0.25]]


def run_in(directory: Path) -> RunRead:
    (directory / "metrics.jsonl").touch()
    return read_run(directory)


def decoded(encoded: bytes) -> dict[str, Any]:
    """Reads columns as page.js does."""
    raw = gzip.decompress(encoded)
    (length,) = struct.unpack("<I", raw[:4])
    types = {"Uint8Array": "u1", "Uint16Array": "u2", "Uint32Array": "u4", "Int32Array": "i4", "Float32Array": "f4"}
    found = json.loads(raw[4 : 4 + length])
    for name, value in found.items():
        if isinstance(value, dict) and "$array" in value:
            kind, offset, items = value["$array"]
            found[name] = np.frombuffer(raw, types[kind], items, 4 + length + offset)
    return dict(found)


def steps_of(columns: Mapping[str, Any]) -> dict[str, list[int]]:
    """Sorted steps of the samples in a page, by set."""
    names = columns["names"]["set"]
    return {name: sorted(columns["step"][columns["set"] == code].tolist()) for code, name in enumerate(names)}


@pytest.mark.parametrize(("limit", "train"), [(100, [*range(1, 11)] * 2), (9, [8, 9, 9, 10, 10]), (1, [10])])
def test_the_newest_samples_are_kept_those_of_the_last_step_and_evaluation_first(
    tmp_path: Path, limit: int, train: list[int]
) -> None:
    for step in range(1, 11):
        write_samples(tmp_path, step, [sample(step, number=number) for number in range(2)])
    for step in (3, 5):
        write_samples(tmp_path, step, [sample(step, set="held_out")] * 4, evaluation=True)
    columns, _ = sample_data([run_in(tmp_path)], limit)
    steps = steps_of(columns)
    assert steps["train"] == sorted(train)
    assert steps.get("held_out", []) == {100: [3] * 4 + [5] * 4, 9: [5] * 4, 1: []}[limit]
    assert any("--samples" in note for note in columns["notes"]) == (limit < 28)


def test_each_sets_last_evaluation_comes_before_earlier_steps(tmp_path: Path) -> None:
    for step, name in ((1, "rare"), (2, "often"), (3, "often")):
        write_samples(tmp_path, step, [sample(step)])
        write_samples(tmp_path, step, [sample(step, set=name)], evaluation=True)
    columns, _ = sample_data([run_in(tmp_path)], 3)
    assert steps_of(columns) == {"train": [3], "often": [3], "rare": [1]}


def test_long_texts_are_left_out_beyond_the_pages_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        write_samples(tmp_path, step, [sample(step, response="x" * 400)] * 2)
    monkeypatch.setattr(samples, "PAGE_BYTES", 1300)
    columns, _ = sample_data([run_in(tmp_path)])
    assert steps_of(columns) == {"train": [2, 3, 3]}
    assert any("--samples" in note for note in columns["notes"])


def test_figures_of_tokens_are_those_of_the_newest_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write_samples(tmp_path, step, [sample(step, number=number) for number in range(3)])
    monkeypatch.setattr(samples, "TOKENS", 24)
    columns, _ = sample_data([run_in(tmp_path)])
    assert columns["figures"].tolist() == [6, 0, 0, 6, 6, 6]
    assert any("4 of its samples have figures" in note for note in columns["notes"])


def test_a_page_carries_every_kind_of_sample(tmp_path: Path) -> None:
    columns, late = sample_data([make_samples(tmp_path / "run")])
    assert columns["rows"] == 20
    by_set = steps_of(columns)
    assert by_set["held_out"] == [2, 3]
    assert by_set["held_out · teacher"] == [NO_STEP]
    assert sorted(set(by_set["train"])) == [1, 2, 3, 4]
    assert [int((columns["flags"] & flag > 0).sum()) for flag in (MASKED, FAILED, AGENT)] == [1, 2, 1]
    texts = [decoded(late[f"texts_{name}"]) for name in columns["files"]]
    responses = [response for file in texts for response in file["response"]]
    assert HOSTILE in responses
    assert "half ? a character" in responses
    assert [file["detail"][0]["parts"] for file in texts if len(file["response"]) == 4] == [PARTS] * 3
    prompts = {prompt for file in texts for prompt, *_ in file["prompts"]}
    assert len(prompts) == len(columns["prompt_ids"]) == 9


@pytest.mark.parametrize("place", [".", "eval", "eval/teacher"])
def test_what_eval_has_written_has_a_page_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    write_responses(tmp_path / "eval" / "teacher" / "responses.jsonl", [response(index=index) for index in (0, 1)])
    directory = tmp_path / place
    columns, _ = sample_data([read_run(directory)])
    assert columns["rows"] == 2
    assert columns["names"]["set"] == ["held_out · teacher"]
    live = LiveReport([directory])
    before = live.changes()
    assert main(["report", str(directory)]) == 0
    assert "teacher" in capsys.readouterr().out
    write_responses(tmp_path / "eval" / "student" / "responses.jsonl", [response()])
    assert (live.changes() == before) == (place == "eval/teacher")


def test_the_figures_of_a_token_come_back(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [sample(1, number=number, teacher_logprobs=[0.0] * 6) for number in (0, 1)])
    write_samples(tmp_path, 2, [sample(2, token_texts=None), sample(2, "sums:1", token_ids=None, train_logprobs=None)])
    columns, late = sample_data([run_in(tmp_path)])
    first, second = (decoded(late[f"tokens_{name}"]) for name in columns["files"])
    assert columns["figures"].tolist() == [6, 6, 6, 6]
    assert [first["texts"][code] for code in first["code"][:6]] == ["I", " think", " it", " is", " 1", "<|im_end|>"]
    assert [second["ids"][code] for code in second["code"]] == [*range(6), *[-1] * 6]
    differences = [file["difference"].view(np.float16) for file in (first, second)]
    assert differences[0][:6] == pytest.approx([-0.02, -0.01, 0, 0.01, 0.02, 0.03], abs=1e-4)
    assert np.isnan(differences[1][6:]).all()
    teachers = [file["teacher"].view(np.float16) for file in (first, second)]
    assert teachers[0][:6] == pytest.approx([0.5] * 6, abs=1e-3)
    assert np.isnan(teachers[1]).all()
    assert columns["mismatch"][:2] == pytest.approx([0.015, 0.015], abs=1e-6)


def test_a_file_that_is_no_parquet_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [sample(1)])
    (tmp_path / "rollouts" / "step_000002.parquet").write_bytes(b"PAR1 no")
    columns, _ = sample_data([run_in(tmp_path)])
    assert columns["rows"] == 1
    assert any("step_000002.parquet" in note for note in columns["notes"])


def test_a_run_without_samples_says_so_and_fine_tuning_has_no_section(tmp_path: Path) -> None:
    (part,) = samples.sample_parts([run_in(tmp_path)])
    assert not part.scripts
    assert "track.rollouts" in part.html
    (tmp_path / "recipe.yaml").write_text("kind: sft\n", encoding="utf-8")
    assert samples.sample_parts([run_in(tmp_path)]) == []


def test_a_page_that_is_served_reads_its_samples_until_the_second_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "SAMPLES", 4)
    write_samples(tmp_path, 1, [sample(1, number=number, response=f"first {number}") for number in range(4)])
    live = LiveReport([run_in(tmp_path).directory])

    def held() -> dict[str, bytes]:
        columns = decoded(live.columns("samples") or b"")
        assert columns["rows"] == 4
        names = [f"{kind}_{name}" for kind in ("texts", "tokens") for name in columns["files"]]
        return {name: live.columns(name) or b"" for name in names}

    before = held()
    write_samples(tmp_path, 2, [sample(2, number=number, response=f"second {number}") for number in range(4)])
    after = held()
    assert not before.keys() & after.keys()
    assert {name: live.columns(name) for name in before} == before
    write_samples(tmp_path, 2, [sample(2, number=number, response=f"again {number}") for number in range(4)])
    assert not after.keys() & held().keys()
    assert live.columns(next(iter(before))) is None
