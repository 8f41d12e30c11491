"""Reads a Hugging Face config.json, as transformers 4 or 5 writes it, and collects everything that is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megagrpo.errors import ModelError, Problem, brief, first_line
from megagrpo.weights.families.architecture import Architecture, Experts, LatentAttention, Rope, Yarn

LAYERS_MAX, EXPERTS_MAX, NUMBER_MAX = 4096, 4096, 1e15


def read_json(path: Path, needed: str = "a JSON file in UTF-8", fix: str = "") -> dict[str, Any]:
    """The JSON object in a file. `needed` is said of a file that is not there. Raises ModelError."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ModelError(Problem(str(path), error.strerror or str(error), needed, fix)) from error
    return json_object(path, text, fix)


def json_object(path: Path, text: bytes, fix: str = "") -> dict[str, Any]:
    """The JSON object in a part of the file `path`. Raises ModelError."""
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(Problem(str(path), first_line(error), "a JSON file in UTF-8", fix)) from error
    if not isinstance(value, dict):
        raise ModelError(Problem(str(path), type(value).__name__, "a JSON object", fix))
    return value


class ConfigReader:
    """One config.json. Refusals and missing values are collected; `architecture` raises them as one ModelError."""

    def __init__(self, config: Mapping[str, Any], default_theta: float = 10000.0) -> None:
        self.config = config
        self.default_theta = default_theta
        self.family = str(config.get("model_type"))
        self.problems: list[Problem] = []

    def refuse(self, feature: str, given: object, needed: str) -> None:
        self.problems.append(Problem(f"config.json: {feature} ({self.family})", str(given), needed))

    def refuse_if_set(self, *flags: str) -> None:
        for flag in flags:
            if self.config.get(flag):
                self.refuse(flag, self.config[flag], "not supported: must be absent or false")

    def integer(self, *names: str, default: int | None = None, most: int = 2**31) -> int:
        """The value of the first of these keys that is present and not null."""
        value = next((self.config[name] for name in names if self.config.get(name) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            self.refuse(" or ".join(names), brief(value), f"a whole number from 1 to {most}")
            return 1
        return value

    def number(self, name: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= NUMBER_MAX:
            self.refuse(name, brief(value), f"a number above 0, of at most {NUMBER_MAX:g}")
            return 1.0
        return float(value)

    def rope(self, scaling: Literal["llama3", "yarn"] = "llama3") -> Rope:
        """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4).

        `scaling` is the kind that the family may have.
        """
        given = self.config.get("rope_parameters")
        key = "rope_parameters" if given is not None else "rope_scaling"
        parameters = given if given is not None else self.config.get("rope_scaling") or {}
        if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
            self.refuse(key, parameters, "one set of rotary parameters for all layers")
            return Rope(1.0)
        theta = parameters.get("rope_theta", self.config.get("rope_theta", self.default_theta))
        theta = self.number("rope_theta", theta)
        for part in (parameters.get("partial_rotary_factor", 1.0), self.config.get("partial_rotary_factor", 1.0)):
            if part != 1.0:
                self.refuse("partial_rotary_factor", part, "1.0 (all of head_dim is rotated)")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind == "default":
            return Rope(theta)
        if kind != scaling:
            self.refuse(f"{key}.rope_type", kind, f"default or {scaling}")
            return Rope(theta)
        factor = self.number(f"{key}.factor", parameters.get("factor"))
        original = "original_max_position_embeddings"
        positions = int(self.number(f"{key}.{original}", parameters.get(original, self.config.get(original))))
        if kind == "yarn":
            return Rope(theta, yarn=self._yarn(key, parameters, factor, positions))
        return Rope(
            theta,
            factor=factor,
            low_freq_factor=self.number(f"{key}.low_freq_factor", parameters.get("low_freq_factor")),
            high_freq_factor=self.number(f"{key}.high_freq_factor", parameters.get("high_freq_factor")),
            original_max_positions=positions,
        )

    def _yarn(self, key: str, parameters: Mapping[str, Any], factor: float, positions: int) -> Yarn:
        if parameters.get("attention_factor") is not None:
            self.refuse(f"{key}.attention_factor", parameters["attention_factor"], "absent: it follows from mscale")
        if not parameters.get("truncate", True):
            self.refuse(f"{key}.truncate", False, "true: the range of corrected dimensions in whole numbers")
        fast = self.number(f"{key}.beta_fast", parameters.get("beta_fast") or 32)
        slow = self.number(f"{key}.beta_slow", parameters.get("beta_slow") or 1)
        magnitudes = [parameters.get("mscale"), parameters.get("mscale_all_dim")]
        if not any(magnitudes):
            return Yarn(factor, positions, fast, slow)
        mscale, all_dim = (
            self.number(f"{key}.{name}", value)
            for name, value in zip(("mscale", "mscale_all_dim"), magnitudes, strict=True)
        )
        return Yarn(factor, positions, fast, slow, mscale, all_dim)

    def architecture(
        self,
        *,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        default_head_dim: int | None = None,
        experts: Experts | None = None,
        latent: LatentAttention | None = None,
    ) -> Architecture:
        """Reads the numbers that all families share, and joins them with the parts that the family gives. Raises
        ModelError with every problem found so far."""
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        groups = self.integer("num_key_value_heads", default=heads)
        if heads % groups:
            self.refuse("num_key_value_heads", groups, f"a divisor of num_attention_heads = {heads}")
        if latent is not None:
            head_dim = latent.plain_dim + latent.rotary_dim
        else:
            head_dim = self.integer("head_dim", default=default_head_dim or hidden // heads)
        if latent is None and self.config.get("head_dim") is None and default_head_dim is None and hidden % heads:
            self.refuse("head_dim", None, f"hidden_size = {hidden} does not divide by num_attention_heads = {heads}")
        if (activation := self.config.get("hidden_act", "silu")) != "silu":
            self.refuse("hidden_act", activation, "silu")
        if experts is not None and experts.per_token > experts.count:
            self.refuse("num_experts_per_tok", experts.per_token, f"at most the number of experts, {experts.count}")
        quantization = self.config.get("quantization_config")
        names = ("quant_method", "fmt", "weight_block_size")
        found = [quantization.get(name) for name in names] if isinstance(quantization, Mapping) else []
        if quantization and found not in (["fp8", "e4m3", [128, 128]], ["fp8", None, [128, 128]]):
            # fp8 in these blocks is read as bfloat16 (sides/checkpoint.py).
            needed = "absent, or fp8 (e4m3) with weight_block_size [128, 128]"
            self.refuse("quantization_config", quantization, needed)
        kinds = set(self.config.get("layer_types") or ["full_attention"])
        if kinds != {"full_attention"}:
            needed = "full_attention only: sliding windows are not supported"
            self.refuse("layer_types", ", ".join(sorted(kinds)), needed)
        elif self.config.get("use_sliding_window"):
            self.refuse("use_sliding_window", True, "false: sliding windows are not supported")
        architecture = Architecture(
            family=self.family,
            layers=self.integer("num_hidden_layers", most=LAYERS_MAX),
            hidden=hidden,
            ffn=self.integer("intermediate_size"),
            heads=heads,
            query_groups=groups,
            head_dim=head_dim,
            vocab=self.integer("vocab_size"),
            max_positions=self.integer("max_position_embeddings"),
            norm_epsilon=self.number("rms_norm_eps", self.config.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(self.config.get("tie_word_embeddings", False)),
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            rope=self.rope("llama3" if latent is None else "yarn"),
            experts=experts,
            latent=latent,
        )
        if self.problems:
            raise ModelError(self.problems)
        return architecture
