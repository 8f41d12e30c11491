"""The reference policy: a second copy of the trained weights, which takes the place of the policy's for a pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megagrpo.megatron.state import parameters_of


class Reference:
    """A copy of the trained weights of `chunks` at its construction. Costs their bytes in the model's dtype.

    With adapters it copies the adapters alone, which add nothing to the model before the first step. An average then
    averages the A's and the B's apart, not their products.

    The policy's modules evaluate it, with other storages behind their parameters: it needs no modules of its own.
    share: None if the reference stays as it is; 1 if it copies the policy at times; less if it averages. An average is
    kept in float32 as well, because bfloat16 would lose small steps.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], share: float | None = None) -> None:
        named = parameters_of(chunks).items()  # the policy and the reference share what is not trained
        self._parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.weights: list[Tensor] = [parameter.detach().clone() for parameter in self._parameters.values()]
        self._share = share
        self._exact = self.weights
        if share is not None and share < 1:
            self._exact = [weight.float() for weight in self.weights]  # the same tensors if they are float32

    @property
    def tensors(self) -> list[Tensor]:
        """Returns all tensors that the reference holds, some twice."""
        return [*self.weights, *self._exact]

    @property
    def follows(self) -> bool:
        """Returns whether the reference follows the policy, and so is part of checkpoints."""
        return self._share is not None

    @contextmanager
    def in_place_of_policy(self) -> Iterator[None]:
        """Puts the reference's weights into the policy's chunks inside the block. Only for passes without gradients."""
        policy = [parameter.data for parameter in self._parameters.values()]
        try:
            for parameter, weight in zip(self._parameters.values(), self.weights, strict=True):
                parameter.data = weight
            yield
        finally:
            for parameter, weight in zip(self._parameters.values(), policy, strict=True):
                parameter.data = weight

    def follow(self) -> None:
        """Moves `share` of the way to the policy."""
        if self._share is None:
            raise ValueError("this reference stays as it is")
        for exact, parameter in zip(self._exact, self._parameters.values(), strict=True):
            exact.lerp_(parameter.detach().to(exact.dtype), self._share)
        self.restored()

    def named(self) -> Mapping[str, Tensor]:
        """Returns the reference's tensors for a checkpoint, by the parameters' names in the rank's manifest."""
        return dict(zip(self._parameters, self._exact, strict=True))

    def restored(self) -> None:
        """Updates the weights in the model's dtype after `follow` or a checkpoint changed the tensors of `named`."""
        for exact, weight in zip(self._exact, self.weights, strict=True):
            if exact is not weight:
                weight.copy_(exact)
