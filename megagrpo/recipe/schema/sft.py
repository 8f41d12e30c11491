"""The recipe of supervised fine-tuning: conversations in, the same model out, better at the assistant's part."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megagrpo.recipe.schema.data import DataFileConfig
from megagrpo.recipe.schema.model import ModelConfig
from megagrpo.recipe.schema.recipe import RunName
from megagrpo.recipe.schema.run import CheckpointConfig, ClusterConfig, TrackConfig
from megagrpo.recipe.schema.train import TrainConfig
from megagrpo.section import NonNegativeInt, PositiveInt, Section


class ConversationFileConfig(DataFileConfig):
    """One parquet or JSONL file of conversations and how much of it to use."""

    path: str
    """File with the column messages: a list of {role, content} that ends with the assistant's (see docs/sft.md)."""


class SftDataConfig(Section):
    """Conversations to learn from."""

    train: Annotated[list[ConversationFileConfig], Field(min_length=1)]
    """Files to mix, each with its amount. Rows are shuffled together."""

    examples_per_step: PositiveInt
    """Conversations in one optimizer step, over all data ranks."""

    tokens_max: PositiveInt = 4096
    """Longest conversation, in tokens after the chat template."""

    overlong_examples: Literal["drop", "truncate", "error"] = "drop"
    """What happens to a longer one: dropped, cut at its end, or an error. The count is always reported."""

    shuffle: bool = True
    """Shuffle every epoch, seeded by the recipe's seed and the epoch. false: file after file, in their order."""

    chat_template_arguments: dict[str, Any] = {}
    """Extra variables for the chat template, such as enable_thinking."""


class SftEvalConfig(Section):
    """Loss on held-out conversations."""

    files: list[ConversationFileConfig] = []
    """Conversation files, in the same format as data.train. Empty: no evaluation."""

    every_steps: PositiveInt = 10
    """Steps between evaluations. The last step is always evaluated."""

    before_training: bool = True
    """Evaluate the starting weights too."""


class SftRecipe(Section):
    """One supervised fine-tuning, whole."""

    kind: Literal["sft"]
    """What makes it a recipe for `megagrpo sft`."""

    name: RunName
    """Name of the run and of its directory; letters, digits, dot, dash and underscore."""

    seed: NonNegativeInt = 0
    """Seeds the data order and the ranks' generators."""

    model: ModelConfig
    data: SftDataConfig
    train: TrainConfig
    eval: SftEvalConfig = SftEvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    cluster: ClusterConfig = ClusterConfig()
