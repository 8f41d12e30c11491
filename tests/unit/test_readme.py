"""README and docs name only commands, targets and files that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megagrpo import cli

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
COMMAND = re.compile(r"^\$ (megagrpo|make) (.+?)(?:\s+#.*)?$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


def commands(program: str) -> list[str]:
    return sorted({match[2] for page in PAGES for match in COMMAND.finditer(page.read_text()) if match[1] == program})


@pytest.mark.parametrize("command", commands("megagrpo"))
def test_the_command_line_takes_every_command_shown(command: str) -> None:
    cli.parse(shlex.split(command))


def test_every_make_target_shown_exists() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    assert commands("make")
    for command in commands("make"):
        assert re.search(rf"^{command.split()[0]}:", makefile, re.MULTILINE), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target
