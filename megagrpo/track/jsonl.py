"""JSON lines in the run's directory: metrics.jsonl (a line per step), rollouts.jsonl (samples) and mismatch.jsonl."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megagrpo.track.sink import RunStart, Status
from megagrpo.types import Group

MISMATCH_FILE = "mismatch.jsonl"
MISMATCH_FIGURES = ("mean", "p99", "max", "k1", "k3", "ratio_mean", "effective_share")


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
    weight_version: int  # of the weights that sampled it

    @property
    def difference(self) -> float:
        return abs(self.train_logprob - self.rollout_logprob)


@dataclass(frozen=True)
class MismatchRecord:
    """One line of mismatch.jsonl. MISMATCH_FIGURES are those of algorithm.mismatch.Mismatch."""

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


class StepLines:
    """A file of JSON objects that each have a `step`, flushed line by line. NaN and infinity become null.

    A run that starts (resumed_step 0) empties it. A run that continues after `resumed_step` removes the lines of later
    steps, which it will write again, and a last line that was cut off; if `unlogged`, also that step's line.
    """

    def __init__(self, path: Path, resumed_step: int, unlogged: bool = False) -> None:
        kept = _lines_up_to(path, resumed_step - unlogged) if resumed_step else []
        part = path.with_name(f"{path.name}.part")
        part.write_text("".join(kept), encoding="utf-8")
        part.replace(path)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(_finite(line), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class JsonlMetrics:
    """metrics.jsonl: {"step": 1, "time": seconds since 1970, metric: value, …}."""

    def start(self, run: RunStart) -> None:
        self._lines = StepLines(run.directory / "metrics.jsonl", run.resumed_step, run.unlogged)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._lines.append({"step": step, "time": round(time.time(), 3), **{k: float(v) for k, v in metrics.items()}})

    def finish(self, status: Status) -> None:
        self._lines.close()


def rollout_line(step: int, group: Group) -> dict[str, Any]:
    """A line of rollouts.jsonl."""
    scores = group.scores or (None,) * len(group.samples)
    return {
        "step": step,
        "prompt_id": group.prompt.id,
        "data_source": group.prompt.data_source,
        "ability": group.prompt.ability,
        "ground_truth": group.prompt.ground_truth,
        "prompt_tokens": list(map(int, group.prompt.tokens)),
        "samples": [
            {
                "text": sample.text,
                "tokens": len(sample.tokens),
                "finish": sample.finish,
                "logprob": float(sample.logprobs.sum()),
                "score": None if score is None or score.value is None else float(score.value),
                "parts": {} if score is None else {name: float(value) for name, value in score.parts.items()},
                "error": "" if score is None else score.error,
                "masked": "" if score is None else score.masked,
                "solved": score is not None and score.solved,
            }
            for sample, score in zip(group.samples, scores, strict=True)
        ],
    }


def _lines_up_to(path: Path, step: int) -> list[str]:
    if not path.exists():
        return []
    kept = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                at = json.loads(line)["step"]
            except (json.JSONDecodeError, KeyError, TypeError):
                continue  # cut off by a kill
            if at <= step:
                kept.append(line if line.endswith("\n") else line + "\n")
    return kept


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
