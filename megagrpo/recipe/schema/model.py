"""model: the policy to start from."""

from __future__ import annotations

from typing import Literal

from megagrpo.section import Section


class ModelConfig(Section):
    """The policy to start from; the reference policy is a frozen copy of the same weights."""

    path: str
    """Directory with config.json, safetensors and tokenizer files, or a Hugging Face hub id."""

    revision: str | None = None
    """Branch, tag or commit when `path` is a hub id."""

    tokenizer: str | None = None
    """Directory or hub id of the tokenizer, if it is not with the model."""

    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's own chat template."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Weights and activations. auto: bfloat16 on GPUs (gradients and master weights stay float32), float32 on CPUs."""
