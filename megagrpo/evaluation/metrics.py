"""Responses with their scores to metrics, named as in docs/metrics.md without `eval/SET/`; and their comparison: the
size of each difference between two models on the same prompts, and whether it could be chance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, nan
from statistics import fmean

import numpy as np

from megagrpo.evaluation.responses import Response
from megagrpo.recipe.schema.eval import evaluation_metric_names

RESAMPLES, RESAMPLES_MIN = 2000, 200
"""Draws of as many prompts, with replacement, from which an interval is read."""
DRAWN_PROMPTS_MAX = 20_000_000
"""In all resamples of an interval: with more than 10,000 prompts there are fewer resamples. A second, or two."""
PERMUTATIONS = 10_000
COVERAGE = 0.95
"""The share of draws inside an interval."""
NUMBERS_AT_ONCE = 4_000_000
SEED = 0
"""The same intervals and p-values for the same responses, every time."""


@dataclass(frozen=True)
class PromptValues:
    """The value that each prompt's responses give to each metric; the metric is the mean over prompts."""

    prompts: tuple[str, ...]
    names: tuple[str, ...]
    values: np.ndarray
    """float64 [prompts, names], NaN where a prompt has too few scores."""


def prompt_values(responses: Sequence[Response], samples_per_prompt: int) -> PromptValues:
    """Returns the values of one set's prompts, in the order in which they first occur. With n = samples_per_prompt:

    - `mean@n`: mean score.
    - `pass@k` for k = 1, 2, 4, … and n: probability that one of k responses is solved, without bias. pass@1 is the
      correct rate.
    - `best@k` for the same k above 1: expected best score of k responses, without bias.
    - `maj@n`, if n > 1: whether the most frequent answer is solved. Responses without an answer vote with their text.

    Responses without a score are left out. A prompt that occurs twice has the responses of both.
    """
    of_prompts: dict[str, list[Response]] = defaultdict(list)
    for response in responses:
        of_prompts[response.prompt_id].append(response)
    names = evaluation_metric_names(samples_per_prompt)
    rows = [_values(of_prompt, names) for of_prompt in of_prompts.values()]
    values = np.array(rows, dtype=np.float64).reshape(len(rows), len(names))
    return PromptValues(tuple(of_prompts), tuple(names), values)


def _values(responses: Sequence[Response], names: Sequence[str]) -> list[float]:
    scored = [(response.score, response) for response in responses if response.score is not None]
    scores, solved = [score for score, _ in scored], [float(response.solved) for _, response in scored]
    values = []
    for name in names:
        kind, _, k = name.partition("@")
        if len(scored) < (int(k) if kind in ("pass", "best") else 1):
            values.append(nan)
        elif kind == "mean":
            values.append(fmean(scores))
        elif kind == "maj":
            answers = [one.response.strip() if one.answer is None else one.answer for _, one in scored]
            values.append(majority(solved, answers))
        else:
            values.append(best_of(solved if kind == "pass" else scores, int(k)))
    return values


def evaluation_metrics(responses: Sequence[Response], samples_per_prompt: int) -> dict[str, float]:
    """Computes the metrics of one set's responses.

    The means of `prompt_values`, each with the ends of its interval (`mean@4/low`, `mean@4/high`); the mean of each
    part of the scores (`reward/PART`); and if there are several data sources, the same of each without intervals, such
    as `SOURCE/mean@4`. `reward/errors` counts responses whose reward failed, `masked` those that the recipe leaves out;
    `unscored_share` is the share of both, and of agents' rollouts that count 0 because they were late or failed;
    `response_tokens/mean` and `response_tokens/truncated_share` are over all responses.
    """
    table = prompt_values(responses, samples_per_prompt)
    ends = intervals(table.values)
    metrics: dict[str, float] = {}
    for name, mean, low, high in zip(table.names, means(table.values), *ends, strict=True):
        metrics |= {name: float(mean), f"{name}/low": float(low), f"{name}/high": float(high)}
    metrics |= _parts(responses)
    source_of = {response.prompt_id: response.data_source for response in responses}
    sources = sorted(set(source_of.values()))
    for source in sources if len(sources) > 1 else ():
        of_source = table.values[[source_of[prompt] == source for prompt in table.prompts]]
        metrics |= {f"{source}/{name}": float(m) for name, m in zip(table.names, means(of_source), strict=True)}
        members = [response for response in responses if response.data_source == source]
        metrics |= {f"{source}/{name}": value for name, value in _parts(members).items()}
    metrics["reward/errors"] = float(sum(bool(response.error) for response in responses))
    metrics["masked"] = float(sum(bool(response.masked) for response in responses))
    metrics["unscored_share"] = _mean([bool(response.error or response.masked) for response in responses])
    metrics["response_tokens/mean"] = _mean([response.tokens for response in responses])
    metrics["response_tokens/truncated_share"] = _mean([response.finish == "length" for response in responses])
    return metrics


def _parts(responses: Sequence[Response]) -> dict[str, float]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for response in responses:
        for name, value in response.parts.items():
            if value is not None:
                by_name[name].append(value)
    return {f"reward/{name}": fmean(values) for name, values in by_name.items()}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else nan


