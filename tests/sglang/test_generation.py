"""Samples of a real SGLang server: distribution, seeds, ends, aborts and time limits."""

import re
from dataclasses import replace

import numpy as np
import pytest

from megagrpo.errors import EngineError
from megagrpo.types import SamplingParams
from tests.rollout_engines import END, generate, request, routes_of
from tests.sglang.servers import CONTEXT, ENDLESS, ENDLESS_PROMPT, Served, difference, logits_of

PROMPTS = ([5, 6, 9, 11], [20, 21, 22, 23, 24, 25, 26], [90])
ask = request
SAMPLINGS = {
    "plain": SamplingParams(24),
    "cold": SamplingParams(24, temperature=0.6),
    "greedy": SamplingParams(24, temperature=0.0),
    "narrow": SamplingParams(24, top_p=0.7, top_k=20),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("which", ["tied_server", "split_server"])
def test_logprobs_are_those_of_transformers_over_the_whole_vocabulary(
    which: str, sampling: SamplingParams, request: pytest.FixtureRequest
) -> None:
    served: Served = request.getfixturevalue(which)
    asked = [ask(prompt, sampling, seed=i, index=i) for i, prompt in enumerate(PROMPTS)]
    for one, sample in zip(asked, generate(served.engine, asked), strict=True):
        assert difference(served.directory, one, sample).max() < 1e-5
        assert (sample.prompt_id, sample.index) == (one.prompt_id, one.index)
        assert sample.versions.tolist() == [0] * len(sample.tokens)
        assert (sample.finish == "stop") == (sample.tokens[-1] == END)
        assert sample.finish == "stop" or len(sample.tokens) == 24
        if not sampling.temperature:
            logits = logits_of(served.directory, one.tokens, sample.tokens.tolist())
            assert logits.argmax(-1).tolist() == sample.tokens.tolist()


@pytest.mark.parametrize("which", ["tied_server", "split_server"])
def test_kept_sets_and_logprobs_over_them_are_those_of_transformers(which: str, request: pytest.FixtureRequest) -> None:
    """Answers come in several parts."""
    served: Served = request.getfixturevalue(which)
    sampling = SamplingParams(70, temperature=0.8, top_k=20, top_p=0.3, kept_sets=True)
    asked = [ask(prompt, sampling, seed=i, index=i) for i, prompt in enumerate(PROMPTS)]
    sizes = set()
    for one, sample in zip(asked, generate(served.engine, asked), strict=True):
        logits = logits_of(served.directory, one.tokens, sample.tokens.tolist()).double() / sampling.temperature
        assert sample.kept is not None
        starts = sample.kept.ends - sample.kept.sizes
        for at, (row, token) in enumerate(zip(logits, sample.tokens.tolist(), strict=True)):
            ranked = row.softmax(-1).sort(descending=True)
            before = ranked.values.cumsum(-1) - ranked.values
            kept = ranked.indices[:20][before[:20] <= sampling.top_p].sort().values
            assert sample.kept.ids[starts[at] : sample.kept.ends[at]].tolist() == kept.tolist()
            expected = row[kept].log_softmax(-1)[kept == token].item()
            assert abs(sample.logprobs[at] - expected) < 1e-5
            sizes.add(len(kept))
    assert len(sizes) > 3


@pytest.mark.parametrize("which", ["tied_server", "split_server"])
def test_a_seed_makes_the_same_sample_alone_and_among_others(which: str, request: pytest.FixtureRequest) -> None:
    engine = request.getfixturevalue(which).engine
    seeds = [1, 2**62 + 1, 2**62 + 2, 2**63 - 1]  # the last ones differ in their lower or upper half only
    asked = [ask(PROMPTS[1], SamplingParams(20), seed=seed) for seed in seeds]
    others = [ask(prompt, SamplingParams(20), seed=100 + i) for i, prompt in enumerate(PROMPTS * 4)]
    alone = [generate(engine, [one])[0].tokens.tolist() for one in asked]
    among = [sample.tokens.tolist() for sample in generate(engine, [*others, *asked])[len(others) :]]
    assert among == alone
    assert len({tuple(tokens) for tokens in alone}) == len(seeds)


def test_sampled_frequencies_are_the_models_probabilities_and_answers_come_in_the_order_of_requests(
    tied_server: Served,
) -> None:
    draws = 600  # many more than run at once; the first is the last to end
    asked = [
        ask(PROMPTS[0], SamplingParams(1 if seed else 40, stop_tokens=()), seed=seed, index=seed)
        for seed in range(draws)
    ]
    samples = generate(tied_server.engine, asked)
    assert [sample.index for sample in samples] == list(range(draws))
    drawn = np.array([sample.tokens[0] for sample in samples])
    probabilities = logits_of(tied_server.directory, PROMPTS[0], [0]).softmax(-1)[0].numpy()
    counts = np.bincount(drawn, minlength=len(probabilities))
    # Pearson's statistic over the tokens that are expected at least five times, the others as one.
    often = probabilities * draws >= 5
    expected = np.append(probabilities[often], probabilities[~often].sum()) * draws
    observed = np.append(counts[often], counts[~often].sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_stop_tokens_end_a_response_are_kept_in_it_and_left_out_of_its_text(tied_server: Served) -> None:
    (free,) = generate(tied_server.engine, [ask(PROMPTS[0], SamplingParams(12), seed=3)])
    stop = int(free.tokens[4])
    first = free.tokens.tolist().index(stop)
    (stopped,) = generate(tied_server.engine, [ask(PROMPTS[0], SamplingParams(12, stop_tokens=(stop,)), seed=3)])
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert stopped.finish == "stop"
    assert stopped.text == "".join(f"w{token}" for token in free.tokens[:first])
    assert free.finish == "length"
    assert free.text == "".join(f"w{token}" for token in free.tokens)


def test_the_models_own_end_token_ends_a_response(tied_server: Served) -> None:
    samples = generate(tied_server.engine, [ask(PROMPTS[0], SamplingParams(120), seed=seed) for seed in range(24)])
    ended = [sample for sample in samples if END in sample.tokens]
    assert len(ended) > 3
    for sample in ended:
        assert sample.finish == "stop"
        assert sample.tokens.tolist().index(END) == len(sample.tokens) - 1


def test_requests_past_their_time_limit_which_counts_while_they_wait_are_aborted_with_what_they_have(
    tied_server: Served,
) -> None:
    asked = [ask(ENDLESS_PROMPT, ENDLESS, index=i) for i in range(4)]
    with tied_server.trained("rollout.timeout_seconds=1", "rollout.requests_at_once=1") as (engine, _):
        first, *others = generate(engine, asked)
    assert first.finish == "abort"
    assert 0 < len(first.tokens) < ENDLESS.max_tokens
    assert difference(tied_server.directory, asked[0], first).max() < 1e-5
    assert [(sample.finish, len(sample.tokens)) for sample in others] == [("abort", 0)] * 3  # they had no turn in time


def test_an_engine_that_keeps_the_weights_of_anybodys_server_asks_it_for_responses_alone(tied_server: Served) -> None:
    tied_server.post("/update_weight_version", {"new_version": "theirs", "abort_all_requests": False})
    log, asked = tied_server.server.log, ask(PROMPTS[0], SamplingParams(6, temperature=0.0))
    before = len(log.read_text())
    with tied_server.borrowed("model.dtype=bfloat16", keeps_weights=True) as engine:
        (sample,) = generate(engine, [asked])
        seen = set(re.findall(r'"(\w+ /\w+) HTTP', log.read_text()[before:]))
    assert seen == {"GET /server_info", "POST /generate"}
    assert difference(tied_server.directory, asked, sample).max() < 1e-5
    assert (sample.versions == 0).all(), "whatever the server calls its weights"


def test_a_prompt_that_does_not_fit_is_refused_with_what_the_server_says_and_ends_the_others(
    tied_server: Served,
) -> None:
    with pytest.raises(EngineError, match="context length"):
        generate(tied_server.engine, [ask(ENDLESS_PROMPT, ENDLESS), ask([5] * (CONTEXT + 4), SamplingParams(4))])
    tied_server.wait_for_requests(0)
    with pytest.raises(EngineError, match="no tokens"):
        generate(tied_server.engine, [ask([], SamplingParams(4))])
    assert generate(tied_server.engine, []) == []


@pytest.mark.parametrize("which", ["split_server", pytest.param("latent_server", marks=pytest.mark.long)])
def test_routes_are_transformers_own_and_come_whole_after_a_response_was_cut(
    which: str, request: pytest.FixtureRequest
) -> None:
    served: Served = request.getfixturevalue(which)
    routed = replace(ENDLESS, max_tokens=30, temperature=1.0, routes=True)
    asked = [ask(range(5, 5 + tokens), routed, seed=tokens, index=tokens) for tokens in (1, 4, 5, 30)]
    plain = ask(range(5, 9), replace(routed, routes=False))
    *samples, unasked = generate(served.engine, [*asked, plain])
    assert unasked.routes is None
    begun = [
        replace(s, tokens=s.tokens[:9], logprobs=s.logprobs[:9], versions=s.versions[:9], routes=None) for s in samples
    ]
    again = [replace(one, begun=cut) for one, cut in zip(asked, begun, strict=True) if len(cut.tokens) == 9]
    assert again
    for one, sample in zip([*asked, *again], [*samples, *generate(served.engine, again)], strict=True):
        expected = routes_of(served.directory, [*one.tokens, *sample.tokens.tolist()])
        assert sample.routes is not None
        assert np.array_equal(sample.routes.experts, expected)
