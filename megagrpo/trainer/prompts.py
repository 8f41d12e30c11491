"""The prompts of a run, read once at its start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megagrpo.data.mixture import FileCount
from megagrpo.data.prompts import Mixture, load_mixture
from megagrpo.recipe.schema import AnyRecipe, DataFileConfig, Recipe
from megagrpo.tokenizer import load_chat_tokenizer


def read_tokenizer(recipe: AnyRecipe, directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `directory`, with the recipe's chat template if it names one. Raises ModelError."""
    return load_chat_tokenizer(directory, recipe.model.chat_template)


def read_mixture(recipe: Recipe, files: Sequence[DataFileConfig], tokenizer: PreTrainedTokenizerBase) -> Mixture:
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
