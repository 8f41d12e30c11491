"""Off-policy correction: engines sample a little differently from what the trainer computes.

A token's ratio r is its probability under the trainer, before the update, over that under the engine that sampled it.
Importance weights correct for the difference (truncated: https://fengyao.notion.site/off-policy-rl; masked: IcePop,
arXiv:2510.18855; geometric: arXiv:2507.18071, eq. 7); what differs too much is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from megagrpo.algorithm.kl import LIMIT, binary_kl, bounded, divergence
from megagrpo.section import ByName, NonNegativeFloat, Number, PositiveFloat, Rules, Section

if TYPE_CHECKING:
    from torch import Tensor

    from megagrpo.algorithm.over_ranks import Sequences

NO_DIFFERENCE = {"ratio": 1.0, "k1": 0.0, "k2": 0.0, "k3": 0.0, "binary_kl": 0.0}
"""Each statistic's value where engine and trainer agree."""


class ImportanceConfig(Section):
    """Importance weights on the policy's loss, train over rollout probability, within bounds."""

    name: Literal["token", "sequence", "geometric"] = "token"
    """token: by token. sequence: the product over the response for all its tokens. geometric: the geometric mean over
    the response, exp(mean of log r), for all its tokens: it does not grow with the response's length."""

    low: NonNegativeFloat = 0.0
    """Lower bound of the weights. 0: none, only large weights are bounded."""

    high: PositiveFloat = 2.0
    """Upper bound of the weights."""

    outside: Literal["truncate", "zero"] = "truncate"
    """Weights outside of the bounds. truncate: set to the bound (TIS). zero: set to 0: with low above 0 it is IcePop
    (arXiv:2510.18855: low 0.5, high 5), with low 0 only large weights are masked."""

    normalize: bool = False
    """Divide the weights by their mean over the minibatch: over its tokens, or for name: sequence or geometric over its
    responses, without those left out."""

    RULES: ClassVar[Rules[ImportanceConfig]] = {
        "weights_away_from_1": lambda w: (
            {"end": "high" if w.high < 1 else "low"} for _ in range(not w.low <= 1 <= w.high)
        ),
        "weights_without_bound": lambda w: ({"limit": LIMIT} for _ in range(w.low <= 1 and w.high > math.exp(LIMIT))),
    }


class Rejection(Section):
    """A rule that leaves out tokens on which trainer and engine disagree: their statistic is outside of [low, high]."""

    level: str

    statistic: Literal["ratio", "k1", "k2", "k3", "binary_kl"] = "ratio"
    """The statistic compared with the bounds; log r is train - rollout logprob. ratio: r; k1: -log r;
    k2: (log r)^2 / 2; k3: r - 1 - log r; binary_kl: the larger of D(p, q) and D(q, p) for train and rollout
    probability, D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)). By token with high: 0.1 that is KPop
    (https://ringtech.notion.site/kpop)."""

    low: Number | None = None
    """Smallest value that stays; null: no bound."""

    high: Number | None = None
    """Largest value that stays; null: no bound."""

    def within(self, old: Tensor, rollout: Tensor, sequences: Sequences) -> Tensor:
        """Returns bool [tokens]: tokens that stay. old, rollout: as in `correct`."""
        raise NotImplementedError

    def of_tokens(self, old: Tensor, rollout: Tensor) -> Tensor:
        """Returns the statistic by token, float64 [tokens]."""
        if self.statistic == "binary_kl":
            return binary_kl(old, rollout).maximum(binary_kl(rollout, old))
        log_ratio = bounded(old - rollout).double()
        return log_ratio.exp() if self.statistic == "ratio" else divergence(log_ratio, self.statistic)

    def allows(self, statistic: Tensor) -> Tensor:
        """Returns bool, in the statistic's shape: True for values in [low, high], False for NaN."""
        low, high = self._ends()
        return (statistic >= low) & (statistic <= high)

    def _without_bound(self) -> Iterator[dict[str, object]]:
        if self.low is None and self.high is None:
            yield {"example": 2.0 if self.statistic == "ratio" else 0.1}

    def _without_agreement(self) -> Iterator[dict[str, object]]:
        """Yields the end that leaves out the value where engine and trainer agree."""
        agreed, low, high = NO_DIFFERENCE[self.statistic], *self._ends()
        if low > agreed or high < agreed:
            yield {"end": "low" if low > agreed else "high", "low": low, "high": high, "agreed": agreed}

    def _never_acting(self) -> Iterator[dict[str, object]]:
        """Yields each end that never acts, because log ratios are bounded by LIMIT on both sides."""
        endless = self.statistic != "ratio" and getattr(self, "over", None) == "sum"
        if endless or any(self._without_agreement()):
            return
        ratio, (low, high) = math.exp(LIMIT), self._ends()
        smallest = {"ratio": 1 / ratio, "k1": -LIMIT}.get(self.statistic, 0.0)
        by_name = {"ratio": ratio, "k2": LIMIT**2 / 2, "k3": ratio - 1 - LIMIT}
        largest = by_name.get(self.statistic, LIMIT)
        within = {"smallest": smallest, "largest": largest, "limit": LIMIT}
        if -math.inf < low < smallest:
            yield within | {"end": "low", "value": low, "change": "raise"}
        if largest < high < math.inf:
            yield within | {"end": "high", "value": high, "change": "lower"}

    def _ends(self) -> tuple[float, float]:
        return -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high

    RULES: ClassVar[Rules[Rejection]] = {
        "rejection_without_bound": _without_bound,
        "rejection_of_equal_probabilities": _without_agreement,
        "rejection_that_never_acts": _never_acting,
    }


