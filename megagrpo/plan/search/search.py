"""Which layout is fastest on so many GPUs, of those that are legal and fit?

A search in three rounds, since all choices together are too many: layouts with every saving, then savings for the best
layouts, then engines for the best of those. Each round ranks by the same estimate as a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megagrpo.errors import Problem, RecipeError
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.checks.impossible import node_problems
from megagrpo.plan.estimate import Estimate, lacking_bytes
from megagrpo.plan.machines import Machines
from megagrpo.plan.memory.device_memory import memory
from megagrpo.plan.parameters import expert_parameters, total_parameters
from megagrpo.plan.plan import Plan
from megagrpo.plan.search import options
from megagrpo.plan.search.options import Values
from megagrpo.plan.time.seconds import StepTime
from megagrpo.plan.time.step_time import step_time
from megagrpo.plan.units import byte_text
from megagrpo.recipe.checks import recipe_problems
from megagrpo.recipe.defaults import plan_devices
from megagrpo.recipe.model_checks import critic_problems, model_problems
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.sglang import split_problems

LAYOUTS_KEPT = 24
SAVINGS_KEPT = 6
SHOWN = 5
SPARE = 0.05  # of a card, for what estimates do not see
APART = (*(f"train.layout.{size}" for size in ("tensor", "pipeline", "context", "expert")), "cluster.placement")
ENGINE_WEIGHTS_SHARE = 0.4
GRADIENT_BYTES = 6  # bfloat16 weights and float32 gradients: no rank that trains holds less for a parameter


@dataclass(frozen=True)
class _Case:
    """What is searched for."""

    recipe: AnyRecipe
    architecture: Architecture
    machines: Machines
    assumptions: Assumptions
    gpus: int
    critic: Architecture | None


@dataclass(frozen=True)
class _Candidate:
    values: Values
    recipe: AnyRecipe
    time: StepTime


@dataclass(frozen=True)
class _Found:
    values: Values
    recipe: AnyRecipe
    estimate: Estimate


@dataclass(frozen=True)
class Choice:
    """A layout that is recommended: overrides for the command line, what it comes to, and why, in a sentence."""

    overrides: tuple[str, ...]
    estimate: Estimate
    reason: str


@dataclass(frozen=True)
class Search:
    """The best choices, fastest first, of `legal` layouts and `estimated` candidates.

    If nothing fits, `choices` is empty and `nearest` lacks the least memory; None if nothing is even legal.
    """

    gpus: int
    choices: tuple[Choice, ...]
    legal: int
    estimated: int
    nearest: Choice | None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """That nothing fits, if so."""
        if self.choices:
            return ()
        lacking = (
            f"{byte_text(self.nearest.estimate.lacking_bytes)} too much at least" if self.nearest else "none legal"
        )
        fix = "more GPUs, larger ones, or shorter sequences"
        return (Problem(f"--search on {self.gpus} GPUs", lacking, "a layout that fits", fix),)


def search_for(plan: Plan, gpus: int | None) -> Search:
    """A search for what a plan is about, on as many GPUs as its recipe has, or on `gpus`. Raises RecipeError if the
    plan does not know their kind."""
    if plan.machines is None:
        field, given, fix = "cluster.gpu", "none", "cluster.gpu=H100"
        if plan.device == "cpu":
            field, given, fix = "cluster.device", "cpu", "cluster.device=cuda cluster.gpu=H100"
        raise RecipeError(Problem(field, given, "the kind of GPU that a search is for", fix))
    return search(
        plan.recipe, plan.architecture, plan.machines, plan.assumptions, gpus or len(plan.device_map), plan.critic
    )


def search(
    recipe: AnyRecipe,
    architecture: Architecture,
    machines: Machines,
    assumptions: Assumptions,
    gpus: int,
    critic: Architecture | None = None,
) -> Search:
    """Layouts for `gpus` GPUs, ranked by estimated seconds of a step."""
    case = _Case(recipe, architecture, machines, assumptions, gpus, critic)
    tally = _Tally()
    sparing = list(_candidates(case, _sparing_layouts(case), tally))
    tally.legal = len(sparing)
    layouts = _fitting(case, sparing, LAYOUTS_KEPT, tally)
    if not layouts:
        return Search(gpus, (), tally.legal, tally.estimated, _choice(case, tally.nearest) if tally.nearest else None)
    thrifty = _fitting(case, _candidates(case, _savings(case, layouts), tally), SAVINGS_KEPT, tally)
    last = [*_engines(case, thrifty), *_as_it_is(case, thrifty[0].values)] if thrifty else []
    best = _fitting(case, _candidates(case, last, tally), SHOWN, tally, apart=APART)
    return Search(gpus, tuple(_choice(case, found) for found in best), tally.legal, tally.estimated, None)


@dataclass
class _Tally:
    """What a search has seen so far."""

    legal: int = 0
    estimated: int = 0
    nearest: _Found | None = None


def _sparing_layouts(case: _Case) -> Iterator[Values]:
    """Every layout with every saving, its engines on all GPUs; those that cannot hold the weights are left out, unless
    none can."""
    engine = _first_engine(case)
    weights = _Weights.of(case)
    found = list(options.layouts(case.recipe, case.architecture, case.gpus))
    small = [values for values in found if weights.least(values) <= case.machines.gpu.memory_bytes]
    for values in small or sorted(found, key=weights.least)[:LAYOUTS_KEPT]:
        saving = options.savings(case.recipe, values["train.layout.context"])[0]
        yield options.placed({**values, **saving, **engine}, colocated=True)


def _savings(case: _Case, layouts: Iterable[_Found]) -> Iterator[Values]:
    for found in layouts:
        for saving in options.savings(case.recipe, found.values["train.layout.context"]):
            yield {**found.values, **saving}


def _engines(case: _Case, thrifty: Iterable[_Found]) -> Iterator[Values]:
    """Every size of engines beside the ranks, with and without offload; and engines on GPUs of their own."""
    for found in thrifty:
        values, data = found.values, found.values["train.layout.data"]
        offloads = [saving["train.offload"] for saving in options.savings(case.recipe, 1)]
        for engine in options.engines(case.recipe, case.architecture, case.gpus, colocated=True):
            for offload in {tuple(offload): offload for offload in offloads}.values():
                yield options.placed({**values, **engine, "train.offload": offload}, colocated=True)
        for own in options.engine_gpus(case.recipe, case.gpus):
            fewer, rest = divmod(data * (case.gpus - own), case.gpus)
            if fewer == 0 or rest:
                continue
            for engine in options.engines(case.recipe, case.architecture, own, colocated=False):
                for recompute in options.RECOMPUTE:
                    apart = {**values, **engine, "train.layout.data": fewer, "train.recompute": recompute}
                    yield options.placed(apart, colocated=False)


def _as_it_is(case: _Case, fields: Iterable[str]) -> Iterator[Values]:
    """The recipe's own values, if it is for as many GPUs: what is recommended is never slower."""
    if plan_devices(case.recipe, "cuda").bundles == case.gpus:
        own = {path: options.value_at(case.recipe, path) for path in fields}
        yield {path: value for path, value in own.items() if value is not None or not path.startswith(options.SGLANG)}


