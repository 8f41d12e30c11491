"""A plan of a recipe as data: for the terminal, a page, or other programs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from megagrpo.errors import Problem
from megagrpo.layout.parallel import layers_of_stages
from megagrpo.plan.advice import disk_advice, impossible, unwise
from megagrpo.plan.assumptions import Assumptions, assumptions_from
from megagrpo.plan.calibrate import calibrated
from megagrpo.plan.case import Case, machines_of
from megagrpo.plan.device_map import MappedDevice, device_map
from megagrpo.plan.memory import DeviceMemory, memory
from megagrpo.plan.parameters import Stage, active_parameters, stages, total_parameters
from megagrpo.plan.schedules import ScheduleTime, schedule_times
from megagrpo.plan.time import Sampling, StepTime, step_time
from megagrpo.plan.units import byte_text, second_text
from megagrpo.recipe.defaults import checkpoint_directory, run_directory, total_steps
from megagrpo.recipe.schema import AnyRecipe, EntryConfig, Recipe, SftRecipe
from megagrpo.weights.families.architecture import Architecture

UNITS = {
    "tokens": "tokens",
    "turns": "turns",
    "sequences": "sequences",
    "rows": "rows",
    "bytes_per_second": "bytes/s",
    "seconds": "s",
    "seconds_per_response": "s",
    "spread": "log",
    "share": "share",
    "efficiency": "share",
    "packing": "share",
    "overlap": "share",
    "factor": "times",
    "imbalance": "times",
}
"""Units of assumptions by the end of their names."""


@dataclass(frozen=True)
class Assumed:
    """One assumption. `value` None: it follows from others. `origin`: default, given, counted or calibrated."""

    name: str
    value: float | None
    unit: str
    origin: str


@dataclass(frozen=True)
class Estimate:
    """The memory that a recipe needs and the time of its steps. `memory` has one entry for each kind of device.

    `lacking_bytes`: bytes that the fullest device lacks; 0 if everything fits.
    """

    memory: tuple[DeviceMemory, ...]
    time: StepTime
    lacking_bytes: int

    @property
    def fits(self) -> bool:
        return self.lacking_bytes == 0


@dataclass(frozen=True)
class Plan(Case):
    """A recipe's plan. Without known GPUs there is no estimate of time, unless a run on CPUs calibrates it."""

    origins: Mapping[str, str] = field(default_factory=dict)  # of assumptions, where they are not defaults
    calibrated: bool = False
    unchecked: tuple[str, ...] = ()  # what was not on this machine
    agent: Mapping[str, str] = field(default_factory=dict)  # lines of the summary that preflight has found

    @property
    def noun(self) -> str:
        """Returns the name of one of its devices: GPU or process."""
        return "GPU" if self.device == "cuda" else "process"

    @cached_property
    def summary(self) -> Mapping[str, str]:
        """Returns the sizes that follow from a checked recipe, in sentences."""
        return dict(_summary(self))

    @cached_property
    def device_map(self) -> tuple[MappedDevice, ...]:
        return device_map(self)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return stages(self.architecture.layers, self.layout)

    @cached_property
    def memory(self) -> tuple[DeviceMemory, ...]:
        return tuple(memory(self))

    @cached_property
    def estimate(self) -> Estimate | None:
        if self._phases is None:
            return None
        time = replace(self._phases, scheduled=self.own.seconds) if self.own else self._phases
        return Estimate(self.memory, time, lacking_bytes(self.memory, self.card_bytes))

    @cached_property
    def _phases(self) -> StepTime | None:
        """Returns the phases one after the other; None without a known card or a calibrated CPU."""
        known = self.card_bytes or (self.device == "cpu" and self.calibrated)
        return step_time(self) if known else None

    @cached_property
    def schedules(self) -> tuple[ScheduleTime, ...]:
        """Returns the times of its steps under each schedule that its rules allow; sync is the first."""
        if self._phases is None or not isinstance(self.recipe, Recipe):
            return ()
        return schedule_times(self, self._phases)

    @property
    def own(self) -> ScheduleTime | None:
        """Returns the time under the recipe's schedule; None for sync, whose phases follow one another."""
        own = self.recipe.schedule if isinstance(self.recipe, Recipe) else None
        return next((time for time in self.schedules[1:] if time.schedule == own), None)

    @property
    def assumed(self) -> tuple[Assumed, ...]:
        of = self.origins
        values = vars(self.assumptions).items()
        return tuple(Assumed(name, value, unit_of(name), of.get(name, "default")) for name, value in values)

    @cached_property
    def problems(self) -> tuple[Problem, ...]:
        """Returns the problems that keep it from running on its machines."""
        return tuple(impossible(self, self.memory))

    @cached_property
    def unwise(self) -> tuple[Problem, ...]:
        advice = unwise(self, self.memory, self.estimate.time if self.estimate else None, self.own)
        return (*advice, *disk_advice(self.recipe, self.architecture, self.critic))


