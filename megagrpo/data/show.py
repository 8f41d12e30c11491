"""`megagrpo data show`: rows as the model will see them, their lengths, and their data sources."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from megagrpo.data.files import Findings, place
from megagrpo.data.locations import files_of, is_remote
from megagrpo.data.prompts import BATCH_ROWS, render, with_system_prompt
from megagrpo.data.rows import Row, prompt_schema, stream
from megagrpo.errors import DataError, printable
from megagrpo.recipe.schema import DataFileConfig
from megagrpo.tokenizer import encode

BARS = 12
BAR_WIDTH = 40
CHARACTERS_MAX = 4000
"""The most characters that are shown of one text."""


@dataclass(frozen=True)
class View:
    """The settings that make prompts of rows. Without a tokenizer, rows are messages, measured in characters."""

    tokenizer: PreTrainedTokenizerBase | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    tokens_max: int | None = None


@dataclass(frozen=True)
class Example:
    """One row that is shown."""

    where: str
    row: Row
    text: str
    length: int


def look(entry: DataFileConfig, view: View, rows: int) -> tuple[list[Example], np.ndarray, Counter[str]]:
    """Reads all rows of an entry. Returns the first `rows`, to show; the lengths of all, int64 [rows], in tokens, or in
    characters without a tokenizer; and the number of rows of each data source. Raises DataError naming bad rows."""
    examples: list[Example] = []
    lengths: list[int] = []
    sources: Counter[str] = Counter()
    for path in files_of(entry.location):
        findings = Findings(path)
        stored = stream(path, prompt_schema(entry.columns), findings)
        while batch := list(islice(stored, BATCH_ROWS)):
            texts, sizes = _seen(batch, view, path, findings)
            sources.update(row.data_source for row in batch)
            lengths += sizes
            for row, text, size in islice(zip(batch, texts, sizes, strict=False), rows - len(examples)):
                examples.append(Example(place(path, row.number), row, text, size))
        findings.raise_if_any()
    return examples, np.array(lengths, np.int64), sources


def draw(
    examples: Sequence[Example], lengths: np.ndarray, sources: Mapping[str, int], view: View, console: Console
) -> None:
    """Prints the rows, a table of lengths and their histogram."""
    unit, limit = "tokens" if view.tokenizer else "characters", view.tokens_max
    for example in examples:
        row = example.row
        facts = [("data_source", row.data_source), ("ground_truth", row.ground_truth), ("ability", row.ability)]
        facts += [("extra_info", str(dict(row.extra_info)))] if row.extra_info else []
        notes = "\n".join(f"{name}: {_short(value, 400)}" for name, value in facts if value)
        body = Text(_short(example.text, CHARACTERS_MAX)).append(f"\n\n{notes}", style="dim")
        console.print(Panel(body, title=Text(f"{example.length} {unit}: {example.where}"), title_align="left"))
    table = Table("rows", f"{unit}: least", "median", "95 %", "most")
    middle, most_are_below = np.percentile(lengths, [50, 95])
    figures = [len(lengths), lengths.min(), middle, most_are_below, lengths.max()]
    if limit is not None:
        table.add_column(f"above {limit:,}")
        figures.append((lengths > limit).sum())
    table.add_row(*(f"{figure:,.0f}" for figure in figures))
    console.print(table)
    console.print(histogram(lengths, limit))
    table = Table("data_source", "rows")
    for source, count in sorted(sources.items(), key=lambda item: -item[1]):
        table.add_row(Text(source), f"{count:,}")
    console.print(table)


def histogram(lengths: np.ndarray, limit: int | None) -> Text:
    """Draws a bar for each range of lengths, and marks those above the limit."""
    counts, edges = np.histogram(lengths, min(BARS, int(lengths.max() - lengths.min()) + 1))
    drawn = Text()
    for count, low, high in zip(counts.tolist(), edges, edges[1:], strict=False):
        bar = "█" * round(BAR_WIDTH * count / counts.max()) or ("▏" if count else "")
        above = limit is not None and low > limit
        line = f"{low:>8,.0f} to {high:>8,.0f}  {bar:<{BAR_WIDTH}} {count:,}{' above the limit' if above else ''}\n"
        drawn.append(line, style="red" if above else "")
    return drawn


def _seen(rows: Sequence[Row], view: View, path: str, findings: Findings) -> tuple[list[str], list[int]]:
    if view.tokenizer is None:
        chats = [with_system_prompt(row.messages, view.system_prompt) for row in rows]
        texts = ["\n".join(f"[{message['role']}] {message['content']}" for message in chat) for chat in chats]
        return texts, [sum(len(message["content"]) for message in chat) for chat in chats]
    texts = render(rows, view.system_prompt, view.tokenizer, view.arguments, path, findings)
    return texts, [len(ids) for ids in encode(view.tokenizer, texts)]


def _short(text: str, most: int) -> str:
    return printable(text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} characters more)")


def entry_of(name: str, entries: Sequence[DataFileConfig]) -> DataFileConfig:
    """Returns the recipe's entry of this path or task, with its columns; a plain one if the recipe has none.

    A path that is spelled differently, or is one of several files of an entry, has that entry's columns.
    """
    for entry in entries:
        if name in (entry.path, entry.reasoning_gym):
            return entry
    wanted = _places(name)
    for entry in entries:
        if wanted and wanted <= _places(entry.location):
            return entry.model_copy(update={"path": name})
    return DataFileConfig(path=name)


def _places(location: str) -> set[str]:
    """Returns the absolute paths or URLs of the files at a location; none if they cannot be found."""
    try:
        return {path if is_remote(path) else os.path.abspath(path) for path in files_of(location)}
    except DataError:
        return set()
