"""Rows to prompts: the tokenizer's chat template, then token ids, then the limit on length."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from megagrpo import typed_json
from megagrpo.algorithm.distillation import DistillationConfig
from megagrpo.data.assistant import Span, spans, tokens_of
from megagrpo.data.files import Findings, place
from megagrpo.data.locations import files_of, size_and_version
from megagrpo.data.mixture import OVERLAPS_SHOWN, AnyItem, Marked, Mixture, file_labels, mix
from megagrpo.data.overlap import HeldOut, digests, question, repeated
from megagrpo.data.rows import AnyRow, Row, SchemaOf, prompt_schema, read, reading, text_problems
from megagrpo.data.store import Cache, Column, Form, Stored, digest, store
from megagrpo.errors import DataError, ModelError, Problem, first_line
from megagrpo.progress import progress
from megagrpo.recipe.defaults import own_rewards
from megagrpo.recipe.schema import DataFileConfig, Recipe
from megagrpo.recipe.schema.data import DataConfig
from megagrpo.tokenizer import TEMPLATE_ERRORS, encode, identity
from megagrpo.types import Prompt

BATCH_ROWS = 1024
CACHED_BYTES = 2**22
"""Files of at least this size are looked for in the cache."""

Read = Callable[[Sequence[Any], PreTrainedTokenizerBase, str | None], Mixture[AnyItem]]
"""Reads entries of the data (EntryConfig) of a recipe: of one of its evaluation sets, or those to train on (None)."""

Text = TypeVar("Text")


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

        @functools.cache
        def key() -> str:  # rarely called: it reads the whole tokenizer
            settings = [self.tokens_max, self.overlong, self.noun, dict(self.settings), mapping]
            return digest([os.path.abspath(path), size, version, identity(self.tokenizer), settings])

        if size >= CACHED_BYTES and (cached := self.cache.find(key(), self.form, label)) is not None:
            return cached
        counts = {"rows": 0, "overlong": 0}
        findings = Findings(path)
        with reading(path, label, schema_of, findings) as rows:
            usable = self._usable(rows, path, findings, counts)
            stored = store(usable, self.form, label, self.cache, key, lambda: counts)
        if len(stored):
            return stored
        count = counts["rows"]
        given, fix = f"all {count} rows are longer than {self.tokens_max} tokens", f"raise {self.tokens_field}"
        if self.overlong == self.truncate:
            given = f"none of the {count} rows has a token of the assistant's within {self.tokens_max} tokens"
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


TEXTS = ("data_source", "ground_truth", "ability", "extra_info", "messages", "text")
"""Columns of texts; extra_info and messages are typed_json."""
PROMPT_COLUMNS = pa.schema(
    [("number", pa.int64()), *((name, pa.list_(pa.int32())) for name in ("tokens", "taught", "given"))]
    + [(name, pa.string()) for name in TEXTS]
)


def _prompt(batch: pa.RecordBatch, row: int, name: str) -> Prompt:
    record = batch.slice(row, 1).to_pylist()[0]
    record["extra_info"] = typed_json.loads(record["extra_info"])
    record["messages"] = tuple(typed_json.loads(record["messages"]))
    texts = {text: record[text] for text in TEXTS}
    tokens, taught, given = (tuple(record[ids]) for ids in ("tokens", "taught", "given"))
    return Prompt(id=name, tokens=tokens, taught=taught, given=given, **texts)


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
        held_out = None if held_out_set else [file for files in recipe.eval.files_of_sets().values() for file in files]
        teaching = None if held_out_set else recipe.algorithm.distillation
        return load_prompts(files, tokenizer, recipe.data, recipe.seed, reward.source_problem, held_out, teaching)

    return read


def load_prompts(
    files: Sequence[DataFileConfig],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    seed: int,
    source_problem: Callable[[str, str], Problem | None] = lambda *_: None,
    held_out: Sequence[DataFileConfig] | None = None,
    teaching: DistillationConfig | None = None,
) -> Mixture[Prompt]:
    """Loads the prompts of all entries, rendered and mixed. Amounts count prompts after others are dropped.

    The id of a prompt is `label:number`. source_problem returns the problem with a row's data_source, like
    RewardConfig.source_problem. held_out: the default entries that data.decontaminate compares with; None for prompts
    that are not trained on, which keep their duplicates and contaminated ones. With a system message of `teaching` they
    are rendered for teachers as well, and with its column they have given responses. Raises DataError with the problems
    of all files, ModelError if the template is not valid Jinja.
    """
    reader = _prompt_reader(tokenizer, data, teaching)

    def part_of(entry: DataFileConfig, path: str, label: str) -> Stored[Prompt]:
        stored = reader.read(path, label, prompt_schema(entry.columns), entry.columns.model_dump(mode="json"))
        if problems := list(_source_problems(stored, path, source_problem)):
            raise DataError(problems)
        return stored

    def marked(parts: Sequence[Stored[Prompt]]) -> list[Marked]:
        with progress("looking for duplicates and held-out prompts"):
            return _marked(parts, data, held_out or ())

    mark = None if held_out is None else marked
    return mix(files, part_of, seed=seed, mark=mark)


def _prompt_reader(
    tokenizer: PreTrainedTokenizerBase, data: DataConfig, teaching: DistillationConfig | None = None
) -> Reader[Row, Prompt]:
    """Returns the reader of prompts. teaching: renders them again, with its system message, and given responses."""
    system, arguments = data.system_prompt, data.chat_template_arguments
    column = teaching.given_responses.column if teaching and teaching.given_responses else None

    def rendered_twice(rows: list[Row], path: str, findings: Findings) -> list[list[int]]:
        """Returns the tokens that teachers read of each row; none if they read those of the policy."""
        if teaching is None or teaching.system is None:
            return [[] for _ in rows]
        merged = [replace(row, messages=with_merged_system(row.messages, system, teaching.system)) for row in rows]
        return encode(tokenizer, render(merged, None, tokenizer, arguments, path, findings))

    def records(rows: list[Row], path: str, findings: Findings) -> Iterator[Column]:
        texts = render(rows, system, tokenizer, arguments, path, findings)
        taught = rendered_twice(rows, path, findings) if texts else []
        responses = given_responses(rows, column, system, tokenizer, arguments, path, findings) if taught else []
        read = zip(rows, texts, encode(tokenizer, texts), taught, responses, strict=True) if responses else ()
        for row, text, ids, of_teacher, response in read:
            if teaching and len(of_teacher) > len(ids) + teaching.system_tokens_max:
                where, given = f"{place(path, row.number)}: the teachers' prompt", f"{len(of_teacher) - len(ids)} more"
                needed = f"at most {teaching.system_tokens_max} more tokens (algorithm.distillation.system_tokens_max)"
                findings.add([Problem(where, given, needed, "raise it")])
                continue
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
                "taught": np.array(of_teacher, np.int32),
                "given": response,
                "data_source": row.data_source,
                "ground_truth": row.ground_truth,
                "ability": row.ability,
                "extra_info": extra_info,
                "messages": typed_json.dumps(with_system_prompt(row.messages, system)),
                "text": text,
            }

    of_teachers = teaching and [teaching.system, teaching.system_tokens_max, column]
    return Reader(
        PROMPT_FORM,
        records,
        lambda record: {**record, "tokens": record["tokens"][-data.prompt_tokens_max :]},
        data.prompt_tokens_max,
        data.overlong_prompts,
        noun="prompt",
        tokens_field="data.prompt_tokens_max",
        truncate="truncate_left",
        cache=Cache(data.cache),
        tokenizer=tokenizer,
        settings={"system_prompt": system, "arguments": arguments, "taught": of_teachers},
    )


def _marked(parts: Sequence[Stored[Prompt]], data: DataConfig, held_out: Sequence[DataFileConfig]) -> list[Marked]:
    """Marks the duplicates in these parts, and the prompts that overlap with held-out ones."""
    dropped, faults = [np.zeros(len(part), bool) for part in parts], [dict[str, Any]() for _ in parts]
    if data.deduplicate:
        dropped = repeated([digests(_texts(part)) for part in parts])
        with_truth = (map("\0".join, zip(_texts(part), part.column("ground_truth"), strict=True)) for part in parts)
        again = repeated(list(map(digests, with_truth)))
        for of_part, twice, same in zip(faults, dropped, again, strict=True):
            of_part |= {"duplicates": int(twice.sum()), "disagreeing": int((twice & ~same).sum())}
    if check := data.decontaminate:
        places, questions = _questions(check.against or held_out)
        known = HeldOut(questions, check.ngram)
        for number, part in enumerate(parts):
            match = np.array([known.match(question(chat)) for chat in _chats(part)], np.int64)
            shown = np.flatnonzero(match >= 0)[:OVERLAPS_SHOWN].tolist()
            overlaps = tuple((part.item(row).id, places[match[row]]) for row in shown)
            faults[number] |= {"contaminated": int((match >= 0).sum()), "overlaps": overlaps}
            if check.action == "drop":
                dropped[number] = dropped[number] | (match >= 0)
    return list(zip(dropped, faults, strict=True))


def _chats(part: Stored[Prompt]) -> Iterator[list[dict[str, Any]]]:
    return map(typed_json.loads, part.column("messages"))


def _texts(part: Stored[Prompt]) -> Iterator[str]:
    return ("\0".join(str(message["content"]) for message in chat) for chat in _chats(part))


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
    unchanged = system is None or messages[0]["role"] == "system"
    return list(messages) if unchanged else [{"role": "system", "content": system}, *messages]


def with_merged_system(
    messages: Sequence[Mapping[str, Any]], system: str | None, before: str
) -> tuple[Mapping[str, Any], ...]:
    """Returns the messages with a system message that begins with `before`, and goes on with their own, if any."""
    first, *others = with_system_prompt(messages, system)
    if first["role"] != "system":
        return {"role": "system", "content": before}, first, *others
    return {**first, "content": f"{before}\n\n{first['content']}"}, *others


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
    system: str | None,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    path: str,
    findings: Findings,
) -> list[str]:
    """Returns the prompts of all rows as text, with a system message; [] if there are findings."""

    def text_of(row: Row) -> str:
        chat: Any = with_system_prompt(row.messages, system)
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **arguments))

    return rendered(rows, text_of, "prompt", path, findings)


def given_responses(
    rows: Sequence[Row],
    column: str | None,
    system: str | None,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    path: str,
    findings: Findings,
) -> list[np.ndarray]:
    """Returns the tokens of the responses that rows have in a column, none of rows without; [] if there are findings,
    such as responses that are no texts."""

    def spans_of(row: Row) -> list[Span]:
        if column is None or (text := row.extra_info.get(column)) is None:
            return []
        at = f"{place(path, row.number)}, {column}"
        if problems := text_problems(text, at):
            raise DataError(problems)
        chat = [*with_system_prompt(row.messages, system), {"role": "assistant", "content": text}]
        return [*spans(chat, at, tokenizer, arguments, first=len(chat) - 1)][-1:]

    whole = rendered(rows, spans_of, column or "", path, findings)
    return [tokens[mask] for tokens, mask in tokens_of(whole, tokenizer)]


def rendered(
    rows: Sequence[Any], render_row: Callable[[Any], Text], column: str, path: str, findings: Findings
) -> list[Text]:
    """Renders all rows; returns [] if there are findings, to which it adds each row that the chat template refuses."""
    texts = []
    for row in rows:
        try:
            texts.append(render_row(row))
        except TemplateSyntaxError as error:
            given = f"line {error.lineno}: {error.message}"
            raise ModelError(
                Problem("the chat template is not valid Jinja", given, fix="correct the template")
            ) from None
        except TEMPLATE_ERRORS as error:
            where, fix = place(path, row.number), f"correct the row's {column}, or the template"
            where = f"{where}: the chat template refuses the messages"
            findings.add([Problem(where, given=first_line(error), fix=fix)])
        except DataError as error:
            findings.add(error.problems)
    return [] if findings.count else texts
