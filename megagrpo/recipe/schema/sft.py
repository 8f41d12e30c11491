"""The recipe of supervised fine-tuning: conversations in, the same model out, better at the assistant's part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from megagrpo.errors import Problem
from megagrpo.recipe.schema.data import EntryConfig, weight_rules
from megagrpo.recipe.schema.recipe import RunName
from megagrpo.recipe.schema.run import CheckpointConfig, ClusterConfig, ModelConfig, TrackConfig
from megagrpo.recipe.schema.train import (
    TrainConfig,
    deterministic_rules,
    device_rules,
    dtype_rules,
    length_rules,
    longest_rules,
)
from megagrpo.section import PositiveInt, Section, Seed, Tokens

NO_ENGINES = "nothing: supervised fine-tuning has no engines"
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

    def rules(self) -> Iterator[Problem]:
        yield from weight_rules("train", self.train)


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

    def rules(self) -> Iterator[Problem]:
        yield from weight_rules("files", self.files)


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

    def rules(self) -> Iterator[Problem]:
        train, longest, data = self.train, self.data.tokens_max, self.train.layout.data
        if train.total_episodes is not None:
            needed = "nothing: no responses are generated"
            yield Problem("train.total_episodes", f"{train.total_episodes}", needed, "give total_steps or total_epochs")
        else:
            yield from length_rules(train, ("total_steps", "total_epochs"), "add total_epochs: N")
        if self.data.examples_per_step < data:
            given = f"{self.data.examples_per_step}, and {data} data ranks"
            fix = f"examples_per_step: {data}, or a smaller train.layout.data"
            yield Problem("data.examples_per_step", given, "at least one example of every step for each data rank", fix)
        yield from longest_rules(
            train, longest, described=f"examples of up to {longest}", what="example", limits=("data.tokens_max",)
        )
        if train.logprob_tokens_per_microbatch is not None:
            given = f"{train.logprob_tokens_per_microbatch}"
            needed = "nothing: no logprobs are computed before an update"
            yield Problem("train.logprob_tokens_per_microbatch", given, needed, "remove it")
        yield from device_rules(train, self.cluster)
        yield from dtype_rules(train, self.model.dtype)
        if self.deterministic:
            yield from deterministic_rules(train)
        if train.offload:
            yield Problem("train.offload", given=", ".join(train.offload), needed=NO_ENGINES, fix="remove it")
        if self.cluster.placement != "colocated":
            yield Problem("cluster.placement", given=self.cluster.placement, needed=NO_ENGINES, fix="remove it")
        if (devices := self.cluster.engine_devices) is not None:
            yield Problem("cluster.engine_devices", given=f"{devices}", needed=NO_ENGINES, fix="remove it")
        if self.checkpoint.keep_batches:
            given = f"{self.checkpoint.keep_batches}"
            yield Problem("checkpoint.keep_batches", given, "nothing: no responses are sampled", fix="remove it")
        if self.checkpoint.keep_best is not None:
            needed = "nothing: it keeps the checkpoint with the largest metric, and a held-out loss should be small"
            fix = "remove it, and set checkpoint.keep_last to as many as you want to choose from"
            yield Problem("checkpoint.keep_best", self.checkpoint.keep_best, needed, fix)
