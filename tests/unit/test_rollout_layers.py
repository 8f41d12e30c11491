"""Responses of models with layers of several kinds, in batches, against transformers' generate on each prompt alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from megagrpo.rollout.decoding import Record, decode
from megagrpo.rollout.transformers_engine import _load_model
from megagrpo.types import Request, Sample, SamplingParams
from tests.rollout_engines import request
from tests.tiny_models import DIMENSIONS, randomize
from tests.unit.test_rollout_generation import assert_logprobs

PROMPTS = [prompt for prompt in ([5], [9, 8, 3, 1, 2, 77], list(range(20, 37))) for _ in range(2)]
LIMITS = [4, 38, 12, 5, 12, 24]
"""Most tokens of a response. A cache grows once 32 are sampled."""
WINDOW: dict[str, Any] = {"sliding_window": 7, "head_dim": 16}
STATES = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS: dict[str, dict[str, Any]] = {
    "GptOss": WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma2": WINDOW | {"attn_logit_softcapping": 0.3, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 9},
    "Gemma3Text": WINDOW | {"sliding_window_pattern": 2},
    "Olmo3": WINDOW,
    "Exaone4": WINDOW | {"sliding_window_pattern": 2},
    "SmolLM3": {"no_rope_layer_interval": 2, "pad_token_id": 0},
    "Mistral": WINDOW,
    "Ministral3": WINDOW,
    "Phi3": {"sliding_window": 7, "pad_token_id": 0},
    "Qwen3Next": STATES | EXPERTS | {"shared_expert_intermediate_size": 20},
    "Qwen3_5Text": STATES,
    "Qwen3_5MoeText": STATES | EXPERTS | {"shared_expert_intermediate_size": 20},
}


def tiny(family: str, directory: Path) -> Any:
    """Loads a random model as the engine does."""
    dimensions = {key: value for key, value in DIMENSIONS.items() if key != "attn_implementation"}
    config = getattr(transformers, f"{family}Config")(**(dimensions | {"eos_token_id": None} | CONFIGS[family]))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, 3)
    model.save_pretrained(directory)
    return _load_model(str(directory), "cpu", "float32")


def decoded(model: Any, requests: Sequence[Request]) -> list[Sample]:
    record = Record(requests)
    with torch.inference_mode():
        decode(model, record, (), lambda: 0, "the engine")
    return record.samples()


@pytest.mark.parametrize("family", CONFIGS)
def test_responses_are_those_of_each_prompt_alone_and_go_on_where_they_ended(family: str, tmp_path: Path) -> None:
    model = tiny(family, tmp_path)
    sinks_or_caps = family in ("GptOss", "Gemma2")
    assert model.config._attn_implementation == ("eager" if sinks_or_caps else "sdpa")
    asked = [
        request(prompt, SamplingParams(limit, temperature=0.0)) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)
    ]
    samples = decoded(model, asked)
    begun = decoded(model, [replace(one, sampling=SamplingParams(3, temperature=0.0)) for one in asked])
    resumed = decoded(model, [replace(one, begun=sample) for one, sample in zip(asked, begun, strict=True)])
    model.set_attn_implementation("eager")
    atol = 1e-4 if "linear_attention" in CONFIGS[family].get("layer_types", ()) else 1e-5
    for prompt, limit, sample, again in zip(PROMPTS, LIMITS, samples, resumed, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=limit, do_sample=False, pad_token_id=0)
        assert sample.tokens.tolist() == again.tokens.tolist() == expected[0, len(prompt) :].tolist()
        assert_logprobs(model, prompt, sample, temperature=1.0, atol=atol)
        np.testing.assert_allclose(again.logprobs, sample.logprobs, atol=atol, rtol=0)
