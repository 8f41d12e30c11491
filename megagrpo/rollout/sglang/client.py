"""Requests to SGLang and its answers: the body of /generate, and its parts, are those of SGLang 0.5.23."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megagrpo.errors import EngineError, Problem
from megagrpo.rollout.answers import Answer
from megagrpo.rollout.client import EngineClient, ask_about_model
from megagrpo.rollout.token_scores import ROUNDING, TokenLogprobs, TokenScores
from megagrpo.routes import FIX, Routes, RouteSizes
from megagrpo.types import Request

TOKENS_PER_PART = 50
"""Tokens per part of a stream. SGLang's scheduler sends as many at once to its HTTP server if nothing is streamed."""


def generate_body(
    request: Request, rid: str, version: int, stops: Collection[int], *, streams: bool, routes: bool = False
) -> dict[str, Any]:
    """Returns the body of /generate for one sample; the answer comes in parts if it `streams`. It shares keys and
    values of its prompt only with requests of the same weight version: others' may be of other weights. With n > 1, all
    samples of a prompt would have the seed of the first, could not be aborted alone, and would be answered together.
    `routes`: the answer is to have those of all tokens that were read, which that of an aborted request never has.

    stops: tokens that end every response. SGLang itself knows those of the model's files, but has no tokenizer."""
    sampling = request.sampling
    return {
        "rid": rid,
        "input_ids": list(request.read),
        "return_logprob": True,
        **({"return_routed_experts": True} if routes else {}),
        **({"return_sampling_mask": True} if sampling.kept_sets else {}),
        "extra_key": str(version),
        "stream": streams,
        "sampling_params": {
            "max_new_tokens": request.tokens_left,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": sorted({*sampling.stop_tokens, *stops}),
            "sampling_seed": request.seed,
            "stream_interval": TOKENS_PER_PART,
        },
    }


class SglangAnswer(Answer):
    """An answer of a server with incremental_streaming_output, or a whole one."""

    def add(self, part: Mapping[str, Any]) -> None:
        meta = part["meta_info"]
        reason = meta.get("finish_reason") or {}
        # SGLang ends a request that waits with tokens that it has sent before, after those that it has not.
        new = meta["completion_tokens"] - len(self._tokens)
        tokens, entries = part["output_ids"][:new], (meta.get("output_token_logprobs") or [])[:new]
        self._agree &= len(tokens) == new and [entry[1] for entry in entries] == tokens
        logprobs = [entry[0] for entry in entries]
        if self.request.sampling.kept_sets:
            logprobs = (meta.get("output_token_sampling_logprobs") or [])[:new]  # renormalised over the sets
            sets = (meta.get("output_token_sampling_mask") or [])[:new]
            self._agree &= all(sets)
            self._sets += [np.array(one or [], np.int64) for one in sets]
            if reason.get("type") == "abort":
                tokens = tokens[: len(sets)]  # SGLang sends no sets at the end of a request that waits
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)
        self._finish, self._routed = reason.get("type", ""), meta.get("routed_experts")
        spans = meta.get("weight_versions")
        self._reported = f"finish_reason {meta.get('finish_reason')}, weight_versions {spans}"
        if spans is None and self.ended:
            spans = [{"version": meta.get("weight_version"), "start": 0, "end": len(self._tokens)}]
        self._add_versions(spans)


@dataclass(frozen=True)
class ServedRoutes:
    """The sizes of a model's routes, and of SGLang's answers, which have dense layers as well."""

    sizes: RouteSizes
    layers: int
    with_experts: Sequence[int]  # of these, those with experts

    def read(self, answer: str, where: str, tokens: int) -> Routes:
        """Returns the routes of a sequence, from int32 [tokens read, layers, experts per token] in base64. Raises
        EngineError if they cannot be its routes."""
        values = np.frombuffer(base64.b64decode(answer), np.int32)
        if len(values) != (tokens - 1) * self.layers * self.sizes.per_token:
            needed = f"{tokens - 1} tokens read x {self.layers} layers x {self.sizes.per_token}"
            raise EngineError(Problem(where, f"{len(values)} experts in meta_info.routed_experts", needed, FIX))
        experts = values.reshape(tokens - 1, self.layers, self.sizes.per_token)[:, self.with_experts]
        self.sizes.require(experts, where, tokens - 1)
        return Routes.of(experts)


def scores_body(tokens: Sequence[int], first: int, k: int) -> dict[str, Any]:
    """Returns the body of /generate for the logprobs of given tokens. Keys and values of the tokens before them may
    come from the cache; SGLang computes those of all others. It scales logprobs by no temperature but those of tokens
    that it samples. It takes any token for its last one that is beyond its vocabulary, but refuses to tell logprobs at
    such an id."""
    flat = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True} if k else {}
    return {
        "input_ids": list(tokens),
        "return_logprob": True,
        "logprob_start_len": first - 1,
        "top_logprobs_num": k,
        "token_ids_logprob": [max(tokens)],
        **flat,
        "sampling_params": {"max_new_tokens": 0},
    }


def scores_of(answer: Any, tokens: Sequence[int], first: int, k: int) -> TokenLogprobs:
    """Reads the answer. Its first entry is of the token before, without a logprob."""
    meta = answer["meta_info"]
    entries = meta["input_token_logprobs"][1:]
    wanted, read = np.asarray(tokens[first:]), np.array([entry[1] for entry in entries])
    if read.shape == wanted.shape and (shown := (read == 0) & (wanted == max(1, max(tokens)))).any():
        # SGLang shows the last id of the vocabulary as 0: it was the largest if it has the logprob of that
        given, of_largest = np.array([entry[0] for entry in entries], float), meta["input_token_ids_logprobs"][1:]
        same = np.isclose(given, [at_ids[0][0] for at_ids in of_largest], rtol=0, atol=ROUNDING)
        read = np.where(shown & same, wanted, read)
    ids = ids_logprobs = np.zeros((len(entries), 0))
    if k:
        shape = meta["input_top_logprobs_shape"]
        ids, ids_logprobs = (
            np.frombuffer(base64.b64decode(meta[f"input_top_logprobs_{name}_flat_b64"]), dtype).reshape(shape)
            for name, dtype in (("idx", np.int32), ("val", np.float32))
        )
    return read, [entry[0] for entry in entries], ids, ids_logprobs


SCORES = TokenScores("/generate", scores_body, scores_of)


def served_model(url: str, api_key: str) -> Mapping[str, Any]:
    """Returns the /model_info of a server. Raises EngineError if none answers there."""
    info = ask_about_model(url, "/model_info", api_key, "SGLang")
    return info if isinstance(info, dict) else {}


class SglangClient(EngineClient):
    """A connection to one SGLang server."""

    GENERATE = "/generate"

    async def abort(self, request_id: str) -> None:
        """Aborts the request of this id. All ids have one length, because SGLang takes a prefix of an id for the id."""
        await self.request("POST /abort_request", {"rid": request_id})

    def refusal(self, part: Mapping[str, Any]) -> Any:
        reason = part.get("meta_info", {}).get("finish_reason") or {}
        if "meta_info" in part and (reason.get("status_code") or 0) < 400:
            return None
        return part.get("error") or reason or part
