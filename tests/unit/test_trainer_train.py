"""Told to stop at any moment, a run saves the steps that are done, and all of its lines are as if it had not been."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.errors import MismatchError, Problem
from megagrpo.trainer import train
from megagrpo.trainer.stopping import StopRequested
from megagrpo.types import Group, Prompt
from tests.step_fakes import make_run

STEPS = 4
HELD_OUT = [Prompt("p0", (1, 2), "sums", "2")]
OVERRIDES = (f"train.total_steps={STEPS}", "eval.every_steps=2", "checkpoint.every_steps=3", "train.offload=[]")


class Recorder:
    """Of a run over several starts: the lines it logged and the states it saved, each under its step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.saved: list[TrainerState] = []
        self.run_ids: dict[str, str] = {}
        monkeypatch.setattr(train, "save", lambda policy, store, state: self.saved.append(state))
        monkeypatch.setattr(train, "report_mismatch", lambda *given: None)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.lines.append((step, {name: value for name, value in metrics.items() if "second" not in name}))

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def start(self, moment: Callable[[Any, Callable[[], None]], None]) -> None:
        """Starts or continues the run; `moment` plants the signal."""
        run = make_run(*OVERRIDES, scores=lambda prompt: [prompt % 3, 1, 0, 0.5])
        stopping = run.stopping

        def told_to_stop() -> None:
            stopping.signal = signal.SIGTERM
            stopping.check()

        run.rollouts.generate_for_evaluation = lambda prompts: run.rollouts.generate(prompts, 0)
        run.scorer.score_unshaped = run.scorer.score
        moment(run, told_to_stop)
        if self.saved:
            state = TrainerState.from_json(self.saved[-1].to_json())
            run.cursor.restore(state.data_cursor)
        progress = train._progress(run.recipe, run.cursor, state if self.saved else None)
        train._run_steps(run, progress, HELD_OUT, None, self, lambda tokens: "")  # type: ignore[arg-type]


def nothing(run: Any, stop: Callable[[], None]) -> None:
    pass


def at_call(part: str, method: str, count: int) -> Callable[[Any, Callable[[], None]], None]:
    """The signal comes in the `count`-th call of run.PART.METHOD."""

    def plant(run: Any, stop: Callable[[], None]) -> None:
        whole, left = getattr(getattr(run, part), method), [None] * count

        def told(*arguments: Any) -> Any:
            left.pop() if left else None
            if not left:
                stop()
            return whole(*arguments)

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


def test_a_run_told_to_stop_still_ends_with_the_mismatch_that_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    monkeypatch.setattr(train, "report_mismatch", lambda recipe, step, *given: Problem("far") if step == 2 else None)
    with pytest.raises(MismatchError):
        recorder.start(at_call("rollouts", "generate_for_evaluation", 2))
    assert recorder.saved[-1].step == 2


def test_a_run_told_to_stop_before_its_first_step_is_done_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    with pytest.raises(StopRequested):
        recorder.start(at_call("rollouts", "generate", 2))
    assert not recorder.saved
