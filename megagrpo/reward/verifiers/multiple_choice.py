r"""Questions with options: the letter, or the letters, that a response gives as its answer."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megagrpo.reward.answer_text import after_thinking, last_boxed, plain, squad_words, tagged
from megagrpo.reward.functions import RewardCallable, RewardReturn

_BLANKS = re.compile(r"[^\S\n]+")
_WRAPPERS = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|mathsf|bf|rm)\b ?|[{}$*_`]|\\[ ,;!]|~|\\[()\[\]]")
# The rest is a letter, or several: B · (B) · B. · A, C · A and C · ABD
_LETTERS = re.compile(r"\(?([A-Za-z](?:\)?(?: ?[,;&/] ?| and | ?, and |)\(?[A-Za-z])*)\)?[.:]?")
# The same, and the text of the option behind it: B) Paris · (B) Paris · B. Paris · B: Paris
_LETTER_AND_TEXT = re.compile(r"(?:\(([A-Za-z])\)|([A-Z])[.):]) ?\S")
# A pronoun is no letter: "My answer: I think …"
_ONE = r"(?:\([A-Za-z]\)|(?!I['’]|I (?:am|have|would|do|can|will|think|believe|guess)\b)[A-Z]\b|[a-z](?=[).]?$))"
# "The answer is (B)", "Answer: A and C", "the correct options are A, C": up to five words before the verb or colon.
# "Final Answer:" may also stand on a line of its own, above "(B) Paris".
_STATED = re.compile(
    rf"(?i:\b(?:answers?|options?|choices?)\b(?: ?(?!not\b|never\b|cannot\b)[a-z]+(?= )){{0,5}}? ?"
    rf"(?::|\bis\b:?|\bare\b:?|\bbe\b:?))"
    rf"(?:(?i: option| choice| letter| answer)? ?(?:I (?:think|believe) (?:it is )?)?"
    rf"|(?:(?<=nswer:)|(?<=nswers:))\s++(?=\(?[A-Z](?:[).:\n]|$)))"
    rf"({_ONE}(?:(?:, ?and |,? or | ?[,&/;] ?| and ){_ONE}(?![A-Za-z]| (?!and )[a-z]{{2}}))*)",
    re.MULTILINE,
)
# 正确答案是C。 答案：A、C 答えはBです 정답은 D: to the end of the sentence, with no letter but these and no "not"
_STATED_IN_ASIA = re.compile(
    r"(?:答案|正解|答え|选项|選項|应选|故选|정답|답)(?:应该|應該|应|應)?(?:是|为|為|选|選|は|은|는)? ?:? ?"
    r"[(「“]?([A-Z](?:\)? ?(?:[,、和与與及]|，) ?\(?[A-Z]|[A-Z])*)(?![A-Za-z])(?=[^A-Z\n。?？]*(?:[。\n]|\Z))"
    r"(?![^\n。]*(?:不是|不对|错误|或|還是|还是|ではない|아니))"
)
# The rest of its sentence, up to the reason, may name no other: "B and maybe C", "(B), (C) or (D)", "B. C."
_SENTENCE = re.compile(r"(?:(?!\b(?:because|since|as|not|rather|instead|while|whereas)\b|[.!?](?:\s|$))[^\n])*")
_OTHER = re.compile(r"(?:[,;/&]|\b(?:and|or|also|maybe|perhaps|possibly|both|option)\b) ?\(?[A-Z]\b")
_NEXT = re.compile(r"[.!?]? ?\(?[A-Z]\)?(?:[.,;!?]|$)")
_TEXT_OF_OPTION = re.compile(r"(?:(?<=\))|[).:]) ?(?!(?:and|or|also|maybe|perhaps|possibly|but)\b)\w")
_CORRECTION = re.compile(
    r"(?:^|[.!?…,;—–-]|\n)\s{0,3}(?:No(?=[,.!…—–-]| wait| it | that )|Wait\b|Actually\b|Hmm|Sorry|Oops|Correction"
    r"|Or \(?[A-Z]\b)|\bno,? wait\b"
)
_REJECTED = re.compile(
    r"[).:]?,? (?:is|was|are|seems|can be|must be)"
    r"(?:n['’]t| (?:\w+ )?(?:not|wrong|incorrect|false|excluded|eliminated|out))\b"
)
_REJECTING = re.compile(
    r"(?i)\b(?:not|never|cannot|wrong|incorrect|false|except|exclud\w*|eliminat\w*|reject\w*|rul\w* out)\b|n['’]t\b"
)
_BRACKETED = re.compile(r"\(([A-Z])\)")
_OPTION = re.compile(r"\(([A-Z])\)|(?<![\w.])([A-Z])[.):](?= ?[^\s.):])")


def make(letters: str = "ABCDEFGHIJ") -> RewardCallable:
    r"""Makes a reward function: 1.0 if the response chooses exactly the ground truth's letter or letters, else 0.0.

    `letters`: those that an option can have. The answer is read after the reasoning, in this order: the last
    `\boxed{}`, the last `<answer>…</answer>`, the last sentence such as "the answer is (B)", a response or last line
    that is a letter, and the only letter in parentheses of the last line. A sentence chooses none if it names other
    letters before its reason ("B and maybe C", but not "B, since A is false") or is taken back ("No, wait").
    A rejected letter is not chosen ("not (B)", "(B) is wrong"). The row's extra_info may have `choices`, a list of
    texts, a mapping from letters to texts, or {"label": […], "text": […]}: then an option's text counts as its letter.
    The ground truth is a letter, several as `A, C` or a JSON list, or an option's text: else ValueError.

    >>> verify = make(); verify(response="It rains, so the answer is (B).", ground_truth="B", extra_info={})
    {'score': 1.0, 'answer': 'B'}
    >>> verify(response=r"\boxed{\text{A, C}}", ground_truth="AC", extra_info={})
    {'score': 1.0, 'answer': 'A,C'}
    >>> verify(response="The answer is Paris.", ground_truth="B", extra_info={"choices": ["Rome", "Paris"]})["score"]
    1.0
    >>> verify(response="It is B or C.", ground_truth="B", extra_info={})
    {'score': 0.0}
    """
    if not letters or not set(letters) <= set(string.ascii_uppercase):
        raise ValueError(f"letters is {letters!r}, not capital letters")

    @lru_cache(maxsize=65536)
    def truth_without_choices(ground_truth: str) -> str:
        return _truth(ground_truth, letters, {})

    def multiple_choice(
        response: str, ground_truth: str, extra_info: Mapping[str, Any], prompt_text: str = ""
    ) -> RewardReturn:
        choices = _choices(extra_info, letters)
        truth = _truth(ground_truth, letters, choices) if choices else truth_without_choices(ground_truth)
        answer = _chosen(plain(after_thinking(response, prompt_text)), letters, choices)
        return {"score": float(answer == truth), "answer": answer} if answer else {"score": 0.0}

    return multiple_choice


def solution(ground_truth: str) -> str:
    """Returns a right response."""
    return f"<answer>{_text(ground_truth)}</answer>"


def _chosen(text: str, letters: str, choices: Mapping[str, str]) -> str:
    """Returns the chosen letters in order with commas between, empty if the text chooses none."""
    marked = last_boxed(text)
    marked = tagged(text, "answer") if marked is None else marked
    if marked is not None:
        return _read(marked, letters, choices) or _stated(marked, letters, choices)
    text = _BLANKS.sub(" ", text).strip()
    last_line = text.rpartition("\n")[2]
    chosen = _stated(text, letters, choices) or _read(text, letters, choices)
    if chosen or (chosen := _read(last_line, letters, choices, among=text)):
        return chosen
    bracketed = [option for option in _BRACKETED.finditer(last_line) if option[1] in letters]
    if len({option[1] for option in bracketed}) != 1 or last_line.startswith("("):
        return ""  # an option at the start of the line, that is listed as others are
    last = bracketed[-1]
    rejected = _REJECTED.match(last_line, last.end()) or _REJECTING.search(last_line[: last.start()])
    return "" if rejected else last[1]


def _stated(text: str, letters: str, choices: Mapping[str, str]) -> str:
    """Returns the letters that the last sentence such as "the answer is B" names; empty if it is open or taken back."""
    words = _BLANKS.sub(" ", _WRAPPERS.sub("", text))
    *_, stated = [None, *_STATED.finditer(words)]
    if stated is not None:
        return "" if _is_open(words, stated) else _read(stated[1], letters, {})
    if in_asia := _STATED_IN_ASIA.findall(words):
        return _in_order(re.sub(r"[^A-Z]", "", in_asia[-1]), letters)
    if choices:
        _, marker, tail = words.rpartition("answer is ")
        return _by_text(tail.partition("\n")[0], choices) if marker else ""
    return ""


def _is_open(text: str, stated: re.Match[str]) -> bool:
    """Returns whether the text after "the answer is B" names another letter, or takes B back."""
    end = stated.end()
    sentence = _SENTENCE.match(text, end)
    rest_at = sentence.end() if sentence else end
    letters = _BRACKETED if _TEXT_OF_OPTION.match(text, end) else _OTHER  # "(B) Vitamins A and C" is B
    several = letters.search(text, end, rest_at) or _BRACKETED.search(text, end, rest_at) or _NEXT.match(text, rest_at)
    return bool(several or text.startswith("?", end) or _REJECTED.match(text, end) or _CORRECTION.search(text, end))


def _read(text: str, letters: str, choices: Mapping[str, str], among: str = "") -> str:
    """Returns the letters of a short text such as `(B)`, `B. Paris`, `\\text{A, C}`; else an option's letter.

    `B. Paris` chooses nothing if `among`, the text around it, has each option once: it lists them all.
    """
    words = _BLANKS.sub(" ", _WRAPPERS.sub("", text)).strip() if len(text) < 2000 else ""
    by_text = _by_text(words, choices)
    if by_text and len(words) > 3:  # (B) is the letter, whatever options say
        return by_text
    is_word = len(words) > 3 and words.islower() and "," not in words and "(" not in words
    if not is_word and (named := _LETTERS.fullmatch(words)):
        return _in_order(re.sub(r"(?i)\band\b|[^A-Za-z]", "", named[1]).upper(), letters) or by_text
    if by_text:
        return by_text
    if (option := _LETTER_AND_TEXT.match(words)) and not _REJECTED.match(words, option.end(option.lastindex or 0)):
        letter = (option[1] or option[2]).upper()
        options = Counter(one or other for one, other in _OPTION.findall(among or words))
        return "" if len(options) > 1 and options[letter] == 1 else _in_order(letter, letters)
    return ""


def _in_order(chosen: str, letters: str) -> str:
    return ",".join(sorted(set(chosen))) if chosen and set(chosen) <= set(letters) else ""


def _by_text(text: str, choices: Mapping[str, str]) -> str:
    words = " ".join(squad_words(text))
    matching = [letter for letter, choice in choices.items() if words and " ".join(squad_words(choice)) == words]
    return matching[0] if len(matching) == 1 else ""


def _choices(extra_info: Mapping[str, Any], letters: str) -> dict[str, str]:
    given = extra_info.get("choices") or {}
    if isinstance(given, Mapping) and isinstance(given.get("text"), list | tuple):
        given = dict(zip(given.get("label", letters), given["text"], strict=False))
    elif not isinstance(given, Mapping):
        given = dict(zip(letters, given, strict=False))
    return {str(letter): str(text) for letter, text in given.items()}


def _text(ground_truth: str) -> str:
    try:
        value = json.loads(ground_truth)
    except ValueError:
        value = ground_truth
    return ", ".join(map(str, value)) if isinstance(value, list) else ground_truth


def _truth(ground_truth: str, letters: str, choices: Mapping[str, str]) -> str:
    text = _text(ground_truth)
    if truth := _by_text(text, choices) or _read(text, letters, choices):
        return truth
    raise ValueError(f"the ground truth {ground_truth[:200]!r} is no letter of {letters} and no option's text")
