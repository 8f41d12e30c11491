"""The 25 constraints of IFEval (Zhou et al. 2023, arXiv:2311.07911), and the 29 of IFTrain (arXiv:2507.02833).

Each is a function of the response and its arguments, which have the names of the data. Sources: google-research,
instruction_following_eval/instructions.py, and open_instruct/IFEvalG/instructions.py. Every expression takes time in
proportion to the response's length, whatever is in it; results are those of the originals, but for the differences that
docs/rewards.md lists.
"""
# ruff: noqa: N803 (arguments have the names of the data)

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Literal

from megagrpo.reward.verifiers.ifeval import text

Relation = Literal["less than", "at least"]
Quantifier = Literal["at least", "around", "at most"]

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""Texts that detectable_format:constrained_response allows: its data carries no arguments."""

JSON_FENCES = ("```json", "```Json", "```JSON", "```")


def holds(count: int, relation: Relation | Quantifier, limit: int, tolerance: int | None = None) -> bool:
    """Compares a count with a limit; `around` is at most `tolerance` away: by default a tenth, at least 1."""
    if relation == "around":
        return abs(count - limit) <= (max(round(limit * 0.1), 1) if tolerance is None else tolerance)
    return {"less than": count < limit, "at least": count >= limit, "at most": count <= limit}[relation]


def keywords__existence(response: str, keywords: list[str]) -> bool:
    """Checks that each keyword is in the response, in any case, within words too.

    >>> keywords__existence("Scattered clouds.", keywords=["cat", "CLOUD"])
    True
    """
    return all(re.search(re.escape(keyword), response, re.IGNORECASE) for keyword in keywords)


def keywords__frequency(response: str, keyword: str, frequency: int, relation: Relation) -> bool:
    """Checks how often the keyword occurs, in any case, within words too."""
    return holds(occurrences(response, keyword), relation, frequency)


def occurrences(response: str, keyword: str) -> int:
    return len(re.findall(re.escape(keyword.strip()), response, re.IGNORECASE))


def keywords__forbidden_words(response: str, forbidden_words: list[str]) -> bool:
    """Checks that none of the words is in the response as a word of its own.

    >>> keywords__forbidden_words("Scattered clouds.", forbidden_words=["cat", "cloud"])
    True
    """
    for word in forbidden_words:  # with a boundary only at a letter's side: for C++, only before it
        before = r"(?<!\w)" if re.match(r"\w", word) else ""
        after = r"(?!\w)" if re.search(r"\w\Z", word) else ""
        if re.search(before + re.escape(word) + after, response, re.IGNORECASE):
            return False
    return True


def keywords__letter_frequency(response: str, letter: str, let_frequency: int, let_relation: Relation) -> bool:
    """Checks how often one character (a letter, #, ...) occurs, in either case. Raises ValueError for more than one."""
    if len(letter) != 1:
        raise ValueError(f"letter is {letter!r}, not one character")
    return holds(response.lower().count(letter.lower()), let_relation, let_frequency)


def language__response_language(response: str, language: str) -> bool:
    """Checks that the likeliest language of the whole response is this one (ISO 639-1)."""
    return text.is_language(response, language)


def length_constraints__number_sentences(response: str, num_sentences: int, relation: Relation) -> bool:
    return holds(len(text.sentences(response)), relation, num_sentences)


def length_constraints__number_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Checks the number of paragraphs between dividers `***`. Only those at the start and end may be empty."""
    return has_parts(re.split(r"\s?\*\*\*\s?", response), num_paragraphs)


def has_parts(parts: list[str], count: int) -> bool:
    """Checks that so many parts have text, and that only the first and the last may be empty."""
    return sum(map(bool, map(str.strip, parts))) == count and all(map(str.strip, parts[1:-1]))


def length_constraints__number_words(response: str, num_words: int, relation: Relation) -> bool:
    """Checks the number of runs of letters, digits and underscores: "It's 3.5 km" has five."""
    return holds(len(re.findall(r"\w+", response)), relation, num_words)


def length_constraints__nth_paragraph_first_word(
    response: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    r"""Checks the number of paragraphs, split by empty lines, and the first word of the nth of them (from 1).

    >>> length_constraints__nth_paragraph_first_word("One.\n\nTwo?\n\n", 2, 2, first_word="two")
    True
    """
    if not 1 <= nth_paragraph <= num_paragraphs:
        raise ValueError(f"nth_paragraph is {nth_paragraph}, of {num_paragraphs} paragraphs")
    paragraphs = response.split("\n\n")
    if sum(map(bool, map(str.strip, paragraphs))) != num_paragraphs or not paragraphs[nth_paragraph - 1].strip():
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def detectable_content__number_placeholders(response: str, num_placeholders: int) -> bool:
    """Checks for at least so many placeholders such as [address], each on one line."""
    return placeholder_count(response) >= num_placeholders


def placeholder_count(response: str) -> int:
    # A bracket that is not closed takes the rest of its line: none after it can be closed either.
    return re.findall(r"\[[^\]\n]*(\]?)", response).count("]")


def detectable_content__postscript(response: str, postscript_marker: str) -> bool:
    """Checks that the marker occurs, in any case; P.S. and P.P.S may have spaces between their letters."""
    marker = postscript_marker.strip()
    spaced = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(spaced.get(marker, re.escape(marker.lower())), response.lower()) is not None


def detectable_format__number_bullet_lists(response: str, num_bullets: int) -> bool:
    r"""Checks that exactly so many lines begin with `*` (one, not more) or `-`.

    >>> detectable_format__number_bullet_lists("* one\n - two\n**bold**", num_bullets=2)
    True
    """
    stars = re.findall(r"^[^\S\n]*\*[^*].*$", response, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-", response, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


def detectable_format__constrained_response(response: str) -> bool:
    """Checks that one of OPTIONS is in the response, as it is written there."""
    return any(option in response for option in OPTIONS)


def detectable_format__number_highlighted_sections(response: str, num_highlights: int) -> bool:
    """Checks for at least so many *highlighted* or **highlighted** pieces within lines.

    >>> detectable_format__number_highlighted_sections("*one* and **two**, but not ** **", num_highlights=3)
    False
    """
    single = [piece.strip("*") for piece in re.findall(r"\*[^\n*]*\*", response)]
    double = [piece[2:-2] for piece in re.findall(r"\*\*[^\n*]*\*\*", response)]
    return sum(1 for piece in single + double if piece.strip()) >= num_highlights


def detectable_format__multiple_sections(response: str, section_spliter: str, num_sections: int) -> bool:
    """Checks for at least so many headings of the word and a number, such as `SECTION 1`."""
    heading = re.escape(section_spliter.strip()) + r"\s?\d+"
    return len(re.findall(heading, response)) >= num_sections


def detectable_format__json_format(response: str) -> bool:
    """Checks that the whole response is JSON, in a Markdown fence or not."""
    body = response.strip()
    for fence in JSON_FENCES:
        body = body.removeprefix(fence)
    return is_json(body.removesuffix("```").strip())


def is_json(response: str) -> bool:
    """Checks that the whole response is JSON, without a fence."""
    try:
        json.loads(response)
    except (ValueError, RecursionError):
        return False
    return True


def detectable_format__title(response: str) -> bool:
    """Checks that a line has a title that is not empty, such as <<poem of joy>>."""
    for line in response.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def combination__two_responses(response: str) -> bool:
    """Checks for two different answers with six asterisks between them."""
    parts = [part.strip() for part in response.split("******")]
    return has_parts(parts, 2) and len({*parts} - {""}) == 2


def combination__repeat_prompt(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def startend__end_checker(response: str, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def startend__quotation(response: str) -> bool:
    """Checks that the whole response is within double quotation marks."""
    return is_quoted(response.strip())


def is_quoted(response: str) -> bool:
    return len(response) > 1 and response[0] == response[-1] == '"'


def change_case__capital_word_frequency(response: str, capital_frequency: int, capital_relation: Relation) -> bool:
    """Checks the number of words in capitals only. `A-B` is one word; DON'T is two."""
    capitals = sum(1 for token in text.tokens(response) if token.isupper())
    return holds(capitals, capital_relation, capital_frequency)


def change_case__english_capital(response: str) -> bool:
    """Checks that the response is English without a small letter."""
    return response.isupper() and text.is_language(response, "en")


def change_case__english_lowercase(response: str) -> bool:
    """Checks that the response is English without a capital."""
    return response.islower() and text.is_language(response, "en")


def punctuation__no_comma(response: str) -> bool:
    return "," not in response


# --- IFTrain: what open-instruct's IF-multi-constraints has beside IFEval's constraints -------------------------------


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
    return occurrences(response, keyword) == 1


def count__count_increment_word(response: str, keyword1: str, keyword2: str) -> bool:
    """Checks that keyword1 occurs once and keyword2 twice, in any case, within words too."""
    return occurrences(response, keyword1) == 1 and occurrences(response, keyword2) == 2


def keywords__exclude_word_harder(response: str, keyword: str) -> bool:
    """Checks that the keyword is not in the response as a word of its own."""
    return keywords__forbidden_words(response, [keyword.strip()])


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
    return length_constraints__number_paragraphs(response, 2)


def paragraphs__paragraphs2(response: str) -> bool:
    """Checks for two paragraphs, with one empty line between."""
    return has_parts(response.split("\n\n"), 2)


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
    return holds(len(re.findall("[a-zA-Z]", response)), relation, N)


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
keywords__word_count_different_numbers = keywords__frequency
letters__letter_counting2 = keywords__letter_frequency
