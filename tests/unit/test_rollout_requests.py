"""Prompts to requests, and samples to groups."""

import numpy as np
import pytest

from megagrpo.errors import EngineError
from megagrpo.rollout.requests import groups_of, requests_for
from megagrpo.types import Prompt, Request, Sample, SamplingParams

SAMPLING = SamplingParams(max_tokens=4)


def prompt(name: str) -> Prompt:
    return Prompt(name, (len(name), ord(name[0])), "source", "truth")


def requests_of(prompts: list[Prompt], step: int = 2) -> list[Request]:
    return requests_for(prompts, samples_per_prompt=2, sampling=SAMPLING, recipe_seed=1, step=step)


def answer(request: Request) -> Sample:
    none = np.zeros(0)
    return Sample(request.prompt_id, request.index, none, none, none, "length", f"{request.prompt_id}/{request.index}")


def test_groups_hold_the_samples_of_their_prompts_in_order() -> None:
    prompts = [prompt("b"), prompt("a"), prompt("c")]
    groups = groups_of(prompts, [answer(request) for request in requests_of(prompts)], 2)
    assert [group.prompt for group in groups] == prompts
    assert [[s.text for s in group.samples] for group in groups] == [["b/0", "b/1"], ["a/0", "a/1"], ["c/0", "c/1"]]


def test_a_prompt_that_occurs_twice_in_a_step_gets_other_samples() -> None:
    requests = requests_of([prompt("a"), prompt("b"), prompt("a")])
    assert [(r.prompt_id, r.index) for r in requests] == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 2), ("a", 3)]
    assert len({r.seed for r in requests}) == 6


def test_seeds_depend_on_the_sample_alone_not_on_the_other_prompts() -> None:
    def seeds(prompts: list[Prompt], step: int) -> dict[tuple[str, int], int]:
        return {(r.prompt_id, r.index): r.seed for r in requests_of(prompts, step)}

    together = seeds([prompt("a"), prompt("b")], 5)
    assert together == seeds([prompt("b")], 5) | seeds([prompt("a")], 5)
    assert not set(together.values()) & set(seeds([prompt("a"), prompt("b")], 6).values())


@pytest.mark.parametrize("keep", [slice(0, 3), slice(None, None, -1)])
def test_samples_that_were_not_asked_for_are_refused(keep: slice) -> None:
    prompts = [prompt("a"), prompt("b")]
    with pytest.raises(EngineError):
        groups_of(prompts, [answer(request) for request in requests_of(prompts)][keep], 2)
