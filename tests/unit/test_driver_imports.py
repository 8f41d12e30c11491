"""The driver imports neither Megatron nor an engine: its actors use them, and they would cost every start seconds."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

from megagrpo.algorithm.mismatch import Mismatch
from megagrpo.rank_results import CriticMetrics, SftUpdate, StepMetrics, TokenLoss

IMPORT = """
import pickle, sys
import megagrpo.recipe.load
print("torch" in sys.modules)
import megagrpo.trainer.sft, megagrpo.trainer.train
pickle.load(sys.stdin.buffer)
actors_only = "megatron", "megagrpo.megatron", "aiohttp"
engines = "megagrpo.rollout.transformers_engine", "megagrpo.rollout.sglang.engine"
print([name for name in (*actors_only, *engines) if name in sys.modules])
"""
MISMATCH = Mismatch(*(0.0,) * len(Mismatch.__dataclass_fields__))
ANSWERS = (
    StepMetrics(0.5, 0.5, None, 1.0, 0.0, 0.0, 1.0, MISMATCH, None, 1.0),
    CriticMetrics(0.5, 0.0, 0.0, 0.0, 0.0, 1.0),
    SftUpdate(TokenLoss(1.0, 2), 1.0),
)


def test_a_recipe_is_read_without_torch_and_drivers_read_answers_without_what_only_their_actors_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        input=pickle.dumps(ANSWERS),
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        timeout=600,
    )
    # A rank must not import torch before it has chosen its device.
    assert done.stdout.decode().splitlines() == ["False", "[]"], done.stderr.decode()
