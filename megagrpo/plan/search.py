"""A search for the fastest layout on so many GPUs, of those that are legal and fit.

All choices together are too many, so a search goes in three rounds: layouts with every saving of memory, then savings
for the best layouts, then engines for the best of those. Each round ranks by the same estimate as a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from megagrpo.errors import Problem, RecipeError
from megagrpo.plan.advice import node_problems
from megagrpo.plan.candidates import (
    SGLANG,
    Values,
    changed,
    engine_gpus,
    engines,
    layouts,
    offloads,
    placed,
    recomputes,
    savings,
    value_at,
    value_text,
)
from megagrpo.plan.case import Case
from megagrpo.plan.communication import Seconds
from megagrpo.plan.memory import DeviceMemory, memory
from megagrpo.plan.parameters import expert_parameters, model_bytes, total_parameters
from megagrpo.plan.plan import Estimate, lacking_bytes
from megagrpo.plan.schedules import ASYNC, SYNC, ScheduleTime, Work, allowed, schedule_time, steady_seconds
from megagrpo.plan.time import StepTime, step_time, training_phases
from megagrpo.plan.units import byte_text
from megagrpo.recipe.defaults import plan_devices
from megagrpo.recipe.model_rules import critic_problems, model_problems
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.recipe.schema.schedule import SyncConfig
from megagrpo.section import broken_rules
from megagrpo.weights.families.architecture import Architecture

LAYOUTS_KEPT, SAVINGS_KEPT, SHOWN = 24, 6, 5
SPARE = 0.05  # of a card, for what estimates do not see
APART = (*(f"train.layout.{size}" for size in ("tensor", "pipeline", "context", "expert")), "cluster.placement")
SPLITS_SIMULATED, SPLITS_SHOWN = 6, 3
SPLIT = (*APART, "train.layout.data")
ENGINE_WEIGHTS_SHARE = 0.4


@dataclass(frozen=True)
class Choice:
    """A layout that is recommended: overrides for the command line, its estimate, and the reason in a sentence.

    `schedule`: the times of a split of the GPUs whose engines sample all the time.
    """

    overrides: tuple[str, ...]
    estimate: Estimate
    reason: str
    schedule: ScheduleTime | None = None

    @property
    def words(self) -> str:
        """Returns the overrides as words of a shell."""
        return " ".join(f"'{each}'" if " " in each else each for each in self.overrides)


@dataclass(frozen=True)
class Search:
    """The best choices, fastest first, of `legal` layouts and `estimated` candidates, under the recipe's schedule.
    `asynchronous` has engines on GPUs of their own that sample all the time, if the recipe's rules allow it.

    If nothing fits, `choices` is empty and `nearest` lacks the least memory; None if nothing is even legal.
    """

    gpus: int
    choices: tuple[Choice, ...]
    asynchronous: tuple[Choice, ...]
    legal: int
    estimated: int
    nearest: Choice | None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Returns one problem if nothing fits."""
        if self.choices:
            return ()
        lacking = "none legal"
        if self.nearest:
            lacking = f"{byte_text(self.nearest.estimate.lacking_bytes)} too much at least"
        fix = "more GPUs, larger ones, or shorter sequences"
        return (Problem(f"--search on {self.gpus} GPUs", lacking, "a layout that fits", fix),)


