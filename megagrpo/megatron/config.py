"""Megatron's TransformerConfig, from a model's architecture and the recipe's train section.

`train.megatron` may set any field of the installed TransformerConfig that does not contradict the recipe.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from megagrpo.errors import Problem, RecipeError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.kernels import LayerSpec, attention_of, installed, layers_on
from megagrpo.recipe.schema import TrainConfig
from megagrpo.recipe.schema.train import ALL_LAYERS, Recomputed
from megagrpo.section import table_beside
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.megatron_rank import config_fields

NEWEST_LIKELY = (9, 0)
"""The compute capability that is assumed where no GPU is seen: a driver's machine, a test."""
FUSIONS = ("apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion")
"""Options with kernels of Transformer Engine: Megatron looks for them where the config is made, or in a first pass."""
OF_TRANSFORMER_ENGINE = (
    "attention_backend", "cp_comm_type", "cpu_offloading", "disable_parameter_transpose_cache",
    "fine_grained_activation_offloading", "fused_residual_rmsnorm", "symmetric_ar_type", "use_kitchen",
    "use_te_activation_func",
)  # fmt: skip
"""Options that local layers ignore, or with which their first pass fails."""


def layer_spec(arch: Architecture, train: TrainConfig, dtype: torch.dtype, device: str) -> LayerSpec:
    """Returns the layers that `train.layer_spec` means on `device` (cpu or cuda). Raises RecipeError if it cannot run.

    Adapters need the linear layers of the local spec, so auto is local with adapters. Else the card decides.
    """
    runs = device != "cpu" and find_spec("transformer_engine") is not None
    if train.layer_spec == "transformer_engine" and not runs:
        given = f"transformer_engine on {device}"
        fix = "pip install megagrpo[te] on a machine with CUDA, or train.layer_spec: auto"
        raise RecipeError(Problem("train.layer_spec", given, "a CUDA device and the transformer_engine package", fix))
    if train.layer_spec != "auto":
        return train.layer_spec
    if not runs or train.lora is not None:
        return "local"
    card = torch.cuda.get_device_capability() if torch.cuda.is_available() else NEWEST_LIKELY
    return layers_on(card, installed(), attention_of(arch, train, half=dtype == torch.bfloat16)).spec


def transformer_config(
    arch: Architecture, train: TrainConfig, dtype: torch.dtype, device: str, planned: LayerSpec | None = None
) -> TransformerConfig:
    """Returns Megatron's config for `arch` in the recipe's layout, with the recipe's `train.megatron` options on top.

    `dtype` is float32 or bfloat16; `device` is cpu or cuda. planned: the layers of machines with Transformer Engine,
    whether it is installed here or not. Raises RecipeError if Megatron refuses the combination.
    """
    problems = option_problems(train.megatron)
    fusions = dict.fromkeys(FUSIONS, False) if find_spec("transformer_engine") is None else {}
    if planned is None:
        needed, fix = "the package transformer_engine, which is not installed", "pip install megagrpo[te], or remove it"
        missing = [name for name in fusions if train.megatron.get(name)]
        problems += [Problem(f"train.megatron.{name}", "true", needed, fix) for name in missing]
    spec = planned or layer_spec(arch, train, dtype, device)
    of_architecture = _of_architecture(arch)
    latent = "multi_latent_attention" in of_architecture
    if spec == "local":
        needed = "transformer_engine's layers: the local ones, which run here, ignore it or fail"
        names = OF_TRANSFORMER_ENGINE if fusions or latent else (*OF_TRANSFORMER_ENGINE, "apply_rope_fusion")
        ignored = [
            (name, train.megatron[name]) for name in names if train.megatron.get(name) not in (None, False, "auto")
        ]
        problems += [Problem(f"train.megatron.{name}", str(value), needed, "leave it out") for name, value in ignored]
    if problems:
        raise RecipeError(problems)
    fields = (
        of_architecture
        | _of_layout(train.layout.parallel())
        | _of_recomputed(train.recomputed)
        | _of_machine(spec, device, dtype)
        | {"apply_rope_fusion": spec == "transformer_engine" and (not latent or arch.rope.yarn is not None)}
        | {"bias_activation_fusion": device != "cpu" and of_architecture["activation_func"] is F.silu}
        | {"moe_grouped_gemm": spec == "transformer_engine" and arch.experts > 0}
        | train.megatron
        | fusions
    )
    if (backend := train.megatron.get("attention_backend")) is not None:
        fields["attention_backend"] = AttnBackend[backend]
    kind = MLATransformerConfig if latent else TransformerConfig
    try:
        return kind(**fields)
    except (AssertionError, ValueError, NotImplementedError) as error:
        given = ", ".join(f"{name}: {value}" for name, value in train.megatron.items())
        needed = str(error) or "a combination that megatron.core's TransformerConfig accepts"
        raise RecipeError(Problem("train: Megatron refuses this combination", given, needed)) from error


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": squared_relu,
    "quick_gelu": quick_gelu,
}


