"""Prompts to requests, samples to groups, and requests to engines."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.errors import EngineError
from megagrpo.rollout.requests import assign, groups_of, requests_for
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


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 5))
def test_every_request_has_one_engine_prompts_stay_together_and_loads_are_even(names: list[int], engines: int) -> None:
    requests = [Request(str(name), i, (name,), i, SAMPLING) for i, name in enumerate(names)]
    of_engine = assign(requests, engines)
    assert len(of_engine) == engines
    assert sorted(i for indices in of_engine for i in indices) == list(range(len(names)))
    assert all(indices == sorted(indices) for indices in of_engine)
    for name in set(names):
        assert sum(any(names[i] == name for i in indices) for indices in of_engine) == 1
    loads = [len(indices) for indices in of_engine]
    if len({names.count(name) for name in names}) == 1 and len(set(names)) % engines == 0:
        assert len(set(loads)) == 1, "equal groups are dealt out evenly"
    assert max(loads) - min(loads) <= max((names.count(name) for name in names), default=0)
