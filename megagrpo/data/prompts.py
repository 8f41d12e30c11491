"""Rows to prompts: the tokenizer's chat template, then token ids, then the limit on length."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from megagrpo import typed_json
from megagrpo.data import overlap
from megagrpo.data.files import Findings, place
from megagrpo.data.locations import files_of, size_and_version
from megagrpo.data.mixture import OVERLAPS_SHOWN, AnyItem, Marks, Mixture, file_labels, mix
from megagrpo.data.overlap import digests, question, repeated
from megagrpo.data.rows import AnyRow, Row, SchemaOf, counted, prompt_schema, read, rows_to_read, stream
from megagrpo.data.store import Cache, Column, Form, Stored, digest, store
from megagrpo.errors import DataError, ModelError, Problem, first_line
from megagrpo.progress import progress
from megagrpo.recipe.defaults import own_rewards
from megagrpo.recipe.schema import DataFileConfig, Recipe
from megagrpo.recipe.schema.data import DataConfig
from megagrpo.tokenizer import encode, identity
from megagrpo.types import Prompt

BATCH_ROWS = 1024
CACHED_BYTES = 2**22
"""Files of at least this size are looked for in the cache."""

Read = Callable[[Sequence[Any], PreTrainedTokenizerBase, str | None], Mixture[AnyItem]]
"""Reads entries of the data (EntryConfig) of a recipe: of one of its evaluation sets, or those to train on (None)."""

# What a template does with a message that it does not expect: it raises, or uses a value as what it is not.
RENDER_ERRORS = (TemplateError, TypeError, KeyError, AttributeError, ValueError)


@dataclass(frozen=True)
class Reader(Generic[AnyRow, AnyItem]):
    """The conversion of a file's rows into stored prompts or examples of at most `tokens_max` tokens.

    `records` receives rows, their path, and the findings, to which it adds rows that the template refuses; it yields a
    record of the form's columns for each row. `shortened` cuts a record to `tokens_max`; it returns None if nothing is
    left to learn from. `overlong` is the action for a longer record: "drop", "error", or `truncate`. `settings` are
    the other inputs of the records.
    """

    form: Form[AnyItem]
    records: Callable[[list[AnyRow], str, Findings], Iterator[Column]]
    shortened: Callable[[Column], Column | None]
    tokens_max: int
    overlong: str
    noun: str
    tokens_field: str
    truncate: str
    cache: Cache
    tokenizer: PreTrainedTokenizerBase
    settings: Mapping[str, Any] = field(default_factory=dict)

    def read(self, path: str, label: str, schema_of: SchemaOf[AnyRow], mapping: Any = None) -> Stored[AnyItem]:
        """Reads all usable items of one file. Raises DataError with all problems of the file."""
        size, version = size_and_version(path)
        key: list[str] = []

        def key_of() -> str:  # rarely called: it reads the whole tokenizer
            if not key:
                told = [self.tokens_max, self.overlong, self.noun, dict(self.settings), mapping]
                key.append(digest([os.path.abspath(path), size, version, identity(self.tokenizer), told]))
            return key[0]

        if size >= CACHED_BYTES and (found := self.cache.find(key_of(), self.form, label)) is not None:
            return found
        counts = {"rows": 0, "overlong": 0}
        findings = Findings(path)
        with progress(f"reading {label}", rows_to_read(path), "rows") as work:
            usable = self._usable(counted(stream(path, schema_of, findings), work), path, findings, counts)
            stored = store(usable, self.form, label, self.cache, key_of, lambda: counts)
        if len(stored):
            return stored
        rows = counts["rows"]
        given, fix = f"all {rows} rows are longer than {self.tokens_max} tokens", f"raise {self.tokens_field}"
        if self.overlong == self.truncate:
            given = f"none of the {rows} rows has a token of the assistant's within {self.tokens_max} tokens"
        else:
            fix += f", or set data.overlong_{self.noun}s to {self.truncate}"
        raise DataError(Problem(f"{path}: no {self.noun} is left", given=given, fix=fix))

    def _usable(
        self, rows: Iterator[AnyRow], path: str, findings: Findings, counts: dict[str, int]
    ) -> Iterator[Column]:
        """Yields the records of rows that are kept. Raises DataError at the end if there are findings."""
        while batch := list(islice(rows, BATCH_ROWS)):
            counts["rows"] += len(batch)
            if findings.count:
                continue  # only to find the other bad rows
            for record in self.records(batch, path, findings):
                if len(record["tokens"]) <= self.tokens_max:
                    yield record
                    continue
                counts["overlong"] += 1
                if self.overlong == "error":
                    where = f"{place(path, record['number'])}: the {self.noun} is too long"
                    needed = f"at most {self.tokens_max} ({self.tokens_field})"
                    fix = f"raise {self.tokens_field}, or set data.overlong_{self.noun}s to drop or {self.truncate}"
                    findings.add([Problem(where, f"{len(record['tokens'])} tokens", needed, fix)])
                elif self.overlong == self.truncate and (short := self.shortened(record)) is not None:
                    yield short
        findings.raise_if_any()


PROMPT_COLUMNS = pa.schema(
    [
        ("number", pa.int64()),
        ("tokens", pa.list_(pa.int32())),
        ("data_source", pa.string()),
        ("ground_truth", pa.string()),
        ("ability", pa.string()),
        ("extra_info", pa.string()),  # typed_json
        ("messages", pa.string()),  # typed_json
        ("text", pa.string()),
    ]
)


def _prompt(batch: pa.RecordBatch, row: int, name: str) -> Prompt:
    found = batch.slice(row, 1).to_pylist()[0]
    return Prompt(
        id=name,
        tokens=tuple(found["tokens"]),
        data_source=found["data_source"],
        ground_truth=found["ground_truth"],
        ability=found["ability"],
        extra_info=typed_json.loads(found["extra_info"]),
        messages=tuple(typed_json.loads(found["messages"])),
        text=found["text"],
    )


def _contents(batch: pa.RecordBatch) -> list[bytes]:
    """Returns Prompt.content of every row, without making prompts."""
    tokens = batch.column("tokens")
    edges = tokens.offsets.to_numpy()
    flat = tokens.values.to_numpy().astype(np.int64)
    return [
        f"{truth}\0{end - start}\0".encode() + flat[start:end].tobytes()
        for truth, start, end in zip(batch.column("ground_truth").to_pylist(), edges, edges[1:], strict=False)
    ]


PROMPT_FORM: Form[Prompt] = Form(PROMPT_COLUMNS, _prompt, _contents)


def prompt_reader(recipe: Recipe) -> Read[Prompt]:
    """Returns the reader of a recipe's prompts: each row must be of a source that a reward function is for."""

    def read(
        files: Sequence[DataFileConfig], tokenizer: PreTrainedTokenizerBase, held_out_set: str | None
    ) -> Mixture[Prompt]:
        reward = own_rewards(recipe).get(held_out_set or "", recipe.reward)
        held_out = None if held_out_set else [file for found in recipe.eval.files_of_sets().values() for file in found]
        return load_prompts(files, tokenizer, recipe.data, recipe.seed, reward.source_problem, held_out)

    return read


