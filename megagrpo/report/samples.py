"""Samples of runs as a page carries them: columns of all, and texts and tokens file by file, opened when needed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megagrpo.errors import first_line
from megagrpo.evaluation.responses import FILE_NAME, read_responses
from megagrpo.report.parts import Columns, Part, digest, encode, labels
from megagrpo.report.run import RunRead, responses_in
from megagrpo.report.text import BRANCHES
from megagrpo.track.rollout_files import SCHEMA, TAUGHT, TRAINED, encodable, read_file, rollout_files

SAMPLES = 5_000
"""Most samples of a page, the newest ones, unless another number is asked for."""
PAGE_BYTES = 64_000_000
"""Most bytes of their texts, unless a number of samples is asked for."""
EVALUATIONS = 100
"""Newest evaluations among which the last one of each set is looked for."""
TOKENS = 1_500_000
"""Most tokens whose figures a page carries, of its newest samples: some 9 bytes each, in base64."""
NO_STEP = -1
"""Step of the responses of `megagrpo eval`."""
SOLVED, MASKED, FAILED, AGENT = 1, 2, 4, 8
"""Bits of a row's flags."""
PREVIEW = 80  # characters
NO_TOKEN = -1
FIGURES = ("rollout_logprobs", *TRAINED, *TAUGHT)
PROMPT = ("prompt_id", "prompt", "messages", "ground_truth", "ability")
TEXTS = (*PROMPT, "response", "parts", "notes", "answer", "error", "masked", "teacher", "agent")
NAMES = ("set", "data_source", "finish")
SCRIPTS = ("vendor/diff.min.js", "samples_store.js", "sample_tokens.js", "sample_view.js", "samples.js")


def sample_parts(runs: Sequence[RunRead], samples: int | None = None) -> list[Part]:
    """Returns the section of samples; no section if all runs are fine-tuning. samples: the most; None: SAMPLES."""
    columns, late = sample_data(runs, samples)
    if late:
        return [Part("samples", "Samples", "", {"samples": columns}, late, SCRIPTS, ("samples.css",))]
    if all(run.recipe.get("kind") == "sft" for run in runs):
        return []
    text = "No samples are on disk. With <code>track.rollouts</code> each step writes some: open the report anew then."
    return [Part("samples", "Samples", html=f"<p class=soft>{text}</p>")]


