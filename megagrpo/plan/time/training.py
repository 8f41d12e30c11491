"""Seconds of passes over a batch on the training ranks: products, communication, the pipeline's bubble, the optimizer.

What is stated is the busiest pipeline stage of the busiest data rank: all others wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from megagrpo.batching.rank_batches import MICROBATCHES_PER_STAGE
from megagrpo.layout.parallel import layers_of_chunk
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.machines import Machines
from megagrpo.plan.parameters import rank_parameters
from megagrpo.plan.time.communication import (
    Collective,
    Directions,
    Exchanged,
    Groups,
    Links,
    context_exchange,
    layer_collectives,
    replica_collectives,
    stage_sends,
)
from megagrpo.plan.time.flops import FORWARD, Pass, adapter_work, head_flops, layers_flops, training_pass
from megagrpo.plan.time.seconds import Seconds, added
from megagrpo.recipe.schema import TrainConfig
from megagrpo.weights.families.architecture import Architecture

ADAM_BYTES = 30
"""Read and written for each element: main weight and two moments both ways, gradient, and the bfloat16 weight."""
GRADIENT_BYTES_TOUCHED = 8
"""For each element of a rank's buffers: they are set to zero, and read for the norm."""


@dataclass(frozen=True)
class Batch:
    """What all data ranks pass over together, between two optimizer steps.

    `squares` is the sum of the squared lengths; `head_tokens` are those whose logprobs are wanted.
    """

    sequences: float
    tokens: float
    squares: float
    head_tokens: float

    def share(self, part: float) -> Batch:
        return Batch(self.sequences * part, self.tokens * part, self.squares * part, self.head_tokens * part)


