"""eval: sets of held-out prompts, and the names of their metrics."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from megagrpo.errors import Problem
from megagrpo.recipe.schema.data import DataFileConfig, weight_rules
from megagrpo.recipe.schema.reward import RewardFunctionConfig
from megagrpo.section import (
    TEMPERATURE_MAX,
    TEMPERATURE_MIN,
    Count,
    Fraction,
    NonNegativeInt,
    Number,
    PositiveInt,
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

    def rules(self) -> Iterator[Problem]:
        if self.target is None and self.patience is None:
            given = "neither target nor patience"
            yield Problem("target", given, "at least one of them: when to stop", "add target: 0.9 or patience: 5")


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

    def rules(self) -> Iterator[Problem]:
        if self.solved_at is not None and not self.functions:
            given = f"{self.solved_at:g}, without functions"
            needed = "null: reward.solved_at is for the recipe's reward"
            yield Problem("solved_at", given, needed, "remove it, or give functions")
        yield from weight_rules("files", self.files)


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
        return {name: self._whole(name, one) for name, one in self.sets.items()}

    def files_of_sets(self) -> dict[str, Sequence[DataFileConfig]]:
        """Returns the files of each set, by its name."""
        return {name: one.files for name, one in self.sets.items()}

    def due(self, step: int, *, last: bool = False) -> list[str]:
        """Returns the names of the sets on which the weights after `step` are evaluated: all, if it is the `last`. Step
        0 is before training."""
        return [
            name
            for name, one in self.of_sets().items()
            if last or (step % one.every_steps == 0 if step else one.before_training)
        ]

    def rules(self) -> Iterator[Problem]:
        for name in self.sets:
            if not SET_NAME.fullmatch(name):
                needed = "letters, digits, dash and underscore: metrics are named after it"
                yield Problem(f"sets.{name}", name, needed, "another name, such as held_out")
            elif name == "train":
                needed = "another name than that of the samples that are trained on, in rollouts/"
                yield Problem(f"sets.{name}", name, needed, "such as train_prompts")
        alone = EvalSetConfig.model_construct(files=[])  # without sets, the section by itself
        told: dict[str, Problem] = {}
        for name, one in (self.sets or {"": alone}).items():
            for problem in _sampling_rules(self._whole(name, one)):
                inside = f"sets.{name}." if getattr(one, problem.where) is not None else ""
                found = replace(problem, where=inside + problem.where)
                told.setdefault(found.where, found)
        yield from told.values()
        if self.early_stopping:
            yield from metric_rules("early_stopping.metric", self.early_stopping.metric, self)

    def _whole(self, name: str, one: EvalSetConfig) -> EvalSet:
        settings = {key: getattr(self if getattr(one, key) is None else one, key) for key in SHARED}
        return EvalSet(name, one.files, one.functions, one.solved_at, **settings)


def _sampling_rules(one: EvalSet) -> Iterator[Problem]:
    """Yields the problems of a set's sampling; `where` is a key of the set, or of eval."""
    if 0 < one.temperature < TEMPERATURE_MIN:
        needed = f"0, which is greedy, or at least {TEMPERATURE_MIN:g}"
        yield Problem("temperature", f"{one.temperature:g}", needed, "temperature: 0")
    if one.samples_per_prompt > 1 and one.temperature == 0:
        given = f"{one.samples_per_prompt} with temperature 0"
        needed = "1: greedy decoding gives the same response every time"
        yield Problem("samples_per_prompt", given, needed, "temperature: 1.0, or samples_per_prompt: 1")
    for key, value, off in (("top_p", one.top_p, 1.0), ("top_k", one.top_k, 0)):
        if one.temperature == 0 and value != off:
            needed = f"{off:g}: greedy decoding takes the most likely token"
            yield Problem(key, f"{value} with temperature 0", needed, f"give a temperature, or remove {key}")


def metric_rules(where: str, metric: str, evaluation: EvalConfig) -> Iterator[Problem]:
    """Yields a problem unless an evaluation gives the metric that the field `where` asks for."""
    sets = evaluation.of_sets()
    if not sets:
        yield Problem(where, f"{metric}, and no eval.sets", "prompts to evaluate on", "give eval.sets")
        return
    named, _, rest = metric.partition("/")
    if named not in sets:
        meant = [f"{guess}/{rest}" for guess in difflib.get_close_matches(named, sets, n=1) if rest]
        needed = f"SET/METRIC, SET being {' or '.join(sets)}"
        yield Problem(where, metric, needed, f"did you mean `{(meant or [f'{next(iter(sets))}/{metric}'])[0]}`?")
        return
    samples = sets[named].samples_per_prompt
    valid = evaluation_metric_names(samples)
    source, slash, name = rest.rpartition("/")
    if name in valid:
        return
    same = f"{name.partition('@')[0]}@{samples}"
    near = [same] if same in valid else difflib.get_close_matches(name, valid, n=1)
    of_samples = f"{named}/ and one of {', '.join(valid)} (with samples_per_prompt {samples})"
    fix = f"did you mean `{named}/{source}{slash}{near[0]}`?" if near else f"write {named}/{valid[0]}"
    yield Problem(where, metric, f"{of_samples}, or of a single data source, as {named}/SOURCE/{valid[0]}", fix)


def evaluation_metric_names(samples: int) -> list[str]:
    """Returns the names of the scores of an evaluation with `samples` per prompt (see evaluation/metrics.py)."""
    every_k = sorted({2**i for i in range(samples.bit_length())} | {samples})
    of_one = [f"mean@{samples}", *(f"pass@{k}" for k in every_k)]
    return of_one if samples == 1 else [*of_one, *(f"best@{k}" for k in every_k[1:]), f"maj@{samples}"]
