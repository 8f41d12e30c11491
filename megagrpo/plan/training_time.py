"""Seconds of passes over a batch on the training ranks: products, communication, the pipeline's bubble, the optimizer.

The seconds are of the busiest pipeline stage of the busiest data rank: all others wait for it. Products are multiples
of those of a forward pass, which batching/work.py counts. A backward pass multiplies twice as much: by the weights for
the inputs' gradients, and by the inputs for the weights'. The output layer's logits are never kept: the backward pass
computes them again (megatron/heads.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil

from megagrpo.batching.rank_batches import MICROBATCHES_PER_STAGE
from megagrpo.batching.work import head_work, seen_share
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.assumptions import Lengths
from megagrpo.plan.case import Case
from megagrpo.plan.communication import Links, RankGroup, Seconds, added, exchange, gather, groups_of
from megagrpo.plan.parameters import adapter_parameters, layer_adapters, rank_parameters, stages
from megagrpo.recipe.schema import LoraConfig, Recipe, TrainConfig
from megagrpo.recipe.schema.train import RecomputeModule
from megagrpo.weights.families.architecture import Architecture, Layer
from megagrpo.weights.families.parts.part import LayerWork

LayerCounts = tuple[int, ...]
"""Layers of each of the model's kinds, in their order."""

ADAM_BYTES = 30
"""Read and written for each element: main weight and two moments both ways, gradient, and the bfloat16 weight."""
GRADIENT_BYTES_TOUCHED = 8
"""For each element of a rank's buffers: they are set to zero, and read for the norm."""

AGAIN_BETWEEN: Mapping[RecomputeModule, float] = {
    "layernorm": 0.2, "mla_up_proj": 0.15, "mlp": 0.3, "moe": 0.6, "moe_act": 0.1, "shared_experts": 0.2
}  # fmt: skip
"""Share of a layer's forward pass, besides its products, that a recomputed module takes. Guessed."""


# --- products --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of dense matrices, of experts and of attention's core, which differ in efficiency."""

    dense: float = 0.0
    experts: float = 0.0
    attention: float = 0.0

    @property
    def total(self) -> float:
        return self.dense + self.experts + self.attention


@dataclass(frozen=True)
class Products:
    """The times that a pass goes `forward` and `backward` through the layers: 1 and 0 without gradients, 1 and 1 with
    them, 2 and 1 if whole layers are recomputed. `again` names the modules of layers that go forward once more."""

    forward: int = 1
    backward: int = 0
    again: frozenset[RecomputeModule] = frozenset()
    frozen: bool = False  # the model's own weights have no gradients, as with adapters


FORWARD = Products()
"""Old and reference logprobs, a critic's values, a prompt in an engine."""


def training_products(train: TrainConfig, whole: bool = False) -> Products:
    """Returns the products of a forward and a backward pass. The modules of train.recompute, or `whole` layers, go
    forward once more."""
    return Products(1 + whole, 1, train.recomputed.modules, frozen=train.lora is not None)


def layers_flops(
    arch: Architecture,
    counts: Mapping[Layer, int],
    over: Products,
    tokens: float,
    squares: float,
    lora: LoraConfig | None = None,
) -> Flops:
    """Returns the operations of so many layers of each kind. `tokens` are those of all sequences together, `squares`
    the sum of the squared lengths."""
    dense = experts = attention = 0.0
    by_weights, others = (over.forward + over.backward * (2 - frozen) for frozen in (over.frozen, False))
    for kind, count in counts.items():
        if count:
            work, window, seen = kind.work(), kind.attention.window, squares
            if window is not None and squares:
                seen *= float(seen_share(window, squares / tokens))  # as if all sequences were alike
            again = _work_again(work, over.again, whole=kind.mlp.recomputed_as in over.again)
            dense += count * (by_weights * (work.projections + work.mlp) + again.dense) * tokens
            experts += count * (by_weights * work.experts + again.experts) * tokens
            attention += count * (others * work.pairs + again.attention) * seen
            if lora is not None:
                # Adapters on matrices that Megatron fuses are one product, with zeros between them (megatron/lora.py).
                columns = sum(
                    (kind.mlp.per_token if of.of_expert else 1) * of.parts * (of.columns + of.rows)
                    for of in layer_adapters(arch, ParallelLayout(), tuple(lora.targets))[kind]
                )
                dense += count * others * (2.0 * lora.rank * columns) * tokens
    return Flops(dense, experts, attention)


