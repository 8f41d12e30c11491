"""Weights into a served model while it samples: nothing is sampled meanwhile, and every token knows its weights."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from megagrpo.recipe.schema.run import Pause
from megagrpo.rollout import client
from megagrpo.rollout.vllm.client import TOKENS_PER_PART
from megagrpo.types import Sample, SamplingParams
from tests.engines.policy import WAIT_SECONDS, check_logprobs, difference
from tests.engines.servers import AT_ONCE, PROMPT, Served, wait_until
from tests.rollout_engines import generate, request

OTHERS = [request(PROMPT, SamplingParams(60), seed=seed, index=AT_ONCE + seed) for seed in range(24)]


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_an_update_in_a_running_generation_is_exact_for_each_token(
    pause: Pause, served: Served, pool: ThreadPoolExecutor
) -> None:
    """In place, tokens after the update use keys and values of the old weights; those of later requests do not."""
    new = served.weights(1)
    with served.trained(f"weights.pause={pause}") as (engine, trainer):
        endless = served.endless(engine)
        asked = [request(PROMPT, endless, seed=i, index=i) for i in range(AT_ONCE)]
        future = pool.submit(generate, engine, [*asked, *OTHERS])
        served.wait_for_requests(AT_ONCE)
        served.wait_for_batches(5)
        engine.begin_update(1)
        before = served.batches()
        time.sleep(0.3)
        assert served.batches() == before
        assert not future.done()
        later = pool.submit(generate, engine, [request(PROMPT, SamplingParams(3))], 100)
        trainer.send(1, new)
        time.sleep(0.1)
        assert served.batches() == before
        assert not later.done()
        engine.commit_update(1)
        served.wait_for_batches(5)
        engine.give_back(range(AT_ONCE))  # the others begin only now
        samples = future.result(WAIT_SECONDS)
        (sample,) = later.result(WAIT_SECONDS)
    assert (sample.versions == 1).all()
    for one, sample in zip(asked, samples, strict=False):
        assert sample.versions.tolist() == sorted(sample.versions.tolist())
        assert set(sample.versions.tolist()) == {0, 1}
        assert difference(served.directory, one, sample)[sample.versions == 0].max() < 1e-5
        after = difference(new, one, sample)[sample.versions == 1].max()
        assert after < 1e-5 if pause == "retract" else after > 1e-3
    assert all((sample.versions == 1).all() for sample in samples[AT_ONCE:])
    check_logprobs(samples[AT_ONCE:], OTHERS, {1: new})  # by far others with the prompt's old keys and values


def test_a_sample_that_waited_in_the_server_during_an_update_in_place_is_wholly_of_the_new_weights(
    served: Served, pool: ThreadPoolExecutor
) -> None:
    new, one = served.weights(1), request((*range(5, 45),) * 8, SamplingParams(max_tokens=8), seed=3)
    with served.trained("weights.pause=in_place") as (engine, trainer):
        generate(engine, [one])  # the server keeps the prompt's keys and values
        served.post(*served.paused)  # what the engine now sends waits there
        future = pool.submit(generate, engine, [one])
        wait_until(lambda: engine._client.run(engine._gate.count()) == 1)
        time.sleep(0.3)  # it is on the way to the server, which does not count it before it goes on
        trainer.sync(1, new)
        (sample,) = future.result(WAIT_SECONDS)
    assert (sample.versions == 1).all()
    check_logprobs([sample], [one], {1: new})


def test_tokens_so_far_of_requests_that_run_have_their_versions_and_logprobs_and_go_on_on_another_engine(
    served: Served, pool: ThreadPoolExecutor
) -> None:
    new = served.weights(1)
    with served.trained() as (engine, trainer):
        endless = served.endless(engine)
        asked = [request(PROMPT, endless, seed=i, index=i) for i in range(4)]
        future = pool.submit(generate, engine, asked)

        def told(tokens: int, version: int) -> dict[int, Sample]:
            """Waits until all requests have so many tokens, with some of this version; returns the engine's report."""
            found: dict[int, Sample] = {}

            def enough() -> bool:
                found.update(engine.so_far().samples(dict(enumerate(asked))))
                of_all = found.values()
                return len(found) == 4 and all(len(s.tokens) > tokens and s.versions[-1] == version for s in of_all)

            wait_until(enough)
            return found

        told(TOKENS_PER_PART, 0)
        trainer.sync(1, new)
        begun = told(2 * TOKENS_PER_PART, 1)
        engine.give_back(range(4))
        given_back = future.result(WAIT_SECONDS)
        assert not engine.so_far().tickets.size
        again = [
            replace(one, begun=begun[i], sampling=replace(endless, max_tokens=len(begun[i].tokens) + 20))
            for i, one in enumerate(asked)
        ]
        resumed = generate(engine, again, len(asked))
    for i, whole in [*enumerate(given_back), *enumerate(resumed)]:
        count = len(begun[i].tokens)
        assert begun[i].tokens.tolist() == whole.tokens[:count].tolist()
        assert begun[i].logprobs.tolist() == whole.logprobs[:count].tolist()
        assert begun[i].versions.tolist() == whole.versions[:count].tolist()
    for one, goes_on in zip(again, resumed, strict=True):
        assert set(goes_on.versions.tolist()) == {0, 1}
        assert len(goes_on.tokens) == one.sampling.max_tokens
        assert difference(new, one, goes_on)[-20:].max() < 1e-5
        assert not endless.temperature or goes_on.tokens[-20:].tolist() != goes_on.tokens[:20].tolist()


