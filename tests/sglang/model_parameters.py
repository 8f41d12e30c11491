"""Run with a list of [model directory, layout] on standard input: names and shapes of the parameters that SGLang's own
model classes have on every rank, built on the meta device with the arguments that a server would get."""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout.sglang import launch
from megagrpo.rollout.sglang.arguments import server_arguments

MODULES = {"deepseek_v3": "deepseek_v2"}
"""Where SGLang has a family's class, if not under the family's name. Its registry would import two hundred others."""


def parameters(directory: str, layout: EngineLayoutConfig) -> list[dict[str, list[int]]]:
    """By rank, as SGLang counts them."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    found = []
    for rank in range(layout.ranks):
        arguments = ServerArgs(**server_arguments(
            model_directory=directory, layout=layout, dtype="float32", device="cpu", requests_at_once=1,
            tokens_per_request=64, longest_pause_seconds=1.0, options={},
        ))  # fmt: skip
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank))
        initialize_dp_attention(arguments)
        parallel = get_parallel()
        at, last = parallel.pp_rank, layout.pipeline - 1
        stage = SimpleNamespace(
            rank_in_group=at, world_size=layout.pipeline, is_first_rank=at == 0, is_last_rank=at == last
        )
        groups: dict[str, Any] = {"pp_group": stage}
        for name in ("tp", "attn_tp", "moe_tp", "moe_ep"):
            sizes = {
                "rank_in_group": getattr(parallel, f"{name}_rank"),
                "world_size": getattr(parallel, f"{name}_size"),
            }
            groups[f"{name}_group"] = SimpleNamespace(**sizes, cpu_group=None, device_group=None)
        config = ModelConfig.from_server_args(arguments).hf_config
        family = config.model_type
        module = importlib.import_module(f"sglang.srt.models.{MODULES.get(family, family)}")
        model_class = getattr(module, config.architectures[0])
        with parallel.override(**groups), torch.device("meta"):
            model = model_class(config)
        found.append({name: list(parameter.shape) for name, parameter in model.named_parameters()})
        reset_context()
    return found


if __name__ == "__main__":
    os.environ[launch.DEVICE_VARIABLE] = "cpu"
    launch.fill_gaps_on_cpus()
    answers = [parameters(directory, EngineLayoutConfig(**layout)) for directory, layout in json.load(sys.stdin)]
    print(json.dumps(answers))
