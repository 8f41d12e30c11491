"""The optimizer's settings, and the learning rate of each step."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megagrpo.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, Rules, Section


class MuonConfig(Section):
    """Muon's own numbers. Each of its updates is an orthogonalised matrix, by Newton-Schulz steps."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the gradients' running mean, the only state of a matrix."""

    nesterov: bool = True
    """Orthogonalise the mean that the next step would have with the same gradient."""

    newton_schulz_steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Products that bring the singular values of an update near to 1. In bfloat16 with bfloat16 weights."""

    update_scale: PositiveFloat = 0.2
    """An update is the orthogonalised matrix times this and sqrt(max(rows, columns)): its root mean square is this,
    about as Adam's updates have, so that Adam's learning rates and weight decay carry over (arXiv:2502.16982)."""


class OptimizerConfig(Section):
    """Adam or Muon, with decoupled weight decay."""

    kind: Literal["adam", "muon"] = "adam"
    """muon: the matrices of layers by Muon, and embeddings, output matrix, norms and biases by Adam."""

    muon: MuonConfig = MuonConfig()
    """Muon's own numbers. The rest of this section is for both; beta1, beta2 and epsilon are Adam's."""

    lr: Annotated[float, Field(gt=0, le=10)] = 1e-6
    """Peak learning rate."""

    min_lr: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Learning rate at the end of a linear or cosine schedule."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, over the whole run."""

    warmup_steps: NonNegativeInt = 0
    """Steps of linear increase from 0."""

    weight_decay: NonNegativeFloat = 0.0
    """Decay of the matrices; norms and biases have none."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""

    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Adam's two moments. bfloat16 takes half of their memory; it needs the distributed optimizer, bfloat16 weights
    and transformer_engine's Adam."""

    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 does not clip."""

    skipped_steps_max: NonNegativeInt = 5
    """Optimizer steps in a row that may be skipped, with weights and moments as they were, because the loss or the
    gradient is not finite. The run ends at the next; 0 ends it at the first."""

    RULES: ClassVar[Rules[OptimizerConfig]] = {
        "muon_numbers_of_adam": lambda o: o.kind == "adam" and o.muon != MuonConfig(),
        "moments_of_muon": lambda o: o.kind == "muon" and o.moment_dtype != "float32",
        "min_lr_above_the_peak": lambda o: o.min_lr > o.lr,
        "min_lr_of_a_constant": lambda o: 0 < o.min_lr <= o.lr and o.schedule == "constant",
    }


def learning_rate(step: int, total_steps: int, optimizer: OptimizerConfig) -> float:
    """Returns the learning rate of step `step`; the first is 1.

    The warm-up rises in equal parts, so that step 1 already learns and step warmup_steps has the peak. After it the
    schedule falls from the peak towards min_lr, which it would reach at step total_steps + 1.
    """
    if step <= optimizer.warmup_steps:
        return optimizer.lr * step / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    done = min(1.0, (step - 1 - optimizer.warmup_steps) / max(1, total_steps - optimizer.warmup_steps))
    share = 1 - done if optimizer.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * share
