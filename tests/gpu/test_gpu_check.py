"""The checks of `make gpu-check`: on a GPU as they are; on CPUs with a tiny model, which shows that they work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from megagrpo.doctor import Finding
from tools.gpu_check import training
from tools.gpu_check.__main__ import REPOSITORY, TITLES, run_check
from tools.gpu_check.figures import Figure


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("check", TITLES)
def test_a_gpu_passes_the_check(check: str, tmp_path: Path) -> None:
    figures, error = run_check(check, "cuda", 1, tmp_path)
    assert not error
    assert [figure for figure in figures if not figure.fits] == []


@pytest.mark.long
def test_checks_work_on_a_cpu_and_are_written_down(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tools.gpu_check", "--device", "cpu", "--output", str(report)]
    command += ["--only", "packing", "updates"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^updates .* at (most|least) .* ok$", ran.stdout, re.MULTILINE)
    found = json.loads(report.read_text())
    assert found["checks"].keys() == {"packing", "updates"}
    assert all(check["figures"] for check in found["checks"].values())
    assert "packages" in found["machine"]


def test_a_figure_out_of_its_range_is_wrong_and_says_what_to_do() -> None:
    assert Figure("a", 1.0, low=1, high=1).fits
    assert not Figure("a", 0.9, low=1).fits
    assert not Figure("a", float("nan")).fits
    assert not Figure("a", float("inf"), low=0).fits
    assert "mend it" in "\n".join(Figure("a", 2.0, high=1, fix="mend it").drawn())
    assert json.loads(json.dumps(Figure("a", float("nan")).as_json()))["value"] == "nan"


def test_a_check_that_fails_keeps_its_figures_and_names_the_end_of_its_output(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file where the check needs a directory")
    (tmp_path / "rollouts.jsonl").write_text('{"name": "seen", "value": 1.0}\n')
    figures, error = run_check("rollouts", "cpu", 1, tmp_path)
    assert [figure.name for figure in figures] == ["seen"]
    assert "FileExistsError" in error


def test_experts_are_checked_with_the_kernels_that_recipes_ask_for() -> None:
    recipes = [yaml.safe_load(path.read_text()) for path in (REPOSITORY / "yaml_recipes").glob("*.yaml")]
    options = [recipe["train"].get("megatron", {}) for recipe in recipes]
    asked = {name: value for of in options for name, value in of.items() if name.startswith("moe_")}
    assert {name: value for name, value in asked.items() if name.endswith("_fusion")} == training.FUSED_EXPERTS


def test_a_missing_ray_is_the_last_checks_concern_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = [Finding(part, "wrong", "not installed") for part in ("ray", "sglang", "torch")]
    monkeypatch.setattr(training, "CHAPTERS", {"packages": lambda: wrong})
    counted = next(training.environment(training.Setting("cpu", tmp_path)))
    assert (counted.value, counted.note) == (1, "torch: not installed")
