"""The comparison of two models on the same prompts: the size of each difference, and whether it could be chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megagrpo.evaluation.metrics import prompt_values
from megagrpo.evaluation.responses import Response
from megagrpo.evaluation.statistics import intervals, paired_p_value


@dataclass(frozen=True)
class Difference:
    """One metric of two models, over the prompts that both have a value for. `low` and `high`: of the difference,
    second - first, by bootstrap over prompts."""

    metric: str
    prompts: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    p_value: float
    test: str


@dataclass(frozen=True)
class Comparison:
    """The differences between two models, by set, and the number of prompts of each. Its fields are those of
    comparison.json."""

    models: Sequence[str]
    recipe: str
    sets: Mapping[str, Sequence[Difference]]
    prompts: Mapping[str, Mapping[str, int]]


def compare(first: Sequence[Response], second: Sequence[Response], samples_per_prompt: int) -> list[Difference]:
    """Compares each metric of one set. Leaves out a metric that no prompt has a value for, because rewards failed."""
    values = [prompt_values(responses, samples_per_prompt) for responses in (first, second)]
    row_of = [{prompt: row for row, prompt in enumerate(of_model.prompts)} for of_model in values]
    both = [prompt for prompt in values[0].prompts if prompt in row_of[1]]
    paired = [of_model.values[[rows[prompt] for prompt in both]] for of_model, rows in zip(values, row_of, strict=True)]
    found = []
    for column, name in enumerate(values[0].names):
        pairs = np.stack([of_model[:, column] for of_model in paired])
        pairs = pairs[:, ~np.isnan(pairs).any(axis=0)]
        if not pairs.shape[1]:
            continue
        differences = pairs[1] - pairs[0]
        (low,), (high,) = intervals(differences[:, None])
        mean_first, mean_second = map(float, pairs.mean(axis=1))
        p_value, test = paired_p_value(differences)
        means = mean_first, mean_second, float(differences.mean())
        found.append(Difference(name, pairs.shape[1], *means, float(low), float(high), p_value, test))
    return found


def prompts_of_both(first: Sequence[Response], second: Sequence[Response]) -> dict[str, int]:
    """Counts the prompts of each model and of both: a tokenizer may make some too long for a model."""
    ids = [{one.prompt_id for one in responses} for responses in (first, second)]
    return {"first": len(ids[0]), "second": len(ids[1]), "both": len(ids[0] & ids[1])}
