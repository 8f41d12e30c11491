"""A run before its processes start: lock, checkpoint, data, trackers, and the state in which its next step finds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Generic

from transformers import PreTrainedTokenizerBase

from megagrpo.checkpoint.pending import Pending, pending_of
from megagrpo.checkpoint.store import Checkpoint, CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState, changes
from megagrpo.cluster import runtime
from megagrpo.cluster.runtime import Runtime
from megagrpo.data import report as data_report
from megagrpo.data.cursor import Cursor
from megagrpo.data.mixture import AnyItem, Mixture
from megagrpo.errors import RecipeError
from megagrpo.plan.plan import plan_of
from megagrpo.plan.show.as_json import plan_json
from megagrpo.preflight.preflight import Preflight
from megagrpo.progress import progress
from megagrpo.recipe.defaults import plan_devices, run_directory, total_steps
from megagrpo.recipe.load import Kind
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.tokenizer import load_chat_tokenizer
from megagrpo.track.run_lock import only_process_of
from megagrpo.track.sink import PLAN_FILE
from megagrpo.track.tracker import Tracker
from megagrpo.trainer.alerts import Alerts
from megagrpo.trainer.early_stopping import early_stopping, reason_to_stop
from megagrpo.trainer.exports import Exports
from megagrpo.trainer.run import PhaseClock
from megagrpo.trainer.saving import Saving, checkpoint_to_resume, exported_step
from megagrpo.trainer.stopping import Stopping
from megagrpo.weights.families import read_architecture

Read = Callable[[Sequence[Any], PreTrainedTokenizerBase, str | None], Mixture[AnyItem]]
"""Reads entries of the data (EntryConfig) of a recipe: of one of its evaluation sets, or those to train on (None)."""


@dataclass(frozen=True)
class Setup(Generic[Kind, AnyItem]):
    """The parts of a run that exist before its processes start."""

    checked: Preflight[Kind]
    tokenizer: PreTrainedTokenizerBase
    cursor: Cursor[AnyItem]
    held_out: Mapping[str, Sequence[AnyItem]]  # by evaluation set
    total_steps: int
    last_step: int  # this process ends after it, or before
    resumed: Checkpoint | None
    state: TrainerState  # before the first step of this process
    pending: Pending | None  # groups that no step has trained on; None: no schedule samples in the background
    start_ray: Callable[[], Runtime]  # a second call returns the same
    saving: Saving
    exports: Exports
    tracker: Tracker
    stopping: Stopping
    alerts: Alerts | None  # fine-tuning has none
    clock: PhaseClock = field(default_factory=PhaseClock)

    @property
    def recipe(self) -> Kind:
        return self.checked.recipe


def open_run(
    checked: Preflight[Kind],
    read: Read[AnyItem],
    store: CheckpointStore,
    stopping: Stopping,
    closing: ExitStack,
    *,
    engines_too: bool,
    last_step: int | None,
) -> Setup[Kind, AnyItem] | None:
    """Opens a run, with arguments as of `run_to_end`; returns None if the run is complete."""
    recipe = checked.recipe
    closing.enter_context(only_process_of(run_directory(recipe)))
    start_ray = _ray_starter(recipe, store, stopping, closing, engines_too=engines_too)
    # Large checkpoints are verified by all nodes, which takes Ray; on one machine this process reads as fast.
    if store.newest() and runtime.joins_cluster(recipe):
        start_ray()
    with stopping.giving_up(), progress("looking for a checkpoint, and verifying it"):
        resumed = checkpoint_to_resume(store, recipe)
    tokenizer = load_chat_tokenizer(checked.tokenizer_directory, recipe.model.chat_template)
    data = read(recipe.data.train, tokenizer, None)
    evaluated = {name: read(files, tokenizer, name) for name, files in recipe.eval.files_of_sets().items()}
    cursor = Cursor(data.items, seed=recipe.seed, shuffle=recipe.data.shuffle)
    if resumed:
        cursor.restore(resumed.state.data_cursor)
    state, pending = first_state(recipe, cursor, resumed), pending_of(resumed)
    steps = total_steps(recipe, len(cursor))
    mixtures = {"train": data, **{f"eval {name}": of_set for name, of_set in evaluated.items()}}
    complete = bool(
        resumed
        and state.unlogged is None
        and (state.step >= steps or reason_to_stop(recipe, state, cursor))
        and (not recipe.checkpoint.export_hugging_face or exported_step(recipe) == state.step)
    )
    tracker = _start_tracker(closing, checked, tokenizer, mixtures, resumed, state, steps, complete=complete)
    if complete:
        tracker.say("the run is complete: nothing to do")
        return None
    exports = Exports(checked, tokenizer, tracker.say)
    closing.callback(exports.close)
    return Setup(
        checked=checked,
        tokenizer=tokenizer,
        cursor=cursor,
        held_out={name: of_set.items for name, of_set in evaluated.items()},
        total_steps=steps,
        last_step=min(steps, last_step or steps),
        resumed=resumed,
        state=state,
        pending=pending,
        start_ray=start_ray,
        saving=Saving(store, tracker.say, state.step),
        exports=exports,
        tracker=tracker,
        stopping=stopping,
        alerts=Alerts(recipe.rollout.alerts, run_directory(recipe)) if isinstance(recipe, Recipe) else None,
    )


def _ray_starter(
    recipe: AnyRecipe, store: CheckpointStore, stopping: Stopping, closing: ExitStack, *, engines_too: bool
) -> Callable[[], Runtime]:
    """Returns a function that starts Ray once, on devices for the recipe; its nodes then verify checkpoints."""

    @cache
    def start_ray() -> Runtime:
        with stopping.giving_up(), stopping.while_ray_starts(), progress("starting Ray"):
            devices_of = partial(plan_devices, engines_too=engines_too)
            started = runtime.start(recipe, stopping.check, devices_of=devices_of)
        closing.callback(runtime.stop, started)
        store.verify = partial(runtime.damage_on_nodes, started, recipe.cluster.step_timeout_seconds)
        return started

    return start_ray


def _start_tracker(
    closing: ExitStack,
    checked: Preflight[Any],
    tokenizer: PreTrainedTokenizerBase,
    mixtures: Mapping[str, Mixture[Any]],
    resumed: Checkpoint | None,
    state: TrainerState,
    steps: int,
    *,
    complete: bool,
) -> Tracker:
    """Starts the trackers, writes the reports of data and plan, and reports how the run continues."""
    recipe, directory = checked.recipe, run_directory(checked.recipe)
    changed = changes(resumed.state.recipe, recipe.model_dump(mode="json")) if resumed else []
    tracker = Tracker(
        recipe,
        steps,
        state.step,
        state.tracker_runs,
        tokenizer=tokenizer,
        unlogged=state.unlogged is not None,
        changed=changed,
        complete=complete,
        console=checked.console,
    )
    closing.enter_context(tracker)
    data_report.write(mixtures, directory)
    critic = read_architecture(checked.critic_directory) if checked.critic_directory else None
    with suppress(RecipeError):  # of GPUs that are unknown to plans
        planned = plan_of(recipe, checked.architecture, critic=critic, agent=checked.agent)
        (directory / PLAN_FILE).write_text(plan_json(planned) + "\n", encoding="utf-8")
    lines = list(data_report.lines(mixtures, "prompts" if isinstance(recipe, Recipe) else "examples"))
    if resumed:
        lines += [f"continuing after step {state.step} from {resumed.path}", *resumed.warnings]
        lines += [f"changed: {line}" for line in changed]
    for line in lines:
        tracker.say(line)
    return tracker


def first_state(recipe: AnyRecipe, cursor: Cursor[Any], saved: Checkpoint | None) -> TrainerState:
    """Returns the state before the first step of this process. saved: the checkpoint resumed from.

    Early stopping keeps its best value only if it still watches the same metric.
    """
    state, settings = saved.state if saved else None, recipe.model_dump(mode="json")
    coefficient = first_kl_coefficient(recipe, state) if isinstance(recipe, Recipe) else None
    if state is None:
        return TrainerState(0, 0, cursor.state(), settings, kl_coefficient=coefficient)
    rule, section = early_stopping(recipe, state), state.recipe.get("eval")
    before = section.get("early_stopping") if isinstance(section, dict) else None
    if not (rule and isinstance(before, dict) and before.get("metric") == rule.rule.metric):
        state = replace(state, best_evaluation=None, evaluations_without_best=0)
    return replace(state, data_cursor=cursor.state(), recipe=settings, kl_coefficient=coefficient)


def first_kl_coefficient(recipe: Recipe, state: TrainerState | None) -> float:
    """Returns the weight of the KL penalty in the first step after a checkpoint's state, or in the run's first."""
    if state and recipe.algorithm.kl.target is not None and state.kl_coefficient is not None:
        return state.kl_coefficient
    return recipe.algorithm.kl.coefficient
