"""Samples of a step with what training made of them, as rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from megagrpo.algorithm.advantages import Advantages
from megagrpo.algorithm.ragged import Ragged
from megagrpo.track.rollout_files import SCHEMA, TRAIN, encodable
from megagrpo.track.token_texts import TokenTexts
from megagrpo.track.traces import trace
from megagrpo.types import Group, Sample, Score

PART_TOKENS = 1 << 20
"""Tokens of a part of a table: tens of MB."""


@dataclass(frozen=True)
class Learned:
    """The results of a step's training for its samples. Rows are the samples of its groups, group by group."""

    rows: np.ndarray  # bool [rows], those trained on
    advantages: Advantages
    logprobs: Ragged | None = None  # float32, by the trainer before the update, of the first rows
    entropies: Ragged | None = None  # float32, as the update first saw it, of the first rows


@dataclass(frozen=True)
class StepRollouts:
    """Samples to keep: of a step's training (with `learned`), or of the evaluations after it."""

    step: int
    sets: Mapping[str, Sequence[Group]]
    version: int  # of the policy that the samples are for; theirs may be older
    token_samples: int | None  # of each set, samples whose tokens' figures are kept, as `figured_groups` takes it
    learned: Learned | None = None

    @property
    def evaluation(self) -> bool:
        return TRAIN not in self.sets


@dataclass(frozen=True)
class _Row:
    set: str
    number: int  # among the samples of its set
    group: Group
    sample: Sample
    score: Score | None
    figured: bool


def first_groups(groups: Sequence[Group], samples: int | None) -> Sequence[Group]:
    """Returns the first groups that have at most so many samples together, at least one; None: all."""
    if samples is None:
        return groups
    ends = np.cumsum([len(group.samples) for group in groups])
    return groups[: max(1, int((ends <= samples).sum()))]


def figured_groups(groups: Sequence[Group], samples: int | None) -> Sequence[Group]:
    """Returns the first groups whose figures of tokens are kept: as `first_groups`; 0: none."""
    return [] if samples == 0 else first_groups(groups, samples)


def _scored(score: Score | None) -> dict[str, Any]:
    return {
        "score": None if score is None or score.value is None else float(score.value),
        "parts": {} if score is None else {name: float(value) for name, value in score.parts.items()},
        "notes": {} if score is None else dict(score.notes),
        "error": "" if score is None else score.error,
        "masked": "" if score is None else score.masked,
        "solved": score is not None and score.solved,
    }


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(rollouts: StepRollouts, texts: TokenTexts | None) -> Iterator[pa.Table]:
    """Yields the rows, in parts of about PART_TOKENS tokens; without `texts` all lack figures of their tokens. Raises
    the errors of pyarrow and the tokenizer."""
    part: list[_Row] = []
    tokens = 0
    for name, groups in rollouts.sets.items():
        number, figured = 0, len(figured_groups(groups, rollouts.token_samples)) if texts else 0
        for place, group in enumerate(groups):
            for sample, score in zip(group.samples, group.scores or (None,) * len(group.samples), strict=True):
                if part and tokens + len(sample.tokens) > PART_TOKENS:
                    yield _table(rollouts, part, texts)
                    part, tokens = [], 0
                part.append(_Row(name, number, group, sample, score, place < figured))
                number, tokens = number + 1, tokens + len(sample.tokens)
    yield _table(rollouts, part, texts)


def _table(rollouts: StepRollouts, rows: Sequence[_Row], texts: TokenTexts | None) -> pa.Table:
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for row in rows:
        for name, value in _values(rollouts, row).items():
            columns[name].append(value)
    made = _token_columns(rollouts, rows, texts) if texts and any(row.figured for row in rows) else {}
    arrays = [made.get(field.name, pa.array(columns[field.name] or [None] * len(rows), field.type)) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _values(rollouts: StepRollouts, row: _Row) -> dict[str, Any]:
    """Returns the values of a row that are no lists of tokens."""
    prompt, sample, learned = row.group.prompt, row.sample, rollouts.learned
    scored = _scored(row.score)
    return {
        "step": rollouts.step,
        "set": encodable(row.set),
        "data_source": encodable(prompt.data_source),
        "ability": encodable(prompt.ability),
        "prompt_id": encodable(prompt.id),
        "sample": sample.index,
        "prompt": encodable(prompt.text),
        "messages": encodable(_json(list(prompt.messages))) if prompt.messages else "",
        "response": encodable(sample.text),
        "ground_truth": encodable(prompt.ground_truth),
        "score": scored["score"],
        "parts": [(encodable(name), value) for name, value in scored["parts"].items()],
        "notes": [(encodable(name), encodable(str(text))) for name, text in scored["notes"].items()],
        "answer": None if row.score is None or row.score.answer is None else encodable(row.score.answer),
        "error": encodable(scored["error"]),
        "masked": encodable(scored["masked"]),
        "solved": scored["solved"],
        "advantage": float(learned.advantages.of_rows[row.number]) if learned and learned.rows[row.number] else None,
        "finish": sample.finish,
        "prompt_tokens": len(prompt.tokens),
        "tokens": len(sample.tokens),
        "age": int(rollouts.version - sample.versions.min()) if len(sample.versions) else 0,
        "agent": None if sample.agent is None else encodable(_json(trace(sample.agent))),
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _token_columns(rollouts: StepRollouts, rows: Sequence[_Row], texts: TokenTexts) -> dict[str, pa.Array]:
    """Returns columns with a list for each row; null for rows without figures."""
    figured, learned = np.array([row.figured for row in rows]), rollouts.learned
    lengths = np.where(figured, [len(row.sample.tokens) for row in rows], 0)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    shown = [row for row in rows if row.figured]
    tokens = _joined((row.sample.tokens for row in shown), np.int32)
    made = {
        "token_ids": tokens,
        "token_texts": texts.pieces(tokens, offsets),
        "token_versions": _joined((row.sample.versions for row in shown), np.int32),
        "rollout_logprobs": _joined((row.sample.logprobs for row in shown), np.float32),
    }
    lists = {name: _lists(name, values, offsets, figured) for name, values in made.items()}
    if learned is not None:
        known = figured & learned.rows[[row.number for row in rows]]
        advantages = learned.advantages.of_tokens
        of_rows = np.repeat(learned.advantages.of_rows[[row.number for row in rows]], lengths)
        lists["token_advantages"] = _lists(
            "token_advantages", of_rows if advantages is None else _of_rows(advantages, shown), offsets, known
        )
        for name, ragged in (("train_logprobs", learned.logprobs), ("entropies", learned.entropies)):
            if ragged is not None:
                lists[name] = _lists(name, _of_rows(ragged, shown), offsets, known)
    return lists


def _of_rows(ragged: Ragged, rows: Sequence[_Row]) -> np.ndarray:
    return _joined((ragged.row(row.number) for row in rows), np.float32)


def _joined(parts: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)


def _lists(name: str, values: np.ndarray | pa.Array, offsets: np.ndarray, known: np.ndarray) -> pa.ListArray:
    """Returns a list per row. values: [tokens]; offsets: int64 [rows + 1]; known: bool [rows], the others are null."""
    kind = SCHEMA.field(name).type
    flat = values if isinstance(values, pa.Array) else pa.array(values, kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, type=kind, mask=pa.array(~known))
