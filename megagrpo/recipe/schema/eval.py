"""eval: held-out prompts, and the names of their metrics."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from megagrpo.errors import Problem
from megagrpo.recipe.schema.data import DataFileConfig
from megagrpo.section import (
    TEMPERATURE_MAX,
    TEMPERATURE_MIN,
    Count,
    Fraction,
    NonNegativeInt,
    Number,
    PositiveInt,
    Section,
    Tokens,
)


class EarlyStoppingConfig(Section):
    """End the run when an evaluation metric is good enough or stops improving."""

    metric: str = "mean@1"
    """Name as in the metrics table, without the eval/ prefix. Larger is better."""

    target: Number | None = None
    """Stop once the metric reaches this."""

    patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without a new best."""

    def rules(self) -> Iterator[Problem]:
        if self.target is None and self.patience is None:
            given = "neither target nor patience"
            yield Problem("target", given, "at least one of them: when to stop", "add target: 0.9 or patience: 5")


class EvalConfig(Section):
    """Evaluation on held-out prompts."""

    files: list[DataFileConfig] = []
    """Prompt files, in the same format as data.train. Empty: no evaluation."""

    every_steps: PositiveInt = 10
    """Steps between evaluations. The last step is always evaluated."""

    before_training: bool = True
    """Evaluate the starting weights too."""

    samples_per_prompt: Count = 1
    """Responses for each prompt: the k of mean@k, pass@k and maj@k."""

    temperature: Annotated[float, Field(ge=0, le=TEMPERATURE_MAX)] = 0.0
    """0 is greedy."""

    top_p: Fraction = 1.0
    """Nucleus sampling."""

    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens only; 0 is all."""

    response_tokens_max: Tokens | None = None
    """Longest response; the default is the rollout's."""

    early_stopping: EarlyStoppingConfig | None = None
    """Off unless given."""

    def rules(self) -> Iterator[Problem]:
        if 0 < self.temperature < TEMPERATURE_MIN:
            needed = f"0, which is greedy, or at least {TEMPERATURE_MIN:g}"
            yield Problem("temperature", f"{self.temperature:g}", needed, "temperature: 0")
        if self.samples_per_prompt > 1 and self.temperature == 0:
            given = f"{self.samples_per_prompt} with temperature 0"
            needed = "1: greedy decoding gives the same response every time"
            yield Problem("samples_per_prompt", given, needed, "eval.temperature: 1.0, or samples_per_prompt: 1")
        for name, value, off in (("top_p", self.top_p, 1.0), ("top_k", self.top_k, 0)):
            if self.temperature == 0 and value != off:
                needed = f"{off:g}: greedy decoding takes the most likely token"
                yield Problem(name, f"{value} with temperature 0", needed, f"give eval.temperature, or remove {name}")
        if self.early_stopping:
            yield from metric_rules("early_stopping.metric", self.early_stopping.metric, self)


def metric_rules(where: str, metric: str, evaluation: EvalConfig) -> Iterator[Problem]:
    """There is an evaluation, and it gives the metric that the field `where` asks for."""
    if not evaluation.files:
        yield Problem(where, f"{metric}, and no eval.files", "prompts to evaluate on", "give eval.files")
    samples = evaluation.samples_per_prompt
    valid = evaluation_metric_names(samples)
    source, slash, name = metric.rpartition("/")
    if name in valid:
        return
    same = f"{name.partition('@')[0]}@{samples}"
    near = [same] if same in valid else difflib.get_close_matches(name, valid, n=1)
    of_samples = f"one of {', '.join(valid)} (with eval.samples_per_prompt {samples})"
    fix = f"did you mean `{source}{slash}{near[0]}`?" if near else f"write {valid[0]}"
    yield Problem(where, metric, f"{of_samples}, or of a single data source, as SOURCE/{valid[0]}", fix)


def evaluation_metric_names(samples: int) -> list[str]:
    """Names that an evaluation with `samples` per prompt gives to its scores (see trainer/evaluation.py)."""
    return [f"mean@{samples}", *(f"pass@{k}" for k in pass_at(samples)), f"maj@{samples}"]


def pass_at(samples: int) -> list[int]:
    """Every k for which pass@k is reported: 1, 2, 4, … and `samples`."""
    return sorted({2**i for i in range(samples.bit_length())} | {samples})
