"""Held-out scores to metrics, named as in docs/metrics.md without `eval/`, and the rule that ends a run early."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, isnan, nan
from statistics import fmean

from megagrpo.errors import Problem, RecipeError
from megagrpo.recipe import schema
from megagrpo.recipe.schema.eval import pass_at
from megagrpo.reward.gsm8k import flexible_answer, strict_answer
from megagrpo.types import Group

_BOXED = "\\boxed{"


def evaluation_metrics(groups: Sequence[Group], samples_per_prompt: int) -> dict[str, float]:
    """Metrics over all prompts. If there are several data sources, also the scores of each, such as `SOURCE/mean@4`.

    With n = samples_per_prompt, each metric is a mean over prompts:

    - `mean@n`: mean score of the prompt's samples.
    - `pass@k` for k = 1, 2, 4, … and n: expected best score of k of the samples, see `best_of`.
    - `maj@n`: score of the majority's answer, see `majority`.

    Samples whose reward failed are left out and counted in `reward/errors`; so are prompts with too few samples for a
    metric. A metric without any prompt is nan. `response_tokens/mean` and `response_tokens/truncated_share` are over
    all samples.
    """
    metrics = _score_metrics(groups, samples_per_prompt)
    by_source: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_source[group.prompt.data_source].append(group)
    if len(by_source) > 1:
        for source, members in sorted(by_source.items()):
            metrics |= {
                f"{source}/{name}": value for name, value in _score_metrics(members, samples_per_prompt).items()
            }
    samples = [sample for group in groups for sample in group.samples]
    metrics["reward/errors"] = float(sum(score.value is None for group in groups for score in group.scores))
    metrics["response_tokens/mean"] = _mean([len(sample.tokens) for sample in samples])
    metrics["response_tokens/truncated_share"] = _mean([sample.finish == "length" for sample in samples])
    return metrics


def _score_metrics(groups: Sequence[Group], samples_per_prompt: int) -> dict[str, float]:
    n = samples_per_prompt
    scored = [_scored(group) for group in groups]
    metrics = {f"mean@{n}": _mean([fmean(scores) for scores, _ in scored if scores])}
    for k in pass_at(n):
        metrics[f"pass@{k}"] = _mean([best_of(scores, k) for scores, _ in scored if len(scores) >= k])
    metrics[f"maj@{n}"] = _mean([majority(scores, texts) for scores, texts in scored if scores])
    return metrics


def _scored(group: Group) -> tuple[list[float], list[str]]:
    """Scores and texts of the samples with a score."""
    known = [
        (score.value, sample.text)
        for sample, score in zip(group.samples, group.scores, strict=True)
        if score.value is not None
    ]
    return [value for value, _ in known], [text for _, text in known]


def best_of(scores: Sequence[float], k: int) -> float:
    """Expected best of k scores drawn from these without replacement; 1 <= k <= len(scores).

    Unbiased for the best of k independent samples. On scores of 0 and 1 it is pass@k of Chen et al.
    (arXiv:2107.03374, eq. 1): 1 - C(n - c, k) / C(n, k) for c ones among n.
    """
    # The i-th smallest (from 0) is the best of those C(i, k - 1) draws whose others are among the i below it.
    ways = sum(score * comb(i, k - 1) for i, score in enumerate(sorted(scores)))
    return ways / comb(len(scores), k)


def majority(scores: Sequence[float], texts: Sequence[str]) -> float:
    """Mean score of the samples that give the most frequent answer (arXiv:2203.11171); tied answers are averaged."""
    by_answer: dict[str, list[float]] = defaultdict(list)
    for score, text in zip(scores, texts, strict=True):
        by_answer[extract_answer(text)].append(score)
    most = max(map(len, by_answer.values()))
    return fmean(fmean(votes) for votes in by_answer.values() if len(votes) == most)


def extract_answer(text: str) -> str:
    """The answer that a response votes for: the number after the last `####`, else the content of the last `\\boxed{}`,
    else the last number, else the whole text. Numbers are compared by value: 1,000 and 1000.0 are one answer."""
    boxed = _last_boxed(text)
    number = strict_answer(text)
    if number is None:
        number = flexible_answer(text) if boxed is None else strict_answer(f"#### {boxed}")
    if number is not None:
        return f"{number.normalize() + 0:f}"
    return (text if boxed is None else boxed).strip()


def _last_boxed(text: str) -> str | None:
    """The text between the braces of the last \\boxed{…}; None if there is none, or if its braces do not close."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    for end in range(start + len(_BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len(_BOXED) : end]
    return None


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else nan


@dataclass(frozen=True)
class EarlyStopping:
    """The rule, and what it remembers from one evaluation to the next (saved with each checkpoint)."""

    rule: schema.EarlyStoppingConfig
    best: float | None = None
    evaluations_without_best: int = 0

    def after(self, metrics: Mapping[str, float]) -> EarlyStopping:
        """The state after one more evaluation. A metric that is nan, because every reward failed, is no new best.

        Raises RecipeError if the evaluation lacks the rule's metric.
        """
        if self.rule.metric not in metrics:
            needed = "one of " + ", ".join(sorted(metrics))
            raise RecipeError(Problem("eval.early_stopping.metric", given=self.rule.metric, needed=needed))
        value = metrics[self.rule.metric]
        if not isnan(value) and (self.best is None or value > self.best):
            return replace(self, best=value, evaluations_without_best=0)
        return replace(self, evaluations_without_best=self.evaluations_without_best + 1)

    def reason_to_stop(self) -> str | None:
        """Why the run should end now; None if it should go on."""
        rule = self.rule
        if rule.target is not None and self.best is not None and self.best >= rule.target:
            return f"{rule.metric} reached {self.best:g}, the target being {rule.target:g}"
        if rule.patience is not None and self.evaluations_without_best >= rule.patience:
            return f"{rule.metric} has had no new best in {self.evaluations_without_best} evaluations"
        return None
