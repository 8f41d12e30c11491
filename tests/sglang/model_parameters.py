"""Run with a file of matrices and, on standard input, a list of [model directory, layout, quantization].
It prints whether SGLang's quantiser makes the same bits of each matrix as ours; and shapes, dtypes and checksums of the
parameters that SGLang's own model classes have on every rank, with the arguments of a server, after they have loaded
the directory's files. Quantised models are built on the meta device, without checksums."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from megagrpo.recipe.schema import EngineLayoutConfig, SglangConfig
from megagrpo.rollout.engine import ServerSpec
from megagrpo.rollout.sglang import launch
from megagrpo.rollout.sglang.arguments import server_arguments
from megagrpo.weights.quantizing import dequantize, quantize
from megagrpo.weights.transport.sglang import check_derived, checksum, derive

MODULES = {
    "deepseek_v3": "deepseek_v2", "gemma3": "gemma3_mm", "gemma3_text": "gemma3_causal", "kimi_k2": "deepseek_v2",
    "mistral3": "mistral", "olmo3": "olmo2", "phi3": "llama", "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_text",
    **dict.fromkeys(("ernie4_5", "seed_oss", "smollm3"), "transformers"),
}  # fmt: skip
"""Module of SGLang with a family's class, if not named after it. SGLang's registry would import two hundred others."""
NO_CACHE_OF_STATES = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
SETTINGS = {
    "exaone4": {"attention_backend": "triton"},
    "gpt_oss": {"attention_backend": "triton"},
    "qwen3_next": NO_CACHE_OF_STATES,
    "qwen3_5": NO_CACHE_OF_STATES,
    "qwen3_5_moe": NO_CACHE_OF_STATES,
    "qwen3_5_moe_text": NO_CACHE_OF_STATES,
    "qwen3_5_text": NO_CACHE_OF_STATES,
}
"""Settings without which SGLang refuses a family on CPUs. Parameters do not depend on them."""


def parameters(directory: str, layout: EngineLayoutConfig, quantization: str | None) -> list[dict[str, list[Any]]]:
    """By rank, as SGLang counts them."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    family = json.loads(Path(directory, "config.json").read_text())["model_type"]
    settings = SglangConfig(**SETTINGS.get(family, {}))
    found = []
    for rank in range(layout.ranks):
        arguments = ServerArgs(**server_arguments(ServerSpec(
            name="", log=Path(), settings=settings, model_directory=directory, layout=layout, dtype="bfloat16",
            device="cpu", requests_at_once=1, tokens_per_request=64, threads=1, quantization=quantization,
        )))  # fmt: skip
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
        model_config = ModelConfig.from_server_args(arguments)
        config = model_config.hf_config
        assert model_config.quantization == quantization
        blocks = Fp8Config.from_config(config.quantization_config) if quantization else None
        module = importlib.import_module(f"sglang.srt.models.{MODULES.get(family, family)}")
        model_class = getattr(module, config.architectures[0], None) or module.TransformersForCausalLM
        with parallel.override(**groups), torch.device("meta" if blocks else "cpu"):
            model = model_class(config, quant_config=blocks)
            if blocks is None:
                load(model, Path(directory))
        found.append({name: described(its.data) for name, its in model.named_parameters()})
        reset_context()
    return found


@torch.no_grad()
def load(model: torch.nn.Module, directory: Path) -> None:
    """Elements that the class does not load are not numbers. Before that, what SGLang derives from weights follows from
    others that were written in place."""
    for parameter in model.parameters():
        parameter.fill_(3.0)
    derive(model)
    check_derived(model)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    files = [its for path in sorted(directory.glob("*.safetensors")) for its in load_file(path).items()]
    model.load_weights(iter(files))


def described(parameter: torch.Tensor) -> list[Any]:
    """Shape, dtype, and checksum if there are values."""
    return [list(parameter.shape), str(parameter.dtype)[6:], None if parameter.is_meta else checksum(parameter)]


def same_bits(weights: torch.Tensor) -> bool:
    """Also of what the blocks stand for."""
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant, quant_weight_ue8m0

    ours, scales = quantize(weights)
    theirs, their_scales = quant_weight_ue8m0(weights, [128, 128])
    stands_for = block_quant_dequant(theirs, their_scales, [128, 128], torch.bfloat16)
    return (
        torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        and torch.equal(scales, their_scales)
        and torch.equal(dequantize(ours, scales, torch.bfloat16), stands_for)
    )


if __name__ == "__main__":
    os.environ[launch.DEVICE_VARIABLE] = "cpu"
    launch.fill_gaps_on_cpus()
    equal = [same_bits(weights) for weights in torch.load(sys.argv[1])]
    torch.set_default_dtype(torch.bfloat16)
    cases = json.load(sys.stdin)
    answers = [parameters(directory, EngineLayoutConfig(**layout), fp8) for directory, layout, fp8 in cases]
    print(json.dumps([equal, answers]))