def test_requests_are_finished_before_an_update_that_waits_for_them(served: Served, pool: ThreadPoolExecutor) -> None:
    asked = [request(PROMPT, SamplingParams(60), seed=seed, index=seed) for seed in range(AT_ONCE)]
    with served.trained("weights.pause=finish") as (engine, trainer):
        served.post(*served.paused)  # none ends before the update begins
        future = pool.submit(generate, engine, asked)
        wait_until(lambda: engine._client.run(engine._gate.count()) == AT_ONCE)
        update = pool.submit(trainer.sync, 1, served.weights(1))
        wait_until(lambda: engine._gate.held)
        served.post(served.continued)
        assert all((sample.versions == 0).all() for sample in future.result(WAIT_SECONDS))
        update.result(WAIT_SECONDS)


def test_what_is_given_back_while_an_update_in_place_is_open_ends_at_the_latest_with_it(
    served: Served, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ABORT_SECONDS", 0.4)
    monkeypatch.setattr(client, "ABORT_AGAIN_SECONDS", 0.2)
    with served.trained("weights.pause=in_place") as (engine, trainer):
        endless = served.endless(engine)
        future = pool.submit(generate, engine, [request(PROMPT, endless, seed=i, index=i) for i in range(4)])
        served.wait_for_requests(4)
        served.wait_for_batches(3)
        engine.begin_update(1)
        engine.give_back(range(4))
        if served.ends_while_paused:
            future.result(WAIT_SECONDS)
        else:
            time.sleep(1.0)
        trainer.send(1, served.directory)
        monkeypatch.setattr(client, "ABORT_SECONDS", WAIT_SECONDS)
        engine.commit_update(1)
        samples = future.result(WAIT_SECONDS)
        assert all(0 < len(sample.tokens) < endless.max_tokens and sample.finish == "abort" for sample in samples)
        assert generate(engine, OTHERS[:1], 4)


def test_a_server_that_waits_for_weights_takes_no_core(served: Served) -> None:
    processes = served.processes
    with served.trained() as (engine, trainer):
        engine.begin_update(1)
        used = -sum(sum(process.cpu_times()[:2]) for process in processes)
        time.sleep(1.0)
        used += sum(sum(process.cpu_times()[:2]) for process in processes)
        trainer.send(1, served.directory)
        engine.commit_update(1)
    assert used < 0.3


def test_an_update_that_was_left_open_on_a_server_is_ended_by_the_next_engine(served: Served) -> None:
    new = served.weights(1)
    with served.borrowed() as left:
        left.begin_update(1)
        left.close()  # as if its process had died: the server's update stays open
        with served.trained() as (engine, trainer):
            trainer.sync(2, new)
            (sample,) = generate(engine, OTHERS[:1])
    assert (sample.versions == 2).all()
    check_logprobs([sample], OTHERS[:1], {2: new})


def test_an_external_server_is_not_sampled_from_before_it_has_our_weights(
    served: Served, pool: ThreadPoolExecutor
) -> None:
    with served.trained() as (engine, _):
        engine.release_memory()  # not a server that can: nothing happens
        assert generate(engine, OTHERS[:1])
    with served.borrowed() as engine:
        future = pool.submit(generate, engine, OTHERS[:1])
        time.sleep(0.3)
        assert not future.done()
        engine.give_back([0])
        assert future.result(WAIT_SECONDS)[0].finish == "abort"
