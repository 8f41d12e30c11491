"""The language that a response is written in, by py3langid (https://github.com/adbar/py3langid, deterministic)."""

from __future__ import annotations

import copy
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from megagrpo.reward.functions import RewardCallable, RewardReturn

# fmt: off
COMMON = (
    "ar", "bg", "bn", "ca", "cs", "da", "de", "el", "en", "es", "et", "eu", "fa", "fi", "fr", "gl", "he", "hi", "hr",
    "hu", "id", "it", "ja", "ka", "ko", "lt", "lv", "mk", "ms", "nl", "no", "pl", "pt", "ro", "ru", "sk", "sl", "sq",
    "sr", "sv", "sw", "ta", "te", "th", "tl", "tr", "uk", "ur", "vi", "zh",
)
# fmt: on
PIECE_BYTES = 40
"""Lines are put together up to this many bytes of letters, or `bytes_min`: less is too little to tell a language by."""

# No language: fenced and inline code, formulas, links, tags and LaTeX commands. Bounded, to be linear.
_NO_LANGUAGE = re.compile(
    r"(?s)```.*?```|`[^`\n]*`|\$\$.{0,2000}?\$\$|\$[^$\n]*\$|\\\(.{0,500}?\\\)|\\\[.{0,2000}?\\\]|https?://\S+"
    r"|</?[a-z_]{1,20}>|\\[A-Za-z]+"
)
_ASIAN = frozenset({"CJK", "HIRAGANA", "KATAKANA", "HANGUL"})  # written beside each other

_COMMAND = re.compile(r"\\[A-Za-z]+")


def make(
    language: str | Sequence[str] = "prompt", at_least: float = 0.0, bytes_min: int = 20, among: Sequence[str] = COMMON
) -> RewardCallable:
    """Makes a reward function: the share of letters in the language, 0.0 to 1.0; with `at_least`, 1.0 or 0.0 by it.

    `language` is an ISO 639-1 code, several of which any is right, or `prompt`: that of the last message of the user.
    Code, formulas, links and tags do not count. Lines are classified one by one, scripts within them kept apart; Latin
    letters in a text mostly of another script count as names. A text with fewer than `bytes_min` bytes of letters
    (UTF-8) is too short to tell and scores 1.0. An empty text scores 0.0. A text that hides its letters in code,
    formulas or links, so that fewer than `bytes_min` are left, scores 0.0. `among`: the languages to choose from;
    `language` is always one. A short prompt may be taken for a language near to its own (Russian for Bulgarian)
    unless `among` excludes it. Metric: the share. Raises ValueError for a code that py3langid does not know.

    >>> verify = make("de"); verify(response="Die Summe von zwei und zwei ist also vier.", prompt=[])
    {'score': 1.0, 'share': 1.0, 'language': 'de'}
    >>> verify(response="The sum of two and two is therefore four.", prompt=[])
    {'score': 0.0, 'share': 0.0, 'language': 'en'}
    """
    wanted = () if language == "prompt" else (language,) if isinstance(language, str) else tuple(language)
    identifier = copy.copy(_identifier())
    if unknown := sorted({*wanted, *among} - set(identifier.labels)):
        raise ValueError(f"py3langid knows no language {', '.join(unknown)}; it knows {', '.join(identifier.labels)}")
    identifier.set_languages({*wanted, *among})

    @lru_cache(maxsize=4096)
    def language_of(text: str) -> str:
        return str(identifier.classify(text)[0])

    def language_(response: str, prompt: Sequence[Mapping[str, Any]]) -> RewardReturn:
        of_row = wanted
        if not wanted:
            *_, question = [None, *(message["content"] for message in prompt if message.get("role") == "user")]
            if not isinstance(question, str) or not _letter_bytes(question):
                raise ValueError("the prompt has no message of a user to tell the language by")
            of_row = (language_of(_NO_LANGUAGE.sub(" ", question)),)
        letters: Counter[str] = Counter()
        for piece in _pieces(_NO_LANGUAGE.sub(" ", response), bytes_min):
            scripts = Counter(_script(character) for character in piece if character.isalpha())
            main = scripts.most_common(1)[0][0]
            of_main = scripts[main] + (scripts["LATIN"] if main != "LATIN" else 0)  # names, in another main script
            letters[language_of(piece)] += of_main
            letters["other"] += scripts.total() - of_main
        if not letters:
            short = response.strip() and _letter_bytes(_COMMAND.sub(" ", response)) < bytes_min
            return {"score": 1.0, "share": 1.0} if short else {"score": 0.0, "share": 0.0}
        share = sum(letters[code] for code in of_row) / letters.total()
        score = float(share >= at_least) if at_least else share
        return {"score": score, "share": share, "language": letters.most_common(1)[0][0]}

    return language_


@cache
def _identifier() -> Any:
    """Loads the model: half a second."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ModuleNotFoundError as error:
        raise ValueError("language needs the package py3langid: pip install py3langid") from error
    return LanguageIdentifier.from_model_file(MODEL_FILE)


def _pieces(text: str, bytes_min: int) -> Iterator[str]:
    """Yields the lines, short ones joined. Joins a last one that is too short to the one before."""
    pieces: list[str] = []
    enough = max(PIECE_BYTES, bytes_min)
    size = enough
    for line in text.splitlines():
        if of_line := _letter_bytes(line):
            if size >= enough:
                pieces.append("")
                size = 0
            pieces[-1] += " " + line.strip()
            size += of_line
    if len(pieces) > 1 and size < enough:
        pieces[-2:] = ["".join(pieces[-2:])]
    yield from (piece.strip() for piece in pieces if _letter_bytes(piece) >= bytes_min)


def _letter_bytes(text: str) -> int:
    return len("".join(filter(str.isalpha, text)).encode(errors="replace"))


@lru_cache(maxsize=65536)
def _script(character: str) -> str:
    script = unicodedata.name(character, "").partition(" ")[0]
    return "ASIAN" if script in _ASIAN else script
