"""Rollouts of a run as parquet, a row for each sample:

rollouts/step_000007.parquet         samples that step 7 could train on
rollouts/step_000007.eval.parquet    samples of the evaluations after it

Evaluations come after their step, and by themselves where a run starts or continues: they have files of their own, so
that each file is written once. One thread of the driver writes them behind the steps (track/rollout_writer.py).
docs/rollouts.md describes the columns.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megagrpo.types import AgentRun

ROLLOUTS = "rollouts"
TRAIN = "train"
"""Name of the set that is trained on. Evaluation sets have other names (recipe/schema/eval.py)."""
NAMES_MAX = 64
NAME = re.compile(r"step_(\d{6,})(\.eval)?\.parquet")

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("set", pa.string()),  # "train", or the name of the evaluation set
        ("data_source", pa.string()),
        ("ability", pa.string()),
        ("prompt_id", pa.string()),
        ("sample", pa.int32()),  # index among the samples of the prompt
        ("prompt", pa.string()),  # the messages as the chat template renders them
        ("messages", pa.string()),  # JSON: the conversation before the response; empty where a row is text
        ("response", pa.string()),  # text; an agent's last answer
        ("ground_truth", pa.string()),
        ("score", pa.float64()),  # null: masked
        ("parts", pa.map_(pa.string(), pa.float64())),  # score of each reward function, and its metrics
        ("notes", pa.map_(pa.string(), pa.string())),  # of functions, such as the answer that a verifier extracted
        ("answer", pa.string()),  # the answer that the first function with one has read; null: none
        ("error", pa.string()),  # why a reward failed
        ("masked", pa.string()),  # why the sample is left out
        ("solved", pa.bool_()),
        ("advantage", pa.float64()),  # mean over the tokens; null: not trained on
        ("finish", pa.string()),  # stop, length, abort or given
        ("prompt_tokens", pa.int32()),
        ("tokens", pa.int32()),  # tokens that the policy sampled
        ("age", pa.int32()),  # greatest staleness of a token, in versions
        ("teacher", pa.string()),  # its name; null: none
        ("agent", pa.string()),  # JSON: the trace of an agent's rollout (`trace`); null: no agent
        # A value for each sampled token; null but for the first track.rollouts.token_samples_per_step samples.
        ("token_ids", pa.list_(pa.int32())),
        ("token_texts", pa.list_(pa.string())),  # their concatenation is the response with its special tokens
        ("token_versions", pa.list_(pa.int32())),
        ("rollout_logprobs", pa.list_(pa.float32())),  # by the engine, in nats; NaN in given responses
        ("train_logprobs", pa.list_(pa.float32())),  # by the trainer; null where the step did not compute them
        ("entropies", pa.list_(pa.float32())),  # of the policy, in nats; null where the step did not compute them
        ("token_advantages", pa.list_(pa.float32())),
        ("teacher_logprobs", pa.list_(pa.float32())),  # null where the teacher has said none of the sampled token
        ("teacher_divergences", pa.list_(pa.float32())),  # null without a divergence in the loss
    ]
)
TRAINED = ("train_logprobs", "entropies", "token_advantages")
TAUGHT = ("teacher_logprobs", "teacher_divergences")
"""Columns with values of the tokens that are trained on, TAUGHT of those in rows with a teacher. Other columns have
values of all tokens."""


def encodable(value: Any) -> Any:
    """Replaces halves of characters, which no file can hold, by `?`: in a text, or in lists and tuples of texts."""
    if isinstance(value, list | tuple):
        return type(value)(map(encodable, value))
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def rollout_file(directory: Path, step: int, *, evaluation: bool = False) -> Path:
    """Returns the file of a step of the run in `directory`: of its training samples, or of its evaluations."""
    return directory / ROLLOUTS / f"step_{step:06d}{'.eval' if evaluation else ''}.parquet"


def rollout_files(directory: Path) -> list[tuple[int, Path]]:
    """Returns step and path of all files of the run in `directory`: by step, evaluations last."""
    names = [(NAME.fullmatch(path.name), path) for path in (directory / ROLLOUTS).glob("step_*.parquet")]
    files = sorted((int(name[1]), bool(name[2]), path) for name, path in names if name)
    return [(step, path) for step, _, path in files]


def rollout_steps(directory: Path) -> list[int]:
    """Returns the steps with rollouts of the run in `directory`, in ascending order."""
    return sorted({step for step, _ in rollout_files(directory)})


def steps_between(directory: Path, after: int, last: int) -> list[int]:
    """Returns the steps after `after` until `last` that have samples to train on. Looks few steps up by name: a run may
    have a hundred thousand files, and each step calls this."""
    steps = range(after + 1, last + 1)
    if len(steps) > NAMES_MAX:
        with_samples = {step for step, path in rollout_files(directory) if path == rollout_file(directory, step)}
        return [step for step in steps if step in with_samples]
    return [step for step in steps if rollout_file(directory, step).exists()]


def read_rollouts(
    directory: Path, steps: Collection[int] | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """Reads the rows of these steps (by default all), in the order of the steps; a step's training samples come first.

    columns: names of SCHEMA, by default all; those of tokens are most of the bytes. They are null where a file lacks
    them. Files that are not whole, or that vanish because the run goes back, are left out. Without a file the table
    has no rows.
    """
    names = SCHEMA.names if columns is None else list(columns)
    tables = [SCHEMA.empty_table().select(names)]
    for step, path in rollout_files(directory):
        if steps is None or step in steps:
            with suppress(OSError, pa.ArrowException, KeyError):
                tables.append(read_file(path, names))
    return pa.concat_tables(tables)


def read_file(path: Path, names: Sequence[str] = SCHEMA.names) -> pa.Table:
    """Reads these columns, null where a file lacks one. Raises OSError and pa.ArrowException."""
    with pq.ParquetFile(path) as file:
        table = file.read([name for name in names if name in file.schema_arrow.names])
    fields = [SCHEMA.field(name) for name in names]
    arrays = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in fields
    ]
    return pa.table(arrays, schema=pa.schema(fields))


def first_rows(path: Path, count: int, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Reads these columns of the first samples of a file."""
    with pq.ParquetFile(path) as file:
        batch = next(file.iter_batches(count, columns=list(columns)), None)
    return [] if batch is None else batch.to_pylist()


