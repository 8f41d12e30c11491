"""The 29 constraints that open-instruct's IF-multi-constraints has beside IFEval's: IFTrain (arXiv:2507.02833).

Source: open_instruct/IFEvalG/instructions.py. The names of arguments are those of its data. Sentences and words are
those of `text.py`. Results are those of the originals, but for the differences that docs/rewards.md lists.
"""
# ruff: noqa: N803 (arguments have the names of the data)

from __future__ import annotations

import re
from itertools import pairwise

from megagrpo.reward.verifiers.ifeval import constraints, text
from megagrpo.reward.verifiers.ifeval.constraints import Relation


def copy__copy(response: str, prompt_to_repeat: str) -> bool:
    """Checks that the response is the prompt, in any case."""
    return _same(response, prompt_to_repeat)


def copy__copying_multiple(response: str, prompt_to_repeat: str, N: int) -> bool:
    """Checks that the response is the prompt N times, with six asterisks between."""
    copies = response.split("******")
    return len(copies) == N and all(_same(copy, prompt_to_repeat) for copy in copies)


def new__copy_span_idx(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """Checks that the response is the prompt's characters from n_start up to n_end, with or without the one at n_end.

    >>> new__copy_span_idx("Be", "Be brief", 0, n_end=2), new__copy_span_idx("Be b", "Be brief", 0, n_end=3)
    (True, True)
    """
    spans = [prompt_to_repeat[n_start:end] for end in (n_end, n_end + 1)]
    if not spans[1].strip():
        raise ValueError(f"there is no text from {n_start} to {n_end} of {len(prompt_to_repeat)} characters")
    return any(_same(response, span) for span in spans if span.strip())


def _same(one: str, other: str) -> bool:
    return one.strip().lower() == other.strip().lower()


def copy__repeat_phrase(response: str, phrase: str, small_n: int) -> bool:
    """Checks for so many copies of the phrase, each with one word changed that is neither its first nor its last.

    >>> copy__repeat_phrase("Time runs when having fun. Time flies when losing fun.", "Time flies when having fun", 2)
    True
    """
    words = phrase.split()
    if len(words) < 3:
        raise ValueError(f"the phrase {phrase!r} has no word between its first and its last")
    first, last = words[0] + " ", " " + words[-1]
    copies = [piece.split() for line in response.split("\n") for piece in _pieces(line, first, last)]
    return len(copies) == small_n and all(
        len(copy) == len(words) and sum(map(str.__ne__, copy, words)) == 1 for copy in copies
    )


def _pieces(line: str, first: str, last: str) -> list[str]:
    """Returns each shortest piece from `first` to `last`, none within another."""
    pieces: list[str] = []
    end = 0
    while (start := line.find(first, end)) >= 0 and (behind := line.find(last, start + len(first))) >= 0:
        end = behind + len(last)
        pieces.append(line[start:end])
    return pieces


def detectable_format__sentence_hyphens(response: str) -> bool:
    """Checks that hyphens, without spaces, connect all sentences, and nothing else.

    >>> [detectable_format__sentence_hyphens(text) for text in ("It rains.-Stay in!", "It rains. Stay in!")]
    [True, False]
    """
    return response.split("-") == text.sentences(response.replace("-", " "))


def detectable_format__square_brackets(response: str) -> bool:
    """Checks that words are in brackets: [each] [of] [them]."""
    return all(word.startswith("[") and word.endswith("]") for word in response.split())


def detectable_format__bigram_wrapping(response: str) -> bool:
    """Checks that each pair of words is <<in such>> <<brackets as>> <<these are>>. An odd last word may be without."""
    words = response.split()
    return all(
        one.startswith("<<") and other.endswith(">>") for one, other in zip(words[::2], words[1::2], strict=False)
    )


def keywords__no_adjacent_consecutive(response: str) -> bool:
    """Checks that no word's first letter follows the previous word's in the alphabet, as in `a big` or `No one`."""
    firsts = [word[0].lower() for word in response.split()]
    return all(len(one) == len(other) == 1 and ord(other) - ord(one) != 1 for one, other in pairwise(firsts))


def keywords__word_once(response: str, keyword: str) -> bool:
    """Checks that the keyword occurs once, in any case, within words too."""
    return constraints.occurrences(response, keyword) == 1


def count__count_increment_word(response: str, keyword1: str, keyword2: str) -> bool:
    """Checks that keyword1 occurs once and keyword2 twice, in any case, within words too."""
    return constraints.occurrences(response, keyword1) == 1 and constraints.occurrences(response, keyword2) == 2


def keywords__exclude_word_harder(response: str, keyword: str) -> bool:
    """Checks that the keyword is not in the response as a word of its own."""
    return constraints.keywords__forbidden_words(response, [keyword.strip()])


def keywords__palindrome(response: str) -> bool:
    """Checks that some word, with its punctuation, reads the same backwards, in the same case. `a` counts."""
    return any(word == word[::-1] for word in response.split())


def keywords__keyword_specific_position(response: str, keyword: str, n: int, m: int) -> bool:
    """Checks that the mth word of the nth sentence (from 1) is the keyword, with punctuation as words or without.

    >>> keywords__keyword_specific_position("Yes. Well, rain came.", "rain", n=2, m=2)
    True
    """
    if n < 1 or m < 1:
        raise ValueError(f"n is {n} and m is {m}, which count from 1")
    sentences = text.sentences(response)
    return len(sentences) >= n and any(
        words[m - 1 : m] == [keyword.strip()] for words in _words_both_ways(sentences[n - 1])
    )


def keywords__start_end(response: str) -> bool:
    """Checks that the first and the last word are the same, in any case, and that nothing follows."""
    words = text.tokens(response)
    return len(words) >= 2 and words[0].lower() == words[-1].lower()


def paragraphs__paragraphs(response: str) -> bool:
    """Checks for two paragraphs, with `***` between."""
    return constraints.length_constraints__number_paragraphs(response, 2)


def paragraphs__paragraphs2(response: str) -> bool:
    """Checks for two paragraphs, with one empty line between."""
    return constraints.has_parts(response.split("\n\n"), 2)


def first_word__first_word_sent(response: str, first_word: str) -> bool:
    """Checks that each sentence begins with this word, in any case, without a comma at it."""
    return all(_same(sentence.split()[0], first_word) for sentence in text.sentences(response))


def first_word__first_word_answer(response: str, first_word: str) -> bool:
    return _same(response.split()[0], first_word)


def last_word__last_word_sent(response: str, last_word: str) -> bool:
    """Checks that each sentence ends with this word, in any case, whatever punctuation follows it."""
    return all(last_word__last_word_answer(sentence, last_word) for sentence in text.sentences(response))


def last_word__last_word_answer(response: str, last_word: str) -> bool:
    return _same(*(re.sub(r"\W", "", word) for word in (response.split()[-1], last_word)))


def punctuation__punctuation_dot(response: str) -> bool:
    return "." not in response


def punctuation__punctuation_exclamation(response: str) -> bool:
    return "!" not in response


def count__lowercase_counting(response: str, N: int) -> bool:
    """Checks that at most N words are in small letters only; DON't has one, and Aa_b has none."""
    return len(re.findall(r"\b[a-z]+\b", response)) <= N


def letters__letter_counting(response: str, N: int, relation: Relation) -> bool:
    """Checks the number of letters from A to Z, in either case."""
    return constraints.holds(len(re.findall("[a-zA-Z]", response)), relation, N)


def count__counting_composition(response: str, n_sent: int, n_words: int) -> bool:
    """Checks for three paragraphs, with `***` or `* * *` between, of n_sent sentences with n_words words each.

    Punctuation counts as words in all of them, or in none.

    >>> count__counting_composition("I am. *** You are. *** He is.", n_sent=1, n_words=2)
    True
    """
    paragraphs = [text.sentences(part) for part in re.split(r"\*\*\*|\* \* \*", response)]
    if len(paragraphs) != 3 or any(len(sentences) != n_sent for sentences in paragraphs):
        return False
    both_ways = [_words_both_ways(sentence) for sentences in paragraphs for sentence in sentences]
    return any(all(len(words) == n_words for words in way) for way in zip(*both_ways, strict=True))


def count__count_unique(response: str) -> bool:
    """Checks that no word occurs twice; `The` and `the` are two words, and so are `it` and `'s`."""
    words = _words_both_ways(response)[1]
    return len(words) == len(set(words))


def _words_both_ways(sentence: str) -> tuple[list[str], list[str]]:
    """Returns words and punctuation as the Penn Treebank splits them, and the words alone."""
    tokens = text.tokens(sentence)
    return tokens, [token for token in tokens if re.search(r"\w", token)]


copy__copying_simple = copy__copy
keywords__word_count_different_numbers = constraints.keywords__frequency
letters__letter_counting2 = constraints.keywords__letter_frequency
