"""Carry-over that SGLang alone has: the numbers that draw tokens of a response that goes on, and routes. (All servers'
updates: tests/engines.)"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from megagrpo.types import SamplingParams
from tests.engines.policy import WAIT_SECONDS
from tests.engines.servers import AT_ONCE, PROMPT, Served
from tests.rollout_engines import generate, request, routes_of


def test_what_is_given_back_goes_on_where_it_ended(tied_server: Served) -> None:
    """On any engine: here on the same one, among other requests. They end by themselves, the last after hundreds of
    tokens."""
    asked = [request(PROMPT, SamplingParams(2000), seed=seed, index=seed) for seed in range(AT_ONCE)]
    with tied_server.trained() as (engine, _), ThreadPoolExecutor(1) as pool:
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


@pytest.mark.long
@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_routes_of_responses_that_an_update_interrupts_are_whole(split_server: Served, pause: str) -> None:
    asked = [request([20, 21, 22], SamplingParams(300, routes=True), seed=seed, index=seed) for seed in range(8)]
    with split_server.trained(f"weights.pause={pause}") as (engine, trainer), ThreadPoolExecutor(1) as pool:
        future = pool.submit(generate, engine, asked)
        split_server.wait_for_batches(8)
        trainer.sync(1, split_server.directory)  # the same weights
        samples = future.result(WAIT_SECONDS)
    assert any(len(set(sample.versions.tolist())) == 2 for sample in samples)
    for one, sample in zip(asked, samples, strict=True):
        assert sample.routes is not None
        expected = routes_of(split_server.directory, [*one.tokens, *sample.tokens.tolist()])
        assert np.array_equal(sample.routes.experts, expected)
