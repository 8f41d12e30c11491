"""Reads a Hugging Face config.json, as transformers 4 or 5 writes it, and collects everything that is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from megagrpo.errors import ModelError, Problem, brief, first_line, pointer_problem
from megagrpo.weights.families.architecture import Architecture, Layer
from megagrpo.weights.families.parts.attention import Attention, LongRope, Rope, Yarn
from megagrpo.weights.families.parts.delta_net import DeltaNet
from megagrpo.weights.families.parts.experts import Experts
from megagrpo.weights.families.parts.latent_attention import LatentAttention
from megagrpo.weights.families.parts.mlp import Activation, Mlp
from megagrpo.weights.families.parts.norms import Norms

NAMES_OF_KINDS = ("full_attention", "sliding_attention")
T = TypeVar("T")
NAMES_OF_ACTIVATIONS: Mapping[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
    "relu2": ("relu2",),
}
"""Names in transformers of the activations of MLPs."""
DTYPES = (None, "auto", "float32", "bfloat16", "float16", "float64")
LAYERS_MAX, EXPERTS_MAX, NUMBER_MAX = 4096, 4096, 1e15
HARMLESS = re.compile(
    # names, versions and tokens; dtypes; initialisation and dropout; caches and outputs; auxiliary losses; sampling
    r"_.*|.*name_or_path|architectures|auto_map|model_type|(.*_)?version|unsloth.*|tokenizer_class"
    r"|(bos|eos|pad|unk|sep|mask|decoder_start|forced_bos|forced_eos)_token(_ids?)?"
    r"|(torch_)?dtype|use_bfloat16|torchscript|(.*_)?attn_implementation|use_flash_attn|.*initializer_(range|factor)"
    r"|.*_(dropout|pdrop)|use_cache|output_.*|return_dict.*|is_(decoder|encoder_decoder)|add_cross_attention|pruned_heads"
    r"|chunk_size_feed_forward|mtp_.*|use_mtp|num_mtp_modules|pretraining_tp|ep_size|(router_)?aux_loss_(coef|alpha)|seq_aux|num_nextn_predict_layers"
    r"|id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params|prefix|tie_encoder_decoder"
    r"|do_sample|temperature|top_[kp]|(max|min)_(new_)?(length|tokens)|num_beams|.*_penalty|num_return_sequences"
)
"""Keys of a config.json that do not change what a trained model computes. Any other must be read, null or false."""


def read_json(path: Path, needed: str = "a JSON file in UTF-8", fix: str = "") -> dict[str, Any]:
    """Returns the JSON object in a file. Raises ModelError, which asks for `needed` if the file cannot be read."""
    if path.exists() and not path.is_file():
        raise ModelError(Problem(str(path), "a directory, a device or a pipe", needed, fix))
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ModelError(Problem(str(path), error.strerror or str(error), needed, fix)) from error
    return json_object(path, text, fix)


def json_object(path: Path, text: bytes, fix: str = "") -> dict[str, Any]:
    """Returns the JSON object in `text`, a part of the file `path`. Raises ModelError."""
    refuse_pointer(path, text)
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(Problem(str(path), first_line(error), "a JSON file in UTF-8", fix)) from error
    if not isinstance(value, dict):
        raise ModelError(Problem(str(path), type(value).__name__, "a JSON object", fix))
    return value


def refuse_pointer(path: Path, start: bytes) -> None:
    """Raises ModelError if a model's file, by its first bytes, is a Git LFS pointer."""
    if problem := pointer_problem(str(path), start):
        raise ModelError(problem)


ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor",
    "truncate", "short_factor", "long_factor",
}  # fmt: skip


