"""The rubric of a judge: a text with {{variables}}, which the row and the response fill in. It runs no code."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megagrpo.reward.answer_text import after_thinking

VARIABLE = re.compile(r"\{\{\s*([A-Za-z_][\w.-]*)\s*\}\}")
EXTRA_INFO = "extra_info."
FILES = (".txt", ".md")
OF_ROW = ("question", "prompt", "ground_truth", "data_source", "ability")
"""Variables that every rubric may have, besides `fence` and extra_info.NAME."""


def fence_of(texts: Collection[str]) -> str:
    """Returns a word that the texts cannot contain, since it is their hash. Equal texts give the same word."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(hashlib.blake2b(text.encode(errors="surrogatepass")).digest())
    return f"text-{digest.hexdigest()}"


class Rubric:
    """A template. `text`: the template itself, or the path of a file that ends in .txt or .md.

    shows: variables that show responses; the template must name one. Raises ValueError if the template is wrong.
    Other braces, as in JSON or LaTeX, are text. A value that is filled in is never read as a variable. {{fence}} is a
    word that no response contains.
    """

    def __init__(self, text: str, shows: Collection[str]) -> None:
        self.text = _read(text)
        self.variables = frozenset(VARIABLE.findall(self.text))
        known = ("fence", *OF_ROW, *shows)
        if wrong := sorted(name for name in self.variables if name not in known and not name.startswith(EXTRA_INFO)):
            raise ValueError(f"{{{{{wrong[0]}}}}} is not one of {', '.join(known)}, extra_info.NAME")
        if not self.variables & set(shows):
            needed = " or ".join(f"{{{{{name}}}}}" for name in shows)
            raise ValueError(f"the rubric has no {needed}: it must show the judge what to score")

    def shown(self, responses: Sequence[str], prompt_text: str) -> list[str]:
        """Returns the responses that a comparison shows: whole if the text names {{response...}}, else without the
        reasoning."""
        if any(name.startswith("response") for name in self.variables):
            return list(responses)
        return [after_thinking(response, prompt_text) for response in responses]

    def filled(self, row: Mapping[str, Any], shown: Mapping[str, str]) -> str:
        """Returns the text for a row (a reward function's arguments). Raises ValueError if the row lacks a variable."""
        values = {"fence": fence_of(shown.values()), **shown}
        return VARIABLE.sub(lambda name: values[name[1]] if name[1] in values else of_row(name[1], row), self.text)


def of_row(name: str, row: Mapping[str, Any]) -> str:
    """Returns a variable's value. Raises ValueError if the row lacks it."""
    match name:
        case "question":
            questions = [message for message in row["prompt"] if message["role"] == "user"]
            if not questions:
                raise ValueError("the prompt has no message of the user, whose {{question}} the rubric names")
            return _content(questions[-1])
        case "prompt":
            return "\n\n".join(f"{message['role']}: {_content(message)}" for message in row["prompt"])
    if not name.startswith(EXTRA_INFO):
        return str(row[name])
    value: Any = row["extra_info"]
    for key in name.removeprefix(EXTRA_INFO).split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"the row has no {name}, which the rubric names")
        value = value[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _content(message: Mapping[str, Any]) -> str:
    """Returns the text of a message; of a list of parts, the text parts joined."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def is_file(rubric: str) -> bool:
    """Returns whether a rubric is the path of a file, and not the text itself."""
    return "\n" not in rubric and rubric.endswith(FILES)


def _read(text: str) -> str:
    if not is_file(text):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the rubric {text} cannot be read: {error}") from None
