"""Routes that the embedded engine returns, against one forward pass of the model's own routers over whole sequences."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megagrpo.checkpoint.groups import read_groups, write_groups
from megagrpo.errors import EngineError
from megagrpo.recipe.schema.rollout import Pause
from megagrpo.rollout.engine import SoFar
from megagrpo.rollout.pool import Order, Pool
from megagrpo.rollout.requests import after_begun, evaluation_requests, training_requests
from megagrpo.rollout.transformers_engine import load_model
from megagrpo.routes import Routes, digest_of
from megagrpo.types import Group, Prompt, Request, Sample, SamplingParams
from tests.rollout_engines import generate, model_directory, request, routes_of, start_engine
from tests.tiny_models import MIXTURES
from tests.tiny_run import recipe_with
from tests.unit.test_rollout_updates import begun

PROMPTS = [[5], [9, 8, 3, 1, 2], [4, 4, 4], list(range(20, 37))]
SAMPLING = SamplingParams(max_tokens=24, temperature=1.3, stop_tokens=tuple(range(8, 20)), routes=True)
LONG = SamplingParams(max_tokens=60, temperature=1.3, routes=True)


def many_requests(sampling: SamplingParams = SAMPLING) -> list[Request]:
    return [
        request(prompt, sampling, seed=1000 * p + s, prompt_id=str(p), index=s)
        for p, prompt in enumerate(PROMPTS)
        for s in range(4)
    ]


def assert_routes(directory: Path, asked: Request, sample: Sample) -> None:
    expected = routes_of(directory, [*asked.tokens, *sample.tokens.tolist()])
    assert sample.routes is not None
    assert np.array_equal(sample.routes.experts, expected)
    assert sample.routes.experts.dtype == np.uint8
    assert sample.routes.digest == digest_of(expected)


@pytest.mark.parametrize("family", MIXTURES)
def test_routes_are_those_of_one_pass_over_the_whole_sequence(family: str, tmp_path: Path) -> None:
    directory = model_directory(family, tmp_path / family)
    engine = start_engine(directory)
    requests = many_requests()[:: 1 if family == "qwen3_moe" else 3]
    samples = generate(engine, requests)
    lengths = [len(sample.tokens) for sample in samples]
    assert min(lengths) < 6 < max(lengths), "rows leave the batch"
    for asked, sample in zip(requests, samples, strict=True):
        assert_routes(directory, asked, sample)


@torch.no_grad()
def test_routes_are_the_likeliest_experts_of_the_routers_logits(tmp_path: Path) -> None:
    directory = model_directory("qwen3_moe", tmp_path)
    requests = many_requests()[-3:]
    model = load_model(str(directory), "cpu", "float32")
    for asked, sample in zip(requests, generate(start_engine(directory), requests), strict=True):
        read = torch.tensor([[*asked.tokens, *sample.tokens.tolist()[:-1]]])
        logits = torch.stack(model(read, output_router_logits=True).router_logits, 1)
        assert sample.routes is not None
        assert np.array_equal(sample.routes.experts, logits.topk(2).indices.numpy())


def test_no_routes_come_unasked_or_against_the_recipe_or_from_a_dense_model(tmp_path: Path) -> None:
    mixture, dense = model_directory("qwen3_moe", tmp_path / "a"), model_directory("qwen2", tmp_path / "b")
    unasked = generate(start_engine(mixture), [request([5, 6], replace(SAMPLING, routes=False))])
    own = generate(start_engine(mixture, "algorithm.routing=own"), [request([5, 6], SAMPLING)])
    of_dense = generate(start_engine(dense), [request([5], SAMPLING)])
    assert [one.routes for one in [*unasked, *own, *of_dense]] == [None] * 3


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_routes_of_responses_that_an_update_interrupts_are_whole(pause: Pause, tmp_path: Path) -> None:
    directory = model_directory("qwen3_moe", tmp_path, eos_token_id=None)
    engine = start_engine(directory, f"weights.pause={pause}")
    asked = [request([5, 6, 7], LONG, seed=seed, index=seed) for seed in range(4)]
    with ThreadPoolExecutor(1) as pool:
        future = begun(engine, asked, pool)
        engine.begin_update(1)  # with the same weights
        engine.end_update(1)
        engine.commit_update(1)
        samples = future.result(60)
    assert any(len(set(sample.versions.tolist())) == 2 for sample in samples)
    for one, sample in zip(asked, samples, strict=True):
        assert_routes(directory, one, sample)


@pytest.mark.parametrize("kept", [True, False], ids=["with its routes", "without"])
def test_a_response_that_goes_on_keeps_its_rows_and_gets_the_others(kept: bool, tmp_path: Path) -> None:
    directory = model_directory("qwen3_moe", tmp_path / "a", eos_token_id=None)
    other = model_directory("qwen3_moe", tmp_path / "b", eos_token_id=None, seed=1)
    engine = start_engine(directory)
    asked = [request(prompt, LONG, seed=index, index=index) for index, prompt in enumerate(PROMPTS)]
    with ThreadPoolExecutor(1) as pool:
        future = begun(engine, asked, pool)
        engine.give_back(range(4))
        cut = future.result(60)
    for one, sample in zip(asked, cut, strict=True):
        assert 0 < len(sample.tokens) < 60
        assert_routes(directory, one, sample)
    again = [
        replace(one, begun=sample if kept else replace(sample, routes=None))
        for one, sample in zip(asked, cut, strict=True)
    ]
    for one, before, sample in zip(asked, cut, generate(start_engine(other), again), strict=True):
        tokens = [*one.tokens, *sample.tokens.tolist()]
        old = len(one.tokens) + len(before.tokens) - 1 if kept else 0
        expected = np.concatenate([routes_of(directory, tokens)[:old], routes_of(other, tokens)[old:]])
        assert sample.routes is not None
        assert np.array_equal(sample.routes.experts, expected)


def rows(tokens: list[int], by: int) -> Routes:
    """Makes a toy engine's: the row of a token names it, its place and the pass that read it."""
    return Routes.of(np.array([[token, place, by] for place, token in enumerate(tokens[:-1])], int).reshape(-1, 1, 3))


