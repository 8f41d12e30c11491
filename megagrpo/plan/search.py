"""A search for the fastest layout on so many GPUs, of those that are legal and fit.

All choices together are too many, so a search goes in three rounds: layouts with every saving of memory, then savings
for the best layouts, then engines for the best of those. Each round ranks by the same estimate as a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

from megagrpo.errors import Problem, RecipeError
from megagrpo.plan.advice import CONTEXT_TOKENS_MIN, engine_over_nodes
from megagrpo.plan.assumptions import longest_sequence
from megagrpo.plan.case import Case
from megagrpo.plan.communication import Seconds
from megagrpo.plan.memory import DeviceMemory, memory
from megagrpo.plan.parameters import expert_parameters, model_bytes, total_parameters
from megagrpo.plan.plan import lacking_bytes
from megagrpo.plan.schedules import ASYNC, SYNC, ScheduleTime, Work, allowed, schedule_time, steady_seconds
from megagrpo.plan.time import StepTime, step_time, training_phases
from megagrpo.plan.units import byte_text
from megagrpo.recipe.defaults import plan_devices
from megagrpo.recipe.model_rules import critic_problems, divisors, frozen_problems, model_problems
from megagrpo.recipe.schema import AnyRecipe, EngineLayoutConfig, Recipe, SftRecipe
from megagrpo.recipe.schema.schedule import ScheduleConfig, SyncConfig
from megagrpo.recipe.schema.train import RecomputeConfig, RecomputeModule
from megagrpo.section import broken_rules, changed
from megagrpo.weights.families.architecture import Architecture

LAYOUTS_KEPT, SAVINGS_KEPT, SHOWN = 24, 6, 5
SPARE = 0.05  # of a card, for what estimates do not see
APART = (*(f"train.layout.{size}" for size in ("tensor", "pipeline", "context", "expert")), "cluster.placement")
SPLITS_SIMULATED, SPLITS_SHOWN = 6, 3
SPLIT = (*APART, "train.layout.data")
ENGINE_WEIGHTS_SHARE = 0.4
CHUNKS = (1, 2, 4)
# Engines over nodes, if more than so many bytes of weights on each GPU: for 30B-A3B on 64 H100 and 70B on 128 they are
# never among the fastest, and searching them takes 8 and 22 % more candidates. A pipeline makes no token faster.
ENGINE_NODES, NODE_ENGINE_BYTES = (2, 4), 40e9
MEMORY_SHARES = (0.5, 0.65, 0.8)

Values = Mapping[str, Any]
"""Values of recipe fields by their paths, such as train.layout.tensor."""


@dataclass(frozen=True)
class Choice:
    """A layout that is recommended: overrides for the command line, its memory and time, and the reason in a sentence.

    `schedule`: the times of a split of the GPUs whose engines sample all the time.
    """

    overrides: tuple[str, ...]
    memory: tuple[DeviceMemory, ...]
    time: StepTime
    lacking_bytes: int
    reason: str
    schedule: ScheduleTime | None = None

    @property
    def words(self) -> str:
        """Returns the overrides as words of a shell."""
        return " ".join(f"'{override}'" if " " in override else override for override in self.overrides)


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
        nearest = self.nearest and self.nearest.lacking_bytes
        lacking = f"{byte_text(nearest)} too much at least" if nearest else "none legal"
        fix = "more GPUs, larger ones, or shorter sequences"
        return (Problem(f"--search on {self.gpus} GPUs", lacking, "a layout that fits", fix),)


def search(case: Case, gpus: int | None = None) -> Search:
    """Returns layouts for a plan's case, ranked by estimated seconds of a step: on as many GPUs as its recipe has, or
    on `gpus`. Raises RecipeError if their kind is not known."""
    if case.card_bytes is None:
        field, given, fix = "cluster.gpu", "none", "cluster.gpu=H100"
        if case.device == "cpu":
            field, given, fix = "cluster.device", "cpu", f"cluster.device=cuda {fix}"
        raise RecipeError(Problem(field, given, "the kind of GPU that a search is for", fix))
    in_turn = changed(case.recipe, {"schedule": SYNC}) if isinstance(case.recipe, Recipe) else case.recipe
    run = _Run(replace(case, recipe=in_turn), gpus or case.device_plan.bundles, case.card_bytes)
    smallest = run.candidates(_layouts_with_every_saving(run))
    best = fitting = run.fitting(smallest, LAYOUTS_KEPT)
    asynchronous: list[tuple[_Candidate, ScheduleTime]] = []
    if fitting:
        thrifty = ({**kind.values, **way} for kind in fitting for way in savings(case, kind.values))
        frugal = run.fitting(run.candidates(thrifty), SAVINGS_KEPT)
        # Rounds before have engines beside the ranks, which its own schedule may not allow.
        run.case, run.nearest = case, None
        candidates = run.candidates(_engines_of(run, frugal))
        schedule = SYNC if isinstance(case.recipe, SftRecipe) else case.recipe.schedule
        best = run.fitting(candidates, SHOWN, APART, lambda of: of.seconds(schedule))
        apart = [of for of in candidates if of.values.get("cluster.placement") == "disaggregated"]
        split = [of for of in apart if allowed(of.case.grpo, ASYNC)]
        lowest = run.fitting(split, SPLITS_SIMULATED, SPLIT, lambda of: of.seconds(ASYNC))
        asynchronous = [(of, schedule_time(Work.of(of.case, of.time), ASYNC)) for of in lowest]
        asynchronous.sort(key=lambda pair: pair[1].seconds)
    nearest = run.choice(run.nearest) if run.nearest and not best else None
    choices = sorted(map(run.choice, best), key=lambda choice: choice.time.seconds)
    splits = tuple(run.choice(*timed) for timed in asynchronous[:SPLITS_SHOWN])
    return Search(run.gpus, tuple(choices), splits, len(smallest), run.estimated, nearest)


# --- rounds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    """Legal values of recipe fields. The memory is estimated only if the step is fast enough to matter."""

    values: Values
    case: Case
    time: StepTime
    memory: tuple[DeviceMemory, ...] = ()
    lacking: int = 0

    def seconds(self, schedule: ScheduleConfig) -> float:
        """Returns the seconds of all phases, or a bound of the step where engines sample during training."""
        if isinstance(schedule, SyncConfig):
            return self.time.seconds
        return steady_seconds(self.case, self.time, schedule)


@dataclass
class _Run:
    """The state of a search: its case, and the candidates that it has seen so far."""

    case: Case
    gpus: int
    card_bytes: int
    estimated: int = 0
    nearest: _Candidate | None = None
    training: dict[tuple[str, ...], dict[str, Seconds]] = field(default_factory=dict)  # by values in `train`

    def candidates(self, choices: Iterable[Values]) -> list[_Candidate]:
        """Returns the legal choices, with the seconds of a step."""
        candidates = {}
        for values in choices:
            key = tuple(str(values[path]) for path in sorted(values))
            if key in candidates:
                continue
            case = replace(self.case, recipe=changed(self.case.recipe, values))
            if legal(case, checked=self.case.recipe):
                # Candidates that differ only in engines or offload share their training times.
                train = (pair for pair in values.items() if pair[0].startswith("train."))
                shared = tuple(f"{path}={value}" for path, value in train if path != "train.offload")
                if shared not in self.training:
                    self.training[shared] = training_phases(case)
                candidates[key] = _Candidate(values, case, step_time(case, self.training[shared]))
        self.estimated += len(candidates)
        return list(candidates.values())

    def fitting(
        self,
        candidates: Iterable[_Candidate],
        most: int,
        apart: Sequence[str] = (),
        seconds: Callable[[_Candidate], float] = lambda of: of.time.seconds,
    ) -> list[_Candidate]:
        """Returns the fastest `most` that fit, only the fastest of those that agree in the fields `apart`, if given."""
        fastest: dict[object, _Candidate] = {}
        for candidate in sorted(candidates, key=seconds):
            key = tuple(candidate.values[path] for path in apart) if apart else len(fastest)
            if key in fastest:
                continue
            held, lacking = [], 0
            for kind in memory(candidate.case):
                held.append(kind)
                lacking = max(lacking, lacking_bytes([kind], self.card_bytes, spare=SPARE))
                if self.nearest and lacking >= self.nearest.lacking:
                    break  # the candidate cannot be nearer
            candidate = replace(candidate, memory=tuple(held), lacking=lacking)
            if lacking == 0:
                fastest[key] = candidate
            elif self.nearest is None or lacking < self.nearest.lacking:
                self.nearest = candidate
            if len(fastest) == most:
                break
        return list(fastest.values())

    def choice(self, candidate: _Candidate, asynchronous: ScheduleTime | None = None) -> Choice:
        """Returns the choice with the reason for it. `asynchronous`: a split's times under ASYNC."""
        recipe, schedule, whole = candidate.case.recipe, asynchronous, "a step"
        overrides = [
            f"{path}={value_text(value)}"
            for path, value in candidate.values.items()
            if changed(self.case.recipe, {path: value}) is not self.case.recipe
        ]
        if isinstance(recipe, Recipe) and asynchronous and recipe.schedule != ASYNC:
            overrides.append("schedule=async")
        elif isinstance(recipe, Recipe) and not asynchronous and recipe.schedule != SYNC:
            schedule, whole = schedule_time(Work.of(candidate.case, candidate.time), recipe.schedule), "all phases"
        time = replace(candidate.time, scheduled=schedule.seconds if schedule else None)
        reason = _reason(recipe, time, candidate.memory, self.card_bytes)
        if not asynchronous:
            longest = max(time.phases, key=lambda phase: phase.seconds)
            reason += f"; {longest.phase} takes {longest.seconds / time.phase_seconds:.0%} of {whole}"
        return Choice(tuple(overrides), candidate.memory, time, candidate.lacking, reason, asynchronous)