def _work_again(work: LayerWork, modules: frozenset[RecomputeModule], whole: bool) -> Flops:
    """Returns a layer's products that these modules recompute; layernorm and moe_act have none. Omits adapters.
    `whole`: among them is its whole MLP, or all of its experts."""
    dense = work.up * ("mla_up_proj" in modules)
    dense += work.mlp * whole + work.shared * ("shared_experts" in modules)
    return Flops(dense, work.experts * whole, work.pairs * ("core_attn" in modules))


def head_flops(arch: Architecture, over: Products, tokens: float) -> float:
    """Returns the operations of the output layer, at the `tokens` whose logprobs or values are wanted."""
    return (1 + over.backward * (3 - over.frozen)) * head_work(arch) * tokens  # backward also makes logits again


# --- passes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchSize:
    """The sequences that all data ranks pass over together, between two optimizer steps. `squares` is the sum of the
    squared lengths; `head_tokens` are those whose logprobs are wanted."""

    sequences: float
    tokens: float
    squares: float
    head_tokens: float

    @classmethod
    def of(cls, sequences: float, lengths: Lengths) -> BatchSize:
        """Returns the size of so many responses. An agent's may be several sequences, the k-th of n with k/n of the
        conversation; a sampled token is trained in one of them."""
        n = lengths.sequences
        tokens, squares = lengths.sequence * (n + 1) / 2, lengths.sequence_square * (n + 1) * (2 * n + 1) / (6 * n)
        return cls(sequences * n, *(sequences * size for size in (tokens, squares, lengths.response)))

    def share(self, part: float) -> BatchSize:
        return BatchSize(self.sequences * part, self.tokens * part, self.squares * part, self.head_tokens * part)