class TokenRejectionConfig(Rejection):
    """Single tokens left out because trainer and engine disagree on them: outside of [low, high]."""

    level: Literal["token"]
    """Each token by itself."""

    def within(self, old: Tensor, rollout: Tensor, sequences: Sequences) -> Tensor:
        return self.allows(self.of_tokens(old, rollout))


class SequenceRejectionConfig(Rejection):
    """Whole responses left out because trainer and engine disagree on them: outside of [low, high]."""

    level: Literal["sequence"]
    """All tokens of a response, by their `over`."""

    over: Literal["sum", "mean", "max"] = "mean"
    """Reduction of a response's tokens to one number. The ratio is exp of the sum, mean or largest log r: with mean
    the geometric mean."""

    def within(self, old: Tensor, rollout: Tensor, sequences: Sequences) -> Tensor:
        if self.over == "max":
            # A largest value that spans ranks, told by sums alone: none may be above `high`, and one must reach `low`.
            statistic, (low, high) = self.of_tokens(old, rollout), self._ends()
            above, reach = sequences.sum(~(statistic <= high)), sequences.sum(statistic >= low)
            return sequences.of_tokens((above == 0) & (reach > 0))
        over = sequences.sum if self.over == "sum" else sequences.mean
        # The ratio is that of the response, not a sum of its tokens' ratios.
        ratio = self.statistic == "ratio"
        statistic = bounded(over(bounded(old - rollout))).exp() if ratio else over(self.of_tokens(old, rollout))
        return sequences.of_tokens(self.allows(statistic))


RejectionConfig = Annotated[TokenRejectionConfig | SequenceRejectionConfig, ByName(key="level")]


