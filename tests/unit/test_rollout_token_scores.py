"""Answers to requests for the logprobs of given tokens, as real servers gave them, and those that are refused."""

import base64
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from megagrpo.errors import EngineError
from megagrpo.rollout.kinds import ENGINES
from megagrpo.types import TeacherTokens

TOKENS, FIRST, K = (5, 6, 9, 0, 130), 2, 2
LOGPROBS, IDS = (-2.0, -0.5, -4.0), ((3, 9), (0, 7), (8, 2))
IDS_LOGPROBS = ((-0.25, -2.0), (-0.5, -1.0), (-0.75, -1.5))


def sglang(k: int) -> dict[str, Any]:
    """SGLang shows the vocabulary's last id, 130, as 0."""
    entries = [[None, 6, None], *([p, t, None] for p, t in zip(LOGPROBS, (9, 0, 0), strict=True))]
    likely = {
        "input_top_logprobs_shape": [3, k],
        "input_top_logprobs_null_prefix": 1,
        "input_top_logprobs_idx_flat_b64": base64.b64encode(np.array(IDS, np.int32).tobytes()).decode(),
        "input_top_logprobs_val_flat_b64": base64.b64encode(np.array(IDS_LOGPROBS, np.float32).tobytes()).decode(),
    }
    of_largest = [None, *([[p, 130, None]] for p in (-7.0, -8.0, LOGPROBS[2]))]
    read = {"input_token_logprobs": entries, "input_token_ids_logprobs": of_largest}
    return {"output_ids": [], "meta_info": {**read, **(likely if k else {})}}


def vllm(k: int) -> dict[str, Any]:
    entries: list[dict[str, Any] | None] = [None, {"6": {"logprob": -1.0, "rank": 1, "decoded_token": None}}]
    for token, logprob, ids, values in zip(TOKENS[FIRST:], LOGPROBS, IDS, IDS_LOGPROBS, strict=True):
        likely = {str(id_): {"logprob": value} for id_, value in zip(ids[:k], values, strict=False)}
        entries.append({str(token): {"logprob": logprob}, **likely})
    return {"choices": [{"text": "", "prompt_logprobs": entries}]}


ANSWERS = {"sglang": sglang, "external_vllm": vllm}


def read(engine: str, answer: Any, k: int = K, tokens: Sequence[int] = TOKENS) -> TeacherTokens:
    return ENGINES[engine].token_scores.read(answer, tokens, FIRST, k)


@pytest.mark.parametrize("k", [0, K])
@pytest.mark.parametrize("engine", ANSWERS)
def test_an_answer_is_read_token_by_token(engine: str, k: int) -> None:
    found = read(engine, ANSWERS[engine](k), k)
    assert found.logprobs.tolist() == list(LOGPROBS)
    assert found.ids.tolist() == [list(ids[:k]) for ids in IDS]
    assert found.ids_logprobs.tolist() == [list(values[:k]) for values in IDS_LOGPROBS]
    assert [array.dtype for array in (found.logprobs, found.ids, found.ids_logprobs)] == [
        np.float32,
        np.int32,
        np.float32,
    ]


def changed(answer: Mapping[str, Any], path: Sequence[Any], value: Any) -> Any:
    copy: Any = deepcopy(answer)
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copy


OF_SGLANG, OF_VLLM = ("meta_info", "input_token_logprobs"), ("choices", 0, "prompt_logprobs")


@pytest.mark.parametrize(
    ("engine", "path", "value", "said"),
    [
        ("sglang", (*OF_SGLANG, 1), [-2.0, 8, None], "token 8 in the place of 9, token 2"),
        ("sglang", (*OF_SGLANG, 1), [-2.0, 0, None], "token 0 in the place of 9"),
        ("sglang", (*OF_SGLANG, 3, 0), -4.5, "token 0 in the place of 130"),
        ("sglang", (*OF_SGLANG, 1, 0), None, "nan as the logprob of a token"),
        ("sglang", (*OF_SGLANG, 1, 0), 0.5, "0.5 as the logprob of a token"),
        ("sglang", (*OF_SGLANG, 1, 0), "x", "ValueError"),
        ("sglang", OF_SGLANG, [], "arrays of shapes"),
        ("sglang", OF_SGLANG, None, "TypeError"),
        ("sglang", ("meta_info",), {}, "KeyError: 'input_token_logprobs'"),
        ("sglang", ("meta_info", "input_top_logprobs_shape"), [2, 3], "arrays of shapes"),
        ("sglang", ("meta_info", "input_top_logprobs_val_flat_b64"), "AAAA", "ValueError"),
        (
            "external_vllm",
            (*OF_VLLM, 2),
            {"8": {"logprob": -1.0}, "9": {"logprob": -1.0}, "1": {"logprob": -2.0}},
            "token 8",
        ),
        ("external_vllm", (*OF_VLLM, 3, "0", "logprob"), float("nan"), "nan as the logprob of a token"),
        ("external_vllm", (*OF_VLLM, 2, "9", "logprob"), -9999.0, "-inf as the logprob of a token"),
        ("external_vllm", (*OF_VLLM, 4), {"130": {"logprob": -4.0}}, "ValueError"),
        ("external_vllm", (*OF_VLLM, 4), None, "TypeError"),
        ("external_vllm", OF_VLLM, None, "TypeError"),
        ("external_vllm", ("choices",), [], "IndexError"),
    ],
)
def test_an_answer_of_other_tokens_or_without_logprobs_is_refused(
    engine: str, path: Sequence[Any], value: Any, said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        read(engine, changed(ANSWERS[engine](K), path, value))


def test_what_sums_round_above_zero_is_read_as_zero() -> None:
    assert read("sglang", changed(sglang(K), (*OF_SGLANG, 1, 0), 1e-6)).logprobs[0] == 0
