"""Weights into a served model while it samples: nothing is sampled meanwhile, and every token knows its weights."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from megagrpo.errors import EngineError
from megagrpo.rollout.sglang.engine import Pause
from megagrpo.rollout.sglang.server import members
from megagrpo.types import SamplingParams
from tests.rollout_engines import model_directory, request
from tests.sglang.servers import AT_ONCE, ENDLESS, ENDLESS_PROMPT, WAIT_SECONDS, Served, difference

PROMPT = (5, 6, 9, 11)
# These are all sent at once and run until they are aborted; the others take turns in the rest of the places.
RUNNING = [request(ENDLESS_PROMPT, ENDLESS, index=i) for i in range(AT_ONCE // 2)]
OTHERS = [request(PROMPT, SamplingParams(60), seed=seed, index=AT_ONCE + seed) for seed in range(24)]


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Another random model of a family."""
    root = tmp_path_factory.mktemp("new")
    return lambda family: model_directory(family, root / family, seed=1)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize(("which", "family"), [("tied_server", "qwen2_tied"), ("split_server", "qwen3")])
def test_running_samples_go_on_with_new_weights_after_a_retraction(
    which: str,
    family: str,
    new_weights: Callable[[str], Path],
    pool: ThreadPoolExecutor,
    request: pytest.FixtureRequest,
) -> None:
    served: Served = request.getfixturevalue(which)
    directories = {0: served.directory, 1: new_weights(family)}
    asked = [*RUNNING, *OTHERS]
    with served.trained() as (engine, trainer):
        future = pool.submit(engine.generate, asked)
        served.wait_for_requests(AT_ONCE)
        served.wait_for_batches(5)
        trainer.sync(1, directories[1])
        served.wait_for_batches(20)
        served.abort_all()
        samples = future.result(WAIT_SECONDS)
    assert {version for sample in samples for version in sample.versions} == {0, 1}
    assert any(len(set(sample.versions)) == 2 for sample in samples)
    for one, sample in zip(asked, samples, strict=True):
        assert (np.diff(sample.versions) >= 0).all()
        for version, directory in directories.items():
            assert difference(directory, one, sample)[sample.versions == version].max(initial=0) < 1e-5


def test_samples_that_begin_after_an_update_in_place_are_wholly_of_the_new_weights(
    tied_server: Served, new_weights: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    new = new_weights("qwen2_tied")
    # They end by themselves: those that wait for them begin only then.
    running = [request(ENDLESS_PROMPT, SamplingParams(200, temperature=0.0), index=i) for i in range(AT_ONCE)]
    with tied_server.trained(pause="in_place") as (engine, trainer):
        future = pool.submit(engine.generate, [*running, *OTHERS])
        tied_server.wait_for_requests(AT_ONCE)
        tied_server.wait_for_batches(5)
        trainer.sync(1, new)
        samples = future.result(WAIT_SECONDS)
    mixed = [sample for sample in samples if len(set(sample.versions)) == 2]
    assert 0 < len(mixed) <= AT_ONCE
    assert any((sample.versions == 1).all() for sample in samples)
    for one, sample in zip([*running, *OTHERS], samples, strict=True):
        if (sample.versions == 1).all():  # with the prompt's old keys and values they would differ by far more
            assert difference(new, one, sample).max() < 1e-5


def test_a_sample_that_waited_in_the_server_during_an_update_in_place_is_wholly_of_the_new_weights(
    tied_server: Served, new_weights: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    new, one = new_weights("qwen2_tied"), request((*range(5, 45),), SamplingParams(max_tokens=8), seed=3)
    with tied_server.trained(pause="in_place") as (engine, trainer):
        engine.generate([one])  # the server keeps the prompt's keys and values
        tied_server.pause_in_place()
        future = pool.submit(engine.generate, [one])
        while engine._client.run(engine._gate.count()) == 0:
            time.sleep(0.01)
        time.sleep(0.3)  # it is on the way to the server, which does not count it before it goes on
        trainer.sync(1, new)
        (sample,) = future.result(WAIT_SECONDS)
    assert (sample.versions == 1).all()
    assert difference(new, one, sample).max() < 1e-5


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_no_token_is_sampled_while_an_update_is_open(
    pause: Pause, tied_server: Served, pool: ThreadPoolExecutor
) -> None:
    asked = [request(ENDLESS_PROMPT, ENDLESS, index=i) for i in range(AT_ONCE)]
    with tied_server.trained(pause=pause) as (engine, trainer):
        future = pool.submit(engine.generate, asked)
        tied_server.wait_for_requests(AT_ONCE)
        tied_server.wait_for_batches(5)
        engine.begin_update(1)
        before = tied_server.batches()  # a batch is logged before the next command is read
        time.sleep(0.3)
        assert tied_server.batches() == before
        assert not future.done()
        with pytest.raises(EngineError, match="receiving weights"):
            engine.generate(asked[:1])
        trainer.send(1, tied_server.directory)
        with pytest.raises(EngineError, match="unverified"):
            engine.generate(asked[:1])
        assert tied_server.batches() == before
        engine.commit_update(1)
        tied_server.wait_for_batches(1)
        tied_server.abort_all()
        future.result(WAIT_SECONDS)


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


def test_an_update_that_was_left_open_on_a_server_is_ended_by_the_next_engine(
    tied_server: Served, new_weights: Callable[[str], Path]
) -> None:
    new = new_weights("qwen2_tied")
    with tied_server.borrowed() as left:
        left.begin_update(1)
        left.close()  # as if its process had died: the server's update stays open
        with tied_server.borrowed() as engine:
            trainer = tied_server.trainer(engine)
            trainer.sync(2, new)
            (sample,) = engine.generate(OTHERS[:1])
            trainer.close()
    assert (sample.versions == 2).all()
    assert difference(new, OTHERS[0], sample).max() < 1e-5


def test_an_external_server_is_not_sampled_from_before_it_has_our_weights(tied_server: Served) -> None:
    with tied_server.trained() as (engine, _):
        engine.release_memory()  # not a server that can: nothing happens
        assert engine.generate(OTHERS[:1])
    with tied_server.borrowed() as engine, pytest.raises(EngineError, match="unverified"):
        engine.generate(OTHERS[:1])
