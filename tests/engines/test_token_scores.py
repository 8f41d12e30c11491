"""Real servers tell the logprobs of given tokens, as a teacher's does, and of its own most likely ids."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.rollout.kinds import ENGINES
from megagrpo.types import TeacherTokens
from tests.engines.conftest import EACH
from tests.engines.policy import WAIT_SECONDS, logits_of
from tests.engines.servers import CONTEXT, Served

LAST = 130
"""The last id of the vocabulary, which SGLang shows as 0."""
SEQUENCES = {
    "short": ([5, 6, 9, 11, 20, 0, LAST, 95], 3),
    "the first token is given": ([90, 7], 1),
    "the same prefix again": ([5, 6, 9, 11, 20, 0, LAST, 96, 97], 1),
    "long": ([(7 * i + i * i) % 131 for i in range(CONTEXT - 8)], 2),
}


def asked(served: Served, tokens: Sequence[int], first: int, k: int) -> TeacherTokens:
    scores = ENGINES[served.kind].token_scores
    headers = {"Authorization": f"Bearer {served.server.api_key}", "Content-Type": "application/json"}
    body = json.dumps(scores.body(tokens, first, k)).encode()
    request = urllib.request.Request(served.server.url + scores.path, body, headers)
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
        given: Any = json.load(answer)
    return scores.read(given, tokens, first, k)


@pytest.mark.parametrize("k", [0, 20])
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("served", [*EACH, "split"], indirect=True)
def test_logprobs_of_given_tokens_are_those_of_transformers(served: Served, sequence: str, k: int) -> None:
    tokens, first = SEQUENCES[sequence]
    found = asked(served, tokens, first, k)
    expected = logits_of(served.directory, tokens[:first], tokens[first:]).log_softmax(-1)
    of_tokens = expected[torch.arange(len(tokens) - first), tokens[first:]].numpy()
    assert np.abs(found.logprobs - of_tokens).max() < 1e-5
    assert found.ids.shape == found.ids_logprobs.shape == (len(tokens) - first, k)
    if k:
        at_ids = expected.gather(1, torch.from_numpy(found.ids).long()).numpy()
        assert np.abs(found.ids_logprobs - at_ids).max() < 1e-5
        assert np.abs(found.ids_logprobs - expected.topk(k).values.numpy()).max() < 1e-5


@pytest.mark.parametrize("served", EACH, indirect=True)
def test_a_token_beyond_the_vocabulary_is_refused_and_harms_nothing(served: Served) -> None:
    with pytest.raises(urllib.error.HTTPError):
        asked(served, [5, 6, LAST + 1], 1, 0)
    assert asked(served, [5, 6], 1, 0).logprobs.shape == (1,)
