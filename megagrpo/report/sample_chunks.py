"""Texts and tokens of samples in chunks, each of which a page opens by itself: about a megabyte compressed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megagrpo.report.embed import Columns, digest, encode
from megagrpo.report.sample_rows import Rows, Source

CHUNK_CHARACTERS = 3_000_000
CHUNK_TOKENS = 200_000
PREVIEW = 80  # characters
NO_TOKEN = -1
FIGURES = ("rollout_logprobs", "train_logprobs", "entropies", "token_advantages")
TEXT_COLUMNS = (
    *("prompt_id", "prompt", "messages", "response", "ground_truth", "ability", "parts", "notes", "answer", "error"),
    *("masked", "agent"),
)
TOKEN_COLUMNS = ("token_ids", "token_texts", "token_versions", *FIGURES)


@dataclass
class Texts:
    """Strings of a column, end to end."""

    pieces: list[str] = field(default_factory=list)
    characters: int = 0

    def add(self, text: str) -> None:
        self.pieces.append(text)
        self.characters += len(text)

    def columns(self, name: str) -> dict[str, np.ndarray]:
        """Returns the UTF-8 bytes, and the end of each text, uint32, in UTF-16 units as JavaScript counts them."""
        raw = "".join(self.pieces).encode(errors="replace")
        units = [len(text) if text.isascii() else len(text.encode("utf-16-le", "replace")) // 2 for text in self.pieces]
        return {name: np.frombuffer(raw, np.uint8), f"{name}_ends": np.cumsum(np.array(units, np.int64)).astype("u4")}


class Chunks:
    """The columns of samples, in the order in which they are added. Encoding runs in `threads`.

    Names of chunks begin with a digest of all chunks: a page keeps opened chunks by their names.
    """

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.prompt_of: list[int] = []  # of each sample, its prompt's number
        self._threads = threads
        self._made: dict[str, Future[bytes]] = {}
        self._first: dict[str, list[int]] = {"texts": [], "prompts": [], "tokens": []}
        self._prompts: dict[tuple[str, ...], int] = {}
        self._previews, self._prompt_previews = Texts(), Texts()
        self._texts = {name: Texts() for name in ("response", "agent", "detail")}
        self._prompt_texts = {name: Texts() for name in ("prompt", "messages", "truth", "ability")}
        self._tokens: list[dict[str, np.ndarray]] = []
        self._token_codes: dict[tuple[int, str], int] = {}
        self._tokens_held = self._figured = 0

    def add(self, source: Source, kept: np.ndarray, figured: np.ndarray) -> None:
        """Adds rows of a source. kept: bool [rows], those to add; figured: bool [rows], those of them with tokens.

        Raises OSError and pa.ArrowException.
        """
        table = source.read((*TEXT_COLUMNS, *(TOKEN_COLUMNS if figured.any() else ())))
        for line in table.select(TEXT_COLUMNS).filter(pa.array(kept)).to_pylist():
            self._add_texts(line)
        if figured.any():
            self._add_tokens(table.select(TOKEN_COLUMNS).filter(pa.array(figured)))

    def end(self, rows: Rows, figured: np.ndarray, told: Mapping[str, Any]) -> tuple[Columns, dict[str, bytes]]:
        """Returns the columns of all samples, with the first row of each chunk, and the chunks by name. figured: int64
        [n], rows with tokens; told: JSON values that a page shows."""
        self._end_texts("texts", self._texts, len(self.prompt_of))
        self._end_texts("prompts", self._prompt_texts, len(self._prompts))
        self._end_tokens()
        codes = list(self._token_codes)
        dictionary = {"ids": np.array([token for token, _ in codes], np.int32), "texts": [text for _, text in codes]}
        self._put("dictionary", dictionary)
        encoded = {name: made.result() for name, made in self._made.items()}
        prefix = f"samples_{digest(b''.join(encoded.values()))}"
        numbers = rows.numbers
        columns: dict[str, Any] = {
            **told,
            "rows": len(rows),
            "chunks": prefix,
            "first": self._first,
            "prompt_ids": [key[0] for key in self._prompts],
            "names": {name: rows.values[name] for name in ("set", "data_source", "finish")},
            "run": numbers["run"].astype(np.uint8),
            "flags": numbers["flags"].astype(np.uint8),
            "prompt": np.array(self.prompt_of, np.uint32),
            **{name: rows.codes[name].astype(np.uint16) for name in ("set", "data_source", "finish")},
            **{name: numbers[name] for name in ("step", "sample", "prompt_tokens", "tokens", "age")},
            **{name: numbers[name] for name in ("score", "advantage", "mismatch")},
            "figured": figured.astype(np.uint32),
            **self._previews.columns("preview"),
            **self._prompt_previews.columns("prompt_preview"),
        }
        return columns, {f"{prefix}_{name}": held for name, held in encoded.items()}

    def _add_texts(self, line: dict[str, Any]) -> None:
        key = tuple(line[name] or "" for name in ("prompt_id", "prompt", "messages", "ground_truth", "ability"))
        number = self._prompts.setdefault(key, len(self._prompts))
        if number == len(self._prompt_previews.pieces):
            self._prompt_previews.add(_preview(_asked(key[2]) or key[1], PREVIEW))
            for name, text in zip(self._prompt_texts, key[1:], strict=True):
                self._prompt_texts[name].add(text)
            if sum(texts.characters for texts in self._prompt_texts.values()) > CHUNK_CHARACTERS:
                self._end_texts("prompts", self._prompt_texts, len(self._prompts))
        self.prompt_of.append(number)
        response = line["response"] or ""
        self._previews.add(_preview(response, -PREVIEW))
        told = {
            "parts": [[name, _finite(value)] for name, value in line["parts"] or ()],
            "notes": line["notes"] or [],
            **{name: line[name] for name in ("answer", "error", "masked")},
        }
        short = {name: value for name, value in told.items() if value not in (None, "", [])}
        for name, text in (
            ("response", response),
            ("agent", line["agent"] or ""),
            ("detail", json.dumps(short, ensure_ascii=False)),
        ):
            self._texts[name].add(text)
        if sum(texts.characters for texts in self._texts.values()) > CHUNK_CHARACTERS:
            self._end_texts("texts", self._texts, len(self.prompt_of))

    def _end_texts(self, kind: str, columns: dict[str, Texts], end: int) -> None:
        count = len(next(iter(columns.values())).pieces)
        if not count:
            return
        made = {key: value for name, texts in columns.items() for key, value in texts.columns(name).items()}
        self._put(f"{kind}_{len(self._first[kind])}", made)
        self._first[kind].append(end - count)
        for name in columns:
            columns[name] = Texts()

    def _add_tokens(self, table: pa.Table) -> None:
        """Adds all of a source's tokens at once, because they are many."""
        sizes = pc.list_value_length(table["rollout_logprobs"]).to_numpy().astype(np.int64)
        texts = _flat(table["token_texts"], sizes, "").dictionary_encode()
        ids = _flat(table["token_ids"], sizes, NO_TOKEN).to_numpy(zero_copy_only=False)
        pairs, place = np.unique(ids.astype(np.int64) << 32 | texts.indices.to_numpy(), return_inverse=True)
        known = texts.dictionary.to_pylist()
        keys = ((pair >> 32, known[pair & 0xFFFFFFFF]) for pair in pairs.tolist())
        codes = np.array([self._token_codes.setdefault(key, len(self._token_codes)) for key in keys], np.uint32)
        rollout, train, entropy, advantage = (
            np.asarray(_flat(table[name], sizes, None).to_numpy(zero_copy_only=False), np.float32) for name in FIGURES
        )
        versions = _flat(table["token_versions"], sizes, NO_TOKEN).to_numpy(zero_copy_only=False)
        self._tokens.append(
            {
                "size": sizes.astype(np.uint32),
                "code": codes[place],
                "version": versions,
                "logprob": _half(rollout),
                "difference": _half(train - rollout),
                "entropy": _half(entropy),
                "advantage": _half(advantage),
            }
        )
        self._figured += len(sizes)
        self._tokens_held += int(sizes.sum())
        if self._tokens_held > CHUNK_TOKENS:
            self._end_tokens()

    def _end_tokens(self) -> None:
        if not self._tokens:
            return
        made = {name: np.concatenate([tokens[name] for tokens in self._tokens]) for name in self._tokens[0]}
        self._put(f"tokens_{len(self._first['tokens'])}", made)
        self._first["tokens"].append(self._figured - len(made["size"]))
        self._tokens, self._tokens_held = [], 0

    def _put(self, name: str, columns: dict[str, Any]) -> None:
        self._made[name] = self._threads.submit(encode, columns)


