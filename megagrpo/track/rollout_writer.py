"""Writes the files of rollouts beside the run, in a thread: no step waits for them, and no failure ends the run."""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megagrpo.algorithm.advantage_method import Advantages
from megagrpo.algorithm.ragged import Ragged
from megagrpo.errors import first_line
from megagrpo.tokenizer import response_texts
from megagrpo.track.rollout_files import SCHEMA, TAUGHT, TRAIN, TRAINED, encodable, read_file, rollout_file, trace
from megagrpo.types import Group, Sample, Score

WITH_TOKENS_MAX = 2
"""Steps that may wait with the figures of their tokens, which are most of the queue's memory."""
WAITING_MAX = 4
FINISH_TIMEOUT_SECONDS = 60.0
FIGURES = [f"{name}.list.element" for name in ("rollout_logprobs", "train_logprobs", "entropies", *TAUGHT)]
"""Parquet's names of columns whose values are all different: bytes of equal weight compress better together."""
REPEATED = [
    "set", "data_source", "ability", "prompt_id", "prompt", "messages", "ground_truth", "finish", "masked",
    "teacher", "parts.key_value.key", "notes.key_value.key", "token_ids.list.element", "token_texts.list.element",
    "token_versions.list.element", "token_advantages.list.element",
]  # fmt: skip
"""Columns with repeated values: a file holds each value once."""
FAULTS = (OSError, MemoryError, RuntimeError, pa.ArrowException, ValueError, TypeError, OverflowError, LookupError)
"""Errors of disks, of texts and numbers that users' functions have made, and of a tokenizer: unknown tokens, or use by
another thread."""
PART_TOKENS = 1 << 20
"""Tokens of a part of a table: tens of MB."""
INCOMPLETE = "\ufffd"
"""The replacement for bytes that are no character."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The byte of each letter of a byte-level vocabulary (GPT-2's, and those after it)."""


@dataclass(frozen=True)
class Learned:
    """The results of a step's training for its samples. Rows are the samples of its groups, group by group."""

    rows: np.ndarray  # bool [rows], rows trained on
    advantages: Advantages
    logprobs: Ragged | None = None  # float32, by the trainer before the update, of the first rows
    entropies: Ragged | None = None  # float32, as the update first saw it, of the first rows
    teachers: Sequence[str | None] = ()  # by row; (): the recipe has no teachers
    teacher_logprobs: Ragged | None = None  # float32, NaN where not known
    divergences: Ragged | None = None  # float32, from the teacher, NaN for tokens without one


@dataclass(frozen=True)
class StepRollouts:
    """Samples to keep: of a step's training (with `learned`), or of the evaluations after it."""

    step: int
    sets: Mapping[str, Sequence[Group]]
    version: int  # of the policy that the samples are for; theirs may be older
    token_samples: int | None  # of each set, samples whose tokens' figures are kept, as for `first_groups`
    learned: Learned | None = None

    @property
    def evaluation(self) -> bool:
        return TRAIN not in self.sets


def first_groups(groups: Sequence[Group], samples: int | None) -> Sequence[Group]:
    """Returns the first groups that have at most so many samples together, at least one; None: all; 0: none."""
    if samples is None:
        return groups
    ends = np.cumsum([len(group.samples) for group in groups])
    return groups[: max(min(samples, 1), int((ends <= samples).sum()))]


