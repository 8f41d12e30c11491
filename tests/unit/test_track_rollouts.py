"""The files of rollouts: what is in them, through interruptions and faults, and how fast they are made."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from examples.demo.model import make_tokenizer
from megagrpo.agents.turns import BranchReason, reported
from megagrpo.algorithm.advantage_method import Advantages
from megagrpo.algorithm.ragged import ragged_zeros
from megagrpo.cli import main
from megagrpo.report.text import BRANCHES, conversation
from megagrpo.track import rollout_writer
from megagrpo.track.rollout_files import (
    EVENTS_MAX,
    LEFT_OUT,
    SCHEMA,
    TRACE_CHARACTERS,
    TRAIN,
    read_rollouts,
    remove_later,
    rollout_file,
    rollout_steps,
    trace,
)
from megagrpo.track.rollout_writer import Learned, RolloutWriter, StepRollouts, TokenTexts, first_groups, tables
from megagrpo.track.tracker import Tracker
from megagrpo.types import AgentRun, Group, Prompt, Sample, Score
from tests.agent_runs import CALL, calculator_run, group_of, tool_event, turn_event
from tests.small_disk import small_disk
from tests.tiny_run import tracked_recipe

TOKENIZER = make_tokenizer()


def sample_of(index: int, tokens: Sequence[int], version: int = 0, text: str = "") -> Sample:
    size = len(tokens)
    logprobs = -np.arange(1, size + 1, dtype=np.float32) / 8
    return Sample("p", index, np.array(tokens, np.int32), logprobs, np.full(size, version, np.int32), "stop", text)


def group(*responses: str, name: str = "p", version: int = 0) -> Group:
    encoded = [TOKENIZER.encode(text, add_special_tokens=False) for text in responses]
    samples = [sample_of(index, tokens, version, responses[index]) for index, tokens in enumerate(encoded)]
    prompt = Prompt(name, (3, 4), "adder", "82", "sums", text="40+42=", messages=({"role": "user", "content": "é"},))
    score = Score(1.0, {"digits": 0.5}, solved=True, notes={"digits.read": "8\ud8002"}, answer="82")
    return Group(prompt, tuple(samples), (score, *(Score(None, error="raised") for _ in samples[1:])))


def step(number: int, *groups: Group, learned: Learned | None = None) -> StepRollouts:
    return StepRollouts(number, {TRAIN: groups or (group("82"),)}, number - 1, None, learned)


def write(directory: Path, *all_rollouts: StepRollouts, tokenizer: Any = TOKENIZER) -> list[str]:
    """Returns the writer's messages."""
    said = list[str]()
    writer = RolloutWriter(directory, tokenizer, said.append)
    for rollouts in all_rollouts:
        writer.put(rollouts)
        wait_until(lambda: not writer._waiting)  # here nothing is left out for want of time
    writer.close()
    return said


def wait_until(moment: Callable[[], bool]) -> None:
    while not moment():
        time.sleep(0.001)


# --- what is in a file ------------------------------------------------------------------------------------------------


def test_a_row_has_what_was_sampled_scored_and_learned(tmp_path: Path) -> None:
    found = group("82", "1+1", version=3)
    lengths = [len(sample.tokens) for sample in found.samples]
    figures = ragged_zeros(lengths, np.float32)
    figures.values[:] = np.arange(sum(lengths))
    taught = figures.with_values(np.where(figures.values == 1, np.nan, -figures.values).astype(np.float32))
    teachers = {"teachers": ["big", None], "teacher_logprobs": taught}
    learned = Learned(np.array([True, False]), Advantages(np.array([0.5, 0.0])), figures, None, **teachers)
    assert write(tmp_path, StepRollouts(7, {TRAIN: [found]}, 5, None, learned)) == []
    table = read_rollouts(tmp_path)
    assert table.schema == SCHEMA
    first, second = table.to_pylist()
    sample = found.samples[0]
    assert {name: first[name] for name in ("step", "set", "prompt_id", "sample", "data_source", "ability")} == {
        "step": 7, "set": TRAIN, "prompt_id": "p", "sample": 0, "data_source": "adder", "ability": "sums",
    }  # fmt: skip
    assert (first["prompt"], json.loads(first["messages"])) == ("40+42=", [{"role": "user", "content": "é"}])
    assert (first["response"], first["ground_truth"], first["answer"], first["agent"]) == ("82", "82", "82", None)
    assert (first["score"], first["parts"], first["notes"]) == (1.0, [("digits", 0.5)], [("digits.read", "8?2")])
    assert (first["solved"], first["finish"], first["prompt_tokens"], first["tokens"]) == (True, "stop", 2, lengths[0])
    assert (first["age"], first["advantage"], first["token_advantages"]) == (2, 0.5, [0.5] * lengths[0])
    assert first["token_ids"] == sample.tokens.tolist()
    assert first["token_versions"] == [3] * lengths[0]
    assert first["rollout_logprobs"] == sample.logprobs.tolist()
    assert first["train_logprobs"] == figures.row(0).tolist()
    assert "".join(first["token_texts"]) == "82"
    assert (second["score"], second["error"], second["advantage"], second["answer"]) == (None, "raised", None, None)
    for column in ("train_logprobs", "token_advantages", "teacher_logprobs", "teacher"):
        assert second[column] is None, "it is not trained on"
    assert (first["teacher"], first["teacher_divergences"]) == ("big", None)
    assert first["teacher_logprobs"] == [-0.0, None, *(-figures.row(0)[2:]).tolist()]
    assert first["entropies"] is None
    assert len(second["rollout_logprobs"]) == lengths[1]


