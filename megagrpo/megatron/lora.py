"""Low-rank adapters on Megatron's linear layers: W x + alpha / r B A x with frozen W and trained A and B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor
from torch.nn import Parameter

from megagrpo.recipe.schema import LoraConfig
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.files import adapters
from megagrpo.weights.files.adapters import FusedLinear


class LoraLinear(torch.nn.Module):
    """The term added to the output of one of Megatron's linear layers: scale x B A x for each matrix fused in it.

    Only the [tokens, r] products travel between tensor ranks. A layer cut by rows has all of every A and its rows of
    the B's; one cut by columns has its columns of A and all of B. A parameter that all tensor ranks have whole sees
    only the rank's own tokens, as Megatron's norms do, and its gradients are summed with those of the norms.
    """

    def __init__(self, linear: ColumnParallelLinear | RowParallelLinear, held: FusedLinear, lora: LoraConfig) -> None:
        super().__init__()
        self.held, self.rank, self.scale = held, lora.rank, lora.alpha / lora.rank
        self._by_rows = isinstance(linear, ColumnParallelLinear)
        self._tensor_group = linear.tp_group
        weight = linear.weight
        self.lora_A = Parameter(weight.new_zeros(len(held.parts) * lora.rank, held.columns))
        self.lora_B = Parameter(weight.new_zeros(weight.shape[0], lora.rank))
        self._mark(self.lora_A, whole=self._by_rows, cut_axis=1, linear=linear)
        self._mark(self.lora_B, whole=not self._by_rows, cut_axis=0, linear=linear)
        owners = weight.new_zeros(weight.shape[0], len(held.parts), 1)
        for run in held.runs:
            if run.part is not None:
                owners[run.at : run.at + run.count, run.part] = 1
        self.register_buffer("_owners", owners, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden [tokens, 1, in], the layer's input, to [tokens, 1, out], the shape of its output."""
        low = F.linear(hidden, self.lora_A) * self.scale
        if self._tensor_group.size() > 1:
            if self._by_rows:
                low = gather_from_sequence_parallel_region(
                    low, tensor_parallel_output_grad=True, group=self._tensor_group
                )
            else:
                low = reduce_scatter_to_sequence_parallel_region(low, group=self._tensor_group)
        # Rows of different matrices multiply different parts of `low`: one product, with zeros for the other parts.
        return F.linear(low, (self.lora_B[:, None] * self._owners).flatten(1))

    @torch.no_grad()
    def begin(self, seed: int) -> None:
        """Sets the values before training, the same in every layout: A's as PEFT does, B's zeros."""
        columns = slice(self.held.column, self.held.column + self.held.columns)
        for index, matrix in enumerate(self.held.parts):
            whole = adapters.initial_a(matrix.name, self.rank, matrix.shape[1], seed)
            self.lora_A[index * self.rank : (index + 1) * self.rank].copy_(whole[:, columns])

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Returns a copy of the layer's weight with the adapters added."""
        result = weight.clone()
        for run in self.held.runs:
            if run.part is not None:
                rows = slice(run.at, run.at + run.count)
                a = self.lora_A[run.part * self.rank : (run.part + 1) * self.rank]
                result[rows] = adapters.merged(weight[rows], a, self.lora_B[rows], self.scale)
        return result

    def _mark(self, parameter: Parameter, *, whole: bool, cut_axis: int, linear: torch.nn.Module) -> None:
        """Tells Megatron how to reduce its gradient, and to count it once over all ranks in the gradient norm."""
        expert: bool = linear.is_expert
        # Experts are not split over tensor ranks: tensor ranks have different experts, or are each other's data ranks.
        set_tensor_model_parallel_attributes(parameter, expert or not whole, cut_axis, 1)
        parameter.allreduce = not expert
        parameter.sequence_parallel = whole and not expert and self._tensor_group.size() > 1


class Adapters:
    """All adapters of a rank's model chunks. Nothing else in the chunks is trained any more.

    `base` is the manifest of the chunks' weights, which must be loaded. Make it before the chunks are wrapped: the
    wrapper makes gradient buffers for what is trained. `manifest` is what this rank holds of the adapters, in
    coordinates of `checkpoint_tensors`.
    """

    def __init__(
        self, chunks: Sequence[GPTModel], arch: Architecture, base: Manifest, lora: LoraConfig, seed: int
    ) -> None:
        for chunk in chunks:
            chunk.requires_grad_(False)
            if chunk.pre_process:
                # Megatron recomputes a layer's gradients only if its input asks for one.
                chunk.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
            if chunk.post_process:
                # Megatron transposes the output to [1, tokens, hidden], and the gradient comes back with other strides:
                # torch would multiply it by frozen weights token by token, which takes hundreds of times as long.
                chunk.decoder.register_forward_hook(lambda _module, _inputs, output: output.flatten(0, 1)[:, None])
        linears = adapters.adapted_linears(arch, base, lora.targets)
        matrices = adapters.adapted_matrices(arch, lora.targets)
        self.checkpoint_tensors = adapters.adapter_tensors(matrices, lora.rank)
        self.manifest = adapters.adapter_manifest(base, linears, lora.rank)
        self._layers: dict[str, LoraLinear] = {}
        for held in linears:
            number, _, module = held.weight.removeprefix("chunk").removesuffix(".weight").partition(".")
            linear = chunks[int(number)].get_submodule(module)
            linear.adapter = self._layers[held.weight] = LoraLinear(linear, held, lora)
            linear.adapter.begin(seed)
            linear.register_forward_hook(
                lambda linear, inputs, output: (output[0] + linear.adapter(inputs[0]), output[1])
            )

    def tensors(self) -> dict[str, Tensor]:
        """Returns the storages of `manifest`: the adapters' weights themselves, not copies."""
        weights = {}
        for layer in self._layers.values():
            weights[layer.held.a] = layer.lora_A.data
            weights[layer.held.b] = layer.lora_B.data
        return weights

    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the model's weights by storage, with merged copies of those that have adapters."""
        return {
            name: self._layers[name].merged(weight) if name in self._layers else weight
            for name, weight in weights.items()
        }
