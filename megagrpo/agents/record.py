"""The record of a rollout that has ended: its branches, turns, messages and counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megagrpo.agents.turns import PathOfTurns, Rollout
from megagrpo.errors import brief
from megagrpo.types import AgentRun, Branch, FinishReason, Request, Sample, Turn

TurnRewards = Sequence[float] | Mapping[str, float] | None


class Record:
    """A rollout that takes no more turns.

    `turns`: all answers, trained or not, in the order in which they were sampled. `paths`: the turns of each branch.
    `limited`: a limit ended the agent's last request, so that it is truncated. `aborted`: why the engine gave up on a
    turn, or "".
    """

    def __init__(self, rollout: Rollout) -> None:
        self._rollout, self.turns, self.paths = rollout, rollout.turns, rollout.paths()
        self.limited, self.aborted = rollout.limited, rollout.aborted

    def sample(self, request: Request, finish: FinishReason, turn_rewards: TurnRewards = None) -> Sample:
        """Returns the rollout as the sample of a request. Turn rewards that fit no turn fail the rollout, as any other
        mistake of the agent: its finish is then "abort", and `agent.error` says why."""
        run = self.agent_run(turn_rewards)
        last = self._rollout.last_of_task()
        trained = [
            turn for path in self.paths for turn, trained in zip(path.turns, path.trained, strict=True) if trained
        ]
        return Sample(
            prompt_id=request.prompt_id,
            index=request.index,
            tokens=_joined((turn.sampled for turn in trained), np.int32),
            logprobs=_joined((turn.logprobs for turn in trained), np.float32),
            versions=_joined((turn.versions for turn in trained), np.int32),
            finish="abort" if run.error else finish,
            text=last.text if last else "",
            agent=run,
        )

    def agent_run(self, turn_rewards: TurnRewards = None) -> AgentRun:
        """Returns the AgentRun. `turn_rewards`: one per answer, in order; or by an answer's id as the agent got it."""
        rewards, error = self._rewards(turn_rewards)
        last = self._rollout.last_of_task()
        conversation = last.conversation() if last else []
        return AgentRun(
            branches=tuple(map(_branch, self.paths)),
            turns=tuple(
                Turn(turn.number, number, len(turn.sampled), rewards.get(turn.number))
                for number, path in enumerate(self.paths)
                for turn, trained in zip(path.turns, path.trained, strict=True)
                if trained
            ),
            messages=tuple(message for turn in conversation for message in (*turn.given, turn.message)),
            error=error,
            counts=self._counts(),
            events=tuple(self._rollout.events),
        )

    def _rewards(self, given: Any) -> tuple[dict[int, float], str]:
        """Returns rewards by the number of their turn, and an error if they cannot be read."""
        if given is None:
            return {}, ""
        turns = self.turns
        if isinstance(given, Mapping):
            numbers = {turn.answer: turn.number for turn in reversed(turns)}  # of several answers, the first
            found = [(numbers.get(str(name)[-16:]), reward) for name, reward in given.items()]
        elif isinstance(given, Sequence) and not isinstance(given, str) and len(given) <= len(turns):
            found = list(enumerate(given))
        else:
            return {}, f"turn_rewards: {brief(given)} is not one number for each of {len(turns)} answers"
        rewards = {}
        for number, reward in found:
            if number is None or isinstance(reward, bool) or not isinstance(reward, int | float | None):
                return {}, f"turn_rewards: {brief(given)} are not numbers of the {len(turns)} answers"
            if reward is not None and not math.isfinite(reward):
                return {}, f"turn_rewards: {reward} is not finite"
            if reward is not None:
                rewards[number] = float(reward)
        return rewards, ""

    def _counts(self) -> dict[str, float]:
        unused = self._rollout.unused()
        tokens = sum(len(turn.sampled) for turn in unused)
        counts = self._rollout.counts + Counter(
            {"turns": len(self.turns), "turns_unused": len(unused), "tokens_unused": tokens}
        )
        return {name: float(count) for name, count in sorted(counts.items())}


def _branch(path: PathOfTurns) -> Branch:
    marks = [
        np.full(len(part), trained and part is turn.sampled)
        for turn, trained in zip(path.turns, path.trained, strict=True)
        for part in (turn.added, turn.sampled)
    ]
    return Branch(path.turns[-1].tokens(), np.concatenate(marks))


def _joined(parts: Iterable[np.ndarray], kind: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *parts])
