"""Models with a vision tower: the text model of `text_config` is trained, all else is carried to exports."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megagrpo.errors import ModelError, Problem, brief
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.reading import HARMLESS

TOWER = r"model\.visual\..*|mtp\..*"
KNOWN = re.compile(
    r"text_config|vision_config|quantization_config|tie_word_embeddings|(image|video|vision_start|vision_end)_token_id"
)
"""Keys of a composite config.json that do not change what the text model computes, or are read here."""
QWEN_NAMES = (("model.", "model.language_model."),)
QWEN_LOADED = (("model.language_model.", "model."),)


def text_of(
    read: Callable[[Mapping[str, Any]], Architecture],
) -> Callable[[Mapping[str, Any]], Architecture]:
    """Returns a reader of a composite config.json, whose text model `read` reads."""

    def architecture_of(config: Mapping[str, Any]) -> Architecture:
        text, family = config.get("text_config"), str(config.get("model_type"))
        if not isinstance(text, Mapping):
            raise ModelError(Problem(f"config.json: text_config ({family})", brief(text), "the text model's config"))
        if unknown := [
            Problem(f"config.json: {key} ({family})", brief(value), "no key that this family does not know")
            for key, value in config.items()
            if value and not KNOWN.fullmatch(key) and not HARMLESS.fullmatch(key)
        ]:
            raise ModelError(unknown)
        tied = [its["tie_word_embeddings"] for its in (config, text) if "tie_word_embeddings" in its]
        if len(set(map(str, tied))) > 1:
            where, needed = f"config.json: tie_word_embeddings ({family})", "the same as in text_config"
            raise ModelError(Problem(where, brief(tied[0]), needed))
        shared = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
        return replace(read({**text, **shared}), family=family)

    return architecture_of
