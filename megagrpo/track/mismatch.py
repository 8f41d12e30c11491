"""mismatch.jsonl: per step, how far the trainer's logprobs of the sampled tokens were from the engines', and where."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megagrpo.track.jsonl import StepLines, finite
from megagrpo.track.sink import RunStart

MISMATCH_FILE = "mismatch.jsonl"


@dataclass(frozen=True)
class WorstToken:
    """One token that the trainer and an engine saw differently. Logprobs are in nats."""

    prompt_id: str
    sample: int  # index among the samples of the prompt
    position: int  # in the response, from 0
    token: int
    before: str  # the text that it follows
    text: str
    after: str
    train_logprob: float
    rollout_logprob: float
    weight_version: int  # that sampled it

    @property
    def difference(self) -> float:
        return abs(self.train_logprob - self.rollout_logprob)


@dataclass(frozen=True)
class MismatchRecord:
    """One line of mismatch.jsonl. The figures are those of algorithm.mismatch.Mismatch."""

    step: int
    tokens: int
    mean: float
    p99: float
    max: float
    k1: float
    k3: float
    ratio_mean: float
    effective_share: float
    worst: tuple[WorstToken, ...]  # largest difference first


class MismatchTraces:
    """Writes the file. A number that is not finite is null."""

    def __init__(self, run: RunStart) -> None:
        self._lines = StepLines(run.directory / MISMATCH_FILE, run.resumed_step)

    def write(self, record: MismatchRecord) -> None:
        self._lines.append(_finite_values(asdict(record)))

    def close(self) -> None:
        self._lines.close()


def _finite_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_values(item) for item in value]
    return finite(value) if isinstance(value, float) else value
