"""Weights into a served model while it samples: nothing is sampled meanwhile, and every token knows its weights."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import psutil
import pytest

from megagrpo.recipe.schema.run import Pause
from megagrpo.rollout import client
from megagrpo.rollout.server import members
from megagrpo.rollout.sglang.client import TOKENS_PER_PART
from megagrpo.types import Sample, SamplingParams
from tests.rollout_engines import generate, request, routes_of
from tests.sglang.servers import AT_ONCE, ENDLESS, ENDLESS_PROMPT, WAIT_SECONDS, Served, difference

PROMPT = (5, 6, 9, 11)
OTHERS = [request(PROMPT, SamplingParams(60), seed=seed, index=AT_ONCE + seed) for seed in range(24)]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_samples_that_begin_after_an_update_in_place_are_wholly_of_the_new_weights(
    tied_server: Served, pool: ThreadPoolExecutor
) -> None:
    new = tied_server.weights(1)
    running = [request(ENDLESS_PROMPT, ENDLESS, index=i) for i in range(AT_ONCE)]
    with tied_server.trained("weights.pause=in_place") as (engine, trainer):
        future = pool.submit(generate, engine, [*running, *OTHERS])
        tied_server.wait_for_requests(AT_ONCE)
        tied_server.wait_for_batches(5)
        trainer.sync(1, new)
        tied_server.wait_for_batches(5)
        engine.give_back(range(AT_ONCE))  # the others begin only now
        samples = future.result(WAIT_SECONDS)
    mixed = [sample for sample in samples if len(set(sample.versions)) == 2]
    assert len(mixed) == AT_ONCE
    for one, sample in zip(OTHERS, samples[AT_ONCE:], strict=True):
        assert (sample.versions == 1).all()
        assert difference(new, one, sample).max() < 1e-5  # by far more with the prompt's old keys and values


def test_a_sample_that_waited_in_the_server_during_an_update_in_place_is_wholly_of_the_new_weights(
    tied_server: Served, pool: ThreadPoolExecutor
) -> None:
    new, one = tied_server.weights(1), request((*range(5, 45),), SamplingParams(max_tokens=8), seed=3)
    with tied_server.trained("weights.pause=in_place") as (engine, trainer):
        generate(engine, [one])  # the server keeps the prompt's keys and values
        tied_server.post("/pause_generation", {"mode": "in_place"})  # what the engine now sends waits there
        future = pool.submit(generate, engine, [one])
        wait_until(lambda: engine._client.run(engine._gate.count()) == 1)
        time.sleep(0.3)  # it is on the way to the server, which does not count it before it goes on
        trainer.sync(1, new)
        (sample,) = future.result(WAIT_SECONDS)
    assert (sample.versions == 1).all()
    assert difference(new, one, sample).max() < 1e-5


def test_what_is_given_back_goes_on_where_it_ended(tied_server: Served, pool: ThreadPoolExecutor) -> None:
    """On any engine: here on the same one, among other requests. They end by themselves, the last after hundreds of
    tokens."""
    asked = [request(PROMPT, SamplingParams(2000), seed=seed, index=seed) for seed in range(AT_ONCE)]
    with tied_server.trained() as (engine, _):
        future = pool.submit(generate, engine, asked)
        tied_server.wait_for_batches(5)
        engine.give_back(range(AT_ONCE))
        begun = future.result(WAIT_SECONDS)
        assert any(len(sample.tokens) > 0 and sample.finish == "abort" for sample in begun)
        asked = [
            replace(one, sampling=SamplingParams(len(part.tokens) + 20)) for one, part in zip(asked, begun, strict=True)
        ]
        again = [
            replace(one, begun=part) if part.finish == "abort" else one for one, part in zip(asked, begun, strict=True)
        ]
        for one, sample in zip(generate(engine, asked), generate(engine, again), strict=True):
            assert sample.tokens.tolist() == one.tokens.tolist()
            assert (sample.finish, sample.text) == (one.finish, one.text)
            np.testing.assert_allclose(sample.logprobs, one.logprobs, atol=1e-4)


def test_tokens_so_far_of_requests_that_run_have_their_versions_and_logprobs_and_go_on_on_another_engine(
    tied_server: Served, pool: ThreadPoolExecutor
) -> None:
    new, part = tied_server.weights(1), TOKENS_PER_PART
    asked = [request(ENDLESS_PROMPT, ENDLESS, index=i) for i in range(4)]
    with tied_server.trained() as (engine, trainer):
        future = pool.submit(generate, engine, asked)

        def told(tokens: int, version: int) -> dict[int, Sample]:
            """Waits until all requests have so many tokens, with some of this version; returns the engine's report."""
            deadline = time.monotonic() + WAIT_SECONDS
            while True:
                found = engine.so_far().samples(dict(enumerate(asked)))
                if len(found) == 4 and all(
                    len(s.tokens) > tokens and s.versions[-1] == version for s in found.values()
                ):
                    return found
                assert time.monotonic() < deadline, found
                time.sleep(0.01)

        told(part, 0)
        trainer.sync(1, new)
        begun = told(2 * part, 1)
        engine.give_back(range(4))
        given_back = future.result(WAIT_SECONDS)
        assert not engine.so_far().tickets.size
        more = [SamplingParams(len(begun[index].tokens) + 5, temperature=0.0) for index in range(4)]
        again = [replace(one, begun=begun[index], sampling=more[index]) for index, one in enumerate(asked)]
        for index, goes_on in enumerate(generate(engine, again, len(asked))):
            for whole in (given_back[index], goes_on):
                count = len(begun[index].tokens)
                assert begun[index].tokens.tolist() == whole.tokens[:count].tolist()
                assert begun[index].logprobs.tolist() == whole.logprobs[:count].tolist()
                assert begun[index].versions.tolist() == whole.versions[:count].tolist()
            assert set(goes_on.versions.tolist()) == {0, 1}
            assert (goes_on.tokens[:count] == given_back[index].tokens[:count]).all()
            assert len(goes_on.tokens) == count + 5


