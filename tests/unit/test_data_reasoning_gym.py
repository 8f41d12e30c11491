"""Tasks of reasoning-gym as data: stable rows, mistakes named, held-out entries apart, and a scorer for each."""

import random

import pytest
from reasoning_gym.factory import DATASETS

from examples.demo.model import make_tokenizer
from megagrpo.data.files import records, row_count
from megagrpo.data.locations import path_problem
from megagrpo.data.prompts import load_prompts
from megagrpo.data.reasoning_gym import task_at
from megagrpo.data.rows import prompt_schema, quick_look, read
from megagrpo.errors import DataError
from megagrpo.recipe.schema import DataFileConfig
from megagrpo.recipe.schema.data import DataConfig, overlaps
from megagrpo.reward.verifiers import reasoning_gym
from megagrpo.section import broken_rules
from megagrpo.typed_json import dumps, loads


def entry(task: str = "leg_counting", **given):
    return DataFileConfig(reasoning_gym=task, **{"size": 5} | given)


def test_a_task_is_data_by_its_name_with_rows_that_stay_the_same():
    tasks = [entry(seed=1, arguments={"max_animals": 3}), entry("chain_sum"), entry(seed=6)]
    data = DataConfig(train=tasks, prompt_tokens_max=4096)
    mixture = load_prompts(data.train, make_tokenizer(), data, 0)
    assert list(mixture.items) == list(load_prompts(data.train, make_tokenizer(), data, 0).items)
    ids = [prompt.id for prompt in mixture.items]
    assert ids[:2] == ["seed=1/size=5/leg_counting:0", "seed=1/size=5/leg_counting:1"]
    assert ids[5] == "chain_sum:0"
    first = mixture.items[0]
    assert (first.data_source, first.extra_info["source_dataset"]) == ("reasoning_gym/leg_counting", "leg_counting")
    assert "legs" in first.messages[0]["content"]
    assert [row_count(task.location) for task in tasks] == [5, 5, 5]
    assert len({row.messages[0]["content"] for row in read(tasks[2].location, prompt_schema())}) == 5


def test_a_location_shows_the_arguments_and_has_them_whole():
    arguments = {"text": "50% of a/b", "min_animals": 2}
    location = entry(arguments=arguments).location
    assert '"min_animals": 2' in location
    assert task_at(location).arguments == arguments


@pytest.mark.parametrize(
    "own", ["", "seed=1/size=x/", "%7B/seed=1/size=4/", "[3]/seed=1/size=4/", "a/b/seed=1/size=4/"]
)
def test_a_location_of_another_form_is_refused_with_the_form(own):
    (problem,) = quick_look(f"reasoning_gym://{own}leg_counting", prompt_schema())
    assert "seed=SEED/size=SIZE/TASK" in problem.needed


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (entry("leg_countin"), "did you mean leg_counting"),
        (entry("composite"), "with weights"),
        (entry(arguments={"animals": 3}), "animals"),
        (entry(arguments={"min_animals": -1}), "min_animals"),
    ],
)
def test_a_task_that_there_is_not_is_named(task, said):
    (problem,) = quick_look(task.location, prompt_schema())
    assert said in str(problem)
    with pytest.raises(DataError, match=said):
        read(task.location, prompt_schema())


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install" in path_problem(entry().location).fix


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"path": "a.jsonl", "reasoning_gym": "leg_counting"}, "path"),
        ({}, "path"),
        ({"path": "a.jsonl", "size": 3}, "size"),
        ({"reasoning_gym": "leg_counting", "columns": {"prompt": "a"}}, "columns"),
    ],
)
def test_an_entry_is_files_or_a_task(given, field):
    assert [problem.where for problem in broken_rules(DataFileConfig(**given))] == [field]


@pytest.mark.parametrize(("seed", "same_rows"), [(0, False), (1, True), (9, True), (14, True), (15, False)])
def test_entries_are_not_both_trained_on_and_held_out(seed, same_rows):
    assert any(overlaps([entry(seed=5, size=10)], [entry(seed=seed, size=5)])) == same_rows
    assert not any(overlaps([entry(seed=5)], [entry(seed=5, arguments={"max_animals": 3})]))


def test_every_task_scores_its_own_answer_as_right_and_another_as_wrong():
    score = reasoning_gym.make()
    unlike = []
    for task in random.Random(0).sample(sorted(set(DATASETS) - {"composite"}), 12):
        (_, first), (_, second) = records(entry(task, size=2).location)
        for row, answer in ((first, first), (first, second)):
            info = loads(dumps(row["extra_info"]))  # as rows are kept
            if response := reasoning_gym.solution(answer["ground_truth"], info):
                got = score(response=response, ground_truth=row["ground_truth"], extra_info=info)["score"]
                same = answer["ground_truth"] == row["ground_truth"]
                unlike += [(task, got)] if (got == 1) != same else []
    assert unlike == []


def test_an_answer_that_a_scorer_cannot_read_is_wrong_and_an_entry_that_it_cannot_read_is_refused():
    (_, row), _ = records(entry("prime_factorization", size=2).location)
    score = reasoning_gym.make()
    response = "<answer>two times three</answer>"
    assert score(response=response, ground_truth=row["ground_truth"], extra_info=row["extra_info"])["score"] == 0
    for info in ({"source_dataset": "prime_factorization"}, {"source_dataset": "primes"}, {}):
        with pytest.raises(ValueError, match=r"scored|task"):
            score(response=response, ground_truth="no number", extra_info=info)
