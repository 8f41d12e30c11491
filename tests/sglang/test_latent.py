"""Latent attention on a real SGLang server, which computes with copies (w_kc, w_vc) that it makes of what it loads."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megagrpo.errors import WeightSyncError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.types import SamplingParams
from megagrpo.weights.executors.ways import Way
from tests.rollout_engines import model_directory, request
from tests.sglang.servers import Served
from tests.sglang.test_shards import PROMPT, check_holds, check_logprobs
from tests.sglang.test_staged import StagedPolicy

pytestmark = pytest.mark.long
DERIVED_FROM = "model.layers.1.self_attn.kv_b_proj.weight"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    root = tmp_path_factory.mktemp("weights")
    return lambda seed: model_directory("deepseek_v3", root / str(seed), seed=seed)


def test_it_samples_from_the_weights_that_came_and_derived_ones_that_stayed_old_are_named(
    latent_server: Served, weights: Callable[[int], Path]
) -> None:
    with latent_server.borrowed() as engine:
        policy = StagedPolicy(engine, latent_server.directory, ParallelLayout(), Way.TENSORS)
        for version in (1, 2):
            policy.sync(version, weights(version))
            check_holds(engine, weights(version))
            (sample,) = engine.generate([request(PROMPT, SamplingParams(24), seed=version)])
            assert (sample.versions == version).all()
            check_logprobs([sample], [PROMPT], {version: weights(version)})
            # Again with some of its tokens in the prompt, whose latents are cached already.
            longer = (*PROMPT, *sample.tokens.tolist()[:12])
            (again,) = engine.generate([request(longer, SamplingParams(12), seed=version)])
            check_logprobs([again], [longer], {version: weights(version)})

        engine.begin_update(3)
        assert not policy.move(3, weights(3))
        shape = engine.manifests()[0].storages[DERIVED_FROM].shape
        payload = base64.b64encode(pickle.dumps([(DERIVED_FROM, torch.ones(shape))])).decode()
        body = {"serialized_named_tensors": [payload] * 2, "load_format": "direct", "flush_cache": False}
        engine._client.post("/update_weights_from_tensor", body)
        with pytest.raises(WeightSyncError) as caught:
            engine.end_update(3)
        stale = ["model.layers.1.self_attn.w_kc", "model.layers.1.self_attn.w_vc"]
        assert [problem.where for problem in caught.value.problems] == stale * 2  # on both ranks
        policy.sync(3, weights(3))
        policy.close()
