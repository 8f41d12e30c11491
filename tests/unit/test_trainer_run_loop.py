"""The run loop: a run told to stop at any moment loses nothing, and a run has one process."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.cluster.stopping import StopRequested
from megagrpo.errors import (
    EngineError,
    MachineError,
    MismatchError,
    NodeLostError,
    Problem,
    RankError,
    RankLostError,
    RecipeError,
)
from megagrpo.recipe import schema
from megagrpo.track.status import only_process_of
from megagrpo.trainer import train
from megagrpo.trainer.alerts import after_evaluation, rule_met
from megagrpo.trainer.setup import first_state
from tests import step_fakes

STEPS = 4
HELD_OUT = "sets: {main: {files: [{path: a.jsonl}]}}"
OVERRIDES = (
    f"train.total_steps={STEPS}",
    f"eval={{every_steps: 2, {HELD_OUT}}}",
    "checkpoint.every_steps=3",
    "train.offload=[]",
)


class Recorder:
    """A tracker over several starts of one run: lines that were logged and states that were saved, with their steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        self.overrides = (*OVERRIDES, *overrides)
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.saved: list[TrainerState] = []
        self.run_ids: dict[str, str] = {}
        self.restarts: list[float] = []  # by line
        self.confirmed: list[int] = []
        """The newest saved step, at each confirmation."""
        monkeypatch.setattr(train, "report_mismatch", lambda *given: None)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        measured = ("seconds/", "tokens_per_second", "trainer/", "restarts")
        self.restarts.append(metrics.get("restarts", 0.0))
        self.lines.append((step, {name: value for name, value in metrics.items() if not name.startswith(measured)}))

    evaluated = rollouts = say = lambda self, *given: None

    def confirm(self) -> None:
        self.confirmed.append(self.saved[-1].step if self.saved else 0)

    def rewind(self, step: int, *, unlogged: bool) -> None:
        self.lines = [line for line in self.lines if step and line[0] <= step - unlogged]

    def start(self, moment: Callable[[Any, Callable[[], None]], None]) -> None:
        """Starts or continues the run; `moment` plants the signal."""
        run = step_fakes.make_run(*self.overrides, scores=lambda prompt: [prompt % 3, 1, 0, 0.5])
        run.__dict__["total_steps"] = STEPS

        def told_to_stop() -> None:
            run.stopping.signal = signal.SIGTERM
            run.stopping.check()

        moment(run, told_to_stop)
        state = TrainerState.from_json(self.saved[-1].to_json()) if self.saved else None
        step_fakes.run_loop(run, self, self.saved.append, state)


def nothing(run: Any, stop: Callable[[], None]) -> None:
    pass


def at_call(part: str, method: str, count: int) -> Callable[[Any, Callable[[], None]], None]:
    """The signal comes in the `count`-th call of run.PART.METHOD."""

    def plant(run: Any, stop: Callable[[], None]) -> None:
        whole, left = getattr(getattr(run, part), method), [None] * count

        def told(*arguments: Any, **named: Any) -> Any:
            left.pop() if left else None
            if not left:
                stop()
            return whole(*arguments, **named)

        setattr(getattr(run, part), method, told)

    return plant


