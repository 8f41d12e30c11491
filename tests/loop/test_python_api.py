"""The page on the Python API: its files are a run as they stand there, in an environment without SGLang's packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from tests.loop.small_run import REPOSITORY, RUN_SECONDS, make_inputs

PAGE = (REPOSITORY / "docs" / "python_api.md").read_text(encoding="utf-8")
FILES = re.compile(r"```(?:python\n# (?P<name>\w+\.py)|yaml)\n(?P<text>.*?)```", re.DOTALL)


OF_SGLANG = (REPOSITORY / "requirements" / "sglang_cpu.txt").read_text(encoding="utf-8")

FINDER = """
import sys
from importlib.machinery import PathFinder


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def without_sglang(directory: Path) -> dict[str, str]:
    """Returns the environment variables of processes that import no package of requirements/sglang_cpu.txt."""
    packages = {line.partition("==")[0].lower().replace("_", "-") for line in OF_SGLANG.splitlines()}
    modules = [
        module
        for module, names in packages_distributions().items()
        if {name.lower().replace("_", "-") for name in names} <= packages
    ]
    (directory / "sitecustomize.py").write_text(f"HIDDEN = {set(modules)}\n{FINDER}", encoding="utf-8")
    return {**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


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
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    how: Any = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": RUN_SECONDS}
    ran = subprocess.run([sys.executable, "loop.py"], **how, env=without_sglang(hidden), check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    steps = re.findall(r"^step (\d): reward (-?\d+\.\d+), gradient norm (\d+\.\d+), ", ran.stdout, re.MULTILINE)
    assert [step for step, _, _ in steps] == ["1", "2", "3"]
    assert all(float(norm) > 0 for _, _, norm in steps)
