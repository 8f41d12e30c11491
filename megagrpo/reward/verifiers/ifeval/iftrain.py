"""The 29 constraints that open-instruct's IF-multi-constraints has beside IFEval's: IFTrain (arXiv:2507.02833).

Source: open_instruct/IFEvalG/instructions.py. The names of arguments are those of its data. Sentences and words are
those of `text.py`. Results are those of the originals, but for the differences that docs/rewards.md lists.
"""
# ruff: noqa: N803 (arguments have the names of the data)

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from megagrpo.reward.verifiers.ifeval import constraints, text
from megagrpo.reward.verifiers.ifeval.constraints import Relation


def copy_prompt(response: str, prompt_to_repeat: str) -> bool:
    """Checks that the response is the prompt, in any case."""
    return _same(response, prompt_to_repeat)


def copy_prompt_often(response: str, prompt_to_repeat: str, N: int) -> bool:
    """Checks that the response is the prompt N times, with six asterisks between."""
    copies = response.split("******")
    return len(copies) == N and all(_same(copy, prompt_to_repeat) for copy in copies)


def copy_span(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """Checks that the response is the prompt's characters from n_start up to n_end, with or without the one at n_end.

    >>> copy_span("Be", "Be brief", n_start=0, n_end=2), copy_span("Be b", "Be brief", n_start=0, n_end=3)
    (True, True)
    """
    spans = [prompt_to_repeat[n_start:end] for end in (n_end, n_end + 1)]
    if not spans[1].strip():
        raise ValueError(f"there is no text from {n_start} to {n_end} of {len(prompt_to_repeat)} characters")
    return any(_same(response, span) for span in spans if span.strip())


def _same(one: str, other: str) -> bool:
    return one.strip().lower() == other.strip().lower()


def copy_repeat_phrase(response: str, phrase: str, small_n: int) -> bool:
    """Checks for so many copies of the phrase, each with one word changed that is neither its first nor its last.

    >>> copy_repeat_phrase("Time runs when having fun. Time flies when losing fun.", "Time flies when having fun", 2)
    True
    """
    words = phrase.split()
    if len(words) < 3:
        raise ValueError(f"the phrase {phrase!r} has no word between its first and its last")
    found = [piece.split() for line in response.split("\n") for piece in _pieces(line, words[0] + " ", " " + words[-1])]
    return len(found) == small_n and all(
        len(piece) == len(words) and sum(one != other for one, other in zip(piece, words, strict=True)) == 1
        for piece in found
    )


def _pieces(line: str, first: str, last: str) -> list[str]:
    """Returns each shortest piece from `first` to `last`, none within another."""
    pieces: list[str] = []
    end = 0
    while (start := line.find(first, end)) >= 0 and (behind := line.find(last, start + len(first))) >= 0:
        end = behind + len(last)
        pieces.append(line[start:end])
    return pieces


def format_sentence_hyphens(response: str) -> bool:
    """Checks that hyphens, without spaces, connect all sentences, and nothing else.

    >>> format_sentence_hyphens("It rains.-Stay in!"), format_sentence_hyphens("It rains. Stay in!")
    (True, False)
    """
    return response.split("-") == text.sentences(response.replace("-", " "))


def format_square_brackets(response: str) -> bool:
    """Checks that words are in brackets: [each] [of] [them]."""
    return all(word.startswith("[") and word.endswith("]") for word in response.split())


def format_bigram_wrapping(response: str) -> bool:
    """Checks that each pair of words is <<in such>> <<brackets as>> <<these are>>. An odd last word may be without."""
    words = response.split()
    return all(
        one.startswith("<<") and other.endswith(">>") for one, other in zip(words[::2], words[1::2], strict=False)
    )


def keywords_no_adjacent_consecutive(response: str) -> bool:
    """Checks that no word's first letter follows the previous word's in the alphabet, as in `a big` or `No one`."""
    firsts = [word[0].lower() for word in response.split()]
    return all(len(one) == len(other) == 1 and ord(other) - ord(one) != 1 for one, other in pairwise(firsts))


def keywords_word_once(response: str, keyword: str) -> bool:
    """Checks that the keyword occurs once, in any case, within words too."""
    return constraints.occurrences(response, keyword) == 1


def count_increment_word(response: str, keyword1: str, keyword2: str) -> bool:
    """Checks that keyword1 occurs once and keyword2 twice, in any case, within words too."""
    return constraints.occurrences(response, keyword1) == 1 and constraints.occurrences(response, keyword2) == 2


def keywords_exclude_word_harder(response: str, keyword: str) -> bool:
    """Checks that the keyword is not in the response as a word of its own."""
    return constraints.keywords_forbidden_words(response, [keyword.strip()])


def keywords_palindrome(response: str) -> bool:
    """Checks that some word, with its punctuation, reads the same backwards, in the same case. `a` counts."""
    return any(word == word[::-1] for word in response.split())


def keywords_keyword_specific_position(response: str, keyword: str, n: int, m: int) -> bool:
    """Checks that the mth word of the nth sentence (from 1) is the keyword, with punctuation as words or without.

    >>> keywords_keyword_specific_position("Yes. Well, rain came.", "rain", n=2, m=2)
    True
    """
    if n < 1 or m < 1:
        raise ValueError(f"n is {n} and m is {m}, which count from 1")
    sentences = text.sentences(response)
    return len(sentences) >= n and any(
        words[m - 1 : m] == [keyword.strip()] for words in _words_both_ways(sentences[n - 1])
    )


def keywords_start_end(response: str) -> bool:
    """Checks that the first and the last word are the same, in any case, and that nothing follows."""
    words = text.tokens(response)
    return len(words) >= 2 and words[0].lower() == words[-1].lower()


def paragraphs_by_dividers(response: str) -> bool:
    """Checks for two paragraphs, with `***` between."""
    return constraints.length_number_paragraphs(response, 2)


def paragraphs_by_empty_lines(response: str) -> bool:
    """Checks for two paragraphs, with one empty line between."""
    paragraphs = response.split("\n\n")
    filled = sum(1 for paragraph in paragraphs if paragraph.strip())
    return filled == 2 and all(paragraph.strip() for paragraph in paragraphs[1:-1])


def first_word_of_sentences(response: str, first_word: str) -> bool:
    """Checks that each sentence begins with this word, in any case, without a comma at it."""
    return all(_same(sentence.split()[0], first_word) for sentence in text.sentences(response))


def first_word_of_answer(response: str, first_word: str) -> bool:
    return _same(response.split()[0], first_word)


def last_word_of_sentences(response: str, last_word: str) -> bool:
    """Checks that each sentence ends with this word, in any case, whatever punctuation follows it."""
    return all(last_word_of_answer(sentence, last_word) for sentence in text.sentences(response))


def last_word_of_answer(response: str, last_word: str) -> bool:
    return _same(*(re.sub(r"\W", "", word) for word in (response.split()[-1], last_word)))


def punctuation_dot(response: str) -> bool:
    return "." not in response


def punctuation_exclamation(response: str) -> bool:
    return "!" not in response


def count_lowercase(response: str, N: int) -> bool:
    """Checks that at most N words are in small letters only; DON't has one, and Aa_b has none."""
    return len(re.findall(r"\b[a-z]+\b", response)) <= N


def letters_number(response: str, N: int, relation: Relation) -> bool:
    """Checks the number of letters from A to Z, in either case."""
    return constraints.holds(len(re.findall("[a-zA-Z]", response)), relation, N)


def count_composition(response: str, n_sent: int, n_words: int) -> bool:
    """Checks for three paragraphs, with `***` or `* * *` between, of n_sent sentences with n_words words each.

    Punctuation counts as words in all of them, or in none.

    >>> count_composition("I am. *** You are. *** He is.", n_sent=1, n_words=2)
    True
    """
    paragraphs = [text.sentences(part) for part in re.split(r"\*\*\*|\* \* \*", response)]
    if len(paragraphs) != 3 or any(len(sentences) != n_sent for sentences in paragraphs):
        return False
    both_ways = [_words_both_ways(sentence) for sentences in paragraphs for sentence in sentences]
    return any(all(len(words) == n_words for words in way) for way in zip(*both_ways, strict=True))


def count_unique(response: str) -> bool:
    """Checks that no word occurs twice; `The` and `the` are two words, and so are `it` and `'s`."""
    words = _words_both_ways(response)[1]
    return len(words) == len(set(words))


def _words_both_ways(sentence: str) -> tuple[list[str], list[str]]:
    """Returns words and punctuation as the Penn Treebank splits them, and the words alone."""
    tokens = text.tokens(sentence)
    return tokens, [token for token in tokens if re.search(r"\w", token)]


BY_ID: dict[str, Callable[..., bool]] = {
    "copy:copy": copy_prompt,
    "copy:copying_simple": copy_prompt,
    "copy:copying_multiple": copy_prompt_often,
    "copy:repeat_phrase": copy_repeat_phrase,
    "new:copy_span_idx": copy_span,
    "detectable_format:sentence_hyphens": format_sentence_hyphens,
    "detectable_format:square_brackets": format_square_brackets,
    "detectable_format:bigram_wrapping": format_bigram_wrapping,
    "keywords:no_adjacent_consecutive": keywords_no_adjacent_consecutive,
    "keywords:word_once": keywords_word_once,
    "keywords:word_count_different_numbers": constraints.keywords_frequency,
    "keywords:exclude_word_harder": keywords_exclude_word_harder,
    "keywords:palindrome": keywords_palindrome,
    "keywords:keyword_specific_position": keywords_keyword_specific_position,
    "keywords:start_end": keywords_start_end,
    "paragraphs:paragraphs": paragraphs_by_dividers,
    "paragraphs:paragraphs2": paragraphs_by_empty_lines,
    "first_word:first_word_sent": first_word_of_sentences,
    "first_word:first_word_answer": first_word_of_answer,
    "last_word:last_word_sent": last_word_of_sentences,
    "last_word:last_word_answer": last_word_of_answer,
    "punctuation:punctuation_dot": punctuation_dot,
    "punctuation:punctuation_exclamation": punctuation_exclamation,
    "count:lowercase_counting": count_lowercase,
    "count:counting_composition": count_composition,
    "count:count_unique": count_unique,
    "count:count_increment_word": count_increment_word,
    "letters:letter_counting": letters_number,
    "letters:letter_counting2": constraints.keywords_letter_frequency,
}
"""Every constraint by the id that the data has for it."""
