"""The responses of an evaluation with their scores, as JSON lines: one for each response, readable by itself."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import pydantic

from megagrpo.errors import DataError, Problem, first_line
from megagrpo.track.jsonl import finite
from megagrpo.types import Group

FILE_NAME = re.compile(r"step_(\d{6,})\.jsonl")


@dataclass(frozen=True, slots=True)
class Response:
    """One response, and all that its metrics are made of. Its fields are the keys of its line."""

    set: str
    """Name of the evaluation set."""
    prompt_id: str
    index: int
    """Among the responses to the prompt."""
    data_source: str
    prompt: str
    """Text that the chat template made, before it became tokens."""
    ground_truth: str
    response: str
    finish: str
    """stop, length (the token limit) or abort (the engine gave it up, or its agent was late or failed)."""
    tokens: int
    """Length of the response, its stop token included."""
    score: float | None
    """None: no reward, for the reason in `error` or in `masked`. 0 with an error: its agent was late or failed."""
    solved: bool
    answer: str | None
    """The answer that was read by the first reward function that reports one."""
    parts: Mapping[str, float | None]
    """The number that each reward function gave; None for one that is not finite."""
    notes: Mapping[str, str]
    error: str
    """The error of its reward or of its agent."""
    masked: str
    """The recipe's reason to leave it out, not a failure: a judge's budget was spent, for example."""


RESPONSE = pydantic.TypeAdapter(Response)


def responses_of(held_out_set: str, groups: Iterable[Group]) -> list[Response]:
    """Returns the responses of scored groups, in their order."""
    return [
        Response(
            set=held_out_set,
            prompt_id=group.prompt.id,
            index=sample.index,
            data_source=group.prompt.data_source,
            prompt=group.prompt.text,
            ground_truth=group.prompt.ground_truth,
            response=sample.text,
            finish=sample.finish,
            tokens=len(sample.tokens),
            score=None if score.value is None else float(score.value),
            solved=score.solved,
            answer=score.answer,
            parts={name: float(value) if math.isfinite(value) else None for name, value in score.parts.items()},
            notes=dict(score.notes),
            error=score.error,
            masked=score.masked,
        )
        for group in groups
        for sample, score in zip(group.samples, group.scores, strict=True)
    ]


def to_line(response: Response) -> bytes:
    return f"{json.dumps(asdict(response), ensure_ascii=False, allow_nan=False)}\n".encode(errors="replace")


def from_line(line: bytes) -> Response:
    """Reads a line of to_line. Raises ValueError for anything else, such as a line that was cut off."""
    try:
        values: Any = json.loads(line)
    except RecursionError as error:
        raise ValueError("values that are nested too deeply") from error
    if not isinstance(values, dict) or values.keys() != {field.name for field in fields(Response)}:
        raise ValueError("not a response of an evaluation")
    return RESPONSE.validate_python(values)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that appears whole at `path`, once all of it is on disk. Raises OSError; an older file is then as it
    was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_responses(path: Path, responses: Iterable[Response]) -> None:
    """Writes a line for each response, by `replacing`."""
    with replacing(path) as file:
        file.writelines(map(to_line, responses))


def write_json(path: Path, value: Any) -> None:
    """Writes readable JSON, by `replacing`; NaN and infinity become null."""
    with replacing(path) as file:
        file.write(json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def read_responses(path: Path) -> Iterator[Response]:
    """Yields the responses of all whole lines. Skips a last one that a killed process has cut off while writing."""
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            yield from_line(line)


class ResponseFiles:
    """A run's evaluations/step_000010.jsonl, ..., each written by a thread while the run continues. A file that cannot
    be written is reported, and the run continues."""

    def __init__(self, directory: Path, resumed_step: int, say: Callable[[str], None]) -> None:
        """Removes the files of steps after `resumed_step`: they are written again. say: called by the run's own
        thread."""
        self._directory, self._say = directory, say
        self._thread = ThreadPoolExecutor(1, "responses of evaluations")
        self._job: Future[None] | None = None
        for path in directory.glob("step_*.jsonl"):
            if (name := FILE_NAME.fullmatch(path.name)) and int(name[1]) > resumed_step - (resumed_step == 0):
                path.unlink()

    def begin(self, step: int, responses: Sequence[Response]) -> None:
        """Begins to write a step's file. Responses of other sets that are in it already stay."""
        self.wait()
        self._job = self._thread.submit(self._write, self._directory / f"step_{step:06d}.jsonl", responses)

    def wait(self) -> None:
        """Waits until the file that was begun is on disk."""
        job, self._job = self._job, None
        try:
            if job is not None:
                job.result()
        except (OSError, ValueError) as error:
            self._say(f"warning: responses of an evaluation could not be written: {error}")

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()

    def _write(self, path: Path, responses: Sequence[Response]) -> None:
        sets = {response.set for response in responses}
        before = read_responses(path) if path.exists() else ()
        write_responses(path, [*(response for response in before if response.set not in sets), *responses])


class ResponseLog:
    """A file of responses that grows as they arrive, and the responses in it. A line that was cut off when an earlier
    process was killed is removed."""

    def __init__(self, path: Path) -> None:
        """Reads the responses of earlier processes. Raises DataError, naming the line, if a line is not a response."""
        self._file = path.open("a+b")
        self._file.seek(0)
        self.responses: list[Response] = []
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                self.responses.append(from_line(line))
            except ValueError as error:
                self._file.close()
                fix = f"remove {path.parent}: it is evaluated anew"
                raise DataError(Problem(f"{path}, line {number}", first_line(error), "a response", fix)) from None
            whole += len(line)
        self._file.truncate(whole)

    def append(self, responses: Sequence[Response]) -> None:
        """Appends responses: they are in the file when it returns."""
        self._file.writelines(map(to_line, responses))
        self._file.flush()
        self.responses += responses

    def close(self) -> None:
        self._file.close()
