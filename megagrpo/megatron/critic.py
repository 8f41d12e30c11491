"""PPO's critic on one rank: a model of its own with a value head, in the layout of the policy.

The value at the position that predicts a token is the estimate of the return from that token on, made before it is
chosen. A critic costs as much memory as the policy: weights, gradients and optimizer (train.offload: [critic] has them
in host memory while engines generate).

Every method is collective: all ranks call the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megagrpo.algorithm.value_loss import ValueLoss, explained_variance, value_loss
from megagrpo.checkpoint.store import SavedFile
from megagrpo.errors import CheckpointError, Problem, RankError
from megagrpo.layout.parallel import RankCoordinates
from megagrpo.megatron.batch import Minibatch, PackedTensors, ResponseTokens
from megagrpo.megatron.model import forward, forward_backward
from megagrpo.megatron.offload import Offload
from megagrpo.megatron.trained_model import TrainedModel
from megagrpo.rank_results import CriticMetrics
from megagrpo.recipe.schema import CriticConfig, TrainConfig
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import critic_of

DIRECTORY = "critic"
"""Of the critic's state, in the directory of the policy's."""

PARTS: tuple[Literal["parameters", "gradients", "optimizer"], ...] = ("parameters", "gradients", "optimizer")


class Critic:
    def __init__(
        self,
        settings: CriticConfig,
        train: TrainConfig,
        where: RankCoordinates,
        directory: str | Path,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Builds this rank's part and loads it from a model directory: a language model, or one with a value head.

        A new head starts from zeros: then all values are 0 at first, the same in every layout, and advantages are what
        they would be without a critic, not noise. Raises ModelError or RecipeError.
        """
        self._clip = settings.value_clip
        self._device = device
        self.model = TrainedModel(
            critic_of(read_architecture(directory)), train, train.optimizer, where, directory, dtype, device.type
        )
        self._offload = Offload(self.model.chunks, self.model.optimizer)

    def compute_values(self, packed: Sequence[PackedTensors], responses: Sequence[ResponseTokens]) -> None:
        """Values of the response tokens by the critic as it is now, into ResponseTokens.values."""
        self._offload.require(["parameters"])

        def store(index: int, output: Tensor) -> Tensor:
            response = responses[index]
            response.values = _values(output, response)
            return response.values.sum()

        forward(self.model.chunks, packed, store)

    def update(
        self, minibatches: Sequence[Minibatch], returns: Callable[[ResponseTokens], Tensor], epochs: int, lr: float
    ) -> CriticMetrics | None:
        """An optimizer step on each minibatch, `epochs` times over.

        returns: looks up those of a microbatch's response tokens, float32 [tokens]. compute_values must have been
        called. One rank has the metrics of all, the others None. Raises RankError if a gradient is not finite.
        """
        self._offload.require(PARTS)
        responses = [response for minibatch in minibatches for response in minibatch.responses]
        batch = [(stored_values(response), returns(response)) for response in responses]
        sums = CriticSums(self._device)
        grad_norms = []
        for _ in range(epochs):
            for minibatch in minibatches:
                if minibatch.packed:
                    self.compute_gradients(minibatch, returns, sums)
                    grad_norms.append(self.model.optimizer_step(lr))
        where = self.model.where
        if where.pipeline != self.model.layout.pipeline - 1:
            return None
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metrics = sums.reduce(group, batch, grad_norms)
        return None if where.tensor or where.context or where.data else metrics

    def compute_gradients(
        self, minibatch: Minibatch, returns: Callable[[ResponseTokens], Tensor], sums: CriticSums
    ) -> None:
        """Gradients of the mean loss over a minibatch's response tokens, on all ranks, in the chunks' buffers."""
        self.model.zero_gradients()

        def loss(index: int, output: Tensor) -> Tensor:
            response = minibatch.responses[index]
            values = _values(output, response)
            found = value_loss(values, stored_values(response), returns(response), self._clip)
            sums.add(found)
            return found.loss.sum() / max(minibatch.tokens, 1)

        forward_backward(self.model.chunks, minibatch.packed, loss)

    def save(self, directory: Path) -> tuple[SavedFile, ...]:
        """Writes this rank's part of the state below the policy's directory. Raises CheckpointError."""
        self._offload.require(["parameters", "optimizer"])
        try:
            (directory / DIRECTORY).mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(Problem(f"{directory / DIRECTORY} cannot be made", str(error))) from error
        files = self.model.save(directory / DIRECTORY)
        return tuple(replace(file, path=f"{DIRECTORY}/{file.path}") for file in files)

    def load(self, directory: Path) -> None:
        """Replaces the state by the one saved below the policy's directory, of any layout. Raises CheckpointError."""
        self._offload.require(["parameters", "optimizer"])
        self.model.load(directory / DIRECTORY)

    def release(self) -> None:
        """Moves weights and optimizer to host memory until `restore`; what needs them raises RankError meanwhile."""
        self._offload.release(PARTS)

    def restore(self) -> None:
        self._offload.restore(PARTS)


def stored_values(response: ResponseTokens) -> Tensor:
    """Those of the critic before its update, float32 [tokens]. Raises RankError if they were not computed."""
    if response.values is None:
        raise RankError(Problem("compute_values was not called for this batch"))
    return response.values


def _values(output: Tensor, response: ResponseTokens) -> Tensor:
    """float32 [tokens] from the last stage's output [positions, 1]."""
    return output[response.positions, 0]


class CriticSums:
    """Sums over this rank's tokens, kept on its device so that no microbatch waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._trained = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, found: ValueLoss) -> None:
        """Adds one microbatch that was trained on."""
        per_token = torch.stack([found.loss.detach(), found.clipped.float(), torch.ones_like(found.loss)])
        self._trained += per_token.sum(1, dtype=torch.float64)

    def reduce(
        self,
        group: dist.ProcessGroup,
        batch: Iterable[tuple[Tensor, Tensor]],
        grad_norms: list[float],
    ) -> CriticMetrics:
        """Means over `group`, the ranks that hold the other tokens. One all-reduce.

        batch: (values before the update, returns) of each microbatch of the batch, [tokens] each.
        """
        seen = torch.zeros(6, dtype=torch.float64, device=self._trained.device)
        for values, returns in batch:
            v, r = values.double(), returns.double()
            seen += torch.stack([torch.ones_like(v), v, r, r.square(), r - v, (r - v).square()]).sum(1)
        sums = torch.cat([self._trained, seen])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        loss, clipped, trained, tokens, value, total, squares, residual, residual_squares = sums.tolist()
        steps = max(len(grad_norms), 1)
        return CriticMetrics(
            loss=loss / max(trained, 1.0),
            clip_fraction=clipped / max(trained, 1.0),
            value_mean=value / max(tokens, 1.0),
            return_mean=total / max(tokens, 1.0),
            explained_variance=explained_variance(tokens, (total, squares), (residual, residual_squares)),
            grad_norm=sum(grad_norms) / steps,
            tokens=round(tokens),
            optimizer_steps=len(grad_norms),
        )
