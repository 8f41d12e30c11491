"""A rollout engine: the bytes that its ranks hold, and the seconds in which it reads prompts and decodes tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf

from megagrpo.batching.work import head_work
from megagrpo.plan.assumptions import Assumptions, longest_sequence
from megagrpo.plan.case import Case, Machines
from megagrpo.plan.communication import Links, RankGroup, gather
from megagrpo.plan.parameters import model_bytes, total_parameters
from megagrpo.plan.training_time import FORWARD, head_flops, layers_flops
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.families.architecture import Architecture, Layer

MIB, GIB = 2**20, 2**30

# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on the fullest device of one engine, which its kind states (rollout/kinds.py), and the recipe's fields that
    lower them. `cache_tokens` is of the whole engine: the ranks of a group hold heads or layers, not tokens."""

    weights: int
    cache: int
    working: int  # CUDA graphs, and the activations of a prefill
    cache_tokens: int
    longest: int  # tokens of the longest prompt with the longest response
    asked: int  # responses that the recipe has an engine decode at once
    reserved: bool = False
    """The engine takes its cache at its start, and the cache limits the responses at once. Other caches grow with them,
    and end with the rollout."""

    weights_lowered_by: tuple[str, ...] = ("rollout.engine",)
    cache_lowered_by: tuple[str, ...] = ("rollout.requests_at_once", "rollout.response_tokens_max")
    working_lowered_by: tuple[str, ...] = ("rollout.requests_at_once",)
    freed_by: tuple[str, ...] = ()
    """Fields by which an engine beside training ranks frees weights and cache between rollouts."""

    @property
    def sequences(self) -> int:
        """Returns how many longest responses the cache holds at once. Servers queue others, or recompute theirs."""
        return min(self.asked, self.cache_tokens // self.longest)


def asked_at_once(case: Case) -> int:
    """Returns the responses that a recipe has each of its engines decode at once."""
    rollout, agent = case.grpo.rollout, case.grpo.agent
    asked = min(rollout.requests_at_once, -(-rollout.prompts_per_step * rollout.samples_per_prompt // rollout.engines))
    return min(asked, -(-agent.rollouts_at_once // rollout.engines)) if agent else asked


def memory_of_whole_model(case: Case) -> EngineMemory:
    """Returns the memory of engines in processes of their own that each hold the whole model, and cache what they
    decode."""
    arch, element, longest, asked = case.architecture, case.item_bytes, longest_sequence(case.grpo), asked_at_once(case)
    cache = int(asked * cache_of(arch.kinds, 1, element).of(longest))
    logits = 4 * asked * arch.vocab
    blocks = model_bytes(arch, 0, quantized=case.grpo.rollout.quantization is not None).total
    return EngineMemory(total_parameters(arch) * element + int(blocks), cache, logits, asked * longest, longest, asked)


@dataclass(frozen=True)
class SequenceCache:
    """The bytes that an engine's rank caches of a sequence in all its layers: of each token (keys and values, or
    latents), of each of its last tokens by windows, and of states, whatever its length."""

    token: int
    windows: tuple[tuple[int, int], ...] = ()
    states: int = 0

    def of(self, tokens: float) -> float:
        return self.token * tokens + self.bounded(tokens)

    def bounded(self, tokens: float) -> float:
        """Returns the bytes that do not grow beyond the widest window."""
        return sum(size * min(tokens, window) for window, size in self.windows) + self.states


def cache_of(layers: Mapping[Layer, int], ranks: int, element_bytes: int) -> SequenceCache:
    """Returns what each of `ranks` ranks caches in so many layers of each kind (sglang/srt/model_executor/
    pool_configurator.py, _compute_cell_size), as transformers does. SGLang frees few tokens beyond a window."""
    token, windows, states = 0, [], 0
    for attention, count in ((kind.attention, count) for kind, count in layers.items()):
        size = count * attention.cached_elements(ranks) * element_bytes
        states += count * attention.state_bytes(ranks, element_bytes)
        if attention.window is None:
            token += size
        elif count:
            windows.append((attention.window, size))
    return SequenceCache(token, tuple(windows), states)


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
    quantized: bool = False  # weights are; products are assumed to run no faster

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
    def cache(self) -> SequenceCache:
        """Returns what one rank caches of a sequence in all stages."""
        return cache_of(self.arch.kinds, self.group, self.item_bytes)

    @cached_property
    def token_flops(self) -> float:
        """Returns the operations for one token on one rank of all stages, without attention's core."""
        layers = layers_flops(self.arch, self.arch.kinds, FORWARD, tokens=1.0, squares=0.0)
        return (layers.total + head_work(self.arch)) / self.layout.tensor

    @cached_property
    def pair_flops(self) -> dict[float, float]:
        """Returns, by window, one rank's operations of attention's core for a pair of tokens. Decoding projects no
        latents up."""
        flops = dict[float, float]()
        for kind, count in self.arch.kinds.items():
            window = inf if kind.attention.window is None else kind.attention.window
            flops[window] = flops.get(window, 0) + count * kind.work().decoded_pairs
        return {window: of_all / self.layout.tensor for window, of_all in flops.items()}

    @cached_property
    def experts(self) -> tuple[int, int]:
        """Returns the number of experts in a layer, and that of those that a token passes."""
        return self.arch.experts, self.arch.experts_per_token

    def experts_read(self, tokens: float) -> float:
        """Returns the expected share of a layer's experts that a batch reads: 1 - (1 - per_token / count)^tokens."""
        experts, per_token = self.experts
        return 1 - (1 - per_token / experts) ** tokens if experts else 0.0

    def decode_seconds(self, batch: float, context: float) -> float:
        """Returns the seconds of one token for each of `batch` responses, with a mean context of `context` tokens."""
        gpu, assumed, stages = self.machines.gpu, self.assumptions, self.layout.pipeline
        passing = max(1.0, batch / stages)  # through one stage at a time
        read = self.dense_bytes + self.expert_bytes * self.experts_read(passing)
        read += self.cache.token * passing / self.layout.attention_data * context
        read += self.cache.bounded(context) * passing / self.layout.attention_data
        reading = read / (gpu.memory_bytes_per_second * assumed.decode_efficiency)
        pairs = sum(flops * min(context, window) for window, flops in self.pair_flops.items())
        flops = passing * (self.token_flops + pairs)
        products = flops / (gpu.flops * assumed.prefill_efficiency)
        return max(reading, products) + self._sums_seconds(passing) + assumed.decode_step_seconds

    def prefill_seconds(self, tokens: float, squares: float, prompts: float) -> float:
        """Returns the seconds to read whole prompts; `squares` is the sum of their squared lengths."""
        flops = layers_flops(self.arch, self.arch.kinds, FORWARD, tokens, squares).total
        flops = (flops + head_flops(self.arch, FORWARD, prompts)) / self.layout.tensor
        seconds = flops / (self.machines.gpu.flops * self.assumptions.prefill_efficiency) + self._sums_seconds(tokens)
        return seconds / self.layout.pipeline

    def _sums_seconds(self, tokens: float) -> float:
        """Returns the seconds of two all-reduces of hidden states in each layer of all stages, and of stages'
        hand-overs. Attention sums over a group's ranks, for its tokens; MLPs and experts over all tensor ranks. With
        several groups the latter is a gather of all tokens before and a reduce-scatter after."""
        links, near = Links.of(self.machines, self.assumptions), self.machines.gpus_per_node
        whole, layers = tokens * self.arch.hidden * self.item_bytes, 2 * len(self.arch.layers)
        seconds = layers * gather(RankGroup(self.layout.tensor, min(self.layout.tensor, near)), whole, 1, links)
        of_group = whole / self.layout.attention_data
        seconds += layers * gather(RankGroup(self.group, min(self.group, near)), of_group, 1, links)
        between = links.sent("network" if self.layout.ranks > near else "node", whole)
        return seconds + (self.layout.pipeline - 1) * between