def test_a_given_response_is_shown_as_its_tokens_read(tmp_path: Path) -> None:
    """Not as the row's text: it may have been longer, or of a column that the recipe named before."""
    tokens = [*TOKENIZER.encode("82", add_special_tokens=False), TOKENIZER.eos_token_id]
    samples = [replace(sample_of(0, tokens[:count]), finish="given") for count in (1, 3)]
    write(tmp_path, step(1, *(replace(group("1"), samples=(sample,)) for sample in samples)))
    assert [row["response"] for row in read_rollouts(tmp_path).to_pylist()] == ["8", "82"]


def test_agents_rollouts_have_their_trace_and_the_tokens_of_all_turns(tmp_path: Path) -> None:
    write(tmp_path, step(1, group_of(calculator_run())))
    (row,) = read_rollouts(tmp_path).to_pylist()
    assert [event["kind"] for event in json.loads(row["agent"])["events"]] == ["turn", "tool", "turn"]
    assert row["response"] == "It is 391."
    assert len(row["token_ids"]) == row["tokens"] == 8


def test_steps_without_samples_have_a_file(tmp_path: Path) -> None:
    write(tmp_path, StepRollouts(1, {TRAIN: []}, 0, None, Learned(np.zeros(0, bool), Advantages(np.zeros(0)))))
    assert rollout_steps(tmp_path) == [1]
    assert len(read_rollouts(tmp_path)) == 0


def test_figures_of_tokens_are_kept_of_the_first_whole_groups_of_each_set(tmp_path: Path) -> None:
    groups = [group("82", "1+1=2"), group("7", "8"), group("9")]
    for most, kept in ((0, 0), (1, 2), (3, 2), (4, 4), (None, 5)):
        rollouts = StepRollouts(1, {"sums": groups, "words": groups}, 0, most)
        found = pa.concat_tables(tables(rollouts, TokenTexts(TOKENIZER)))
        of_set = [ids is not None for ids in found["token_ids"].to_pylist()]
        assert of_set == 2 * ([True] * kept + [False] * (5 - kept))
        assert found["sample"].to_pylist() == 2 * [0, 1, 0, 1, 0]


def test_a_table_in_parts_is_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [group("82", "1+1=2"), group("", "7"), group("123456")]
    lengths = [len(sample.tokens) for of in groups for sample in of.samples]
    of_tokens = ragged_zeros(lengths)
    of_tokens.values[:] = np.arange(sum(lengths))
    learned = Learned(np.array([True, False, True, True, True]), Advantages(np.arange(5.0), of_tokens), of_tokens)
    rollouts = step(1, *groups, learned=learned)
    (whole,) = tables(rollouts, TokenTexts(TOKENIZER))
    monkeypatch.setattr("megagrpo.track.rollout_writer.PART_TOKENS", 3)
    parts = list(tables(rollouts, TokenTexts(TOKENIZER)))
    assert len(parts) > 2
    assert pa.concat_tables(parts).to_pylist() == whole.to_pylist()


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(1, 40))
def test_whole_groups_are_kept_up_to_a_number_of_samples(sizes: list[int], most: int) -> None:
    groups = [group(*["1"] * size) for size in sizes]
    kept = first_groups(groups, most)
    assert list(kept) == groups[: len(kept)]
    samples = sum(len(of.samples) for of in kept)
    assert samples <= most or len(kept) == 1
    assert len(kept) == len(groups) or samples + len(groups[len(kept)].samples) > most
    assert first_groups(groups, None) == groups


