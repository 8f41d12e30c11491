"""What a page carries of a run's samples, and what it leaves out."""

import gzip
import json
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.cli import main
from megagrpo.evaluation.responses import write_responses
from megagrpo.report import samples, serve
from megagrpo.report.run import RunRead, read_run
from megagrpo.report.sample_chunks import Texts
from megagrpo.report.sample_rows import AGENT, FAILED, MASKED, NO_STEP, Rows
from megagrpo.report.samples import kept_rows, sample_data, token_rows
from tests.sample_runs import HOSTILE, make_samples, response, sample, write_samples


def run_in(directory: Path) -> RunRead:
    (directory / "metrics.jsonl").touch()
    return read_run(directory)


def rows_of(steps: list[int], prompts: list[int], **numbers: list[float]) -> Rows:
    count = len(steps)
    plain: dict[str, Any] = {
        "bytes": [100] * count,
        "figures": [10] * count,
        "score": [0.0] * count,
        "run": [0] * count,
    }
    columns = {"step": steps, "mismatch": [np.nan] * count, **plain, **numbers}
    codes = {"prompt_id": np.array(prompts), "set": np.zeros(count, np.int64)}
    names = {"prompt_id": [f"p{number}" for number in range(max(prompts) + 1)], "set": ["train"]}
    return Rows(np.zeros(count, np.int64), {name: np.array(values) for name, values in columns.items()}, codes, names)


def decoded(encoded: bytes) -> dict[str, Any]:
    """As page.js reads columns."""
    raw = gzip.decompress(encoded)
    (length,) = struct.unpack("<I", raw[:4])
    types = {"Uint8Array": "u1", "Uint16Array": "u2", "Uint32Array": "u4", "Int32Array": "i4", "Float32Array": "f4"}
    found = json.loads(raw[4 : 4 + length])
    for name, value in found.items():
        if isinstance(value, dict) and "$array" in value:
            kind, offset, items = value["$array"]
            found[name] = np.frombuffer(raw, types[kind], items, 4 + length + offset)
    return dict(found)


def texts_of(columns: Mapping[str, Any], name: str) -> list[str]:
    whole = bytes(columns[name]).decode().encode("utf-16-le")
    ends = [0, *columns[f"{name}_ends"].tolist()]
    return [whole[2 * begin : 2 * end].decode("utf-16-le") for begin, end in pairwise(ends)]


@given(st.lists(st.text()))
def test_texts_are_cut_where_javascript_counts(texts: list[str]) -> None:
    made = Texts()
    for text in texts:
        made.add(text)
    assert texts_of(made.columns("text"), "text") == [text.encode(errors="replace").decode() for text in texts]


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=30))
def test_a_number_of_samples_is_not_exceeded_and_the_last_step_comes_first(
    limit: int, of: list[tuple[int, int]]
) -> None:
    rows = rows_of([step for step, _ in of], [prompt for _, prompt in of])
    kept = kept_rows(rows, limit, 0.0, 1.0)
    last = rows.numbers["step"] == rows.numbers["step"].max()
    assert kept.sum() == min(limit, len(rows))
    assert kept[last].all() or not kept[~last].any()


def test_the_same_prompts_are_kept_at_every_step() -> None:
    steps, prompts = np.repeat(np.arange(10), 50), np.tile(np.arange(50), 10)
    kept = kept_rows(rows_of(steps.tolist(), prompts.tolist()), None, 200 * 250.0, 1.0)
    of_step = [set(prompts[kept & (steps == step)].tolist()) for step in range(9)]
    assert len(set.intersection(*of_step)) > 5
    assert len(set.union(*of_step) - set.intersection(*of_step)) <= 1  # the last one may be there at some steps only
    assert kept[steps == 9].all()


