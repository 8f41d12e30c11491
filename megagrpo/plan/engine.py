"""A rollout engine: the bytes that its ranks hold, and the seconds in which it reads prompts and decodes tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import Any

from megagrpo.batching.work import head_work, layer_work
from megagrpo.plan.assumptions import Assumptions, longest_sequence
from megagrpo.plan.case import Case, Machines
from megagrpo.plan.communication import Links, RankGroup, gather
from megagrpo.plan.parameters import (
    BLOCK_ELEMENT_BYTES,
    engine_blocks,
    engine_rank_parameters,
    layer_counts,
    model_bytes,
    total_parameters,
)
from megagrpo.plan.training_time import FORWARD, head_flops, layers_flops
from megagrpo.recipe.defaults import cpu_cache_tokens
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.sglang import stage_layers

MIB, GIB = 2**20, 2**30
WHOLE_PREFILL_TOKENS = 16384
"""SGLang's max_prefill_tokens: a prefill's tokens if prompts are not cut into chunks (chunked_prefill_size -1)."""
PREFILL_TOKENS = ((20 * GIB, 2048), (60 * GIB, 4096), (160 * GIB, 8192), (2**63, 16384))
"""Tokens of a prefill that SGLang chooses for cards below a size in bytes."""
PREFILL_GRAPHS = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, 2**31, 512))
"""Tokens of the prefills that SGLang captures in graphs, as ranges (sglang/srt/arg_groups/cuda_graph_hook.py)."""


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on the fullest device of one engine. `cache_tokens` is of the whole engine: the ranks of a group hold heads
    or layers, not tokens."""

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
        """Returns how many longest responses the cache holds at once. SGLang queues others, or recomputes theirs."""
        return min(self.asked, self.cache_tokens // self.longest)


def engine_memory(case: Case) -> EngineMemory:
    """Returns the memory of a GRPO recipe's engines. For an unknown card, the cache has all that the recipe could use.

    SGLang takes mem_fraction_static of the memory that is free at its start, beside the trainer. The card is assumed to
    be empty then.
    """
    recipe, arch, element = case.grpo, case.architecture, case.item_bytes
    card_bytes, device = case.card_bytes, case.device
    rollout, options = recipe.rollout, recipe.rollout.kind.options(recipe.rollout)
    longest = longest_sequence(recipe)
    demand = min(rollout.requests_at_once, -(-rollout.prompts_per_step * rollout.samples_per_prompt // rollout.engines))
    if recipe.agent:
        demand = min(demand, -(-recipe.agent.rollouts_at_once // rollout.engines))
    if not rollout.kind.starts_servers:
        tokens, logits = demand * longest, 4 * demand * arch.vocab
        cache = tokens * cache_bytes_per_token(arch, 1, element)
        return EngineMemory(total_parameters(arch) * element, cache, logits, tokens, longest, demand)
    layout = rollout.layout
    group = layout.tensor // layout.attention_data
    at_once = options.get("max_running_requests") or rollout.requests_at_once
    demand = min(demand, at_once)
    dtype = str(options.get("kv_cache_dtype") or "auto")
    cached = 1 if dtype.startswith("fp8") else 2 if dtype in ("bf16", "bfloat16") else element
    per_token = cache_bytes_per_token(arch, group, cached)
    weights, token_bytes = [], []  # by stage
    for stage, held in enumerate(engine_rank_parameters(arch, layout, device)):
        run = stage_layers(arch.layers, stage, layout.pipeline)
        layers = len(run)
        weights.append(held * element)
        if rollout.quantization is not None:
            blocks = sum(map(mul, layer_counts(arch, run), engine_blocks(arch, layout)))
            weights[-1] -= int(blocks * (element - BLOCK_ELEMENT_BYTES))
        if (latent := arch.latent) is not None:  # w_kc and w_vc, which SGLang makes of kv_b_proj
            each_head = (latent.plain_dim + latent.value_dim) * latent.key_value_rank
            weights[-1] += layers * (arch.heads // group) * each_head * element
        token_bytes.append(per_token * layers // arch.layers)
    sizes = GraphSizes.of(options, card_bytes, layout, at_once)
    working = 0 if device == "cpu" else _working_bytes(arch, sizes, element)
    if device == "cpu":
        tokens = cpu_cache_tokens(rollout.requests_at_once, longest)
    elif card_bytes is None:
        tokens = -(-demand // layout.attention_data) * longest
    else:
        static = int(card_bytes * (options.get("mem_fraction_static") or default_fraction(sizes, card_bytes)))
        # Every stage caches the same tokens: as many as the one with the least room.
        tokens = min(max(0, static - held) // token for held, token in zip(weights, token_bytes, strict=True))
    tokens = min(tokens, options.get("max_total_tokens") or tokens)
    fullest = max(range(layout.pipeline), key=lambda stage: weights[stage] + tokens * token_bytes[stage])
    cache_tokens = tokens * layout.attention_data
    return EngineMemory(weights[fullest], tokens * token_bytes[fullest], working, cache_tokens, longest, demand)


def cache_bytes_per_token(arch: Architecture, tensor: int, element_bytes: int) -> int:
    """Returns the bytes of one token's keys and values in all layers, on one of `tensor` ranks. Latents are whole on
    each (sglang/srt/model_executor/pool_configurator.py, _compute_cell_size). transformers caches the same."""
    if arch.latent is not None:
        return arch.layers * (arch.latent.key_value_rank + arch.latent.rotary_dim) * element_bytes
    return 2 * arch.layers * max(1, arch.query_groups // tensor) * arch.head_dim * element_bytes


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
    layout, prefill, requests = sizes.layout, sizes.prefill, sizes.requests
    widths = [4 * arch.heads / layout.tensor * arch.head_dim]
    if arch.has_dense_layers:
        widths.append(3 * arch.ffn / layout.tensor)
    if arch.experts is not None:
        shards = layout.tensor / layout.expert
        widths.append(arch.experts.per_token * (arch.hidden + 3 * arch.experts.ffn / shards))
    layer, logits = int(prefill * (4 * arch.hidden + max(widths)) * element), 2 * 4 * requests * arch.vocab
    return sizes.graph_bytes + max(layer, logits)


# --- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineSpeed:
    """The speed of one engine, alone on its devices.

    A decoded token of a batch costs the longer of two: reading the weights that the batch needs and all keys and
    values, or the products. The ranks' sums and a fixed overhead are added. Stages of a pipeline work at once on equal
    parts of the batch, which each pass all stages for a token.
    """

    arch: Architecture
    layout: EngineLayoutConfig
    machines: Machines
    assumptions: Assumptions
    item_bytes: int
    quantized: bool = False
    """Weights are quantised. Products are assumed to run no faster."""

    @property
    def group(self) -> int:
        """Returns the number of ranks that share the attention."""
        return self.layout.tensor // self.layout.attention_data

    @cached_property
    def dense_bytes(self) -> float:
        """Returns one rank's bytes of all stages that every batch reads: no routed experts or input embedding."""
        arch, weights = self.arch, model_bytes(self.arch, self.item_bytes, quantized=self.quantized)
        embedding = 0 if arch.tied_embeddings else arch.vocab * arch.hidden * self.item_bytes
        return weights.whole + (weights.attention - embedding) / self.group + weights.mlp / self.layout.tensor

    @cached_property
    def expert_bytes(self) -> float:
        """Returns the bytes of all routed experts of one rank of all stages."""
        return model_bytes(self.arch, self.item_bytes, quantized=self.quantized).experts / self.layout.tensor

    @cached_property
    def token_bytes(self) -> int:
        """Returns the bytes of one token's keys and values on one rank of all stages."""
        return cache_bytes_per_token(self.arch, self.group, self.item_bytes)

    @cached_property
    def token_flops(self) -> float:
        """Returns the operations for one token on one rank of all stages, without attention's core."""
        counts = layer_counts(self.arch, range(self.arch.layers))
        layers = layers_flops(self.arch, counts, FORWARD, tokens=1.0, squares=0.0)
        return (layers.total + head_work(self.arch)) / self.layout.tensor

    @cached_property
    def pair_flops(self) -> float:
        """Returns one rank's operations of attention's core for a pair of tokens. Decoding projects no latents up."""
        arch, latent = self.arch, self.arch.latent
        if latent is None:
            return 2 * layer_work(arch, 0).pairs * arch.layers / self.layout.tensor
        return 2 * arch.layers * arch.heads / self.layout.tensor * (2 * latent.key_value_rank + latent.rotary_dim)

    def experts_read(self, tokens: float) -> float:
        """Returns the expected share of a layer's experts that a batch reads: 1 - (1 - per_token / count)^tokens."""
        experts = self.arch.experts
        return 0.0 if experts is None else 1 - (1 - experts.per_token / experts.count) ** tokens

    def decode_seconds(self, batch: float, context: float) -> float:
        """Returns the seconds of one token for each of `batch` responses, with a mean context of `context` tokens."""
        gpu, assumed, stages = self.machines.gpu, self.assumptions, self.layout.pipeline
        passing = max(1.0, batch / stages)  # through one stage at a time
        read = self.dense_bytes + self.expert_bytes * self.experts_read(passing)
        read += self.token_bytes * passing / self.layout.attention_data * context
        reading = read / (gpu.memory_bytes_per_second * assumed.decode_efficiency)
        flops = passing * (self.token_flops + self.pair_flops * context)
        products = flops / (gpu.flops * assumed.prefill_efficiency)
        return max(reading, products) + self._sums_seconds(passing) + assumed.decode_step_seconds

    def prefill_seconds(self, tokens: float, squares: float, prompts: float) -> float:
        """Returns the seconds to read whole prompts; `squares` is the sum of their squared lengths."""
        counts = layer_counts(self.arch, range(self.arch.layers))
        flops = layers_flops(self.arch, counts, FORWARD, tokens, squares).total
        flops = (flops + head_flops(self.arch, FORWARD, prompts)) / self.layout.tensor
        seconds = flops / (self.machines.gpu.flops * self.assumptions.prefill_efficiency) + self._sums_seconds(tokens)
        return seconds / self.layout.pipeline

    def _sums_seconds(self, tokens: float) -> float:
        """Returns the seconds of two all-reduces of hidden states in each layer of all stages, and of stages'
        hand-overs. Attention sums over a group's ranks, for its tokens; MLPs and experts over all tensor ranks. With
        several groups the latter is a gather of all tokens before and a reduce-scatter after."""
        links, near = Links.of(self.machines, self.assumptions), self.machines.gpus_per_node
        whole, layers = tokens * self.arch.hidden * self.item_bytes, 2 * self.arch.layers
        seconds = layers * gather(RankGroup(self.layout.tensor, min(self.layout.tensor, near)), whole, 1, links)
        of_group = whole / self.layout.attention_data
        seconds += layers * gather(RankGroup(self.group, min(self.group, near)), of_group, 1, links)
        between = links.sent("network" if self.layout.ranks > near else "node", whole)
        return seconds + (self.layout.pipeline - 1) * between
