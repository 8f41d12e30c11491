"""The page on the Python API: its files, as they stand there, are a run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loop.small_run import REPOSITORY, RUN_SECONDS, make_inputs

PAGE = (REPOSITORY / "docs" / "python_api.md").read_text(encoding="utf-8")
FILES = re.compile(r"```(?:python\n# (?P<name>\w+\.py)|yaml)\n(?P<text>.*?)```", re.DOTALL)


def files() -> dict[str, str]:
    """The page's files by name."""
    return {found["name"] or "recipe.yaml": found["text"] for found in FILES.finditer(PAGE)}


def test_the_page_has_a_loop_that_is_read_in_one_sitting() -> None:
    assert set(files()) == {"recipe.yaml", "rewards.py", "loop.py"}
    assert len(files()["loop.py"].splitlines()) < 60


@pytest.mark.long
def test_the_loop_of_the_page_trains_three_steps_and_brings_the_weights_to_the_engines(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    for name, text in files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    steps = re.findall(r"^step (\d): reward (-?\d+\.\d+), gradient norm (\d+\.\d+), ", ran.stdout, re.MULTILINE)
    assert [step for step, _, _ in steps] == ["1", "2", "3"]
    assert all(float(norm) > 0 for _, _, norm in steps)