def load_prompts(
    files: Sequence[DataFileConfig],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    seed: int,
    source_problem: Callable[[str, str], Problem | None] = lambda *_: None,
    held_out: Sequence[DataFileConfig] | None = None,
) -> Mixture[Prompt]:
    """Loads the prompts of all entries, rendered and mixed. Amounts count prompts after others are dropped.

    The id of a prompt is `label:number`. source_problem returns the problem with a row's data_source, like
    RewardConfig.source_problem. held_out: the default entries that data.decontaminate compares with; None for prompts
    that are not trained on, which keep their duplicates and contaminated ones. Raises DataError with the problems of
    all files, ModelError if the template is not valid Jinja.
    """
    system = data.system_prompt

    def records(rows: list[Row], path: str, findings: Findings) -> Iterator[Column]:
        chats = [with_system_prompt(row.messages, system) for row in rows]
        texts = render(rows, chats, tokenizer, data.chat_template_arguments, path, findings)
        if findings.count:
            return
        for row, chat, text, ids in zip(rows, chats, texts, encode(tokenizer, texts), strict=True):
            if not ids:
                findings.add([Problem(f"{place(path, row.number)}: the chat template makes no tokens of it")])
                continue
            try:
                extra_info = typed_json.dumps(row.extra_info)
            except ValueError as error:
                findings.add([Problem(f"{place(path, row.number)}: its other columns", str(error), "fewer levels")])
                continue
            yield {
                "number": row.number,
                "tokens": np.array(ids, np.int32),
                "data_source": row.data_source,
                "ground_truth": row.ground_truth,
                "ability": row.ability,
                "extra_info": extra_info,
                "messages": typed_json.dumps(list(chat)),
                "text": text,
            }

    reader: Reader[Row, Prompt] = Reader(
        PROMPT_FORM,
        records,
        lambda record: {**record, "tokens": record["tokens"][-data.prompt_tokens_max :]},
        data.prompt_tokens_max,
        data.overlong_prompts,
        noun="prompt",
        tokens_field="data.prompt_tokens_max",
        truncate="truncate_left",
        cache=cache_of(data.cache),
        tokenizer=tokenizer,
        settings={"system_prompt": system, "arguments": data.chat_template_arguments},
    )

    def part_of(entry: DataFileConfig, path: str, label: str) -> Stored[Prompt]:
        stored = reader.read(path, label, prompt_schema(entry.columns), entry.columns.model_dump(mode="json"))
        if problems := list(_source_problems(stored, path, source_problem)):
            raise DataError(problems)
        return stored

    def marked(parts: Sequence[Stored[Prompt]]) -> list[Marks]:
        with progress("looking for duplicates and held-out prompts"):
            return _marked(parts, data, held_out or ())

    mark = None if held_out is None else marked
    return mix(files, part_of, seed=seed, mark=mark)