def remove_later(directory: Path, step: int) -> None:
    """Removes the files that a run resumed after `step` writes again; 0: all. Keeps the evaluations of `step`."""
    for of, path in rollout_files(directory):
        if of > step or step == 0:
            path.unlink(missing_ok=True)
    for part in (directory / ROLLOUTS).glob("*.part"):
        part.unlink(missing_ok=True)


# --- the trace of an agent's rollout: bounded in size -----------------------------------------------------------------

EVENTS_MAX = 200
TEXT_CHARACTERS = 8_000
TRACE_CHARACTERS = 200_000
NAME_CHARACTERS = 64
DEPTH_MAX = 24
LEFT_OUT = "left_out"
"""Kind of an event that stands for many."""
LAST = ("given", "arguments", "result")
"""Fields that may be large: they take the room that the rest of an event has left."""


def trace(run: AgentRun) -> dict[str, Any]:
    """Returns JSON values: error, counts, sequences, rewards and events (their kinds are in agents/turns.py), each
    turn's event with its reward.

    Keeps the first and the last of many events. All texts together have about TRACE_CHARACTERS characters at most: each
    event may take its share of the characters that earlier events have left.
    """
    turns = {turn.number: {"reward": turn.reward, "sequence": turn.branch} for turn in run.turns}
    kept: list[Any] = list(run.events)
    if len(kept) > EVENTS_MAX:
        half = EVENTS_MAX // 2
        kept[half:-half] = [{"kind": LEFT_OUT, "at": kept[half]["at"], "events": len(kept) - 2 * half}]
    left, events = TRACE_CHARACTERS, []
    for index, event in enumerate(kept):
        room = _Room(left // (len(kept) - index))
        left -= room.left
        made = {name[:NAME_CHARACTERS]: room.fitted(event[name]) for name in sorted(event, key=LAST.__contains__)}
        left += max(0, room.left)
        events.append(made | turns.get(event.get("number"), {}) if event["kind"] == "turn" else made)
    return {
        "error": run.error[:TEXT_CHARACTERS],
        "reward": None if run.reward is None else {name: float(value) for name, value in run.reward.items()},
        "counts": {name: float(value) for name, value in run.counts.items()},
        "sequences": [{"tokens": len(b.tokens), "trained": int(b.trained.sum())} for b in run.branches],
        "events": events,
    }


def shortened(text: str, characters: int) -> str:
    """Returns `text`; of a longer text its beginning and its end."""
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[: characters - half]} [... {len(text) - characters} characters ...] {text[len(text) - half :]}"


@dataclass
class _Room:
    """The characters left for an event. Any program may have reported the event, of any size and depth."""

    left: int

    def fitted(self, value: Any, depth: int = 0) -> Any:
        self.left -= 10  # about its name and marks
        if isinstance(value, dict | list | tuple) and (depth > DEPTH_MAX or self.left < 0):
            return "..."
        if isinstance(value, dict):
            return {str(name)[:NAME_CHARACTERS]: self.fitted(item, depth + 1) for name, item in self._some(value)}
        if isinstance(value, list | tuple):
            return [self.fitted(item, depth + 1) for _, item in self._some(dict(enumerate(value)))]
        if isinstance(value, str):
            value = shortened(value, max(0, min(TEXT_CHARACTERS, self.left)))
            self.left -= len(value)
        return value

    def _some(self, value: dict[Any, Any]) -> list[tuple[Any, Any]]:
        """Returns as many items as there may be room for."""
        return list(value.items())[: max(0, self.left // 10) + 1]
