"""Bytes that one rank of a rollout engine holds, and how many responses its cache of keys and values has room for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megagrpo.plan.parameters import total_parameters
from megagrpo.recipe.defaults import dtype_name
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.families.architecture import Architecture, LatentAttention
from megagrpo.weights.sides.sglang import VOCABULARY_MULTIPLE

MIB, GIB = 2**20, 2**30
CPU_CACHE_TOKENS = 65536
"""As in megagrpo/rollout/sglang/arguments.py."""
CPU_FFN_MULTIPLE = 32
WHOLE_PREFILL_TOKENS = 16384
"""SGLang's max_prefill_tokens: what prompts that are not cut into chunks (chunked_prefill_size -1) take at once."""


@dataclass(frozen=True)
class EngineMemory:
    """Of each device of one engine. `cache_tokens` are of the whole engine: its ranks hold heads, not tokens."""

    weights: int
    cache: int
    working: int
    """CUDA graphs, and the activations of a prefill."""

    cache_tokens: int
    longest: int
    """Tokens of the longest prompt with the longest response."""

    asked: int
    """Responses that the recipe has an engine decode at once."""

    @property
    def sequences(self) -> int:
        """Longest responses that the cache holds at once. SGLang lets others wait, or computes theirs again."""
        return min(self.asked, self.cache_tokens // self.longest)


def engine_memory(recipe: Recipe, arch: Architecture, card_bytes: int | None, device: str) -> EngineMemory:
    """`card_bytes`: a card's memory; None if it is not known: then the cache is as large as the recipe could use.

    SGLang takes mem_fraction_static of what is free when it starts, and it starts beside the trainer: it is taken to
    find the card empty.
    """
    rollout, options = recipe.rollout, recipe.rollout.sglang.model_extra or {}
    element = 2 if dtype_name(recipe, device) == "bfloat16" else 4
    longest = recipe.data.prompt_tokens_max + rollout.response_tokens_max
    asked = min(rollout.requests_at_once, -(-rollout.prompts_per_step * rollout.samples_per_prompt // rollout.engines))
    if rollout.engine != "sglang":
        each = cache_bytes_per_token(arch, 1, element)
        tokens = asked * longest
        weights = total_parameters(arch) * element
        logits = 4 * asked * arch.vocab
        return EngineMemory(weights, tokens * each, logits, tokens, longest, asked)
    tensor, expert = rollout.layout.tensor, rollout.layout.expert
    asked = min(asked, options.get("max_running_requests") or asked)
    weights = weight_elements(arch, tensor, expert, device) * element
    if arch.latent is not None:
        weights += _derived_elements(arch, arch.latent, tensor) * element
    each = cache_bytes_per_token(arch, tensor, _cache_element_bytes(options, element))
    wanted = asked * longest
    if device == "cpu":
        tokens = max(min(rollout.requests_at_once * longest, CPU_CACHE_TOKENS), 2 * longest)
        return EngineMemory(weights, _limited(tokens, options) * each, 0, _limited(tokens, options), longest, asked)
    working = _working_bytes(arch, options, card_bytes, tensor, expert, element)
    if card_bytes is None:
        tokens = _limited(wanted, options)
        return EngineMemory(weights, tokens * each, working, tokens, longest, asked)
    fraction = options.get("mem_fraction_static") or default_fraction(options, card_bytes, tensor)
    tokens = _limited(max(0, int(card_bytes * fraction) - weights) // each, options)
    return EngineMemory(weights, tokens * each, working, tokens, longest, asked)


def _limited(tokens: int, options: dict[str, Any]) -> int:
    return min(tokens, options.get("max_total_tokens") or tokens)


def cache_bytes_per_token(arch: Architecture, tensor: int, element_bytes: int) -> int:
    """Keys and values of one token in all layers, on one of `tensor` ranks; the latents of latent attention are whole
    on each (sglang/srt/model_executor/pool_configurator.py, _compute_cell_size). transformers caches the same."""
    if arch.latent is not None:
        return arch.layers * (arch.latent.key_value_rank + arch.latent.rotary_dim) * element_bytes
    return 2 * arch.layers * max(1, arch.query_groups // tensor) * arch.head_dim * element_bytes


def _cache_element_bytes(options: dict[str, Any], element_bytes: int) -> int:
    named = str(options.get("kv_cache_dtype") or "auto")
    return 1 if named.startswith("fp8") else 2 if named in ("bf16", "bfloat16") else element_bytes


def default_fraction(options: dict[str, Any], card_bytes: int, tensor: int) -> float:
    """SGLang's own mem_fraction_static on a card (0.5.23, sglang/srt/arg_groups/memory_hook.py): it leaves 1.5 MiB for
    each token of a prefill, what it expects of CUDA graphs, and some more."""
    card = card_bytes // MIB
    prefill, _ = _sizes(options, card_bytes, tensor)
    reserved = 512 + tensor * 1024 / 8 + 1.5 * max(prefill, 2048) + _graph_bytes(options, card_bytes, tensor) / MIB
    if card > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((card - reserved) / card, 3)


def _graph_bytes(options: dict[str, Any], card_bytes: int | None, tensor: int) -> int:
    """By SGLang's rules: 2 MiB for each request in the largest graph of decoding, 8 MiB for each graph of prefills."""
    if options.get("disable_cuda_graph"):
        return 0
    prefill, requests = _sizes(options, card_bytes, tensor)
    return (2 * requests + 8 * _prefill_graphs(prefill)) * MIB


def _working_bytes(
    arch: Architecture, options: dict[str, Any], card_bytes: int | None, tensor: int, expert: int, element: int
) -> int:
    """Graphs; one layer of a prefill without gradients, or the logits of all requests in float32, twice."""
    prefill, requests = _sizes(options, card_bytes, tensor)
    heads = arch.heads / tensor * arch.head_dim
    widths = [4 * arch.hidden + 4 * heads]
    if arch.has_dense_layers:
        widths.append(4 * arch.hidden + 3 * arch.ffn / tensor)
    if arch.experts is not None:
        each = arch.hidden + 3 * arch.experts.ffn * expert / tensor
        widths.append(4 * arch.hidden + arch.experts.per_token * each)
    layer, logits = int(prefill * max(widths) * element), 2 * 4 * requests * arch.vocab
    return _graph_bytes(options, card_bytes, tensor) + max(layer, logits)


def _sizes(options: dict[str, Any], card_bytes: int | None, tensor: int) -> tuple[int, int]:
    """Tokens of a prefill, and requests in the largest graph."""
    prefill, requests = _sizes_for(card_bytes, tensor)
    running = options.get("max_running_requests") or requests
    chunk = options.get("chunked_prefill_size") or prefill
    return chunk if chunk > 0 else WHOLE_PREFILL_TOKENS, min(requests, running)


def _sizes_for(card_bytes: int | None, tensor: int) -> tuple[int, int]:
    """Tokens of a prefill, and requests in the largest graph, that SGLang chooses for a card."""
    if card_bytes is None:
        return 4096, 160
    few = tensor < 4
    for below, prefill, requests in ((20, 2048, 8), (35, 4096, 48 if few else 160), (60, 4096, 32 if few else 160)):
        if card_bytes < below * GIB:
            return prefill, requests
    if card_bytes < 160 * GIB:
        return 8192, 256 if few else 512
    return 16384, 512


def _prefill_graphs(tokens: int) -> int:
    """Graphs of prefills of up to `tokens` tokens (sglang/srt/arg_groups/cuda_graph_hook.py)."""
    spans = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, tokens + 1, 512))
    return sum(len(range(begin, min(end, tokens + 1), step)) for begin, end, step in spans)


# --- weights ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def weight_elements(arch: Architecture, tensor: int, expert: int, device: str) -> int:
    """Elements of all parameters of one SGLang rank: the sum of weights/sides/sglang.manifest, without its boxes."""
    dense = arch.layers if arch.experts is None else arch.experts.dense_layers
    attention = (
        _attention_elements(arch, tensor) if arch.latent is None else _latent_elements(arch, arch.latent, tensor)
    )
    total = arch.layers * (attention + 2 * arch.hidden) + arch.hidden
    total += dense * 3 * arch.hidden * _cut(arch.ffn, tensor, tensor, device)
    if arch.experts is not None:
        experts = arch.experts
        each = 3 * arch.hidden * _cut(experts.ffn, tensor, tensor // expert, device)
        layer = experts.count // expert * each + experts.count * arch.hidden
        if experts.router is not None:
            layer += experts.count
        if experts.shared_ffn:
            shared = experts.shared_ffn // experts.ffn
            layer += 3 * arch.hidden * shared * _cut(experts.ffn, tensor, tensor, device)
        total += (arch.layers - dense) * layer
    rows = _up(arch.vocab, VOCABULARY_MULTIPLE)
    if rows % tensor:
        rows = _up(arch.vocab, VOCABULARY_MULTIPLE * tensor)
    return total + (1 if arch.tied_embeddings else 2) * rows // tensor * arch.hidden


def _attention_elements(arch: Architecture, tensor: int) -> int:
    heads, groups = arch.heads // tensor, max(1, arch.query_groups // tensor)
    columns = (heads + 2 * groups) * arch.head_dim
    norms = 2 * arch.head_dim if arch.qk_norm else 0
    return arch.hidden * (columns + heads * arch.head_dim) + norms + (columns if arch.qkv_bias else 0)


def _latent_elements(arch: Architecture, latent: LatentAttention, tensor: int) -> int:
    heads = arch.heads // tensor
    down = arch.hidden * (latent.key_value_rank + latent.rotary_dim) + latent.key_value_rank
    up = heads * (latent.plain_dim + latent.value_dim) * latent.key_value_rank
    if latent.query_rank is None:
        queries = arch.hidden * heads * arch.head_dim
    else:
        queries = latent.query_rank * (arch.hidden + 1 + heads * arch.head_dim)
    return down + up + queries + heads * latent.value_dim * arch.hidden


def _derived_elements(arch: Architecture, latent: LatentAttention, tensor: int) -> int:
    """w_kc and w_vc, which SGLang makes of kv_b_proj."""
    heads = arch.heads // tensor
    return arch.layers * heads * (latent.plain_dim + latent.value_dim) * latent.key_value_rank


def _cut(size: int, tensor: int, shards: int, device: str) -> int:
    """Columns of one of `shards` parts; on CPUs sizes are padded to a multiple of 32 x tensor first."""
    return (_up(size, CPU_FFN_MULTIPLE * tensor) if device == "cpu" else size) // shards


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
