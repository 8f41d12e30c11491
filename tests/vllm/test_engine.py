"""A real vLLM server as an engine: what it samples, what an update does to requests that run, and how it ends."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from megagrpo.errors import EngineError
from megagrpo.rollout import server as server_module
from megagrpo.rollout.server import SHARED_MEMORY, members
from megagrpo.rollout.vllm.client import TOKENS_PER_PART
from megagrpo.rollout.vllm.engine import VllmEngine
from megagrpo.types import Sample, SamplingParams
from tests.rollout_engines import END, generate
from tests.rollout_engines import request as ask
from tests.sglang.servers import AT_ONCE, TOKENS, WAIT_SECONDS, Policy, difference, logits_of
from tests.vllm.servers import Served, wait_until

pytestmark = pytest.mark.needs("vllm")

PROMPTS = ([5, 6, 9, 11], [20, 21, 22, 23, 24, 25, 26], [90])
ENDLESS = SamplingParams(TOKENS, stop_tokens=())
SAMPLINGS = {
    "plain": SamplingParams(24),
    "cold": SamplingParams(24, temperature=0.6),
    "greedy": SamplingParams(24, temperature=0.0),
}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def trained(served: Served) -> Iterator[tuple[VllmEngine, Policy]]:
    with served.trained() as pair:
        yield pair


@pytest.fixture
def engine(trained: tuple[VllmEngine, Policy]) -> VllmEngine:
    return trained[0]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_logprobs_are_those_of_transformers(served: Served, engine: VllmEngine, sampling: SamplingParams) -> None:
    asked = [ask(prompt, sampling, seed=i, index=i) for i, prompt in enumerate(PROMPTS)]
    for one, sample in zip(asked, generate(engine, asked), strict=True):
        assert difference(served.directory, one, sample).max() < 1e-5
        assert (sample.prompt_id, sample.index) == (one.prompt_id, one.index)
        assert sample.versions.tolist() == [0] * len(sample.tokens)
        assert (sample.finish == "stop") == (sample.tokens[-1] == END)
        assert sample.finish == "stop" or len(sample.tokens) == 24
        if not sampling.temperature:
            logits = logits_of(served.directory, one.tokens, sample.tokens.tolist())
            assert logits.argmax(-1).tolist() == sample.tokens.tolist()


def test_a_seed_makes_the_same_sample_alone_and_among_others(engine: VllmEngine) -> None:
    seeds = [1, 2**31 + 1, 2**62 + 2, 2**63 - 1]  # torch's generator on CPUs takes the lower half of a seed
    asked = [ask(PROMPTS[1], SamplingParams(20), seed=seed) for seed in seeds]
    others = [ask(prompt, SamplingParams(20), seed=100 + i) for i, prompt in enumerate(PROMPTS * 4)]
    alone = [generate(engine, [one])[0].tokens.tolist() for one in asked]
    among = [sample.tokens.tolist() for sample in generate(engine, [*others, *asked])[len(others) :]]
    assert among == alone
    assert len({tuple(tokens) for tokens in alone}) == len(seeds)


def test_stop_tokens_end_a_response_are_kept_in_it_and_left_out_of_its_text(engine: VllmEngine) -> None:
    (free,) = generate(engine, [ask(PROMPTS[0], SamplingParams(12), seed=3)])
    stop = int(free.tokens[4])
    first = free.tokens.tolist().index(stop)
    (stopped,) = generate(engine, [ask(PROMPTS[0], SamplingParams(12, stop_tokens=(stop,)), seed=3)])
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert stopped.finish == "stop"
    assert stopped.text == "".join(f"w{token}" for token in free.tokens[:first])
    assert free.finish == "length"
    assert free.text == "".join(f"w{token}" for token in free.tokens)


def test_requests_past_their_time_limit_which_counts_while_they_wait_are_aborted_with_what_they_have(
    served: Served,
) -> None:
    with served.trained("rollout.timeout_seconds=1", "rollout.requests_at_once=1") as (engine, _):
        engine._stops = set()
        asked = [ask(PROMPTS[0], ENDLESS, index=i) for i in range(4)]
        first, *others = generate(engine, asked)
    assert first.finish == "abort"
    assert 0 < len(first.tokens) < ENDLESS.max_tokens
    assert difference(served.directory, asked[0], first).max() < 1e-5
    assert [(sample.finish, len(sample.tokens)) for sample in others] == [("abort", 0)] * 3  # they had no turn in time


def test_a_prompt_that_does_not_fit_is_refused_with_what_the_server_says(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="longer than the maximum model length"):
        generate(engine, [ask([5] * (TOKENS + 100), SamplingParams(4))])
    with pytest.raises(EngineError, match="no tokens"):
        generate(engine, [ask([], SamplingParams(4))])
    assert generate(engine, []) == []


def test_tokens_so_far_have_their_versions_and_resume_on_another_engine(
    served: Served, pool: ThreadPoolExecutor
) -> None:
    new, asked = served.weights(1), [ask(PROMPTS[0], ENDLESS, seed=i, index=i) for i in range(4)]
    with served.trained() as (engine, trainer):
        engine._stops = set()
        future = pool.submit(generate, engine, asked)

        def told(tokens: int, version: int) -> dict[int, Sample]:
            found: dict[int, Sample] = {}

            def enough() -> bool:
                found.update(engine.so_far().samples(dict(enumerate(asked))))
                of_all = found.values()
                return len(found) == 4 and all(len(s.tokens) > tokens and s.versions[-1] == version for s in of_all)

            wait_until(enough)
            return dict(found)

        told(TOKENS_PER_PART, 0)
        trainer.sync(1, new)
        begun = told(2 * TOKENS_PER_PART, 1)
        engine.give_back(range(4))
        given_back = future.result(WAIT_SECONDS)
        assert not engine.so_far().tickets.size
        again = [
            replace(one, begun=begun[i], sampling=SamplingParams(len(begun[i].tokens) + 20))
            for i, one in enumerate(asked)
        ]
        resumed = generate(engine, again, len(asked))
    for i, whole in [*enumerate(given_back), *enumerate(resumed)]:
        count = len(begun[i].tokens)
        assert begun[i].tokens.tolist() == whole.tokens[:count].tolist()
        assert begun[i].logprobs.tolist() == whole.logprobs[:count].tolist()
        assert begun[i].versions.tolist() == whole.versions[:count].tolist()
    for one, sample in zip(asked, resumed, strict=True):
        assert set(sample.versions.tolist()) == {0, 1}
        last = slice(len(sample.tokens) - 20, None)
        assert difference(new, one, sample)[last].max() < 1e-5
        assert sample.tokens[last].tolist() != sample.tokens[:20].tolist()


@pytest.mark.parametrize("pause", ["in_place", "retract"])
def test_an_update_in_a_running_generation_is_exact_for_each_token(
    served: Served, pool: ThreadPoolExecutor, pause: str
) -> None:
    """In place, tokens after the update use keys and values of the old weights; those of later requests do not."""
    new, asked = served.weights(1), [ask(PROMPTS[0], ENDLESS, seed=i, index=i) for i in range(AT_ONCE)]
    others = [ask(PROMPTS[0], SamplingParams(60), seed=seed, index=AT_ONCE + seed) for seed in range(24)]
    with served.trained(f"weights.pause={pause}") as (engine, trainer):
        engine._stops = set()
        future = pool.submit(generate, engine, [*asked, *others])
        wait_until(lambda: len(engine.so_far().tickets) == AT_ONCE)
        engine.begin_update(1)
        before = engine.so_far().counts()
        time.sleep(0.3)
        assert engine.so_far().counts() == before
        assert not future.done()
        trainer.send(1, new)
        engine.commit_update(1)
        wait_until(lambda: all(count > 200 for count in engine.so_far().counts().values()))
        engine.give_back(range(AT_ONCE))
        samples = future.result(WAIT_SECONDS)
    for one, sample in zip(asked, samples, strict=False):
        assert sample.versions.tolist() == sorted(sample.versions.tolist())
        assert set(sample.versions.tolist()) == {0, 1}
        old, changed = difference(served.directory, one, sample), difference(new, one, sample)
        assert old[sample.versions == 0].max() < 1e-5
        after = changed[sample.versions == 1]
        assert after.max() < 1e-5 if pause == "retract" else after.max() > 1e-3
    for one, sample in zip(others, samples[AT_ONCE:], strict=True):
        assert (sample.versions == 1).all()
        assert difference(new, one, sample).max() < 1e-5  # by far more with the prompt's old keys and values


def test_requests_are_finished_before_an_update_that_waits_for_them(served: Served, pool: ThreadPoolExecutor) -> None:
    asked = [ask(PROMPTS[0], SamplingParams(60), seed=seed, index=seed) for seed in range(AT_ONCE)]
    with served.trained("weights.pause=finish") as (engine, trainer):
        served.client.post("/pause?mode=keep&clear_cache=false", {})  # none ends before the update begins
        future = pool.submit(generate, engine, asked)
        wait_until(lambda: engine._client.run(engine._gate.count()) == AT_ONCE)
        update = pool.submit(trainer.sync, 1, served.weights(1))
        wait_until(lambda: engine._gate.held)
        served.client.post("/resume", {})
        assert all((sample.versions == 0).all() for sample in future.result(WAIT_SECONDS))
        update.result(WAIT_SECONDS)


def test_a_sample_that_waited_in_the_server_during_an_update_in_place_is_wholly_of_the_new_weights(
    served: Served, pool: ThreadPoolExecutor
) -> None:
    new, one = served.weights(1), ask((*range(5, 45),) * 8, SamplingParams(max_tokens=8), seed=3)
    with served.trained("weights.pause=in_place") as (engine, trainer):
        generate(engine, [one])  # the server keeps the prompt's keys and values
        served.client.post("/pause?mode=keep&clear_cache=false", {})  # what the engine now sends waits there
        future = pool.submit(generate, engine, [one])
        wait_until(lambda: engine._client.run(engine._gate.count()) == 1)
        time.sleep(0.5)
        trainer.sync(1, new)
        (sample,) = future.result(WAIT_SECONDS)
    assert (sample.versions == 1).all()
    assert difference(new, one, sample).max() < 1e-5


def test_what_is_given_back_while_an_update_is_open_ends_at_once(served: Served, pool: ThreadPoolExecutor) -> None:
    asked = [ask(PROMPTS[0], ENDLESS, seed=i, index=i) for i in range(4)]
    with served.trained("weights.pause=in_place") as (engine, trainer):
        engine._stops = set()
        future = pool.submit(generate, engine, asked)
        wait_until(lambda: len(engine.so_far().tickets) == 4)
        engine.begin_update(1)
        engine.give_back(range(4))
        samples = future.result(WAIT_SECONDS)
        trainer.send(1, served.directory)
        engine.commit_update(1)
        assert all(0 < len(sample.tokens) < TOKENS and sample.finish == "abort" for sample in samples)
        assert generate(engine, [ask(PROMPTS[0], SamplingParams(3))], 4)


def test_an_engine_without_weights_samples_nothing_and_releases_no_memory_on_cpus(
    served: Served, engine: VllmEngine, pool: ThreadPoolExecutor
) -> None:
    engine.release_memory()
    assert generate(engine, [ask(PROMPTS[0], SamplingParams(3))])
    with served.engine() as other:
        future = pool.submit(generate, other, [ask(PROMPTS[0], SamplingParams(3))])
        time.sleep(0.3)
        assert not future.done()
        other.give_back([0])
        assert future.result(WAIT_SECONDS)[0].finish == "abort"


def test_a_server_answers_on_loopback_alone_and_only_with_its_key_which_others_cannot_read(served: Served) -> None:
    server = served.server
    assert [status(server.url + path, server.api_key) for path in ("/health", "/is_paused")] == [200, 200]
    for key in (None, "another"):
        assert [status(server.url + path, key) for path in ("/health", "/is_paused", "/docs")] == [401] * 3
    listening = [
        socket.laddr
        for process in served.processes
        for socket in process.net_connections(kind="inet")
        if socket.status == psutil.CONN_LISTEN
    ]
    assert {address.ip for address in listening} == {"127.0.0.1"}, listening
    for process in served.processes:
        for shown in ("cmdline", "environ"):
            assert server.api_key.encode() not in Path(f"/proc/{process.pid}/{shown}").read_bytes()
    assert server.api_key not in server.log_end()


def status(url: str, key: str | None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=WAIT_SECONDS) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_server_that_waits_for_weights_takes_no_core(served: Served) -> None:
    with served.trained() as (engine, trainer):
        engine.begin_update(1)
        processes = served.processes
        used = -sum(sum(process.cpu_times()[:2]) for process in processes)
        time.sleep(1.0)
        used += sum(sum(process.cpu_times()[:2]) for process in processes)
        trainer.send(1, served.directory)
        engine.commit_update(1)
    assert used < 0.3


def test_a_server_with_a_killed_worker_is_named_with_its_log_and_nothing_of_it_stays(
    served: Served, trained: tuple[VllmEngine, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of this module: the server is gone."""
    engine, _ = trained
    monkeypatch.setattr(server_module, "END_SECONDS", 60.0)
    server, group = served.server, served.server._process.pid
    (worker,) = (process for process in served.processes if "Worker" in " ".join(process.cmdline()))
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(EngineError) as caught:
        generate(engine, [ask([5, 6], SamplingParams(200), seed=seed) for seed in range(100)])
    assert "engine 0" in str(caught.value)
    assert f"{server.log} ends with" in str(caught.value)
    server.close()
    assert not members(group)
    assert not Path(server._directory).exists()
    assert not [file for file in server._shared if file.exists()]
    assert all(str(file).startswith(SHARED_MEMORY) for file in server._shared)
    np.testing.assert_equal(engine.rests(), True)
