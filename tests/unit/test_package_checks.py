"""Packages that a recipe needs: their versions, and only of what it uses."""

from importlib import metadata

import pytest

from megagrpo.preflight.machine import package_problems
from tests.tiny_run import recipe_with


def test_a_recipe_is_refused_for_wrong_versions_of_what_it_uses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.8.1", "sglang": "0.4.0", "transformer-engine": "1.0"}
    monkeypatch.setattr(
        "megagrpo.doctor.packages.installed_version", lambda name: versions.get(name, metadata.version(name))
    )
    problems = {problem.where: problem for problem in package_problems(recipe_with("rollout.engine=sglang"))}
    assert set(problems) == {"package torch", "package sglang"}
    assert "pip install 'torch>=2.9'" in problems["package torch"].fix
    assert [problem.where for problem in package_problems(recipe_with())] == ["package torch"]