class CorrectionConfig(Section):
    """Corrects for tokens that the engines gave other probabilities than the trainer does."""

    weights: Annotated[ImportanceConfig, ByName(default="token")] | None = None
    """Importance weights: token, sequence, geometric, or a mapping with their bounds. null: no weights."""

    reject: list[RejectionConfig] = []
    """Tokens or responses to leave out of the loss and of its denominators."""

    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Leave out every response with a token whose train over rollout probability is below this. null: none."""

    @property
    def corrects(self) -> bool:
        return self.weights is not None or bool(self.reject) or self.veto is not None


@dataclass(frozen=True)
class Corrected:
    """The corrected tokens of a minibatch on one rank."""

    importance: Tensor | None  # float32 [tokens], constants: weights of the policy's loss. None: all 1
    kept: Tensor  # bool [tokens]: the others leave the loss and its denominators
    sums: Tensor  # float64 [6], which add over ranks and minibatches; `correction_of` reads them


def correct(
    old: Tensor,
    rollout: Tensor,
    sequences: Sequences,
    settings: CorrectionConfig,
    sum_over_ranks: Callable[[Tensor], None],
) -> Corrected:
    """Computes the weights of a whole minibatch's tokens, and the tokens that stay.

    old, rollout: float32 [tokens of this rank], the trainer's logprobs before the update and the engines';
    sum_over_ranks sums a float64 tensor in place over the ranks that hold the minibatch's other tokens.
    Every rejection judges the tokens as they came: their order does not matter. A statistic that is not a number is
    never within bounds.
    """
    import torch  # here, because the recipe imports this file

    log_ratio = old - rollout
    kept = torch.ones_like(log_ratio, dtype=torch.bool)
    for rejection in settings.reject:
        kept &= rejection.within(old, rollout, sequences)
    vetoed = torch.zeros_like(kept)
    if settings.veto is not None:
        below = ~(log_ratio >= math.log(settings.veto))
        vetoed = sequences.of_tokens(sequences.sum(below)) > 0
        kept &= ~vetoed
    weights = outside = None
    if settings.weights is not None:
        weights, outside = _bounded_weights(log_ratio, sequences, settings.weights)
    ones = torch.ones_like(log_ratio, dtype=torch.float64)
    sums = torch.stack(
        [
            ones,
            ones if weights is None else weights.double(),
            torch.zeros_like(ones) if outside is None else outside.double(),
            (~kept).double(),
            sequences.shares(),
            vetoed * sequences.shares(),
        ]
    ).sum(1)
    if settings.weights is not None and weights is not None and settings.weights.normalize:
        weights = weights / _mean_weight(weights, kept, sequences, settings.weights, sum_over_ranks)
    importance = None if weights is None else torch.where(kept, weights, 0.0).float()
    return Corrected(importance, kept, sums)


def correction_of(sums: Tensor) -> dict[str, float]:
    """Computes a step's figures, by their names in track/metrics.yaml, from `Corrected.sums` over all ranks and
    minibatches. The mean weight is that within the bounds, before `normalize`; 1 without weights."""
    tokens, weight, outside, rejected, sequences, vetoed = sums.tolist()
    return {
        "weight_mean": weight / tokens if tokens else 1.0,
        "outside_share": outside / max(tokens, 1.0),
        "rejected_share": rejected / max(tokens, 1.0),
        "vetoed_share": vetoed / max(sequences, 1.0),
    }


def _bounded_weights(log_ratio: Tensor, sequences: Sequences, settings: ImportanceConfig) -> tuple[Tensor, Tensor]:
    """Returns weights [tokens] within their bounds, and those that were outside of the bounds, bool [tokens]."""
    log_weight = log_ratio.double()
    if settings.name != "token":
        over = sequences.sum if settings.name == "sequence" else sequences.mean
        log_weight = sequences.of_tokens(over(log_weight))
    weights = bounded(log_weight).exp()
    outside = ~((weights >= settings.low) & (weights <= settings.high))
    if settings.outside == "truncate":
        return weights.clamp(settings.low, settings.high), outside
    return weights.masked_fill(outside, 0.0), outside


def _mean_weight(
    weights: Tensor,
    kept: Tensor,
    sequences: Sequences,
    settings: ImportanceConfig,
    sum_over_ranks: Callable[[Tensor], None],
) -> Tensor:
    """Returns the mean over the minibatch's kept tokens, or over sequences that have any; 1 where all weights are 0."""
    import torch

    counts = kept.double()
    if settings.name != "token":
        counts = counts / sequences.of_tokens(sequences.sum(counts)).clamp(min=1)
    sums = torch.stack([torch.where(kept, weights, 0.0) * counts, counts]).sum(1)
    sum_over_ranks(sums)
    return torch.where(sums[0] > 0, sums[0] / sums[1].clamp(min=1), 1.0)
