"""Samples of real servers: distribution, seeds, ends, aborts and time limits."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megagrpo.errors import EngineError
from megagrpo.types import SamplingParams
from tests.engines.conftest import EACH
from tests.engines.policy import difference, logits_of
from tests.engines.servers import CONTEXT, PROMPT, Served
from tests.rollout_engines import END, generate
from tests.rollout_engines import request as ask

PROMPTS = (PROMPT, [20, 21, 22, 23, 24, 25, 26], [90])
SAMPLINGS = {
    "plain": SamplingParams(24),
    "cold": SamplingParams(24, temperature=0.6),
    "greedy": SamplingParams(24, temperature=0.0),
}


@pytest.fixture(scope="module")
def engine(served: Served) -> Iterator[Any]:
    with served.trained() as (engine, _):
        yield engine


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("served", [*EACH, "split"], indirect=True)
def test_logprobs_are_those_of_transformers_over_the_whole_vocabulary(
    served: Served, engine: Any, sampling: SamplingParams
) -> None:
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


@pytest.mark.parametrize("served", [*EACH, "split"], indirect=True)
def test_a_seed_makes_the_same_sample_alone_and_among_others(served: Served, engine: Any) -> None:
    # Some differ in one half only, but for vLLM: its generator, torch's, takes the lower half on CPUs.
    seeds = [1, 2**62 + 1 if served.kind == "sglang" else 2**31 + 1, 2**62 + 2, 2**63 - 1]
    asked = [ask(PROMPTS[1], SamplingParams(20), seed=seed) for seed in seeds]
    others = [ask(prompt, SamplingParams(20), seed=100 + i) for i, prompt in enumerate(PROMPTS * 4)]
    alone = [generate(engine, [one])[0].tokens.tolist() for one in asked]
    among = [sample.tokens.tolist() for sample in generate(engine, [*others, *asked])[len(others) :]]
    assert among == alone
    assert len({tuple(tokens) for tokens in alone}) == len(seeds)


def test_sampled_frequencies_are_the_models_probabilities_and_answers_come_in_the_order_of_requests(
    served: Served, engine: Any
) -> None:
    draws = 600  # many more than run at once; the first is the last to end
    asked = [ask(PROMPT, SamplingParams(1 if seed else 40), seed=seed, index=seed) for seed in range(draws)]
    samples = generate(engine, asked)
    assert [sample.index for sample in samples] == list(range(draws))
    drawn = np.array([sample.tokens[0] for sample in samples])
    probabilities = logits_of(served.directory, PROMPT, [0]).softmax(-1)[0].numpy()
    counts = np.bincount(drawn, minlength=len(probabilities))
    # Pearson's statistic over the tokens that are expected at least five times, the others as one.
    often = probabilities * draws >= 5
    expected = np.append(probabilities[often], probabilities[~often].sum()) * draws
    observed = np.append(counts[often], counts[~often].sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_stop_tokens_end_a_response_are_kept_in_it_and_left_out_of_its_text(engine: Any) -> None:
    (free,) = generate(engine, [ask(PROMPT, SamplingParams(12), seed=3)])
    stop = int(free.tokens[4])
    first = free.tokens.tolist().index(stop)
    (stopped,) = generate(engine, [ask(PROMPT, SamplingParams(12, stop_tokens=(stop,)), seed=3)])
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert stopped.finish == "stop"
    assert stopped.text == "".join(f"w{token}" for token in free.tokens[:first])
    assert free.finish == "length"
    assert free.text == "".join(f"w{token}" for token in free.tokens)


def test_the_models_own_end_token_ends_a_response(engine: Any) -> None:
    samples = generate(engine, [ask(PROMPT, SamplingParams(120), seed=seed) for seed in range(24)])
    ended = [sample for sample in samples if END in sample.tokens]
    assert len(ended) > 3
    for sample in ended:
        assert sample.finish == "stop"
        assert sample.tokens.tolist().index(END) == len(sample.tokens) - 1


def test_requests_past_their_time_limit_which_counts_while_they_wait_are_aborted_with_what_they_have(
    served: Served,
) -> None:
    with served.trained("rollout.timeout_seconds=1", "rollout.requests_at_once=1") as (engine, _):
        endless = served.endless(engine)
        asked = [ask(PROMPT, endless, index=i) for i in range(4)]
        first, *others = generate(engine, asked)
    assert first.finish == "abort"
    assert 0 < len(first.tokens) < endless.max_tokens
    assert difference(served.directory, asked[0], first).max() < 1e-5
    assert [(sample.finish, len(sample.tokens)) for sample in others] == [("abort", 0)] * 3  # they had no turn in time


def test_a_prompt_that_does_not_fit_is_refused_with_what_the_server_says_and_ends_the_others(
    served: Served, engine: Any
) -> None:
    with pytest.raises(EngineError, match=r"context length|maximum model length"):
        generate(engine, [ask(PROMPT, SamplingParams(2000)), ask([5] * (CONTEXT + 4), SamplingParams(4))])
    served.wait_for_requests(0)
    with pytest.raises(EngineError, match="no tokens"):
        generate(engine, [ask([], SamplingParams(4))])
    assert generate(engine, []) == []
