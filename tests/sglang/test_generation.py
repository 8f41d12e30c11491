"""What a real SGLang server samples: its distribution, seeds, ends, aborts and time limits."""

import json
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megagrpo.errors import EngineError
from megagrpo.types import Request, Sample, SamplingParams
from tests.rollout_engines import END, request
from tests.sglang.servers import AT_ONCE, Served

PROMPTS = ([5, 6, 9, 11], [20, 21, 22, 23, 24, 25, 26], [90])
LONG = SamplingParams(max_tokens=230)
ask = request
SAMPLINGS = {
    "plain": SamplingParams(24),
    "cold": SamplingParams(24, temperature=0.6),
    "greedy": SamplingParams(24, temperature=0.0),
    "narrow": SamplingParams(24, top_p=0.7, top_k=20),
}


def logits_of(directory: Path, prompt: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab], before each token, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]


def difference(directory: Path, asked: Request, sample: Sample) -> float:
    """Largest difference between the engine's logprobs and transformers'."""
    tokens = sample.tokens.tolist()
    scaled = logits_of(directory, asked.tokens, tokens) / (asked.sampling.temperature or 1.0)
    expected = scaled.log_softmax(-1)[torch.arange(len(tokens)), tokens].numpy()
    return float(np.abs(sample.logprobs - expected).max())


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("which", ["tied_server", "split_server"])
def test_logprobs_are_those_of_transformers_over_the_whole_vocabulary(
    which: str, sampling: SamplingParams, request: pytest.FixtureRequest
) -> None:
    served: Served = request.getfixturevalue(which)
    asked = [ask(prompt, sampling, seed=i, index=i) for i, prompt in enumerate(PROMPTS)]
    for one, sample in zip(asked, served.engine.generate(asked), strict=True):
        assert difference(served.directory, one, sample) < 1e-5
        assert (sample.prompt_id, sample.index) == (one.prompt_id, one.index)
        assert (sample.finish == "stop") == (sample.tokens[-1] == END)
        assert sample.finish == "stop" or len(sample.tokens) == 24


def test_greedy_tokens_are_the_likeliest(tied_server: Served) -> None:
    (sample,) = tied_server.engine.generate([ask(PROMPTS[0], SAMPLINGS["greedy"])])
    logits = logits_of(tied_server.directory, tuple(PROMPTS[0]), sample.tokens.tolist())
    assert logits.argmax(-1).tolist() == sample.tokens.tolist()


@pytest.mark.parametrize("which", ["tied_server", "split_server"])
def test_a_seed_makes_the_same_sample_alone_and_among_others(which: str, request: pytest.FixtureRequest) -> None:
    engine = request.getfixturevalue(which).engine
    seeds = [1, 2**62 + 1, 2**62 + 2, 2**63 - 1]  # the last ones differ in their lower or upper half only
    asked = [ask(PROMPTS[1], SamplingParams(20), seed=seed) for seed in seeds]
    others = [ask(prompt, SamplingParams(20), seed=100 + i) for i, prompt in enumerate(PROMPTS * 4)]
    alone = [engine.generate([one])[0].tokens.tolist() for one in asked]
    among = [sample.tokens.tolist() for sample in engine.generate([*others, *asked])[len(others) :]]
    assert among == alone
    assert len({tuple(tokens) for tokens in alone}) == len(seeds)


