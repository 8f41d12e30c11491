"""eval: sets of held-out prompts, and the names of their metrics."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from megagrpo.recipe.schema.data import DataFileConfig, weights
from megagrpo.recipe.schema.reward import RewardFunctionConfig
from megagrpo.section import (
    TEMPERATURE_MAX,
    TEMPERATURE_MIN,
    Count,
    Fraction,
    NonNegativeInt,
    Number,
    PositiveInt,
    Rules,
    Section,
    Tokens,
)

EvalTemperature = Annotated[float, Field(ge=0, le=TEMPERATURE_MAX)]
SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class EarlyStoppingConfig(Section):
    """A rule that ends the run when an evaluation metric is good enough or stops improving."""

    metric: str
    """SET/METRIC, such as gsm8k/mean@1: a name of the metrics table, without the eval/ prefix. Larger is better."""

    target: Number | None = None
    """Stop once the metric reaches this."""

    patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without a new best."""

    RULES: ClassVar[Rules[EarlyStoppingConfig]] = {
        "stopping_without_a_reason": lambda stopping: stopping.target is None and stopping.patience is None
    }


class EvalSetConfig(Section):
    """One set of held-out prompts. A field that is null has the value of `eval` for all sets."""

    files: Annotated[list[DataFileConfig], Field(min_length=1)]
    """Prompt files, in the same format as data.train."""

    functions: list[RewardFunctionConfig] = []
    """Reward functions of this set alone. Empty: the recipe's reward, which scores each row as in training."""

    solved_at: Number | None = None
    """With `functions`: a response is solved if their weighted sum is at least this. null: full marks of every one."""

    every_steps: PositiveInt | None = None
    """Steps between evaluations on this set."""

    before_training: bool | None = None
    """Evaluate the starting weights on this set too."""

    samples_per_prompt: Count | None = None
    """Responses for each prompt."""

    temperature: EvalTemperature | None = None
    """0 is greedy."""

    top_p: Fraction | None = None
    """Nucleus sampling."""

    top_k: NonNegativeInt | None = None
    """Sample from the k most likely tokens only; 0 is all."""

    response_tokens_max: Tokens | None = None
    """Longest response."""

    RULES: ClassVar[Rules[EvalSetConfig]] = {
        "solved_at_without_functions": lambda held_out: held_out.solved_at is not None and not held_out.functions,
        "weight_missing": weights("files"),
    }


ALONE = EvalSetConfig.model_construct(files=[])
"""A set that overrides nothing. With it the settings of `eval` are checked if there are no sets."""


@dataclass(frozen=True)
class EvalSet:
    """A set with all of its settings: its own, or else those of `eval`. `response_tokens_max` None: the rollout's."""

    name: str
    files: Sequence[DataFileConfig]
    functions: Sequence[RewardFunctionConfig]
    solved_at: float | None
    every_steps: int
    before_training: bool
    samples_per_prompt: int
    temperature: float
    top_p: float
    top_k: int
    response_tokens_max: int | None


SHARED = (
    "every_steps", "before_training", "samples_per_prompt", "temperature", "top_p", "top_k", "response_tokens_max",
)  # fmt: skip
"""Fields of `eval` for all sets that a set may override."""


