"""From a server's answer to a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megagrpo.errors import EngineError, Problem
from megagrpo.types import FinishReason, Request, Sample

FINISHES: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def read_sample(
    request: Request, answer: Mapping[str, Any], text_of: Callable[[np.ndarray, FinishReason], str], engine: str
) -> Sample:
    """The sample that /generate answered with (SGLang 0.5.23).

    Raises EngineError if tokens, logprobs and weight versions do not belong together.
    """
    meta = answer["meta_info"]
    tokens = np.array(answer["output_ids"], dtype=np.int32)
    entries = meta.get("output_token_logprobs") or []
    logprobs = np.array([entry[0] for entry in entries], dtype=np.float32)
    finish = FINISHES.get((meta.get("finish_reason") or {}).get("type", ""))
    versions = _versions(meta, len(tokens))
    agree = [entry[1] for entry in entries] == tokens.tolist() and np.isfinite(logprobs).all()
    if finish is None or versions is None or not agree:
        raise EngineError(
            Problem(
                f"{engine}: an answer for prompt {request.prompt_id}",
                given=f"{len(tokens)} tokens, {len(logprobs)} logprobs of them (or some that are not finite), "
                f"finish_reason {meta.get('finish_reason')}, weight_versions {meta.get('weight_versions')}",
                needed="a finite logprob for each token, a known end, and a weight version of this run for each token",
            )
        )
    text = text_of(tokens, finish)
    return Sample(request.prompt_id, request.index, tokens, logprobs, versions, finish, text)


def aborted_sample(request: Request) -> Sample:
    """A request that was given up before the server saw it."""
    nothing = np.zeros(0, dtype=np.int32)
    return Sample(request.prompt_id, request.index, nothing, nothing.astype(np.float32), nothing, "abort", "")


def _versions(meta: Mapping[str, Any], count: int) -> np.ndarray | None:
    """The version of each token, int32 [count], or None if one is missing or is none of ours."""
    spans = meta.get("weight_versions")
    if spans is None:
        spans = [{"version": meta.get("weight_version"), "start": 0, "end": count}]
    versions = np.full(count, -1, dtype=np.int32)
    for span in spans:
        if span["end"] > span["start"]:
            if not str(span["version"]).isdecimal():
                return None
            versions[span["start"] : span["end"]] = int(span["version"])
    return None if (versions < 0).any() else versions
