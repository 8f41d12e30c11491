"""Requests to vLLM and its answers: the body of GENERATE, and its parts, are those of vLLM 0.32.0."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from megagrpo.errors import EngineError, Problem, brief
from megagrpo.rollout.answers import Answer
from megagrpo.rollout.client import EngineClient, ask_about_model
from megagrpo.rollout.requests import SEED_BITS
from megagrpo.rollout.token_scores import TokenLogprobs, TokenScores
from megagrpo.rollout.vllm.arguments import GENERATE
from megagrpo.splitmix64 import GAMMA
from megagrpo.types import Request

TOKENS_PER_PART = 50
"""Tokens per part of a stream: fewer take time of the process that answers."""
NO_PROBABILITY = -9999.0
"""vLLM's number for the logprob of an impossible token, since JSON has no infinity."""
PREFIX = "generate-tokens-"
"""The beginning of the name that vLLM gives to a request."""


def generate_body(request: Request, request_id: str, version: int, stops: Collection[int]) -> dict[str, Any]:
    """Returns what is posted to generate one sample; the answer comes in parts. It shares keys and values of its prompt
    only with requests of the same weight version: others' may be of other weights.

    stops: tokens that end every response, the only ones besides those of the request.
    """
    sampling = request.sampling
    return {
        "request_id": request_id,
        "token_ids": list(request.read),
        "cache_salt": str(version),
        "stream": True,
        "sampling_params": {
            "max_tokens": request.tokens_left,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": sorted({*sampling.stop_tokens, *stops}),
            "ignore_eos": True,
            "seed": seed_of(request),
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
            "stream_interval": TOKENS_PER_PART,
        },
    }


def seed_of(request: Request) -> int:
    """Returns the seed of a request, in [0, 2**63). vLLM draws by a generator that begins anew with each request: a
    response that resumes has another seed, or it would be drawn by the numbers of its first tokens again."""
    begun = request.sampling.max_tokens - request.tokens_left
    return (request.seed + begun * GAMMA) % 2**SEED_BITS


class VllmAnswer(Answer):
    """An answer of a stream."""

    def add(self, part: Mapping[str, Any]) -> None:
        for choice in part["choices"]:
            tokens, entries = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
            self._agree &= [entry["token_id"] for entry in entries] == tokens
            self._tokens.extend(tokens)
            self._logprobs.extend(entry["logprob"] for entry in entries)
            self._finish = choice["finish_reason"] or ""
            self._reported = f"finish_reason {self._finish}, weight_versions {choice['weight_versions']}"
            self._add_versions(choice["weight_versions"])


def scores_body(tokens: Sequence[int], first: int, k: int) -> dict[str, Any]:
    """Returns the body of /v1/completions for the logprobs of given tokens: a server started by plain `vllm serve` does
    not answer at GENERATE. vLLM reads no keys and values from its cache for such a request, and samples a token. One
    beyond its vocabulary would end its engine, but it refuses to stop at such a token."""
    largest = {"stop_token_ids": [max(tokens)]}
    return {"prompt": list(tokens), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k, **largest}


def scores_of(answer: Any, tokens: Sequence[int], first: int, k: int) -> TokenLogprobs:
    """Reads the answer. An entry has the token first, then the most likely ids, the token again if it is among them."""
    entries = answer["choices"][0]["prompt_logprobs"][first:]
    read, logprobs, ids, ids_logprobs = list[int](), list[float](), list[list[int]](), list[list[float]]()
    for entry in entries:
        token = next(iter(entry))
        of_entry = {int(id_): one["logprob"] for id_, one in entry.items() if id_ != token or len(entry) == k}
        likely = sorted(of_entry, key=lambda id_: -of_entry[id_])[:k]
        read.append(int(token))
        logprobs.append(entry[token]["logprob"])
        ids.append(likely)
        ids_logprobs.append([of_entry[id_] for id_ in likely])
    given = np.array(logprobs, np.float32)
    return read, np.where(given == NO_PROBABILITY, -np.inf, given), ids, ids_logprobs


SCORES = TokenScores("/v1/completions", scores_body, scores_of)


def served_model(url: str, api_key: str) -> Mapping[str, Any]:
    """Returns the path of a server's model. Raises EngineError if none answers there."""
    models = ask_about_model(url, "/v1/models", api_key, "vLLM")
    try:
        return {"model_path": models["data"][0]["root"]}
    except (LookupError, TypeError):
        raise EngineError(Problem(url, f"/v1/models: {brief(models)}", "a running vLLM server")) from None


class VllmClient(EngineClient):
    """A connection to one vLLM server."""

    GENERATE = GENERATE

    async def abort(self, request_id: str) -> None:
        await self.request("POST /inference/v1/abort_requests", {"request_ids": [PREFIX + request_id]})

    def refusal(self, part: Mapping[str, Any]) -> Any:
        return None if "choices" in part else part.get("error", part)
