"""Actors on the CPU of a machine that may have GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# What an actor's process does: import the actor's module, receive a recipe, start. The start ends at the first use of
# the recipe, which is None here, or of the spec, which has hardly anything; by then torch is imported.
SCRIPT = """
import os, sys
import megagrpo.recipe.schema
from megagrpo.cluster import actors, engines
assert "torch" not in sys.modules, "imported before the GPUs can be hidden from it"
from types import SimpleNamespace
SPEC = SimpleNamespace(device="cpu", recipe=SimpleNamespace(rollout=SimpleNamespace(engine="transformers")))
try:
    {actor}.__ray_metadata__.modified_class().start({arguments})
except AttributeError as error:
    assert "NoneType" in str(error) or "model_directory" in str(error), error
print(repr(os.environ["CUDA_VISIBLE_DEVICES"]), sys.modules["torch"].cuda.is_available())
"""


@pytest.mark.parametrize(
    ("actor", "arguments"),
    [("actors.RankActor", 'None, 0, "", "", "cpu"'), ("engines.EngineActor", "SPEC")],
)
def test_an_actor_for_the_cpu_hides_the_gpus_from_torch(actor: str, arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(actor=actor, arguments=arguments)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "'' False\n", done.stderr
