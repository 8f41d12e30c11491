"""The sampled groups of each step, saved in the run's directory (checkpoint.keep_batches):

batches/step_000007.safetensors    groups with scores, and what else the step needs of them (checkpoint/groups.py)

The file is written before the step trains, so that a failed step can be inspected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from megagrpo.checkpoint.groups import read_groups, write_groups
from megagrpo.errors import Problem, UnusableCheckpointError
from megagrpo.recipe.defaults import run_directory
from megagrpo.recipe.schema import Recipe
from megagrpo.types import Branch, Group, Sample, Score

BATCHES = "batches"
NAME = re.compile(r"step_(\d{6,})\.safetensors")
Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
Number = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Span = tuple[Number, Annotated[int, msgspec.Meta(ge=1, le=10**9)]]
"""A weight version, and how many tokens in a row it sampled for one request."""


@dataclass(frozen=True)
class LoggedGroup:
    """A background-sampled group as schedule.jsonl has it. number, version: as in algorithm.admission.Admitted."""

    number: Number
    version: Number
    prompt: str
    trained: bool  # false: dynamic sampling dropped it
    samples: tuple[tuple[Span, ...], ...]  # of its responses
    aborted: tuple[Number, ...]  # samples that engines gave up, by place in `samples`


@dataclass(frozen=True)
class Sampled:
    """A step's groups with their scores."""

    groups: list[Group]  # those that the step may train on, in the order of their prompts
    all: list[Group]  # everything that was sampled, `groups` included
    rounds: int = 1  # how often prompts were sampled
    left_over: int = 0  # groups with signal in the last round beyond those wanted
    # Set by sampling in the background: its metrics, and the log of each group of `all`.
    metrics: Mapping[str, float] = field(default_factory=dict)
    logged: Sequence[LoggedGroup] = ()


@dataclass(frozen=True)
class _Notes:
    """The fields of a batch's file beside its groups."""

    total_steps: Annotated[int, msgspec.Meta(ge=1, le=10**9)]
    start: Count  # the run's recipe was then recipe.START.yaml
    groups: tuple[Count, ...]  # indices of Sampled.groups
    rounds: Count
    left_over: Count
    baselines: tuple[float, ...] | None = None  # scores of Sampled.groups' baselines, as earlier versions kept them


@dataclass(frozen=True)
class SavedBatch:
    """A saved batch. `recipe` names the file with the recipe that the step was trained with."""

    sampled: Sampled
    total_steps: int
    recipe: str


def logged_group(
    number: int, version: int, group: Group, joints: Mapping[int, Sequence[int]], *, trained: bool
) -> LoggedGroup:
    """Returns what is logged of a group: of a given response nothing was sampled. joints: as in Order."""
    responses = [] if group.given else list(enumerate(group.responses))
    samples = tuple(tuple(spans(sample.versions, joints.get(at, ()))) for at, sample in responses)
    aborted = tuple(at for at, sample in responses if sample.finish == "abort")
    return LoggedGroup(number, version, group.prompt.id, trained, samples, aborted)


def spans(versions: np.ndarray, joints: Iterable[int]) -> list[Span]:
    """Splits versions, int32 [tokens], into runs of equal versions, which also end at joints."""
    inner = {int(end) for end in np.flatnonzero(np.diff(versions)) + 1} | {*joints}
    ends = sorted({end for end in inner if 0 < end < len(versions)} | ({len(versions)} - {0}))
    return [(int(versions[end - 1]), end - begin) for begin, end in zip([0, *ends], ends, strict=False)]


def save_batch(recipe: Recipe, step: int, sampled: Sampled, total_steps: int, keep: int) -> None:
    """Writes the batch of `step`, and removes all but those of the newest `keep` steps. Raises CheckpointError."""
    directory = run_directory(recipe)
    place = {id(group): index for index, group in enumerate(sampled.all)}
    notes = _Notes(
        total_steps=total_steps,
        start=len(list(directory.glob("recipe.*.yaml"))),
        groups=tuple(place[id(group)] for group in sampled.groups),
        rounds=sampled.rounds,
        left_over=sampled.left_over,
    )
    write_groups(_path(directory, step), sampled.all, asdict(notes))
    for old in saved_steps(directory):
        if old <= step - keep:
            _path(directory, old).unlink(missing_ok=True)


