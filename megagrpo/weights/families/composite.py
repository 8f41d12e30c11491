"""Models with a vision tower: the text model of `text_config` is trained, all else is carried to exports."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megagrpo.errors import ModelError, Problem, brief
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.reading import HARMLESS

KNOWN = re.compile(
    r"text_config|vision_config|quantization_config|tie_word_embeddings"
    r"|(image|video|vision_start|vision_end|[be]oi)_token_(id|index)"
    # of the projector, and of the tower's output
    r"|mm_tokens_per_image|multimodal_projector_bias|projector_hidden_act|spatial_merge_size|vision_feature_layer"
)
"""Keys of a composite config.json that do not change what the text model computes, or are read here."""
QWEN_TOWER = r"model\.visual\..*|mtp\..*"
QWEN_NAMES = (("model.", "model.language_model."),)
QWEN_LOADED = (("model.language_model.", "model."),)
TOWER = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
NAMES = (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
LOADED = (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."))


def text_of(**readers: Callable[[Mapping[str, Any]], Architecture]) -> Callable[[Mapping[str, Any]], Architecture]:
    """Returns a reader of a composite config.json. `readers` read its text model, by model_type; the first one reads
    text_configs without a model_type."""

    def architecture_of(config: Mapping[str, Any]) -> Architecture:
        text, vision, family = config.get("text_config"), config.get("vision_config"), str(config.get("model_type"))
        if not isinstance(text, Mapping):
            raise ModelError(Problem(f"config.json: text_config ({family})", brief(text), "the text model's config"))
        if not isinstance(vision, Mapping):
            raise ModelError(Problem(f"config.json: vision_config ({family})", brief(vision), "the tower's config"))
        kind = text.get("model_type", next(iter(readers)))
        if kind not in readers:
            where = f"config.json: text_config.model_type ({family})"
            raise ModelError(Problem(where, brief(kind), " or ".join(readers)))
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
        keys = ("tie_word_embeddings", "quantization_config", "is_causal")
        shared = {key: config[key] for key in keys if key in config}
        return replace(readers[kind]({**text, **shared}), family=family)

    return architecture_of
