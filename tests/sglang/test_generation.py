"""Kept sets and routes, which only SGLang's samples have. (What all servers' have: tests/engines.)"""

import re
from dataclasses import replace

import numpy as np
import pytest

from megagrpo.types import SamplingParams
from tests.engines.policy import difference, logits_of
from tests.engines.servers import PROMPT, Served
from tests.rollout_engines import generate, request, routes_of

PROMPTS = (PROMPT, [20, 21, 22, 23, 24, 25, 26], [90])
ask = request


@pytest.mark.parametrize("which", ["tied_server", "split_server"])
def test_logprobs_in_a_narrow_distribution_are_those_over_the_whole_vocabulary(
    which: str, request: pytest.FixtureRequest
) -> None:
    served: Served = request.getfixturevalue(which)
    asked = [ask(prompt, SamplingParams(24, top_p=0.7, top_k=20), seed=i) for i, prompt in enumerate(PROMPTS)]
    for one, sample in zip(asked, generate(served.engine, asked), strict=True):
        assert difference(served.directory, one, sample).max() < 1e-5


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


@pytest.mark.parametrize("which", ["split_server", pytest.param("latent_server", marks=pytest.mark.long)])
def test_routes_are_transformers_own_and_come_whole_after_a_response_was_cut(
    which: str, request: pytest.FixtureRequest
) -> None:
    served: Served = request.getfixturevalue(which)
    routed = SamplingParams(30, routes=True)
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