def read_batch(directory: Path, step: int) -> SavedBatch:
    """Reads the batch of `step` of the run in `directory`. Raises UnusableCheckpointError."""
    path = _path(directory, step)
    if not path.exists():
        given = f"saved are {ranges(saved_steps(directory))}"
        raise _unusable(f"{directory}: no batch of step {step}", given)
    everything, notes = read_groups(path, _Notes)
    if max(notes.groups, default=-1) >= len(everything):
        raise _unusable(str(path), f"group {max(notes.groups)} of {len(everything)}")
    unscored = any(not group.scores or not group.samples for group in everything)
    if not notes.groups or unscored or (notes.baselines is not None and len(notes.baselines) != len(notes.groups)):
        raise _unusable(str(path), "groups without samples, scores or baselines")
    for index, value in zip(notes.groups, notes.baselines or (), strict=False):
        everything[index] = replace(everything[index], baseline_score=Score(None if math.isnan(value) else value))
    sampled = Sampled([everything[index] for index in notes.groups], everything, notes.rounds, notes.left_over)
    return SavedBatch(sampled, notes.total_steps, f"recipe.{notes.start}.yaml")


def require_fitting(sampled: Sampled, recipe: Recipe, vocabulary: int, where: str) -> None:
    """Raises UnusableCheckpointError if the recipe cannot train on a batch of another recipe. vocabulary: number of the
    model's tokens."""
    samples = [(np.array(group.prompt.tokens, np.int64), sample) for group in sampled.all for sample in group.samples]
    sequences = [branch.tokens for prompt, sample in samples for branch in branches_of(prompt, sample)]
    longest = max(map(len, sequences), default=0)
    largest = max((int(tokens.max(initial=0)) for tokens in sequences), default=0)
    counted = {len(score.counted) for group in sampled.all for score in group.scores} - {0}
    functions, tokens_max = set(map(len, recipe.reward.lists().values())), recipe.sequence_tokens_max
    lacking = recipe.algorithm.greedy_responses and not all(group.baseline_score for group in sampled.groups)
    problems = [
        Problem(where, given, needed, "name a run whose recipe has the same model, data, reward and lengths")
        for wrong, given, needed in (
            (largest >= vocabulary, f"token {largest}", f"tokens below {vocabulary}, the model's vocabulary"),
            (longest > tokens_max, f"a sequence of {longest} tokens", f"at most {tokens_max}"),
            (
                counted - functions,
                f"scores of {max(counted, default=0)} functions",
                f"{', '.join(map(str, sorted(functions)))} (reward.functions and reward.by_source)",
            ),
            (lacking, "no scores of greedy responses", "them, for algorithm.advantage.name: remax"),
        )
        if wrong
    ]
    if problems:
        raise UnusableCheckpointError(problems)


def branches_of(prompt: np.ndarray, sample: Sample) -> Sequence[Branch]:
    """Returns the branches of an agent's rollout. A response without an agent is one. prompt: its tokens, int64."""
    if sample.agent is not None:
        return sample.agent.branches
    tokens = np.concatenate([prompt, sample.tokens])
    return [Branch(tokens, np.arange(len(tokens)) >= len(prompt), sample.routes)]


def require_another_directory(recipe: Recipe, option: str, source: Path) -> None:
    """Raises UnusableCheckpointError if `source` is the run's own directory."""
    if run_directory(recipe).absolute() == source.absolute():
        fix = "give this run a name of its own, such as name=again"
        raise UnusableCheckpointError(Problem(f"{option} {source}", "the run's own directory", "another run's", fix))


def saved_steps(directory: Path) -> list[int]:
    """Returns the steps whose batches the run in `directory` has kept, in ascending order."""
    names = [NAME.fullmatch(path.name) for path in (directory / BATCHES).glob("step_*")]
    return sorted(int(name[1]) for name in names if name)


def ranges(steps: list[int]) -> str:
    """Returns text such as `steps 1 to 4, 7`, or `none`."""
    first = [step for step in steps if step - 1 not in steps]
    last = [step for step in steps if step + 1 not in steps]
    parts = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(first, last, strict=True)]
    return f"steps {', '.join(parts)}" if parts else "none"


def _path(directory: Path, step: int) -> Path:
    return directory / BATCHES / f"step_{step:06d}.safetensors"


def _unusable(where: str, given: str) -> UnusableCheckpointError:
    fix = "train with checkpoint.keep_batches, which keeps the batches of that many steps"
    return UnusableCheckpointError(Problem(where, given, "a step's batch that was saved whole", fix))