def test_requests_are_finished_before_an_update_that_waits_for_them(
    tied_server: Served, pool: ThreadPoolExecutor
) -> None:
    asked = [request(PROMPT, SamplingParams(60), seed=seed, index=seed) for seed in range(AT_ONCE)]
    with tied_server.trained("weights.pause=finish") as (engine, trainer):
        tied_server.post("/pause_generation", {"mode": "in_place"})  # none ends before the update begins
        future = pool.submit(generate, engine, asked)
        wait_until(lambda: engine._client.run(engine._gate.count()) == AT_ONCE)
        update = pool.submit(trainer.sync, 1, tied_server.weights(1))
        wait_until(lambda: engine._gate.held)
        tied_server.post("/continue_generation", {})
        assert all((sample.versions == 0).all() for sample in future.result(WAIT_SECONDS))
        update.result(WAIT_SECONDS)


def test_what_is_given_back_while_an_update_in_place_is_open_ends_with_it(
    tied_server: Served, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ABORT_SECONDS", 0.4)
    monkeypatch.setattr(client, "ABORT_AGAIN_SECONDS", 0.2)
    asked = [request(ENDLESS_PROMPT, ENDLESS, index=i) for i in range(4)]
    with tied_server.trained("weights.pause=in_place") as (engine, trainer):
        future = pool.submit(generate, engine, asked)
        tied_server.wait_for_requests(4)
        tied_server.wait_for_batches(3)
        engine.begin_update(1)
        engine.give_back(range(4))
        time.sleep(1.5)
        trainer.send(1, tied_server.directory)
        monkeypatch.setattr(client, "ABORT_SECONDS", WAIT_SECONDS)
        engine.commit_update(1)
        samples = future.result(WAIT_SECONDS)
        assert all(0 < len(sample.tokens) < ENDLESS.max_tokens and sample.finish == "abort" for sample in samples)
        assert generate(engine, OTHERS[:1], 4)


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_no_token_is_sampled_while_an_update_is_open(
    pause: Pause, tied_server: Served, pool: ThreadPoolExecutor
) -> None:
    asked = [request(ENDLESS_PROMPT, ENDLESS, index=i) for i in range(AT_ONCE)]
    with tied_server.trained(f"weights.pause={pause}") as (engine, trainer):
        future = pool.submit(generate, engine, asked)
        tied_server.wait_for_requests(AT_ONCE)
        tied_server.wait_for_batches(5)
        engine.begin_update(1)
        before = tied_server.batches()  # a batch is logged before the next command is read
        time.sleep(0.3)
        assert tied_server.batches() == before
        assert not future.done()
        later = pool.submit(generate, engine, [request(PROMPT, SamplingParams(3))], AT_ONCE)
        trainer.send(1, tied_server.directory)
        time.sleep(0.1)
        assert tied_server.batches() == before
        assert not later.done()
        engine.commit_update(1)
        tied_server.wait_for_batches(1)
        engine.give_back(range(AT_ONCE))
        future.result(WAIT_SECONDS)
        (sample,) = later.result(WAIT_SECONDS)
        assert (sample.versions == 1).all()


def test_a_server_that_waits_for_weights_takes_no_core(tied_server: Served) -> None:
    processes = [psutil.Process(process) for process in members(tied_server.server._process.pid)]
    with tied_server.trained() as (engine, trainer):
        engine.begin_update(1)
        used = -sum(sum(process.cpu_times()[:2]) for process in processes)
        time.sleep(1.0)
        used += sum(sum(process.cpu_times()[:2]) for process in processes)
        trainer.send(1, tied_server.directory)
        engine.commit_update(1)
    assert used < 0.3


def test_an_update_that_was_left_open_on_a_server_is_ended_by_the_next_engine(tied_server: Served) -> None:
    new = tied_server.weights(1)
    with tied_server.borrowed() as left:
        left.begin_update(1)
        left.close()  # as if its process had died: the server's update stays open
        with tied_server.trained() as (engine, trainer):
            trainer.sync(2, new)
            (sample,) = generate(engine, OTHERS[:1])
    assert (sample.versions == 2).all()
    assert difference(new, OTHERS[0], sample).max() < 1e-5


def test_an_external_server_is_not_sampled_from_before_it_has_our_weights(
    tied_server: Served, pool: ThreadPoolExecutor
) -> None:
    with tied_server.trained() as (engine, _):
        engine.release_memory()  # not a server that can: nothing happens
        assert generate(engine, OTHERS[:1])
    with tied_server.borrowed() as engine:
        future = pool.submit(generate, engine, OTHERS[:1])
        time.sleep(0.3)
        assert not future.done()
        engine.give_back([0])
        assert future.result(WAIT_SECONDS)[0].finish == "abort"


@pytest.mark.long
@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_routes_of_responses_that_an_update_interrupts_are_whole(
    split_server: Served, pool: ThreadPoolExecutor, pause: str
) -> None:
    asked = [request([20, 21, 22], SamplingParams(300, routes=True), seed=seed, index=seed) for seed in range(8)]
    with split_server.trained(f"weights.pause={pause}") as (engine, trainer):
        future = pool.submit(generate, engine, asked)
        split_server.wait_for_batches(8)
        trainer.sync(1, split_server.directory)  # the same weights
        samples = future.result(WAIT_SECONDS)
    assert any(len(set(sample.versions.tolist())) == 2 for sample in samples)
    for one, sample in zip(asked, samples, strict=True):
        assert sample.routes is not None
        expected = routes_of(split_server.directory, [*one.tokens, *sample.tokens.tolist()])
        assert np.array_equal(sample.routes.experts, expected)