def _of_architecture(arch: Architecture) -> dict[str, Any]:
    fields = config_fields(arch) | {"activation_func": ACTIVATIONS[arch.layers[0].mlp.activation]}
    if "multi_latent_attention" in fields:
        fields["rotary_base"] = arch.rope.theta
        if arch.rope.yarn is None:
            fields |= {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    if arch.experts:
        fields |= {
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_bias_update_rate": 0.0,
        }
    return fields


LAYOUT = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "num_layers_in_first_pipeline_stage": "first_stage_layers",
    "num_layers_in_last_pipeline_stage": "last_stage_layers",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
"""Keys of train.layout, by Megatron's names."""


def _of_layout(layout: ParallelLayout) -> dict[str, Any]:
    interleaved = layout.virtual_pipeline > 1
    return {name: getattr(layout, key) for name, key in LAYOUT.items()} | {
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if interleaved else None,
        "sequence_parallel": layout.sequence_parallel,
        # Microbatches differ in length. Megatron then wants this dispatcher, even without experts.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # Batched sends have no tags. With interleaved schedules over 2 stages both neighbours are the same rank, and
        # batched sends silently mix up activations and gradients.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _of_recomputed(again: Recomputed) -> dict[str, Any]:
    if again.modules:
        return {"recompute_granularity": "selective", "recompute_modules": sorted(again.modules)}
    if again.layers == 0:
        return {}
    if again.layers == ALL_LAYERS:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": again.layers}


def _of_machine(spec: LayerSpec, device: str, dtype: torch.dtype) -> dict[str, Any]:
    cuda = device != "cpu"
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # The loss has global denominators: gradients are summed over ranks and microbatches, and divided by nothing.
        "calculate_per_token_loss": True,
        "transformer_impl": spec,
        "gradient_accumulation_fusion": cuda and find_spec("fused_weight_gradient_mlp_cuda") is not None,  # apex's
        "use_cpu_initialization": not cuda,
        # Weights are always loaded, but this also marks them as split over tensor ranks for the gradient norm.
        "perform_initialization": True,
        "cuda_graph_modules": [],  # the same as Megatron's default, which warns
    }


def _options() -> tuple[dict[str, str], dict[str, tuple[list[Any], str]]]:
    """Reads options.yaml: by field, the recipe's key that decides it, and the values that it may have with a reason."""
    table = table_beside(__file__, "options.yaml")
    owned = {name: key for key, names in table["owned"].items() for name in names}
    allowed = {name: (values, why) for why, rows in table["allowed"].items() for name, values in rows.items()}
    return owned | {name: f"train.layout.{key}" for name, key in LAYOUT.items()}, allowed


OWNED, ALLOWED_VALUES = _options()


def option_problems(options: Mapping[str, Any]) -> list[Problem]:
    """Returns a problem for each entry of `train.megatron` that is not allowed."""
    return [problem for name, value in options.items() if (problem := _problem(name, value)) is not None]


def _problem(name: str, value: Any) -> Problem | None:
    where, given = f"train.megatron.{name}", repr(value)
    known = [field.name for field in dataclasses.fields(TransformerConfig) if not field.name.startswith("_")]
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        needed = "a field of megatron.core's TransformerConfig"
        return Problem(where, given, needed, f"did you mean {nearest[0]}?" if nearest else "")
    if name in OWNED:
        return Problem(where, given, "not set here: another key of the recipe decides it", f"set {OWNED[name]}")
    if name in ALLOWED_VALUES:
        allowed, reason = ALLOWED_VALUES[name]
        if value not in allowed:
            return Problem(where, given, " or ".join(map(repr, allowed)) or "not set", f"leave it out: {reason}")
    if name == "attention_backend":  # an enumeration, by its members' names
        needed = "auto, flash or fused: others keep all scores, or leave no kernel"
        return None if value in ("auto", "flash", "fused") else Problem(where, given, needed)
    hint = get_type_hints(TransformerConfig)[name]
    try:
        TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
    except ValidationError as error:
        kind = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        reasons = sorted({str(detail["msg"]) for detail in error.errors()})
        return Problem(where, given, f"{kind}: {'; '.join(reasons)}")
    return None