def _first_engine(case: _Case) -> Values:
    """The smallest engine whose weights leave most of a card to its cache; the largest if none does."""
    engines = [
        values
        for values in options.engines(case.recipe, case.architecture, case.gpus, colocated=True)
        if not _split_problems(options.changed(case.recipe, values), case.architecture)
    ]
    for values in engines:
        weights = 2 * total_parameters(case.architecture) / values.get("rollout.layout.tensor", 1)
        if weights < ENGINE_WEIGHTS_SHARE * case.machines.gpu.memory_bytes:
            return values
    return engines[-1] if engines else {}


def _candidates(case: _Case, choices: Iterable[Values], tally: _Tally) -> Iterator[_Candidate]:
    """The legal ones, with the seconds of a step."""
    seen = set()
    for values in choices:
        key = tuple(str(values[path]) for path in sorted(values))
        recipe = options.changed(case.recipe, values)
        if key in seen or not legal(recipe, case.architecture, case.critic):
            continue
        seen.add(key)
        tally.estimated += 1
        time = step_time(recipe, case.architecture, case.machines, case.assumptions, case.critic)
        yield _Candidate(values, recipe, time)


def _fitting(
    case: _Case, candidates: Iterable[_Candidate], most: int, tally: _Tally, apart: Sequence[str] = ()
) -> list[_Found]:
    """The fastest that fit. Memory is looked at from the fastest on, until enough were found.

    With `apart`, only the fastest of those that agree in these fields.
    """
    found: dict[object, _Found] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.time.seconds):
        key = tuple(candidate.values[path] for path in apart) if apart else len(found)
        if key in found:
            continue
        uneven = case.assumptions.expert_imbalance
        held = memory(candidate.recipe, case.architecture, case.machines, "cuda", case.critic, uneven)
        lacking = lacking_bytes(held, case.machines, spare=SPARE)
        one = _Found(candidate.values, candidate.recipe, Estimate(held, candidate.time, lacking))
        if lacking == 0:
            found[key] = one
        elif tally.nearest is None or lacking < tally.nearest.estimate.lacking_bytes:
            tally.nearest = one
        if len(found) == most:
            break
    return list(found.values())


