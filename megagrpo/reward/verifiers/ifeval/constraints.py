"""The 25 constraints of IFEval (Zhou et al. 2023, arXiv:2311.07911), each a function of the response and its arguments.

Source: google-research, instruction_following_eval/instructions.py. The names of arguments are those of its data. Every
expression takes time in proportion to the response's length, whatever is in it; results are those of the originals,
but for the differences that docs/rewards.md lists.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from megagrpo.reward.verifiers.ifeval import text

Relation = Literal["less than", "at least"]

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""Texts that detectable_format:constrained_response allows: its data carries no arguments."""

JSON_FENCES = ("```json", "```Json", "```JSON", "```")


def holds(count: int, relation: Relation, limit: int) -> bool:
    return count < limit if relation == "less than" else count >= limit


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
    return not any(re.search(_whole_word(word), response, re.IGNORECASE) for word in forbidden_words)


def _whole_word(word: str) -> str:
    """Returns a pattern for the word, with a boundary only at a letter's side: for C++, only before it."""
    before = r"(?<!\w)" if re.match(r"\w", word) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", word) else ""
    return before + re.escape(word) + after


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
