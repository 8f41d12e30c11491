"""Duplicate prompts, and prompts shared with an evaluation: the same text, or long runs of the same words.

Runs of 13 words are what GPT-3 was decontaminated by (Brown et al. 2020, arXiv:2005.14165, appendix C).
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

TEMPLATE_SHARE = 0.05
"""A phrase in more of the held-out prompts than this share, and in more than one, is an instruction, not a question."""

# Letters and digits; operators, because 2+3 is not 2-3; and each sign of scripts that have no spaces between words.
_CJK = "\u3040-\u30ff\u3400-\u9fff"
_WORDS = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+|[-+*/^=<>]")


def question(messages: Iterable[Mapping[str, Any]]) -> str:
    """Returns the text of a prompt without its system message."""
    return "\n".join(str(message["content"]) for message in messages if message["role"] != "system")


def same_text(text: str) -> str:
    """Returns a form shared by texts that differ only in case, white space or encoding of signs. 2³ is not 23."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def words(text: str) -> list[str]:
    return _WORDS.findall(unicodedata.normalize("NFC", text).casefold())


def digests(texts: Iterable[str]) -> np.ndarray:
    """Returns digests, uint64 [texts], equal for texts of the same `same_text`."""
    hashes = (hashlib.blake2b(same_text(text).encode(errors="replace"), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(hashes), np.uint64)


def repeated(of_parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns flags of each part, bool [items]: the same digest occurs before, in this part or an earlier one."""
    together = np.concatenate([*of_parts, np.zeros(0, np.uint64)])
    again = np.ones(len(together), bool)
    again[np.unique(together, return_index=True)[1]] = False
    return np.split(again, np.cumsum([len(part) for part in of_parts])[:-1])


class HeldOut:
    """The questions of an evaluation, to match prompts with. Hashes map to the questions' numbers. Runs of words that
    are mostly an instruction shared by many questions are left out."""

    def __init__(self, questions: Sequence[str], ngram: int) -> None:
        self._ngram = ngram
        self._texts: dict[int, int] = {}
        self._runs: dict[int, int] = {}
        for number, text in enumerate(questions):
            self._texts.setdefault(hash(same_text(text)), number)
        half = -(-ngram // 2)
        in_questions: Counter[int] = Counter()
        for number in self._texts.values():  # a question that is listed twice shares nothing
            in_questions.update(set(_runs(words(questions[number]), half)))
        often = max(1, TEMPLATE_SHARE * len(self._texts))
        for number in self._texts.values():
            spelled = words(questions[number])
            shared = np.zeros(len(spelled), bool)
            for start, run in enumerate(_runs(spelled, half)):
                if in_questions[run] > often:
                    shared[start : start + half] = True
            for start, run in enumerate(_runs(spelled, ngram)):
                if shared[start : start + ngram].sum() <= ngram - half:
                    self._runs.setdefault(run, number)

    def match(self, text: str) -> int:
        """Returns the number of a question with the same text, or with a run of `ngram` words in common; else -1."""
        if (same := self._texts.get(hash(same_text(text)))) is not None:
            return same
        return next((self._runs[run] for run in _runs(words(text), self._ngram) if run in self._runs), -1)


def _runs(spelled: Sequence[str], length: int) -> Iterator[int]:
    """Yields a hash of each run of `length` words."""
    return (hash(tuple(spelled[start : start + length])) for start in range(len(spelled) - length + 1))