def legal(recipe: AnyRecipe, architecture: Architecture, critic: Architecture | None = None) -> bool:
    """Whether every rule that a plan checks holds for the layout and the engines."""
    return not (
        recipe_problems(recipe)
        or model_problems(recipe, architecture)
        or _split_problems(recipe, architecture)
        or (critic is not None and critic_problems(recipe, critic))
        or any(node_problems(recipe))
    )


def _split_problems(recipe: AnyRecipe, architecture: Architecture) -> list[Problem]:
    if not isinstance(recipe, Recipe) or recipe.rollout.engine == "transformers":
        return []
    return split_problems(architecture, recipe.rollout.layout, "cuda")


@dataclass(frozen=True)
class _Weights:
    """Parameters outside and inside of experts, and the least bytes that a trained or frozen one takes."""

    dense: int
    experts: int
    bytes_each: int

    @classmethod
    def of(cls, case: _Case) -> _Weights:
        experts = expert_parameters(case.architecture)
        dense = total_parameters(case.architecture) - experts
        return cls(dense, experts, 2 if case.recipe.train.lora else GRADIENT_BYTES)

    def least(self, values: Values) -> float:
        """No layout can have less on its fullest rank, during the update."""
        tensor, pipeline, expert = (values[f"train.layout.{name}"] for name in ("tensor", "pipeline", "expert"))
        cut = expert * (values["train.layout.expert_tensor"] or tensor)
        return self.bytes_each * (self.dense / tensor + self.experts / cut) / pipeline


def _choice(case: _Case, found: _Found) -> Choice:
    return Choice(options.overrides(case.recipe, found.values), found.estimate, _reason(case, found))


def _reason(case: _Case, found: _Found) -> str:
    """Why this one, in a sentence: what each size gains, what is free, where the time goes."""
    recipe, card = found.recipe, case.machines.gpu.memory_bytes
    layout, parts = recipe.train.layout, []
    if layout.tensor > 1:
        parts.append(f"tensor {layout.tensor} keeps its exchanges inside a node")
    if layout.pipeline > 1:
        parts.append(f"pipeline {layout.pipeline} waits {found.estimate.time.pipeline_bubble:.0%} of the update")
    if layout.context > 1:
        parts.append(f"context {layout.context} shares out long sequences")
    if layout.expert > 1:
        parts.append(f"expert {layout.expert} shares out the experts of a layer")
    if layout.data > 1:
        parts.append(f"data {layout.data} trains {layout.data} parts of the batch at once")
    if isinstance(recipe, Recipe) and recipe.rollout.engine != "external":
        engines, each = recipe.rollout.engines, recipe.rollout.layout.tensor
        parts.append(f"{engines} engine{'s' if engines > 1 else ''} of {each} {recipe.cluster.placement}")
    fullest = max((kind.fullest for kind in found.estimate.memory), key=lambda phase: phase.bytes)
    if fullest.bytes <= card:
        parts.append(f"{byte_text(card - fullest.bytes)} free in {fullest.phase}")
    else:
        largest = max(fullest.parts, key=lambda part: part.bytes)
        parts.append(
            f"{byte_text(fullest.bytes - card)} too much in {fullest.phase}, mostly {largest.name} "
            f"({byte_text(largest.bytes)})"
        )
    longest = max(found.estimate.time.phases, key=lambda phase: phase.seconds)
    parts.append(f"{longest.phase} takes {longest.seconds / found.estimate.time.seconds:.0%} of a step")
    return "; ".join(parts)