def legal(case: Case, checked: AnyRecipe | None = None) -> bool:
    """Returns whether every rule of a plan holds for the layout and the engines; `checked` as in broken_rules."""
    recipe, arch = case.recipe, case.architecture
    return not (
        model_problems(recipe, arch)
        or broken_rules(recipe, checked=checked)
        or _splits_badly(recipe, arch)
        or (case.critic is not None and critic_problems(recipe, case.critic))
        or (isinstance(recipe, Recipe) and any(frozen_problems(recipe, *teacher) for teacher in case.teachers.items()))
        or engine_over_nodes(recipe)
    )


def _splits_badly(recipe: AnyRecipe, arch: Architecture) -> bool:
    rollout = recipe.rollout if isinstance(recipe, Recipe) else None
    if rollout is None or not rollout.kind.splits:
        return False
    return bool(rollout.kind.side.split_problems(arch, rollout.layout, "cuda", rollout.quantization))


def _layouts_with_every_saving(run: _Run) -> Iterator[Values]:
    """Yields every layout with every saving, its engines on all GPUs. Layouts that cannot hold the weights are left out
    if others can."""
    recipe, arch, engine = run.case.recipe, run.case.architecture, _first_engine(run)
    experts = expert_parameters(arch)
    dense = total_parameters(arch) - experts
    # Weights, and gradients of what is trained.
    parameter_bytes = 2 if recipe.train.lora else 4 if recipe.train.gradient_dtype == "bfloat16" else 6

    def least(values: Values) -> float:
        """Returns a lower bound of the bytes on a layout's fullest rank during the update."""
        tensor, pipeline, expert = (values[f"train.layout.{name}"] for name in ("tensor", "pipeline", "expert"))
        cut = expert * (values["train.layout.expert_tensor"] or tensor)
        return float(parameter_bytes * (dense / tensor + experts / cut) / pipeline)

    possible = list(layouts(run.case, run.gpus))
    small = [values for values in possible if least(values) <= run.card_bytes]
    for values in small or sorted(possible, key=least)[:LAYOUTS_KEPT]:
        yield placed(recipe, {**values, **savings(run.case, values)[0], **engine}, colocated=True)