def test_tokens_are_of_the_newest_the_extreme_and_some_of_all_steps() -> None:
    count = 1000
    mismatch, score = np.full(count, 0.01), np.full(count, 0.5)
    mismatch[123], score[456], score[789] = 9.0, 1.0, -1.0
    rows = rows_of(list(range(count)), [0] * count, mismatch=mismatch.tolist(), score=score.tolist())
    chosen = token_rows(rows, 500)
    assert len(chosen) <= 50
    assert {123, 456, 789, count - 1} <= set(chosen.tolist())
    assert len(set((chosen // 200).tolist())) == 5
    assert (np.diff(chosen) > 0).all()


def test_a_page_carries_every_kind_of_sample(tmp_path: Path) -> None:
    columns, chunks = sample_data([make_samples(tmp_path / "run")])
    assert columns["rows"] == 20
    names = columns["names"]["set"]
    by_set = {names[code]: columns["step"][columns["set"] == code].tolist() for code in range(len(names))}
    assert by_set["held_out"] == [3, 2]
    assert by_set["held_out · teacher"] == [NO_STEP]
    assert sorted(set(by_set["train"])) == [1, 2, 3, 4]
    assert [int((columns["flags"] & flag > 0).sum()) for flag in (MASKED, FAILED, AGENT)] == [1, 2, 1]
    texts = decoded(chunks[f"{columns['chunks']}_texts_0"])
    responses = texts_of(texts, "response")
    assert HOSTILE in responses
    assert "half ? a character" in responses
    details = [json.loads(detail) for detail in texts_of(texts, "detail")]
    assert details[0]["parts"] == [["exact", 0.0], ["length", 0.25]]
    prompts = decoded(chunks[f"{columns['chunks']}_prompts_0"])
    asked = texts_of(prompts, "prompt")
    assert len(asked) == len(set(asked)) == len(columns["prompt_ids"]) == 9


@pytest.mark.parametrize("place", [".", "eval", "eval/teacher"])
def test_what_eval_has_written_has_a_page_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    write_responses(tmp_path / "eval" / "teacher" / "responses.jsonl", [response(index=index) for index in (0, 1)])
    directory = tmp_path / place
    columns, _ = sample_data([read_run(directory)])
    assert columns["rows"] == 2
    assert columns["names"]["set"] == ["held_out · teacher"]
    live = serve.LiveReport([directory])
    before = live.changes()
    assert main(["report", str(directory)]) == 0
    assert "teacher" in capsys.readouterr().out
    write_responses(tmp_path / "eval" / "student" / "responses.jsonl", [response()])
    assert (live.changes() == before) == (place == "eval/teacher")


def test_the_figures_of_a_token_come_back(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [sample(1, number=number) for number in (0, 1)])
    write_samples(tmp_path, 2, [sample(2, token_texts=None), sample(2, "sums:1", token_ids=None, train_logprobs=None)])
    columns, chunks = sample_data([run_in(tmp_path)])
    tokens, words = (decoded(chunks[f"{columns['chunks']}_{name}"]) for name in ("tokens_0", "dictionary"))
    assert columns["figured"].tolist() == [0, 1, 2, 3]
    assert tokens["size"].tolist() == [6, 6, 6, 6]
    assert [words["texts"][code] for code in tokens["code"][:6]] == ["I", " think", " it", " is", " 1", "<|im_end|>"]
    assert [words["ids"][code] for code in tokens["code"][12:18]] == [0, 1, 2, 3, 4, 5]
    assert [words["ids"][code] for code in tokens["code"][18:]] == [-1] * 6
    difference = tokens["difference"].view(np.float16)
    assert difference[:6] == pytest.approx([-0.02, -0.01, 0, 0.01, 0.02, 0.03], abs=1e-4)
    assert np.isnan(difference[18:]).all()
    assert columns["mismatch"][:2] == pytest.approx([0.015, 0.015], abs=1e-6)


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for step in (1, 2):
        texts = [random.bytes(3000).hex() for _ in range(40)]
        write_samples(tmp_path, step, [sample(step, f"p:{n}", response=text) for n, text in enumerate(texts)])
    monkeypatch.setattr(samples, "PAGE_BYTES", 200_000)
    columns, chunks = sample_data([run_in(tmp_path)])
    assert 0 < columns["rows"] < 80
    assert sum(map(len, chunks.values())) * 4 / 3 <= 200_000
    assert any("of the 80 samples" in sentence for sentence in columns["told"])
    assert sample_data([run_in(tmp_path)], samples=60)[0]["rows"] == 60
    assert sample_data([run_in(tmp_path)], samples=80)[0]["rows"] == 80


def test_a_file_that_is_no_parquet_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [sample(1)])
    (tmp_path / "rollouts" / "step_000002.parquet").write_bytes(b"PAR1 no")
    columns, _ = sample_data([run_in(tmp_path)])
    assert columns["rows"] == 1
    assert any("step_000002.parquet" in sentence for sentence in columns["told"])


def test_a_run_without_samples_says_so_and_fine_tuning_has_no_section(tmp_path: Path) -> None:
    (part,) = samples.sample_parts([run_in(tmp_path)])
    assert not part.scripts
    assert "track.rollouts" in part.html
    (tmp_path / "recipe.yaml").write_text("kind: sft\n", encoding="utf-8")
    assert samples.sample_parts([run_in(tmp_path)]) == []


def test_chunks_of_a_page_that_is_served_have_other_names_when_they_hold_other_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "LIVE_SAMPLES", 4)
    write_samples(tmp_path, 1, [sample(1, number=number, response=f"first {number}") for number in range(4)])
    live = serve.LiveReport([run_in(tmp_path).directory])

    def held() -> dict[str, bytes]:
        columns = decoded(live.columns("samples") or b"")
        assert columns["rows"] == 4
        names = [f"{columns['chunks']}_{name}" for name in ("texts_0", "prompts_0", "tokens_0", "dictionary")]
        return {name: live.columns(name) or b"" for name in names}

    before = held()
    write_samples(tmp_path, 2, [sample(2, number=number, response=f"second {number}") for number in range(4)])
    after = held()
    assert not before.keys() & after.keys()
    assert {name: live.columns(name) for name in before} == before  # a page that has not asked since reads its own
    write_samples(tmp_path, 2, [sample(2, number=number, response=f"again {number}") for number in range(4)])
    assert not after.keys() & held().keys()
    assert live.columns(next(iter(before))) is None
