"""What the driver imports: Megatron or an engine, which only its actors use, would cost every start seconds."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from megagrpo.algorithm.mismatch import Mismatch
from megagrpo.rank_results import CriticMetrics, SftUpdate, StepMetrics, TokenLoss

ACTORS_ONLY = (
    "megatron",
    "megagrpo.megatron",
    "megagrpo.rollout.transformers_engine",
    "megagrpo.rollout.sglang.engine",
    "aiohttp",
)
IMPORT = f"""
import importlib, pickle, sys
importlib.import_module(sys.argv[1])
pickle.load(sys.stdin.buffer)
print([name for name in {ACTORS_ONLY} if name in sys.modules])
"""
MISMATCH = Mismatch(*(0.0,) * len(Mismatch.__dataclass_fields__))
UPDATE = StepMetrics(0.5, 0.5, None, 1.0, 0.0, 0.0, 1.0, MISMATCH, None, 1.0)
CRITIC = CriticMetrics(0.5, 0.0, 0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("driver", "answers"),
    [("megagrpo.trainer.train", (UPDATE, CRITIC)), ("megagrpo.trainer.sft", SftUpdate(TokenLoss(1.0, 2), 1.0))],
)
def test_the_driver_starts_and_reads_answers_without_what_only_its_actors_use(driver: str, answers: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, driver],
        input=pickle.dumps(answers),
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        timeout=600,
    )
    assert done.stdout.decode() == "[]\n", done.stderr.decode()


def test_a_recipe_is_read_without_torch_which_a_rank_must_not_import_before_it_chooses_its_device() -> None:
    code = "import sys, megagrpo.recipe.load; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=600)
    assert done.stdout.decode() == "False\n", done.stderr.decode()
