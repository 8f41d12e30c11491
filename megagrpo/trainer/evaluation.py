"""Held-out scores to metrics, named as in docs/metrics.md without `eval/`, and the rule that ends a run early."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import comb, isnan, nan
from statistics import fmean

from megagrpo.errors import Problem, RecipeError
from megagrpo.recipe import schema
from megagrpo.recipe.schema.eval import pass_at
from megagrpo.reward.gsm8k import flexible_answer, strict_answer
from megagrpo.reward.math import last_boxed
from megagrpo.types import Group


def evaluation_metrics(
    groups: Sequence[Group], samples_per_prompt: int, answer_of: Callable[[str], str]
) -> dict[str, float]:
    """Metrics over all prompts. If there are several data sources, also the scores of each, such as `SOURCE/mean@4`.

    With n = samples_per_prompt, each metric is a mean over prompts:

    - `mean@n`: mean score of the prompt's samples.
    - `pass@k` for k = 1, 2, 4, … and n: expected best score of k of the samples, see `best_of`.
    - `maj@n`: score of the majority's answer, see `majority`; `answer_of` a response's text is what it votes for.

    Samples whose reward failed are left out and counted in `reward/errors`; so are prompts with too few samples for a
    metric. A metric without any prompt is nan. `response_tokens/mean` and `response_tokens/truncated_share` are over
    all samples.
    """
    metrics = _score_metrics(groups, samples_per_prompt, answer_of)
    by_source: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_source[group.prompt.data_source].append(group)
    if len(by_source) > 1:
        for source, members in sorted(by_source.items()):
            metrics |= {
                f"{source}/{name}": value
                for name, value in _score_metrics(members, samples_per_prompt, answer_of).items()
            }
    samples = [sample for group in groups for sample in group.samples]
    metrics["reward/errors"] = float(sum(score.value is None for group in groups for score in group.scores))
    metrics["response_tokens/mean"] = _mean([len(sample.tokens) for sample in samples])
    metrics["response_tokens/truncated_share"] = _mean([sample.finish == "length" for sample in samples])
    return metrics


def _score_metrics(
    groups: Sequence[Group], samples_per_prompt: int, answer_of: Callable[[str], str]
) -> dict[str, float]:
    n = samples_per_prompt
    scored = [_scored(group) for group in groups]
    metrics = {f"mean@{n}": _mean([fmean(scores) for scores, _ in scored if scores])}
    for k in pass_at(n):
        metrics[f"pass@{k}"] = _mean([best_of(scores, k) for scores, _ in scored if len(scores) >= k])
    metrics[f"maj@{n}"] = _mean([majority(scores, list(map(answer_of, texts))) for scores, texts in scored if scores])
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


def majority(scores: Sequence[float], answers: Sequence[str]) -> float:
    """Mean score of the samples that give the most frequent answer (arXiv:2203.11171); tied answers are averaged."""
    by_answer: dict[str, list[float]] = defaultdict(list)
    for score, answer in zip(scores, answers, strict=True):
        by_answer[answer].append(score)
    most = max(map(len, by_answer.values()))
    return fmean(fmean(votes) for votes in by_answer.values() if len(votes) == most)


def reading_of(functions: Sequence[schema.RewardFunctionConfig]) -> Callable[[str], str]:
    """How answers are read: as the recipe's first `gsm8k` or `math` reads them, else by `any_answer`."""
    for function in functions:
        if function.function == "gsm8k":
            number = flexible_answer if function.arguments.get("method") == "flexible" else strict_answer
            return lambda text: _by_value(number(text), text)
        if function.function == "math":
            return boxed_answer
    return any_answer


def any_answer(text: str) -> str:
    """The number after the last `####`, else as `boxed_answer`."""
    number = strict_answer(text)
    return boxed_answer(text) if number is None else _by_value(number, text)


def boxed_answer(text: str) -> str:
    """The content of the last `\\boxed{}`, else the last number, else the whole text. Numbers are compared by value:
    1,000 and 1000.0 are one answer."""
    boxed = last_boxed(text)
    return _by_value(flexible_answer(text), text) if boxed is None else _by_value(strict_answer(f"#### {boxed}"), boxed)


def _by_value(number: Decimal | None, text: str) -> str:
    return text.strip() if number is None else f"{number.normalize() + 0:f}"


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
