"""data: prompts to train on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megagrpo.section import Fraction, Section, Tokens


class DataFileConfig(Section):
    """One parquet or JSONL file of prompts and how much of it to use."""

    path: str
    """File with the columns data_source, prompt, ability, reward_model, extra_info (see docs/data.md)."""

    amount: Annotated[int, Field(ge=1, le=10**8)] | Annotated[float, Field(gt=0, le=1e4)] | Literal["all"] = "all"
    """Rows taken per epoch: an integer counts rows, a float is a share of the rows (2.0: each row twice), or all."""


class DataConfig(Section):
    """Prompts to train on."""

    train: Annotated[list[DataFileConfig], Field(min_length=1)]
    """Files to mix, each with its amount. Rows are shuffled together."""

    prompt_tokens_max: Tokens = 1024
    """Longest prompt, in tokens after the chat template."""

    overlong_prompts: Literal["drop", "truncate_left", "error"] = "drop"
    """What happens to a longer prompt. The count is always reported."""

    shuffle: bool = True
    """Shuffle every epoch, seeded by the recipe's seed and the epoch."""

    chat_template_arguments: dict[str, Any] = {}
    """Extra variables for the chat template, such as enable_thinking."""

    no_resampling_pass_rate: Fraction | None = None
    """Set a prompt aside for the rest of the run once this share of its responses is solved (reward.solved_at) in one
    step. null: every prompt comes again in every epoch."""
