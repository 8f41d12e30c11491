"""data: prompts to train on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megagrpo.section import Fraction, PositiveFloat, Rules, Section, Tokens, repeated

TASK = "reasoning_gym://"
"""Prefix of the location of rows that reasoning-gym makes."""


class ConstantColumn(Section):
    """The same value for every row of a file."""

    value: str
    """Such as gsm8k for data_source."""


Column = Annotated[str, Field(min_length=1)] | ConstantColumn


class ColumnsConfig(Section):
    """The columns of a file that hold the parts of a row. A name with dots, such as reward_model.ground_truth, reads a
    field of an object; in a list, it is shortened to its last part."""

    prompt: Annotated[str, Field(min_length=1)] | None = None
    """Chat messages, or a text, which is one message of the user's. null: prompt, else messages."""

    ground_truth: Column | Annotated[list[str], Field(min_length=1)] | None = None
    """Column with the value that rewards compare with. Text stays; numbers, lists and objects become text (JSON).
    Several names: an object of these columns. null: reward_model.ground_truth, else ground_truth."""

    data_source: Column | None = None
    """Column that names the row's origin; or {value: NAME}, the same for all rows. null: data_source, else dataset."""

    ability: Column | None = None
    """Kind of task, kept in rollouts/. null: ability, if there is such a column."""

    extra_info: list[str] | None = None
    """Further columns that reward functions receive; every row must have them. null: all other columns."""

    RULES: ClassVar[Rules[ColumnsConfig]] = {
        "columns_repeat_a_name": lambda c: (
            {"field": field, "name": name}
            for field, names in (("ground_truth", c.ground_truth), ("extra_info", c.extra_info))
            if isinstance(names, list)
            for name in repeated([name.rpartition(".")[2] for name in names])
        )
    }


class EntryConfig(Section):
    """One entry of a mixture, and how much of it to use."""

    path: str
    """A file, a folder or a pattern of files."""

    @property
    def location(self) -> str:
        """Returns the location of the data: the path, or the name of a generator of rows."""
        return self.path

    amount: Annotated[int, Field(ge=1, le=10**8)] | Annotated[float, Field(gt=0, le=1e4)] | Literal["all"] = "all"
    """Rows taken per epoch: an integer counts rows, a float is a share of the rows (2.0: each row twice), or all."""

    weight: PositiveFloat | None = None
    """Share of the mixture, relative to the other entries' weights, in place of an amount. An epoch is then as short as
    it can be with every row in it; entries that are small for their weight are repeated."""

    RULES: ClassVar[Rules[Any]] = {
        "weight_and_amount": lambda entry: entry.weight is not None and entry.amount != "all"
    }


def weights(field: str) -> Callable[[Section], object]:
    """Makes the rule weight_missing of a field with entries. Weights are shares of a whole: all have one, or none."""
    return lambda section: (
        {"list": field, "index": index}
        for entries in [getattr(section, field)]
        if any(entry.weight is not None for entry in entries)
        for index, entry in enumerate(entries)
        if entry.weight is None
    )


class DataFileConfig(EntryConfig):
    """Prompts from files, or from a task of reasoning-gym, and how much of them to use."""

    path: str = ""
    """A parquet, JSONL, JSON or Arrow file, a folder or a pattern (data/*.parquet) of them, here or at a URL such as
    s3://bucket/folder (see docs/data.md)."""

    columns: ColumnsConfig = ColumnsConfig()
    """Names of columns that differ from those of verl and open-instruct."""

    reasoning_gym: Annotated[str, Field(min_length=1)] | None = None
    """A task of reasoning-gym, such as leg_counting, in place of a path. Needs its package."""

    size: Annotated[int, Field(ge=1, le=10**8)] = 1000
    """Entries of the task."""

    seed: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Entry i of the task is made from seed + i."""

    arguments: dict[str, Any] = {}
    """Arguments of the task, such as max_animals for leg_counting."""

    @property
    def location(self) -> str:
        if self.reasoning_gym is None:
            return self.path
        readable = json.dumps(self.arguments, sort_keys=True).replace("%", "%25").replace("/", "%2F")
        arguments = f"{readable}/" if self.arguments else ""
        return f"{TASK}{arguments}seed={self.seed}/size={self.size}/{self.reasoning_gym}"

    RULES: ClassVar[Rules[Any]] = {
        **EntryConfig.RULES,
        "path_and_task": lambda entry: entry.path and entry.reasoning_gym,
        "no_path_or_task": lambda entry: not entry.path and not entry.reasoning_gym,
        "task_setting_without_task": lambda entry: (
            {"field": field}
            for field in ("size", "seed", "arguments")
            if entry.reasoning_gym is None and entry.given(field)
        ),
        "columns_of_a_task": lambda entry: entry.reasoning_gym is not None and entry.given("columns"),
    }


def overlaps(train: Sequence[DataFileConfig], held_out: Sequence[DataFileConfig]) -> Iterator[dict[str, object]]:
    """Yields each held-out entry of a task that shares rows with one trained on: values of held_out_tasks_overlap."""
    for index, entry in enumerate(held_out):
        for other in train:
            same = (entry.reasoning_gym, entry.arguments) == (other.reasoning_gym, other.arguments)
            after = other.seed + other.size
            if entry.reasoning_gym and same and other.seed - entry.size < entry.seed < after:
                ends = {"last": entry.seed + entry.size - 1, "end": after - 1, "next": after}
                yield {"index": index, "entry": entry, "other": other, **ends}


class DecontaminateConfig(Section):
    """Training prompts that overlap with evaluation sets: the same text, or a long run of the same words."""

    against: list[DataFileConfig] = []
    """Held-out prompts. Empty: those of all eval.sets."""

    ngram: Annotated[int, Field(ge=3, le=1000)] = 13
    """So many words in a row, the same in both, are an overlap; phrases that many held-out prompts share are none."""

    action: Literal["drop", "report"] = "drop"
    """drop: they are left out. report: they are counted and named."""


class DataConfig(Section):
    """Prompts to train on."""

    train: Annotated[list[DataFileConfig], Field(min_length=1)]
    """Entries to mix, each with its amount. Rows are shuffled together."""

    prompt_tokens_max: Tokens = 1024
    """Longest prompt, in tokens after the chat template."""

    overlong_prompts: Literal["drop", "truncate_left", "error"] = "drop"
    """Treatment of a longer prompt. The count is always reported."""

    shuffle: bool = True
    """Shuffle every epoch, seeded by the recipe's seed and the epoch."""

    deduplicate: bool = False
    """Keep only the first of prompts with the same text (but for case and white space), over all entries."""

    decontaminate: DecontaminateConfig | None = None
    """Leave out prompts that evaluation sets have too. Off unless given; {} is with all defaults."""

    system_prompt: str | None = None
    """System message put before every prompt that has none of its own, in training and evaluation."""

    chat_template_arguments: dict[str, Any] = {}
    """Extra variables that the chat template reads, such as enable_thinking. To a template that asks for the date it is
    always 26 July 2024: a prompt is the same tomorrow."""

    cache: str | None = None
    """Folder for the tokens of large files, which a later run finds again. null: megagrpo in $XDG_CACHE_HOME, which is
    ~/.cache by default. It may be emptied at any time."""

    no_resampling_pass_rate: Fraction | None = None
    """Set a prompt aside for the rest of the run once this share of its responses is solved (reward.solved_at) in one
    step. null: every prompt comes again in every epoch."""

    RULES: ClassVar[Rules[DataConfig]] = {"weight_missing": weights("train")}
