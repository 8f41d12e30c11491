"""The learning rate of each step."""

from __future__ import annotations

import math

from megagrpo.recipe.schema import OptimizerConfig


def learning_rate(step: int, total_steps: int, optimizer: OptimizerConfig) -> float:
    """Learning rate of step `step`; the first is 1.

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
