"""A rollout engine: the bytes that its ranks hold, and the seconds in which it generates a step's responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from megagrpo.batching.work import head_work, layer_work
from megagrpo.plan.assumptions import Assumptions, Lengths, longest_sequence
from megagrpo.plan.case import Case, Machines
from megagrpo.plan.communication import Links, RankGroup, Seconds, gather
from megagrpo.plan.parameters import engine_rank_parameters, expert_parameters, layer_counts, total_parameters
from megagrpo.plan.training_time import FORWARD, head_flops, layers_flops
from megagrpo.recipe.defaults import cpu_cache_tokens
from megagrpo.weights.families.architecture import Architecture

MIB, GIB = 2**20, 2**30
WHOLE_PREFILL_TOKENS = 16384
"""SGLang's max_prefill_tokens: what prompts that are not cut into chunks (chunked_prefill_size -1) take at once."""
PREFILL_GRAPHS = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, 2**31, 512))
"""Tokens of the prefills that SGLang captures in graphs, as ranges (sglang/srt/arg_groups/cuda_graph_hook.py)."""

POINTS = 24
"""At which the end of a batch is looked at: its integral over time is a sum over so many intervals."""


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on each device of one engine. `cache_tokens` is of the whole engine: its ranks hold heads, not tokens."""

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


def engine_memory(case: Case) -> EngineMemory:
    """Memory of a GRPO recipe's engines. Where the card is not known, the cache is as large as the recipe could use.

    SGLang takes mem_fraction_static of what is free when it starts, and it starts beside the trainer: it is taken to
    find the card empty.
    """
    recipe, arch, card_bytes, device, element = (
        case.grpo,
        case.architecture,
        case.card_bytes,
        case.device,
        case.item_bytes,
    )
    rollout, options = recipe.rollout, recipe.rollout.sglang.model_extra or {}
    longest = longest_sequence(recipe)
    asked = min(rollout.requests_at_once, -(-rollout.prompts_per_step * rollout.samples_per_prompt // rollout.engines))
    if rollout.engine != "sglang":
        tokens, logits = asked * longest, 4 * asked * arch.vocab
        cache = tokens * cache_bytes_per_token(arch, 1, element)
        return EngineMemory(total_parameters(arch) * element, cache, logits, tokens, longest, asked)
    tensor, expert = rollout.layout.tensor, rollout.layout.expert
    asked = min(asked, options.get("max_running_requests") or asked)
    weights = engine_rank_parameters(arch, tensor, expert, device) * element
    if (latent := arch.latent) is not None:  # w_kc and w_vc, which SGLang makes of kv_b_proj
        each_head = (latent.plain_dim + latent.value_dim) * latent.key_value_rank
        weights += arch.layers * (arch.heads // tensor) * each_head * element
    each = cache_bytes_per_token(arch, tensor, _cache_element_bytes(options, element))
    working = 0 if device == "cpu" else _working_bytes(arch, options, card_bytes, tensor, expert, element)
    if device == "cpu":
        tokens = cpu_cache_tokens(rollout.requests_at_once, longest)
    elif card_bytes is None:
        tokens = asked * longest
    else:
        fraction = options.get("mem_fraction_static") or default_fraction(options, card_bytes, tensor)
        tokens = max(0, int(card_bytes * fraction) - weights) // each
    tokens = min(tokens, options.get("max_total_tokens") or tokens)
    return EngineMemory(weights, tokens * each, working, tokens, longest, asked)


def cache_bytes_per_token(arch: Architecture, tensor: int, element_bytes: int) -> int:
    """Keys and values of one token in all layers, on one of `tensor` ranks; the latents of latent attention are whole
    on each (sglang/srt/model_executor/pool_configurator.py, _compute_cell_size). transformers caches the same."""
    if arch.latent is not None:
        return arch.layers * (arch.latent.key_value_rank + arch.latent.rotary_dim) * element_bytes
    return 2 * arch.layers * max(1, arch.query_groups // tensor) * arch.head_dim * element_bytes


def _cache_element_bytes(options: Mapping[str, Any], element_bytes: int) -> int:
    named = str(options.get("kv_cache_dtype") or "auto")
    return 1 if named.startswith("fp8") else 2 if named in ("bf16", "bfloat16") else element_bytes


def default_fraction(options: Mapping[str, Any], card_bytes: int, tensor: int) -> float:
    """SGLang's own mem_fraction_static on a card (0.5.23, sglang/srt/arg_groups/memory_hook.py): it leaves 1.5 MiB for
    each token of a prefill, what it expects of CUDA graphs, and some more."""
    card = card_bytes // MIB
    prefill, _ = _sizes(options, card_bytes, tensor)
    reserved = 512 + tensor * 1024 / 8 + 1.5 * max(prefill, 2048) + _graph_bytes(options, card_bytes, tensor) / MIB
    if card > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((card - reserved) / card, 3)


def _graph_bytes(options: Mapping[str, Any], card_bytes: int | None, tensor: int) -> int:
    """SGLang reckons with 2 MiB for each request in the largest decoding graph and 8 MiB for each prefill graph."""
    if options.get("disable_cuda_graph"):
        return 0
    prefill, requests = _sizes(options, card_bytes, tensor)
    graphs = sum(len(range(begin, min(end, prefill + 1), step)) for begin, end, step in PREFILL_GRAPHS)
    return (2 * requests + 8 * graphs) * MIB


def _working_bytes(
    arch: Architecture, options: Mapping[str, Any], card_bytes: int | None, tensor: int, expert: int, element: int
) -> int:
    """Graphs; one layer of a prefill without gradients, or the logits of all requests in float32, twice."""
    prefill, requests = _sizes(options, card_bytes, tensor)
    widths = [4 * arch.heads / tensor * arch.head_dim]
    if arch.has_dense_layers:
        widths.append(3 * arch.ffn / tensor)
    if arch.experts is not None:
        widths.append(arch.experts.per_token * (arch.hidden + 3 * arch.experts.ffn * expert / tensor))
    layer, logits = int(prefill * (4 * arch.hidden + max(widths)) * element), 2 * 4 * requests * arch.vocab
    return _graph_bytes(options, card_bytes, tensor) + max(layer, logits)


def _sizes(options: Mapping[str, Any], card_bytes: int | None, tensor: int) -> tuple[int, int]:
    """Tokens of a prefill, and requests in the largest graph: as given, else what SGLang chooses for a card."""
    many = 160 if tensor >= 4 else None
    if card_bytes is None:
        prefill, requests = 4096, 160
    elif card_bytes < 20 * GIB:
        prefill, requests = 2048, 8
    elif card_bytes < 60 * GIB:
        prefill, requests = 4096, many or (48 if card_bytes < 35 * GIB else 32)
    elif card_bytes < 160 * GIB:
        prefill, requests = 8192, 512 if many else 256
    else:
        prefill, requests = 16384, 512
    chunk = options.get("chunked_prefill_size") or prefill
    return chunk if chunk > 0 else WHOLE_PREFILL_TOKENS, min(requests, options.get("max_running_requests") or requests)


# --- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineSpeed:
    """One engine, alone on its devices.

    A decoded token of a batch costs what takes longest: reading the weights that the batch needs and all keys and
    values, or the products; then the tensor ranks' sums and a fixed overhead.
    """

    arch: Architecture
    tensor: int
    machines: Machines
    assumptions: Assumptions
    item_bytes: int

    @cached_property
    def dense_bytes(self) -> float:
        """Weights of one rank that every batch reads: all but routed experts and the input embedding."""
        arch = self.arch
        embedding = 0 if arch.tied_embeddings else arch.vocab * arch.hidden
        return (total_parameters(arch) - expert_parameters(arch) - embedding) * self.item_bytes / self.tensor

    @cached_property
    def expert_bytes(self) -> float:
        """All routed experts of one rank."""
        return expert_parameters(self.arch) * self.item_bytes / self.tensor

    @cached_property
    def token_bytes(self) -> int:
        """Keys and values of one token on one rank."""
        return cache_bytes_per_token(self.arch, self.tensor, self.item_bytes)

    @cached_property
    def token_flops(self) -> float:
        """Products for one token on one rank, besides attention's core."""
        counts = layer_counts(self.arch, range(self.arch.layers))
        layers = layers_flops(self.arch, counts, FORWARD, tokens=1.0, squares=0.0)
        return (layers.total + head_work(self.arch)) / self.tensor

    @cached_property
    def pair_flops(self) -> float:
        """Attention's core for one token and one before it, on one rank. Latents are not projected up for decoding."""
        arch, latent = self.arch, self.arch.latent
        if latent is None:
            return 2 * layer_work(arch, 0).pairs * arch.layers / self.tensor
        return 2 * arch.layers * arch.heads / self.tensor * (2 * latent.key_value_rank + latent.rotary_dim)

    def experts_read(self, tokens: float) -> float:
        """Expected share of a layer's experts that a batch of tokens meets: 1 - (1 - per_token / count)^tokens."""
        experts = self.arch.experts
        return 0.0 if experts is None else 1 - (1 - experts.per_token / experts.count) ** tokens

    def decode_seconds(self, batch: float, context: float) -> float:
        """One token for each of `batch` responses, with `context` tokens before each in the mean."""
        gpu, assumed = self.machines.gpu, self.assumptions
        read = self.dense_bytes + self.expert_bytes * self.experts_read(batch) + self.token_bytes * batch * context
        reading = read / (gpu.memory_bytes_per_second * assumed.decode_efficiency)
        flops = batch * (self.token_flops + self.pair_flops * context)
        products = flops / (gpu.flops * assumed.prefill_efficiency)
        return max(reading, products) + self._sums_seconds(batch) + assumed.decode_step_seconds

    def prefill_seconds(self, tokens: float, squares: float, prompts: float) -> float:
        """Whole prompts; `squares` is the sum of their squared lengths."""
        counts = layer_counts(self.arch, range(self.arch.layers))
        flops = layers_flops(self.arch, counts, FORWARD, tokens, squares).total
        flops = (flops + head_flops(self.arch, FORWARD, prompts)) / self.tensor
        return flops / (self.machines.gpu.flops * self.assumptions.prefill_efficiency) + self._sums_seconds(tokens)

    def _sums_seconds(self, tokens: float) -> float:
        """All-reduces of hidden states over tensor ranks, two in each layer."""
        group = RankGroup(self.tensor, min(self.tensor, self.machines.gpus_per_node))
        whole = tokens * self.arch.hidden * self.item_bytes
        return 2 * self.arch.layers * 2 * gather(group, whole, 1, Links.of(self.machines, self.assumptions))


@lru_cache(maxsize=4096)
def rollout_seconds(engine: EngineSpeed, lengths: Lengths, prompts: int, samples: int, at_once: float) -> Seconds:
    """Seconds in which one engine samples `samples` responses for each of `prompts` prompts, `at_once` at most at once.

    It decodes full batches until no response waits, then one batch whose responses end one after the other.
    """
    responses = float(prompts * samples)
    batch = min(responses, at_once)
    full_steps = (responses - batch) * lengths.response / batch
    # A response that is met at a random moment of a long run is longer than the mean, and half done.
    underway = lengths.prompt + lengths.response_square / (2 * lengths.response)
    width, last = lengths.longest / POINTS, 0.0
    for point in range(POINTS):  # until the longest response ends: alone, if it is much longer than the others
        decoded = (point + 0.5) * width
        alive = max(1.0, batch * lengths.alive(decoded))
        last += width * engine.decode_seconds(alive, lengths.prompt + decoded)
    return {
        "prompts": engine.prefill_seconds(prompts * lengths.prompt, prompts * lengths.prompt**2, prompts),
        "full batches": full_steps * engine.decode_seconds(batch, underway),
        "last batch": last,
    }