def _first_engine(run: _Run) -> Values:
    """Returns the smallest engine whose weights leave most of a card to its cache; the largest if none does."""
    recipe, arch = run.case.recipe, run.case.architecture
    quantized = isinstance(recipe, Recipe) and recipe.rollout.quantization is not None
    whole = model_bytes(arch, 2, quantized=quantized).total
    last: Values = {}
    for values in engines(run.case, run.gpus, colocated=True):
        if _splits_badly(changed(recipe, values), arch):
            continue
        last = values
        ranks = values.get("rollout.layout.tensor", 1) * values.get("rollout.layout.pipeline", 1)
        if whole / ranks < ENGINE_WEIGHTS_SHARE * run.card_bytes:
            break
    return last


def _engines_of(run: _Run, fitting: Sequence[_Candidate]) -> Iterator[Values]:
    """Yields every size of engines beside the ranks, with and without offload, and engines on GPUs of their own. Yields
    the recipe's own values if it is for as many GPUs, so that a recommendation is never slower."""
    recipe, gpus = run.case.recipe, run.gpus
    for candidate in fitting:
        values, data = candidate.values, candidate.values["train.layout.data"]
        for engine in engines(run.case, gpus, colocated=True):
            for offload in offloads(recipe):
                yield placed(recipe, {**values, **engine, "train.offload": offload}, colocated=True)
        for sampling in engine_gpus(recipe, gpus):
            fewer, rest = divmod(data * (gpus - sampling), gpus)
            if fewer == 0 or rest:
                continue
            for engine in engines(run.case, sampling, colocated=False):
                for recompute in recomputes(run.case, values):
                    apart = {**values, **engine, "train.layout.data": fewer, "train.recompute": recompute}
                    yield placed(recipe, apart, colocated=False)
    if fitting and plan_devices(recipe, "cuda").bundles == gpus:
        as_it_is, shared = dict[str, Any](), beside_ranks(recipe)
        for path in fitting[0].values:
            value: Any = recipe
            for key in path.split("."):
                value = getattr(value, key, None)  # None: an argument of an engine that is not given
            if value is not None or path not in shared:
                as_it_is[path] = value
        yield as_it_is


