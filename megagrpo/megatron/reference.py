"""The frozen reference policy: a second copy of this rank's weights, put in place of the policy's for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megagrpo.megatron.model import unwrapped


class Reference:
    """Copies the weights that `chunks` have now. Costs their bytes in the model's dtype and nothing else.

    The same modules evaluate it, with other storages behind their parameters, so it needs no second set of modules.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self.weights: list[Tensor] = [parameter.detach().clone() for parameter in _parameters(chunks)]

    @contextmanager
    def in_place_of(self, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Within this context the chunks are the reference. Only for forward passes without gradients."""
        parameters = _parameters(chunks)
        policy = [parameter.data for parameter in parameters]
        try:
            for parameter, weight in zip(parameters, self.weights, strict=True):
                parameter.data = weight
            yield
        finally:
            for parameter, weight in zip(parameters, policy, strict=True):
                parameter.data = weight


def _parameters(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    return [parameter for chunk in chunks for parameter in unwrapped(chunk).parameters()]
