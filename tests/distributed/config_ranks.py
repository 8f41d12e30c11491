"""Function that a rank runs: a config.json with one key dropped, changed or added is read as transformers reads it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from megagrpo.errors import ModelError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.megatron import process
from megagrpo.megatron.trained_model import TrainedModel
from megagrpo.recipe.schema import TrainConfig
from megagrpo.weights.families import architecture_of
from megagrpo.weights.families.architecture import Architecture
from tests.distributed.parity_ranks import logits_of_chunks
from tests.tiny_models import DIMENSIONS, LIKE, auto_class, config_of, randomize

Config = dict[str, Any]
TOKENS = torch.randint(0, DIMENSIONS["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(3))
TOLERANCE = 6e-5
DROPPED = "dropped"
REFUSALS = (AttributeError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of transformers over configs that make no model."""
NEVER_CHANGED = {"model_type", "architectures", "transformers_version", "dtype"}
SCALED = {"factor": 2.0, "original_max_position_embeddings": 16}
ADDED: dict[str, list[Any]] = {
    "sliding_window": [8],
    "layer_types": [["sliding_attention", "full_attention"] * 2, ["full_attention"] * 4, [[]] * 4],
    "rope_scaling": [SCALED | {"rope_type": kind} for kind in ("linear", "yarn", "dynamic", "llama3")],
    "hidden_act": ["gelu", "gelu_pytorch_tanh"],
    "hidden_activation": ["gelu", "silu"],
    "no_rope_layers": [[1, 0, 1, 0]],
    "mlp_only_layers": [[1]],
    "mlp_layer_types": [["sparse"] * 4, ["dense", "sparse"] * 2, [[]] * 4],
    "sliding_window_pattern": [2, "LLG"],
    **{
        key: [True, False]
        for key in (
            "attention_bias", "attention_out_bias", "is_causal", "mlp_bias", "norm_topk_prob", "qkv_bias",
            "rope_interleave", "tie_word_embeddings", "use_bias", "use_bidirectional_attention", "use_qk_norm",
            "use_sliding_window",
        )
    },
    **{
        key: [1, 2, 3]
        for key in (
            "decoder_sparse_step", "experts_per_token", "first_k_dense_replace", "full_attention_interval",
            "linear_conv_kernel_dim", "max_window_layers", "moe_layer_freq", "n_group", "n_shared_experts",
            "no_rope_layer_interval", "num_experts", "num_experts_per_tok", "num_local_experts",
            "num_nextn_predict_layers", "rotary_dim", "topk_group",
        )
    },
    **{
        key: [0.5]
        for key in (
            "attention_dropout", "attention_multiplier", "attn_logit_softcapping", "embedding_multiplier",
            "final_logit_softcapping", "logits_scaling", "partial_rotary_factor", "query_pre_attn_scalar",
            "residual_multiplier", "rms_norm_eps", "rope_local_base_freq", "rope_theta", "routed_scaling_factor",
            "router_jitter_noise", "swiglu_alpha", "swiglu_limit",
        )
    },
    "scoring_func": ["softmax"],
    "topk_method": ["greedy"],
}  # fmt: skip
"""Keys of any family, with values that every family may be given."""
ADDED_TO_ROPES: dict[str, list[Any]] = {
    "rope_type": ["default", "linear", "yarn", "llama3", "dynamic"],
    "type": ["linear"],
    "truncate": [True, False],
    "llama_4_scaling_beta": [0.3],
    "other": [1],
    **{
        key: [0.5, 2.0]
        for key in (
            "attention_factor", "beta_fast", "beta_slow", "factor", "low_freq_factor", "mscale", "mscale_all_dim",
            "original_max_position_embeddings", "partial_rotary_factor", "rope_theta",
        )
    },
}  # fmt: skip


