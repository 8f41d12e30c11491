"""Size of the house, and the limits that it keeps: `make house`.

Prints the files, lines and statements of megagrpo/ and tests/, and the lines of each folder of megagrpo/ beside its
budget; checks that the walks of docs/architecture.md, of a sample, a weight and a metric, name files and classes of
the package.
Ends with 1 if a limit is broken.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Limits:
    """Most lines of all Python files of a folder and of each of them, and most files."""

    lines: int
    lines_of_file: int
    files: int | None


# Folders of megagrpo/ ("": its own files): most lines of them together. Who needs more lowers another in that commit.
BUDGETS = {
    ("weights",): 9_270,
    ("megatron",): 6_031,
    ("layout", "batching", "algorithm"): 3_155,
    ("checkpoint", "convert"): 2_488,
    ("rollout",): 4_943,
    ("cluster",): 3_367,
    ("trainer", "evaluation"): 4_891,
    ("recipe", "preflight", "doctor"): 6_141,
    ("plan",): 5_282,
    ("data",): 2_800,
    ("reward",): 7_714,
    ("agents",): 5_147,
    ("track", "report"): 4_854,
    ("importing",): 3_015,
    ("commands", "processes", ""): 2_812,
}
LINES_OF_FUNCTION = 60
# Merging lowers them; only a new capability may raise them, in the commit that adds it.
FOLDERS = {
    "megagrpo": Limits(lines=sum(BUDGETS.values()), lines_of_file=500, files=369),
    "tests": Limits(lines=61_812, lines_of_file=600, files=None),
}
# Heading in docs/architecture.md: most files, and most nouns (in bold).
WALKS = {"A sample's walk": (17, 9), "A weight's walk": (15, 6), "A metric's walk": (5, 3)}
NOUN = re.compile(r"\*\*([^*]+)\*\*")
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
ITEM = re.compile(r"^\d+\. +`([^`]+)`", re.MULTILINE)


def lines_by_file(folder: Path) -> dict[Path, int]:
    return {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(folder.rglob("*.py"))}


def statements_in(folder: Path) -> int:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))
    return sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree))


def folder_problems(repository: Path, name: str, limits: Limits) -> list[str]:
    """Prints a line about a folder; the limits that it breaks."""
    sizes = lines_by_file(repository / name)
    total, longest = sum(sizes.values()), max(sizes, key=lambda path: sizes[path])
    print(
        f"{name:9} {len(sizes):4} files {total:7,} lines   median {median(sizes.values()):.0f}"
        f"   longest {sizes[longest]}: {longest.relative_to(repository)}"
    )
    problems = [
        f"{path.relative_to(repository)}: {size} lines, at most {limits.lines_of_file}"
        for path, size in sizes.items()
        if size > limits.lines_of_file
    ]
    if total > limits.lines:
        problems.append(f"{name}/: {total:,} lines, at most {limits.lines:,}")
    if limits.files is not None and len(sizes) > limits.files:
        problems.append(f"{name}/: {len(sizes)} files, at most {limits.files}")
    return problems


def budget_problems(repository: Path, budgets: Mapping[tuple[str, ...], int]) -> list[str]:
    """Prints a line about each budget of megagrpo/; those that are exceeded, and folders without one."""
    counts: dict[str, int] = {}
    for path, size in lines_by_file(repository / "megagrpo").items():
        folder, *rest = path.relative_to(repository / "megagrpo").parts
        folder = folder if rest else ""
        counts[folder] = counts.get(folder, 0) + size
    problems = []
    for folders, most in budgets.items():
        name, lines = ", ".join(folder or "root" for folder in folders), sum(counts.pop(one, 0) for one in folders)
        print(f"  {name:28} {lines:7,} of {most:,}")
        if lines > most:
            problems.append(f"megagrpo: {name}: {lines:,} lines, at most {most:,}")
    return problems + [f"megagrpo: {folder or 'root'}: no budget" for folder in counts]


def function_problems(repository: Path) -> list[str]:
    """Returns the functions of megagrpo/ that are too long, with their docstrings."""
    problems = []
    for path in sorted((repository / "megagrpo").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LINES_OF_FUNCTION:
                where = f"{path.relative_to(repository)}: {node.name}"
                problems.append(f"{where}: {lines} lines, at most {LINES_OF_FUNCTION}")
    return problems


def walk_problems(repository: Path, title: str, most: int, nouns_most: int, classes: Collection[str]) -> list[str]:
    """Prints a line about a walk: its nouns, and the numbered list below its heading. What is wrong with it."""
    page = "docs/architecture.md"
    text = (repository / page).read_text(encoding="utf-8")
    section = re.search(rf"^(#+) {re.escape(title)}\b.*?\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        return [f"{page}: no heading {title!r}"]
    files, nouns = ITEM.findall(section[2]), set(NOUN.findall(section[2]))
    print(f"{title}: {len(files)} files, {len(nouns)} nouns")
    problems = [f"{page}: {title}: no file {file}" for file in files if not (repository / file).is_file()]
    absent = sorted(noun for noun in nouns if noun[:1].isupper() and noun not in classes)
    problems += [f"{page}: {title}: no class {name}" for name in absent]
    if not files:
        problems.append(f"{page}: {title}: no numbered list of files, each in backquotes")
    if len(set(files)) < len(files):
        problems.append(f"{page}: {title}: a file is listed twice")
    if len(files) > most:
        problems.append(f"{page}: {title}: {len(files)} files, at most {most}")
    if len(nouns) > nouns_most:
        problems.append(f"{page}: {title}: {len(nouns)} nouns, at most {nouns_most}")
    return problems


def house_problems(repository: Path, budgets: Mapping[tuple[str, ...], int] = BUDGETS) -> list[str]:
    problems = []
    for name, limits in FOLDERS.items():
        problems += folder_problems(repository, name, limits)
    problems += budget_problems(repository, budgets) + function_problems(repository)
    package = (path.read_text(encoding="utf-8") for path in (repository / "megagrpo").rglob("*.py"))
    classes = {name for text in package for name in CLASS.findall(text)}
    for title, (files, nouns) in WALKS.items():
        problems += walk_problems(repository, title, files, nouns, classes)
    return problems


if __name__ == "__main__":
    problems = house_problems(REPOSITORY)
    print("statements:", ", ".join(f"{name} {statements_in(REPOSITORY / name):,}" for name in FOLDERS))
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))