@dataclass(frozen=True)
class TrainingRanks:
    """The case's model on the training ranks: the policy, or a critic, which has a value head and no adapters."""

    case: Case

    @property
    def arch(self) -> Architecture:
        return self.case.architecture

    @property
    def train(self) -> TrainConfig:
        return self.case.recipe.train

    @property
    def local(self) -> bool:
        return self.train.layer_spec == "local" or self.arch.only_local is not None

    def forward_seconds(self, batch: BatchSize) -> Seconds:
        """Returns the seconds of a pass without gradients."""
        at_once = self.train.logprob_tokens_per_microbatch or self.train.tokens_per_microbatch
        micros = ceil(self.microbatches(batch) * self.train.tokens_per_microbatch / at_once)
        return self._pass_seconds(FORWARD, batch, micros)

    def update_seconds(self, batch: BatchSize) -> Seconds:
        """Returns the seconds of forward, backward and one optimizer step."""
        micros = self.microbatches(batch)
        seconds = self._pass_seconds(training_products(self.train), batch, micros)
        return added(seconds, self._exposed(self._step_seconds, sum(seconds.values()) / micros))

    def _exposed(self, step: Seconds, microbatch: float) -> Seconds:
        """Returns the seconds of `step` that passes do not hide (train.overlap). A microbatch takes `microbatch` s.
        Gradients hide behind the backward pass of the last microbatch, 2/3 of its seconds. Parameters hide behind the
        forward pass of the first one, 1/3 of its seconds, except after an update's last step."""
        overlap, recipe, hidden = self.train.overlap, self.case.recipe, dict(step)
        steps = recipe.algorithm.minibatches * recipe.algorithm.epochs if isinstance(recipe, Recipe) else 1
        behind = {"gradients": (2 / 3, 1.0), "parameters": (1 / 3, (steps - 1) / steps)}
        for name, spent in step.items():
            what = "gradients" if "gradients" in name else "parameters" if "weights" in name else ""
            if what in overlap:
                share, often = behind[what]
                hidden[name] = spent - often * min(spent, share * microbatch)
        return hidden

    def head_seconds(self, over: Products, batch: BatchSize) -> float:
        """Returns the seconds of the output layer in a pass over a batch."""
        tokens = batch.head_tokens * self.case.assumptions.imbalance / self.case.layout.data
        flops = head_flops(self.arch, over, tokens) / (self.case.layout.tensor * self.case.layout.context)
        return flops / (self.case.speeds.gpu.flops * self.case.assumptions.matrix_efficiency)

    def microbatches(self, batch: BatchSize) -> int:
        """Returns a data rank's microbatches: enough for its tokens and the pipeline (batching/rank_batches.py)."""
        layout = self.case.layout
        capacity = self.train.tokens_per_microbatch * layout.context * self.case.assumptions.packing
        needed = ceil(batch.tokens / layout.data / capacity)
        if layout.pipeline > 1:
            needed = max(needed, min(MICROBATCHES_PER_STAGE * layout.pipeline, int(batch.sequences / layout.data)))
        multiple = layout.pipeline if layout.virtual_pipeline > 1 else 1
        return max(1, ceil(needed / multiple)) * multiple

    @cached_property
    def groups(self) -> dict[str, RankGroup]:
        return groups_of(self.case.layout, self.case.speeds.gpus_per_node)

    @cached_property
    def links(self) -> Links:
        return Links.of(self.case.speeds, self.case.assumptions)

    @cached_property
    def _stages(self) -> dict[tuple[LayerCounts, LayerCounts, bool, bool], int]:
        """Returns the index of the first stage of each kind. The key has its layers of each kind, those recomputed
        whole, and whether the embedding or the head is there."""
        first: dict[tuple[LayerCounts, LayerCounts, bool, bool], int] = {}
        whole = self.train.recomputed.layers
        for index, stage in enumerate(stages(len(self.arch.layers), self.case.layout)):
            again = [layer for chunk in stage.chunks for layer in chunk[:whole]] if whole else []
            counts = self.arch.tally(stage.layers), self.arch.tally(again)
            first.setdefault((*counts, stage.embedding, stage.head), index)
        return first

    def _pass_seconds(self, over: Products, batch: BatchSize, micros: int) -> Seconds:
        layout = self.case.layout
        part = batch.share(self.case.assumptions.imbalance / layout.data)
        kinds, of_kind = list(self.arch.kinds), dict[tuple[int, bool], Seconds]()
        head = self.head_seconds(over, batch)
        seconds: Seconds = {}
        for counts, whole, _, has_head in self._stages:
            of_stage: Seconds = {}
            twice = whole if over.backward else (0,) * len(kinds)
            for kind, again in product(range(len(kinds)), (False, True)):
                count = twice[kind] if again else counts[kind] - twice[kind]
                if count and (kind, again) not in of_kind:
                    of_layer = training_products(self.train, whole=True) if again else over
                    of_kind[kind, again] = self._layer_seconds(kinds[kind], of_layer, part, micros)
                for name, spent in of_kind[kind, again].items() if count else ():
                    of_stage[name] = of_stage.get(name, 0.0) + count * spent
            of_stage |= {"output layer": head} if has_head else {}
            seconds = max(seconds, of_stage, key=lambda spent: sum(spent.values()))
        if layout.pipeline > 1:
            waits = (layout.pipeline - 1) / (layout.virtual_pipeline * micros)
            sends = self.stage_exchange(over, part.tokens, micros)
            seconds["pipeline bubble"] = sum(seconds.values()) * waits
            seconds[f"pipeline communication ({self.groups['pipeline'].link})"] = sends
        return seconds

    def _layer_seconds(self, layer: Layer, over: Products, part: BatchSize, micros: int) -> Seconds:
        """Returns the seconds of one layer for a data rank's part of a batch."""
        assumed, peak, groups = self.case.assumptions, self.case.speeds.gpu.flops, self.groups
        ranks = groups["tensor"].ranks * groups["context"].ranks
        flops = layers_flops(self.arch, {layer: 1}, over, part.tokens, part.squares, self.train.lora)
        uneven = assumed.expert_imbalance if groups["experts"].ranks > 1 else 1.0
        attention = flops.attention / ranks / (peak * assumed.attention_efficiency)
        between = sum(share for module, share in AGAIN_BETWEEN.items() if module in over.again)
        passes = (over.forward + (2 + between) * over.backward) * micros
        seconds = {
            "matrix products": flops.dense / ranks / (peak * assumed.matrix_efficiency),
            "products of experts": flops.experts * uneven / ranks / (peak * assumed.expert_efficiency),
            "attention": attention,
            "between products": assumed.layer_seconds * passes,
        }
        for name, spent in self.layer_exchanges(layer, over, part.tokens, micros).items():
            if name == "experts":
                spent *= uneven
            elif name == "context" and not self.local and context_exchange(self.train) == "p2p":
                spent = max(0.0, spent - attention)
            seconds[f"{name} communication ({groups[name].link})"] = spent
        return seconds

    def layer_exchanges(self, layer: Layer, over: Products, tokens: float, micros: int) -> Seconds:
        """Returns the seconds of exchanges inside one layer for all microbatches of a pass over `tokens` tokens of a
        data rank, by item: tensor, context, experts, experts' tensor."""
        arch, groups, mlp, recomputed = self.arch, self.groups, layer.mlp, self.train.recomputed.modules
        at_once = tokens / groups["context"].ranks * self.case.item_bytes / micros
        # Attention and MLP each gather their input and scatter their output. Backward they gather the input again and
        # the output's gradient, and scatter the input's (megatron's LinearWithGradAccumulationAndAsyncCommunication).
        # Recomputed, the MLP or shared experts exchange again; moe_act is within experts.
        again = over.backward if mlp.gathers and recomputed & mlp.recomputes - {"moe_act"} else 0
        count = ((1 + mlp.gathers) * (2 * over.forward + 3 * over.backward) + 2 * again) * micros
        seconds = {"tensor": gather(groups["tensor"], at_once * arch.hidden, count, self.links)}
        seconds["context"] = self._context_seconds(layer, over, tokens, micros)
        if mlp.experts:
            # Tokens go to their experts and come back; backward, their gradients do the same.
            again = over.backward if mlp.recomputed_as in recomputed else 0
            count = 2 * (over.forward + over.backward + again) * micros
            sent = at_once / groups["tensor"].ranks * arch.hidden * mlp.per_token
            seconds["experts"] = exchange(groups["experts"], sent, count, self.links)
            group = groups["experts' tensor"]
            seconds["experts' tensor"] = gather(group, sent * group.ranks, count, self.links)
        return seconds

    def _context_seconds(self, layer: Layer, over: Products, tokens: float, micros: int) -> float:
        """Returns the seconds of cp_comm_type's exchange: keys and values of all context ranks, or all-to-all over
        heads.

        The backward pass gathers keys and values again and returns their gradients. Local layers gather once and keep
        them. A recomputed core exchanges again.
        """
        context, (queries, keys) = self.groups["context"], layer.attention.exchanged(self.case.layout.tensor)
        at_once = tokens / micros * self.case.item_bytes
        forward = 2 if over.backward and "core_attn" in self.train.recomputed.modules else over.forward
        if layer.attention.exchanges_heads or (not self.local and context_exchange(self.train) == "a2a"):
            columns = at_once / context.ranks * (queries + keys)
            return exchange(context, columns, (forward + over.backward) * micros, self.links)
        again = over.backward if self.local else 2 * over.backward
        return gather(context, at_once * keys, (forward + again) * micros, self.links)

    def stage_exchange(self, over: Products, tokens: float, micros: int) -> float:
        """Returns the seconds to send hidden states on and gradients back, for all chunks and microbatches."""
        layout = self.case.layout
        count = (1 + over.backward) * layout.virtual_pipeline * micros  # recomputing stays in its layer
        at_once = tokens / micros / layout.context / layout.tensor * self.arch.hidden * self.case.item_bytes
        return self.links.sent(self.groups["pipeline"].link, at_once) * count

    def replica_exchanges(self, dense: float, experts: float) -> Seconds:
        """Returns the seconds to sum gradients over replicas and to return new weights in one optimizer step, by item
        and link. `dense` and `experts` are the trained elements of one rank. Without the distributed optimizer
        gradients are all-reduced: scattered, and gathered in their own dtype."""
        gradient_bytes = 2 if self.train.gradient_dtype == "bfloat16" else 4
        back = self.case.item_bytes if self.train.distributed_optimizer else gradient_bytes
        seconds = {}
        for name, elements in (("data", dense), ("data of experts", experts)):
            group = self.groups[name]
            if group.ranks > 1 and elements:
                for what, item_bytes in (("gradients", gradient_bytes), ("weights", back)):
                    label = f"{name}: {what} communication ({group.link})"
                    seconds[label] = gather(group, elements * item_bytes, 1, self.links)
        return seconds

    @cached_property
    def _step_seconds(self) -> Seconds:
        """Returns the seconds to sum gradients, run Adam, and return new weights to all replicas."""
        machines, assumed, groups, train = self.case.speeds, self.case.assumptions, self.groups, self.train
        trained = [
            rank_parameters(self.arch, self.case.layout, stage, fused=True)
            if train.lora is None
            else adapter_parameters(self.arch, self.case.layout, stage, train.lora)
            for stage in self._stages.values()
        ]
        fullest = max(trained, key=lambda of_stage: of_stage.total)
        dense, routed = fullest.total - fullest.experts, fullest.experts
        exchanged = self.replica_exchanges(dense, routed)
        seconds = {name: spent * (1 - assumed.overlap) for name, spent in exchanged.items()}
        owned = float(dense + routed)
        if train.distributed_optimizer:
            owned = dense / groups["data"].ranks + routed / groups["data of experts"].ranks
        touched = ADAM_BYTES * owned + GRADIENT_BYTES_TOUCHED * (dense + routed)
        seconds["optimizer"] = touched / (machines.gpu.memory_bytes_per_second * assumed.optimizer_efficiency)
        return seconds


def context_exchange(train: TrainConfig) -> str:
    """Returns the first layer's cp_comm_type of train.megatron, p2p by default; local layers use all_gather."""
    kind = train.megatron.get("cp_comm_type") or "p2p"
    if train.layer_spec == "local":
        return "all_gather"
    return str(kind[0] if isinstance(kind, list) else kind)
