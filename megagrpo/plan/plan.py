"""A plan of a recipe as data: for the terminal, a page, or other programs."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from types import MappingProxyType

from megagrpo.errors import Problem, ReportError
from megagrpo.layout.parallel import layers_of_stages
from megagrpo.plan.assumptions import Assumptions, assumptions_from, longest_sequence
from megagrpo.plan.case import Case, machines_of
from megagrpo.plan.engine import EngineMemory
from megagrpo.plan.memory import DeviceMemory, memory
from megagrpo.plan.other_models import lines_of_teachers
from megagrpo.plan.parameters import Stage, active_parameters, known_models, stages, total_parameters
from megagrpo.plan.proofs import Proof, proofs_of
from megagrpo.plan.schedules import SYNC, ScheduleTime, Work, compared, schedule_time
from megagrpo.plan.time import Sampling, StepTime, step_time
from megagrpo.plan.units import byte_text, second_text
from megagrpo.recipe.defaults import checkpoint_directory, run_directory, total_steps
from megagrpo.recipe.kernels import local_kernels
from megagrpo.recipe.load import load_any
from megagrpo.recipe.schema import AnyRecipe, EntryConfig, Recipe, SftRecipe
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture

UNITS = {
    "tokens": "tokens",
    "turns": "turns",
    "sequences": "sequences",
    "rows": "rows",
    "bytes_per_second": "bytes/s",
    "experts_per_second": "experts/s",
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

METRICS_FILE, RECIPE_FILE = "metrics.jsonl", "recipe.yaml"
Step = Mapping[str, float]
FACTORS = tuple(name for name in Assumptions.__dataclass_fields__ if name.endswith("_factor"))
METRICS: Mapping[str, Mapping[str, str]] = {
    "grpo": {
        "prompt_tokens": "prompt_tokens/mean",
        "response_tokens": "response_tokens/mean",
        "longest_response_tokens": "response_tokens/max",
        "signal_share": "groups/with_signal_share",
        "turns": "agent/turns/mean",
        "sequences": "agent/branches/mean",
    },
    "sft": {"response_tokens": "example_tokens/mean"},
}
"""By kind of recipe: the metric that measures an assumption. Packing is not there: with few microbatches it says
nothing about a larger run."""


@dataclass(frozen=True)
class Assumed:
    """One assumption. `value` None: it follows from others. `origin`: default, given, counted or calibrated."""

    name: str
    value: float | None
    unit: str
    origin: str


@dataclass(frozen=True)
class Plan(Case):
    """A recipe's plan. Without known GPUs there is no estimate of time, unless a run on CPUs calibrates it."""

    origins: Mapping[str, str] = field(default_factory=dict)  # of assumptions, where they are not defaults
    calibrated: bool = False
    unchecked: tuple[str, ...] = ()  # what was not on this machine
    found: Mapping[str, str] = field(default_factory=dict)  # lines of the summary that preflight has found

    @property
    def noun(self) -> str:
        """Returns the name of one of its devices: GPU or process."""
        return "GPU" if self.device == "cuda" else "process"

    @cached_property
    def summary(self) -> Mapping[str, str]:
        """Returns the sizes that follow from a checked recipe, in sentences."""
        return dict(_summary(self))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return stages(len(self.architecture.layers), self.layout)

    @cached_property
    def memory(self) -> tuple[DeviceMemory, ...]:
        return tuple(memory(self))

    @cached_property
    def engine(self) -> EngineMemory | None:
        """Returns the memory of an engine; None for an unknown card, or a recipe without engines of its own."""
        grpo = self.recipe if isinstance(self.recipe, Recipe) else None
        return grpo.rollout.kind.memory(self) if self.card_bytes and grpo and grpo.rollout.devices_of_engine else None

    @property
    def lacking_bytes(self) -> int:
        return lacking_bytes(self.memory, self.card_bytes)

    @cached_property
    def time(self) -> StepTime | None:
        """Returns the time of a step under its schedule; None without a known card or a calibrated CPU."""
        return (
            replace(self._phases, scheduled=self.scheduled.seconds) if self._phases and self.scheduled else self._phases
        )

    @cached_property
    def _phases(self) -> StepTime | None:
        """Returns the time of a step whose phases follow one another."""
        known = self.card_bytes or (self.device == "cpu" and self.calibrated)
        return step_time(self) if known else None

    @cached_property
    def schedules(self) -> tuple[ScheduleTime, ...]:
        """Returns the times of its steps under each schedule that its rules allow; sync is the first."""
        if self._phases is None or not isinstance(self.recipe, Recipe):
            return ()
        work = Work.of(self, self._phases)
        return tuple(schedule_time(work, schedule) for schedule in compared(self.recipe))

    @cached_property
    def proofs(self) -> tuple[Proof, ...]:
        """Returns the proofs that what is trained is what was sampled; none of fine-tuning."""
        return tuple(proofs_of(self, self.memory, self.time)) if isinstance(self.recipe, Recipe) else ()

    @property
    def scheduled(self) -> ScheduleTime | None:
        """Returns the time under the recipe's schedule; None for sync, whose phases follow one another."""
        return next((time for time in self.schedules[1:] if time.schedule == self.grpo.schedule), None)

    @property
    def assumed(self) -> tuple[Assumed, ...]:
        values, origins = vars(self.assumptions).items(), self.origins
        return tuple(Assumed(name, value, unit_of(name), origins.get(name, "default")) for name, value in values)