# --- texts of tokens --------------------------------------------------------------------------------------------------


def byte_level() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with bytes and a few merges: characters beyond ASCII are several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    made.train_from_iterator(["the cat sat on the mat 日本 日本語 émoji 😀"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


def with_byte_fallback() -> PreTrainedTokenizerFast:
    """Makes a tokenizer like Llama 2's. Spaces are letters, unknown characters bytes; a first space is dropped."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "é"]
    made = Tokenizer(
        models.BPE({name: at for at, name in enumerate(names)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


TOKENIZERS = {"byte level": byte_level(), "byte fallback": with_byte_fallback(), "demo": TOKENIZER}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_of_any_tokens_are_what_they_say_together(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    texts = st.text(alphabet="a 日é😀\n", max_size=8).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    responses = data.draw(st.lists(ids | texts, max_size=4))
    tokens = np.array([token for response in responses for token in response], np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(response) for response in responses])]).astype(np.int64)
    pieces = TokenTexts(tokenizer).pieces(tokens, offsets).to_pylist()
    for first, last, response in zip(offsets[:-1], offsets[1:], responses, strict=True):
        whole = tokenizer.decode(response, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert "".join(pieces[first:last]).lstrip(" ") == whole.lstrip(" ")


# --- interruptions and faults -----------------------------------------------------------------------------------------


def test_evaluations_have_files_of_their_own_which_later_sets_join(tmp_path: Path) -> None:
    write(tmp_path, StepRollouts(0, {"sums": [group("1")], "words": [group("2")]}, 0, None))
    write(tmp_path, step(4), StepRollouts(4, {"sums": [group("3", version=4)]}, 4, None))
    write(tmp_path, StepRollouts(4, {"words": [group("4", version=4)], "sums": [group("5", version=4)]}, 4, None))
    found = read_rollouts(tmp_path, columns=["step", "set", "response", "age", "advantage"]).to_pylist()
    assert [(row["step"], row["set"], row["response"]) for row in found] == [
        (0, "sums", "1"), (0, "words", "2"), (4, TRAIN, "82"), (4, "words", "4"), (4, "sums", "5"),
    ]  # fmt: skip
    assert rollout_steps(tmp_path) == [0, 4]


def test_a_run_that_continues_writes_later_steps_again_and_one_that_starts_all(tmp_path: Path) -> None:
    write(tmp_path, StepRollouts(0, {"sums": [group("1")]}, 0, None), *map(step, range(1, 4)))
    (tmp_path / "rollouts" / "step_000009.parquet.part").touch()
    remove_later(tmp_path, 2)
    assert rollout_steps(tmp_path) == [0, 1, 2]
    assert not list((tmp_path / "rollouts").glob("*.part"))
    remove_later(tmp_path, 0)
    assert rollout_steps(tmp_path) == []


def test_files_that_are_not_whole_are_left_out_by_readers(tmp_path: Path) -> None:
    write(tmp_path, *map(step, range(1, 4)))
    whole = rollout_file(tmp_path, 2).read_bytes()
    rollout_file(tmp_path, 2).write_bytes(whole[: len(whole) // 2])
    rollout_file(tmp_path, 4).touch()
    (tmp_path / "rollouts" / "step_000005.parquet.part").write_bytes(whole[:99])
    assert read_rollouts(tmp_path, columns=["step"]).to_pylist() == [{"step": 1}, {"step": 3}]
    assert len(read_rollouts(tmp_path, steps=[3, 8])) == 1
    assert read_rollouts(tmp_path / "nothing").schema == SCHEMA


class SlowTokenizer:
    """Decodes when `go` is set, as on a machine that has no time for the writer."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.go.set()

    def batch_decode(self, *given: Any, **how: Any) -> list[str]:
        self.entered.set()
        self.go.wait()
        return TOKENIZER.batch_decode(*given, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)


def held_back(directory: Path, steps: int) -> tuple[RolloutWriter, SlowTokenizer, list[str]]:
    """A writer that is held in step 1, and has the steps after it before it."""
    tokenizer, said = SlowTokenizer(), list[str]()
    writer = RolloutWriter(directory, tokenizer, said.append)  # type: ignore[arg-type]
    tokenizer.entered.clear()
    tokenizer.go.clear()
    writer.put(step(1))
    tokenizer.entered.wait()
    for number in range(2, steps + 1):
        writer.put(step(number))
    return writer, tokenizer, said


def test_a_writer_that_falls_behind_leaves_out_tokens_of_the_oldest_steps_then_steps(tmp_path: Path) -> None:
    writer, tokenizer, said = held_back(tmp_path, steps=7)
    assert len(said) == 1, "once"
    assert writer.left_out == 4
    tokenizer.go.set()
    writer.close()
    rows = read_rollouts(tmp_path, columns=["step", "response", "token_ids"]).to_pylist()
    assert [row["step"] for row in rows] == [1, 4, 5, 6, 7]
    assert [row["step"] for row in rows if row["token_ids"] is None] == [4, 5]
    assert {row["response"] for row in rows} == {"82"}


def test_a_run_ends_though_its_last_rollouts_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_writer, "FINISH_TIMEOUT_SECONDS", 0.01)
    writer, tokenizer, said = held_back(tmp_path, steps=3)
    writer.close()
    assert "3 steps left out" in said[-1]
    tokenizer.go.set()
    writer._thread.join()
    assert rollout_steps(tmp_path) == [], "another process may have begun these steps again"


def left_out(tracker: Tracker, steps: int) -> bool:
    assert tracker._writer
    return tracker._writer.left_out == steps


def test_without_room_the_run_goes_on_and_loses_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = tracked_recipe(tmp_path, console="lines")
    directory = tmp_path / "runs" / "adder"
    with Tracker(recipe, 10, tokenizer=TOKENIZER) as tracker:
        with small_disk(3000):  # less than a file of rollouts
            for number in (1, 2):
                tracker.rollouts(number, {TRAIN: [group("82")]}, number - 1)
                wait_until(partial(left_out, tracker, number))
                tracker.log(number, {"reward/mean": 1.0})
        tracker.rollouts(3, {TRAIN: [group("82")]}, 2)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward/mean"], line["rollouts/left_out"]) for line in lines] == [(1, 1, 1), (2, 1, 2)]
    assert rollout_steps(directory) == [3], "there is room again"
    assert capfd.readouterr().out.count("File too large") == 1
    assert not list((directory / "rollouts").glob("*.part"))


def test_a_place_that_is_taken_away_costs_the_rollouts_until_it_is_back(tmp_path: Path) -> None:
    said = write(tmp_path, step(1))
    (tmp_path / "rollouts").rename(tmp_path / "elsewhere")
    said += write(tmp_path, step(2))
    assert said == []
    assert rollout_steps(tmp_path) == [2]
    (said_now,) = write(tmp_path / "gone", step(3))[:1]
    assert "gone" in said_now
    assert not (tmp_path / "gone").exists()


# --- the page ---------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")


def test_the_page_has_every_column_with_its_type() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([a-z0-9<>, ]+)` \| ", PAGE, re.MULTILINE)
    types = {field.name: re.sub(r"(element|item): ", "", str(field.type)) for field in SCHEMA}
    assert rows == list(types.items())


def test_the_programs_of_the_page_read_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "NAME"
    run.mkdir(parents=True)
    write(run, step(1, group("82", "7")), StepRollouts(1, {"sums": [group("1")]}, 1, None))
    monkeypatch.chdir(tmp_path)
    names = dict[str, Any]()
    for program in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(program, names)
    assert names["worst"]["response"].tolist() == ["82", "7"]
    assert names["table"].num_rows == 3


# --- traces of agents' rollouts ---------------------------------------------------------------------------------------

TEXTS = st.text(max_size=200) | st.integers(0, 300_000).map(lambda size: "x" * size)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=200), inner, max_size=6),
    max_leaves=20,
)


def size_of(run: AgentRun) -> int:
    return len(json.dumps(trace(run), ensure_ascii=False))


def row_of(group: Group) -> dict[str, Any]:
    """Its first row."""
    (table,) = tables(StepRollouts(1, {TRAIN: [group]}, 0, 0), TokenTexts(TOKENIZER))
    return table.to_pylist()[0]


def test_a_trace_has_turns_tools_tokens_and_rewards() -> None:
    found = json.loads(json.dumps(trace(calculator_run(counts={"turns": 2, "retries": 1}))))
    first, tool, last = found["events"]
    assert first["said"]["tool_calls"] == [CALL]
    assert (first["reward"], last["reward"], last["sequence"]) == (None, 1.0, 0)
    assert (tool["name"], tool["seconds"], tool["result"]) == ("calculator", 0.5, "391")
    assert last["given"] == [{"role": "tool", "tool_call_id": "call_0", "content": "391"}]
    assert found["sequences"] == [{"tokens": 22, "trained": 8}]
    assert found["counts"] == {"turns": 2, "retries": 1}
    assert found["reward"] == {"score": 1.0}


NAMES = st.sampled_from(["name", "seconds", "said", "given", "error"]) | st.text(max_size=200)
KINDS = st.sampled_from(["note", "tool", "turn", LEFT_OUT])


@given(st.lists(st.tuples(KINDS, st.dictionaries(NAMES, JSON, max_size=4)), max_size=4), st.sampled_from([1, 60]))
def test_a_trace_is_bounded_and_readable_whatever_agents_tell(given: list[tuple[str, Any]], times: int) -> None:
    events = [reported(values | {"kind": kind}, 1.0) for kind, values in given] * times
    run = calculator_run(events=(*calculator_run().events, *events))
    assert size_of(run) < 3 * TRACE_CHARACTERS
    assert "It is 391." in conversation(row_of(group_of(run))) or len(run.events) > EVENTS_MAX


def test_long_rollouts_keep_their_first_and_last_events_and_the_ends_of_long_texts() -> None:
    said = {"role": "assistant", "content": f"begin {'y' * 100_000} end"}
    turns = tuple(turn_event(number, float(number), 0.5, said, given=[said] * 3) for number in range(1000))
    run = calculator_run(events=turns)
    assert size_of(run) < 2 * TRACE_CHARACTERS
    events = trace(run)["events"]
    assert [events[0]["number"], events[-1]["number"]] == [0, 999]
    assert sum(event.get("events", 1) for event in events) == 1000
    assert all(event["said"]["content"].startswith("begin") for event in events if event["kind"] == "turn")
    assert all(event["said"]["content"].endswith("end") for event in events if event["kind"] == "turn")
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    assert size_of(calculator_run(events=({"kind": "note", "at": 0.0, "of": deep},))) < 2000


def test_what_other_rollouts_write_has_not_changed() -> None:
    group = group_of(calculator_run())
    row = row_of(replace(group, samples=(replace(group.samples[0], agent=None),)))
    assert row["agent"] is None
    assert "It is 391." in conversation(row)


# --- megagrpo report --------------------------------------------------------------------------------------------------


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    failed = calculator_run(error="ZeroDivisionError: division by zero", reward=None)
    odd = {"role": "assistant", "content": "\x1b[2Jagain", "reasoning_content": "hm", "tool_calls": [CALL]}
    begun = turn_event(
        2, 2.0, 0.5, odd, branch="history", parent=None, given=[{"role": "user", "content": "Once more"}]
    )
    events = (*calculator_run().events, tool_event(1.7, 0.25, error="took longer than 60 s"), begun)
    with Tracker(tracked_recipe(tmp_path, console="off"), 10, tokenizer=make_tokenizer()) as tracker:
        tracker.rollouts(1, {TRAIN: [group_of(calculator_run())]}, 0)
        tracker.rollouts(2, {TRAIN: [group_of(calculator_run(), failed), group_of(calculator_run(events=events))]}, 1)
    return tmp_path / "runs" / "adder"


def test_a_rollout_reads_as_a_conversation(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_directory), "--rollout", "1"]) == 0
    shown = capsys.readouterr().out
    order = ["score 1", "ground truth: 391", "── user", "What is 17 * 23?", "turn 0", "calls calculator", "── tool"]
    places = [shown.index(text) for text in [*order, "turn 1", "It is 391."]]
    assert places == sorted(places)
    for text in ("22 tokens, 8 of them trained", "0.50 s", "reward 1", "18 tokens read, 4 of them new"):
        assert text in shown


def test_failures_and_new_sequences_are_told(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_directory), "--rollout", "2:1"]) == 0
    assert "the agent failed: ZeroDivisionError" in capsys.readouterr().out
    assert main(["report", str(run_directory), "--rollout", "2:2"]) == 0
    shown = capsys.readouterr().out
    assert "took longer than 60 s" in shown
    assert BRANCHES["history"] in shown
    assert "not trained on" in shown
    assert "(thinks) hm" in shown
    assert "\x1b" not in shown


def test_a_rollout_that_is_not_there_is_told_with_those_that_are(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = (
        (run_directory, "7", "1 to 2"),
        (run_directory, "2:3", "0 to 2"),
        (tmp_path, "1", "track.rollouts"),
    )
    for directory, asked, why in wrong:
        assert main(["report", str(directory), "--rollout", asked]) != 0
        assert why in capsys.readouterr().err
    rollout_file(run_directory, 3).write_bytes(rollout_file(run_directory, 2).read_bytes()[:-9])
    assert main(["report", str(run_directory), "--rollout", "3"]) != 0


def test_every_reason_for_a_new_sequence_has_words() -> None:
    assert set(BRANCHES) == set(get_args(BranchReason))
