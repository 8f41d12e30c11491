"""Responses of every family, in batches, against transformers' generate on each prompt alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.types import SamplingParams
from tests.rollout_engines import generate, model_directory, request, start_engine
from tests.tiny_models import COMPOSITES, TINY_FAMILIES
from tests.unit.test_rollout_generation import assert_logprobs

PROMPTS = [prompt for prompt in ([5], [9, 8, 3, 1, 2, 77], list(range(20, 37))) for _ in range(2)]
LIMITS = [4, 38, 12, 5, 12, 24]
"""Most tokens of a response. A cache grows once 32 are sampled."""
CHANGES: dict[str, dict[str, Any]] = {"phi3_long": {"original_max_position_embeddings": 64}}
"""Sizes of tiny families: beyond that length, transformers' own responses begin with the factors of short ones."""


@pytest.mark.parametrize("family", [*TINY_FAMILIES, *COMPOSITES])
def test_responses_are_those_of_each_prompt_alone_and_go_on_where_they_ended(family: str, tmp_path: Path) -> None:
    engine = start_engine(model_directory(family, tmp_path, eos_token_id=None, **CHANGES.get(family, {})))
    model, sinks_or_caps = engine._model, family in ("gpt_oss", "gemma2")
    assert model.config._attn_implementation == ("eager" if sinks_or_caps else "sdpa")
    asked = [
        request(prompt, SamplingParams(limit, temperature=0.0)) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)
    ]
    samples = generate(engine, asked)
    begun = generate(engine, [replace(one, sampling=SamplingParams(3, temperature=0.0)) for one in asked])
    resumed = generate(engine, [replace(one, begun=sample) for one, sample in zip(asked, begun, strict=True)])
    model.set_attn_implementation("eager")
    atol = 1e-4 if "linear_attention" in (getattr(model.config, "layer_types", None) or ()) else 1e-5
    for prompt, limit, sample, again in zip(PROMPTS, LIMITS, samples, resumed, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=limit, do_sample=False, pad_token_id=0)
        assert sample.tokens.tolist() == again.tokens.tolist() == expected[0, len(prompt) :].tolist()
        assert_logprobs(model, prompt, sample, temperature=1.0, atol=atol)
        np.testing.assert_allclose(again.logprobs, sample.logprobs, atol=atol, rtol=0)
