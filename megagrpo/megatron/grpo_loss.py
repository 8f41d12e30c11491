"""The policy's loss of one microbatch on the last pipeline stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megagrpo.algorithm.objective import ObjectiveInputs, ObjectiveSettings, grpo_objective
from megagrpo.megatron.response import ResponseTokens
from megagrpo.megatron.results import MetricSums

Readout = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""(output of the last stage, positions int64 [n], labels int64 [n], whether entropies are wanted) -> logprobs and
entropies of the policy at the sampling temperature, float32 [n] each.
"""


@dataclass(frozen=True)
class GrpoLoss:
    """What stays the same over a run."""

    readout: Readout

    def logprobs(self, output: Tensor, response: ResponseTokens) -> Tensor:
        """Logprobs of the response tokens, float32 [tokens]."""
        return self.readout(output, response.positions, response.labels, False)[0]

    def loss(
        self,
        output: Tensor,
        response: ResponseTokens,
        advantages: Tensor,
        settings: ObjectiveSettings,
        metrics: MetricSums,
    ) -> Tensor:
        """This microbatch's part of the loss, a scalar: the sum over all microbatches and ranks is the loss.

        advantages: float32 [tokens]. Without old logprobs the policy has not moved since they would have been computed,
        and the forward pass's own serve.
        """
        if response.weights is None:
            raise ValueError("the minibatch was not prepared")
        logprobs, entropy = self.readout(output, response.positions, response.labels, True)
        if response.before_update is None:
            response.before_update = logprobs.detach()
        inputs = ObjectiveInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if response.old_logprobs is None else response.old_logprobs,
            advantages=advantages,
            weights=response.weights,
            entropy=entropy,
            reference_logprobs=response.reference_logprobs,
            sequences=response.sequences,
            importance=response.importance,
            chosen=response.chosen,
        )
        objective = grpo_objective(inputs, settings)
        metrics.add(objective, inputs)
        return objective.loss
