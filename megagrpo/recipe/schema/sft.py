"""The recipe of supervised fine-tuning: conversations in, the same model out, better at the assistant's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megagrpo.recipe.schema.data import EntryConfig, weights
from megagrpo.recipe.schema.recipe import RunName
from megagrpo.recipe.schema.run import CheckpointConfig, ClusterConfig, ModelConfig, TrackConfig
from megagrpo.recipe.schema.train import TRAINING_RULES, TrainConfig, too_long
from megagrpo.section import PositiveInt, Rules, Section, Seed, Tokens

HELD_OUT = "held_out"
"""The one set of an evaluation."""


class ConversationFileConfig(EntryConfig):
    """Conversations from files, and how much of them to use."""

    path: str
    """A file, a folder or a pattern of files with the column messages: a list of {role, content} that ends with the
    assistant's (see docs/sft.md)."""


class SftDataConfig(Section):
    """Conversations to learn from."""

    train: Annotated[list[ConversationFileConfig], Field(min_length=1)]
    """Files to mix, each with its amount. Rows are shuffled together."""

    examples_per_step: Annotated[int, Field(ge=1, le=10**6)]
    """Conversations in one optimizer step, over all data ranks."""

    tokens_max: Tokens = 4096
    """Longest conversation, in tokens after the chat template."""

    overlong_examples: Literal["drop", "truncate", "error"] = "drop"
    """Treatment of a longer one: dropped, cut at its end, or an error. The count is always reported."""

    shuffle: bool = True
    """Shuffle every epoch, seeded by the recipe's seed and the epoch. false: file after file, in their order."""

    chat_template_arguments: dict[str, Any] = {}
    """Extra variables that the chat template reads, such as enable_thinking. To a template that asks for the date it is
    always 26 July 2024: a prompt is the same tomorrow."""

    cache: str | None = None
    """Folder for the tokens of large files, which a later run finds again. null: megagrpo in $XDG_CACHE_HOME, which is
    ~/.cache by default. It may be emptied at any time."""

    RULES: ClassVar[Rules[SftDataConfig]] = {"weight_missing": weights("train")}


class SftEvalConfig(Section):
    """Loss on held-out conversations."""

    files: list[ConversationFileConfig] = []
    """Conversation files, in the same format as data.train. Empty: no evaluation."""

    every_steps: PositiveInt = 10
    """Steps between evaluations. The last step is always evaluated."""

    before_training: bool = True
    """Evaluate the starting weights too."""

    def files_of_sets(self) -> dict[str, Sequence[ConversationFileConfig]]:
        """Returns all files as one set; no set without files."""
        return {HELD_OUT: self.files} if self.files else {}

    def due(self, step: int, *, last: bool = False) -> list[str]:
        """Returns the sets on which the weights after `step` are evaluated. Step 0 is before training."""
        is_due = last or (step % self.every_steps == 0 if step else self.before_training)
        return [HELD_OUT] if self.files and is_due else []

    RULES: ClassVar[Rules[SftEvalConfig]] = {"weight_missing": weights("files")}


class SftRecipe(Section):
    """One supervised fine-tuning, whole."""

    kind: Literal["sft"]
    """Marks a recipe for `megagrpo sft`."""

    name: RunName
    """Name of the run and of its directory; letters, digits, dot, dash and underscore."""

    seed: Seed = 0
    """Seeds the data order and the ranks' generators."""

    deterministic: bool = False
    """Two runs give the same metrics and weights, bit for bit, on like machines with the same packages. Kernels are
    slower. See docs/debugging.md."""

    model: ModelConfig
    data: SftDataConfig
    train: TrainConfig
    eval: SftEvalConfig = SftEvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def sequence_described(self) -> str:
        """Returns the longest sequence in words."""
        return f"examples of up to {self.data.tokens_max}"

    RULES: ClassVar[Rules[SftRecipe]] = {
        "episodes_of_sft": lambda r: r.train.total_episodes is not None,
        "no_length_of_sft": lambda r: not r.train.lengths,
        "several_lengths_of_sft": lambda r: r.train.lengths == ["total_steps", "total_epochs"],
        "data_ranks_without_examples": lambda r: r.data.examples_per_step < r.train.layout.data,
        "longest_example": lambda r: too_long(r.train, r.data.tokens_max),
        "logprob_tokens_of_sft": lambda r: r.train.logprob_tokens_per_microbatch is not None,
        **TRAINING_RULES,
        "offload_of_sft": lambda r: r.train.offload,
        "quantization_of_sft": lambda r: r.train.quantization,
        "placement_of_sft": lambda r: r.cluster.placement != "colocated",
        "engine_devices_of_sft": lambda r: r.cluster.engine_devices is not None,
        "batches_of_sft": lambda r: r.checkpoint.keep_batches,
        "best_of_sft": lambda r: r.checkpoint.keep_best is not None,
    }
