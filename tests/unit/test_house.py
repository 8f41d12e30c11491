"""The limits of the house are kept, and `make house` notices one that is broken."""

from __future__ import annotations

from pathlib import Path

from tools.house import FOLDERS, REPOSITORY, house_problems

WALKS = """# Page

## A sample's walk

1. `megagrpo/a.py` reads.
{more}
## A weight's walk

1. `megagrpo/a.py`: all.

## A metric's walk

1. `megagrpo/a.py`
"""


def test_this_house_keeps_its_limits() -> None:
    assert house_problems(REPOSITORY) == []


def test_broken_limits_are_named(tmp_path: Path) -> None:
    most = FOLDERS["tests"].lines_of_file
    for folder in ("megagrpo", "tests", "docs"):
        (tmp_path / folder).mkdir()
    for name in ("a", "b"):
        (tmp_path / "megagrpo" / f"{name}.py").write_text("x = 1\n" * 20)
    (tmp_path / "tests" / "test_a.py").write_text("x = 1\n" * most)
    page = tmp_path / "docs" / "architecture.md"
    page.write_text(WALKS.format(more="2. `megagrpo/b.py`, twice `megagrpo/no.py`\n"))
    budgets = {("",): 40, ("plan", "recipe"): 0}
    assert house_problems(tmp_path, budgets) == []

    (tmp_path / "megagrpo" / "plan").mkdir()
    (tmp_path / "megagrpo" / "plan" / "a.py").write_text("def f():\n" + "    x = 1\n" * 60)
    long = "megagrpo/plan/a.py: f: 61 lines, at most 60"
    assert house_problems(tmp_path, budgets) == ["megagrpo: plan, recipe: 61 lines, at most 0", long]
    assert house_problems(tmp_path, {("",): 40}) == ["megagrpo: plan: no budget", long]
    (tmp_path / "tests" / "test_a.py").write_text("x = 1\n" * (most + 1))
    for number in range(150):
        (tmp_path / "megagrpo" / f"{number}.py").write_text("x = 1\n" * 500)
    page.write_text(WALKS.format(more="".join(f"{i}. `megagrpo/{i}.py` **{i}**\n" for i in range(150, 167))))
    problems = house_problems(tmp_path, {("", "plan"): 10**6})
    assert len(problems) == 22
    for part in (
        "tests/test_a.py: 601 lines",
        "megagrpo/: 75,101 lines",
        "no file megagrpo/166.py",
        "18 files, at most 17",
        "17 nouns, at most 9",
    ):
        assert any(part in problem for problem in problems), part
    page.write_text(WALKS.format(more="**Prompt**, **digest**\n"))
    assert "docs/architecture.md: A sample's walk: no class Prompt" in house_problems(tmp_path, {("", "plan"): 10**6})
    page.write_text("# Page\n")
    assert sum("no heading" in problem for problem in house_problems(tmp_path, budgets)) == 3