@dataclass(frozen=True)
class Start:
    """A tiny config.json, its class in transformers, and the weights and logits of a model of it."""

    kind: type
    config: Config
    weights: dict[str, torch.Tensor]
    logits: torch.Tensor

    def fault(self, key: str, changed: Config) -> str:
        """Says how the changed config is read wrongly; empty if it is not, or makes no model in transformers."""
        try:
            arch = architecture_of(changed)
        except ModelError as error:
            names = [*key.split("."), *(["partial_rotary_factor"] if key == "rotary_dim" else [])]
            return "" if any(name in str(error) for name in names) else f"refused without its name: {error}"
        same = arch == architecture_of(self.config)
        try:
            model = transformers_model(self.kind, changed)
            if same and shapes(model.state_dict()) != shapes(self.weights):
                return "other tensors"
            randomize(model, 0)
            logits = logits_of(model)
        except (*REFUSALS, StrictDataclassError):
            return ""
        ours = self.logits if same else megatron_logits(model, arch)
        difference = float((ours - logits).abs().max())
        return f"logits differ by {difference}" if difference > TOLERANCE else ""


def readings(family: str) -> tuple[int, list[str]]:
    """The number of cases, and what is wrong in some: neither transformers' logits nor a refusal that names the key."""
    process.start_parallel(ParallelLayout(), seed=1)
    made = config_of(family)
    config, whole = (json.loads(made.to_json_string(use_diff=diff)) for diff in (True, False))
    if family in LIKE:
        config["model_type"] = family
    config.pop("attn_implementation", None)
    model = transformers_model(type(made), config)
    randomize(model, 0)
    start = Start(type(made), config, model.state_dict(), logits_of(model))
    cases = list(changes(config, whole))
    faults = ((key, value, start.fault(key, changed)) for key, value, changed in cases)
    return len(cases), [f"{key} = {value}: {fault}" for key, value, fault in faults if fault]


def changes(config: Config, whole: Config) -> Iterator[tuple[str, object, Config]]:
    """Every key dropped, changed or null, and others added: key, value, changed config."""
    for key, value in changes_of_keys(config, whole, ADDED):
        yield key, value, with_key(config, key, value)
    ropes = config.get("rope_parameters") or whole.get("rope_parameters") or {}
    by_kind = [kind for kind, its in ropes.items() if isinstance(its, dict)]
    for kind in by_kind:
        yield f"rope_parameters.{kind}", DROPPED, config | {"rope_parameters": with_key(ropes, kind, DROPPED)}
        for key, value in changes_of_keys(ropes[kind], {}, ADDED_TO_ROPES):
            changed = ropes | {kind: with_key(ropes[kind], key, value)}
            yield f"rope_parameters.{kind}.{key}", value, config | {"rope_parameters": changed}
    for key, value in [] if by_kind else changes_of_keys(ropes, {}, ADDED_TO_ROPES):
        yield f"rope_parameters.{key}", value, config | {"rope_parameters": with_key(ropes, key, value)}


def changes_of_keys(config: Config, whole: Config, added: dict[str, list[Any]]) -> Iterator[tuple[str, object]]:
    for key in sorted((config.keys() | whole.keys() | added.keys()) - NEVER_CHANGED):
        if key in config:
            yield key, DROPPED
        values = [*added.get(key, []), *others(config.get(key, whole.get(key))), None]
        by_text = {repr(value): value for value in values if key not in config or repr(value) != repr(config[key])}
        yield from ((key, value) for value in by_text.values())


def others(value: object) -> list[Any]:
    """Other values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2]
    return ["other"] if isinstance(value, str) else []


def with_key(config: Config, key: str, value: object) -> Config:
    rest = {name: its for name, its in config.items() if name != key}
    return rest if value is DROPPED else rest | {key: value}


def transformers_model(kind: type, config: Config) -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as directory:
        own = {key: value for key, value in config.items() if key != "model_type"}
        Path(directory, "config.json").write_text(json.dumps(own))
        read = kind.from_pretrained(directory)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return auto_class(read).from_config(read, **options).eval()


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS).logits[0]


def megatron_logits(model: Any, arch: Architecture) -> torch.Tensor:
    layout = ParallelLayout()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        settings = TrainConfig(distributed_optimizer=False)
        trained = TrainedModel(arch, settings, rank_grid(layout)[0], directory, torch.float32, "cpu")
    by_rank = logits_of_chunks(trained.chunks, arch, layout, [[TOKENS[0].tolist()]])
    assert by_rank is not None
    return torch.from_numpy(by_rank.logits)


def shapes(weights: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}
