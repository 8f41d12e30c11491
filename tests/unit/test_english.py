"""Docstrings begin with a verb or a noun, and their first sentences are short: docs/architecture.md, "Words"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "megagrpo"
NEVER = {"What", "Whether", "Where", "Which", "Those", "That", "It", "Of", "How", "When", "Who", "Why"}
NO_VERBS = {
    *("As", "Bytes", "Columns", "Elements", "Engines", "Groups", "Indices", "Its", "Keys", "Layers", "Lines", "Logits"),
    *("Logprobs", "Messages", "Metrics", "Numbers", "Prompts", "Ranks", "Requests", "Responses", "Rollouts", "Rows"),
    *("Seconds", "Steps", "Storages", "This", "Tokens", "Values", "Weights"),
}
WORDS_MAX = 25


def problems(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            continue
        text = " ".join((ast.get_docstring(node) or "").split())
        word = re.match(r"\W*(\w*)", text)[1]  # type: ignore[index]
        verb = re.fullmatch("[A-Z][a-z]+s", word) and word not in NO_VERBS
        function = not isinstance(node, ast.ClassDef | ast.Module)
        if text and (word in NEVER or (function and not verb)):
            yield f"{path}:{getattr(node, 'lineno', 1)}: begins with {word}: {text[:60]}"
        if len(re.split(r"(?<=[.:;!?])\s", text)[0].split()) > WORDS_MAX:
            yield f"{path}:{getattr(node, 'lineno', 1)}: a first sentence of more than {WORDS_MAX} words"


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert [problem for path in sorted(PACKAGE.rglob("*.py")) for problem in problems(path)] == []
