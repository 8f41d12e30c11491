"""The memory of one vLLM engine, as a plan states it: parameters of its ranks, and what vLLM leaves for its cache
(0.32.0). On GPUs it was not compared with a server."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from megagrpo.plan.assumptions import longest_sequence
from megagrpo.plan.case import Case
from megagrpo.plan.engine import GIB, EngineMemory, asked_at_once, cache_of
from megagrpo.plan.parameters import shard_of
from megagrpo.recipe.defaults import cpu_cache_tokens
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.vllm import manifest

MEMORY_SHARE = 0.92
"""vLLM's gpu_memory_utilization: the share of a card for weights, activations and cache."""
STEP_TOKENS = ((70 * GIB, 2048), (160 * GIB, 8192), (2**63, 16384))
"""Tokens of a step that vLLM chooses for cards below a size in bytes (EngineArgs.get_batch_defaults)."""


def engine_memory(case: Case) -> EngineMemory:
    """Returns the memory of a GRPO recipe's engines. For an unknown card, the cache has all that the recipe could use.
    Raises ModelError if vLLM cannot hold the model so."""
    recipe, arch, element = case.grpo, case.architecture, case.item_bytes
    card_bytes, device, rollout = case.card_bytes, case.device, recipe.rollout
    options, layout, longest = rollout.kind.options(rollout), rollout.layout, longest_sequence(recipe)
    cached = 1 if str(options.get("kv_cache_dtype") or "auto").startswith("fp8") else element
    weights, cache = rank_parameters(arch, layout, device) * element, cache_of(arch.kinds, layout.tensor, cached)
    step = options.get("max_num_batched_tokens") or next(size for most, size in STEP_TOKENS if (card_bytes or 0) < most)
    working = 0 if device == "cpu" else _working_bytes(arch, layout, step, rollout.requests_at_once, element)
    asked, of_token = asked_at_once(case), max(1, cache.token + sum(size for _, size in cache.windows))
    states = cache.states * asked
    if device == "cpu":
        tokens = cpu_cache_tokens(rollout.requests_at_once, longest)
    elif card_bytes is not None:
        share = int(card_bytes * (options.get("gpu_memory_utilization") or MEMORY_SHARE))
        given = options.get("kv_cache_memory_bytes")
        room = given if isinstance(given, int) else share - weights - working
        tokens = max(0, room - states) // of_token
    else:
        tokens = asked * longest
    return EngineMemory(
        weights,
        tokens * of_token + states,
        working,
        cache_tokens=tokens,
        longest=longest,
        asked=asked,
        reserved=True,
        weights_lowered_by=("rollout.layout.tensor",),
        cache_lowered_by=(f"rollout.vllm.{'kv_cache_memory_bytes' if device == 'cpu' else 'gpu_memory_utilization'}",),
        working_lowered_by=("rollout.vllm.max_num_batched_tokens",),
        freed_by=("rollout.vllm.enable_sleep_mode",),
    )


@lru_cache(maxsize=1024)
def rank_parameters(arch: Architecture, layout: EngineLayoutConfig, device: str) -> int:
    """Returns the elements of all parameters of one rank, and of what vLLM derives from them."""
    sample = replace(arch.sample(layout.tensor), tied_embeddings=arch.tied_embeddings)
    outside, layers = shard_of(arch, sample, manifest(sample, layout, 0, "float32", device), lambda _: True)
    held = sum(outside.values()) + sum(count * sum(layers[kind]) for kind, count in arch.kinds.items())
    return held + sum(count * kind.attention.derived_elements(layout.tensor) for kind, count in arch.kinds.items())


def _working_bytes(arch: Architecture, layout: EngineLayoutConfig, step: int, requests: int, element: int) -> int:
    """Returns the bytes of the larger of a step's layer and twice its logits in float32."""
    widest = max(part.engine_columns(layout) for kind in arch.kinds for part in (kind.attention, kind.mlp))
    return int(max(step * (4 * arch.hidden + widest) * element, 2 * 4 * requests * arch.vocab))