def _reason(recipe: AnyRecipe, time: StepTime, held: Sequence[DeviceMemory], card: int) -> str:
    """Returns the reason for a choice: the gain of each size, and the free memory."""
    layout = recipe.train.layout
    gains = {
        f"tensor {layout.tensor} keeps its exchanges inside a node": layout.tensor,
        f"pipeline {layout.pipeline} waits {time.pipeline_bubble:.0%} of the update": layout.pipeline,
        f"context {layout.context} shares out long sequences": layout.context,
        f"expert {layout.expert} shares out the experts of a layer": layout.expert,
        f"data {layout.data} trains {layout.data} parts of the batch at once": layout.data,
    }
    parts = [text for text, size in gains.items() if size > 1]
    if isinstance(recipe, Recipe) and (devices := recipe.rollout.devices_of_engine):
        count = recipe.rollout.engines
        parts.append(f"{count} engine{'s' if count > 1 else ''} of {devices} {recipe.cluster.placement}")
    fullest = max((kind.fullest for kind in held), key=lambda phase: phase.bytes)
    free, largest = card - fullest.bytes, fullest.largest[0]
    mostly = f", mostly {largest.name} ({byte_text(largest.bytes)})" if free < 0 else ""
    parts.append(f"{byte_text(abs(free))} {'too much' if free < 0 else 'free'} in {fullest.phase}{mostly}")
    return "; ".join(parts)


