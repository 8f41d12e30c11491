"""From losses per token to one number. Denominators count the whole minibatch, on all ranks and in all microbatches.

The loss is the sum of weight x loss over tokens, and sums do not care how the tokens are split. So losses and gradients
are the same for every layout, packing and microbatch size, which is not true of means of means.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from megagrpo.section import ByName, PositiveFloat, Section

if TYPE_CHECKING:
    from torch import Tensor

    from megagrpo.algorithm.over_ranks import Sequences


@dataclass(frozen=True)
class MinibatchTokens:
    """Response tokens of this rank in a minibatch, and how many there are on all ranks."""

    kept: Tensor  # bool [tokens]: the others are left out of the loss
    responses: Sequences  # an agent's rollout is one, with all of its branches
    tokens: float  # kept tokens on all ranks
    count: float  # responses with any kept token on all ranks
    response_tokens_max: int


class AggregationMethod(Section):
    """One way to weigh tokens."""

    name: str

    def weigh(self, kept: Tensor, minibatch: MinibatchTokens) -> Tensor:
        """Computes token weights, float64 [tokens]. kept: float64 [tokens], 1 for each kept token, 0 for the others."""
        raise NotImplementedError


class TokenMeanConfig(AggregationMethod):
    """1 / tokens: every token counts the same (DAPO, arXiv:2503.14476, eq. 12)."""

    name: Literal["token_mean"] = "token_mean"

    def weigh(self, kept: Tensor, minibatch: MinibatchTokens) -> Tensor:
        return kept / minibatch.tokens


class TokenSumConfig(AggregationMethod):
    """1: the loss is the sum over tokens."""

    name: Literal["token_sum"] = "token_sum"

    def weigh(self, kept: Tensor, minibatch: MinibatchTokens) -> Tensor:
        return kept


class SequenceMeanTokenSumConfig(AggregationMethod):
    """1 / responses: every response counts by its length."""

    name: Literal["seq_mean_token_sum"] = "seq_mean_token_sum"

    def weigh(self, kept: Tensor, minibatch: MinibatchTokens) -> Tensor:
        return kept / minibatch.count


class SequenceMeanTokenMeanConfig(AggregationMethod):
    """1 / (own tokens x responses): every response counts the same (GRPO, arXiv:2402.03300, eq. 3)."""

    name: Literal["seq_mean_token_mean"] = "seq_mean_token_mean"

    def weigh(self, kept: Tensor, minibatch: MinibatchTokens) -> Tensor:
        responses = minibatch.responses
        return kept / (responses.of_tokens(responses.sum(kept).clamp(min=1)) * minibatch.count)


class SequenceMeanTokenSumNormConfig(AggregationMethod):
    """1 / (divisor x responses), the divisor a constant (Dr.GRPO, arXiv:2503.20783)."""

    name: Literal["seq_mean_token_sum_norm"] = "seq_mean_token_sum_norm"

    divisor: PositiveFloat | None = None
    """The default is rollout.response_tokens_max; with an agent, the most tokens of a conversation."""

    def weigh(self, kept: Tensor, minibatch: MinibatchTokens) -> Tensor:
        divisor = self.divisor or float(minibatch.response_tokens_max)
        return kept / (divisor * minibatch.count)


AggregationConfig = Annotated[
    TokenMeanConfig
    | TokenSumConfig
    | SequenceMeanTokenSumConfig
    | SequenceMeanTokenMeanConfig
    | SequenceMeanTokenSumNormConfig,
    ByName(default="token_mean"),
]


def token_weights(method: AggregationMethod, minibatch: MinibatchTokens) -> Tensor:
    """Returns the weight of each response token in the loss, float32 [tokens]; 0 where it is not kept."""
    safe = replace(minibatch, tokens=max(minibatch.tokens, 1.0), count=max(minibatch.count, 1.0))
    return method.weigh(minibatch.kept.double(), safe).float()