EVENTS = st.sampled_from(["gives back", "gives back without routes", "is lost", "is saved"])


@given(st.lists(st.tuples(EVENTS, st.integers(0, 4)), max_size=8), st.integers(1, 3))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_of_a_response_are_of_its_tokens_however_often_it_is_cut_lost_and_saved(
    tmp_path: Path, events: list[tuple[str, int]], prompt: int
) -> None:
    first = request([3] * prompt, SamplingParams(1000, routes=True), prompt_id="train:5", index=2)
    pool, order = Pool(None), Order([first], prompt=Prompt("train:5", first.tokens, "", ""))
    passes: list[int] | None = []
    """By row, the pass that it is of. None: some pass has sent none since."""
    for number, (event, tokens) in enumerate([*events, ("ends", 2)]):
        pool.join(engine := f"engine {number}")
        pool.add([order])
        ((ticket, asked),) = pool.hand_out()[engine].items()
        new = np.arange(tokens, dtype=np.int32) + 10 * number
        whole = [*asked.read, *new.tolist()]
        routes = rows(whole, number) if tokens and event != "gives back without routes" else None
        part = Sample("train:5", 2, new, new.astype(np.float32), new, "abort", "", routes=routes)
        sample = after_begun(asked, part)
        if tokens:
            passes = None if routes is None else [*(passes or []), *[number] * (len(whole) - 1 - len(passes or []))]
        if event == "ends":
            break
        pool.withdraw([order])
        if event == "is lost":  # what an engine has said of tokens is without routes
            said = SoFar.of({ticket: sample}).samples({ticket: asked})
            pool.leave(engine)
            pool.put_back([ticket], said)
            passes = None if len(sample.tokens) else passes
            continue
        pool.answered(engine, {ticket: sample})
        pool.leave(engine)
        if event == "is saved" and (begun := order.requests[0].begun) is not None:
            write_groups(tmp_path / "groups", [Group(order.prompt, (begun,))])  # type: ignore[arg-type]
            ((group,), _) = read_groups(tmp_path / "groups", dict)
            order.requests[0] = replace(first, begun=group.samples[0])
    assert (sample.routes is None) == (passes is None)
    if sample.routes is not None and passes is not None:
        assert len(passes) == len(whole) - 1
        assert sample.routes.experts[:, 0].tolist() == [
            [token, place, by] for place, (token, by) in enumerate(zip(whole, passes, strict=False))
        ]


@pytest.mark.parametrize("count", [3, 5])
def test_routes_that_are_not_of_the_tokens_before_are_refused_when_a_response_goes_on(count: int) -> None:
    old = np.array([5, 6, 7], np.int32)
    begun = Sample("train:5", 2, old, old.astype(np.float32), old, "abort", "", routes=rows([3] * (count + 1), 0))
    asked = replace(request([3, 3], LONG, prompt_id="train:5", index=2), begun=begun)
    sample = Sample("train:5", 2, old, old.astype(np.float32), old, "stop", "", routes=rows([*asked.read, 5, 6, 7], 1))
    with pytest.raises(EngineError, match=f"sample 2 of prompt train:5, resumed after 3 tokens\n.*routes of {count}"):
        after_begun(asked, sample)


@pytest.mark.parametrize(("override", "wanted"), [("auto", True), ("replay", True), ("own", False)])
def test_routes_are_asked_for_in_training_alone(override: str, wanted: bool) -> None:
    recipe = recipe_with(
        f"algorithm.routing={override}",
        "algorithm.advantage={name: remax}",
        "eval={sets: {main: {files: [{path: a}]}}}",
    )
    *samples, greedy = training_requests(recipe, Prompt("a", (1,), "", ""), 0)
    assert [one.sampling.routes for one in samples] == [wanted] * len(samples)
    ((evaluated, *_),) = evaluation_requests(recipe, recipe.eval.of_sets()["main"], [Prompt("a", (1,), "", "")])
    assert not greedy.sampling.routes
    assert not evaluated.sampling.routes
