"""Bytes that a training rank holds for its models: exactly what Megatron allocates, without Megatron.

What depends on the work (activations, logits) is not here, nor what an allocator adds by rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

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
    """What modules hold besides: routers' biases and token counts, and which rows adapters act on."""

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