def _marked(parts: Sequence[Stored[Prompt]], data: DataConfig, held_out: Sequence[DataFileConfig]) -> list[Marks]:
    """Marks the duplicates in these parts, and the prompts that overlap with held-out ones."""
    none = [np.zeros(len(part), bool) for part in parts]
    duplicate, disagreeing, contaminated = none, none, none
    names: list[list[tuple[str, str]]] = [[] for _ in parts]
    if data.deduplicate:
        duplicate = repeated([digests(_texts(part)) for part in parts])
        with_truth = (map("\0".join, zip(_texts(part), _truths(part), strict=True)) for part in parts)
        again = repeated(list(map(digests, with_truth)))
        disagreeing = [twice & ~same for twice, same in zip(duplicate, again, strict=True)]
    dropped = duplicate
    if asked := data.decontaminate:
        places, questions = _questions(asked.against or held_out)
        known = overlap.held_out(questions, asked.ngram)
        matches = [np.array([known.match(question(chat)) for chat in _chats(part)], np.int64) for part in parts]
        contaminated = [match >= 0 for match in matches]
        names = [
            [(part.item(row).id, places[match[row]]) for row in np.flatnonzero(match >= 0)[:OVERLAPS_SHOWN].tolist()]
            for part, match in zip(parts, matches, strict=True)
        ]
        if asked.action == "drop":
            dropped = [twice | found for twice, found in zip(duplicate, contaminated, strict=True)]
    marks = zip(duplicate, disagreeing, contaminated, dropped, map(tuple, names), strict=True)
    return [Marks(*of_part) for of_part in marks]


def _chats(part: Stored[Prompt]) -> Iterator[list[dict[str, Any]]]:
    for batch in part.batches:
        yield from map(typed_json.loads, batch.column("messages").to_pylist())


def _texts(part: Stored[Prompt]) -> Iterator[str]:
    return ("\0".join(str(message["content"]) for message in chat) for chat in _chats(part))


def _truths(part: Stored[Prompt]) -> Iterator[str]:
    for batch in part.batches:
        yield from batch.column("ground_truth").to_pylist()


def _questions(entries: Sequence[DataFileConfig]) -> tuple[list[str], list[str]]:
    """Returns the place `label:number` of each prompt of these entries, and its text. Raises DataError."""
    paths = [(path, entry) for entry in entries for path in files_of(entry.location)]
    places: list[str] = []
    questions: list[str] = []
    for (path, entry), label in zip(paths, file_labels([path for path, _ in paths]), strict=True):
        for row in read(path, prompt_schema(entry.columns)):
            places.append(f"{label}:{row.number}")
            questions.append(question(row.messages))
    return places, questions


def with_system_prompt(messages: Sequence[Mapping[str, Any]], system: str | None) -> list[Mapping[str, Any]]:
    """Returns the messages, with this system message first unless they begin with their own."""
    own = system is None or messages[0]["role"] == "system"
    return list(messages) if own else [{"role": "system", "content": system}, *messages]


def cache_of(folder: str | None) -> Cache:
    """Returns the cache in the folder that a recipe's data.cache names, or in the default folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megagrpo"
    return Cache(Path(folder) if folder else default)


def _source_problems(
    stored: Stored[Prompt], path: str, problem_of: Callable[[str, str], Problem | None]
) -> Iterator[Problem]:
    """Yields the problems with the data sources of a file, each at its first row."""
    seen: set[str] = set()
    for batch in stored.batches:
        column = batch.column("data_source")
        for source in pc.unique(column).to_pylist():
            if source in seen:
                continue
            seen.add(source)
            number = batch.column("number")[pc.index(column, source).as_py()].as_py()
            if problem := problem_of(source, place(path, number)):
                yield problem


def render(
    rows: Sequence[Row],
    chats: list[list[Mapping[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    path: str,
    findings: Findings,
) -> list[str]:
    """Returns the rendered prompts of all rows. If the template refuses some, returns [] and adds them to findings."""

    def render_chats(conversation: Any) -> Any:
        return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **arguments)

    try:
        return list(render_chats(chats))
    except TemplateSyntaxError as error:
        raise template_error(error) from None
    except RENDER_ERRORS:
        for row, chat in zip(rows, chats, strict=True):
            try:
                render_chats(chat)
            except RENDER_ERRORS as error:
                findings.add([refusal(place(path, row.number), error, "prompt")])
        if not findings.count:
            raise
        return []


def template_error(error: TemplateSyntaxError) -> ModelError:
    given = f"line {error.lineno}: {error.message}"
    return ModelError(Problem("the chat template is not valid Jinja", given, fix="correct the template"))


def refusal(where: str, error: BaseException, column: str) -> Problem:
    """Returns the problem of a row for whose messages, in this column, the template raised `error`."""
    fix = f"correct the row's {column}, or the template"
    return Problem(f"{where}: the chat template refuses the messages", given=first_line(error), fix=fix)
