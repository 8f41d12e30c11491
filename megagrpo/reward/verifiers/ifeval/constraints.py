"""The constraints: 25 of IFEval, 29 of IFTrain (by id), and 25 of open-instruct's older data, RLVR-IFeval (by name).

Sources: google-research, instruction_following_eval/instructions.py (arXiv:2311.07911), open_instruct/IFEvalG/
instructions.py (arXiv:2507.02833) and open_instruct/if_functions.py. The functions of RLVR-IFeval check the same kinds
of constraints, but other sentences of the prompt ask for them, so they count differently: exactly N times, around N
words. Results are those of the originals, but for the differences that docs/rewards.md lists. Every expression takes
time in proportion to the response's length, whatever is in it.
"""
# ruff: noqa: N803 (arguments have the names of the data)

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

from megagrpo.reward.verifiers.ifeval import text

Relation = Literal["less than", "at least"]
Quantifier = Literal["at least", "around", "at most"]

ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), Relation),
    "quantifier": Quantifier,
    **dict.fromkeys(("keywords", "forbidden_words", "keyword_list"), list[str]),
    "options": list[str] | str,
    **dict.fromkeys(
        ("keyword", "keyword1", "keyword2", "word", "letter", "language", "first_word", "last_word", "phrase",
         "postscript_marker", "section_spliter", "section_splitter", "prompt_to_repeat", "original_prompt",
         "end_phrase"), str,
    ),
}  # fmt: skip
"""Types of the constraints' arguments, by their names in the data. All others are numbers, from 0 up."""

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""Texts that detectable_format:constrained_response allows: its data carries no arguments."""

JSON_FENCES = ("```json", "```Json", "```JSON", "```")
SPACED_MARKERS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
BULLETS = (r"^[^\S\n]*\*[^*].*$", r"^[^\S\n]*-")
"""Lines that begin with `*` (one, not more) or `-`."""
_SENTENCE_END = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?!])\s")


def holds(count: int, relation: Relation | Quantifier, limit: int, tolerance: int | None = None) -> bool:
    """Compares a count with a limit; `around` is at most `tolerance` away: by default a tenth, at least 1."""
    if relation == "around":
        return abs(count - limit) <= (max(round(limit * 0.1), 1) if tolerance is None else tolerance)
    return {"less than": count < limit, "at least": count >= limit, "at most": count <= limit}[relation]


def occurrences(response: str, keyword: str) -> int:
    """Counts a keyword, in any case, within words too."""
    return len(re.findall(re.escape(keyword.strip()), response, re.IGNORECASE))


def has_none_of(response: str, forbidden_words: list[str]) -> bool:
    """Checks that none of the words is in the response as a word of its own."""
    for word in forbidden_words:  # with a boundary only at a letter's side: for C++, only before it
        before = r"(?<!\w)" if re.match(r"\w", word) else ""
        after = r"(?!\w)" if re.search(r"\w\Z", word) else ""
        if re.search(before + re.escape(word) + after, response, re.IGNORECASE):
            return False
    return True


def one_character(letter: str) -> str:
    """Returns the character (a letter, #, ...). Raises ValueError for more than one."""
    if len(letter) != 1:
        raise ValueError(f"letter is {letter!r}, not one character")
    return letter


def has_parts(parts: list[str], count: int) -> bool:
    """Checks that so many parts have text, and that only the first and the last may be empty."""
    return sum(map(bool, map(str.strip, parts))) == count and all(map(str.strip, parts[1:-1]))


def consists_of(parts: list[str], count: int, fits: Callable[[str], object]) -> bool:
    """Checks that there are so many parts, and that each fits."""
    return len(parts) == count and all(map(fits, parts))


def has_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Checks the number of paragraphs between dividers `***`. Only those at the start and end may be empty."""
    return has_parts(re.split(r"\s?\*\*\*\s?", response), num_paragraphs)


def nth_paragraph_first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Checks the number of paragraphs, split by empty lines, and the first word of the nth of them (from 1)."""
    if not 1 <= nth_paragraph <= num_paragraphs:
        raise ValueError(f"nth_paragraph is {nth_paragraph}, of {num_paragraphs} paragraphs")
    paragraphs = response.split("\n\n")
    if sum(map(bool, map(str.strip, paragraphs))) != num_paragraphs or not paragraphs[nth_paragraph - 1].strip():
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def nth_paragraph_start(response: str, N: int, first_word: str, i: int) -> bool:
    """Checks for N paragraphs, split by empty lines, and the start of the ith (from 1). Raises ValueError for i > N."""
    if not 1 <= i <= N:
        raise ValueError(f"i is {i}, of {N} paragraphs")
    paragraphs = response.split("\n\n")
    return len(paragraphs) == N and paragraphs[i - 1].strip().startswith(first_word)


def placeholder_count(response: str) -> int:
    """Counts placeholders such as [address], each on one line."""
    # A bracket that is not closed takes the rest of its line: none after it can be closed either.
    return re.findall(r"\[[^\]\n]*(\]?)", response).count("]")


def has_postscript(response: str, postscript_marker: str) -> bool:
    """Checks that the marker occurs, in any case; P.S. and P.P.S may have spaces between their letters."""
    marker = postscript_marker.strip()
    return re.search(SPACED_MARKERS.get(marker, re.escape(marker.lower())), response.lower()) is not None


def highlight_count(response: str) -> int:
    """Counts *highlighted* and **highlighted** pieces within lines."""
    single = [piece.strip("*") for piece in re.findall(r"\*[^\n*]*\*", response)]
    double = [piece[2:-2] for piece in re.findall(r"\*\*[^\n*]*\*\*", response)]
    return sum(1 for piece in single + double if piece.strip())


def is_json(response: str) -> bool:
    """Checks that the whole response is JSON, without a fence."""
    try:
        json.loads(response)
    except (ValueError, RecursionError):
        return False
    return True


def is_fenced_json(response: str) -> bool:
    """Checks that the whole response is JSON, in a Markdown fence or not."""
    body = response.strip()
    for fence in JSON_FENCES:
        body = body.removeprefix(fence)
    return is_json(body.removesuffix("```").strip())


def has_title(response: str) -> bool:
    """Checks that a line has a title that is not empty, such as <<poem of joy>>."""
    for line in response.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def two_responses(response: str) -> bool:
    """Checks for two different answers with six asterisks between them."""
    parts = [part.strip() for part in response.split("******")]
    return has_parts(parts, 2) and len({*parts} - {""}) == 2


def two_responses_once(response: str) -> bool:
    """Checks for two different answers with six asterisks between them, once."""
    first, asterisks, second = response.partition("******")
    return bool(asterisks) and "******" not in second and first.strip() != second.strip()


def is_quoted(response: str) -> bool:
    return len(response) > 1 and response[0] == response[-1] == '"'


def same(one: str, other: str) -> bool:
    return one.strip().lower() == other.strip().lower()


def copies_span(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """Checks that the response is the prompt's characters from n_start to n_end, with or without the one at n_end."""
    spans = [prompt_to_repeat[n_start:end] for end in (n_end, n_end + 1)]
    if not spans[1].strip():
        raise ValueError(f"there is no text from {n_start} to {n_end} of {len(prompt_to_repeat)} characters")
    return any(same(response, span) for span in spans if span.strip())


def repeats_phrase(response: str, phrase: str, small_n: int) -> bool:
    """Checks for so many copies of the phrase, each with one word changed that is neither its first nor its last."""
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


def wraps_bigrams(response: str) -> bool:
    """Checks that each pair of words is <<in such>> <<brackets as>> <<these are>>. An odd last word may be without."""
    words = response.split()
    return all(
        one.startswith("<<") and other.endswith(">>") for one, other in zip(words[::2], words[1::2], strict=False)
    )


def no_adjacent_consecutive(response: str) -> bool:
    """Checks that no word's first letter follows the previous word's in the alphabet, as in `a big` or `No one`."""
    firsts = [word[0].lower() for word in response.split()]
    return all(len(one) == len(other) == 1 and ord(other) - ord(one) != 1 for one, other in pairwise(firsts))


def keyword_position(response: str, keyword: str, n: int, m: int) -> bool:
    """Checks that the mth word of the nth sentence (from 1) is the keyword, with punctuation as words or without."""
    if n < 1 or m < 1:
        raise ValueError(f"n is {n} and m is {m}, which count from 1")
    sentences = text.sentences(response)
    return len(sentences) >= n and any(
        words[m - 1 : m] == [keyword.strip()] for words in words_both_ways(sentences[n - 1])
    )


def starts_as_it_ends(response: str) -> bool:
    """Checks that the first and the last word are the same, in any case, and that nothing follows."""
    words = text.tokens(response)
    return len(words) >= 2 and words[0].lower() == words[-1].lower()


def ends_with_word(response: str, last_word: str) -> bool:
    """Checks the last word, in any case, whatever punctuation follows it."""
    return same(*(re.sub(r"\W", "", word) for word in (response.split()[-1], last_word)))


def counting_composition(response: str, n_sent: int, n_words: int) -> bool:
    """Checks for three paragraphs, with `***` or `* * *` between, of n_sent sentences with n_words words each.

    Punctuation counts as words in all of them, or in none.
    """
    paragraphs = [text.sentences(part) for part in re.split(r"\*\*\*|\* \* \*", response)]
    if len(paragraphs) != 3 or any(len(sentences) != n_sent for sentences in paragraphs):
        return False
    both_ways = [words_both_ways(sentence) for sentences in paragraphs for sentence in sentences]
    return any(all(len(words) == n_words for words in way) for way in zip(*both_ways, strict=True))


def words_differ(response: str) -> bool:
    """Checks that no word occurs twice; `The` and `the` are two words, and so are `it` and `'s`."""
    words = words_both_ways(response)[1]
    return len(words) == len(set(words))


def words_both_ways(sentence: str) -> tuple[list[str], list[str]]:
    """Returns words and punctuation as the Penn Treebank splits them, and the words alone."""
    tokens = text.tokens(sentence)
    return tokens, [token for token in tokens if re.search(r"\w", token)]


def has_sections(response: str, N: int, section_splitter: str) -> bool:
    """Checks that the splitter splits the response into N parts, not counting an empty part before the first one."""
    sections = response.split(section_splitter)
    return len(sections) - (sections[0] == "") == N


Check = Callable[..., bool]
"""A function of a response and of arguments that have the names of the data."""

BY_ID: dict[str, Check] = {
    "keywords:existence": lambda response, keywords: all(  # in any case, within words too
        re.search(re.escape(keyword), response, re.IGNORECASE) for keyword in keywords
    ),
    "keywords:frequency": lambda response, keyword, frequency, relation: holds(
        occurrences(response, keyword), relation, frequency
    ),
    "keywords:forbidden_words": has_none_of,
    "keywords:letter_frequency": lambda response, letter, let_frequency, let_relation: holds(  # in either case
        response.lower().count(one_character(letter).lower()), let_relation, let_frequency
    ),
    # the likeliest language of the whole response (ISO 639-1)
    "language:response_language": lambda response, language: text.is_language(response, language),
    "length_constraints:number_sentences": lambda response, num_sentences, relation: holds(
        len(text.sentences(response)), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": has_paragraphs,
    # runs of letters, digits and underscores: "It's 3.5 km" has five
    "length_constraints:number_words": lambda response, num_words, relation: holds(
        len(re.findall(r"\w+", response)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda response, num_placeholders: (
        placeholder_count(response) >= num_placeholders
    ),
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": lambda response, num_bullets: (
        sum(len(re.findall(kind, response, re.MULTILINE)) for kind in BULLETS) == num_bullets
    ),
    "detectable_format:constrained_response": lambda response: any(option in response for option in OPTIONS),
    "detectable_format:number_highlighted_sections": lambda response, num_highlights: (
        highlight_count(response) >= num_highlights
    ),
    # headings of the word and a number, such as `SECTION 1`
    "detectable_format:multiple_sections": lambda response, section_spliter, num_sections: (
        len(re.findall(re.escape(section_spliter.strip()) + r"\s?\d+", response)) >= num_sections
    ),
    "detectable_format:json_format": is_fenced_json,
    "detectable_format:title": has_title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": lambda response, prompt_to_repeat: (
        response.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda response, end_phrase: (
        response.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda response: is_quoted(response.strip()),
    # words in capitals only: `A-B` is one word; DON'T is two
    "change_case:capital_word_frequency": lambda response, capital_frequency, capital_relation: holds(
        sum(1 for token in text.tokens(response) if token.isupper()), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda response: response.isupper() and text.is_language(response, "en"),
    "change_case:english_lowercase": lambda response: response.islower() and text.is_language(response, "en"),
    "punctuation:no_comma": lambda response: "," not in response,
    # IFTrain
    "copy:copy": lambda response, prompt_to_repeat: same(response, prompt_to_repeat),  # in any case
    # with six asterisks between
    "copy:copying_multiple": lambda response, prompt_to_repeat, N: consists_of(
        response.split("******"), N, lambda copy: same(copy, prompt_to_repeat)
    ),
    "new:copy_span_idx": copies_span,
    "copy:repeat_phrase": repeats_phrase,
    # hyphens, without spaces, connect all sentences, and nothing else
    "detectable_format:sentence_hyphens": lambda response: (
        response.split("-") == text.sentences(response.replace("-", " "))
    ),
    "detectable_format:square_brackets": lambda response: all(  # [each] [of] [them]
        word.startswith("[") and word.endswith("]") for word in response.split()
    ),
    "detectable_format:bigram_wrapping": wraps_bigrams,
    "keywords:no_adjacent_consecutive": no_adjacent_consecutive,
    "keywords:word_once": lambda response, keyword: occurrences(response, keyword) == 1,
    "count:count_increment_word": lambda response, keyword1, keyword2: (
        occurrences(response, keyword1) == 1 and occurrences(response, keyword2) == 2
    ),
    "keywords:exclude_word_harder": lambda response, keyword: has_none_of(response, [keyword.strip()]),
    # with its punctuation, in the same case; `a` counts
    "keywords:palindrome": lambda response: any(word == word[::-1] for word in response.split()),
    "keywords:keyword_specific_position": keyword_position,
    "keywords:start_end": starts_as_it_ends,
    "paragraphs:paragraphs": lambda response: has_paragraphs(response, 2),
    "paragraphs:paragraphs2": lambda response: has_parts(response.split("\n\n"), 2),
    # in any case, without a comma at it
    "first_word:first_word_sent": lambda response, first_word: all(
        same(sentence.split()[0], first_word) for sentence in text.sentences(response)
    ),
    "first_word:first_word_answer": lambda response, first_word: same(response.split()[0], first_word),
    "last_word:last_word_sent": lambda response, last_word: all(
        ends_with_word(sentence, last_word) for sentence in text.sentences(response)
    ),
    "last_word:last_word_answer": ends_with_word,
    "punctuation:punctuation_dot": lambda response: "." not in response,
    "punctuation:punctuation_exclamation": lambda response: "!" not in response,
    # at most N words in small letters only; DON't has one, and Aa_b has none
    "count:lowercase_counting": lambda response, N: len(re.findall(r"\b[a-z]+\b", response)) <= N,
    "letters:letter_counting": lambda response, N, relation: holds(  # from A to Z, in either case
        len(re.findall("[a-zA-Z]", response)), relation, N
    ),
    "count:counting_composition": counting_composition,
    "count:count_unique": words_differ,
}
"""Every constraint that a row can name by an id."""
BY_ID |= {
    "copy:copying_simple": BY_ID["copy:copy"],
    "keywords:word_count_different_numbers": BY_ID["keywords:frequency"],
    "letters:letter_counting2": BY_ID["keywords:letter_frequency"],
}

BY_NAME: dict[str, Check] = {
    "verify_keywords": lambda response, keyword_list: all(
        keyword.lower() in response.lower() for keyword in keyword_list
    ),
    # exactly N words, in any case
    "verify_keyword_frequency": lambda response, word, N: re.findall(r"\w+", response.lower()).count(word.lower()) == N,
    # not even within a word
    "validate_forbidden_words": lambda response, forbidden_words: all(
        word.lower() not in response.lower() for word in forbidden_words
    ),
    "verify_letter_frequency": lambda response, letter, N: response.count(one_character(letter)) == N,  # in this case
    "validate_response_language": BY_ID["language:response_language"],
    # between dividers `* * *`, none of them empty
    "verify_paragraph_count": lambda response, N: consists_of(
        "\n".join(map(str.strip, response.splitlines())).split("* * *"), N, str.strip
    ),
    "validate_word_constraint": lambda response, N, quantifier: holds(len(response.split()), quantifier, N),
    # each but the last ends in `.`, `?` or `!` before a space; `around` is one more or less
    "verify_sentence_constraint": lambda response, N, quantifier: holds(
        len(_SENTENCE_END.split(response)), quantifier, N, 1
    ),
    "validate_paragraphs": nth_paragraph_start,
    "verify_postscript": lambda response, postscript_marker: (  # with text after it
        response.partition(postscript_marker)[2].strip() != ""
    ),
    "validate_placeholders": lambda response, N: placeholder_count(response) >= N,
    "verify_bullet_points": lambda response, N: (  # lines that begin with `*` or `-`
        sum(1 for line in response.split("\n") if line.strip().startswith(("*", "-"))) == N
    ),
    # a line with << and then >>
    "validate_title": lambda response: any(">>" in line.partition("<<")[2] for line in response.split("\n")),
    # a text of options has slashes, commas or `or` between them
    "validate_choice": lambda response, options: any(
        choice.strip() and choice.strip() in response
        for choice in (re.split(r"/|,|\bor\b", options) if isinstance(options, str) else options)
    ),
    "validate_highlighted_sections": lambda response, N: len(re.findall(r"\*[^*\n]*\*", response)) >= N,
    "validate_sections": has_sections,
    "validate_json_format": is_json,
    "validate_repeat_prompt": lambda response, original_prompt: response.startswith(original_prompt),
    "validate_two_responses": two_responses_once,
    "validate_uppercase": lambda response: response == response.upper(),
    "validate_lowercase": lambda response: response == response.lower(),
    # words of the capitals A to Z
    "validate_frequency_capital_words": lambda response, N, quantifier: holds(
        len(re.findall(r"\b[A-Z]+\b", response)), quantifier, N
    ),
    "validate_end": lambda response, end_phrase: response.endswith(end_phrase),
    "validate_quotation": is_quoted,
    "validate_no_commas": BY_ID["punctuation:no_comma"],
}
"""Every function that a row can have as its func_name."""
