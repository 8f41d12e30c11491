"""A run with fake engines, rewards and training ranks; what the driver does with them is real.

Prompts are p0, p1, ...; a test says what the samples of each score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megagrpo.algorithm.ragged import Ragged, ragged_zeros
from megagrpo.batching.work import TOKENS
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.cluster.stopping import Stopping
from megagrpo.data.cursor import Cursor
from megagrpo.trainer.run import PhaseClock, Run
from megagrpo.trainer.run_loop import Loop
from megagrpo.trainer.schedule import Live
from megagrpo.trainer.setup import first_state
from megagrpo.trainer.train import GrpoTraining
from megagrpo.types import Group, Prompt, Sample, Score
from tests.tiny_run import recipe_with

Scores = Callable[[int], Sequence[float | None]]


def number(prompt: Prompt) -> int:
    return int(prompt.id.partition("+")[0][1:])


class FakeRollouts:
    """Responses of 2, 3, 4, ... tokens."""

    def __init__(self, per_prompt: int) -> None:
        self._per_prompt, self.serving = per_prompt, 1
        self.asked: list[str] = []

    def generate(self, prompts: Sequence[Prompt], step: int) -> list[Group]:
        self.asked += [prompt.id for prompt in prompts]
        return [Group(prompt, tuple(_sample(prompt, i) for i in range(self._per_prompt))) for prompt in prompts]

    def generate_for_evaluation(self, prompts: Mapping[str, Sequence[Prompt]]) -> dict[str, list[Group]]:
        return {name: self.generate(of_set, 0) for name, of_set in prompts.items()}

    def idle(self) -> tuple[float, float]:
        return 1.0, 4.0

    release_memory = give_up = drain = lambda self: None


def _sample(prompt: Prompt, index: int) -> Sample:
    tokens = np.arange(index + 2, dtype=np.int32)
    logprobs = np.full(len(tokens), -1.0, np.float32)
    return Sample(prompt.id, index, tokens, logprobs, np.zeros_like(tokens), "stop", "")


@dataclass
class FakeScorer:
    scores: Scores
    greedy: Callable[[int], float | None]
    counted: Sequence[tuple[float, ...]] | None

    def score(self, groups: Sequence[Group]) -> list[Group]:
        of_baseline = [Score(self.greedy(number(group.prompt))) if group.baseline else None for group in groups]
        scored = zip(groups, map(tuple, map(self._of, groups)), of_baseline, strict=True)
        return [replace(group, scores=scores, baseline_score=score) for group, scores, score in scored]

    score_unshaped = score

    def take_metrics(self) -> dict[str, float]:
        return {}

    def _of(self, group: Group) -> Iterator[Score]:
        if group.given:
            yield Score(None, masked="given")
            return
        values = list(self.scores(number(group.prompt)))
        for value, each in zip(values, self.counted or [()] * len(values), strict=True):
            yield Score(value, counted=each, solved=value is not None and value >= 1)


class FakeTeachers:
    """Nobody is asked: samples have their teachers' logprobs from the start, or none."""

    def beside(self, groups: Sequence[Group], score: Callable[[Sequence[Group]], list[Group]]) -> list[Group]:
        return score(groups)

    def take_metrics(self) -> dict[str, float]:
        return {}


@dataclass
class FakePolicy:
    """Notes what it is asked, in order."""

    kl: float = 0.1
    device_type: str = "cpu"
    memory_peak = staticmethod(lambda: None)
    step: int | None = None
    calls: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    advantages: Any = None
    returns: Ragged | None = None
    kl_coefficient: float | None = None
    critic_lr: float | None = None

    @contextmanager
    def released(self) -> Iterator[None]:
        yield

    needed = alone = released

    @contextmanager
    def updating(self, step: int) -> Iterator[None]:
        self.step = None
        yield
        self.step = step

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: self.calls.append(arguments[0] if name == "call" else name)

    def load_batch(self, batches: Sequence[Any]) -> None:
        self.calls.append("load_batch")
        self.rows = sorted(row for b in batches for minis in b.minibatches for micro in minis for row in micro.rows)

    def by_token(self, method: str, lengths: np.ndarray) -> Ragged:
        zeros = ragged_zeros(lengths)
        return zeros.with_values(zeros.values + self.kl) if method == "token_kl" else zeros

    def update(self, advantages: Any, lr: float, kl_coefficient: float, step: int) -> Any:
        self.calls.append("update")
        self.advantages, self.kl_coefficient = advantages, kl_coefficient
        return _Anything(kl=self.kl, correction=None, route_differences=None, own_routes=None)

    def token_figures(self, lengths: np.ndarray) -> tuple[Ragged, None]:
        return ragged_zeros(lengths, np.float32), None

    def update_critic(self, returns: Ragged, lr: float) -> Any:
        self.calls.append("update_critic")
        self.returns, self.critic_lr = returns, lr
        return _Anything()