@dataclass(frozen=True)
class TrainingRanks:
    """One model on the training ranks. `arch` has a value head if it is a critic, which has no adapters."""

    arch: Architecture
    train: TrainConfig
    machines: Machines
    assumptions: Assumptions
    item_bytes: int

    def forward_seconds(self, batch: Batch) -> Seconds:
        """Of a pass without gradients."""
        at_once = self.train.logprob_tokens_per_microbatch or self.train.tokens_per_microbatch
        micros = ceil(self.microbatches(batch) * self.train.tokens_per_microbatch / at_once)
        return self._pass_seconds(FORWARD, Directions(1, 0), batch, micros)

    def update_seconds(self, batch: Batch) -> Seconds:
        """Forward, backward and one optimizer step."""
        ways = Directions(2 if self.train.recompute == "full" else 1, 1)
        seconds = self._pass_seconds(training_pass(self.train), ways, batch, self.microbatches(batch))
        return added(seconds, self._step_seconds())

    def microbatches(self, batch: Batch) -> int:
        """Of each data rank (batching/rank_batches.py): as many as hold the tokens, and enough to fill the pipeline."""
        layout = self.train.layout.parallel()
        capacity = self.train.tokens_per_microbatch * layout.context * self.assumptions.packing
        needed = ceil(batch.tokens / layout.data / capacity)
        if layout.pipeline > 1:
            needed = max(needed, min(MICROBATCHES_PER_STAGE * layout.pipeline, int(batch.sequences / layout.data)))
        multiple = layout.pipeline if layout.virtual_pipeline > 1 else 1
        return max(1, ceil(needed / multiple)) * multiple

    def _pass_seconds(self, over: Pass, ways: Directions, batch: Batch, micros: int) -> Seconds:
        layout = self.train.layout.parallel()
        own = batch.share(self.assumptions.imbalance / layout.data)
        passed = Exchanged(own.tokens, micros, self.item_bytes, ways)
        groups, links = Groups.of(layout, self.machines.gpus_per_node), Links.of(self.machines, self.assumptions)
        kinds = {layer: self._layer_seconds(layer, over, own, passed, groups, links) for layer in self._layer_kinds()}
        stages = [self._stage_seconds(stage, kinds, over, own) for stage in range(layout.pipeline)]
        seconds = max(stages, key=lambda stage: sum(stage.values()))
        if layout.pipeline == 1:
            return seconds
        bubble = sum(seconds.values()) * (layout.pipeline - 1) / (layout.virtual_pipeline * micros)
        sends = _named([stage_sends(self.arch, layout, groups, passed, links)])
        return added(seconds, {"pipeline bubble": bubble}, sends)

    def _layer_kinds(self) -> tuple[int, ...]:
        """One layer of each kind."""
        experts = self.arch.experts
        if experts is None or experts.dense_layers == 0:
            return (0,)
        return (0, experts.dense_layers) if experts.dense_layers < self.arch.layers else (0,)

    def _layer_seconds(
        self, layer: int, over: Pass, own: Batch, passed: Exchanged, groups: Groups, links: Links
    ) -> Seconds:
        assumed, peak = self.assumptions, self.machines.gpu.flops
        layout = self.train.layout.parallel()
        ranks = layout.tensor * layout.context
        flops = layers_flops(self.arch, [layer], over, own.tokens, own.squares, self.train.lora)
        uneven = assumed.expert_imbalance if layout.expert > 1 else 1.0
        attention = flops.attention / ranks / (peak * assumed.attention_efficiency)
        ways = passed.directions
        seconds = {
            "matrix products": flops.dense / ranks / (peak * assumed.matrix_efficiency),
            "products of experts": flops.experts * uneven / ranks / (peak * assumed.expert_efficiency),
            "attention": attention,
            "between products": assumed.layer_seconds * (ways.forward + 2 * ways.backward) * passed.microbatches,
        }
        for collective in layer_collectives(self.arch, layer, self.train, groups, passed, links):
            hidden = attention if collective.name == "context" and context_exchange(self.train) == "p2p" else 0.0
            uneven_ones = uneven if collective.name == "experts" else 1.0
            name = f"{collective.name} communication ({collective.link})"
            seconds[name] = max(0.0, collective.seconds * uneven_ones - hidden)
        return seconds

    def _stage_seconds(self, stage: int, kinds: dict[int, Seconds], over: Pass, own: Batch) -> Seconds:
        layout = self.train.layout.parallel()
        counts = self._layers_by_kind(stage)
        seconds = added(*({name: value * counts[kind] for name, value in kinds[kind].items()} for kind in counts))
        if stage == layout.pipeline - 1:
            flops = head_flops(self.arch, over, own.head_tokens).total / (layout.tensor * layout.context)
            seconds["output layer"] = flops / (self.machines.gpu.flops * self.assumptions.matrix_efficiency)
        return seconds

    def _layers_by_kind(self, stage: int) -> dict[int, int]:
        layout = self.train.layout.parallel()
        kinds, experts = self._layer_kinds(), self.arch.experts
        first_with_experts = self.arch.layers if experts is None else experts.dense_layers
        chunks = [layers_of_chunk(self.arch.layers, layout, stage, c) for c in range(layout.virtual_pipeline)]
        total = sum(len(chunk) for chunk in chunks)
        with_experts = sum(max(0, chunk.stop - max(chunk.start, first_with_experts)) for chunk in chunks)
        if len(kinds) == 1:
            return {kinds[0]: total}
        return {kinds[0]: total - with_experts, kinds[1]: with_experts}

    def _trained_elements(self, stage: int) -> tuple[float, float]:
        """Of one rank of a stage: outside of experts, and in them."""
        layout, lora = self.train.layout.parallel(), self.train.lora
        if lora is not None:
            layers = self._layers_by_kind(stage).items()
            return sum(count * adapter_work(self.arch, lora, kind) / 2 for kind, count in layers) / layout.tensor, 0.0
        held = rank_parameters(self.arch, layout, stage, fused=True)
        return held.total - held.experts, held.experts

    def _step_seconds(self) -> Seconds:
        """Gradients summed, Adam, and new weights back to all replicas."""
        layout, machines, assumed = self.train.layout.parallel(), self.machines, self.assumptions
        groups, links = Groups.of(layout, machines.gpus_per_node), Links.of(machines, assumed)
        stages = (self._trained_elements(stage) for stage in range(layout.pipeline))
        dense, routed = max(stages, key=sum)
        found = replica_collectives(dense, routed, self.train, groups, self.item_bytes, links)
        seconds = {name: value * (1 - assumed.overlap) for name, value in _named(found).items()}
        owned = dense + routed
        if self.train.distributed_optimizer:
            owned = dense / groups.replicas.ranks + routed / groups.expert_replicas.ranks
        touched = ADAM_BYTES * owned + GRADIENT_BYTES_TOUCHED * (dense + routed)
        seconds["optimizer"] = touched / (machines.gpu.memory_bytes_per_second * assumed.optimizer_efficiency)
        return seconds


def _named(collectives: Iterable[Collective]) -> Seconds:
    return {f"{one.name} communication ({one.link})": one.seconds for one in collectives}