def _flat(column: pa.ChunkedArray, sizes: np.ndarray, missing: object) -> pa.Array:
    """Returns all values end to end, `missing` for those of a row without such a list. sizes: int64 [rows]."""
    whole = column.combine_chunks()
    if np.array_equal(pc.fill_null(pc.list_value_length(whole), -1).to_numpy(zero_copy_only=False), sizes):
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


def _preview(text: str, characters: int) -> str:
    """Returns the first characters of a text in one line; the last ones if `characters` is negative."""
    size = abs(characters)
    part = text[: 4 * size] if characters > 0 else text[-4 * size :]
    words = " ".join(part.split())
    if characters > 0:
        return words[:size] + ("…" if len(words) > size or len(part) < len(text) else "")
    return ("…" if len(words) > size or len(part) < len(text) else "") + words[-size:]


def _asked(messages: str) -> str:
    """Returns the user's last message in JSON messages; empty if they cannot be read."""
    try:
        said = [message["content"] for message in json.loads(messages or "[]") if message.get("role") == "user"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""
    return said[-1] if said and isinstance(said[-1], str) else ""


def _finite(value: float | None) -> float | str | None:
    """Returns the value as JSON takes it: NaN and infinities by their names."""
    return value if value is None or math.isfinite(value) else str(value)