def search(case: Case, gpus: int | None = None) -> Search:
    """Returns layouts for a plan's case, ranked by estimated seconds of a step: on as many GPUs as its recipe has, or
    on `gpus`. Raises RecipeError if their kind is not known."""
    if case.card_bytes is None:
        field, given, fix = "cluster.gpu", "none", "cluster.gpu=H100"
        if case.device == "cpu":
            field, given, fix = "cluster.device", "cpu", "cluster.device=cuda cluster.gpu=H100"
        raise RecipeError(Problem(field, given, "the kind of GPU that a search is for", fix))
    in_turn = changed(case.recipe, {"schedule": SYNC}) if isinstance(case.recipe, Recipe) else case.recipe
    run = _Run(replace(case, recipe=in_turn), gpus or case.device_plan.bundles, case.card_bytes)
    sparing = run.candidates(_sparing_layouts(run))
    best = fitting = run.fitting(sparing, LAYOUTS_KEPT)
    asynchronous: list[Choice] = []
    if fitting:
        kept = [found.values for found in fitting]
        thrifty = ({**kind, **way} for kind in kept for way in savings(case.recipe, case.architecture, kind))
        frugal = run.fitting(run.candidates(thrifty), SAVINGS_KEPT)
        # Rounds before have engines beside the ranks, which its own schedule may not allow.
        run.case, run.nearest = case, None
        candidates = run.candidates(_engines_of(run, frugal))
        best = run.fitting(candidates, SHOWN, apart=APART, seconds=_ranked_by)
        asynchronous = _asynchronous(run, candidates)
    nearest = run.choice(run.nearest) if run.nearest and not best else None
    choices = sorted(map(run.choice, best), key=lambda choice: choice.estimate.time.seconds)
    return Search(run.gpus, tuple(choices), tuple(asynchronous), len(sparing), run.estimated, nearest)


# --- rounds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """A legal choice. Its memory is estimated only if it is fast enough to matter."""

    values: Values
    case: Case
    time: StepTime
    memory: tuple[DeviceMemory, ...] = ()
    lacking: int = 0


@dataclass
class _Run:
    """The state of a search: its case, and the candidates that it has seen so far."""

    case: Case
    gpus: int
    card_bytes: int
    estimated: int = 0
    nearest: _Found | None = None
    training: dict[tuple[str, ...], dict[str, Seconds]] = field(default_factory=dict)  # by values in `train`

    def candidates(self, choices: Iterable[Values]) -> list[_Found]:
        """Returns the legal choices, with the seconds of a step."""
        found = {}
        for values in choices:
            key = tuple(str(values[path]) for path in sorted(values))
            if key in found:
                continue
            case = replace(self.case, recipe=changed(self.case.recipe, values))
            if legal(case, checked=self.case.recipe):
                # Candidates that differ only in engines or offload share their training times.
                train = (pair for pair in values.items() if pair[0].startswith("train."))
                shared = tuple(f"{path}={value}" for path, value in train if path != "train.offload")
                if shared not in self.training:
                    self.training[shared] = training_phases(case)
                found[key] = _Found(values, case, step_time(case, self.training[shared]))
        self.estimated += len(found)
        return list(found.values())

    def fitting(
        self,
        candidates: Iterable[_Found],
        most: int,
        apart: Sequence[str] = (),
        seconds: Callable[[_Found], float] = lambda found: found.time.seconds,
    ) -> list[_Found]:
        """Returns the fastest `most` that fit, only the fastest of those that agree in the fields `apart`, if given."""
        found: dict[object, _Found] = {}
        for candidate in sorted(candidates, key=seconds):
            key = tuple(candidate.values[path] for path in apart) if apart else len(found)
            if key in found:
                continue
            candidate = self._with_memory(candidate)
            if candidate.lacking == 0:
                found[key] = candidate
            elif self.nearest is None or candidate.lacking < self.nearest.lacking:
                self.nearest = candidate
            if len(found) == most:
                break
        return list(found.values())

    def _with_memory(self, candidate: _Found) -> _Found:
        """Adds the candidate's memory. Stops once it lacks as much as `nearest`: it cannot be nearer."""
        held, lacking = [], 0
        for kind in memory(candidate.case):
            held.append(kind)
            lacking = max(lacking, lacking_bytes([kind], self.card_bytes, spare=SPARE))
            if self.nearest and lacking >= self.nearest.lacking:
                break
        return replace(candidate, memory=tuple(held), lacking=lacking)

    def choice(self, found: _Found, asynchronous: ScheduleTime | None = None) -> Choice:
        """Returns the choice with the reason for it. `asynchronous`: a split's times under ASYNC."""
        recipe, own, whole = found.case.recipe, asynchronous, "a step"
        overrides = [
            f"{path}={value_text(value)}"
            for path, value in found.values.items()
            if value != value_at(self.case.recipe, path)
        ]
        if isinstance(recipe, Recipe) and asynchronous and recipe.schedule != ASYNC:
            overrides.append("schedule=async")
        elif isinstance(recipe, Recipe) and not asynchronous and recipe.schedule != SYNC:
            own, whole = schedule_time(Work.of(found.case, found.time), recipe.schedule), "all phases"
        time = replace(found.time, scheduled=own.seconds if own else None)
        estimate = Estimate(found.memory, time, found.lacking)
        reason = _reason(recipe, estimate, self.card_bytes)
        if not asynchronous:
            longest = max(time.phases, key=lambda phase: phase.seconds)
            reason += f"; {longest.phase} takes {longest.seconds / time.phase_seconds:.0%} of {whole}"
        return Choice(tuple(overrides), estimate, reason, asynchronous)


