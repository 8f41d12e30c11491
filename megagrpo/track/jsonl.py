"""JSON lines in the run's directory: metrics.jsonl, one line per step, and rollouts.jsonl, whole samples."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megagrpo.track.sink import RunStart, Status
from megagrpo.types import Group


class StepLines:
    """A file of JSON objects that each have a `step`, flushed line by line.

    Opened after step `resumed_step`, it loses the lines of later steps, which will be made again, and a last line that
    was cut off; also that step's, if it is `unlogged`. Opened for a run that starts (0), it is empty.
    """

    def __init__(self, path: Path, resumed_step: int, unlogged: bool = False) -> None:
        kept = _lines_up_to(path, resumed_step - unlogged) if resumed_step else []
        part = path.with_name(f"{path.name}.part")
        part.write_text("".join(kept), encoding="utf-8")
        part.replace(path)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class JsonlMetrics:
    """metrics.jsonl: {"step": 1, "time": seconds since 1970, metric: value, …}."""

    def start(self, run: RunStart) -> None:
        self._lines = StepLines(run.directory / "metrics.jsonl", run.resumed_step, run.unlogged)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._lines.append({"step": step, "time": round(time.time(), 3), **{k: finite(v) for k, v in metrics.items()}})

    def finish(self, status: Status) -> None:
        self._lines.close()


class RolloutTraces:
    """rollouts.jsonl: the first few groups of each step, one per line."""

    def __init__(self, run: RunStart) -> None:
        self._groups_per_step = run.recipe.track.rollouts_per_step
        self._lines = StepLines(run.directory / "rollouts.jsonl", run.resumed_step)

    def write(self, step: int, groups: Sequence[Group]) -> None:
        for group in groups[: self._groups_per_step]:
            self._lines.append({"step": step, **_trace(group)})

    def close(self) -> None:
        self._lines.close()


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity: None stands for them."""
    return float(value) if math.isfinite(value) else None


def _trace(group: Group) -> dict[str, Any]:
    scores = group.scores or (None,) * len(group.samples)
    return {
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
                "logprob": finite(float(sample.logprobs.sum())),
                "score": None if score is None or score.value is None else finite(score.value),
                "parts": {} if score is None else {name: finite(value) for name, value in score.parts.items()},
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