class _Config(dict[str, Any]):
    """A config.json with its family's defaults. `known` collects the keys that were read."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__({**defaults, **config})
        self.known: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.known.add(key)
        return super().get(key, default)


class ConfigReader:
    """A reader of a config.json that collects refusals and missing values; `model` raises all as one ModelError.

    `defaults` are the values of absent keys in the family's config class in transformers. A null is not absent.
    """

    def __init__(self, config: Mapping[str, Any], default_theta: float = 10000.0, **defaults: Any) -> None:
        self.config = _Config(config, defaults)
        self.default_theta = default_theta
        self.family = str(config.get("model_type"))
        self.problems: list[Problem] = []
        self.mxfp4 = False
        """The family has files with experts in MXFP4."""

    def refuse(self, feature: str, given: object, needed: str, fix: str = "") -> None:
        self.problems.append(Problem(f"config.json: {feature} ({self.family})", brief(given), needed, fix))

    def ignore(self, *keys: str) -> None:
        """Allows keys that do not change what the model computes."""
        self.config.known.update(keys)

    def require(self, **wanted: object) -> None:
        """Refuses keys that are present, or have a default, with other values than these."""
        for key, value in wanted.items():
            if self.config.get(key, value) != value:
                self.refuse(key, self.config[key], str(value).lower())

    def refuse_if_set(self, *flags: str) -> None:
        for flag in flags:
            if self.config.get(flag):
                self.refuse(flag, self.config[flag], "not supported: must be absent or false")

    def integer(self, *names: str, default: int | None = None, most: int = 2**31) -> int:
        """Returns the value of those of these keys that are present and not null. Refuses it outside 1 .. `most`."""
        given = [value for value in map(self.config.get, names) if value is not None]
        if any(value != given[0] for value in given):
            self.refuse(" and ".join(names), given, "one of them alone, or the same in both")
        value = given[0] if given else default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            self.refuse(" or ".join(names), value, f"a whole number from 1 to {most}")
            return 1
        return value

    def positive(self, name: str, value: object) -> float:
        """Returns the value, which errors call `name`, as a number above 0."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= NUMBER_MAX:
            self.refuse(name, value, f"a number above 0, of at most {NUMBER_MAX:g}")
            return 1.0
        return float(value)

    def number(self, name: str, default: float | None = None) -> float:
        """Returns the value of a key as a number above 0. `default` is that of an absent key, but not of a null."""
        return self.positive(name, self.config.get(name, default))

    def optional(self, name: str, default: float | None = None) -> float | None:
        """Returns a number above 0, or None for a null."""
        value = self.config.get(name, default)
        return None if value is None else self.positive(name, value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return value is True

    def rope(
        self,
        *scalings: str,
        kind: str = "",
        theta: float | None = None,
        others: Collection[str] = (),
        absent: Mapping[str, Any] | None = None,
        **usual: Any,
    ) -> Rope:
        """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4).

        If both are present, transformers 5 reads the second set and other readers the first, so both must be equal.
        `scalings` are the kinds of scaling that the family supports, llama3 by default. `kind` is that of the layers,
        in families with a set for each. `theta` and `usual` are the values, fields of Rope, of absent keys. `others`
        are keys that the family reads itself. `absent` is the set of a config without one.
        """
        given = {key: self.config[key] for key in ("rope_parameters", "rope_scaling") if self.config.get(key)}
        sets = {key: value for key, value in given.items() if kind != "sliding_attention" or key == "rope_parameters"}
        known = ROPE_KEYS.union(others) - ({"truncate"} if kind else set())  # transformers ignores it in sets by kind
        if kind:  # old configs have one set, of the layers with full attention
            sets = {
                f"{key}.{kind}": value.get(kind) if isinstance(value, Mapping) and kind in value else value
                for key, value in sets.items()
            }
        start = Rope(self.default_theta if theta is None else theta, **usual)
        ropes = [
            self._rope(key, its or {}, scalings or ("llama3",), start, known)
            for key, its in (sets or {"rope_parameters": absent}).items()
        ]
        if ropes[-1] != ropes[0]:
            needed = "one of them alone, or the same in both: programs that read it differ in which they take"
            self.refuse(" and ".join(sets), sets, needed)
        return ropes[-1]

    def _rope(self, key: str, parameters: object, scalings: Sequence[str], start: Rope, known: Collection[str]) -> Rope:
        if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
            self.refuse(key, parameters, "one set of rotary parameters for all layers")
            return Rope(1.0)
        for name in parameters.keys() - known:
            if parameters[name] is not None:
                self.refuse(f"{key}.{name}", parameters[name], f"only {', '.join(sorted(known))}")
        original = "original_max_position_embeddings"
        for name in (original, "rope_theta"):
            inside, outside = parameters.get(name), self.config.get(name)
            if None not in (inside, outside) and inside != outside:
                self.refuse(f"{key}.{name} and {name}", [inside, outside], "the same in both places")
        theta = self.positive("rope_theta", parameters.get("rope_theta", self.config.get("rope_theta", start.theta)))
        partial = "partial_rotary_factor"
        part = self.positive(partial, parameters.get(partial, self.config.get(partial, start.part)))
        if (start.part == 1.0 != part and "longrope" not in scalings) or part > 1:
            self.refuse(partial, part, "1.0 (all of head_dim is rotated)")
        rope = replace(start, theta=theta, part=part)
        scaling = parameters.get("rope_type", parameters.get("type", "default"))
        if scaling != parameters.get("type", scaling):
            self.refuse(f"{key}.rope_type and {key}.type", [scaling, parameters["type"]], "the same in both")
        if scaling == "default":
            return rope
        if scaling not in scalings:
            self.refuse(f"{key}.rope_type", scaling, f"default or {' or '.join(scalings)}")
            return rope
        if scaling == "linear":
            return replace(rope, linear=self.positive(f"{key}.factor", parameters.get("factor")))
        positions = int(self.positive(f"{key}.{original}", parameters.get(original, self.config.get(original))))
        if positions < 1:
            self.refuse(f"{key}.{original}", parameters.get(original), "a number of tokens")
            return rope
        if scaling == "longrope":
            return replace(rope, long=self._long(key, parameters, positions))
        factor = self.positive(f"{key}.factor", parameters.get("factor"))
        if scaling == "yarn":
            return replace(rope, yarn=self._yarn(key, parameters, factor, positions))
        return replace(
            rope,
            factor=factor,
            low_freq_factor=self.positive(f"{key}.low_freq_factor", parameters.get("low_freq_factor")),
            high_freq_factor=self.positive(f"{key}.high_freq_factor", parameters.get("high_freq_factor")),
            original_max_positions=positions,
        )

    def _yarn(self, key: str, parameters: Mapping[str, Any], factor: float, positions: int) -> Yarn:
        fast = self.positive(f"{key}.beta_fast", parameters.get("beta_fast") or 32)
        slow = self.positive(f"{key}.beta_slow", parameters.get("beta_slow") or 1)
        if not isinstance(truncate := parameters.get("truncate", True), bool):
            self.refuse(f"{key}.truncate", truncate, "true or false")
        magnitude = parameters.get("attention_factor")
        if magnitude is not None:
            magnitude = self.positive(f"{key}.attention_factor", magnitude)
        magnitudes = [parameters.get("mscale"), parameters.get("mscale_all_dim")]
        if not any(magnitudes):
            return Yarn(factor, positions, fast, slow, magnitude=magnitude, truncate=truncate)
        mscale, all_dim = (
            self.positive(f"{key}.{name}", value)
            for name, value in zip(("mscale", "mscale_all_dim"), magnitudes, strict=True)
        )
        return Yarn(factor, positions, fast, slow, mscale, all_dim, magnitude, truncate)

    def _long(self, key: str, parameters: Mapping[str, Any], positions: int) -> LongRope:
        if parameters.get("attention_factor") is not None:
            self.refuse(f"{key}.attention_factor", parameters["attention_factor"], "absent: it follows from factor")
        longest = self.integer("max_position_embeddings")
        factor = self.positive(f"{key}.factor", parameters.get("factor") or longest / positions)
        sets = []
        for name in ("short_factor", "long_factor"):
            given = parameters.get(name)
            if not isinstance(given, list) or not all(isinstance(its, int | float) and its > 0 for its in given):
                self.refuse(f"{key}.{name}", given, "a list of numbers above 0")
                given = []
            sets.append(tuple(map(float, given)))
        return LongRope(factor, positions, *sets)

    # --- parts --------------------------------------------------------------------------------------------------------

    @property
    def hidden(self) -> int:
        return self.integer("hidden_size")

    @property
    def layers(self) -> int:
        return self.integer("num_hidden_layers", most=LAYERS_MAX)

    def layer(self, attention: Attention | LatentAttention | DeltaNet, mlp: Mlp | Experts, **norms: Any) -> Layer:
        return Layer(attention, mlp, Norms(self.hidden, **norms))

    def attention(self, *, rope: Rope | Literal["read"] | None = "read", **options: Any) -> Attention:
        """Reads attention by query groups, and by default its rotary embedding. `options` are other fields."""
        hidden, heads = self.hidden, self.integer("num_attention_heads")
        groups = self.integer("num_key_value_heads", default=heads)
        if heads % groups:
            self.refuse("num_key_value_heads", groups, f"a divisor of num_attention_heads = {heads}")
        head_dim = self.integer("head_dim", default=hidden // heads)
        if self.config.get("head_dim") is None and hidden % heads:
            self.refuse("head_dim", None, f"hidden_size = {hidden} does not divide by num_attention_heads = {heads}")
        return Attention(hidden, heads, groups, head_dim, self.rope() if rope == "read" else rope, **options)

    def mlp(self, activation: Activation = "silu", key: str = "hidden_act") -> Mlp:
        """Reads an MLP. `key` is that of its activation in config.json, which must be `activation`."""
        names = NAMES_OF_ACTIVATIONS[activation]
        if (given := self.config.get(key, names[0])) not in names:
            self.refuse(key, given, " or ".join(names))
        return Mlp(self.hidden, self.integer("intermediate_size"), activation)

    def by_kind(self, key: str, kinds: Mapping[str, T], usual: Callable[[int], str]) -> list[T]:
        """Reads the list `key` of every layer's kind. `usual` gives a layer's kind where the config has no list."""
        names = self.config.get(key)
        if names is None:
            names = [usual(layer) for layer in range(self.layers)]
        if not isinstance(names, list) or len(names) != self.layers or any(name not in list(kinds) for name in names):
            self.refuse(key, names, f"a list of num_hidden_layers = {self.layers} of {', '.join(kinds)}")
            return [next(iter(kinds.values()))] * self.layers
        return [kinds[name] for name in names]

    def windowed(
        self, full: Attention, usual: Callable[[int], bool], local: Attention | None = None
    ) -> list[Attention]:
        """Reads every layer's attention, `full` or with a window; `usual` says which has one where no list does.
        `local` differs from `full` in more than the window."""
        window = self.config.get("sliding_window")
        local = replace(local or full, window=1 if window is None else self.integer("sliding_window"))
        kinds = {"full_attention": full, "sliding_attention": local}
        attentions = self.by_kind("layer_types", kinds, lambda layer: NAMES_OF_KINDS[usual(layer)])
        if window is None and local in attentions:
            self.refuse("sliding_window", None, "a number of tokens, for the layers of layer_types with windows")
        return attentions

    def experts(
        self, *counts: str, ffn: str, normalize_top_k: bool, per_token: Sequence[str] = ("num_experts_per_tok",)
    ) -> Experts:
        """Reads experts with softmax scores. `counts` are the keys of their number, `per_token` of those that a token
        passes, `ffn` of the size of one."""
        counts = counts or ("num_local_experts", "num_experts")
        count = self.integer(*counts, most=EXPERTS_MAX)
        chosen, key = self.integer(*per_token), " or ".join(per_token)
        if chosen == 1 and normalize_top_k:
            self.refuse(key, 1, "at least 2: Megatron does not normalize the weight of a single one")
        if chosen > count:
            self.refuse(key, chosen, f"at most the number of experts, {count} ({' or '.join(counts)})")
        return Experts(self.hidden, count, chosen, self.integer(ffn), normalize_top_k)

    def some_sparse(self, experts: Experts) -> list[Mlp | Experts]:
        """Reads MLPs, in the layers of mlp_only_layers, and experts, in every decoder_sparse_step-th other layer."""
        dense, step = self.config.get("mlp_only_layers") or [], self.integer("decoder_sparse_step", default=1)
        if not isinstance(dense, list) or any(layer not in range(self.layers) for layer in dense):
            self.refuse("mlp_only_layers", dense, f"a list of layers below num_hidden_layers = {self.layers}")
            dense = []
        mlp = self.mlp()
        return [mlp if layer in dense or (layer + 1) % step else experts for layer in range(self.layers)]

    def model(self, layers: Sequence[Layer]) -> Architecture:
        """Reads the numbers that layers share. Raises ModelError with every problem found so far."""
        self._refuse_what_no_family_has()
        architecture = Architecture(
            family=self.family,
            hidden=self.hidden,
            vocab=self.integer("vocab_size"),
            max_positions=self.integer("max_position_embeddings"),
            norm_epsilon=self.number("rms_norm_eps", 1e-6),
            tied_embeddings=self.flag("tie_word_embeddings"),
            layers=tuple(layers),
        )
        for key, value in self.config.items():
            if not (key in self.config.known or value is None or value is False or HARMLESS.fullmatch(key)):
                needed = "no key that this family does not know: remove it if the model is the same without"
                self.refuse(key, value, needed)
        if self.problems:
            raise ModelError(list(dict.fromkeys(self.problems)))
        return architecture

    def _read_as_bfloat16(self, quantization: object) -> bool:
        """Returns whether files with this scheme are read as the bfloat16 that they stand for (files/loading.py)."""
        if not isinstance(quantization, Mapping):
            return False
        if quantization.get("quant_method") == "mxfp4":
            return self.mxfp4
        blocks = quantization.get("weight_block_size", ())  # null: one scale for a matrix
        e4m3 = quantization.get("fmt") in (None, "e4m3", "float8_e4m3fn")
        return quantization.get("quant_method") == "fp8" and e4m3 and blocks in (None, [128, 128])

    def _refuse_what_no_family_has(self) -> None:
        for key in ("dtype", "torch_dtype"):
            if self.config.get(key) not in DTYPES:
                self.refuse(key, self.config[key], ", ".join(map(str, DTYPES[1:])))
        if self.config.get("is_causal", True) is not True:  # null is false to transformers
            self.refuse("is_causal", self.config["is_causal"], "true: attention that looks ahead is not supported")
        if "hidden_act" not in self.config.known and self.config.get("hidden_act", "silu") != "silu":
            self.refuse("hidden_act", self.config["hidden_act"], "silu")
        if (quantization := self.config.get("quantization_config")) and not self._read_as_bfloat16(quantization):
            needed = "absent, or fp8 (e4m3) with weight_block_size [128, 128] or null" + ", or mxfp4" * self.mxfp4
            fix = "take a bfloat16 checkpoint, or dequantise this one (as transformers' model.dequantize()) and save it"
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
            self.refuse("quantization_config", method or quantization, needed, fix)
        if "layer_types" in self.config.known:
            return
        kinds = self.config.get("layer_types") or []
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            self.refuse("layer_types", kinds, "full_attention only: this family has no windows")
        elif self.config.get("use_sliding_window"):
            self.refuse("use_sliding_window", True, "false: this family has no windows")
        if "use_sliding_window" in self.config and not self.config["use_sliding_window"]:
            self.ignore("sliding_window", "max_window_layers")  # of windows that are not used