class _Anything(SimpleNamespace):
    """Has every figure, all 0."""

    def __getattr__(self, name: str) -> Any:
        return _Anything() if name == "mismatch" else 0.0


class FakeWeights:
    received_bytes = 1024

    version = 0  # samples say that it made them, whatever was brought
    verified_versions = frozenset({0})
    changed: bool | None = None  # as the last sync was told
    check_replicas = give_up = lambda self: None

    def sync(self, version: int, *, changed: bool = True) -> None:
        self.changed = changed


def make_run(
    *overrides: str,
    scores: Scores,
    greedy: Callable[[int], float | None] = lambda prompt: 0.0,
    counted: Sequence[tuple[float, ...]] | None = None,
    prompts: int = 40,
    shuffle: bool = True,
) -> Any:
    """A Run of tests.tiny_run's recipe: 4 prompts of 4 samples in a step."""
    settings = recipe_with(*overrides)
    data = [Prompt(f"p{i}", (i + 1, i + 2), "sums", "2") for i in range(prompts)]
    return Run(
        recipe=settings,
        total_steps=10,
        cursor=Cursor(data, seed=0, shuffle=shuffle),
        rollouts=FakeRollouts(settings.rollout.samples_per_prompt + settings.algorithm.greedy_responses),  # type: ignore[arg-type]
        scorer=FakeScorer(scores, greedy, counted),  # type: ignore[arg-type]
        policy=FakePolicy(),  # type: ignore[arg-type]
        teachers=FakeTeachers(),  # type: ignore[arg-type]
        weights=FakeWeights(),  # type: ignore[arg-type]
        clock=PhaseClock(),
        work=TOKENS,
        stopping=Stopping(),
    )


class SameRanks(GrpoTraining):
    """Ranks that are lost and there again."""

    def with_new_ranks(self, saved: Any) -> Any:
        return self


def run_loop(run: Any, tracker: Any, save: Callable[[TrainerState], None], state: TrainerState | None = None) -> Any:
    """The real run loop over a fake run, continued from a checkpoint's state if given. Sets have one prompt each."""
    saved = [state.step if state else 0]

    def begin(ranks: Any, saved_state: TrainerState, pending: None) -> None:
        save(saved_state)
        saved.append(saved_state.step)

    if state:
        run.cursor.restore(state.data_cursor)
    held_out = {name: [Prompt("p0", (1, 2), "sums", "2")] for name in run.recipe.eval.sets}

    def newest() -> Any:
        return checkpoint_of(tracker.saved[-1]) if tracker.saved else None

    def best() -> float | None:
        kept = [(state.evaluation or {}).get(run.recipe.checkpoint.keep_best) for state in tracker.saved]
        return max((value for value in kept if value is not None), default=None)

    saving = SimpleNamespace(begin=begin, wait=lambda: saved[-1], confirm=tracker.confirm, finish=lambda: None)
    saving.newest_again, saving.best, saving.going_on_from_finite_weights = newest, best, lambda lr: nullcontext()
    setup: Any = SimpleNamespace(**vars(run), held_out=held_out, tracker=tracker, saving=saving)
    setup.last_step, setup.alerts, setup.pending = run.total_steps, None, None
    setup.tokenizer = SimpleNamespace(decode=lambda tokens: "")
    setup.state = first_state(run.recipe, run.cursor, checkpoint_of(state))
    files: Any = SimpleNamespace(begin=lambda *given: None)
    none: Any = None
    loop = Loop(setup, SameRanks(setup, run, Live(run), none, none, none, none, {}, files))
    loop.run()
    return loop.state


def checkpoint_of(state: TrainerState | None) -> Any:
    """With no file."""
    nowhere = Path("the newest")
    return SimpleNamespace(state=state, path=nowhere, rank_directory=nowhere / "rank") if state else None
