"""Weights into a served model while it samples: nothing is sampled meanwhile, and every token knows its weights."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megagrpo.errors import EngineError, WeightSyncError
from megagrpo.rollout.sglang.engine import Pause
from megagrpo.types import Request, Sample, SamplingParams
from tests.rollout_engines import model_directory, request
from tests.sglang.servers import AT_ONCE, Served, Trainer

PROMPT = (5, 6, 9, 11)
LONG = SamplingParams(max_tokens=230)
SEEDS = range(50)


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Another random model of a family."""
    root = tmp_path_factory.mktemp("new")
    return lambda family: model_directory(family, root / family, seed=1)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def logprobs_of(directory: Path, one: Request, sample: Sample) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = sample.tokens.tolist()
    with torch.no_grad():
        logits = model(torch.tensor([[*one.tokens, *tokens]])).logits[0, len(one.tokens) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(tokens)), tokens].numpy()


def asked() -> list[Request]:
    return [request(PROMPT, LONG, seed=seed, index=i) for i, seed in enumerate(SEEDS)]


def running(future: Future[list[Sample]]) -> None:
    time.sleep(0.3)
    assert not future.done(), "all samples ended before the update began"


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
    with served.trained() as (engine, trainer):
        future = pool.submit(engine.generate, asked())
        running(future)
        trainer.sync(1, directories[1])
        samples = future.result(60)
    assert {version for sample in samples for version in sample.versions} == {0, 1}
    assert any(len(set(sample.versions)) == 2 for sample in samples)
    for one, sample in zip(asked(), samples, strict=True):
        assert (np.diff(sample.versions) >= 0).all()
        for version, directory in directories.items():
            mine = sample.versions == version
            assert np.abs(sample.logprobs - logprobs_of(directory, one, sample))[mine].max(initial=0) < 1e-5


def test_running_samples_are_returned_as_they_are_when_updates_abort(
    tied_server: Served, new_weights: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    with tied_server.trained(pause="abort") as (engine, trainer):
        future = pool.submit(engine.generate, asked())
        running(future)
        trainer.sync(1, new_weights("qwen2_tied"))
        samples = future.result(60)
    aborted = [sample for sample in samples if sample.finish == "abort"]
    assert 0 < len(aborted) <= AT_ONCE
    assert all((sample.versions == 0).all() for sample in aborted)
    later = [sample for sample in samples if (sample.versions == 1).all()]
    assert len(later) >= len(SEEDS) - 2 * AT_ONCE
    assert not any(len(set(sample.versions)) > 1 for sample in samples)


def test_samples_that_begin_after_an_update_in_place_are_wholly_of_the_new_weights(
    tied_server: Served, new_weights: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    new = new_weights("qwen2_tied")
    with tied_server.trained(pause="in_place") as (engine, trainer):
        future = pool.submit(engine.generate, asked())
        running(future)
        trainer.sync(1, new)
        samples = future.result(60)
    mixed = [sample for sample in samples if len(set(sample.versions)) == 2]
    assert 0 < len(mixed) <= AT_ONCE
    assert any((sample.versions == 1).all() for sample in samples)
    for one, sample in zip(asked(), samples, strict=True):
        if (sample.versions == 1).all():  # with the prompt's old keys and values they would differ by far more
            assert np.abs(sample.logprobs - logprobs_of(new, one, sample)).max() < 1e-5


def test_a_sample_that_waited_in_the_server_during_an_update_in_place_is_wholly_of_the_new_weights(
    tied_server: Served, new_weights: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    new, one = new_weights("qwen2_tied"), request((*range(5, 45),), SamplingParams(max_tokens=8), seed=3)
    with tied_server.trained(pause="in_place") as (engine, trainer):
        engine.generate([one])  # the server keeps the prompt's keys and values
        tied_server.pause("in_place")
        future = pool.submit(engine.generate, [one])
        running(future)
        trainer.sync(1, new)
        (sample,) = future.result(60)
    assert (sample.versions == 1).all()
    assert np.abs(sample.logprobs - logprobs_of(new, one, sample)).max() < 1e-5


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_no_token_is_sampled_while_an_update_is_open(
    pause: Pause, tied_server: Served, pool: ThreadPoolExecutor
) -> None:
    with tied_server.trained(pause=pause) as (engine, trainer):
        future = pool.submit(engine.generate, asked())
        running(future)
        engine.begin_update(1)
        time.sleep(0.1)  # what was already computed is logged
        before = steps(tied_server)
        time.sleep(0.5)
        assert steps(tied_server) == before
        assert not future.done()
        with pytest.raises(EngineError, match="receiving weights"):
            engine.generate(asked()[:1])
        trainer.send(1, tied_server.directory)
        with pytest.raises(EngineError, match="unverified"):
            engine.generate(asked()[:1])
        assert steps(tied_server) == before
        engine.commit_update(1)
        future.result(60)
        assert steps(tied_server) > before


def test_an_update_that_failed_is_begun_again(tied_server: Served, new_weights: Callable[[str], Path]) -> None:
    new = new_weights("qwen2_tied")
    with tied_server.trained() as (engine, trainer):
        engine.begin_update(1)
        with pytest.raises(WeightSyncError, match="version 1"):
            engine.receive(1)  # nobody has opened a sync to this version
        trainer.sync(1, new)
        (sample,) = engine.generate(asked()[:1])
    assert (sample.versions == 1).all()
    assert np.abs(sample.logprobs - logprobs_of(new, asked()[0], sample)).max() < 1e-5


def test_an_update_that_somebody_left_open_on_a_server_is_ended_by_who_comes_next(
    tied_server: Served, new_weights: Callable[[str], Path]
) -> None:
    new = new_weights("qwen2_tied")
    with tied_server.borrowed() as left:
        left.begin_update(1)
        left.close()  # as if its process had died: the server's update stays open
        with tied_server.borrowed() as engine:
            trainer = Trainer(engine, tied_server.directory)
            trainer.sync(2, new)
            (sample,) = engine.generate(asked()[:1])
            trainer.close()
    assert (sample.versions == 2).all()
    assert np.abs(sample.logprobs - logprobs_of(new, asked()[0], sample)).max() < 1e-5


def test_ten_updates_in_a_row_are_each_what_is_sampled_from(
    tied_server: Served, new_weights: Callable[[str], Path]
) -> None:
    directories = [tied_server.directory, new_weights("qwen2_tied")]
    one = request(PROMPT, SamplingParams(8), seed=1)
    with tied_server.trained() as (engine, trainer):
        for version in range(1, 11):
            trainer.sync(version, directories[version % 2])
            (sample,) = engine.generate([one])
            assert (sample.versions == version).all()
            assert np.abs(sample.logprobs - logprobs_of(directories[version % 2], one, sample)).max() < 1e-5


def test_a_server_of_somebody_else_is_not_sampled_from_before_it_has_our_weights(tied_server: Served) -> None:
    with tied_server.trained() as (engine, _):
        engine.release_memory()  # not a server that can: nothing happens
        assert engine.generate(asked()[:1])
    with tied_server.borrowed() as engine, pytest.raises(EngineError, match="unverified"):
        engine.generate(asked()[:1])


def steps(served: Served) -> int:
    """Batches that the server has computed so far: it logs every one."""
    return sum(" batch, " in line for line in served.server.log.read_text().splitlines())