def sample_data(runs: Sequence[RunRead], samples: int | None = None) -> tuple[Columns, dict[str, bytes]]:
    """Returns the columns of the newest samples, and texts and tokens of each file, encoded; empty without samples.

    Each run has its share of `samples`: first the last step's file and each set's last evaluation, then the others from
    the newest step back. Samples of a file's end are left out where they are too many.
    """
    files, notes, tokens, is_whole = list[FileSamples](), list[str](), TOKENS, True
    with ThreadPoolExecutor(2, "samples of a page") as threads:
        for number, run in enumerate(runs):
            left, read = max(1, (samples or SAMPLES) // len(runs)), dict[Source, FileSamples]()
            room = math.inf if samples else PAGE_BYTES // len(runs)
            sources = sources_of(run.directory)
            last = _last_of_each_set(sources)
            for source in sorted(sources, key=lambda source: (source not in last, -source.step)):
                try:
                    table = _table(source) if left else SCHEMA.empty_table()
                except FileNotFoundError:
                    notes.append(f"{source.path} has gone: the run went back behind its step.")
                    continue
                except (OSError, pa.ArrowException) as error:
                    notes.append(f"{source.path} can't be read: {first_line(error)}.")
                    continue
                sizes = np.cumsum(sum(_array(pc.binary_length(table[name]), 0) for name in ("response", "agent")))
                fits = min(left, int(np.searchsorted(sizes, room, "right")))
                is_whole &= 0 < fits >= len(table)
                if len(table := table.slice(0, fits)):
                    read[source] = _file(table, number, tokens, threads)
                    left, tokens = left - len(table), tokens - int(read[source].numbers["figures"].sum())
                    room -= int(sizes[len(table) - 1])
            files += [read[source] for source in sources if source in read]
    return _page(runs, files, is_whole, notes) if files else ({}, {})


@dataclass(frozen=True)
class Source:
    """A file of a run's samples, of training or of an evaluation."""

    step: int
    path: Path
    evaluation: bool


def sources_of(directory: Path) -> list[Source]:
    """Returns a run's files by step: rollouts/, evaluations that it lacks, and responses of `megagrpo eval`."""
    sources = [Source(step, path, path.name.endswith(".eval.parquet")) for step, path in rollout_files(directory)]
    evaluated = {source.step for source in sources if source.evaluation}
    for path in (directory / "evaluations").glob("step_*.jsonl"):
        if (name := FILE_NAME.fullmatch(path.name)) and int(name[1]) not in evaluated:
            sources.append(Source(int(name[1]), path, True))
    sources += [Source(NO_STEP, path, True) for path in responses_in(directory)]
    return sorted(sources, key=lambda source: source.step)


def _last_of_each_set(sources: Sequence[Source]) -> set[Source]:
    """Returns the last step's file, the last evaluation of each set, and what `megagrpo eval` left."""
    last = {source for source in sources if source.step == NO_STEP}
    last |= set([source for source in sources if not source.evaluation][-1:])
    sets = set[str]()
    evaluations = [source for source in sources if source.evaluation and source.step != NO_STEP]
    for source in evaluations[: -EVALUATIONS - 1 : -1]:
        with suppress(OSError, pa.ArrowException):
            names = set(_table(source, ["set"])["set"].to_pylist())
            last |= {source} if names - sets else set()
            sets |= names
    return last


def _table(source: Source, columns: Sequence[str] = SCHEMA.names) -> pa.Table:
    """Reads a file's columns. Raises OSError, pa.ArrowException. A model of `megagrpo eval` is named beside the set."""
    if source.path.suffix == ".parquet":
        return read_file(source.path, columns)
    rows = list[dict[str, Any]]()
    model = f" · {source.path.absolute().parent.name}" if source.step == NO_STEP else ""
    try:
        for response in read_responses(source.path):
            values = asdict(response)
            parts = [(name, value) for name, value in values.pop("parts").items() if value is not None]
            values |= {"set": f"{response.set}{model}", "step": source.step, "sample": values.pop("index")}
            values |= {"parts": parts, "notes": list(response.notes.items())}
            rows.append({name: encodable(value) for name, value in values.items()})
    except (ValueError, TypeError):
        pass  # another's file, or one that has ended within a line
    return pa.Table.from_pylist(rows, SCHEMA)


# --- one file ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileSamples:
    """The samples of a file. prompts: values of PROMPT; prompt: int [rows], indices of them. texts, tokens: encoded.

    numbers: [rows] by name, among them `flags`, `mismatch` (mean absolute train - rollout logprob in nats, NaN:
    unknown) and `figures` (tokens whose figures are in the page).
    """

    numbers: Mapping[str, np.ndarray]
    names: Mapping[str, list[str]]
    previews: list[str]
    prompts: list[tuple[str, ...]]
    prompt: np.ndarray
    texts: Future[bytes]
    tokens: Future[bytes] | None


def _file(table: pa.Table, run: int, tokens_left: int, threads: ThreadPoolExecutor) -> FileSamples:
    """Makes the samples of a file, with figures of its first `tokens_left` tokens. Encoding runs in `threads`."""
    rows = table.select(TEXTS).to_pylist()
    keys = [tuple(row[name] or "" for name in PROMPT) for row in rows]
    prompts = list(dict.fromkeys(keys))
    places = {key: place for place, key in enumerate(prompts)}
    prompt = np.array([places[key] for key in keys], np.uint32)
    responses = [row["response"] or "" for row in rows]
    details = [{name: row[name] for name in ("parts", "notes", "answer", "error", "masked", "teacher")} for row in rows]
    for detail in details:  # JSON has no number that is not finite
        parts = detail["parts"] or ()
        detail["parts"] = [
            (name, value if value is None or math.isfinite(value) else str(value)) for name, value in parts
        ]
    texts = {
        "prompt": prompt,
        "prompts": [key[1:] for key in prompts],
        "response": responses,
        "agent": [row["agent"] or "" for row in rows],
        "detail": [
            {name: value for name, value in detail.items() if value not in (None, "", [])} for detail in details
        ],
    }
    sizes = _array(pc.list_value_length(table["rollout_logprobs"]), 0).astype(np.int64)
    figures = np.where(np.cumsum(sizes) <= tokens_left, sizes, 0)
    figured = table.select([name for name in SCHEMA.names if name in FIGURES or name.startswith("token_")])
    return FileSamples(
        _numbers(table) | {"run": np.full(len(table), run, np.uint8), "figures": figures.astype(np.uint32)},
        {name: pc.fill_null(table[name], "").to_pylist() for name in NAMES},
        [_preview(text, -PREVIEW) for text in responses],
        prompts,
        prompt,
        threads.submit(encode, texts),
        threads.submit(encode, _tokens(figured.filter(pa.array(figures > 0)))) if figures.any() else None,
    )


def _numbers(table: pa.Table) -> dict[str, np.ndarray]:
    flags = SOLVED * _array(table["solved"], False).astype(np.uint8)
    for flag, name in ((MASKED, "masked"), (FAILED, "error"), (AGENT, "agent")):
        flags |= flag * (_array(pc.binary_length(table[name]), 0) > 0).astype(np.uint8)
    rollout, train = (table[name].combine_chunks() for name in ("rollout_logprobs", "train_logprobs"))
    sizes, others = (_array(pc.list_value_length(array), 0) for array in (rollout, train))
    both = (sizes == others) & (sizes > 0)
    mismatch = np.full(len(sizes), np.nan, np.float32)
    if both.any():
        engine, trainer = (_array(array.filter(pa.array(both)).flatten(), np.nan) for array in (rollout, train))
        row = np.repeat(np.arange(int(both.sum())), sizes[both])
        mismatch[both] = np.bincount(row, np.abs(trainer - engine), int(both.sum())) / sizes[both]
    counts = ("step", "sample", "prompt_tokens", "tokens", "age")
    return {
        **{name: _array(table[name], 0).astype(np.int32) for name in counts},
        **{name: _array(table[name], np.nan).astype(np.float32) for name in ("score", "advantage")},
        "flags": flags,
        "mismatch": mismatch,
    }


def _tokens(table: pa.Table) -> Columns:
    """Returns the figures of all tokens, end to end, and each token's code: an index of its id and text."""
    sizes = pc.list_value_length(table["rollout_logprobs"]).to_numpy().astype(np.int64)
    texts = _flat(table["token_texts"], sizes, "").dictionary_encode()
    ids = _flat(table["token_ids"], sizes, NO_TOKEN).to_numpy(zero_copy_only=False)
    pairs, code = np.unique(ids.astype(np.int64) << 32 | texts.indices.to_numpy(), return_inverse=True)
    rollout, train, entropy, advantage, teacher, divergence = (
        np.asarray(_flat(table[name], sizes, None).to_numpy(zero_copy_only=False), np.float32) for name in FIGURES
    )
    return {
        "ids": (pairs >> 32).astype(np.int32),
        "texts": texts.dictionary.take(pa.array(pairs & 0xFFFFFFFF)).to_pylist(),
        "code": code.astype(np.uint32),
        "version": _flat(table["token_versions"], sizes, NO_TOKEN).to_numpy(zero_copy_only=False),
        "logprob": _half(rollout),
        "difference": _half(train - rollout),
        "entropy": _half(entropy),
        "advantage": _half(advantage),
        "teacher": _half(teacher - rollout),
        "divergence": _half(divergence),
    }


def _flat(column: pa.ChunkedArray, sizes: np.ndarray, missing: object) -> pa.Array:
    """Returns all values end to end, `missing` for those of a row without such a list. sizes: int64 [rows]."""
    whole = column.combine_chunks()
    if np.array_equal(_array(pc.list_value_length(whole), -1), sizes):
        return whole.flatten()
    kind = whole.type.value_type
    rows = [
        row.values if row.is_valid and len(row) == size else pa.array([missing] * int(size), kind)
        for row, size in zip(whole, sizes, strict=True)
    ]
    return pa.concat_arrays([pa.array([], kind), *rows])


def _half(values: np.ndarray) -> np.ndarray:
    """Returns float32 values as the bits of float16, uint16: three digits suffice for a colour and a reader."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint16)


def _array(column: pa.ChunkedArray | pa.Array, null: object) -> np.ndarray:
    filled = pc.fill_null(column, pa.scalar(null, column.type))
    return filled.to_numpy() if isinstance(filled, pa.ChunkedArray) else filled.to_numpy(zero_copy_only=False)


# --- the page ---------------------------------------------------------------------------------------------------------


def _page(
    runs: Sequence[RunRead], files: Sequence[FileSamples], is_whole: bool, notes: Sequence[str]
) -> tuple[Columns, dict[str, bytes]]:
    """Returns the columns of all samples, with the first row of each file, and the files' texts and tokens by name."""
    numbers = {name: np.concatenate([file.numbers[name] for file in files]) for name in files[0].numbers}
    names = {
        name: pa.array([value for file in files for value in file.names[name]]).dictionary_encode() for name in NAMES
    }
    codes: dict[tuple[str, ...], int] = {}
    for key in (key for file in files for key in file.prompts):
        codes.setdefault(key, len(codes))
    late, digests = dict[str, bytes](), list[str]()
    for file in files:
        texts, tokens = file.texts.result(), file.tokens.result() if file.tokens else b""
        digests.append(digest(texts + tokens))
        late |= {f"texts_{digests[-1]}": texts, **({f"tokens_{digests[-1]}": tokens} if tokens else {})}
    columns = {
        "runs": labels(runs),
        "notes": [*_left_out(runs, files, is_whole), *notes],
        "branches": BRANCHES,
        "rows": len(numbers["step"]),
        "files": digests,
        "first": np.cumsum([0, *(len(file.prompt) for file in files[:-1])]).astype(np.uint32),
        "prompt_ids": [key[0] for key in codes],
        "prompt_previews": [_preview(_question(key[2]) or key[1], PREVIEW) for key in codes],
        "prompt": np.concatenate([np.array([codes[key] for key in f.prompts], np.uint32)[f.prompt] for f in files]),
        "previews": [preview for file in files for preview in file.previews],
        "names": {name: array.dictionary.to_pylist() for name, array in names.items()},
        **{name: array.indices.to_numpy().astype(np.uint16) for name, array in names.items()},
        **numbers,
    }
    return columns, late


def _left_out(runs: Sequence[RunRead], files: Sequence[FileSamples], is_whole: bool) -> list[str]:
    """Returns sentences about the samples and figures that the page lacks, and the reasons."""
    rows = sum(len(file.prompt) for file in files)
    figured = sum(np.count_nonzero(file.numbers["figures"]) for file in files)
    notes = list[str]()
    if not is_whole:
        notes.append(
            f"This page has the newest {rows:,} samples, of {PAGE_BYTES / 1e6:g} MB at most: first the samples of the "
            "last step and of each set's last evaluation. --samples N takes up to N, however large the page becomes."
        )
    if figured < rows:
        notes.append(
            f"{figured:,} of its samples have figures of tokens: the newest, of {TOKENS:,} tokens at most, among those "
            "that have them on disk (track.rollouts.token_samples_per_step)."
        )
    for run in runs:
        if limit := run.setting("track.rollouts.samples_per_step"):
            notes.append(
                f"{run.name} keeps up to {limit} samples of each step and set on disk "
                "(track.rollouts.samples_per_step)."
            )
    return notes


def _preview(text: str, characters: int) -> str:
    """Returns the first characters of a text in one line; the last ones if `characters` is negative."""
    size = abs(characters)
    part = text[: 4 * size] if characters > 0 else text[-4 * size :]
    words = " ".join(part.split())
    mark = "…" if len(words) > size or len(part) < len(text) else ""
    return words[:size] + mark if characters > 0 else mark + words[-size:]


def _question(messages: str) -> str:
    """Returns the user's last message in JSON messages; empty if they cannot be read."""
    try:
        contents = [message["content"] for message in json.loads(messages or "[]") if message.get("role") == "user"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""
    return contents[-1] if contents and isinstance(contents[-1], str) else ""
