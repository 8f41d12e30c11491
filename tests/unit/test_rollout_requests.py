"""Prompts to requests, and samples to groups."""

import numpy as np
import pytest

from megagrpo.errors import EngineError
from megagrpo.rollout.pool import Order
from megagrpo.rollout.requests import evaluation_requests, requests_for, training_order
from megagrpo.types import Group, Prompt, Request, Sample, SamplingParams
from tests.tiny_run import recipe_with

SAMPLING = SamplingParams(max_tokens=4)


def prompt(name: str) -> Prompt:
    return Prompt(name, (len(name), ord(name[0])), "source", "truth")


def requests_of(*prompts: Prompt, step: int = 2) -> list[Request]:
    return [
        request
        for each in prompts
        for request in requests_for(each, samples=2, sampling=SAMPLING, recipe_seed=1, step=step)
    ]


def answer(request: Request) -> Sample:
    none = np.zeros(0)
    return Sample(request.prompt_id, request.index, none, none, none, "length", f"{request.prompt_id}/{request.index}")


def test_a_group_holds_the_samples_of_its_prompt_in_order() -> None:
    asked = prompt("b")
    samples = {1: answer(requests_of(asked)[1]), 0: answer(requests_of(asked)[0])}
    group = Order(requests_of(asked), prompt=asked, samples=samples).group()
    assert group.prompt == asked
    assert [sample.text for sample in group.samples] == ["b/0", "b/1"]


def test_a_prompt_that_occurs_twice_in_an_evaluation_gets_other_samples() -> None:
    recipe = recipe_with("eval={samples_per_prompt: 2, temperature: 1.0, sets: {main: {files: [{path: a.jsonl}]}}}")
    asked = evaluation_requests(recipe, recipe.eval.of_sets()["main"], [prompt("a"), prompt("b"), prompt("a")])
    found = [[(request.prompt_id, request.index) for request in requests] for requests in asked]
    assert found == [[("a", 0), ("a", 1)], [("b", 0), ("b", 1)], [("a", 2), ("a", 3)]]
    assert len({request.seed for requests in asked for request in requests}) == 6


def test_seeds_depend_on_the_sample_alone_not_on_the_other_prompts() -> None:
    def seeds(prompts: list[Prompt], step: int) -> dict[tuple[str, int], int]:
        return {(r.prompt_id, r.index): r.seed for r in requests_of(*prompts, step=step)}

    together = seeds([prompt("a"), prompt("b")], 5)
    assert together == seeds([prompt("b")], 5) | seeds([prompt("a")], 5)
    assert not set(together.values()) & set(seeds([prompt("a"), prompt("b")], 6).values())


@pytest.mark.parametrize("asked", [[prompt("a"), prompt("b")], [prompt("b")], [prompt("a"), prompt("a")]])
def test_samples_that_were_not_asked_for_are_refused(asked: list[Prompt]) -> None:
    samples = dict(enumerate(map(answer, requests_of(*asked))))
    with pytest.raises(EngineError):
        Order(requests_of(prompt("a")), prompt=prompt("a"), samples=samples).group()


GIVEN = "given_responses: {share: 0.25, column: answer}"
TAUGHT = f"algorithm.distillation={{objective: full_vocabulary, by_source: {{source: a}}, {GIVEN}}}"


def with_answer(number: int, source: str = "source") -> Prompt:
    return Prompt(f"p{number}", (1, 2), source, "", extra_info={"answer": "ten"}, given=tuple(range(3, 40)))


def test_a_share_of_the_prompts_has_its_rows_response_and_no_other_the_same_ones_in_every_run() -> None:
    recipe = recipe_with("teachers={a: {kind: ranks, path: x}}", TAUGHT, "rollout.response_tokens_max=24")

    def given(step: int, **changed: int) -> list[Group]:
        orders = [training_order(recipe.model_copy(update=changed), with_answer(i), step) for i in range(2000)]
        assert {len(order.requests) for order in orders if not order.complete} == {recipe.rollout.samples_per_prompt}
        return [order.group() for order in orders if order.complete]

    first = given(1)
    assert len(first) == pytest.approx(500, abs=60)
    names = [[group.prompt.id for group in groups] for groups in (first, given(1), given(2), given(1, seed=9))]
    assert names[0] == names[1]
    assert len({*map(tuple, names)}) == 3
    for (sample,) in (group.samples for group in first):
        assert sample.given
        assert sample.tokens.tolist() == list(range(3, 27))
        assert np.isnan(sample.logprobs).all()


def test_a_row_without_a_response_or_a_teacher_is_sampled_whatever_the_share() -> None:
    recipe = recipe_with("teachers={a: {kind: ranks, path: x}}", TAUGHT.replace("0.25", "1.0"))
    assert all(training_order(recipe, with_answer(number), 1).complete for number in range(20))
    without = [Prompt(f"p{number}", (1, 2), "source", "") for number in range(20)]
    others = [with_answer(number, "another") for number in range(20)]
    assert not any(training_order(recipe, each, 1).complete for each in (*without, *others))
