"""A real SGLang server of a tiny model of each further family: weights of other training ranks, and what is sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout.kinds import ENGINES
from megagrpo.types import SamplingParams
from megagrpo.weights.transport.choice import TransportName
from megagrpo.weights.transport.disk import DiskFiles
from tests.engines.policy import Policy, check_logprobs
from tests.engines.servers import CONTEXT, serve
from tests.rollout_engines import generate, model_directory, routes_of
from tests.rollout_engines import request as ask
from tests.sglang.test_weights import check_holds

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ONE_THETA: dict[str, Any] = {"rope_theta": 5e5}
BY_KIND = {"full_attention": YARN | ONE_THETA, "sliding_attention": {"rope_type": "default"} | ONE_THETA}
OLD_ROPE = ONE_THETA | {"rope_parameters": None, "rope_scaling": YARN}
PUBLISHED = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
LATENT = {"rms_norm_eps": 1e-6}
WHOLE = {"intermediate_size": 128}
"""Some of SGLang's loaders of files cannot pad matrices, as it does on CPUs."""
SCALED = YARN | {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384}
TENSOR, PIPELINE, BOTH = ParallelLayout(tensor=2), ParallelLayout(pipeline=2), ParallelLayout(tensor=2, pipeline=2)
EXPERTS = ParallelLayout(data=2, expert=2)
LONG, SOAK = pytest.mark.long, pytest.mark.soak

# family, changes of its tiny config, keys of config.json as published, ranks of the engine and of training, transport
SERVED: list[tuple[str, dict[str, Any], dict[str, Any], int, ParallelLayout, str, pytest.MarkDecorator]] = [
    ("gemma3_text", {"tie_word_embeddings": True}, {}, 1, TENSOR, "shared_memory", LONG),
    ("glm4_moe", {}, {}, 2, EXPERTS, "process_group", LONG),
    ("olmo3", {"rope_parameters": BY_KIND}, OLD_ROPE, 2, TENSOR, "disk", LONG),
    ("arcee", WHOLE, {}, 2, PIPELINE, "disk", SOAK),
    ("ernie4_5", WHOLE, {}, 2, TENSOR, "shared_memory", SOAK),
    ("glm4", WHOLE, {}, 2, TENSOR, "disk", SOAK),
    ("glm4_moe_lite", LATENT, {}, 2, EXPERTS, "disk", SOAK),
    ("granite", {}, {}, 2, BOTH, "shared_memory", SOAK),
    ("kimi_k2", LATENT | PUBLISHED, {}, 2, EXPERTS, "shared_memory", SOAK),
    ("ministral3", {"rope_parameters": SCALED}, {}, 2, PIPELINE, "process_group", SOAK),
    ("olmo2", {}, {}, 2, PIPELINE, "process_group", SOAK),
    ("phi3", WHOLE, {}, 2, TENSOR, "disk", SOAK),
    ("seed_oss", WHOLE, {}, 2, PIPELINE, "process_group", SOAK),
    ("smollm3", WHOLE, {}, 2, TENSOR, "disk", SOAK),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes", "keys", "tensor", "layout", "transport"),
    [pytest.param(*case[:-1], id=case[0], marks=case[-1]) for case in SERVED],
)
def test_a_family_is_served_with_the_weights_of_training_ranks(
    family: str,
    changes: dict[str, Any],
    keys: dict[str, Any],
    tensor: int,
    layout: ParallelLayout,
    transport: str,
    tmp_path: Path,
) -> None:
    directory = model_directory(family, tmp_path / family, **changes, max_position_embeddings=CONTEXT)
    config = json.loads((directory / "config.json").read_text()) | keys
    (directory / "config.json").write_text(json.dumps({key: its for key, its in config.items() if its is not None}))
    assert list(ENGINES["sglang"].model_problems(directory)) == []
    with serve(directory, family, EngineLayoutConfig(tensor=tensor), **changes) as served:
        files = DiskFiles(tmp_path / "versions", directory, "float32")
        policy = Policy(served.engine, served, layout, TransportName(transport), files=files)
        for version in (1, 2):
            weights = served.weights(version)
            policy.sync(version, weights)
            check_holds(served.engine, weights)
            asked = [ask(range(5, 5 + tokens), SamplingParams(24, routes=True), seed=version) for tokens in (4, 30)]
            samples = generate(served.engine, asked)
            check_logprobs(samples, asked, {version: weights})
            for one, sample in zip(asked, samples, strict=True):
                assert (sample.routes is not None) == bool(policy.arch.experts)
                if sample.routes is not None:
                    expected = routes_of(weights, [*one.tokens, *sample.tokens.tolist()])
                    assert np.array_equal(sample.routes.experts, expected)
        policy.close()
