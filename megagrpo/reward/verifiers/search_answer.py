"""The answer of a model that searches, as Search-R1 scores it (arXiv:2503.09516): the last `<answer>…</answer>`."""

from __future__ import annotations

from typing import Literal

from megagrpo.reward.answer_text import accepted_words, after_thinking, squad_words, tagged
from megagrpo.reward.functions import RewardCallable, RewardReturn
from megagrpo.reward.verifiers.f1 import word_overlap
from megagrpo.reward.verifiers.string_match import check_words_max, contains
from megagrpo.reward.verifiers.string_match import solution as solution


def make(
    method: Literal["exact", "contains", "f1"] = "exact",
    tag: str = "answer",
    format_score: float = 0.0,
    words_max: int | None = None,
) -> RewardCallable:
    """Makes a reward function: 1.0 for a right answer, `format_score` for another, 0.0 for a missing or empty one.

    The answer is the last `<tag>…</tag>`. exact: it equals a right text, by SQuAD's normalisation. contains: it has one
    in whole words, and `words_max` words at most, or as many as that text: without this, a list of guesses is right.
    f1: the F1 with the nearest text, `format_score` if they share no word (ReSearch, arXiv:2503.19470). The ground
    truth is a text, a JSON list of texts, or Search-R1's {"target": […]}.

    >>> verify = make(format_score=0.1); truth = '{"target": ["Nile", "the River Nile"]}'
    >>> responses = [f"<answer>{text}</answer>" for text in ("The Nile", "Amazon", "")]
    >>> [verify(response=response, ground_truth=truth)["score"] for response in responses]
    [1.0, 0.1, 0.0]
    >>> make(method="contains")(response="<answer>the great Nile</answer>", ground_truth=truth)["score"]
    1.0
    """
    check_words_max(words_max, method)

    def search_answer(response: str, ground_truth: str, prompt_text: str = "") -> RewardReturn:
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

    return search_answer
