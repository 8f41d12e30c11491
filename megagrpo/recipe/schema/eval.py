"""eval: held-out prompts."""

from __future__ import annotations

from megagrpo.recipe.schema.data import DataFileConfig
from megagrpo.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class EarlyStoppingConfig(Section):
    """End the run when an evaluation metric is good enough or stops improving."""

    metric: str = "mean@1"
    """Name as in the metrics table, without the eval/ prefix. Larger is better."""

    target: float | None = None
    """Stop once the metric reaches this."""

    patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without a new best."""


class EvalConfig(Section):
    """Evaluation on held-out prompts."""

    files: list[DataFileConfig] = []
    """Prompt files, in the same format as data.train. Empty: no evaluation."""

    every_steps: PositiveInt = 10
    """Steps between evaluations. The last step is always evaluated."""

    before_training: bool = True
    """Evaluate the starting weights too."""

    samples_per_prompt: PositiveInt = 1
    """Responses for each prompt: the k of mean@k, pass@k and maj@k."""

    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""

    top_p: Fraction = 1.0
    """Nucleus sampling."""

    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens only; 0 is all."""

    response_tokens_max: PositiveInt | None = None
    """Longest response; the default is the rollout's."""

    early_stopping: EarlyStoppingConfig | None = None
    """Off unless given."""
