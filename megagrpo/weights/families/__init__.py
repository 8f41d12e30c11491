"""Which models are supported. A family says once what its config means and which tensors its checkpoints hold.

To add one: write `families/<model_type>.py` with `architecture_of` and `tensors_of`, and name it here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from megagrpo.errors import ModelError, Problem
from megagrpo.weights.families import deepseek_v3, llama, mixtral, qwen2, qwen3, qwen3_moe
from megagrpo.weights.families.architecture import Architecture, Tensor

FAMILIES: dict[str, ModuleType] = {
    "deepseek_v3": deepseek_v3,
    "llama": llama,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json (as a dict) describes.

    Raises: ModelError naming the family or every feature of it that is not supported.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        near = get_close_matches(str(family), FAMILIES, n=1)
        raise ModelError(
            Problem(
                "config.json: model_type",
                given=str(family),
                needed=f"one of {', '.join(FAMILIES)}",
                fix=f"did you mean {near[0]}?" if near else "",
            )
        )
    architecture: Architecture = FAMILIES[family].architecture_of(config)
    return architecture


def tensors_of(arch: Architecture) -> tuple[Tensor, ...]:
    """Every tensor of the model's checkpoint: keys, shapes [out, in] or [n], and roles."""
    tensors: tuple[Tensor, ...] = FAMILIES[arch.family].tensors_of(arch)
    return tensors


def read_architecture(directory: str | Path) -> Architecture:
    """The architecture of the model in `directory`, from its config.json.

    Raises: ModelError if the file is missing, is not a JSON object, or describes an unsupported model.
    """
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(Problem(str(path), error.strerror or str(error), "a Hugging Face model directory")) from error
    except ValueError as error:
        raise ModelError(Problem(str(path), str(error), "a JSON file in UTF-8")) from error
    if not isinstance(config, dict):
        raise ModelError(Problem(str(path), type(config).__name__, "a JSON object"))
    return architecture_of(config)
