"""The prompts of a run, read once at its start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megagrpo.data.mixture import FileCount, Mixture, load_mixture
from megagrpo.data.prompts import load_tokenizer
from megagrpo.recipe.schema import AnyRecipe, DataFile, Recipe


def read_tokenizer(recipe: AnyRecipe, directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `directory`, with the recipe's chat template if it names one. Raises ModelError."""
    return load_tokenizer(str(directory), chat_template=recipe.model.chat_template)


def read_mixture(recipe: Recipe, files: Sequence[DataFile], tokenizer: PreTrainedTokenizerBase) -> Mixture:
    """Rendered prompts of data.train or eval.files. Raises DataError."""
    return load_mixture(
        files,
        tokenizer,
        tokens_max=recipe.data.prompt_tokens_max,
        overlong=recipe.data.overlong_prompts,
        template_arguments=recipe.data.chat_template_arguments,
        seed=recipe.seed,
    )


def describe_files(files: Sequence[FileCount], what: str) -> list[str]:
    """A line for each file: `what` it gave (prompts, examples), and over-long ones if there were any."""
    return [
        f"{file.path}: {file.used} {what} of {file.rows} rows"
        + (f", {file.overlong} over-long" if file.overlong else "")
        for file in files
    ]


def total_steps(recipe: Recipe, prompts: int) -> int:
    """Length of the run in steps, rounded up to whole ones; `prompts` are those of one epoch."""
    train, rollout = recipe.train, recipe.rollout
    if train.total_steps is not None:
        return train.total_steps
    if train.total_epochs is not None:
        return math.ceil(train.total_epochs * prompts / rollout.prompts_per_step)
    if train.total_episodes is not None:
        return math.ceil(train.total_episodes / (rollout.prompts_per_step * rollout.samples_per_prompt))
    raise ValueError("one of total_steps, total_epochs and total_episodes is given: checked in recipe/checks.py")
