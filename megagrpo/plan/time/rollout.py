"""Seconds of generating a step's responses: prompts read, tokens decoded in batches, and the longest one at the end.

A decoded token of a batch costs what takes longest: reading the weights that the batch needs and all keys and values,
or the products; then the tensor ranks' sums and a fixed overhead. An engine that cannot hold all of its responses at
once decodes full batches until no response waits, then one batch whose responses end one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from megagrpo.batching.work import head_work, layer_work
from megagrpo.plan.assumptions import Assumptions, Lengths
from megagrpo.plan.machines import Machines
from megagrpo.plan.memory.engine import cache_bytes_per_token
from megagrpo.plan.parameters import expert_parameters, total_parameters
from megagrpo.plan.time.communication import Group, Links, gather
from megagrpo.plan.time.flops import FORWARD, head_flops, layers_flops
from megagrpo.plan.time.seconds import Seconds
from megagrpo.recipe.defaults import plan_devices
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.families.architecture import Architecture

POINTS = 24
"""At which the end of a batch is looked at: its integral over time is a sum over so many intervals."""


@dataclass(frozen=True)
class Engine:
    """One engine, alone on its devices."""

    arch: Architecture
    tensor: int
    machines: Machines
    assumptions: Assumptions
    item_bytes: int

    @cached_property
    def links(self) -> Links:
        return Links.of(self.machines, self.assumptions)

    @cached_property
    def group(self) -> Group:
        return Group(self.tensor, min(self.tensor, self.machines.gpus_per_node))

    @cached_property
    def dense_bytes(self) -> float:
        """Weights of one rank that every batch reads: all but routed experts and the input embedding."""
        arch = self.arch
        embedding = 0 if arch.tied_embeddings else arch.vocab * arch.hidden
        read = total_parameters(arch) - expert_parameters(arch) - embedding
        return read * self.item_bytes / self.tensor

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
        linear = sum(layer_work(self.arch, layer).linear for layer in range(self.arch.layers))
        return (linear + head_work(self.arch)) / self.tensor

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
        """Of one token for each of `batch` responses, with `context` tokens before each in the mean."""
        gpu, assumed = self.machines.gpu, self.assumptions
        read = self.dense_bytes + self.expert_bytes * self.experts_read(batch) + self.token_bytes * batch * context
        reading = read / (gpu.memory_bytes_per_second * assumed.decode_efficiency)
        flops = batch * (self.token_flops + self.pair_flops * context)
        products = flops / (gpu.flops * assumed.prefill_efficiency)
        return max(reading, products) + self._sums_seconds(batch) + assumed.decode_step_seconds

    def prefill_seconds(self, tokens: float, squares: float, prompts: float) -> float:
        """Of whole prompts; `squares` is the sum of their squared lengths."""
        layers = layers_flops(self.arch, range(self.arch.layers), FORWARD, tokens, squares)
        flops = (layers + head_flops(self.arch, FORWARD, prompts)).total / self.tensor
        return flops / (self.machines.gpu.flops * self.assumptions.prefill_efficiency) + self._sums_seconds(tokens)

    def _sums_seconds(self, tokens: float) -> float:
        """All-reduces of hidden states over tensor ranks, two in each layer."""
        if self.tensor == 1:
            return 0.0
        whole = tokens * self.arch.hidden * self.item_bytes
        return 2 * self.arch.layers * 2 * gather("tensor", self.group, whole, 1, self.links).seconds


def rollout_seconds(engine: Engine, recipe: Recipe, lengths: Lengths, prompts: int, cache_tokens: float) -> Seconds:
    """Of `prompts` prompts that are sampled at once, on the engine that has most to do.

    `cache_tokens` are those whose keys and values fit into one engine. Responses end before they are longest: as many
    are decoded at once as fit at their mean length.
    """
    rollout = recipe.rollout
    devices = plan_devices(recipe, "cuda").bundles_of_engine
    blocks = len(set(devices)) if devices[0] else rollout.engines
    own_prompts = ceil(prompts / blocks)  # all samples of a prompt are on one engine (rollout/requests.py)
    greedy = 1 if recipe.algorithm.advantage.name == "remax" else 0
    responses = float(own_prompts * (rollout.samples_per_prompt + greedy))

    fit = max(1.0, cache_tokens / lengths.sequence)
    batch = min(responses, float(rollout.requests_at_once * ceil(rollout.engines / blocks)), fit)
    full_steps = (responses - batch) * lengths.response / batch
    # A response that is met at a random moment of a long run is longer than the mean, and half done.
    underway = lengths.prompt + lengths.response_square / (2 * lengths.response)
    return {
        "prompts": engine.prefill_seconds(own_prompts * lengths.prompt, own_prompts * lengths.prompt**2, own_prompts),
        "full batches": full_steps * engine.decode_seconds(batch, underway),
        "last batch": _last_batch_seconds(engine, lengths, batch),
    }


def _last_batch_seconds(engine: Engine, lengths: Lengths, batch: float) -> float:
    """Until the longest response ends: alone, if it is much longer than the others."""
    width = lengths.longest / POINTS
    seconds = 0.0
    for point in range(POINTS):
        decoded = (point + 0.5) * width
        alive = max(1.0, batch * lengths.alive(decoded))
        seconds += width * engine.decode_seconds(alive, lengths.prompt + decoded)
    return seconds