class RolloutWriter:
    """The writing thread and its queue. The run's own thread calls the methods. `say` gets a line at the first loss."""

    def __init__(self, directory: Path, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]) -> None:
        """Starts the thread. directory: of the run."""
        self._directory, self._say = directory.absolute(), say
        self._waiting = deque[StepRollouts]()
        self._changed = threading.Condition()
        self._closed = self._given_up = self._said = False
        self._left_out = set[tuple[int, bool]]()
        # A daemon, so that a disk that never answers cannot keep a finished run alive.
        texts = TokenTexts(tokenizer)
        self._thread = threading.Thread(target=self._work, args=(texts,), name="rollouts", daemon=True)
        self._thread.start()

    @property
    def left_out(self) -> int:
        """Returns the number of steps and evaluations whose samples, or their tokens, are left out."""
        return len(self._left_out)

    def put(self, rollouts: StepRollouts) -> None:
        """Queues samples to be written. Leaves some out if writing is slower than the run."""
        with self._changed:
            self._waiting.append(rollouts)
            with_tokens = [at for at, step in enumerate(self._waiting) if step.token_samples != 0]
            late = []
            if len(with_tokens) > WITH_TOKENS_MAX:
                at = with_tokens[0]
                late.append(self._waiting[at])
                self._waiting[at] = replace(self._waiting[at], token_samples=0)
            if len(self._waiting) > WAITING_MAX:
                late.append(self._waiting.popleft())
            self._changed.notify()
        for step in late:
            self._leave_out(step, "writing is slower than the run")

    def close(self) -> None:
        """Waits until everything is written, FINISH_TIMEOUT_SECONDS at most."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(FINISH_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            with self._changed:
                self._given_up = True
                late = [*self._waiting]
                self._waiting.clear()
            self._say(f"rollouts/: not written within {FINISH_TIMEOUT_SECONDS:.0f} s: {len(late) + 1} steps left out")
        elif self._left_out:
            self._say(f"rollouts/: {self.left_out} steps are left out, or their tokens")

    def _leave_out(self, rollouts: StepRollouts, why: str) -> None:
        self._left_out.add((rollouts.step, rollouts.evaluation))
        if not self._said:
            self._said = True
            self._say(f"rollouts/: {why}; samples are left out (rollouts/left_out counts the steps), the run continues")

    def _work(self, texts: TokenTexts) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                rollouts = self._waiting.popleft()
            try:
                self._write(rollouts, texts)
            except FAULTS as error:
                self._leave_out(rollouts, first_line(error))

    def _write(self, rollouts: StepRollouts, texts: TokenTexts) -> None:
        path = rollout_file(self._directory, rollouts.step, evaluation=rollouts.evaluation)
        path.parent.mkdir(exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        try:
            with pq.ParquetWriter(
                part, SCHEMA, compression="zstd", use_dictionary=REPEATED, use_byte_stream_split=FIGURES
            ) as file:
                if rollouts.evaluation and path.exists():  # other sets, evaluated before the run was continued
                    before = read_file(path)
                    others = [name.as_py() not in rollouts.sets for name in before["set"]]
                    file.write_table(before.filter(pa.array(others, pa.bool_())))
                for table in tables(rollouts, texts):
                    file.write_table(table)
            if not self._given_up:
                part.replace(path)
        finally:
            part.unlink(missing_ok=True)


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    set: str
    number: int  # among the samples of its set
    group: Group
    sample: Sample
    score: Score
    figured: bool


def tables(rollouts: StepRollouts, texts: TokenTexts) -> Iterator[pa.Table]:
    """Yields the rows, in parts of about PART_TOKENS tokens. Raises the errors of pyarrow and the tokenizer."""
    part: list[_Row] = []
    tokens = 0
    for name, groups in rollouts.sets.items():
        number, figured = 0, len(first_groups(groups, rollouts.token_samples))
        for place, group in enumerate(groups):
            scores = group.scores or (Score(None),) * len(group.samples)
            for sample, score in zip(group.samples, scores, strict=True):
                if part and tokens + len(sample.tokens) > PART_TOKENS:
                    yield _table(rollouts, part, texts)
                    part, tokens = [], 0
                part.append(_Row(name, number, group, sample, score, place < figured))
                number, tokens = number + 1, tokens + len(sample.tokens)
    yield _table(rollouts, part, texts)


def _table(rollouts: StepRollouts, rows: Sequence[_Row], texts: TokenTexts) -> pa.Table:
    values = [{name: encodable(value) for name, value in _values(rollouts, row, texts).items()} for row in rows]
    table = pa.Table.from_pylist(values, SCHEMA)
    if any(row.figured for row in rows):
        for name, lists in _token_columns(rollouts, rows, texts).items():
            table = table.set_column(SCHEMA.get_field_index(name), SCHEMA.field(name), lists)
    return table


def _values(rollouts: StepRollouts, row: _Row, texts: TokenTexts) -> dict[str, Any]:
    """Returns the values of a row that are no lists of tokens."""
    prompt, sample, score, learned = row.group.prompt, row.sample, row.score, rollouts.learned
    return {
        "step": rollouts.step,
        "set": row.set,
        "data_source": prompt.data_source,
        "ability": prompt.ability,
        "prompt_id": prompt.id,
        "sample": sample.index,
        "prompt": prompt.text,
        "messages": _json(list(prompt.messages)) if prompt.messages else "",
        "response": texts.whole(sample) if sample.given else sample.text,
        "ground_truth": prompt.ground_truth,
        "score": None if score.value is None else float(score.value),
        "parts": [(name, float(value)) for name, value in score.parts.items()],
        "notes": [(name, str(text)) for name, text in score.notes.items()],
        "answer": score.answer,
        "error": score.error,
        "masked": score.masked,
        "solved": score.solved,
        "advantage": float(learned.advantages.of_rows[row.number]) if learned and learned.rows[row.number] else None,
        "finish": sample.finish,
        "teacher": learned.teachers[row.number] if learned and learned.teachers else None,
        "prompt_tokens": len(prompt.tokens),
        "tokens": len(sample.tokens),
        "age": int(rollouts.version - sample.versions.min()) if len(sample.versions) and not sample.given else 0,
        "agent": None if sample.agent is None else _json(trace(sample.agent)),
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _token_columns(rollouts: StepRollouts, rows: Sequence[_Row], texts: TokenTexts) -> dict[str, pa.ListArray]:
    """Returns columns with a list for each row; null for rows without figures."""
    shown, learned = [row for row in rows if row.figured], rollouts.learned
    figured = trained = taught = np.array([row.figured for row in rows])
    offsets = np.cumsum([0, *(len(row.sample.tokens) if row.figured else 0 for row in rows)])
    parts = {
        "token_ids": [row.sample.tokens for row in shown],
        "token_versions": [row.sample.versions for row in shown],
        "rollout_logprobs": [row.sample.logprobs for row in shown],
    }
    if learned is not None:
        trained = figured & learned.rows[[row.number for row in rows]]
        taught = trained & [row.number < len(learned.teachers) and bool(learned.teachers[row.number]) for row in rows]
        of_rows = learned.advantages.of_rows
        parts["token_advantages"] = [np.full(len(row.sample.tokens), of_rows[row.number]) for row in shown]
        own = (learned.logprobs, learned.entropies, learned.advantages.of_tokens)
        of_teacher = (learned.teacher_logprobs, learned.divergences)
        for name, figures in zip((*TRAINED, *TAUGHT), (*own, *of_teacher), strict=True):
            if figures is not None:
                parts[name] = [figures.row(row.number) for row in shown]
    kinds = {name: SCHEMA.field(name).type.value_type for name in parts}
    joined = {name: np.concatenate([np.empty(0, kinds[name].to_pandas_dtype()), *its]) for name, its in parts.items()}
    # A NaN of a teacher becomes a null.
    flat = {name: pa.array(values, kinds[name], from_pandas=name in TAUGHT) for name, values in joined.items()}
    flat["token_texts"] = texts.pieces(flat["token_ids"].to_numpy(), offsets)
    return {
        name: pa.ListArray.from_arrays(
            pa.array(offsets, pa.int32()),
            values,
            type=SCHEMA.field(name).type,
            mask=pa.array(~(taught if name in TAUGHT else trained if name in TRAINED else figured)),
        )
        for name, values in flat.items()
    }


# --- texts of tokens --------------------------------------------------------------------------------------------------


class TokenTexts:
    """The text pieces of a tokenizer's tokens. Each token is decoded once, whatever its number of occurrences.

    Of several tokens that make up a character's bytes, the last adds the character, and the others add nothing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers drop a space in front of the first token.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._before = self._decoded([self._anchor])[0]
        self._texts: dict[int, str] = {}
        self._parts: dict[int, bytes] = {}  # bytes of the tokens that are no whole text by themselves
        self._falls_back = False

    def whole(self, sample: Sample) -> str:
        """Returns the text of a response, without special tokens."""
        return response_texts(self._tokenizer, [(sample.tokens, sample.finish)])[0]

    def pieces(self, tokens: np.ndarray, offsets: np.ndarray) -> pa.Array:
        """Returns string [tokens]. tokens: int32 [tokens] of all responses; offsets: int64 [responses + 1] (Ragged)."""
        ids, slots = np.unique(tokens, return_inverse=True)
        if new := [token for token in ids.tolist() if token not in self._texts]:
            self._learn(new)
        texts = pa.array([self._texts[token] for token in ids.tolist()], pa.string()).take(pa.array(slots))
        partial = np.array([token in self._parts for token in ids.tolist()], bool)[slots]
        at = np.flatnonzero(partial)
        if not len(at):
            return texts
        begins = np.zeros(len(tokens) + 1, bool)
        begins[offsets] = True
        # A run of such tokens ends before a token that is whole, and with its response.
        first = np.concatenate([[True], (np.diff(at) > 1) | begins[at[1:]]])
        made: list[str] = []
        for run in np.split(at, np.flatnonzero(first)[1:]):
            made += _characters([self._parts[token] for token in tokens[run].tolist()], self._falls_back)
        return pc.replace_with_mask(texts, pa.array(partial), pa.array(made, pa.string()))

    def _learn(self, new: list[int]) -> None:
        """Decodes new tokens."""
        after, alone = self._decoded([[*self._anchor, token] for token in new]), self._decoded([[t] for t in new])
        names = self._tokenizer.convert_ids_to_tokens(new)
        for token, name, joined, text in zip(new, names, after, alone, strict=True):
            if joined.startswith(self._before):
                text = joined.removeprefix(self._before)
            self._texts[token] = encodable(text)
            if (byte := BYTE.fullmatch(str(name))) and text != name:
                self._parts[token], self._falls_back = bytes([int(byte[1], 16)]), True
            elif INCOMPLETE in text:
                self._parts[token] = _bytes(str(name), text)

    def _decoded(self, tokens: list[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _characters(parts: list[bytes], falls_back: bool) -> list[str]:
    """Returns the text that each part adds. Where bytes stand in for unknown characters (falls_back), decoders take all
    of them or none."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict" if falls_back else "replace")
    try:
        return [decoder.decode(part, final=at == len(parts)) for at, part in enumerate(parts, 1)]
    except UnicodeDecodeError:
        return [INCOMPLETE] * len(parts)


def _bytes(name: str, text: str) -> bytes:
    """Returns the bytes of a token of a byte-level vocabulary; of another vocabulary, those of its text."""
    known = all(letter in BYTES for letter in name)
    return bytes(BYTES[letter] for letter in name) if known else text.encode(errors="replace")
