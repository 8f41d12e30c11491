"""Writes the files of rollouts beside the run, in a thread: no step waits for them, and no failure ends the run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from megagrpo.errors import first_line
from megagrpo.track.rollout_files import SCHEMA, rollout_file
from megagrpo.track.rollout_table import StepRollouts, tables
from megagrpo.track.token_texts import TokenTexts

WITH_TOKENS_MAX = 2
"""Steps that may wait with the figures of their tokens, which are most of the queue's memory."""
WAITING_MAX = 4
FINISH_TIMEOUT_SECONDS = 60.0
FIGURES = [f"{name}.list.element" for name in ("rollout_logprobs", "train_logprobs", "entropies")]
"""Parquet's names of columns whose values are all different: bytes of equal weight compress better together."""
REPEATED = [
    "set", "data_source", "ability", "prompt_id", "prompt", "messages", "ground_truth", "finish", "masked",
    "parts.key_value.key", "notes.key_value.key", "token_ids.list.element", "token_texts.list.element",
    "token_versions.list.element", "token_advantages.list.element",
]  # fmt: skip
"""Columns with repeated values: a file holds each value once."""
FAULTS = (OSError, MemoryError, RuntimeError, pa.ArrowException, ValueError, TypeError, OverflowError, LookupError)
"""These come from disks, from texts and numbers that users' functions have made, from tokens that a tokenizer does not
know, and from one that another thread uses."""


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
            with_tokens = [at for at, each in enumerate(self._waiting) if each.token_samples != 0]
            late = []
            if len(with_tokens) > WITH_TOKENS_MAX:
                at = with_tokens[0]
                late.append(self._waiting[at])
                self._waiting[at] = replace(self._waiting[at], token_samples=0)
            if len(self._waiting) > WAITING_MAX:
                late.append(self._waiting.popleft())
            self._changed.notify()
        for each in late:
            self._leave_out(each, "writing is slower than the run")

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
            self._say(f"rollouts/: {why}; samples are left out (rollouts/left_out counts the steps), the run goes on")

    def _work(self, texts: TokenTexts) -> None:
        while (rollouts := self._next()) is not None:
            try:
                self._write(rollouts, texts)
            except FAULTS as error:
                self._leave_out(rollouts, first_line(error))

    def _next(self) -> StepRollouts | None:
        """Waits for the next samples, and returns them; None: there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return self._waiting.popleft() if self._waiting else None

    def _write(self, rollouts: StepRollouts, texts: TokenTexts) -> None:
        path = rollout_file(self._directory, rollouts.step, evaluation=rollouts.evaluation)
        path.parent.mkdir(exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        try:
            with pq.ParquetWriter(
                part, SCHEMA, compression="zstd", use_dictionary=REPEATED, use_byte_stream_split=FIGURES
            ) as file:
                if rollouts.evaluation and path.exists():  # other sets, evaluated before the run was continued
                    there = pq.read_table(path, schema=SCHEMA)
                    others = [name.as_py() not in rollouts.sets for name in there["set"]]
                    file.write_table(there.filter(pa.array(others, pa.bool_())))
                for table in tables(rollouts, texts):
                    file.write_table(table)
            if not self._given_up:
                part.replace(path)
        finally:
            part.unlink(missing_ok=True)
