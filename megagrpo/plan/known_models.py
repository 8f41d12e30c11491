"""Published models whose config.json comes with megagrpo, so that a plan needs neither a network nor a download."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).with_name("configs")


def known_models() -> dict[str, Path]:
    """Hub ids, such as Qwen/Qwen3-8B, and directories with their config.json only: no weights, no tokenizer."""
    return {"/".join(file.parts[-3:-1]): file.parent for file in sorted(CONFIGS.glob("*/*/config.json"))}