# --- candidates ------------------------------------------------------------------------------------------------------


def layouts(case: Case, ranks: int) -> Iterator[Values]:
    """Yields the layouts over `ranks` ranks, some of them illegal: the rules of recipe/ decide.

    Tensor groups stay within a node, context groups have some thousand tokens for each rank.
    """
    arch, context_max = case.architecture, max(1, longest_sequence(case.recipe) // CONTEXT_TOKENS_MIN)
    experts, layers = arch.experts or 1, len(arch.layers)
    for tensor in divisors(gcd(ranks, case.recipe.cluster.gpus_per_node)):
        for pipeline in divisors(ranks // tensor):
            for context in divisors(ranks // tensor // pipeline):
                if pipeline > layers or context > context_max:
                    continue
                data = ranks // tensor // pipeline // context
                sizes = [
                    (expert, cut)
                    for cut in sorted({1, tensor})
                    for expert in divisors(experts)
                    if tensor * context * data % (expert * cut) == 0
                ]
                # The default of expert_tensor equals tensor: a model without experts has it.
                for expert, expert_tensor in sizes if experts > 1 else [(1, None)]:
                    for chunks in CHUNKS if pipeline > 1 else (1,):
                        yield {
                            "train.layout.tensor": tensor,
                            "train.layout.pipeline": pipeline,
                            "train.layout.virtual_pipeline": chunks,
                            "train.layout.first_stage_layers": None,
                            "train.layout.last_stage_layers": _last_stage(layers, pipeline, chunks),
                            "train.layout.context": context,
                            "train.layout.expert": expert,
                            "train.layout.expert_tensor": expert_tensor,
                            "train.layout.data": data,
                        }


def _last_stage(layers: int, pipeline: int, chunks: int) -> int | None:
    """Returns the last stage's layers where stages cannot be equal and it can be the shortest; otherwise None."""
    pieces = layers // chunks
    if pipeline == 1 or layers % chunks or pieces % pipeline == 0:
        return None
    last = pieces - -(-pieces // pipeline) * (pipeline - 1)
    return last * chunks if last > 0 else None


def savings(case: Case, layout: Values) -> list[Values]:
    """Returns ways to trade time for memory in a layout, the most sparing first."""
    context, given = layout["train.layout.context"], case.recipe.train.tokens_per_microbatch
    ways = recomputes(case, layout)
    multiple = 1 if context == 1 else 2 * context
    least = -(-longest_sequence(case.recipe) // multiple) * multiple // context
    lengths = sorted({least, 2 * least, 4 * least} | ({given} if given >= least else set()))
    return [
        {
            "train.tokens_per_microbatch": tokens,
            "train.logprob_tokens_per_microbatch": None,
            "train.recompute": recompute,
            "train.offload": parts,
        }
        for parts in offloads(case.recipe)
        for tokens in lengths
        for recompute in reversed(ways)
    ]


def recomputes(case: Case, layout: Values) -> list[str | RecomputeConfig]:
    """Returns choices from nothing to all layers: modules that take little time for what they save, and half of a model
    chunk's layers. Attention's core is not among them: fused attention keeps next to nothing of it."""
    arch = case.architecture
    layers = len(arch.layers) // (layout["train.layout.pipeline"] * layout["train.layout.virtual_pipeline"])
    cheap: dict[RecomputeModule, bool] = {"mla_up_proj": True, "moe_act": case.fused_layers, "mlp": True}
    modules = [module for module, saves in cheap.items() if saves and module in arch.recomputes]
    some = [RecomputeConfig(modules=modules)] if modules else []
    return ["none", *some, *([RecomputeConfig(layers=layers // 2)] if layers > 1 else []), "full"]


def offloads(recipe: AnyRecipe) -> list[list[str]]:
    """Returns all parts of the recipe that can leave the devices while engines use them, and an empty choice."""
    if not isinstance(recipe, Recipe) or not recipe.rollout.kind.started_by_us:
        return [[]]
    algorithm, parts = recipe.algorithm, ["parameters", "gradients", "optimizer"]
    parts += ["reference"] * recipe.keeps_reference + ["critic"] * (algorithm.critic is not None)
    return [parts, []]


def engines(case: Case, gpus: int, *, colocated: bool) -> list[Values]:
    """Returns engines on all of the devices that they can have, for each size of an engine; the smallest first.

    Beside ranks they give their memory back in turns, and take a part of it only.
    """
    recipe, architecture = case.recipe, case.architecture
    if isinstance(recipe, SftRecipe) or not recipe.rollout.kind.started_by_us:
        return [{}]
    kind, quantization = recipe.rollout.kind, recipe.rollout.quantization
    if not kind.splits:
        return [{"rollout.engines": gpus}]
    shares = [kind.beside_training(share) for share in MEMORY_SHARES] if colocated else [{}]
    per_node, layout = recipe.cluster.gpus_per_node, "rollout.layout"
    sizes = [
        {f"{layout}.tensor": tensor, f"{layout}.expert": expert, f"{layout}.attention_data": 1, f"{layout}.pipeline": 1}
        for tensor in divisors(per_node)
        for expert in (sorted({1, tensor}) if architecture.experts else (1,))
    ]
    if 2 * total_parameters(architecture) / per_node > NODE_ENGINE_BYTES:
        # Ranks of a node share the attention; experts are dealt out over all nodes, other models' layers.
        for nodes in ENGINE_NODES:
            tensor = per_node * nodes if architecture.experts else per_node
            size = {"expert": tensor if architecture.experts else 1, "attention_data": nodes}
            size |= {"tensor": tensor, "pipeline": per_node * nodes // tensor}
            problems = kind.side.split_problems(architecture, EngineLayoutConfig(**size), "cuda", quantization)
            size["attention_data"] = nodes if tensor > per_node and not problems else 1
            sizes.append({f"{layout}.{name}": parts for name, parts in size.items()})
    return [
        {**size, "rollout.engines": gpus // ranks, **share}
        for size in sizes
        if gpus % (ranks := size[f"{layout}.tensor"] * size[f"{layout}.pipeline"]) == 0
        for share in shares
    ]


def engine_gpus(recipe: AnyRecipe, gpus: int) -> list[int]:
    """Returns the numbers of GPUs, out of `gpus`, that engines of their own may have: in whole nodes, if several."""
    if not isinstance(recipe, Recipe) or not recipe.rollout.kind.started_by_us:
        return []
    per_node = recipe.cluster.gpus_per_node if gpus > recipe.cluster.gpus_per_node else 1
    sizes = {gpus * eighths // 8 // per_node * per_node for eighths in range(1, 8)}
    return sorted(size for size in sizes if 0 < size < gpus)


def placed(recipe: AnyRecipe, values: Values, *, colocated: bool) -> Values:
    """Returns the values with the placement, and without those that only the other placement has."""
    placement = {"cluster.placement": "colocated" if colocated else "disaggregated", "cluster.engine_devices": None}
    if not colocated:
        shared = beside_ranks(recipe)
        values = {path: value for path, value in values.items() if path not in shared} | {"train.offload": []}
    return {**values, **placement}


def beside_ranks(recipe: AnyRecipe) -> Values:
    """Returns the values that only engines beside training ranks have, of an engine with the whole GPU."""
    return recipe.rollout.kind.beside_training(1.0) if isinstance(recipe, Recipe) else {}


def value_text(value: Any) -> str:
    if isinstance(value, RecomputeConfig):
        given = value.model_dump(exclude_defaults=True).items()
        return f"{{{', '.join(f'{key}: {value_text(setting)}' for key, setting in given)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)