def legal(case: Case, checked: AnyRecipe | None = None) -> bool:
    """Returns whether every rule of a plan holds for the layout and the engines; `checked` as in broken_rules."""
    recipe, arch = case.recipe, case.architecture
    return not (
        model_problems(recipe, arch)
        or broken_rules(recipe, checked=checked)
        or _split_problems(recipe, arch)
        or (case.critic is not None and critic_problems(recipe, case.critic))
        or any(node_problems(recipe))
    )


def _split_problems(recipe: AnyRecipe, architecture: Architecture) -> list[Problem]:
    if not isinstance(recipe, Recipe):
        return []
    rollout = recipe.rollout
    return [*rollout.kind.split_problems(architecture, rollout.layout, "cuda", rollout.quantization)]


def _sparing_layouts(run: _Run) -> Iterator[Values]:
    """Yields every layout with every saving, its engines on all GPUs. Layouts that cannot hold the weights are left out
    if others can."""
    recipe, arch, engine = run.case.recipe, run.case.architecture, _first_engine(run)
    experts = expert_parameters(arch)
    dense, each = total_parameters(arch) - experts, 4 if recipe.train.gradient_dtype == "bfloat16" else 6
    each = 2 if recipe.train.lora else each  # bytes for each parameter: weights, and gradients of what is trained

    def least(values: Values) -> float:
        """Returns a lower bound of the bytes on a layout's fullest rank during the update."""
        tensor, pipeline, expert = (values[f"train.layout.{name}"] for name in ("tensor", "pipeline", "expert"))
        cut = expert * (values["train.layout.expert_tensor"] or tensor)
        return float(each * (dense / tensor + experts / cut) / pipeline)

    found = list(layouts(recipe, arch, run.gpus))
    small = [values for values in found if least(values) <= run.card_bytes]
    for values in small or sorted(found, key=least)[:LAYOUTS_KEPT]:
        saving = savings(recipe, arch, values)[0]
        yield placed({**values, **saving, **engine}, colocated=True)


def _first_engine(run: _Run) -> Values:
    """Returns the smallest engine whose weights leave most of a card to its cache; the largest if none does."""
    recipe, arch = run.case.recipe, run.case.architecture
    quantized = isinstance(recipe, Recipe) and recipe.rollout.quantization is not None
    whole = model_bytes(arch, 2, quantized=quantized).total
    last: Values = {}
    for values in engines(recipe, arch, run.gpus, colocated=True):
        if _split_problems(changed(recipe, values), arch):
            continue
        last = values
        ranks = values.get("rollout.layout.tensor", 1) * values.get("rollout.layout.pipeline", 1)
        if whole / ranks < ENGINE_WEIGHTS_SHARE * run.card_bytes:
            break
    return last


