"""Files of megatron-core 0.16.1 are read. tests/golden/megatron_0.16.tar.xz has a model, the run of small_run.py with
it on one rank and with hidden size 16, checkpoint of step 2 and batch of step 3 kept, and its torch_dist files."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    shutil.unpack_archive(TESTS / "golden" / "megatron_0.16.tar.xz", tmp_path, filter="data")
    recipe = tmp_path / "run" / "recipe.1.yaml"
    recipe.write_text(recipe.read_text().replace("{here}", str(tmp_path)))
    return tmp_path


@pytest.mark.long
def test_a_step_from_its_checkpoint_is_as_it_was(written: Path) -> None:
    from tests.loop import without_ray

    without_ray.command(["replay", str(written / "run"), "--step", "3"], written / "printed")
    printed = (written / "printed").read_text()
    table = printed.partition("trained again")[2].splitlines()[1:]
    compared = {
        words[0]: [float(word) for word in words[1:3]] for line in table if len(words := line.split()) in (3, 4)
    }
    assert {"grad_norm", "loss/policy", "kl/mean"} <= compared.keys(), printed
    for name, (before, again) in compared.items():
        assert math.isclose(before, again, rel_tol=1e-6, abs_tol=1e-9), name


@pytest.mark.long
def test_its_torch_dist_files_become_the_model(written: Path) -> None:
    from tests.loop import without_ray

    words = ["convert", "megatron-to-hf", "--source", str(written / "torch_dist"), "--output", str(written / "again")]
    assert without_ray.command(words, written / "printed") == 0, (written / "printed").read_text()
    before, again = (load_file(written / name / "model.safetensors") for name in ("model", "again"))
    assert before.keys() == again.keys()
    assert all((before[name] == again[name]).all() for name in before)