def plan_of(
    recipe: AnyRecipe,
    architecture: Architecture,
    *,
    given: Collection[str] = (),
    run_directory: Path | None = None,
    unchecked: Collection[str] = (),
    critic: Architecture | None = None,
    teachers: Mapping[str, Architecture] = MappingProxyType({}),
    epoch_rows: int | None = None,
    found: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Returns the plan of a recipe whose rules hold. `given` are assumptions as NAME=VALUE; `run_directory` calibrates
    them; `critic` is the model of algorithm.critic.path, if it is another; `teachers` are those of kind ranks;
    `epoch_rows` are the rows counted in data.train; `found` has lines of the summary, by name.

    Raises RecipeError for an unknown GPU or a wrong assumption, ReportError for a run without measurements.
    """
    assumptions, origins = assumptions_from(given), dict[str, str]()
    if assumptions.epoch_rows is None and epoch_rows is not None:
        assumptions, origins["epoch_rows"] = replace(assumptions, epoch_rows=epoch_rows), "counted"
    machines = machines_of(recipe, assumptions)
    plan = Plan(recipe, architecture, machines, assumptions, critic, teachers, unchecked=tuple(unchecked), found=found)
    names = {text.partition("=")[0].strip() for text in given}
    if run_directory is not None:
        before, measured = vars(assumptions), vars(calibrated(plan, run_directory))
        # A given value takes precedence over a measured one.
        assumptions = Assumptions(**(measured | {name: before[name] for name in names}))
        origins |= {name: "calibrated" for name, value in measured.items() if value != before[name]}
    origins |= dict.fromkeys(names, "given")
    return replace(plan, assumptions=assumptions, origins=origins, calibrated=run_directory is not None)


def lacking_bytes(held: Sequence[DeviceMemory], card_bytes: int | None, spare: float = 0.0) -> int:
    """Returns the bytes that the fullest device lacks; 0 if everything fits, or the card is unknown. `spare` is the
    share of a card to leave free."""
    return max(0, max(kind.fullest.bytes for kind in held) - int(card_bytes * (1 - spare))) if card_bytes else 0


def unit_of(assumption: str) -> str:
    """Returns the unit of an assumption by the end of its name: prompt_tokens are tokens."""
    ends = [end for end in UNITS if assumption == end or assumption.endswith(f"_{end}")]
    return UNITS[max(ends, key=len)]


# --- calibration -----------------------------------------------------------------------------------------------------


def calibrated(case: Case, run_directory: Path) -> Assumptions:
    """Returns the case's assumptions with lengths, imbalance and phase factors from a run's metrics.jsonl. Each is a
    median over the run's steps without the first.

    A factor is the measured seconds of a phase over those predicted for the run's own recipe, which is beside the
    metrics; without that file the run counts as one of the case. The run was on the case's machines if its recipe names
    none.

    Raises ReportError if the directory has no metrics of steps, or is of another kind, of CPUs where GPUs are planned
    for, or of a model that is not there, and RecipeError if its recipe is not one of this version.
    """
    steps = read_steps(run_directory)
    known = {
        field: value for field, name in METRICS[case.recipe.kind].items() if (value := _median(steps, name)) is not None
    }
    if (uneven := _median(steps, "packing/imbalance")) is not None:
        known["imbalance"] = 1 + uneven
    known |= {name: max(1.0, known[name]) for name in ("turns", "sequences") if name in known}
    given, outside = _median(steps, "agent/given_tokens/mean"), _median(steps, "agent/seconds/outside_mean")
    if given is not None and outside is not None and (gaps := known["turns"] - 1) >= 1e-9:
        # A rollout's tokens that were not sampled are a prompt for each of its sequences, and text between turns.
        between = given / known["sequences"] - known["prompt_tokens"]
        known |= {"given_tokens": max(0.0, between / gaps), "tool_seconds": outside / gaps}
    assumptions = replace(case.assumptions, **known, **dict.fromkeys(FACTORS, 1.0))

    ran = replace(case, assumptions=assumptions)
    path = run_directory / RECIPE_FILE
    if path.exists():
        recipe = load_any(path).recipe
        model, machines = _architecture_of_run(recipe, case, path), machines_of(recipe, assumptions)
        ran = replace(ran, recipe=recipe, architecture=model, machines=machines or case.machines)
    predicted = step_time(ran)

    factors = {}
    # Under other schedules seconds/rollout is what the trainer waited, not what engines took.
    in_turn = not isinstance(ran.recipe, Recipe) or ran.recipe.schedule == SYNC
    for phase in predicted.phases:
        if phase.phase == "rollout" and not in_turn:
            continue
        seconds = _median(steps, f"seconds/{phase.phase}")
        if phase.phase == "driver":
            seconds = median(map(_between_phases, steps))
        if seconds is not None and phase.seconds > 0:
            factors[f"{phase.phase}_factor"] = seconds / phase.seconds
    return replace(assumptions, **factors)


def _architecture_of_run(ran: AnyRecipe, case: Case, path: Path) -> Architecture:
    """Returns the model of the recipe that ran. Raises ReportError if such a run cannot calibrate the case."""
    recipe = case.recipe
    if ran.kind != recipe.kind:
        raise ReportError(Problem(str(path), f"a run of kind {ran.kind}", f"one of kind {recipe.kind}, as the recipe"))
    ran_on, planned_for = ran.cluster.device, recipe.cluster.device
    if "cpu" in (ran_on, planned_for) and ran_on != planned_for and ran_on != "auto":
        needed = "a run on the kind of device that is planned for: speeds of CPUs say nothing of GPUs"
        fix = "calibrate by a run on the cluster, or give its lengths: --assume response_tokens=N"
        raise ReportError(Problem(f"{path}: cluster.device", f"a run on {ran_on}", needed, fix))
    if ran.model.path == recipe.model.path:
        return case.architecture
    directory = known_models().get(ran.model.path) or Path(ran.model.path)
    if not (directory / "config.json").exists():
        needed = "the run's model, or at least its config.json, where the run had it"
        fix = "plan from the same directory on the same machine, or calibrate by a run of the same model.path"
        raise ReportError(Problem(f"{path}: model.path", ran.model.path, needed, fix))
    return read_architecture(directory)


def read_steps(run_directory: Path) -> list[Step]:
    """Returns the metrics of every step with an update. Drops the first, which compiles, allocates and connects, if
    there are others. Raises ReportError if there is none."""
    path = run_directory / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline is being written
        steps: list[Step] = [
            {name: value for name, value in line.items() if type(value) in (int, float) and abs(value) < 1e300}
            for line in map(json.loads, lines)
            if "seconds/update" in line
        ]
    except OSError as error:
        needed = f"the directory of a run: each step adds to its {METRICS_FILE}"
        raise ReportError(Problem(str(path), error.strerror or str(error), needed)) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ReportError(Problem(str(path), given=str(error), needed="lines of JSON, as a run writes them")) from error
    steps = [step for step in steps if step.keys() >= {"seconds/step", "seconds/update"}]
    if not steps:
        raise ReportError(Problem(str(path), given="no step that trained the model", needed="a run of some steps"))
    return steps[1:] or steps


def _median(steps: Sequence[Step], name: str) -> float | None:
    """Returns the median of a metric; None if no step has it."""
    values = [step[name] for step in steps if name in step]
    return median(values) if values else None


def _between_phases(step: Step) -> float:
    """Returns the seconds of a step outside of the phases that it names."""
    outside = ("seconds/step", "seconds/eval", "seconds/checkpoint", "seconds/export")
    phases = sum(value for name, value in step.items() if name.startswith("seconds/") and name not in outside)
    return max(0.0, step["seconds/step"] - phases)


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
    if plan.device == "cuda":
        yield "kernels", _kernels(plan)
    yield "vocabulary", f"{architecture.vocab}{padding}, {padded // tensor} on each tensor rank"
    yield from _of_sft(recipe, epoch_rows) if isinstance(recipe, SftRecipe) else _of_grpo(recipe, epoch_rows)
    yield "checkpoints", f"every {recipe.checkpoint.every_steps} steps, in {checkpoint_directory(recipe)}"
    if isinstance(recipe, Recipe) and recipe.rollout.kind.starts_without_weights:
        read, engines = parameters * plan.item_bytes, recipe.rollout.engines
        seconds = second_text(engines * read / plan.assumptions.disk_bytes_per_second)
        spared = f"spares {byte_text(engines * read)} and {seconds} of reading"
        yield (
            "start",
            f"{byte_text(read)} read once, by the training ranks; engines begin without weights, which {spared}",
        )
    yield from _of_agent(plan)
    yield from lines_of_teachers(plan) if isinstance(recipe, Recipe) else ()
    yield from plan.found.items()


def _of_grpo(recipe: Recipe, epoch_rows: float | None) -> Iterator[tuple[str, str]]:
    rollout, algorithm, train, kl = recipe.rollout, recipe.algorithm, recipe.train, recipe.algorithm.kl
    prompts, samples, dynamic = rollout.prompts_per_step, rollout.samples_per_prompt, rollout.dynamic_sampling
    responses = prompts * samples
    rounds = f", groups without signal replaced in up to {dynamic.rounds_max} rounds" if dynamic else ""
    yield "step", f"{prompts} prompts x {samples} samples = {responses} responses{rounds}"
    penalty = f"{kl.coefficient:g} x KL ({kl.estimator}) in the {kl.placement}" if kl.coefficient else "no KL penalty"
    names = f"{algorithm.advantage.name} advantages, {algorithm.loss.name} loss, {algorithm.aggregation.name}"
    taught = algorithm.distillation
    teachers = f", {taught.weight:g} x {taught.objective.name} of teachers" if taught else ""
    yield "objective", f"{names}, {penalty}{teachers}"
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
        "tools": f"tools {', '.join(tool.name for tool in agent.tool_configs)}",
        "function": agent.function,
        "verifiers": f"verifiers {agent.verifiers and agent.verifiers.environment}",
        "openenv": f"openenv {agent.openenv and agent.openenv.url}",
    }.get(agent.kind, agent.kind)
    limits = f"up to {agent.turns_max} turns and {second_text(agent.timeout_seconds)}"
    processes = f"{agent.processes} process{'es' if agent.processes > 1 else ''}"
    yield "agent", f"{what}, {limits}; {agent.rollouts_at_once} rollouts at once in {processes}"
    between = lengths.given * lengths.response / max(1.0, lengths.turns - 1)
    turns = f"about {lengths.turns:g} of {lengths.turn:.0f} sampled tokens, and between them {between:.0f} given ones"
    sequences = f", trained as {lengths.sequences:g} sequences" if lengths.sequences > 1 else ""
    waits = f"{second_text(case.assumptions.tool_seconds)} of tools; {lengths.sequence:.0f} tokens in all{sequences}"
    yield "turns", f"{turns} and {waits}"
    if (cache := Sampling.of(case).turns) and case.machines is not None:
        room = f"an engine's cache has room for {cache.cached:,.0f} of its {cache.conversations:,.0f} at once"
        reuse = f"{cache.reuse:.0%} of a conversation's history is found in the cache: {room}"
        yield "prefixes", reuse if cache.cached else "engines keep nothing: each turn reads its whole conversation"


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
    layers, chunks = len(architecture.layers), layout.virtual_pipeline
    counts = layers_of_stages(layers, layout)
    if len(set(counts)) == 1:
        in_chunks = f" in {chunks} chunks of {counts[0] // chunks}" if chunks > 1 else ""
        return f"{layers}, {counts[0]} on each pipeline stage{in_chunks}"
    first, *between, last = counts
    middle = f", {between[0]} on each in between" if between else ""
    in_chunks = f", each in {chunks} chunks" if chunks > 1 else ""
    return f"{layers}, {first} on the first pipeline stage{middle}, {last} on the last{in_chunks}"


def _kernels(plan: Plan) -> str:
    """Returns the layers of training ranks and what computes their attention, with the reason for local layers."""
    train, auto = plan.recipe.train, plan.auto_layers
    if plan.fused_layers:
        kernel = auto.kernel if plan.auto_is_fused else "no fused kernel, all scores are kept"
        return f"Transformer Engine's layers: {kernel}"
    why = "train.lora" if train.lora is not None else "layer_spec: local" if train.layer_spec == "local" else auto.why
    kernels: dict[str, list[str]] = {}
    longest = longest_sequence(plan.recipe)
    for name, kernel in local_kernels(plan.card, plan.architecture, plan.demands, longest).items():
        kernels.setdefault(kernel, []).append(name)
    texts = [f"{' and '.join(names)}: {kernel}" for kernel, names in kernels.items()]
    if plan.architecture.experts:
        texts.append("experts: one product each; the seconds below assume grouped products, so expect more")
    return "; ".join([f"Megatron's local layers ({why})", *texts])


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
