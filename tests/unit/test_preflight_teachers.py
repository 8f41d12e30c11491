"""Teachers are checked before a run: models, tokenizers, and rows that have one."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from megagrpo.errors import PreflightError
from megagrpo.preflight.preflight import Preflight, check_sets, preflight
from megagrpo.preflight.teachers import tokens_by_id
from megagrpo.recipe.load import load
from megagrpo.recipe.schema.teachers import ServedTeacherConfig
from tests.tiny_run import EXPERTS, ROW, make_model, make_run

SERVED = "teachers={{big: {{kind: server, path: {teacher}}}}}"
RANKS = "teachers={{big: {{kind: ranks, path: {teacher}}}}}"
EXTERNAL = "teachers={{big: {{kind: external, url: 'http://h:1', tokenizer: {teacher}}}}}"
COLUMN = "{objective: sampled_token, column: who}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_model(tmp_path / "teacher", hidden_size=32)
    return make_run(tmp_path)


def checked(run: Path, teachers: str, *overrides: str, plan_only: bool = False) -> Preflight[Any]:
    given = teachers.format(teacher=run.parent / "teacher"), "algorithm.distillation={objective: sampled_token}"
    return preflight(load(run, [*given, *overrides]), plan_only=plan_only)


def replaced(run: Path, **config: Any) -> None:
    shutil.rmtree(run.parent / "teacher")
    make_model(run.parent / "teacher", **config)


def refused(run: Path, teachers: str, *overrides: str, plan_only: bool = False) -> list[str]:
    with pytest.raises(PreflightError) as error:
        checked(run, teachers, *overrides, plan_only=plan_only)
    return [str(problem) for problem in error.value.problems]


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def rows_of(run: Path, *rows: dict[str, Any]) -> None:
    (run.parent / "train.jsonl").write_text("".join(f"{json.dumps(ROW | row)}\n" for row in rows))


def test_a_teacher_on_the_ranks_is_found_and_one_on_a_server_has_devices_of_its_own(run: Path) -> None:
    found = checked(run, RANKS)
    assert found.teachers == {"big": run.parent / "teacher"}
    assert not found.models_beside
    found = checked(run, SERVED, plan_only=True)
    assert not found.teachers
    assert found.models_beside == {"teachers.big": run.parent / "teacher"}


@pytest.mark.parametrize("teachers", [SERVED, RANKS, EXTERNAL])
def test_a_tokenizer_with_one_other_token_is_refused_with_that_token(run: Path, teachers: str) -> None:
    assert checked(run, teachers, plan_only=True)
    tokenizer = run.parent / "teacher" / "tokenizer.json"
    tokens = tokens_by_id(run.parent / "model")

    def other(value: dict[str, Any]) -> None:
        value["model"]["vocab"]["sieben"] = value["model"]["vocab"].pop(tokens[7])

    changed(tokenizer, other)
    (fault,) = refused(run, teachers, plan_only=True)
    assert f"given: 'sieben' for id 7, in {run.parent}/teacher" in fault
    assert f"needed: {tokens[7]!r}, as in {run.parent}/model" in fault


def test_added_and_missing_tokens_differ_too(run: Path) -> None:
    directory = run.parent / "teacher"
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    last = max(tokens_by_id(directory))
    tokenizer.add_special_tokens([AddedToken("<|tool|>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (fault,) = refused(run, RANKS)
    assert f"'<|tool|>' for id {last + 1}" in fault
    assert "needed: no token, as in" in fault
    (directory / "tokenizer.json").unlink()
    (fault,) = refused(run, RANKS)
    assert "no tokenizer" in fault


def test_tokens_of_every_file_are_read(tmp_path: Path) -> None:
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0))
    pieces.add_special_tokens([AddedToken("<s>", special=True)])
    pieces.save(str(tmp_path / "tokenizer.json"))
    of_library = {number: token for token, number in pieces.get_vocab().items()}
    assert tokens_by_id(tmp_path) == of_library
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"9": {"content": "<x>"}}}))
    assert tokens_by_id(tmp_path) == of_library | {9: "<x>"}


def test_150_000_tokens_are_compared_in_well_below_a_second(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        vocabulary = {f"token {number}": number for number in range(150_000)}
        Tokenizer(models.WordLevel(vocabulary, unk_token="token 0")).save(str(tmp_path / name / "tokenizer.json"))
    began = time.process_time()
    assert tokens_by_id(tmp_path / "ours") == tokens_by_id(tmp_path / "theirs")
    assert time.process_time() - began < 0.8


def test_rows_of_the_embedding_beyond_the_tokenizer_may_differ_in_number(run: Path) -> None:
    replaced(run, vocab_size=40)
    assert checked(run, RANKS)


@pytest.mark.parametrize("teachers", [SERVED, RANKS, EXTERNAL])
def test_a_teacher_has_weights_for_each_token_of_the_policys_tokenizer(run: Path, teachers: str) -> None:
    last = max(tokens_by_id(run.parent / "model"))

    def of_size(vocab: int) -> None:
        changed(run.parent / "teacher" / "config.json", lambda config: config.update(vocab_size=vocab))

    of_size(last + 1)
    assert checked(run, teachers, plan_only=True)
    of_size(last)
    (fault,) = refused(run, teachers, plan_only=True)
    assert f"a vocab_size of {last}\n" in fault


def test_a_teacher_in_the_policys_layout_has_sizes_that_divide_it_and_room_for_its_sequences(run: Path) -> None:
    replaced(run, num_hidden_layers=3, max_position_embeddings=24)
    found = refused(run, RANKS, "train.layout={pipeline: 2}", "train.megatron={}")
    assert any("3 layers (teachers.big's)" in fault for fault in found)
    assert any("max_position_embeddings" in fault and "(teachers.big's)" in fault for fault in found)
    (fault,) = refused(run, SERVED, plan_only=True)
    assert "given: max_position_embeddings of 24" in fault


def test_a_teachers_system_message_is_part_of_its_sequence(run: Path) -> None:
    replaced(run, max_position_embeddings=(longest := load(run).recipe.sequence_tokens_max))
    assert checked(run, SERVED, plan_only=True)
    system = "algorithm.distillation={system: Add., system_tokens_max: 8}"
    (fault,) = refused(run, SERVED, system, plan_only=True)
    assert f"needed: at least {longest + 8}" in fault


def test_adapters_and_recomputed_modules_are_the_policys_alone(run: Path) -> None:
    replaced(run, **EXPERTS)
    assert checked(run, RANKS, "train.lora={rank: 20}", "train.recompute={modules: [mlp]}")


def test_an_architecture_that_is_not_known_or_no_directory_is_named(run: Path) -> None:
    changed(run.parent / "teacher" / "config.json", lambda config: config.update(model_type="gpt2"))
    assert any("gpt2" in fault for fault in refused(run, RANKS))
    (fault,) = refused(run, "teachers={{big: {{kind: ranks, path: {teacher}/none}}}}")
    assert "teachers.big.path" in fault


def test_a_plan_does_without_the_files_of_a_known_model(run: Path) -> None:
    for kind in ("ranks", "server"):
        teachers = f"teachers={{{{big: {{{{kind: {kind}, path: Qwen/Qwen3-32B}}}}}}}}"
        for overrides in ((), ("model.path=Qwen/Qwen3-4B", "data.prompt_tokens_max=20")):
            found = checked(run, teachers, "train.megatron={}", *overrides, plan_only=True)
            assert any("tokenizer of teachers.big" in text for text in found.unchecked)
    assert found.recipe.models_beside.keys() == {"teachers.big"}


def test_every_teachers_tokens_are_compared(run: Path) -> None:
    shutil.copytree(run.parent / "teacher", run.parent / "other")
    for name in ("teacher", "other"):
        changed(run.parent / name / "tokenizer.json", lambda value: value["model"]["vocab"].update(sieben=99))
    other = f"teachers.small={{kind: ranks, path: {run.parent}/other}}"
    found = refused(run, RANKS, other, "algorithm.distillation={by_source: {a: big, b: small}}")
    for name in ("teacher", "other"):
        assert any(f"'sieben' for id 99, in {run.parent}/{name}\n" in fault for fault in found)


def test_a_teacher_has_room_for_its_system_message(run: Path) -> None:
    longest = load(run).recipe.sequence_tokens_max
    replaced(run, max_position_embeddings=longest)
    system = "algorithm.distillation={system: Add., system_tokens_max: 1}"
    assert checked(run, RANKS)
    (fault,) = refused(run, RANKS, system)
    assert f"= {longest + 1} tokens (teachers.big's)" in fault
    assert "system_tokens_max" in fault.partition("fix:")[2]


def test_a_column_names_known_teachers(run: Path) -> None:
    names = "algorithm.distillation={column: who}"
    rows_of(run, {"who": "big"}, {}, {"extra_info": {"who": None}}, {"who": ""})
    assert checked(run, RANKS, names)
    rows_of(run, {"who": "big"}, {"who": "small"}, {"extra_info": {"who": 3}}, {"who": "small"})
    found = refused(run, RANKS, names)
    assert len(found) == 2
    for fault, words in zip(found, ("line 2, who\n    given: 'small'\n", "line 3, who\n    given: 3\n"), strict=True):
        assert f"{run.parent}/train.jsonl {words}" in fault
    rows_of(run, {"x": {"who": "big"}}, {"x": {"who": "small"}})
    (fault,) = refused(run, RANKS, names, "data.train.0.columns={extra_info: [x.who]}")
    assert "line 2, who\n    given: 'small'" in fault


def test_a_run_in_which_no_row_has_a_teacher_is_refused(run: Path) -> None:
    rows_of(run, {}, {"data_source": "code"})
    assert checked(run, RANKS, "algorithm.distillation={by_source: {cod*: big}}")
    (fault,) = refused(run, RANKS, "algorithm.distillation={by_source: {math: big}}")
    assert "no row of data.train has a teacher" in fault
    assert "sums, code" in fault
    (fault,) = refused(run, RANKS, "algorithm.distillation={column: who}")
    assert "no row of data.train has a teacher" in fault
    elsewhere = "data.train=[{path: /elsewhere/a.parquet}]"
    assert checked(run, RANKS, "algorithm.distillation={by_source: {math: big}}", elsewhere, plan_only=True)


def test_given_responses_are_texts_of_a_column_that_some_row_has(run: Path) -> None:
    given = "algorithm.distillation={objective: full_vocabulary, given_responses: {share: 0.5, column: answer}}"
    rows_of(run, {}, {"answer": None}, {"answer": "7"})
    assert checked(run, RANKS, given)
    rows_of(run, {}, {"answer": 7})
    (fault,) = refused(run, RANKS, given)
    assert "line 2, answer\n    given: 7" in fault
    rows_of(run, {}, {"answer": None})
    (fault,) = refused(run, RANKS, given)
    assert "algorithm.distillation.given_responses.column" in fault
    rows_of(run, {"answer": "7"})
    (fault,) = refused(run, RANKS, given, "data.train.0.columns={ground_truth: answer}")
    assert "no row of data.train has answer" in fault
    assert checked(run, RANKS, given, "data.train.0.columns={ground_truth: answer, extra_info: [answer]}")


def test_teachers_alone_need_no_function_for_a_data_source(run: Path) -> None:
    assert checked(run, RANKS, "reward={}")


def test_evaluations_start_no_teachers(run: Path) -> None:
    given = SERVED.format(teacher="nowhere"), "algorithm.distillation={objective: sampled_token}"
    loaded = load(run, [*given, f"eval.sets={{sums: {{files: [{{path: {run.parent}/train.jsonl}}]}}}}"])
    check_sets(loaded)
    assert isinstance(loaded.recipe.teachers["big"], ServedTeacherConfig)
    evaluated = loaded.recipe.without_teachers()
    assert not evaluated.models_beside
    assert evaluated.algorithm.distillation is None
