"""The answer of a model that searches, as Search-R1 scores it (arXiv:2503.09516): the last `<answer>…</answer>`."""

from __future__ import annotations

from collections import Counter

from megagrpo.reward.answer_text import accepted_answers, after_thinking, squad_words, tagged
from megagrpo.reward.functions import RewardCallable, RewardReturn
from megagrpo.reward.verifiers.f1 import word_overlap
from megagrpo.reward.verifiers.string_match import check_words_max, contains

METHODS = ("exact", "contains", "f1")


def make(
    method: str = "exact", tag: str = "answer", format_score: float = 0.0, words_max: int | None = None
) -> RewardCallable:
    """1.0 if the answer is right, `format_score` if it is another, 0.0 if there is no `<tag>…</tag>` or it is empty.

    exact: it equals one of the right texts, by SQuAD's normalisation. contains: one of them is in it, in whole words,
    and it has at most `words_max` words, or as many as that text: without this, a list of guesses is right. f1: how
    many words it shares with the nearest, and `format_score` if that is none (ReSearch, arXiv:2503.19470). The ground
    truth is a text, a JSON list of texts, or Search-R1's {"target": […]}. ValueError for another method.

    >>> verify = make(format_score=0.1); truth = '{"target": ["Nile", "the River Nile"]}'
    >>> responses = [f"<answer>{text}</answer>" for text in ("The Nile", "Amazon", "")]
    >>> [verify(response=response, ground_truth=truth)["score"] for response in responses]
    [1.0, 0.1, 0.0]
    >>> make(method="contains")(response="<answer>the great Nile</answer>", ground_truth=truth)["score"]
    1.0
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, not one of {', '.join(METHODS)}")
    check_words_max(words_max, method)

    def search_answer(response: str, ground_truth: str, prompt_text: str = "") -> RewardReturn:
        truths = [words for words in map(squad_words, accepted_answers(ground_truth)) if words]
        if not truths:
            raise ValueError(f"the ground truth {ground_truth[:200]!r} has no word")
        words = squad_words(tagged(after_thinking(response, prompt_text), tag) or "")
        if not words:
            return {"score": 0.0}
        answer = " ".join(words)
        if method == "exact":
            score = float(words in truths)
        elif method == "contains":
            score = float(contains(answer, [" ".join(truth) for truth in truths], words_max))
        else:
            score = max(word_overlap(words, Counter(truth))[0] for truth in truths)
        return {"score": score or format_score, "answer": answer}

    return search_answer


def solution(ground_truth: str, tag: str = "answer") -> str:
    """A right response. ValueError for a ground truth without an answer."""
    return f"<{tag}>{accepted_answers(ground_truth)[0]}</{tag}>"
