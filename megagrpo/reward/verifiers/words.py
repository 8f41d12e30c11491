"""Answers compared word by word with those that are right: whole, contained, or by the words that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from megagrpo.reward.answer_text import accepted_answers, accepted_words, after_thinking, squad_words, tagged
from megagrpo.reward.functions import RewardCallable, RewardReturn


def string_match(
    method: Literal["exact", "contains"] = "exact",
    normalised: bool = True,
    tag: str = "answer",
    tag_required: bool = False,
    after: str = "",
    after_required: bool = True,
    words_max: int | None = None,
) -> RewardCallable:
    """Makes a reward function: 1.0 if the answer is right, else 0.0.

    The ground truth is a text, or several as a JSON list. The answer is the last `<tag>…</tag>` after the reasoning,
    else all after it unless `tag_required`; of that, the text after the last `after`, if given (if it is missing, 0.0,
    or all of it unless `after_required`). exact: it equals a right text. contains: it has one in whole words, and at
    most `words_max` words, or as many as that text: without this, a list of guesses is right. Ignores white space at
    the ends, and with `normalised` case, punctuation and articles.

    >>> verify = string_match(); verify(response="<answer>The Eiffel Tower.</answer>", ground_truth="Eiffel tower")
    {'score': 1.0, 'answer': 'eiffel tower'}
    >>> string_match("contains")(response="It is in Paris, I think.", ground_truth='["London", "Paris"]')
    {'score': 1.0, 'answer': 'it is in paris i think'}
    >>> verify = string_match(after="The answer is"); verify(response="The answer is: no", ground_truth="yes")["score"]
    0.0
    """
    check_words_max(words_max, method)

    def score(response: str, ground_truth: str, prompt_text: str = "") -> RewardReturn:
        if normalised:
            truths = [" ".join(words) for words in accepted_words(ground_truth)]
        else:
            truths = [answer.strip() for answer in accepted_answers(ground_truth)]
        answer = answer_part(after_thinking(response, prompt_text), tag, tag_required)
        if answer is not None and after:
            _, mark, answer = answer.rpartition(after)
            answer = answer if mark or not after_required else None
        if answer is None:
            return {"score": 0.0}
        given = " ".join(squad_words(answer)) if normalised else answer.strip()
        right = given in truths if method == "exact" else contains(given, truths, words_max)
        return {"score": float(right), "answer": given}

    return score


def f1(tag: str = "answer", tag_required: bool = False) -> RewardCallable:
    """Makes a reward function: 2·precision·recall / (precision + recall) of the answer's words, 0.0 to 1.0.

    The ground truth is a text, or several as a JSON list: the best counts. The answer is the last `<tag>…</tag>` after
    the reasoning, else all text after it unless `tag_required`. Precision and recall are metrics.

    >>> verify = f1(); verify(response="<answer>Barack H. Obama</answer>", ground_truth='["Obama", "Barack Obama"]')
    {'score': 0.8, 'precision': 0.6666666666666666, 'recall': 1.0, 'answer': 'barack h obama'}
    >>> verify(response="Angela Merkel", ground_truth="Barack Obama")["score"]
    0.0
    """

    def score(response: str, ground_truth: str, prompt_text: str = "") -> RewardReturn:
        truths = accepted_words(ground_truth)
        answer = answer_part(after_thinking(response, prompt_text), tag, tag_required)
        if answer is None:
            return {"score": 0.0, "precision": 0.0, "recall": 0.0}
        words = squad_words(answer)
        overlap, precision, recall = max(word_overlap(words, truth) for truth in truths)
        return {"score": overlap, "precision": precision, "recall": recall, "answer": " ".join(words)}

    return score


def search_answer(
    method: Literal["exact", "contains", "f1"] = "exact",
    tag: str = "answer",
    format_score: float = 0.0,
    words_max: int | None = None,
) -> RewardCallable:
    """Makes a reward function: 1.0 for a right answer, `format_score` for another, 0.0 for a missing or empty one,
    as Search-R1 scores it (arXiv:2503.09516).

    The answer is the last `<tag>…</tag>`. exact: it equals a right text, by SQuAD's normalisation. contains: it has one
    in whole words, and `words_max` words at most, or as many as that text: without this, a list of guesses is right.
    f1: the F1 with the nearest text, `format_score` if they share no word (ReSearch, arXiv:2503.19470). The ground
    truth is a text, a JSON list of texts, or Search-R1's {"target": […]}.

    >>> verify = search_answer(format_score=0.1); truth = '{"target": ["Nile", "the River Nile"]}'
    >>> responses = [f"<answer>{text}</answer>" for text in ("The Nile", "Amazon", "")]
    >>> [verify(response=response, ground_truth=truth)["score"] for response in responses]
    [1.0, 0.1, 0.0]
    >>> search_answer(method="contains")(response="<answer>the great Nile</answer>", ground_truth=truth)["score"]
    1.0
    """
    check_words_max(words_max, method)

    def scored(response: str, ground_truth: str, prompt_text: str = "") -> RewardReturn:
        truths = accepted_words(ground_truth)
        words = squad_words(tagged(after_thinking(response, prompt_text), tag) or "")
        if not words:
            return {"score": 0.0}
        answer = " ".join(words)
        if method == "exact":
            score = float(tuple(words) in truths)
        elif method == "contains":
            score = float(contains(answer, [" ".join(truth) for truth in truths], words_max))
        else:
            score = max(word_overlap(words, truth)[0] for truth in truths)
        return {"score": score or format_score, "answer": answer}

    return scored


def solution(ground_truth: str, tag: str = "answer", after: str = "") -> str:
    """Returns a right response. Raises ValueError for a ground truth without an answer."""
    answer = f"{after} {accepted_answers(ground_truth)[0]}".strip()
    return f"<{tag}>{answer}</{tag}>" if tag else answer


def check_words_max(words_max: int | None, method: str) -> None:
    """Raises ValueError unless words_max is None, or a number from 1 with the method contains."""
    if words_max is not None and (method != "contains" or not isinstance(words_max, int) or words_max < 1):
        raise ValueError(f"words_max is {words_max!r} with method {method}: it is a number from 1, for contains")


def contains(answer: str, truths: Sequence[str], words_max: int | None) -> bool:
    """Returns whether the answer has a text in whole words, and at most `words_max` words or as many as that text.

    >>> contains("Rome Paris", ["Paris"], None), contains("Rome Paris", ["Paris"], 1), contains("a b", ["a b"], 1)
    (True, False, True)
    """
    words = len(answer.split())
    contained = (truth for truth in truths if f" {truth} " in f" {answer} ")
    return any(words_max is None or words <= max(words_max, len(truth.split())) for truth in contained)


def word_overlap(words: Sequence[str], truth: Sequence[str]) -> tuple[float, float, float]:
    """Returns (F1, precision, recall) of words against those of a right text."""
    shared = (Counter(truth) & Counter(words)).total()
    if not shared:
        return 0.0, 0.0, 0.0
    return 2 * shared / (len(words) + len(truth)), shared / len(words), shared / len(truth)


def answer_part(text: str, tag: str, tag_required: bool) -> str | None:
    """Returns the last `<tag>…</tag>` of a text, else all of it, or None if the tag is required."""
    answer = tagged(text, tag) if tag else None
    return text if answer is None and not tag_required else answer
