"""The built-in reward functions. Imports nothing: processes of rewards read it."""

from __future__ import annotations

BUILT_IN = {
    "agent": "inline",
    "gsm8k": "inline",
    "math": "workers",
    "strict_math": "inline",
    "multiple_choice": "inline",
    "string_match": "inline",
    "f1": "inline",
    "search_answer": "inline",
    "json_schema": "workers",
    "format": "workers",
    "code": "workers",
    "ifeval": "workers",
    "reasoning_gym": "workers",
    "think_answer": "inline",
    "length": "inline",
    "language": "workers",
    "repetition": "inline",
    "judge": "asking",
    "judge_pairs": "asking",
    "judge_ranking": "asking",
    "remote": "workers",
    "reward_model": "asking",
}
"""The executor (EXECUTORS of reward/scorer.py) that calls each function.

inline: in the scorer's process, for functions that are fast whatever the response. `format` is not: a pattern can
backtrack for hours, and so can that of a JSON schema. workers: in isolated processes. asking: in an event loop of the
scorer's process, for functions that ask models and compute next to nothing."""


def executor_of(function: str) -> str:
    """Returns the name of the executor that calls a function of a recipe: workers for a user's own."""
    return BUILT_IN.get(function, "workers")