def plan_of(
    recipe: AnyRecipe,
    architecture: Architecture,
    *,
    given: Collection[str] = (),
    run_directory: Path | None = None,
    unchecked: Collection[str] = (),
    critic: Architecture | None = None,
    epoch_rows: int | None = None,
    agent: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Returns the plan of a recipe whose rules hold. `given` are assumptions as NAME=VALUE; `run_directory` calibrates
    them; `critic` is the model of algorithm.critic.path, if it is another; `epoch_rows` are the rows counted in
    data.train; `agent` has lines about its agent, by name.

    Raises RecipeError for an unknown GPU or a wrong assumption, ReportError for a run without measurements.
    """
    assumptions = assumptions_from(given)
    origins = {}
    if assumptions.epoch_rows is None and epoch_rows is not None:
        assumptions, origins["epoch_rows"] = replace(assumptions, epoch_rows=epoch_rows), "counted"
    case = Case(recipe, architecture, machines_of(recipe, assumptions), assumptions, critic)
    names = {text.partition("=")[0].strip() for text in given}
    if run_directory is not None:
        before, measured = vars(assumptions), vars(calibrated(case, run_directory))
        # A given value takes precedence over a measured one.
        case = replace(case, assumptions=Assumptions(**(measured | {name: before[name] for name in names})))
        origins |= {name: "calibrated" for name, value in measured.items() if value != before[name]}
    origins |= dict.fromkeys(names, "given")
    inputs = {field.name: getattr(case, field.name) for field in fields(Case)}
    calibrates = run_directory is not None
    return Plan(**inputs, origins=origins, calibrated=calibrates, unchecked=tuple(unchecked), agent=agent)


def lacking_bytes(held: Sequence[DeviceMemory], card_bytes: int | None, spare: float = 0.0) -> int:
    """Returns the bytes that the fullest device lacks; 0 if everything fits, or the card is unknown. `spare` is the
    share of a card to leave free."""
    return max(0, max(kind.fullest.bytes for kind in held) - int(card_bytes * (1 - spare))) if card_bytes else 0


def unit_of(assumption: str) -> str:
    """Returns the unit of an assumption by the end of its name: prompt_tokens are tokens."""
    ends = [end for end in UNITS if assumption == end or assumption.endswith(f"_{end}")]
    return UNITS[max(ends, key=len)]


# --- summary ---------------------------------------------------------------------------------------------------------


def _summary(plan: Plan) -> Iterator[tuple[str, str]]:
    recipe, architecture, epoch_rows = plan.recipe, plan.architecture, plan.assumptions.epoch_rows
    parameters, tensor = total_parameters(architecture), recipe.train.layout.tensor
    active = f", {_count(active_parameters(architecture))} of them active" if architecture.experts else ""
    padded = architecture.padded_vocab(tensor)
    padding = f", padded to {padded}" if padded > architecture.vocab else ""
    yield "run", f"{recipe.name}, seed {recipe.seed}, in {run_directory(recipe)}"
    yield "model", f"{architecture.family} of {_count(parameters)} parameters{active}, from {recipe.model.path}"
    yield "ranks", _ranks(recipe, architecture)
    yield "layers", _layers(recipe, architecture)
    yield "vocabulary", f"{architecture.vocab}{padding}, {padded // tensor} on each tensor rank"
    yield from _of_sft(recipe, epoch_rows) if isinstance(recipe, SftRecipe) else _of_grpo(recipe, epoch_rows)
    yield "checkpoints", f"every {recipe.checkpoint.every_steps} steps, in {checkpoint_directory(recipe)}"
    if isinstance(recipe, Recipe) and recipe.rollout.kind.starts_servers:
        read, engines = parameters * plan.item_bytes, recipe.rollout.engines
        seconds = second_text(engines * read / plan.assumptions.disk_bytes_per_second)
        spared = f"spares {byte_text(engines * read)} and {seconds} of reading"
        yield (
            "start",
            f"{byte_text(read)} read once, by the training ranks; engines begin without weights, which {spared}",
        )
    yield from _of_agent(plan)
    yield from plan.agent.items()


def _of_grpo(recipe: Recipe, epoch_rows: float | None) -> Iterator[tuple[str, str]]:
    rollout, algorithm, train, kl = recipe.rollout, recipe.algorithm, recipe.train, recipe.algorithm.kl
    prompts, samples, dynamic = rollout.prompts_per_step, rollout.samples_per_prompt, rollout.dynamic_sampling
    responses = prompts * samples
    rounds = f", groups without signal replaced in up to {dynamic.rounds_max} rounds" if dynamic else ""
    yield "step", f"{prompts} prompts x {samples} samples = {responses} responses{rounds}"
    penalty = f"{kl.coefficient:g} x KL ({kl.estimator}) in the {kl.placement}" if kl.coefficient else "no KL penalty"
    names = f"{algorithm.advantage.name} advantages, {algorithm.loss.name} loss, {algorithm.aggregation.name}"
    yield "objective", f"{names}, {penalty}"
    epochs = f"{algorithm.epochs} epochs x " if algorithm.epochs > 1 else ""
    minibatches = f"{algorithm.minibatches} minibatches" if epochs else f"{algorithm.minibatches}"
    size = responses // algorithm.minibatches
    yield "minibatches", f"{epochs}{minibatches} of {size} responses{_share(size, train.layout.data)}"
    yield "sequence", f"{recipe.sequence_described} tokens, {_packed(recipe)}"
    length = f"{train.total_steps} steps, {(train.total_steps or 0) * responses} responses"
    if train.total_steps is None:
        episodes = train.total_episodes
        length = f"{episodes} responses" if episodes is not None else _epochs(recipe, epoch_rows, "prompts")
    yield "length", length
    for name, one in recipe.eval.of_sets().items():
        how = f"{one.samples_per_prompt} samples at {one.temperature:g}" if one.temperature else "greedy"
        yield f"evaluation {name}", f"every {one.every_steps} steps on {_paths(one.files)}, {how}"
    if not recipe.eval.sets:
        yield "evaluation", "none"


def _of_agent(case: Case) -> Iterator[tuple[str, str]]:
    """Yields the summary's lines about the agent, its turns, and their use of an engine's cache."""
    agent, lengths = case.recipe.agent if isinstance(case.recipe, Recipe) else None, case.lengths
    if agent is None:
        return
    what = {
        "tools": lambda: f"tools {', '.join(tool.name for tool in agent.tool_configs)}",
        "function": lambda: f"{agent.function}",
        "verifiers": lambda: f"verifiers {agent.verifiers and agent.verifiers.environment}",
        "openenv": lambda: f"openenv {agent.openenv and agent.openenv.url}",
        "reasoning_gym": lambda: "reasoning_gym",
    }[agent.kind]()
    limits = f"up to {agent.turns_max} turns and {second_text(agent.timeout_seconds)}"
    processes = f"{agent.processes} process{'es' if agent.processes > 1 else ''}"
    yield "agent", f"{what}, {limits}; {agent.rollouts_at_once} rollouts at once in {processes}"
    between = lengths.given * lengths.response / max(1.0, lengths.turns - 1)
    turns = f"about {lengths.turns:g} of {lengths.turn:.0f} sampled tokens, and between them {between:.0f} given ones"
    sequences = f", trained as {lengths.sequences:g} sequences" if lengths.sequences > 1 else ""
    waits = f"{second_text(case.assumptions.tool_seconds)} of tools; {lengths.sequence:.0f} tokens in all{sequences}"
    yield "turns", f"{turns} and {waits}"
    if (turns_of := Sampling.of(case).turns) and case.machines is not None:
        room = f"an engine's cache has room for {turns_of.cached:,.0f} of its {turns_of.conversations:,.0f} at once"
        found = f"{turns_of.reuse:.0%} of a conversation's history is found in the cache: {room}"
        yield "prefixes", found if turns_of.cached else "engines keep nothing: each turn reads its whole conversation"


def _of_sft(recipe: SftRecipe, epoch_rows: float | None) -> Iterator[tuple[str, str]]:
    data, train, evaluation = recipe.data, recipe.train, recipe.eval
    yield "step", f"{data.examples_per_step} examples{_share(data.examples_per_step, train.layout.data)}"
    yield "sequence", f"up to {data.tokens_max} tokens, {_packed(recipe)}"
    yield "length", f"{train.total_steps} steps" if train.total_steps else _epochs(recipe, epoch_rows, "examples")
    files = f"every {evaluation.every_steps} steps on {_paths(evaluation.files)}: loss"
    yield "evaluation", files if evaluation.files else "none"


def _ranks(recipe: AnyRecipe, architecture: Architecture) -> str:
    layout = recipe.train.layout.parallel()
    shown = layout if architecture.experts else replace(layout, expert_tensor=1)
    ranks = f"{layout.ranks}{f' ({shown})' if layout.ranks > 1 else ''}"
    if isinstance(recipe, SftRecipe):
        return ranks
    engines = f"{recipe.rollout.engines} {recipe.rollout.engine} engine{'s' if recipe.rollout.engines > 1 else ''}"
    return f"{ranks}, {engines}, {recipe.cluster.placement}"


def _layers(recipe: AnyRecipe, architecture: Architecture) -> str:
    layout = recipe.train.layout.parallel()
    counts, chunks = layers_of_stages(architecture.layers, layout), layout.virtual_pipeline
    if len(set(counts)) == 1:
        in_chunks = f" in {chunks} chunks of {counts[0] // chunks}" if chunks > 1 else ""
        return f"{architecture.layers}, {counts[0]} on each pipeline stage{in_chunks}"
    first, *between, last = counts
    middle = f", {between[0]} on each in between" if between else ""
    in_chunks = f", each in {chunks} chunks" if chunks > 1 else ""
    return f"{architecture.layers}, {first} on the first pipeline stage{middle}, {last} on the last{in_chunks}"


def _epochs(recipe: AnyRecipe, rows: float | None, what: str) -> str:
    epochs = recipe.train.total_epochs
    passes = f"{epochs} pass{'es' if epochs != 1 else ''} over the training {what}"
    if rows is None:
        return passes
    steps = total_steps(recipe, math.ceil(rows))
    return f"{passes}, {rows:.0f} rows: {steps} step{'s' if steps > 1 else ''} at most"


def _share(sequences: int, data: int) -> str:
    return f", about {sequences / data:g} on each of {data} data ranks" if data > 1 else ""


def _packed(recipe: AnyRecipe) -> str:
    return f"packed into microbatches of {recipe.train.tokens_per_microbatch * recipe.train.layout.context}"


def _paths(files: Sequence[EntryConfig]) -> str:
    return ", ".join(file.location for file in files)


def _count(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)
