"""Bytes that a training rank holds for its models: exactly what Megatron allocates, without Megatron.

What depends on the work (activations, logits) is not here, nor what an allocator adds by rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megagrpo.layout.parallel import ParallelLayout, RankCoordinates
from megagrpo.plan.memory.model_chunk import AdapterSizes, ChunkMemory, chunk_memory
from megagrpo.plan.parameters import fused_layers
from megagrpo.recipe.defaults import dtype_name
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.weights.boxes import ITEM_BYTES
from megagrpo.weights.families.architecture import Architecture, critic_of

OffloadPart = Literal["parameters", "gradients", "optimizer", "reference", "critic"]
"""What train.offload can name."""


@dataclass(frozen=True)
class TrainedMemory:
    """One model that a rank trains, the policy or a critic: bytes on its device, all of them for the whole run."""

    parameters: int
    """Weights in the model's dtype, with adapters, and with padding where the distributed optimizer lays them out."""

    gradients: int
    """Buffers of float32 gradients, whatever the weights' dtype: whole on every data rank, with their padding."""

    main_parameters: int
    """Float32 copies of bfloat16 weights; a data rank's share of them with the distributed optimizer. 0 in float32."""

    moments: int
    """Adam's exp_avg and exp_avg_sq, float32. They exist from the first step on."""

    buffers: int
    """What modules hold besides: routers' biases and token counts, YaRN's cosines, and which rows adapters act on."""

    @property
    def optimizer(self) -> int:
        """Main parameters and moments: what train.offload: [optimizer] moves."""
        return self.main_parameters + self.moments

    @property
    def bytes(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class ModelMemory:
    """All models of one rank. They lie on its device in every phase, but for what train.offload takes away."""

    policy: TrainedMemory
    reference: int
    """The reference's copy of the trained weights, or of the adapters; a float32 copy besides if it is an average in
    a bfloat16 model. 0 without a KL penalty."""

    critic: TrainedMemory | None
    """PPO's value model; adapters are never on it."""

    @property
    def bytes(self) -> int:
        return sum(self.parts().values())

    def parts(self, released: Collection[str] = ()) -> Mapping[str, int]:
        """Bytes on the device by name, without what is 0; `released` are the parts of train.offload, if away.

        They are away while engines generate (phase rollout) and on the device in all other phases. Routers' biases and
        the like stay.
        """
        policy, critic = self.policy, self.critic
        found = {
            "parameters": policy.parameters,
            "gradients": policy.gradients,
            "optimizer": policy.optimizer,
            "reference": self.reference,
            "critic": critic.bytes - critic.buffers if critic else 0,
            "buffers": policy.buffers + (critic.buffers if critic else 0),
        }
        return {name: size for name, size in found.items() if size and name not in released}


def model_memory(
    architecture: Architecture,
    recipe: AnyRecipe,
    where: RankCoordinates,
    device: str,
    critic: Architecture | None = None,
) -> ModelMemory:
    """What the rank at `where` holds on `device` (cpu or cuda). `architecture` is the policy's.

    `critic` is that of algorithm.critic.path, if it is another. Ranks of one pipeline stage hold equally
    much, but for their shares of the optimizer's state with the distributed optimizer: the last of them have less, as
    the padding is theirs. The first rank of a stage has as much as any, but for what aligns parameters (less than 64
    elements each). Raises ModelError if the layout does not divide the model.
    """
    train, layout = recipe.train, recipe.train.layout.parallel()
    kind = _RankKind(
        layout,
        where.pipeline,
        where.data * layout.context + where.context,
        where.expert_data,
        dtype_name(recipe, device),
        fused_layers(train, device),
        train.distributed_optimizer,
    )
    adapters = AdapterSizes(train.lora.rank, frozenset(train.lora.targets)) if train.lora else None
    policy = _trained(architecture, kind, adapters)
    if not isinstance(recipe, Recipe):
        return ModelMemory(policy, 0, None)
    algorithm = recipe.algorithm
    reference = 0
    if algorithm.kl.coefficient > 0:
        average = algorithm.reference.update_every_steps is not None and algorithm.reference.share < 1
        reference = _reference(architecture, kind, adapters, average)
    values = None
    if algorithm.critic is not None:
        values = _trained(critic_of(critic or architecture), kind, None)
    return ModelMemory(policy, reference, values)


@dataclass(frozen=True)
class _RankKind:
    """All that decides what a rank holds of a model."""

    layout: ParallelLayout
    stage: int
    data_rank: int
    """Among the data x context ranks, which hold the same dense parameters."""
    expert_data_rank: int
    dtype: str
    fused: bool
    distributed_optimizer: bool

    def chunks(self, architecture: Architecture, adapters: AdapterSizes | None) -> list[ChunkMemory]:
        return [
            chunk_memory(architecture, self.layout, self.stage, chunk, self.dtype, self.fused, adapters)
            for chunk in range(self.layout.virtual_pipeline)
        ]


@lru_cache(maxsize=4096)
def _trained(architecture: Architecture, kind: _RankKind, adapters: AdapterSizes | None) -> TrainedMemory:
    parameters = gradients = main_parameters = moments = buffers = 0
    layout = kind.layout
    for chunk in kind.chunks(architecture, adapters):
        parameters += chunk.frozen_bytes
        buffers += chunk.buffer_bytes
        for buffer in chunk.buffers:
            rank, ranks = kind.data_rank, layout.data * layout.context
            if buffer.over_experts:
                rank, ranks = kind.expert_data_rank, layout.expert_data
            item = ITEM_BYTES[buffer.dtype]
            for bucket in buffer.buckets:
                size = held = bucket.total
                if kind.distributed_optimizer:
                    size, held = bucket.padded(ranks), bucket.share(rank, ranks)
                parameters += size * item
                gradients += size * 4
                moments += held * 8
                if item < 4:
                    main_parameters += held * 4
    return TrainedMemory(parameters, gradients, main_parameters, moments, buffers)


@lru_cache(maxsize=1024)
def _reference(architecture: Architecture, kind: _RankKind, adapters: AdapterSizes | None, average: bool) -> int:
    item = ITEM_BYTES[kind.dtype]
    exact = 4 if average and item < 4 else 0  # in float32 the copy is exact itself
    return sum(chunk.trained * (item + exact) for chunk in kind.chunks(architecture, adapters))
