"""Sentences, words and languages of a response, counted as the IFEval benchmark counts them.

IFEval uses nltk's Punkt with parameters that were learned from newspapers and are downloaded apart from nltk. Here the
same algorithm runs with the abbreviations and frequent words of words.txt, so that nothing is downloaded and every
machine counts alike. docs/rewards.md says how closely the two agree.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nltk.tokenize.destructive import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktSentenceTokenizer

_TABLES = re.split(r"^#.*\n", Path(__file__).with_name("words.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
ABBREVIATIONS, STARTERS, FREQUENT = (table.split() for table in _TABLES[1:])

_ORTHO_BEGINS_UPPER, _ORTHO_INSIDE_LOWER = 1 << 1, 1 << 5  # flags of nltk.tokenize.punkt


def load() -> None:
    """Loads the packages and tables, a second or so. Raises ValueError that names what to install."""
    try:
        _sentence_tokenizer()
        _word_tokenizer()
        _languages()
        language_of("This loads the tables of letters.")
    except ImportError as missing:
        fix = "pip install 'megagrpo[ifeval]'"
        raise ValueError(f"ifeval needs the packages nltk and langdetect, {missing.name} is not here: {fix}") from None


def sentences(text: str) -> list[str]:
    """Returns the sentences by Punkt (Kiss & Strunk 2006, doi:10.1162/coli.2006.32.4.485), without spaces around them.

    >>> sentences("Dr. Smith paid $3.50. Did he? He did!")
    ['Dr. Smith paid $3.50.', 'Did he?', 'He did!']
    """
    return [text[start:end].strip() for start, end in _sentence_tokenizer().span_tokenize(text)]


def tokens(text: str) -> list[str]:
    """Returns words and punctuation, as the Penn Treebank splits them.

    >>> tokens("DON'T stop, NASA.")
    ['DO', "N'T", 'stop', ',', 'NASA', '.']
    """
    words = _word_tokenizer()
    return [token for sentence in sentences(text) for token in words.tokenize(sentence)]


@lru_cache(maxsize=64)
def language_of(text: str) -> str:
    """Returns the ISO 639-1 code of the likeliest language, such as `en` or `zh-cn`; empty for a text without letters.

    Uses langdetect with a fixed seed: the same text always has the same language.

    >>> language_of("Die Katze schläft auf dem Sofa."), language_of("1 + 1 = 2")
    ('de', '')
    """
    import langdetect

    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return ""


def is_language(text: str, code: str) -> bool:
    """Returns whether language_of(text) is `code`; `zh` admits `zh-cn`, `zh-tw`. Raises ValueError if unknown."""
    if code not in _languages():
        raise ValueError(f"language {code!r} is not among {', '.join(sorted(_languages()))}")
    return language_of(text) in (code, f"{code}-cn", f"{code}-tw")


@cache
def _languages() -> frozenset[str]:
    import langdetect

    return frozenset({path.name for path in Path(langdetect.PROFILES_DIRECTORY).iterdir()} | {"zh"})


@cache
def _sentence_tokenizer() -> PunktSentenceTokenizer:
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    parameters = PunktParameters()
    parameters.abbrev_types.update(ABBREVIATIONS)
    parameters.sent_starters.update(STARTERS)
    for word in FREQUENT + STARTERS:
        if word != "i":  # never in lower case
            parameters.ortho_context[word] = _ORTHO_BEGINS_UPPER | _ORTHO_INSIDE_LOWER
    return PunktSentenceTokenizer(parameters)


@cache
def _word_tokenizer() -> NLTKWordTokenizer:
    from nltk.tokenize.destructive import NLTKWordTokenizer

    return NLTKWordTokenizer()
