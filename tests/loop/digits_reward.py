"""A reward that differs between samples of an untrained model already: the share of digits in a response."""

from __future__ import annotations

from typing import Any


def share_of_digits(data_source: str, response: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    digits = sum(character.isdigit() for character in response)
    return {"score": digits / max(len(response), 1), "digits": float(digits)}