# --- two models on the same prompts -----------------------------------------------------------------------------------


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
    compared = []
    for column, name in enumerate(values[0].names):
        pairs = np.stack([of_model[:, column] for of_model in paired])
        pairs = pairs[:, ~np.isnan(pairs).any(axis=0)]
        if not pairs.shape[1]:
            continue
        differences = pairs[1] - pairs[0]
        (low,), (high,) = intervals(differences[:, None])
        mean_first, mean_second = map(float, pairs.mean(axis=1))
        p_value, test = paired_p_value(differences)
        of_models = mean_first, mean_second, float(differences.mean())
        compared.append(Difference(name, pairs.shape[1], *of_models, float(low), float(high), p_value, test))
    return compared


def prompts_of_both(first: Sequence[Response], second: Sequence[Response]) -> dict[str, int]:
    """Counts the prompts of each model and of both: a tokenizer may make some too long for a model."""
    ids = [{one.prompt_id for one in responses} for responses in (first, second)]
    return {"first": len(ids[0]), "second": len(ids[1]), "both": len(ids[0] & ids[1])}


# --- estimates from several samples of each prompt, their intervals, and tests of a difference: pure numpy ------------


def best_of(scores: Sequence[float], k: int) -> float:
    """Returns the expected best of k scores drawn from these without replacement; 1 <= k <= len(scores).

    Unbiased for the best of k independent samples. On scores of 0 and 1 it is pass@k of Chen et al.
    (arXiv:2107.03374, eq. 1): 1 - C(n - c, k) / C(n, k) for c ones among n.
    """
    return float(np.sort(np.asarray(scores, dtype=np.float64)) @ _weights_of_best(len(scores), k))


@lru_cache(maxsize=256)
def _weights_of_best(n: int, k: int) -> np.ndarray:
    """Returns each score's share of the draws whose best it is, float64 [n]. The i-th smallest (from 0) is the best of
    those C(i, k - 1) draws whose others are among the i below it."""
    return np.array([comb(i, k - 1) / comb(n, k) for i in range(n)])


def majority(scores: Sequence[float], answers: Sequence[str]) -> float:
    """Averages the scores of samples with the most frequent answer (arXiv:2203.11171); tied answers are averaged."""
    by_answer: dict[str, list[float]] = defaultdict(list)
    for score, answer in zip(scores, answers, strict=True):
        by_answer[answer].append(score)
    most = max(map(len, by_answer.values()))
    return fmean(fmean(votes) for votes in by_answer.values() if len(votes) == most)


def means(values: np.ndarray) -> np.ndarray:
    """Averages each column over the prompts that have a value; NaN if none has. values: float64 [prompts, columns], NaN
    where a prompt has no value."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.where(known, values, 0.0).sum(axis=0) / known.sum(axis=0)


def intervals(values: np.ndarray, resamples: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns lower and upper ends of percentile bootstrap intervals of `means` over prompts, each float64 [columns].

    Prompts, not responses, are drawn anew: responses to one prompt are alike. Prompts without a value of a column are
    left out of it; NaN if all are. `resamples`: by default RESAMPLES, and fewer with many prompts.
    """
    known, prompts = ~np.isnan(values), len(values)
    filled = np.where(known, values, 0.0)
    resamples = resamples or max(RESAMPLES_MIN, min(RESAMPLES, DRAWN_PROMPTS_MAX // max(prompts, 1)))
    generator, at_once = np.random.default_rng(SEED), max(1, NUMBERS_AT_ONCE // max(prompts, 1))
    drawn = []
    for first in range(0, resamples, at_once):
        rows = min(at_once, resamples - first)
        chosen = generator.integers(prompts, size=(rows, prompts)) + np.arange(rows)[:, None] * prompts
        # Counts of each prompt's draws in each resample: float64 [rows, prompts].
        counts = np.bincount(chosen.ravel(), minlength=rows * prompts).reshape(rows, prompts).astype(np.float64)
        with np.errstate(invalid="ignore"):
            drawn.append((counts @ filled) / (counts @ known))
    estimates, ends = np.concatenate(drawn), ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2)
    low, high = np.full((2, values.shape[1]), np.nan)
    for column in np.flatnonzero(~np.isnan(estimates).all(axis=0)):
        low[column], high[column] = np.nanquantile(estimates[:, column], ends)
    return low, high


def paired_p_value(differences: np.ndarray) -> tuple[float, str]:
    """Returns the two-sided p-value of no difference between two models, and the test's name. differences: float64
    [prompts], paired by prompt.

    If neither model is better, the sign of each difference is a coin's. Where all differences other than 0 are of one
    size, as with one response of score 0 or 1 to each prompt, the sum's distribution is binomial: McNemar's exact test.
    Else the signs are drawn PERMUTATIONS times.
    """
    changed = differences[differences != 0]
    if not len(changed):
        return 1.0, "McNemar, exact"
    if np.allclose(np.abs(changed), abs(changed[0]), rtol=1e-9):
        fewer, all_ = int(min((changed > 0).sum(), (changed < 0).sum())), len(changed)
        tail = sum(comb(all_, i) for i in range(fewer + 1))
        return min(1.0, 2 * tail / 2**all_), "McNemar, exact"
    generator, observed = np.random.default_rng(SEED), abs(changed.sum())
    at_once = max(1, NUMBERS_AT_ONCE // len(changed))
    as_far = 0
    for first in range(0, PERMUTATIONS, at_once):
        rows = min(at_once, PERMUTATIONS - first)
        signs = generator.integers(2, size=(rows, len(changed))) * 2 - 1
        as_far += int((np.abs(signs @ changed) >= observed * (1 - 1e-9)).sum())
    return (1 + as_far) / (1 + PERMUTATIONS), "permutation of signs"
