"""The memory of one SGLang engine, as a plan states it: parameters of its ranks, its cache, and SGLang's reserves
(0.5.23)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import mul
from typing import Any, NamedTuple

from megagrpo.plan.assumptions import longest_sequence
from megagrpo.plan.case import Case
from megagrpo.plan.engine import GIB, MIB, EngineMemory, SequenceCache, asked_at_once, cache_of
from megagrpo.plan.parameters import BLOCK_ELEMENT_BYTES, Shard, shard_of
from megagrpo.recipe.defaults import cpu_cache_tokens
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.blocks import QUANTIZED
from megagrpo.weights.families import FAMILIES
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.part import Tensor
from megagrpo.weights.sides.sglang import manifest, stage_layers

WHOLE_PREFILL_TOKENS = 16384
"""SGLang's max_prefill_tokens: a prefill's tokens if prompts are not cut into chunks (chunked_prefill_size -1)."""
PREFILL_TOKENS = ((20 * GIB, 2048), (60 * GIB, 4096), (160 * GIB, 8192), (2**63, 16384))
"""Tokens of a prefill that SGLang chooses for cards below a size in bytes."""
PREFILL_GRAPHS = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, 2**31, 512))
"""Tokens of the prefills that SGLang captures in graphs, as ranges (sglang/srt/arg_groups/cuda_graph_hook.py)."""


def engine_memory(case: Case) -> EngineMemory:
    """Returns the memory of a GRPO recipe's engines. For an unknown card, the cache has all that the recipe could use.

    SGLang takes mem_fraction_static of the memory that is free at its start, beside the trainer. The card is assumed to
    be empty then.
    """
    recipe, arch, element = case.grpo, case.architecture, case.item_bytes
    card_bytes, device, rollout = case.card_bytes, case.device, recipe.rollout
    options, layout, longest = rollout.kind.options(rollout), rollout.layout, longest_sequence(recipe)
    group = layout.tensor // layout.attention_data
    at_once = options.get("max_running_requests") or rollout.requests_at_once
    asked = min(asked_at_once(case), at_once)
    dtype = str(options.get("kv_cache_dtype") or "auto")
    cached = 1 if dtype.startswith("fp8") else 2 if dtype in ("bf16", "bfloat16") else element
    of_attention, stages = attention_of_stages(arch, layout.pipeline, group, cached), []
    for stage, held in enumerate(engine_rank_parameters(arch, layout, device)):
        derived, cache = of_attention[stage]
        weights = (held + derived) * element
        if rollout.quantization is not None:
            counts = arch.tally(stage_layers(len(arch.layers), stage, layout.pipeline))
            blocks = sum(map(mul, counts, engine_blocks(arch, layout)))
            weights -= int(blocks * (element - BLOCK_ELEMENT_BYTES))
        windows = FAMILIES[arch.family].sglang.windows_cached * sum(size for _, size in cache.windows)
        stages.append(_Stage(weights, int(cache.token + windows), cache.states))
    sizes, slots = GraphSizes.of(options, card_bytes, layout, at_once), 0
    if card_bytes is not None and device != "cpu":
        static = int(card_bytes * (options.get("mem_fraction_static") or default_fraction(sizes, card_bytes)))
        slots, asked = _states(options, [(max(0, static - of.weights), of.states) for of in stages], at_once, asked)
        # Every stage caches the same tokens: as many as the one with the least room.
        tokens = min(max(0, static - of.weights - slots * of.states) // max(1, of.token) for of in stages)
    elif device == "cpu":
        tokens = cpu_cache_tokens(rollout.requests_at_once, longest)
    else:
        tokens, slots = -(-asked // layout.attention_data) * longest, asked
    tokens = min(tokens, options.get("max_total_tokens") or tokens)
    fullest = max(stages, key=lambda of: of.weights + tokens * of.token + slots * of.states)
    return EngineMemory(
        fullest.weights,
        tokens * fullest.token + slots * fullest.states,
        working=0 if device == "cpu" else _working_bytes(arch, sizes, element),
        cache_tokens=tokens * layout.attention_data,
        longest=longest,
        asked=asked,
        reserved=True,
        weights_lowered_by=("rollout.layout.tensor",),
        cache_lowered_by=(f"rollout.sglang.{'max_total_tokens' if device == 'cpu' else 'mem_fraction_static'}",),
        working_lowered_by=("rollout.sglang.chunked_prefill_size",),
        freed_by=("rollout.sglang.enable_memory_saver",),
    )


def route_buffer_bytes(case: Case) -> int:
    """Returns the host bytes of routes on the fullest node: on each rank int32, with layers without experts, for all
    tokens of its cache (sglang/srt/state_capturer/base.py)."""
    arch, tokens = case.architecture, engine_memory(case).cache_tokens // case.grpo.rollout.layout.attention_data
    ranks = Counter(device.node for device in case.device_map for _ in device.engines)
    return 4 * len(arch.layers) * arch.experts_per_token * tokens * max(ranks.values())


class _Stage(NamedTuple):
    """The bytes on each rank of a pipeline stage: of its weights, and in its cache of a token and of states."""

    weights: int
    token: int
    states: int


STATE_SHARE = 0.9
"""Bytes of states over those of tokens in a cache (SGLang's mamba_full_memory_ratio)."""
STATES_OF_A_REQUEST = {"disable_radix_cache": 1, "disable_overlap_schedule": 3}
"""States that SGLang reserves for a request with these options; 5 otherwise, for prefixes that others may share
(sglang/srt/mem_cache/kv_cache_configurator.py, _calculate_mamba_ratio)."""


def _states(options: Mapping[str, Any], rooms: Sequence[tuple[int, int]], at_once: int, asked: int) -> tuple[int, int]:
    """Returns the states in a cache, and how many responses they let an engine decode of those that are `asked` of it.
    `rooms` has the bytes for each stage's cache, and those of a sequence's states there."""
    rooms = [(room, states) for room, states in rooms if states]
    if not rooms:
        return 0, asked
    of_request = next((count for option, count in STATES_OF_A_REQUEST.items() if options.get(option)), 5)
    ratio = options.get("mamba_full_memory_ratio") or STATE_SHARE
    slots = options.get("max_mamba_cache_size") or (at_once if of_request == 1 else None)
    if slots is None:
        slots = max(0, min(int(room * ratio / (1 + ratio)) // states for room, states in rooms) - 1)
    return slots + 1, min(asked, slots // of_request)  # one is padding


@lru_cache(maxsize=1024)
def attention_of_stages(
    arch: Architecture, stages: int, ranks: int, element_bytes: int
) -> list[tuple[int, SequenceCache]]:
    """Returns for each pipeline stage the elements that SGLang derives from weights, and its cache of a sequence.

    Both are of each of `ranks` ranks that share the attention.
    """
    counts = [arch.count(stage_layers(len(arch.layers), stage, stages)) for stage in range(stages)]
    derived = [sum(count * kind.attention.derived_elements(ranks) for kind, count in of.items()) for of in counts]
    return [(size, cache_of(of, ranks, element_bytes)) for size, of in zip(derived, counts, strict=True)]


@lru_cache(maxsize=1024)
def engine_blocks(arch: Architecture, layout: EngineLayoutConfig) -> tuple[int, ...]:
    """Returns the elements in blocks on one rank of a quantised engine, of one layer of each kind."""
    blocks = _shard(arch, layout, "cuda", lambda tensor: tensor.role in QUANTIZED)
    return tuple(map(sum, blocks.layers.values()))


def _shard(arch: Architecture, layout: EngineLayoutConfig, device: str, counted: Callable[[Tensor], bool]) -> Shard:
    """Returns the shard of the `counted` tensors of one rank of an engine without a pipeline."""
    sample = replace(arch.sample(layout.tensor), tied_embeddings=arch.tied_embeddings)
    one_stage = layout.model_copy(update={"pipeline": 1})
    return shard_of(arch, sample, manifest(sample, one_stage, 0, "float32", device), counted)


@lru_cache(maxsize=1024)
def engine_rank_parameters(arch: Architecture, layout: EngineLayoutConfig, device: str) -> tuple[int, ...]:
    """Returns the elements of all parameters of one rank, for each pipeline stage. Raises ModelError if SGLang
    cannot hold the model so."""
    of_class, (outside, layers) = FAMILIES[arch.family].sglang, _shard(arch, layout, device, lambda _: True)
    of_stages = []
    for stage in range(layout.pipeline):
        first, last = stage == 0, stage == layout.pipeline - 1
        counts = arch.count(stage_layers(len(arch.layers), stage, layout.pipeline))
        held = sum(count * sum(layers[kind]) for kind, count in counts.items())
        held += outside["embedding"] if first or of_class.embedding_on_every_stage else 0
        held += outside["final_norm"] if last else 0
        if arch.tied_embeddings:
            held += outside["embedding"] if last and not first else 0
        elif last or of_class.head_on_every_stage:
            held += outside["head"]
        of_stages.append(held)
    return tuple(of_stages)


@dataclass(frozen=True)
class GraphSizes:
    """The sizes for which SGLang reserves memory on each device: as given, else its choice for a card."""

    layout: EngineLayoutConfig
    prefill: int
    """Tokens of a prefill, of all groups together."""
    requests: int
    """Requests of one group that are decoded at once."""
    graph_bytes: int
    """SGLang's reserve: 2 MiB for each request in the largest decoding graph, and 8 MiB for each prefill graph. With
    several groups a request has 3 MiB more for each of them, 4.5 above 300 requests."""

    @classmethod
    def of(
        cls, options: Mapping[str, Any], card_bytes: int | None, layout: EngineLayoutConfig, at_once: int
    ) -> GraphSizes:
        size = 4096 if card_bytes is None else next(tokens for most, tokens in PREFILL_TOKENS if card_bytes < most)
        size = options.get("chunked_prefill_size") or size
        prefill = size if size > 0 else WHOLE_PREFILL_TOKENS
        groups, requests = layout.attention_data, -(-at_once // layout.attention_data)
        request = 2 + (0 if groups == 1 else 3 * groups if requests <= 300 else 4.5 * groups)
        largest = 0 if layout.pipeline > 1 else prefill  # pipelines have no graphs for prefills
        prefills = sum(len(range(begin, min(end, largest + 1), step)) for begin, end, step in PREFILL_GRAPHS)
        mib = 0 if options.get("disable_cuda_graph") else request * requests + 8 * prefills
        return cls(layout, prefill, requests, int(mib * MIB))


def default_fraction(sizes: GraphSizes, card_bytes: int) -> float:
    """Returns SGLang's default mem_fraction_static on a card (0.5.23, sglang/srt/arg_groups/memory_hook.py). It leaves
    1.5 MiB for each token of a prefill, its estimate for CUDA graphs, and some more."""
    card = card_bytes // MIB
    reserved = 512 + sizes.layout.ranks * 1024 / 8 + 1.5 * max(sizes.prefill, 2048) + sizes.graph_bytes / MIB
    if card > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((card - reserved) / card, 3)


def _working_bytes(arch: Architecture, sizes: GraphSizes, element: int) -> int:
    """Returns the bytes of graphs, plus the larger of a prefill's layer and twice a group's logits in float32.

    Each group attends to its part of a prefill; MLPs and experts have all of it.
    """
    widest = max(part.engine_columns(sizes.layout) for kind in arch.kinds for part in (kind.attention, kind.mlp))
    layer = int(sizes.prefill * (4 * arch.hidden + widest) * element)
    logits = 2 * 4 * sizes.requests * arch.vocab
    return sizes.graph_bytes + max(layer, logits)
