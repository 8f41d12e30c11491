"""A run before its processes start: lock, checkpoint, data, trackers, and the state in which its next step finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Generic

from megagrpo.checkpoint.groups import pending_of
from megagrpo.checkpoint.store import Checkpoint, CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState, changes
from megagrpo.cluster import runtime
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.stopping import Stopping
from megagrpo.data.cursor import Cursor
from megagrpo.data.mixture import AnyItem, Mixture, write_counts
from megagrpo.data.prompts import Read
from megagrpo.errors import RecipeError
from megagrpo.plan.plan import plan_of
from megagrpo.plan.show.as_json import plan_json
from megagrpo.preflight.machine import joins_cluster
from megagrpo.preflight.preflight import Preflight
from megagrpo.progress import progress
from megagrpo.recipe.defaults import plan_devices, run_directory, total_steps
from megagrpo.recipe.load import Kind
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.tokenizer import load_chat_tokenizer
from megagrpo.track.jsonl import PLAN_FILE
from megagrpo.track.status import only_process_of
from megagrpo.track.tracker import Tracker
from megagrpo.trainer.alerts import Alerts, early_stopping, reason_to_stop
from megagrpo.trainer.run import PhaseClock
from megagrpo.trainer.saving import Exports, Saving, checkpoint_to_resume, exported_step
from megagrpo.weights.families import read_architecture


class Setup(Generic[Kind, AnyItem]):
    """A run before its processes start."""

    def __init__(
        self,
        checked: Preflight[Kind],
        read: Read[AnyItem],
        store: CheckpointStore,
        stopping: Stopping,
        closing: ExitStack,
        *,
        engines_too: bool = True,
        last_step: int | None = None,
    ) -> None:
        """Locks the run's directory, finds its checkpoint, reads its data, and starts its trackers. Arguments are as of
        `run_to_end`; ends are registered on `closing`."""
        self.checked, self.stopping, self._store, self._closing = checked, stopping, store, closing
        recipe, self._engines_too = checked.recipe, engines_too
        self._ray: Runtime | None = None
        closing.enter_context(only_process_of(run_directory(recipe)))
        # Large checkpoints are verified by all nodes, which takes Ray; on one machine this process reads as fast.
        if store.newest() and joins_cluster(recipe):
            self.start_ray()
        with stopping.giving_up(), progress("looking for a checkpoint, and verifying it"):
            self.resumed = checkpoint_to_resume(store, recipe)
        self.tokenizer = load_chat_tokenizer(checked.tokenizer_directory, recipe.model.chat_template)
        data = read(recipe.data.train, self.tokenizer, None)
        sets = {name: read(files, self.tokenizer, name) for name, files in recipe.eval.files_of_sets().items()}
        self.held_out: Mapping[str, Sequence[AnyItem]] = {name: of_set.items for name, of_set in sets.items()}
        self.cursor = Cursor(data.items, seed=recipe.seed, shuffle=recipe.data.shuffle)
        if self.resumed:
            self.cursor.restore(self.resumed.state.data_cursor)
        self.state = first_state(recipe, self.cursor, self.resumed)  # before the first step of this process
        self.pending = pending_of(self.resumed)  # groups that no step has trained on
        self.total_steps = total_steps(recipe, len(self.cursor))
        self.last_step = min(self.total_steps, last_step or self.total_steps)  # this process ends after it, or before
        self.complete = bool(
            self.resumed
            and self.state.unlogged is None
            and (self.state.step >= self.total_steps or reason_to_stop(recipe, self.state, self.cursor))
            and (not recipe.checkpoint.export_hugging_face or exported_step(recipe) == self.state.step)
        )
        self.tracker = self._start_tracker({"train": data, **{f"eval {name}": of_set for name, of_set in sets.items()}})
        self.clock, self.saving = PhaseClock(), Saving(store, self.tracker.say, self.state.step)
        self.exports = Exports(checked, self.tokenizer, self.tracker.say)
        closing.callback(self.exports.close)
        self.alerts: Alerts | None = None  # fine-tuning has none
        if isinstance(recipe, Recipe) and not self.complete:
            self.alerts = Alerts(recipe.rollout.alerts, run_directory(recipe))

    @property
    def recipe(self) -> Kind:
        return self.checked.recipe

    def start_ray(self) -> Runtime:
        """Starts Ray at the first call; its nodes then verify checkpoints."""
        if self._ray is None:
            with self.stopping.giving_up(), self.stopping.while_ray_starts(), progress("starting Ray"):
                devices_of = partial(plan_devices, engines_too=self._engines_too)
                self._ray = runtime.start(self.recipe, self.stopping.check, devices_of=devices_of)
            self._closing.callback(runtime.stop, self._ray)
            seconds = self.recipe.cluster.step_timeout_seconds
            self._store.verify = partial(runtime.damage_on_nodes, self._ray, seconds)
        return self._ray

    def _start_tracker(self, mixtures: Mapping[str, Mixture[AnyItem]]) -> Tracker:
        """Starts the trackers, writes the reports of data and plan, and reports how the run continues."""
        checked, recipe, state, resumed = self.checked, self.recipe, self.state, self.resumed
        changed = changes(resumed.state.recipe, recipe.model_dump(mode="json")) if resumed else []
        tracker = Tracker(
            recipe,
            self.total_steps,
            state.step,
            state.tracker_runs,
            tokenizer=self.tokenizer,
            unlogged=state.unlogged is not None,
            changed=changed,
            complete=self.complete,
            console=checked.console,
        )
        self._closing.enter_context(tracker)
        write_counts(mixtures, run_directory(recipe))
        critic = read_architecture(checked.critic_directory) if checked.critic_directory else None
        teachers = {name: read_architecture(directory) for name, directory in checked.teachers.items()}
        with suppress(RecipeError):  # of GPUs that are unknown to plans
            planned = plan_of(recipe, checked.architecture, critic=critic, teachers=teachers, found=checked.found)
            (run_directory(recipe) / PLAN_FILE).write_text(plan_json(planned) + "\n", encoding="utf-8")
        noun = "prompts" if isinstance(recipe, Recipe) else "examples"
        lines = [line for mixture in mixtures.values() for line in mixture.lines(noun)]
        if resumed:
            lines += [f"continuing after step {state.step} from {resumed.path}", *resumed.warnings]
            lines += [f"changed: {line}" for line in changed]
        for line in (*lines, *(["the run is complete: nothing to do"] if self.complete else [])):
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
    rule, section = early_stopping(recipe), state.recipe.get("eval")
    before = section.get("early_stopping") if isinstance(section, dict) else None
    if not (rule and isinstance(before, dict) and before.get("metric") == rule.metric):
        state = replace(state, best_evaluation=None, evaluations_without_best=0)
    return replace(state, data_cursor=cursor.state(), recipe=settings, kl_coefficient=coefficient)


def first_kl_coefficient(recipe: Recipe, state: TrainerState | None) -> float:
    """Returns the weight of the KL penalty in the first step after a checkpoint's state, or in the run's first."""
    if state and recipe.algorithm.kl.target is not None and state.kl_coefficient is not None:
        return state.kl_coefficient
    return recipe.algorithm.kl.coefficient
