"""Verdicts of models: on a response, on pairs of a group, or on all of it at once; and the scores of reward models."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megagrpo.reward.answer_text import after_thinking
from megagrpo.reward.functions import NOTE_CHARACTERS_MAX, Function, Outcome
from megagrpo.reward.judging.asked import OverBudgetError, UnansweredError
from megagrpo.reward.judging.classifier import ScoringModel
from megagrpo.reward.judging.client import Answer, Arguments, AskConfig, Judge
from megagrpo.reward.judging.rubric import (
    CHARACTERS_READ,
    Rubric,
    Scale,
    UnreadableError,
    VerdictConfig,
    fence_of,
    reader,
    value_of,
)
from megagrpo.section import Number, PositiveFloat, PositiveInt, Section

RUBRICS = Path(__file__).with_name("rubrics")
"""The rubrics of a recipe that names none."""
ALONE = "the response is the only one of its group"


class JudgeConfig(AskConfig):
    """Arguments of `judge`."""

    rubric: str = str(RUBRICS / "judge.md")
    """The question: a text, or a file that ends in .txt or .md, with {{question}} (the user's last message),
    {{prompt}} (the conversation), {{response}}, {{answer}} (what follows its reasoning), {{ground_truth}},
    {{data_source}}, {{ability}}, {{extra_info.NAME}}, {{fence}} (a word that is not in the response)."""

    verdict: VerdictConfig = "score"
    """Form of the verdict in the answer: score ("Score: 7"), yes_no, a_b, {pattern: REGEX} or {field: KEY}."""

    scale: Scale | None = None
    """The numbers that mean 0 and 1; [0, 10] for score, else [0, 1]."""


def judge(**arguments: Any) -> Function:
    """Makes a reward function: a model's verdict on a response, from 0 to 1. Its text is the note `verdict`."""
    config = JudgeConfig.of(arguments)
    rubric, read = Rubric(config.rubric, ["response", "answer"]), reader(config.verdict, config.scale)

    async def score(model: Judge, response: str, prompt_text: str, **row: Any) -> dict[str, Any]:
        shown = {"response": response, "answer": after_thinking(response, prompt_text)}
        answer = await model.ask(rubric.filled(row, shown), read)
        return {"score": answer.read, "verdict": answer.text[-NOTE_CHARACTERS_MAX:], **answer.metrics}

    return Function.of(score, config)


# --- pairs ------------------------------------------------------------------------------------------------------------

Pair = tuple[int, int]
Comparison = tuple[int, int, float]
"""Two responses, and the share of the comparison that the first has won: 1, 0.5 for a tie, 0."""

ROUNDS_MAX = 10_000
EXACT = 1e-12
PRIOR = 0.5
"""Comparisons against a response of mean strength that each response begins with, PRIOR won and PRIOR lost: one
that wins all would otherwise be infinitely strong."""


class PairsConfig(JudgeConfig):
    """Arguments of `judge_pairs`."""

    rubric: str = str(RUBRICS / "judge_pairs.md")
    """Rubric as that of judge, with {{response_a}} and {{response_b}} in place of {{response}}, or {{answer_a}} and
    {{answer_b}}, which leave out the reasoning of both."""

    verdict: VerdictConfig = "a_b"
    """Form of the verdict in the answer: 1 if A is better, 0 if B is, 0.5 for a tie."""

    against: Annotated[str, Field(pattern=r"^(others|ground_truth|extra_info\..+)$")] = "others"
    """others: the other responses of the group. ground_truth, or extra_info.NAME: a reference of the row."""

    pairs_max: PositiveInt = 64
    """Most pairs of a group that are compared; with fewer than all, each response is in about as many."""

    both_orders: bool = True
    """Each pair is asked about twice, with A and B exchanged: judges prefer one place to the other."""

    scores: Literal["bradley_terry", "win_rate"] = "bradley_terry"
    """The score from comparisons with others: the chance to win against a response of mean strength, or the share of
    its comparisons that a response has won."""


def judge_pairs(**arguments: Any) -> Function:
    """Makes a reward function: scores of a group from 0 to 1; 0.5 is as good as the others, or as the reference."""
    config = PairsConfig.of(arguments)
    rubric = Rubric(config.rubric, ["response_a", "response_b", "answer_a", "answer_b"])
    read = reader(config.verdict, config.scale)

    async def compare(
        model: Judge, responses: list[str], prompt_text: str, **row: Any
    ) -> list[dict[str, Any] | Outcome]:
        answers = rubric.rendered(responses, prompt_text)
        if config.against != "others":
            texts = [*answers, value_of(config.against, row)]
            pairs = [(i, len(responses)) for i in range(len(responses))]
        elif len(responses) < 2:
            return [Outcome(None, masked=ALONE)] * len(responses)
        else:
            texts = answers
            pairs = chosen_pairs(len(texts), config.pairs_max, seed="\0".join(texts))

        def ask(i: int, j: int) -> Awaitable[Answer[float]]:
            a, b = texts[i], texts[j]
            shown_pair = {"response_a": a, "response_b": b, "answer_a": a, "answer_b": b}
            return model.ask(rubric.filled(row, shown_pair), read)

        comparisons, notes = await _compared(ask, config.both_orders, texts, pairs)
        rated = config.scores == "win_rate" or config.against != "others"
        scores = (win_rates if rated else bradley_terry)(len(texts), comparisons)
        return [
            Outcome(None, error="no comparison of this response has a verdict")
            if score is None
            else {"score": score, "comparisons": len(texts_on), "verdict": "\n\n".join(texts_on)}
            for score, texts_on in zip(scores[: len(responses)], notes, strict=False)
        ]

    return Function.of(compare, config)


async def _compared(
    ask: Callable[[int, int], Awaitable[Answer[float]]], both_orders: bool, texts: Sequence[str], pairs: Sequence[Pair]
) -> tuple[list[Comparison], list[list[str]]]:
    """Returns the comparisons, and the judge's texts on each response. Equal texts tie without a request.

    Raises OverBudgetError, and UnansweredError if no question has a verdict.
    """
    unlike = [(i, j) for i, j in pairs if texts[i] != texts[j]]
    ordered = [(i, j) for pair in unlike for i, j in ((pair, pair[::-1]) if both_orders else (pair,))]
    answers = await asyncio.gather(*(ask(i, j) for i, j in ordered), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in errors:
        if isinstance(error, OverBudgetError) or not isinstance(error, UnansweredError):
            raise error
    if errors and len(errors) == len(answers):
        raise errors[0]
    comparisons: list[Comparison] = [(i, j, 0.5) for i, j in pairs if texts[i] == texts[j]]
    notes: list[list[str]] = [[] for _ in texts]
    for (i, j), answer in zip(ordered, answers, strict=True):
        if not isinstance(answer, BaseException):
            comparisons.append((i, j, answer.read))
            notes[i].append(f"A, against {j}: {answer.text}")
            notes[j].append(f"B, against {i}: {answer.text}")
    return comparisons, notes


def chosen_pairs(count: int, most: int, seed: str) -> list[Pair]:
    """Returns pairs of `count` responses to compare: all, or `most` of them, with each response in about as many.

    The responses lie on a ring in an order that `seed` decides; neighbours are compared first, then those two apart,
    and so on. So with at least `count` pairs each response is connected with all others.
    """
    order = list(range(count))
    random.Random(seed).shuffle(order)
    ring = [
        (order[at], order[(at + distance) % count])
        for distance in range(1, count // 2 + 1)
        for at in range(count if 2 * distance < count else count // 2)
    ]
    return [(min(pair), max(pair)) for pair in ring[:most]]


def win_rates(count: int, comparisons: Sequence[Comparison]) -> list[float | None]:
    """Returns the share of its comparisons that each response has won; None for one without any."""
    won, played = _totals(count, comparisons)
    return [won[i] / played[i] if played[i] else None for i in range(count)]


def bradley_terry(count: int, comparisons: Sequence[Comparison]) -> list[float | None]:
    """Returns the chance of each response to win against one of mean strength; None for one without comparisons.

    Strengths p with P(i beats j) = p_i / (p_i + p_j) of greatest likelihood, by minorisation-maximisation (Hunter 2004,
    MM algorithms for generalized Bradley-Terry models, eq. 3). Ties are half a win for both.
    """
    won, played = _totals(count, comparisons)
    strengths = [1.0] * count
    for _ in range(ROUNDS_MAX):
        weights = [2 * PRIOR / (strength + 1.0) for strength in strengths]
        for i, j, _ in comparisons:
            share = 1.0 / (strengths[i] + strengths[j])
            weights[i] += share
            weights[j] += share
        before, strengths = strengths, [(won[i] + PRIOR) / weights[i] for i in range(count)]
        if all(abs(new - old) <= EXACT * old for new, old in zip(strengths, before, strict=True)):
            break
    return [strengths[i] / (1.0 + strengths[i]) if played[i] else None for i in range(count)]


def _totals(count: int, comparisons: Sequence[Comparison]) -> tuple[list[float], list[int]]:
    """Returns the wins of each response, and the number of its comparisons."""
    won, played = [0.0] * count, [0] * count
    for i, j, share in comparisons:
        won[i] += share
        won[j] += 1.0 - share
        played[i] += 1
        played[j] += 1
    return won, played


# --- rankings ---------------------------------------------------------------------------------------------------------

RANKING = re.compile(r"\[?\d+\]?(?:\s*>\s*\[?\d+\]?)+")
NUMBER = re.compile(r"\d+")


class RankingConfig(AskConfig):
    """Arguments of `judge_ranking`."""

    rubric: str = str(RUBRICS / "judge_ranking.md")
    """Rubric as that of judge, with {{responses}} in place of {{response}}, or {{answers}}, which leave out the
    reasoning: each in tags of its number and {{fence}}, such as <1-{{fence}}>."""


def judge_ranking(**arguments: Any) -> Function:
    """Makes a reward function: from 1 for a group's best response to 0 for its worst, evenly spaced. Equal ones tie."""
    config = RankingConfig.of(arguments)
    rubric = Rubric(config.rubric, ["responses", "answers"])

    async def rank(model: Judge, responses: list[str], prompt_text: str, **row: Any) -> list[dict[str, Any] | Outcome]:
        if len(responses) < 2:
            return [Outcome(None, masked=ALONE)] * len(responses)
        texts = rubric.rendered(responses, prompt_text)
        unlike = sorted(set(texts))
        if len(unlike) == 1:
            return [{"score": 0.5} for _ in texts]
        random.Random("\0".join(unlike)).shuffle(unlike)  # judges prefer some places to others
        fence = fence_of(unlike)
        shown = "\n\n".join(f"<{n}-{fence}>\n{text}\n</{n}-{fence}>" for n, text in enumerate(unlike, 1))
        question = rubric.filled(row, {"responses": shown, "answers": shown, "fence": fence})
        answer = await model.ask(question, lambda text: ranking(text, len(unlike)))
        places = {unlike[number - 1]: place for place, number in enumerate(answer.read)}
        common = {"verdict": answer.text[-NOTE_CHARACTERS_MAX:], **answer.metrics}
        return [{"score": 1 - places[text] / (len(unlike) - 1), **common} for text in texts]

    return Function.of(rank, config)


def ranking(text: str, count: int) -> list[int]:
    """Returns the last "2 > 3 > 1" of an answer: numbers from 1 to `count`, the best first. Raises UnreadableError.

    >>> ranking("Ranking: [2] > [3] > [1]", 3)
    [2, 3, 1]
    """
    rankings = RANKING.findall(text.rpartition("</think>")[2][-CHARACTERS_READ:])
    if not rankings:
        raise UnreadableError("no ranking such as 2 > 3 > 1")
    numbers = [int(number) for number in NUMBER.findall(rankings[-1])]
    if sorted(numbers) != list(range(1, count + 1)):
        raise UnreadableError(f"the ranking has not each of 1 to {count} once")
    return numbers


# --- trained reward models --------------------------------------------------------------------------------------------


class StandardConfig(Section):
    """Standardisation of a score: (score - mean) / std."""

    mean: Number
    std: PositiveFloat


class RewardModelArguments(Arguments):
    """Arguments of `reward_model`."""

    model: str
    """A classifier of reward.models."""

    label: str | int | None = None
    """The logit that is the score: a label's name or number. null: the only one."""

    shows: Literal["answer", "response"] = "answer"
    """The text that the model sees. answer: the text after the reasoning. response: all of the response."""

    normalize: Literal["none", "sigmoid"] | StandardConfig = "none"
    """sigmoid: to 0 .. 1; with several labels, the probability of `label` among them. {mean: M, std: S}: by figures of
    your own, such as those of the first evaluation."""


def reward_model(**arguments: Any) -> Function:
    """Makes a reward function: the model's score of the prompt with the response."""
    config = RewardModelArguments.of(arguments)

    async def score(model: ScoringModel, *, prompt: list[dict[str, Any]], prompt_text: str, response: str) -> float:
        shown = after_thinking(response, prompt_text) if config.shows == "answer" else response
        logits, labels = await model.logits([*prompt, {"role": "assistant", "content": shown}])
        return score_of(logits, label_of(config.label, labels), config.normalize)

    return Function.of(score, config)


def label_of(label: str | int | None, labels: Sequence[str]) -> int:
    """Returns the index of the logit that is the score. Raises UnansweredError if the model has no such label."""
    if label is None and len(labels) == 1:
        return 0
    if isinstance(label, int) and 0 <= label < len(labels):
        return label
    if label in labels:
        return labels.index(str(label))
    raise UnansweredError(f"label {label}, of a model with {', '.join(labels)}")


def score_of(
    logits: Sequence[float], label: int, normalize: Literal["none", "sigmoid"] | StandardConfig = "none"
) -> float:
    """Returns the score from the logits.

    >>> score_of([2.0], 0), score_of([2.0], 0, StandardConfig(mean=1.0, std=0.5))
    (2.0, 2.0)
    >>> [round(score_of(logits, 1, "sigmoid"), 3) for logits in ([0.0, 0.0], [0.0, 1.0], [1000.0, 0.0])]
    [0.5, 0.731, 0.0]
    """
    score = logits[label]
    if isinstance(normalize, StandardConfig):
        return (score - normalize.mean) / normalize.std
    if normalize == "none":
        return score
    others = [other - score for place, other in enumerate(logits) if place != label] or [-score]
    most = max(0.0, *others)
    return math.exp(-most) / (math.exp(-most) + sum(math.exp(other - most) for other in others))
