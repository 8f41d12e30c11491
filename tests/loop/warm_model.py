"""The demo's files and its model after the warm start, as `make warm-start` leaves them; made once for this code."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megagrpo.demo.prepare import fingerprint, prepare
from tests.loop import small_run

REPOSITORY = Path(__file__).resolve().parents[2]
DIRECTORY = REPOSITORY / ".cache" / "adder"
RECIPE = REPOSITORY / "yaml_recipes" / "adder_sft_cpu.yaml"


def warm_model() -> Path:
    """Hugging Face directory of the model; the files that the recipes name are where they name them."""
    prepare(DIRECTORY)
    recipe = hashlib.sha256(RECIPE.read_bytes()).hexdigest()
    runs = DIRECTORY / f"runs_{fingerprint()[:8]}_{recipe[:8]}"
    model = runs / "adder_sft_cpu" / "hugging_face"
    if not model.exists():
        small_run.train(RECIPE, f"track.directory={runs}", command="sft")
    return model
