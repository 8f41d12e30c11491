"""The 25 functions of open-instruct's older data, RLVR-IFeval: a row has one `func_name` and its arguments.

Source: open_instruct/if_functions.py. They check the same kinds of constraints as `constraints.py`, but other sentences
of the prompt ask for them, so they count differently: exactly N times, around N words. Results are those of the
originals, but for the differences that docs/rewards.md lists.
"""
# ruff: noqa: N803 (arguments have the names of the data)

from __future__ import annotations

import re

from megagrpo.reward.verifiers.ifeval import constraints
from megagrpo.reward.verifiers.ifeval.constraints import Quantifier, holds

_SENTENCE_END = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?!])\s")


def verify_keywords(response: str, keyword_list: list[str]) -> bool:
    return all(keyword.lower() in response.lower() for keyword in keyword_list)


def verify_keyword_frequency(response: str, word: str, N: int) -> bool:
    """Checks that exactly N words are this one, in any case.

    >>> verify_keyword_frequency("A cat, the Cat and a category", word="cat", N=2)
    True
    """
    return re.findall(r"\w+", response.lower()).count(word.lower()) == N


def validate_forbidden_words(response: str, forbidden_words: list[str]) -> bool:
    """Checks that none of these texts is in the response, not even within a word."""
    return not any(word.lower() in response.lower() for word in forbidden_words)


def verify_letter_frequency(response: str, letter: str, N: int) -> bool:
    """Checks that the letter, in this case, occurs exactly N times. Raises ValueError for more than one letter."""
    if len(letter) != 1:
        raise ValueError(f"letter is {letter!r}, not one character")
    return response.count(letter) == N


validate_response_language = constraints.language__response_language


def verify_paragraph_count(response: str, N: int) -> bool:
    """Checks for exactly N paragraphs between dividers `* * *`, none of them empty."""
    paragraphs = "\n".join(line.strip() for line in response.splitlines()).split("* * *")
    return len(paragraphs) == N and all(paragraph.strip() for paragraph in paragraphs)


def validate_word_constraint(response: str, N: int, quantifier: Quantifier) -> bool:
    """Checks the number of words, split by spaces."""
    return holds(len(response.split()), quantifier, N)


def verify_sentence_constraint(response: str, N: int, quantifier: Quantifier) -> bool:
    """Counts sentences: each but the last ends in `.`, `?` or `!` before a space; `around` is one more or less."""
    return holds(len(_SENTENCE_END.split(response)), quantifier, N, 1)


def validate_paragraphs(response: str, N: int, first_word: str, i: int) -> bool:
    """Checks for N paragraphs, split by empty lines, and the start of the ith (from 1). Raises ValueError for i > N."""
    if not 1 <= i <= N:
        raise ValueError(f"i is {i}, of {N} paragraphs")
    paragraphs = response.split("\n\n")
    return len(paragraphs) == N and paragraphs[i - 1].strip().startswith(first_word)


def verify_postscript(response: str, postscript_marker: str) -> bool:
    """Checks that the marker is in the response, with text after it."""
    _, marker, rest = response.partition(postscript_marker)
    return bool(marker and rest.strip())


def validate_placeholders(response: str, N: int) -> bool:
    return constraints.placeholder_count(response) >= N


def verify_bullet_points(response: str, N: int) -> bool:
    """Checks that exactly N lines begin with `*` or `-`."""
    return sum(1 for line in response.split("\n") if line.strip().startswith(("*", "-"))) == N


def validate_title(response: str) -> bool:
    """Checks that a line has << and then >>."""
    return any(">>" in line.partition("<<")[2] for line in response.split("\n"))


def validate_choice(response: str, options: list[str] | str) -> bool:
    """Checks that an option is in the response. A text of options has slashes, commas or `or` between them.

    >>> validate_choice("I don't know", options="I know or I don't know")
    True
    >>> validate_choice("Nay", options="yes/no/maybe")
    False
    """
    choices = re.split(r"/|,|\bor\b", options) if isinstance(options, str) else options
    return any(choice.strip() in response for choice in choices if choice.strip())


def validate_highlighted_sections(response: str, N: int) -> bool:
    return len(re.findall(r"\*[^*\n]*\*", response)) >= N


def validate_sections(response: str, N: int, section_splitter: str) -> bool:
    """Checks that the splitter splits the response into N parts, not counting an empty part before the first one."""
    sections = response.split(section_splitter)
    return len(sections) - (sections[0] == "") == N


def validate_repeat_prompt(response: str, original_prompt: str) -> bool:
    return response.startswith(original_prompt)


def validate_two_responses(response: str) -> bool:
    """Checks for two different answers with six asterisks between them, once."""
    first, asterisks, second = response.partition("******")
    return bool(asterisks) and "******" not in second and first.strip() != second.strip()


def validate_uppercase(response: str) -> bool:
    return response == response.upper()


def validate_lowercase(response: str) -> bool:
    return response == response.lower()


def validate_frequency_capital_words(response: str, N: int, quantifier: Quantifier) -> bool:
    """Checks the number of words that consist of the capitals A to Z."""
    return holds(len(re.findall(r"\b[A-Z]+\b", response)), quantifier, N)


def validate_end(response: str, end_phrase: str) -> bool:
    return response.endswith(end_phrase)


validate_json_format = constraints.is_json
validate_quotation = constraints.is_quoted
validate_no_commas = constraints.punctuation__no_comma
