"""The words that an answer shares with a right one: F1 as SQuAD takes it (arXiv:1606.05250)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megagrpo.reward.answer_text import accepted_words, after_thinking, squad_words
from megagrpo.reward.functions import RewardCallable, RewardReturn
from megagrpo.reward.verifiers.string_match import answer_part
from megagrpo.reward.verifiers.string_match import solution as solution


def make(tag: str = "answer", tag_required: bool = False) -> RewardCallable:
    """Makes a reward function: 2·precision·recall / (precision + recall) of the answer's words, 0.0 to 1.0.

    The ground truth is a text, or several as a JSON list: the best counts. The answer is the last `<tag>…</tag>` after
    the reasoning, else all text after it unless `tag_required`. Precision and recall are metrics.

    >>> verify = make(); verify(response="<answer>Barack H. Obama</answer>", ground_truth='["Obama", "Barack Obama"]')
    {'score': 0.8, 'precision': 0.6666666666666666, 'recall': 1.0, 'answer': 'barack h obama'}
    >>> verify(response="Angela Merkel", ground_truth="Barack Obama")["score"]
    0.0
    """

    def f1(response: str, ground_truth: str, prompt_text: str = "") -> RewardReturn:
        truths = accepted_words(ground_truth)
        answer = answer_part(after_thinking(response, prompt_text), tag, tag_required)
        if answer is None:
            return {"score": 0.0, "precision": 0.0, "recall": 0.0}
        words = squad_words(answer)
        score, precision, recall = max(word_overlap(words, truth) for truth in truths)
        return {"score": score, "precision": precision, "recall": recall, "answer": " ".join(words)}

    return f1


def word_overlap(words: Sequence[str], truth: Sequence[str]) -> tuple[float, float, float]:
    """Returns (F1, precision, recall) of words against those of a right text."""
    shared = (Counter(truth) & Counter(words)).total()
    if not shared:
        return 0.0, 0.0, 0.0
    return 2 * shared / (len(words) + len(truth)), shared / len(words), shared / len(truth)
