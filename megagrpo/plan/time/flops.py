"""Floating-point operations of matrix products: of whole passes over sequences, and of one stage's part of them.

Everything is a multiple of a forward pass, which batching/work.py counts. A backward pass multiplies twice as much: by
the weights for the inputs' gradients, and by the inputs for the weights'. The output layer's logits are never kept: the
backward pass computes them again (megatron/heads.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megagrpo.batching.work import head_work, layer_work
from megagrpo.recipe.schema import LoraConfig, TrainConfig
from megagrpo.weights.families.architecture import Architecture


@dataclass(frozen=True)
class Flops:
    """By how efficient the products are: of dense matrices, of experts, of attention's core."""

    dense: float = 0.0
    experts: float = 0.0
    attention: float = 0.0

    @property
    def total(self) -> float:
        return self.dense + self.experts + self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.dense + other.dense, self.experts + other.experts, self.attention + other.attention)


@dataclass(frozen=True)
class Pass:
    """How many times the products of a forward pass are done: by layers' weights, in attention's core, by the head.

    `adapters` is the same for the products of low-rank adapters.
    """

    layers: int = 1
    attention: int = 1
    head: int = 1
    adapters: int = 1


FORWARD = Pass()
"""Old and reference logprobs, a critic's values, a prompt in an engine."""


def training_pass(train: TrainConfig) -> Pass:
    """Forward and backward, and forward once more for what train.recompute names.

    With train.lora there are no gradients of the model's own weights.
    """
    weights = 2 if train.lora is not None else 3
    again = 1 if train.recompute == "full" else 0
    core = 0 if train.recompute == "none" else 1
    return Pass(layers=weights + again, attention=3 + core, head=weights + 1, adapters=3 + again)


def layers_flops(
    arch: Architecture, layers: Iterable[int], over: Pass, tokens: float, squares: float, lora: LoraConfig | None = None
) -> Flops:
    """Of some layers. `tokens` are those of all sequences together, `squares` the sum of the squared lengths."""
    dense = experts = attention = 0.0
    for layer in layers:
        work = layer_work(arch, layer)
        dense += over.layers * (work.projections + work.mlp) * tokens
        experts += over.layers * work.experts * tokens
        attention += over.attention * work.pairs * squares
        if lora is not None:
            dense += over.adapters * adapter_work(arch, lora, layer) * tokens
    return Flops(dense, experts, attention)


def head_flops(arch: Architecture, over: Pass, tokens: float) -> Flops:
    """Of the output layer, at the `tokens` whose logprobs or values are wanted."""
    return Flops(dense=over.head * head_work(arch) * tokens)


def sequence_flops(
    arch: Architecture, over: Pass, tokens: int, head_tokens: int, lora: LoraConfig | None = None
) -> Flops:
    """Of the whole model over one sequence of `tokens` tokens, `head_tokens` of which pass the output layer."""
    layers = layers_flops(arch, range(arch.layers), over, float(tokens), float(tokens) ** 2, lora)
    return layers + head_flops(arch, over, float(head_tokens))


def adapter_work(arch: Architecture, lora: LoraConfig, layer: int) -> float:
    """Of one layer's adapters in a forward pass, for each token.

    Adapters on matrices that Megatron fuses are one product, with zeros where they don't belong (megatron/lora.py).
    """
    experts = arch.experts
    ffn, copies = arch.ffn, 1
    if experts is not None and layer >= experts.dense_layers:
        ffn, copies = experts.ffn, experts.per_token
    queries, keys = arch.heads * arch.head_dim, arch.query_groups * arch.head_dim
    fused = (
        (("q_proj", "k_proj", "v_proj"), 1, arch.hidden, queries + 2 * keys),
        (("o_proj",), 1, queries, arch.hidden),
        (("gate_proj", "up_proj"), copies, arch.hidden, 2 * ffn),
        (("down_proj",), copies, ffn, arch.hidden),
    )
    return (
        2.0
        * lora.rank
        * sum(
            times * sum(name in lora.targets for name in names) * (inputs + outputs)
            for names, times, inputs, outputs in fused
        )
    )
