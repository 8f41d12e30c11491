"""schedule.jsonl, a line per step: the decisions of background sampling that depend on the machine's speed; its replay.

The decisions: which groups a step takes, which weights were the newest when each began, and after which tokens of a
response engines got other weights. Everything else follows from seeds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import msgspec

from megagrpo.errors import Problem, UnusableCheckpointError, first_line
from megagrpo.recipe.schema import Recipe
from megagrpo.rollout.pool import Order
from megagrpo.rollout.requests import nothing_sampled, with_baseline
from megagrpo.track.jsonl import SCHEDULE_FILE
from megagrpo.trainer.batches import LoggedGroup, Sampled, logged_group, ranges
from megagrpo.trainer.run import Run
from megagrpo.trainer.sampling import staleness_metrics, step_of
from megagrpo.trainer.schedule import EngineSource
from megagrpo.trainer.step import score
from megagrpo.types import Group, Request, Sample

AS_LOGGED = ("staleness/continued", "cut/")


@dataclass(frozen=True)
class LoggedStep:
    step: Annotated[int, msgspec.Meta(ge=1, le=10**9)]
    metrics: dict[str, float]  # metrics that a replay cannot recompute: AS_LOGGED
    groups: tuple[LoggedGroup, ...]


def schedule_line(step: int, sampled: Sampled) -> dict[str, Any]:
    """Returns the line of a step whose groups were sampled in the background."""
    metrics = {name: value for name, value in sampled.metrics.items() if name.startswith(AS_LOGGED)}
    return {"step": step, "metrics": metrics, "groups": list(map(asdict, sampled.logged))}


def read_schedule(directory: Path, recipe: Recipe) -> list[LoggedStep]:
    """Reads the steps of the run in `directory`, from the first on. Raises UnusableCheckpointError."""
    path = directory / SCHEDULE_FILE
    lines: dict[int, LoggedStep] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):  # else the end of the run cut it off
                of_step = msgspec.convert(json.loads(line), LoggedStep)
                lines[of_step.step] = of_step
    except OSError as error:
        raise _unusable(str(path), error.strerror or str(error), "the directory of a run, such as runs/NAME") from error
    except (ValueError, RecursionError) as error:
        raise _unusable(f"{path}:{len(lines) + 1}", first_line(error), "a line that a run has written whole") from error
    steps = range(1, max(lines, default=1) + 1)
    if absent := sorted(set(steps) - lines.keys()):
        raise _unusable(str(path), f"no {ranges(absent)}", "every step from the first on")
    logged = [lines[step] for step in steps]
    wanted = recipe.rollout.samples_per_prompt + recipe.algorithm.greedy_responses
    if others := {len(group.samples) for step in logged for group in step.groups} - {0, wanted}:  # 0: given
        raise _unusable(str(path), f"{max(others)} responses to a prompt", f"{wanted}, as in the recipe")
    return logged


def _unusable(where: str, given: str, needed: str) -> UnusableCheckpointError:
    fix = "name a run whose samples came in the background (schedule async, one_step_off, carry_over or oversample)"
    return UnusableCheckpointError(Problem(where, given, needed, fix))


class Logged(EngineSource):
    """The samples of a run whose schedule is repeated. Before a step trains, engines sample all tokens that its weights
    sampled in the repeated run, of any group; they idle while it trains."""

    def __init__(self, run: Run, logged: Sequence[LoggedStep], say: Callable[[str], None]) -> None:
        super().__init__(run)
        self._steps, self._say = logged, say
        self._due: defaultdict[int, list[tuple[LoggedGroup, int, int]]] = defaultdict(list)
        """By version: the group, the sample's place in it, and the index of the span that the version samples."""
        for step in logged:
            for group in step.groups:
                for place, of_sample in enumerate(group.samples):
                    for index, (version, _) in enumerate(of_sample):
                        self._due[version].append((group, place, index))
        self._samples: dict[tuple[int, int], Sample] = {}
        """Samples so far, by group number and place."""

    def sample(self, step: int) -> Sampled:
        logged, version = self._steps[step - 1], step - 1
        with self.engines_alone():
            with self.run.clock.phase("rollout"):
                self._sample_with(version)
                unscored = list(map(self._whole, logged.groups))
            everything = score(self.run, unscored)
        again, differ = [], 0
        for of_group, group in zip(logged.groups, everything, strict=True):
            # Spans of a sample meet after these numbers of its tokens.
            joints = {at: list(accumulate(n for _, n in spans[:-1])) for at, spans in enumerate(of_group.samples)}
            again.append(logged_group(of_group.number, of_group.version, group, joints, trained=of_group.trained))
            differ += sum(before != now for before, now in zip(of_group.samples, again[-1].samples, strict=True))
        if differ:
            self._say(f"step {step}: {differ} responses have other lengths than in the run that is repeated")
        groups = [group for of_group, group in zip(logged.groups, everything, strict=True) if of_group.trained]
        carried = sum(of_group.trained and of_group.version < version for of_group in logged.groups)
        metrics = {"staleness/carried_over": float(carried), **staleness_metrics(groups, version), **logged.metrics}
        return Sampled(groups, everything, metrics=metrics, logged=again)

    def _sample_with(self, version: int) -> None:
        """Generates all tokens that this version sampled: of each response one span after the other."""
        rollouts = self.run.rollouts
        orders: dict[tuple[int, int], Order] = {}
        requests: dict[int, list[Request]] = {}
        later = []
        for group, place, index in self._due.pop(version, ()):
            if (group.number, place) in orders:
                later.append((group, place, index))
                continue
            begun, of_sample = self._samples.get((group.number, place)), group.samples[place]
            if begun is not None and begun.finish == "stop":  # sooner than in the run
                continue
            if group.number not in requests:
                requests[group.number] = self._order(group).requests
            request = replace(requests[group.number][place], begun=begun)
            if index < len(of_sample) - 1 or place in group.aborted:  # then come other weights, or the end
                tokens = sum(count for _, count in of_sample[: index + 1])
                request = replace(request, sampling=replace(request.sampling, max_tokens=tokens))
            orders[group.number, place] = Order([request])
        rollouts.add(list(orders.values()))
        rollouts.wait(lambda: all(order.complete for order in orders.values()))
        self._samples |= {at: order.samples[0] for at, order in orders.items()}
        if later:
            self._due[version] = later
            self._sample_with(version)

    def _whole(self, group: LoggedGroup) -> Group:
        order, samples = self._order(group), []
        if order.complete:  # its response is given
            return order.group()
        for place, request in enumerate(order.requests):
            sample = self._samples.pop((group.number, place), None) or nothing_sampled(request)
            samples.append(replace(sample, finish="abort") if place in group.aborted else sample)
        return with_baseline(Group(self.run.cursor.named(group.prompt), tuple(samples)), self.run.recipe)

    def _order(self, group: LoggedGroup) -> Order:
        run = self.run
        return run.rollouts.order(run.cursor.named(group.prompt), step_of(group.number, run.recipe))