def test_sampled_frequencies_are_the_models_probabilities(tied_server: Served) -> None:
    draws = 600
    asked = [ask(PROMPTS[0], SamplingParams(1), seed=seed) for seed in range(draws)]
    drawn = np.array([sample.tokens[0] for sample in tied_server.engine.generate(asked)])
    probabilities = logits_of(tied_server.directory, tuple(PROMPTS[0]), [0]).softmax(-1)[0].numpy()
    counts = np.bincount(drawn, minlength=len(probabilities))
    # Pearson's statistic over the tokens that are expected at least five times, the others as one.
    often = probabilities * draws >= 5
    expected = np.append(probabilities[often], probabilities[~often].sum()) * draws
    observed = np.append(counts[often], counts[~often].sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_stop_tokens_end_a_response_are_kept_in_it_and_left_out_of_its_text(tied_server: Served) -> None:
    (free,) = tied_server.engine.generate([ask(PROMPTS[0], SamplingParams(12), seed=3)])
    stop = int(free.tokens[4])
    first = free.tokens.tolist().index(stop)
    (stopped,) = tied_server.engine.generate([ask(PROMPTS[0], SamplingParams(12, stop_tokens=(stop,)), seed=3)])
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert stopped.finish == "stop"
    assert stopped.text == "".join(f"w{token}" for token in free.tokens[:first])
    assert free.finish == "length"
    assert free.text == "".join(f"w{token}" for token in free.tokens)


def test_the_models_own_end_token_ends_a_response(tied_server: Served) -> None:
    samples = tied_server.engine.generate([ask(PROMPTS[0], SamplingParams(120), seed=seed) for seed in range(24)])
    ended = [sample for sample in samples if END in sample.tokens]
    assert len(ended) > 3
    assert all(
        sample.finish == "stop" and sample.tokens.tolist().index(END) == len(sample.tokens) - 1 for sample in ended
    )


def test_samples_come_as_they_finish_and_more_are_asked_than_run_at_once(tied_server: Served) -> None:
    lengths = [200] + [3] * (2 * AT_ONCE)
    asked = [
        ask(PROMPTS[1], SamplingParams(length, stop_tokens=()), seed=5, index=i) for i, length in enumerate(lengths)
    ]
    order = [index for index, _ in tied_server.engine.generate_stream(asked)]
    assert sorted(order) == list(range(len(asked)))
    assert order.index(0) > AT_ONCE


def test_an_aborted_request_gives_the_tokens_that_it_has(tied_server: Served) -> None:
    asked = [ask(PROMPTS[0], LONG, seed=seed, index=seed) for seed in never_ending(tied_server, AT_ONCE + 4)]
    samples = while_running(tied_server, asked, tied_server.engine.abort)
    aborted = [sample for sample in samples if sample.finish == "abort"]
    assert len(aborted) > 4
    assert any(0 < len(sample.tokens) < LONG.max_tokens for sample in aborted)
    for one, sample in zip(asked, samples, strict=True):
        if len(sample.tokens):
            assert difference(tied_server.directory, one, sample) < 1e-5


def test_a_request_past_its_time_limit_is_aborted_with_what_it_has(tied_server: Served) -> None:
    (seed,) = never_ending(tied_server, 1)
    with tied_server.trained(timeout_seconds=0.05) as (engine, _):
        (sample,) = engine.generate([ask(PROMPTS[0], LONG, seed=seed)])
    assert sample.finish == "abort"
    assert len(sample.tokens) < LONG.max_tokens


def test_the_time_limit_counts_from_when_samples_were_asked_for(tied_server: Served) -> None:
    seeds = never_ending(tied_server, 2) * 4
    with tied_server.trained(timeout_seconds=0.3, requests_at_once=1) as (engine, _):
        samples = engine.generate([ask(PROMPTS[0], LONG, seed=seed, index=i) for i, seed in enumerate(seeds)])
    # One by one: those that had no turn in time are given up, not granted the whole limit anew.
    assert [(sample.finish, len(sample.tokens)) for sample in samples[4:]] == [("abort", 0)] * 4


def test_requests_of_a_caller_that_stops_are_aborted(tied_server: Served) -> None:
    asked = [ask(PROMPTS[0], LONG, seed=seed) for seed in never_ending(tied_server, 4)]
    asked.append(ask(PROMPTS[0], SamplingParams(1), seed=0))
    stream = tied_server.engine.generate_stream(asked)
    next(stream)
    assert loads(tied_server)["num_running_reqs"] > 0
    stream.close()
    deadline = time.monotonic() + 10
    while (load := loads(tied_server))["num_running_reqs"] + load["num_waiting_reqs"] > 0:
        assert time.monotonic() < deadline, load
        time.sleep(0.05)


def test_a_prompt_that_does_not_fit_is_refused_with_what_the_server_says(tied_server: Served) -> None:
    with pytest.raises(EngineError, match="context length"):
        tied_server.engine.generate([ask([5] * 300, SamplingParams(4))])
    with pytest.raises(EngineError, match="no tokens"):
        tied_server.engine.generate([ask([], SamplingParams(4))])
    assert tied_server.engine.generate([]) == []


def test_every_token_carries_the_servers_weight_version(tied_server: Served) -> None:
    (sample,) = tied_server.engine.generate([ask(PROMPTS[0], SamplingParams(5))])
    assert sample.versions.tolist() == [0] * len(sample.tokens)


def loads(served: Served) -> dict[str, int]:
    """What runs and waits in the server."""
    request = urllib.request.Request(
        f"{served.server.url}/v1/loads", headers={"Authorization": f"Bearer {served.server.api_key}"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        (load,) = json.load(response)["loads"]
    return load


def never_ending(served: Served, count: int) -> list[int]:
    """Seeds with which LONG reaches its limit after PROMPTS[0]."""
    seeds = range(1000, 1000 + 40 * count)
    asked = [ask(PROMPTS[0], LONG, seed=seed) for seed in seeds]
    found = []
    for index, sample in served.engine.generate_stream(asked):
        if sample.finish == "length":
            found.append(seeds[index])
        if len(found) == count:
            break
    return found


def while_running(served: Served, asked: list[Request], act: Callable[[], None]) -> list[Sample]:
    """The samples of `asked`; `act` is called once they run."""
    acting = threading.Timer(0.15, act)
    acting.start()
    samples = served.engine.generate(asked)
    acting.join()
    return samples
