"""A model's architecture: its layers, each of parts, and the numbers that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megagrpo.routes import RouteSizes
from megagrpo.weights.families.parts.attention import Attention, Rope
from megagrpo.weights.families.parts.delta_net import DeltaNet
from megagrpo.weights.families.parts.experts import Experts
from megagrpo.weights.families.parts.latent_attention import NORM_EPSILON, LatentAttention
from megagrpo.weights.families.parts.mlp import Mlp
from megagrpo.weights.families.parts.norms import Norms
from megagrpo.weights.families.parts.part import Divided, LayerTensors, LayerWork, Tensor

if TYPE_CHECKING:
    from megagrpo.weights.sides.megatron_rank import LayerOnRank
    from megagrpo.weights.sides.sglang import LayerOnEngine


@dataclass(frozen=True)
class Layer:
    """A layer: a part that mixes tokens, a part that works on each token, and norms around them."""

    attention: Attention | LatentAttention | DeltaNet
    mlp: Mlp | Experts
    norms: Norms

    def tensors(self, index: int) -> Iterator[Tensor]:
        prefix = f"model.layers.{index}."
        parts = (self.attention, ("input", "attention_output")), (self.mlp, ("post_attention", "mlp_output"))
        for part, norms in parts:
            before, after = self.norms.around(*norms, prefix, index)
            yield from before
            yield from part.tensors(prefix, index)
            yield from after

    def on_megatron(self, rank: LayerOnRank, of: LayerTensors) -> None:
        norms, holds = ("input_layernorm", "pre_mlp_layernorm"), (self.attention.holds_norm, self.mlp.holds_norm)
        first, second = (
            f"{holder}.layer_norm_weight" if rank.fused and holder else f"{norm}.weight"
            for norm, holder in zip(norms, holds, strict=True)
        )
        if self.norms.inputs:
            rank.whole(first, of.roles["input_norm"])
        self.attention.on_megatron(rank, of)
        if self.norms.inputs:
            rank.whole(second, of.roles["post_attention_norm"])
        self.mlp.on_megatron(rank, of)
        if self.norms.outputs:
            rank.whole("self_attn_bda.norm.weight", of.roles["attention_output_norm"])
            rank.whole("mlp_bda.norm.weight", of.roles["mlp_output_norm"])

    def on_engine(self, rank: LayerOnEngine, of: LayerTensors) -> None:
        for role, tensor in of.roles.items():
            if role.endswith("norm") and role not in ("q_norm", "k_norm"):
                rank.whole(tensor)
        self.attention.on_engine(rank, of)
        self.mlp.on_engine(rank, of)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of Megatron's TransformerConfig that describe its parts."""
        return self.attention.fields() | self.mlp.fields()

    @property
    def recomputes(self) -> frozenset[str]:
        """Returns the modules that train.recompute may name for this layer."""
        return self.attention.recomputes | self.mlp.recomputes

    def with_experts(self, experts: int) -> Layer:
        """Returns the same layer with so many experts, if it has any."""
        return replace(self, mlp=self.mlp.with_experts(experts))

    def work(self) -> LayerWork:
        return self.attention.work() + self.mlp.work()


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with RMSNorm before each part of a layer and after the last layer."""

    family: str
    hidden: int
    vocab: int
    max_positions: int
    norm_epsilon: float
    tied_embeddings: bool
    layers: tuple[Layer, ...]
    embedding_scale: float = 1.0
    """The factor of the embedding's output, rounded to the model's dtype first."""
    logit_scale: float = 1.0
    """The factor of the logits."""
    logit_cap: float | None = None
    """The bound of scaled logits x, which become cap tanh(x / cap)."""
    zero_centred_norms: bool = False
    """Norms multiply by 1 + weight."""
    value_head: bool = False
    """A critic: its head gives one number for each token, in place of logits over the vocabulary."""

    def __hash__(self) -> int:
        """Returns a hash without the layers: plans are cached by the model, and models have thousands of layers."""
        return hash((self.hidden, self.vocab, len(self.layers), self.tied_embeddings, self.value_head))

    @cached_property
    def kinds(self) -> Mapping[Layer, int]:
        """Returns the different layers in order of appearance, with the number of each."""
        return Counter(self.layers)

    @cached_property
    def _kind_of(self) -> tuple[int, ...]:
        """Returns the place of each layer's kind in `kinds`: hashes of layers are slow."""
        places = {kind: place for place, kind in enumerate(self.kinds)}
        return tuple(places[layer] for layer in self.layers)

    def tally(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Returns how many of the layers with these numbers are of each kind, in the order of `kinds`."""
        counts, kind_of = [0] * len(self.kinds), self._kind_of
        for layer in layers:
            counts[kind_of[layer]] += 1
        return tuple(counts)

    def count(self, layers: Iterable[int]) -> dict[Layer, int]:
        """Returns how many of the layers with these numbers are of each kind, 0 included, in the order of `kinds`."""
        return dict(zip(self.kinds, self.tally(layers), strict=True))

    @cached_property
    def expert_layers(self) -> tuple[int, ...]:
        """Returns the numbers of the layers that have experts."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.mlp.experts)

    @property
    def route_sizes(self) -> RouteSizes | None:
        """Returns the sizes of routes; None for a model without experts."""
        if not self.experts:
            return None
        return RouteSizes(len(self.expert_layers), self.experts_per_token, self.experts)

    @property
    def experts(self) -> int:
        """Returns the number of experts in a layer that has some; 0 if none has."""
        return max(layer.mlp.experts for layer in self.kinds)

    @property
    def experts_per_token(self) -> int:
        """Returns the number of experts that a token passes in a layer that has some; 0 if none has."""
        return max(layer.mlp.per_token for layer in self.kinds)

    @property
    def rope(self) -> Rope:
        """Returns the rotary embedding of the first layer that has one."""
        return next(kind.attention.rope for kind in self.kinds if kind.attention.rope is not None)

    @property
    def sampled_max(self) -> int | None:
        """Returns the most tokens of a sequence that is sampled, if a rotary embedding limits them."""
        ropes = [kind.attention.rope for kind in self.kinds]
        return min((most for rope in ropes if rope and (most := rope.sampled_max)), default=None)

    @property
    def only_local(self) -> str | None:
        """Returns what Transformer Engine's layers do not have of the model; None if they have all. They have one
        rotary embedding and one epsilon."""
        for kind in self.kinds:
            if lacking := kind.attention.only_local or kind.mlp.only_local or kind.norms.only_local:
                return lacking
            if isinstance(kind.attention, LatentAttention) and self.norm_epsilon != NORM_EPSILON:
                return "norms of latents with an epsilon of their own"
        if len({kind.attention.rope for kind in self.kinds}) > 1:
            return "rotary embeddings that differ between layers"
        return "zero-centred norms" if self.zero_centred_norms else None

    @property
    def query_groups(self) -> int:
        """Returns the least number of query groups of a layer. Each head of latent attention is one."""
        return min(kind.attention.groups for kind in self.kinds)

    @property
    def adapts(self) -> bool:
        """Returns whether some layer's attention may have low-rank adapters."""
        return any(kind.attention.adapts for kind in self.kinds)

    @property
    def recomputes(self) -> frozenset[str]:
        """Returns the modules that train.recompute may name for some layer."""
        return frozenset[str]().union(*(layer.recomputes for layer in self.kinds))

    def sample(self, experts: int | None = None) -> Architecture:
        """Returns the same model with a head of its own and one layer of each kind, in the order of `kinds`. Layers
        with experts have `experts` of them, if given."""
        kinds = self.kinds if experts is None else [kind.with_experts(experts) for kind in self.kinds]
        return replace(self, layers=tuple(kinds), tied_embeddings=False)

    def divided(self) -> list[Divided]:
        """Returns the sizes of all layers that a parallel size must divide."""
        return list(
            dict.fromkeys(size for kind in self.kinds for part in (kind.attention, kind.mlp) for size in part.divided())
        )

    def tensor_sizes(self) -> list[int]:
        """Returns the sizes of train.layout.tensor that divide the model."""
        sizes = [size for axis, _, size in self.divided() if axis == "tensor"]
        return [
            tensor
            for tensor in range(1, sizes[0] + 1)
            if not any(size % tensor for size in sizes)
            and not any(True for kind in self.kinds for _ in kind.attention.unmet(tensor, fused=False))
        ]

    def padded_vocab(self, tensor: int) -> int:
        """Returns the number of rows of the embedding after padding to a multiple of `tensor`."""
        return -(-self.vocab // tensor) * tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns all tensors, in the order of the forward pass."""
        tensors = [Tensor("model.embed_tokens.weight", (self.vocab, self.hidden), "embedding")]
        for index, layer in enumerate(self.layers):
            tensors += layer.tensors(index)
        tensors.append(Tensor("model.norm.weight", (self.hidden,), "final_norm"))
        if self.value_head:  # the name in transformers' ForSequenceClassification and ForTokenClassification
            tensors.append(Tensor("score.weight", (1, self.hidden), "value_head"))
        elif not self.tied_embeddings:
            tensors.append(Tensor("lm_head.weight", (self.vocab, self.hidden), "head"))
        return tuple(tensors)


def critic_of(arch: Architecture) -> Architecture:
    """Returns the same transformer with a value head, which is never tied to the embedding."""
    return replace(arch, tied_embeddings=False, value_head=True)