@pytest.mark.parametrize(
    ("part", "method", "count", "step", "waits"),
    [
        ("scorer", "score", 2, 1, False),
        ("policy", "load_batch", 1, 1, False),
        ("policy", "update", 2, 2, True),
        ("rollouts", "generate_for_evaluation", 2, 2, True),
        ("policy", "update", 4, 4, True),
    ],
)
def test_a_run_told_to_stop_saves_what_is_done_and_continues_as_if_it_had_not_been(
    part: str, method: str, count: int, step: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = Recorder(monkeypatch)
    undisturbed.start(nothing)
    recorder = Recorder(monkeypatch)
    with pytest.raises(StopRequested):
        recorder.start(at_call(part, method, count))
    state = recorder.saved[-1]
    assert (state.step, state.unlogged is not None) == (step, waits), "a line that waits for its evaluation is saved"
    assert recorder.lines[-1][0] == step - waits
    recorder.start(nothing)
    assert recorder.lines == undisturbed.lines
    assert recorder.saved[-1] == undisturbed.saved[-1]


@pytest.mark.parametrize("saved", [{}, {"eval": "x"}, {"eval": {"early_stopping": 1}}])
def test_a_run_continues_from_a_checkpoint_whose_recipe_lacks_an_evaluation(saved: dict[str, Any]) -> None:
    watched = [f"eval={{early_stopping: {{metric: main/mean@1, patience: 2}}, {HELD_OUT}}}"]
    run = step_fakes.make_run(*watched, scores=lambda prompt: [1.0] * 4)
    state = TrainerState(2, 2, run.cursor.state(), saved, best_evaluation=0.5)
    begun = first_state(run.recipe, run.cursor, step_fakes.checkpoint_of(state))
    assert (begun.step, begun.best_evaluation) == (2, None)


def test_a_run_told_to_stop_still_ends_with_the_mismatch_that_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    monkeypatch.setattr(train, "report_mismatch", lambda recipe, step, *given: Problem("far") if step == 2 else None)
    with pytest.raises(MismatchError):
        recorder.start(at_call("rollouts", "generate_for_evaluation", 2))
    assert recorder.saved[-1].step == 2


def scores_of_steps(metric: str, recorder: Recorder) -> dict[int, float]:
    return {step: metrics[metric] for step, metrics in recorder.lines if metric in metrics}


def test_each_set_is_evaluated_when_it_is_due_and_all_are_at_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = "{often: {files: [{path: a}]}, seldom: {files: [{path: b}], every_steps: 3, before_training: false}}"
    recorder = Recorder(monkeypatch, f"eval={{every_steps: 1, sets: {sets}}}")
    recorder.start(nothing)
    assert sorted(scores_of_steps("eval/often/mean@1", recorder)) == [0, 1, 2, 3, 4]
    assert sorted(scores_of_steps("eval/seldom/mean@1", recorder)) == [3, 4]


def test_a_run_that_stops_early_evaluates_all_sets_and_counts_only_evaluations_of_the_watched_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sets = "{often: {files: [{path: a}], every_steps: 1}, watched: {files: [{path: b}], every_steps: 2}}"
    rule = "{metric: often/mean@1, patience: 2}"
    recorder = Recorder(monkeypatch, f"eval={{before_training: false, early_stopping: {rule}, sets: {sets}}}")
    recorder.start(nothing)
    assert sorted(scores_of_steps("eval/often/mean@1", recorder)) == [1, 2, 3]
    assert sorted(scores_of_steps("eval/watched/mean@1", recorder)) == [2, 3]
    rule = "{metric: watched/mean@1, patience: 1}"
    recorder = Recorder(monkeypatch, f"eval={{before_training: false, early_stopping: {rule}, sets: {sets}}}")
    recorder.start(nothing)
    assert max(scores_of_steps("eval/watched/mean@1", recorder)) == 4, "the first evaluation is a new best"


def test_the_best_checkpoint_is_of_a_step_that_evaluated_its_set(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = "{best: {files: [{path: a}], every_steps: 2}, other: {files: [{path: b}], every_steps: 1}}"
    found = Recorder(monkeypatch, f"eval={{sets: {sets}}}", "checkpoint.keep_best=best/mean@1")
    found.start(nothing)
    assert [state.step for state in found.saved] == [2, 3, 4]


ENGINE, DISK = EngineError(Problem("engine 0 died")), OSError("no space left")


@pytest.mark.parametrize(
    ("error", "part", "method", "count", "step"),
    [
        (ENGINE, "rollouts", "generate", 3, 1),  # the first is an evaluation
        (DISK, "scorer", "score", 3, 2),
        (ENGINE, "weights", "sync", 1, 1),
        (ENGINE, "weights", "sync", 2, 2),
        (DISK, "rollouts", "generate_for_evaluation", 2, 2),
        (NodeLostError(Problem("node")), "rollouts", "generate", 3, 1),
        (ENGINE, "policy", "update", 2, None),  # the ranks are between two steps
        (RankError(Problem("rank 0 died")), "scorer", "score", 3, None),
    ],
)
def test_an_error_of_others_saves_the_last_step_that_is_whole_and_the_run_continues_as_if_there_had_been_none(
    error: Exception, part: str, method: str, count: int, step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = Recorder(monkeypatch)
    undisturbed.start(nothing)

    def failing() -> None:
        raise error

    recorder = Recorder(monkeypatch)
    with pytest.raises(type(error)):
        recorder.start(lambda run, stop: at_call(part, method, count)(run, failing))
    assert [state.step for state in recorder.saved] == ([step] if step else [])
    if step:
        recorder.start(nothing)
        assert recorder.lines == undisturbed.lines
        assert recorder.saved[-1] == undisturbed.saved[-1]


def test_a_step_whose_metrics_cannot_be_written_is_saved_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = Recorder(monkeypatch)
    undisturbed.start(nothing)
    recorder = Recorder(monkeypatch)
    whole = recorder.log

    def full(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            raise MachineError(Problem("no room"))
        whole(step, metrics)

    with monkeypatch.context() as patched:
        patched.setattr(recorder, "log", full)
        with pytest.raises(MachineError):
            recorder.start(nothing)
    assert [state.step for state in recorder.saved] == [2]
    recorder.start(nothing)
    assert recorder.lines == undisturbed.lines


def losing_ranks(in_updates: set[int]) -> Callable[[Any, Callable[[], None]], None]:
    """In these of all updates of the run."""

    def plant(run: Any, stop: Callable[[], None]) -> None:
        whole, count = run.policy.update, 0

        def lost(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count in in_updates:
                raise RankLostError(Problem(f"lost in update {count}"))
            return whole(*arguments)

        run.policy.update = lost

    return plant


@pytest.mark.parametrize("in_updates", [{1}, {3}, {4}, {1, 2, 3}, {2, 5, 9}], ids=str)
def test_a_run_that_loses_ranks_goes_back_to_its_checkpoint_or_its_begin_as_if_it_had_not(
    in_updates: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most three times at one step; any number of times at others."""
    undisturbed = Recorder(monkeypatch)
    undisturbed.start(nothing)
    recorder = Recorder(monkeypatch)
    recorder.start(losing_ranks(in_updates))
    assert recorder.lines == undisturbed.lines
    assert (undisturbed.restarts[-1], recorder.restarts[-1]) == (0, len(in_updates))
    assert recorder.saved == undisturbed.saved


def test_a_run_whose_ranks_are_lost_at_one_step_again_and_again_ends_with_the_first_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RankLostError, match="lost in update 2"):
        Recorder(monkeypatch).start(losing_ranks({2, 4, 6, 8}))


@pytest.mark.parametrize(("skipped", "confirmed"), [(0.0, [0, 0, 0, 3, 4]), (1.0, [0, 0, 0, 4])])
def test_a_skipped_step_does_not_confirm_the_newest_checkpoint(
    skipped: float, confirmed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step is saved. Step 4 trains on, from weights that may be what makes its gradients infinite."""
    recorder = Recorder(monkeypatch)

    def moment(run: Any, stop: Callable[[], None]) -> None:
        update = run.policy.update

        def last_is_skipped(*given: Any) -> Any:
            updated = update(*given)
            updated.skipped_steps = skipped if given[-1] == STEPS else 0.0
            return updated

        run.policy.update = last_is_skipped

    recorder.start(moment)
    assert recorder.confirmed == confirmed


@pytest.mark.parametrize(("skipped_from", "saved"), [(STEPS, STEPS), (STEPS - 1, 3)])
def test_a_run_whose_last_updates_are_all_skipped_does_not_end_as_if_it_were_whole_nor_when_it_is_started_again(
    skipped_from: int, saved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One skipped update at the end of a run is one bad batch."""
    recorder = Recorder(monkeypatch)

    def moment(run: Any, stop: Callable[[], None]) -> None:
        update = run.policy.update

        def skip(*given: Any) -> Any:
            updated = update(*given)
            if given[-1] >= skipped_from:
                updated.skipped_steps, updated.grad_norm = 1.0, math.nan
            return updated

        run.policy.update = skip

    for _ in range(2):
        with nullcontext() if saved == STEPS else pytest.raises(RankError, match="not finite"):
            recorder.start(moment)
    assert recorder.saved[-1].step == saved


def test_a_run_told_to_stop_before_its_first_step_is_done_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    with pytest.raises(StopRequested):
        recorder.start(at_call("rollouts", "generate", 2))
    assert not recorder.saved


HOLD = "import sys, pathlib; from megagrpo.track.status import only_process_of\n" + (
    "with only_process_of(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
)


def test_a_second_process_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(RecipeError, match=str(first.pid)), only_process_of(tmp_path):
            pass
    finally:
        first.kill()
        first.communicate()
    with only_process_of(tmp_path):
        assert (tmp_path / "lock").read_text().strip().isdigit()


def test_a_file_system_without_locks_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*given: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RecipeError, match=r"not implemented(.|\n)*track\.directory"), only_process_of(tmp_path):
        pytest.fail("entered without a lock")


# --- early stopping ---------------------------------------------------------------------------------------------------


def stop_after(rule: schema.EarlyStoppingConfig, values: list[float]) -> tuple[int | None, TrainerState]:
    state = TrainerState(0, 0, {}, {})
    for i, value in enumerate(values):
        state = after_evaluation(state, rule, {"sums/mean@1": value})
        if rule_met(rule, state):
            return i, state
    return None, state


def test_a_run_stops_when_the_target_is_reached() -> None:
    rule = schema.EarlyStoppingConfig(metric="sums/mean@1", target=0.9)
    assert stop_after(rule, [0.5, 0.89, 0.9, 1.0])[0] == 2
    assert stop_after(rule, [0.5, float("nan")])[0] is None


def test_a_run_stops_after_patience_evaluations_without_a_new_best() -> None:
    rule = schema.EarlyStoppingConfig(metric="sums/mean@1", patience=2)
    assert stop_after(rule, [0.5, 0.4, 0.6, 0.6, float("nan"), 1.0])[0] == 4
    state = stop_after(rule, [0.5, 0.4, 0.6, 0.6, 0.7])[1]
    assert (state.best_evaluation, state.evaluations_without_best) == (0.7, 0)


def test_a_metric_that_does_not_exist_is_an_error_that_names_those_that_do() -> None:
    rule = schema.EarlyStoppingConfig(metric="sums/mean@8", target=1)
    with pytest.raises(RecipeError, match="sums/pass@1"):
        after_evaluation(TrainerState(0, 0, {}, {}), rule, {"sums/mean@1": 0.5, "sums/pass@1": 0.5})
