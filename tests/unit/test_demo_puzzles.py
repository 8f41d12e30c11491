"""The demo's puzzles: the recipes' verifiers agree with what is right, and what is held out is held out."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from examples.demo import puzzles
from examples.demo.model import make_tokenizer
from examples.demo.puzzles import KINDS
from megagrpo.data.rows import prompt_schema, read
from megagrpo.recipe.load import load, load_sft
from megagrpo.reward.functions import function_specs, outcome_of
from megagrpo.reward.functions import load as load_function

RECIPES = Path(__file__).resolve().parents[2] / "yaml_recipes"
TRAINING = sorted(file for file in RECIPES.glob("puzzles_*_cpu.yaml") if "sft" not in file.stem)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("demo") / ".cache" / "puzzles"
    puzzles.prepare(output)
    return output


def test_the_verifiers_of_the_recipes_take_right_answers_and_no_careless_ones() -> None:
    maker = random.Random(1)
    specs = function_specs(load(RECIPES / "puzzles_mixture_cpu.yaml").recipe.reward)
    for kind, spec in zip(KINDS, specs, strict=True):
        verify = load_function(spec)
        careless = 0
        for puzzle in (KINDS[kind](maker) for _ in range(20)):
            row = {
                "data_source": kind,
                "ground_truth": puzzle.ground_truth,
                "extra_info": {},
                "prompt_text": puzzle.question,
            }
            for response in (puzzle.right, puzzle.careless):
                arguments = {**row, "response": response, "solution_str": response}
                found = outcome_of(verify.function(**{name: arguments[name] for name in verify.wanted}))
                assert found.score == float(response == puzzle.right), (kind, response)
            careless += puzzle.careless != puzzle.right
        assert careless >= 5, kind


def test_no_held_out_question_is_in_another_file(prepared: Path) -> None:
    learnt = {row[0]["content"] for row in pq.read_table(prepared / "sft_right.parquet")["messages"].to_pylist()}
    for kind in KINDS:
        train, test = (read(prepared / kind / f"{split}.parquet", prompt_schema()) for split in ("train", "test"))
        held_out = {row.messages[0]["content"] for row in test}
        assert len(held_out) == len(test) == puzzles.TEST
        assert not held_out & (learnt | {row.messages[0]["content"] for row in train})
        assert {row.data_source for row in (*train, *test)} == {kind}


def test_the_careless_file_asks_what_the_right_one_asks(prepared: Path) -> None:
    right, careless = (
        pq.read_table(prepared / f"sft_{name}.parquet")["messages"].to_pylist() for name in ("right", "careless")
    )
    assert [row[0] for row in right] == [row[0] for row in careless]
    differ = sum(row[1] != other[1] for row, other in zip(right, careless, strict=True)) / len(right)
    assert 0.3 < differ < 0.6


def test_the_recipes_use_these_files_and_have_room_for_questions_and_answers(prepared: Path) -> None:
    tokenizer, maker = make_tokenizer(), random.Random(2)
    longest = {
        kind: [
            max(len(tokenizer.encode(text)) for text in texts)
            for texts in zip(*((p.question, p.right) for p in drawn), strict=True)
        ]
        for kind, drawn in ((kind, [make(maker) for _ in range(300)]) for kind, make in KINDS.items())
    }
    named = [file.path for file in load_sft(RECIPES / "puzzles_sft_cpu.yaml").recipe.data.train]
    for file in TRAINING:
        recipe = load(file).recipe
        files = [entry.path for entry in recipe.data.train if entry.path.startswith(".cache")]
        kinds = [Path(path).parent.name for path in files]
        for question, answer in (longest[kind] for kind in kinds):
            assert question + 2 <= recipe.data.prompt_tokens_max
            assert answer + 1 <= recipe.rollout.response_tokens_max
        named += files
    assert len(named) > 2
    assert all((prepared.parents[1] / path).is_file() for path in named)
