"""The GRPO loss of one microbatch on the last pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megagrpo.algorithm.aggregation import Aggregation, sequence_weights
from megagrpo.algorithm.objective import ObjectiveInputs, ObjectiveSettings, grpo_objective
from megagrpo.batching.microbatch import Microbatch
from megagrpo.megatron.logprob import VocabularyShard, vocabulary_logprobs
from megagrpo.megatron.packed import PackedTensors
from megagrpo.megatron.results import MetricSums


@dataclass
class ResponseTokens:
    """The response tokens of one microbatch whose logits this rank computes. Every tensor is [tokens].

    Under context parallelism these are a part of each sequence. Old and reference logprobs are filled in by passes over
    the same microbatch, and never leave the rank; `before_update` by the update.
    """

    positions: Tensor  # int64, rows of the logits
    labels: Tensor  # int64
    rows: Tensor  # int64, row of the sample in the step
    places: Tensor  # int64, index of the token in its sequence, prompt included
    weights: Tensor  # float32, weight in the loss
    rollout_logprobs: Tensor  # float32
    old_logprobs: Tensor | None = None  # float32
    reference_logprobs: Tensor | None = None  # float32
    before_update: Tensor | None = None  # float32, logprobs under the policy that the rollouts should have come from


def response_tokens(
    packed: PackedTensors, microbatch: Microbatch, aggregation: Aggregation, tokens: int, sequences: int
) -> ResponseTokens:
    """Selects the response tokens of `packed`. tokens, sequences: of the whole minibatch over all ranks."""
    positions = packed.mask.nonzero()[:, 0]
    rows = packed.rows[positions]
    counts = np.array([int(s.loss_mask.sum()) for s in microbatch.sequences], dtype=np.int64)
    of_row = np.zeros(max(microbatch.rows, default=0) + 1, dtype=np.float32)
    of_row[list(microbatch.rows)] = sequence_weights(counts, aggregation, tokens, sequences)
    weights = torch.from_numpy(of_row).to(positions.device)[rows]
    return ResponseTokens(
        positions=positions,
        labels=packed.labels[positions],
        rows=rows,
        places=packed.positions[positions] + 1,
        weights=weights,
        rollout_logprobs=packed.rollout_logprobs[positions],
    )


@dataclass(frozen=True)
class GrpoLoss:
    """What stays the same over a run."""

    objective: ObjectiveSettings
    temperature: float
    shard: VocabularyShard

    def logprobs(self, logits: Tensor, response: ResponseTokens) -> Tensor:
        """Logprobs of the response tokens, float32 [tokens]. logits: [positions, vocab / tensor]."""
        return self._logprobs_and_entropy(logits, response, entropy=False)[0]

    def loss(self, logits: Tensor, response: ResponseTokens, advantages: Tensor, metrics: MetricSums) -> Tensor:
        """This microbatch's part of the loss, a scalar: the sum over all microbatches and ranks is the loss.

        advantages: float32 [rows of the step]. Without old logprobs the policy has not moved since they would have been
        computed, and the forward pass's own serve.
        """
        logprobs, entropy = self._logprobs_and_entropy(logits, response, entropy=True)
        response.before_update = logprobs.detach() if response.old_logprobs is None else response.old_logprobs
        inputs = ObjectiveInputs(
            logprobs=logprobs,
            old_logprobs=response.before_update,
            advantages=advantages[response.rows],
            weights=response.weights,
            entropy=entropy,
            reference_logprobs=response.reference_logprobs,
        )
        objective = grpo_objective(inputs, self.objective)
        metrics.add(objective, inputs)
        return objective.loss

    def _logprobs_and_entropy(
        self, logits: Tensor, response: ResponseTokens, *, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        return vocabulary_logprobs(
            logits, response.positions, response.labels, self.shard, temperature=self.temperature, entropy=entropy
        )
