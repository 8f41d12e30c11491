"""What a critic's update says of itself: sums on every rank, reduced once, then means."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.algorithm.value_loss import ValueLoss, explained_variance
from megagrpo.rank_results import CriticMetrics


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
