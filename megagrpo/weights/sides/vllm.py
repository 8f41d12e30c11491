"""The manifest of one rank of a vLLM engine, under vLLM's own parameter names (0.32.0).

Compared with running engines on CPUs (tests/vllm). vLLM names and cuts parameters as SGLang does on GPUs
(sides/sglang.py), so parts of layers describe themselves to the same LayerOnEngine; families/vllm_classes.py has the
differences. A vocabulary is padded to a multiple of 64, which the tensor ranks must divide. Nothing else is padded, not
on CPUs either: there rollout/vllm/cpu_layers.py keeps parameters as they are loaded. Biases of experts have the model's
dtype.

Latent attention: vLLM derives W_UK_T and W_UV from kv_b_proj. The weight loader makes them anew
(transport/vllm.py), so they are not described here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megagrpo.errors import ModelError, Problem
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.latent_attention import LatentAttention
from megagrpo.weights.families.sglang_classes import SglangClass
from megagrpo.weights.families.sglang_gaps import gap_problems
from megagrpo.weights.families.vllm_classes import CLASSES, OTHER_ENGINES, REFUSED
from megagrpo.weights.sides.assembly import ManifestBuilder
from megagrpo.weights.sides.sglang import VOCABULARY_MULTIPLE, EngineSizes, LayerOnEngine, held_by

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of heads that vLLM's kernel of attention has on CPUs."""
CPU_LATENTS = (512, 64)
"""kv_lora_rank and qk_rope_head_dim of its kernel of latent attention there."""
BIASES = (".w13_bias", ".w2_bias")


@dataclass(frozen=True)
class LayerOnVllm(LayerOnEngine):
    """Tensor rank `rank`."""

    @property
    def of_class(self) -> SglangClass:
        return CLASSES[self.arch.family]


def manifest(
    arch: Architecture,
    layout: EngineSizes,
    rank: int,
    dtype: str,
    device: str,
    engine: int = 0,
    quantization: str | None = None,
) -> Manifest:
    """Returns the manifest of tensor rank `rank`, with the names of the model's `named_parameters()` as storages.

    `device` is cpu or cuda. Raises ModelError if vLLM cannot hold the model in this way.
    """
    if problems := split_problems(arch, layout, device, quantization):
        raise ModelError(problems)
    builder = ManifestBuilder(f"engine {engine} rank {rank}", dtype)
    held = held_by(LayerOnVllm(arch, layout, rank, "cuda", builder), stage=0)  # MLPs are not padded, as on GPUs
    storages = {
        name: replace(its, dtype=dtype) if name.endswith(BIASES) else its for name, its in held.storages.items()
    }
    return replace(held, storages=storages)


def split_problems(
    arch: Architecture, layout: EngineSizes, device: str, quantization: str | None = None
) -> list[Problem]:
    """Returns the reasons why an engine of these sizes cannot hold the model."""
    on_vllm = f"{arch.family} on vLLM"
    if arch.family not in CLASSES:
        return [Problem(on_vllm, REFUSED[arch.family], f"one of {', '.join(CLASSES)}", OTHER_ENGINES)]
    of_class = CLASSES[arch.family]
    if problems := list(gap_problems(arch, of_class.gaps, "vLLM", OTHER_ENGINES)):
        return problems
    if device == "cpu" and (problems := _cpu_problems(arch)):
        return problems
    if arch.value_head:
        return [Problem(on_vllm, "a value head", "a model with logits")]
    where = f"{arch.family} over tensor = {layout.tensor}"
    problems = []
    if quantization is not None:
        needed = "no quantization: updates of quantised weights in vLLM were not written"
        problems.append(Problem(on_vllm, quantization, needed, OTHER_ENGINES))
    for name in ("pipeline", "expert", "attention_data"):
        if (size := getattr(layout, name)) > 1:
            needed = "1: with vLLM only tensor parallelism was compared"
            problems.append(Problem(where, f"{name} = {size}", needed, f"rollout.layout.{name}: 1"))
    if problems:
        return problems
    if layout.tensor > 1 and any(getattr(kind.attention, "norm", None) == "projection" for kind in arch.kinds):
        problems.append(Problem(where, "norms of all heads together", "tensor = 1: cut norms were not compared"))
    padded = -(-arch.vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if padded % layout.tensor:
        problems.append(Problem(where, f"{padded} rows of the padded vocabulary", f"a multiple of {layout.tensor}"))
    if arch.tied_embeddings and of_class.ties == "never":
        problems.append(Problem(where, "tied embeddings", "a head of its own: vLLM's class has no head for them"))
    parts = dict.fromkeys(part for kind in arch.kinds for part in (kind.attention, kind.mlp))
    return problems + [Problem(where, *unmet) for part in parts for unmet in part.unmet_on_engine(layout, "cuda")]


def _cpu_problems(arch: Architecture) -> list[Problem]:
    """Returns the sizes of heads that vLLM's kernels for CPUs lack."""
    where, problems = f"{arch.family} on vLLM on CPUs", []
    for attention in dict.fromkeys(kind.attention for kind in arch.kinds):
        if isinstance(attention, LatentAttention):
            if (attention.key_value_rank, attention.rotary_dim) != CPU_LATENTS:
                sizes = f"{attention.key_value_rank} and {attention.rotary_dim}"
                at = f"{where}: kv_lora_rank and qk_rope_head_dim"
                problems.append(Problem(at, sizes, "512 and 64, which its kernel has", OTHER_ENGINES))
            if attention.rope.yarn is None:
                given, needed = "latents with a plain rotary embedding", "yarn: its kernel rotates others wrongly"
                problems.append(Problem(where, given, needed, OTHER_ENGINES))
        elif attention.head_dim not in CPU_HEADS:
            needed = f"one of {', '.join(map(str, CPU_HEADS))}"
            problems.append(Problem(f"{where}: head_dim", str(attention.head_dim), needed, OTHER_ENGINES))
    return problems