def _engines_of(run: _Run, fitting: Sequence[_Found]) -> Iterator[Values]:
    """Yields every size of engines beside the ranks, with and without offload, and engines on GPUs of their own. Yields
    the recipe's own values if it is for as many GPUs, so that a recommendation is never slower."""
    recipe, arch, gpus = run.case.recipe, run.case.architecture, run.gpus
    for found in fitting:
        values, data = found.values, found.values["train.layout.data"]
        pieces = values["train.layout.pipeline"] * values["train.layout.virtual_pipeline"]
        for engine in engines(recipe, arch, gpus, colocated=True):
            for offload in offloads(recipe):
                yield placed({**values, **engine, "train.offload": offload}, colocated=True)
        for own in engine_gpus(recipe, gpus):
            fewer, rest = divmod(data * (gpus - own), gpus)
            if fewer == 0 or rest:
                continue
            for engine in engines(recipe, arch, own, colocated=False):
                for recompute in recomputes(recipe, arch, arch.layers // pieces):
                    apart = {**values, **engine, "train.layout.data": fewer, "train.recompute": recompute}
                    yield placed(apart, colocated=False)
    if fitting and plan_devices(recipe, "cuda").bundles == gpus:
        as_it_is = {path: value_at(recipe, path) for path in fitting[0].values}
        yield {path: value for path, value in as_it_is.items() if value is not None or not path.startswith(SGLANG)}


def _ranked_by(found: _Found) -> float:
    """Returns the seconds of all phases, or a bound of the step where engines sample during training."""
    own = found.case.recipe.schedule if isinstance(found.case.recipe, Recipe) else SYNC
    return found.time.seconds if isinstance(own, SyncConfig) else steady_seconds(found.case, found.time, own)


def _asynchronous(run: _Run, candidates: Sequence[_Found]) -> list[Choice]:
    """Returns the fastest splits between ranks and engines that sample all the time. Simulates the lowest bounds."""
    split = [found for found in candidates if found.values.get("cluster.placement") == "disaggregated"]
    split = [found for found in split if allowed(found.case.grpo, ASYNC)]
    lowest = run.fitting(
        split, SPLITS_SIMULATED, SPLIT, seconds=lambda found: steady_seconds(found.case, found.time, ASYNC)
    )
    timed = [(found, schedule_time(Work.of(found.case, found.time), ASYNC)) for found in lowest]
    timed.sort(key=lambda pair: pair[1].seconds)
    return [run.choice(found, time) for found, time in timed[:SPLITS_SHOWN]]


def _reason(recipe: AnyRecipe, estimate: Estimate, card: int) -> str:
    """Returns the reason for a choice: the gain of each size, and the free memory."""
    layout, time = recipe.train.layout, estimate.time
    gains = {
        f"tensor {layout.tensor} keeps its exchanges inside a node": layout.tensor,
        f"pipeline {layout.pipeline} waits {time.pipeline_bubble:.0%} of the update": layout.pipeline,
        f"context {layout.context} shares out long sequences": layout.context,
        f"expert {layout.expert} shares out the experts of a layer": layout.expert,
        f"data {layout.data} trains {layout.data} parts of the batch at once": layout.data,
    }
    parts = [text for text, size in gains.items() if size > 1]
    if isinstance(recipe, Recipe) and (each := recipe.rollout.devices_of_engine):
        count = recipe.rollout.engines
        parts.append(f"{count} engine{'s' if count > 1 else ''} of {each} {recipe.cluster.placement}")
    fullest = max((kind.fullest for kind in estimate.memory), key=lambda phase: phase.bytes)
    if fullest.bytes <= card:
        parts.append(f"{byte_text(card - fullest.bytes)} free in {fullest.phase}")
    else:
        largest = fullest.largest[0]
        mostly = f"mostly {largest.name} ({byte_text(largest.bytes)})"
        parts.append(f"{byte_text(fullest.bytes - card)} too much in {fullest.phase}, {mostly}")
    return "; ".join(parts)
