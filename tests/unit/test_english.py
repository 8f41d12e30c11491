"""Docstrings begin with a verb or a noun, and their first sentences are short: docs/architecture.md, "Words".

A string below a field is its docstring.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("megagrpo", "tools", "benchmarks", "examples", "yaml_recipes", "tests")  # verbs: in the first alone
NEVER = {"What", "Whether", "Where", "Which", "Those", "That", "It", "Of", "How", "When", "Who", "Why"}
NEVER |= {"As", "These", "This", "If"}
NO_VERBS = {
    *("Bytes", "Columns", "Elements", "Engines", "Groups", "Indices", "Its", "Keys", "Layers", "Lines", "Logits"),
    *("Logprobs", "Messages", "Metrics", "Numbers", "Prompts", "Ranks", "Requests", "Responses", "Rollouts", "Rows"),
    *("Seconds", "Steps", "Storages", "Tokens", "Values", "Weights"),
}
WORDS_MAX = 25


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            yield node, ast.get_docstring(node) or ""
            for field, below in pairwise(node.body):
                match field, below:
                    case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(text))):
                        yield field, text


def problems(path: Path) -> Iterator[str]:
    for node, docstring in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
        text = " ".join(docstring.split())
        word = re.match(r"\W*(\w*)", text)[1]  # type: ignore[index]
        verb = re.fullmatch("[A-Z][a-z]+s", word) and word not in NO_VERBS
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if text and (word in NEVER or (function and not verb and path.is_relative_to(REPOSITORY / FOLDERS[0]))):
            yield f"{path}:{getattr(node, 'lineno', 1)}: begins with {word}: {text[:60]}"
        if len(re.split(r"(?<=[.:;!?])\s", text)[0].split()) > WORDS_MAX:
            yield f"{path}:{getattr(node, 'lineno', 1)}: a first sentence of more than {WORDS_MAX} words"


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    paths = (path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*.py")))
    assert [problem for path in paths for problem in problems(path)] == []
