"""Weights into the embedded engine: the order of calls, digests of what arrived, and what is sampled afterwards."""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from megagrpo.errors import EngineError
from megagrpo.recipe.schema.run import Pause
from megagrpo.rollout.engine import Engine, EngineState
from megagrpo.rollout.transformers_engine import TransformersEngine, load_model
from megagrpo.types import Request, Sample, SamplingParams
from megagrpo.weights.blocks import quantized_shapes
from megagrpo.weights.families import read_architecture
from tests.distributed.step_case import in_checkpoint
from tests.rollout_engines import generate, model_directory, receive, request, start_engine
from tests.toy_engine import ToyEngine
from tests.unit.test_weights_blocks import stands_for

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
ASKED = [request([5, 6, 7, 8], GREEDY)]


@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3_moe", "deepseek_v3"])
def test_received_weights_are_digested_and_then_sampled_from(family: str, tmp_path: Path) -> None:
    old, new = model_directory(family, tmp_path / "old", seed=0), model_directory(family, tmp_path / "new", seed=1)
    engine: Engine = start_engine(old)
    (before,) = generate(engine, ASKED)

    sender, tensors = receive(engine, new)
    (buckets,) = engine.bucket_digests("model.norm.weight", [0])
    of_sender = sender.bucket_digests(tensors, "model.norm.weight", frozenset([0]))
    assert of_sender
    assert buckets == {"sent": {}, "arrived": of_sender}
    sender.close()

    (after,) = generate(engine, ASKED)
    model = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    expected = model.generate(torch.tensor([ASKED[0].tokens]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert after.tokens.tolist() == expected[0, 4:].tolist()
    assert after.tokens.tolist() != before.tokens.tolist()
    assert (after.versions == 3).all()


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe"])
def test_a_quantised_engine_computes_with_what_the_blocks_stand_for(family: str, tmp_path: Path) -> None:
    """Matrices that transformers fuses, and stacked experts."""
    old, new = model_directory(family, tmp_path / "old", seed=0), model_directory(family, tmp_path / "new", seed=1)
    engine = start_engine(old, "rollout.quantization=fp8")
    receive(engine, new)
    arch, of_new = read_architecture(new), load_model(str(new), "cpu", "float32")
    found, wanted = (in_checkpoint(arch)(dict(model.named_parameters())) for model in (engine._model, of_new))
    quantized = quantized_shapes(arch)
    for name, values in wanted.items():
        if name in quantized:
            values = stands_for(torch.from_numpy(values)).numpy()
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    assert 0 < len(quantized) < len(wanted)
    (sample,) = generate(engine, ASKED)
    assert (sample.versions == 3).all()


def test_nothing_is_generated_from_open_or_unverified_weights_nor_after_closing(tmp_path: Path) -> None:
    engine = start_engine(model_directory("qwen2", tmp_path))
    engine.begin_update(1)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(generate, engine, ASKED)
        with pytest.raises(EngineError, match="connect first"):
            engine.receive(1)
        engine.end_update(1)
        assert not wait([future], timeout=0.2).done
        engine.commit_update(1)
        (sample,) = future.result(60)
    assert (sample.versions == 1).all()
    engine.keep_weights(2)
    (kept,) = generate(engine, ASKED)
    assert (kept.tokens.tolist(), set(kept.versions)) == (sample.tokens.tolist(), {2})
    engine.lose_weights()
    with pytest.raises(EngineError, match="verified weights"):
        engine.keep_weights(3)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        generate(engine, ASKED)


LONG = SamplingParams(max_tokens=60, temperature=1.3)


def begun(engine: TransformersEngine, asked: list[Request], pool: ThreadPoolExecutor) -> Future[list[Sample]]:
    """The samples to come, once each has some tokens."""
    before_step, steps = engine._before_step, []

    def counted() -> int | None:
        steps.append(None)
        return before_step()

    engine._before_step = counted  # type: ignore[method-assign]
    future = pool.submit(generate, engine, asked)
    while len(steps) < 5:
        time.sleep(0.001)
    return future


@pytest.mark.parametrize("pause", ["retract", "in_place", "finish"])
def test_responses_that_run_when_an_update_begins_go_on_as_the_recipe_says(pause: Pause, tmp_path: Path) -> None:
    engine = start_engine(model_directory("qwen2", tmp_path, eos_token_id=None), f"weights.pause={pause}")
    asked = [request([5, 6, 7], LONG, seed=seed, index=seed) for seed in range(4)]
    whole = generate(engine, asked)
    with ThreadPoolExecutor(1) as pool:
        future = begun(engine, asked, pool)
        engine.begin_update(1)  # with the same weights
        done = future.done()
        engine.end_update(1)
        engine.commit_update(1)
        samples = future.result(60)
    mixed = [len(set(sample.versions.tolist())) == 2 for sample in samples]
    assert all(mixed) != (pause == "finish") or done, "the update came too late for the test"
    for one, sample in zip(whole, samples, strict=True):
        assert sample.tokens.tolist() == one.tokens.tolist()
        assert (np.diff(sample.versions) >= 0).all()
        np.testing.assert_allclose(sample.logprobs, one.logprobs, atol=1e-5)


def test_what_is_given_back_goes_on_where_it_ended_and_leaves_the_others_alone(tmp_path: Path) -> None:
    engine = start_engine(model_directory("qwen2", tmp_path, eos_token_id=None))
    asked = [request([5, 6, 7], LONG, seed=seed, index=seed) for seed in range(4)]
    whole = generate(engine, asked)
    with ThreadPoolExecutor(1) as pool:
        future = begun(engine, asked, pool)
        engine.give_back([1, 3, 99])
        samples = future.result(60)
    ends = [sample.finish for sample in samples]
    assert ends[0] == ends[2] == "length"
    again = [replace(one, begun=sample) for one, sample in zip(asked, samples, strict=True) if sample.finish == "abort"]
    samples = [sample for sample in samples if sample.finish != "abort"] + generate(engine, again)
    samples.sort(key=lambda sample: sample.index)
    assert [sample.tokens.tolist() for sample in samples] == [one.tokens.tolist() for one in whole]
    assert [(sample.finish, sample.text) for sample in samples] == [(one.finish, one.text) for one in whole]


def test_what_a_lost_engine_has_said_of_its_requests_goes_on_on_another_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    path = model_directory("qwen2", tmp_path, eos_token_id=None)
    engine, other = start_engine(path, "rollout.requests_at_once=3"), start_engine(path)
    asked = [request([5, 6, 7], LONG, seed=seed, index=seed) for seed in range(4)]
    with ThreadPoolExecutor(1) as pool:
        future = begun(engine, asked, pool)
        engine.begin_update(1)  # what the batch has is kept within the engine
        said = engine.so_far().samples(dict(enumerate(asked)))
        engine.end_update(1)
        engine.commit_update(1)
        whole = future.result(60)
    assert not engine.so_far().samples({}), "of requests that are unknown"
    assert sorted(said) == [0, 1, 2], "the fourth is in the next batch"
    samples = generate(other, [replace(one, begun=said.get(ticket)) for ticket, one in enumerate(asked)])
    for one, sample in zip(whole, samples, strict=True):
        assert sample.tokens.tolist() == one.tokens.tolist()
        assert (sample.finish, sample.text) == (one.finish, one.text)
        np.testing.assert_allclose(sample.logprobs, one.logprobs, atol=1e-5)
    for ticket, sample in said.items():
        assert 0 < len(sample.tokens) < LONG.max_tokens
        assert sample.logprobs.tolist() == whole[ticket].logprobs[: len(sample.tokens)].tolist()
        assert not sample.versions.any()


def test_the_last_token_of_a_response_that_has_ended_is_sampled_again_by_the_engine_that_goes_on(
    tmp_path: Path,
) -> None:
    path = model_directory("qwen2", tmp_path)
    engine = start_engine(path)
    sampling = SamplingParams(max_tokens=16, temperature=1.3, stop_tokens=tuple(range(8, 20)))
    asked = [request([5, 6, 7], sampling, seed=seed, index=seed) for seed in range(12)]
    whole = generate(engine, asked)
    said = engine.so_far().samples(dict(enumerate(asked)))  # as if its answers had not been heard
    assert {sample.finish for sample in whole} == {"stop", "length"}
    lengths = [len(sample.tokens) - 1 for sample in whole]
    assert [len(said[ticket].tokens) if ticket in said else 0 for ticket in range(12)] == lengths
    again = generate(engine, [replace(one, begun=said.get(ticket)) for ticket, one in enumerate(asked)])
    assert [sample.tokens.tolist() for sample in again] == [sample.tokens.tolist() for sample in whole]
    assert [sample.finish for sample in again] == [sample.finish for sample in whole]


CALLS = st.sampled_from(
    [(name, number) for name in ("begin_update", "end_update", "commit_update", "keep_weights") for number in (1, 2)]
    + [(name,) for name in ("receive", "begin", "lose_weights", "close")]
)


@given(st.lists(CALLS, max_size=9))
def test_calls_out_of_turn_are_refused_and_change_nothing(calls: list[tuple[Any, ...]]) -> None:
    engine = ToyEngine("engine 0")
    states, version, incoming = EngineState, 0, None
    state = states.SERVING
    for name, *numbers in calls:
        number = numbers[0] if numbers else 0
        in_turn, after = {
            # An update that failed is begun again, and its version never counts.
            "begin_update": (state != states.CLOSED and number >= version, (states.RECEIVING, version, number)),
            "end_update": (state == states.RECEIVING and number == incoming, (states.UNVERIFIED, version, incoming)),
            "commit_update": (state == states.UNVERIFIED and number == incoming, (states.SERVING, number, None)),
            "keep_weights": (state == states.SERVING and number >= version, (states.SERVING, number, None)),
            "receive": (state == states.RECEIVING, (state, version, incoming)),
            "begin": (state != states.CLOSED, (state, version, incoming)),
            "lose_weights": (state != states.CLOSED, (states.UNVERIFIED, version, None)),
            "close": (True, (states.CLOSED, version, None)),
        }[name]
        given = {"receive": (1,), "begin": ({}, print)}.get(name, tuple(numbers))
        with nullcontext() if in_turn else pytest.raises(EngineError, match="engine 0"):
            getattr(engine, name)(*given)
        state, version, incoming = after if in_turn else (state, version, incoming)
        assert (engine.state, engine.version, engine.incoming) == (state, version, incoming)
