"""Sentences, words and languages of a response, counted as the IFEval benchmark counts them.

IFEval uses nltk's Punkt with parameters that were learned from newspapers and are downloaded apart from nltk. Here the
same algorithm runs with the abbreviations and frequent words below, so that nothing is downloaded and every machine
counts alike. docs/rewards.md says how closely the two agree.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nltk.tokenize.destructive import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktSentenceTokenizer

ABBREVIATIONS = """
    dr mr mrs ms messrs prof sen rep reps gen col lt maj adm st jr sr ave co corp inc ltd bros cos cie vs yr ft ct pa ga
    mg ok jan feb aug sep sept oct nov dec tues wed fri ala ariz calif colo conn fla ill kan ky mich minn nev okla ore
    tenn va vt wash wis w.va
    c d e f g h k l m n p r s t v w
    a.d a.m p.m d.c l.a n.c n.d n.h n.j n.m n.y s.c r.i u.k u.n u.s u.s.a u.s.s.r ph.d m.b.a j.p j.c j.r j.k r.j
"""
"""Without their last dot. `e.g.` and `i.e.` are left out: Punkt's English parameters lack them too."""

STARTERS = """
    according although among both but despite even he however i if in indeed instead it many meanwhile moreover most
    nevertheless nonetheless nor separately similarly since so some the there these they this though thus under when
    while yet
"""
"""A capitalised one of these after an abbreviation begins a sentence."""

FREQUENT = """
    a add after all also an and another answer any are as ask at be because before begin being between both brief
    briefly bring by can check choose closing come common conclusion consider could create current data define
    describe develop did different discuss discussion do documentation does during each early encourage end enjoy
    ensure establish evaluate every example explain explore few finally first focus follow for from further general
    get give go goals good had has have having help here highlight how identify implement importance important
    improve include increase initial into introduce introduction is just keep know last learn let like list
    listening local look main major make method methods monitor more much must new next no not now objective
    objectives of offer offering on once one only open or original our out over overview own performance perhaps
    play please potential practice preparation present primary problem project provide purpose question questions
    read reduce regular remember results same second secondary section see set she should show simple specific start
    step steps strong such summarize summary support take tell test than thank that their them then third through to
    together too topic total track traditional try type types understand until up use various very visit was we were
    what where whether which who whose why will with within without would write your
"""
"""Words that are capitalised only where a sentence begins."""

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


def sentence_count(text: str) -> int:
    """Returns the number of sentences, by Punkt (Kiss & Strunk 2006, doi:10.1162/coli.2006.32.4.485).

    >>> sentence_count("Dr. Smith paid $3.50. Did he? He did!")
    3
    """
    return len(sentences(text))


def sentences(text: str) -> list[str]:
    """Returns the sentences, without spaces around them."""
    return [text[start:end].strip() for start, end in _sentence_tokenizer().span_tokenize(text)]


def word_count(text: str) -> int:
    r"""Returns the number of runs of letters, digits and underscores.

    >>> word_count("It's 3.5 km")
    5
    """
    return len(re.findall(r"\w+", text))


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
    parameters.abbrev_types.update(ABBREVIATIONS.split())
    parameters.sent_starters.update(STARTERS.split())
    for word in (FREQUENT + STARTERS).split():
        if word != "i":  # never in lower case
            parameters.ortho_context[word] = _ORTHO_BEGINS_UPPER | _ORTHO_INSIDE_LOWER
    return PunktSentenceTokenizer(parameters)


@cache
def _word_tokenizer() -> NLTKWordTokenizer:
    from nltk.tokenize.destructive import NLTKWordTokenizer

    return NLTKWordTokenizer()
