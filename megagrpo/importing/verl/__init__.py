"""verl's options, one by one, and how its configurations are read: Hydra's YAML, or a script that runs main_ppo."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megagrpo.importing.options import SCRIPT_SUFFIXES, Configuration, command_line, hydra_overrides, yaml_options
from megagrpo.importing.translate import Framework
from megagrpo.importing.verl.learning import ALGORITHM, DATA, POLICY
from megagrpo.importing.verl.machines import (
    CRITIC,
    MEGATRON_ROWS,
    MODEL,
    OTHERS,
    REFERENCE,
    REWARD,
    ROLLOUT_ROWS,
    TRAINER,
)
from megagrpo.importing.verl.several import rest


def is_program(word: str) -> bool:
    return word.rpartition("/")[2] in ("main_ppo.py", "main_dapo.py") or word.endswith((".main_ppo", ".main_dapo"))


def read(path: Path, set_to: Mapping[str, str], environment: Mapping[str, str]) -> Configuration:
    """Reads a script, or Hydra's YAML. Raises RecipeError if it is neither."""
    if path.suffix not in SCRIPT_SUFFIXES:
        return Configuration(path, yaml_options(path))
    words, notes = command_line(path, is_program, set_to, environment, "python3 -m verl.trainer.main_ppo ...")
    return Configuration(path, hydra_overrides(words), notes)


VERL = Framework(
    "verl",
    "verl",
    {
        **MODEL,
        **DATA,
        **ROLLOUT_ROWS,
        **REWARD,
        **ALGORITHM,
        **POLICY,
        **MEGATRON_ROWS,
        **REFERENCE,
        **CRITIC,
        **TRAINER,
        **OTHERS,
    },
    rest,
)