class EvalConfig(Section):
    """Evaluation on sets of held-out prompts. The other fields hold for every set that does not override them."""

    sets: dict[str, EvalSetConfig] = {}
    """Sets by name, such as {gsm8k: {files: [{path: test.parquet}]}}: metrics are eval/gsm8k/... Empty: no
    evaluation."""

    every_steps: PositiveInt = 10
    """Steps between evaluations. All sets are evaluated at the last step."""

    before_training: bool = True
    """Evaluate the starting weights too."""

    samples_per_prompt: Count = 1
    """Responses for each prompt: the k of mean@k and maj@k, and the largest k of pass@k and best@k."""

    temperature: EvalTemperature = 0.0
    """0 is greedy."""

    top_p: Fraction = 1.0
    """Nucleus sampling."""

    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens only; 0 is all."""

    response_tokens_max: Tokens | None = None
    """Longest response; the default is the rollout's."""

    early_stopping: EarlyStoppingConfig | None = None
    """Off unless given."""

    def of_sets(self) -> dict[str, EvalSet]:
        """Returns each set with all of its settings, by name."""
        return {name: self._whole(name, held_out) for name, held_out in self.sets.items()}

    def files_of_sets(self) -> dict[str, Sequence[DataFileConfig]]:
        """Returns the files of each set, by its name."""
        return {name: held_out.files for name, held_out in self.sets.items()}

    def due(self, step: int, *, last: bool = False) -> list[str]:
        """Returns the names of the sets on which the weights after `step` are evaluated: all, if it is the `last`. Step
        0 is before training."""
        return [
            name
            for name, held_out in self.of_sets().items()
            if last or (step % held_out.every_steps == 0 if step else held_out.before_training)
        ]

    def _whole(self, name: str, held_out: EvalSetConfig) -> EvalSet:
        settings = {key: getattr(self if getattr(held_out, key) is None else held_out, key) for key in SHARED}
        return EvalSet(name, held_out.files, held_out.functions, held_out.solved_at, **settings)

    def _places(self, key: str, wrong: Callable[[EvalSet], bool]) -> Iterator[dict[str, object]]:
        """Yields the place of `key` in each set with wrong settings, or its place for all sets."""
        places: dict[str, EvalSet] = {}
        for name, held_out in (self.sets or {"": ALONE}).items():
            if wrong(whole := self._whole(name, held_out)):
                places.setdefault(key if getattr(held_out, key) is None else f"sets.{name}.{key}", whole)
        return ({"place": place, "set": whole} for place, whole in places.items())

    RULES: ClassVar[Rules[EvalConfig]] = {
        "name_of_a_set": lambda e: ({"name": name} for name in e.sets if not SET_NAME.fullmatch(name)),
        "set_named_train": lambda e: "train" in e.sets,
        "temperature_near_zero": lambda e: e._places("temperature", lambda s: 0 < s.temperature < TEMPERATURE_MIN),
        "greedy_samples": lambda e: e._places(
            "samples_per_prompt", lambda s: s.samples_per_prompt > 1 and s.temperature == 0
        ),
        "greedy_top_p": lambda e: e._places("top_p", lambda s: s.top_p != 1 and s.temperature == 0),
        "greedy_top_k": lambda e: e._places("top_k", lambda s: s.top_k != 0 and s.temperature == 0),
    }


def unknown_metric(metric: str, evaluation: EvalConfig) -> Iterator[dict[str, object]]:
    """Yields the values of metric_of_a_set unless an evaluation of the metric's set gives it."""
    named, _, rest = metric.partition("/")
    if named not in evaluation.sets:
        return
    samples = evaluation.of_sets()[named].samples_per_prompt
    valid = evaluation_metric_names(samples)
    source, slash, name = rest.rpartition("/")
    if name in valid:
        return
    same = f"{name.partition('@')[0]}@{samples}"
    near = [same] if same in valid else difflib.get_close_matches(name, valid, n=1)
    fix = f"did you mean `{named}/{source}{slash}{near[0]}`?" if near else f"write {named}/{valid[0]}"
    yield {"set": named, "valid": ", ".join(valid), "first": valid[0], "samples": samples, "fix": fix}


def evaluation_metric_names(samples: int) -> list[str]:
    """Returns the names of the scores of an evaluation with `samples` per prompt (see evaluation/metrics.py)."""
    every_k = sorted({2**i for i in range(samples.bit_length())} | {samples})
    of_one = [f"mean@{samples}", *(f"pass@{k}" for k in every_k)]
    return of_one if samples == 1 else [*of_one, *(f"best@{k}" for k in every_k[1:]), f"maj@{samples}"]
