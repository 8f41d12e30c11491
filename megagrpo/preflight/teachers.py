"""Teachers before a run: their models, tokenizers that agree with the policy's id by id, and rows that have one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megagrpo.data.files import Findings, place
from megagrpo.data.locations import files_of, is_remote
from megagrpo.data.rows import prompt_schema, quick_look, sources_with, stream, text_problems
from megagrpo.errors import ModelError, Problem, brief, first_line
from megagrpo.preflight.model import (
    PROBLEMS_OF_A_PART,
    TOKENIZER_FILES,
    attempt,
    cached_directory,
    directory_on_ranks,
    has_tokenizer,
    local_directory,
)
from megagrpo.recipe.model_rules import frozen_problems
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.data import ColumnsConfig
from megagrpo.recipe.schema.teachers import ExternalTeacherConfig, RanksTeacherConfig, ServedTeacherConfig
from megagrpo.section import problem
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.reading import read_json


@dataclass
class CheckedTeachers:
    """The results of a check. `directories`: of teachers on the ranks, by name."""

    directories: dict[str, Path] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def check_teachers(
    recipe: Recipe, tokenizer: Path | None, beside: Mapping[str, Path], absent: Collection[str], plan_only: bool
) -> CheckedTeachers:
    """Checks all teachers. tokenizer: the policy's directory; None if it is not here. beside: directories of
    models_beside. absent: data that may be on the cluster."""
    checked = CheckedTeachers()
    for name, teacher in recipe.teachers.items():
        directory: Path | None = None
        if isinstance(teacher, RanksTeacherConfig):
            directory = attempt(checked.problems, directory_on_ranks, teacher.path, f"teachers.{name}.path", plan_only)
            if directory:
                checked.directories[name] = directory
                checked.problems += attempt(checked.problems, _on_ranks, recipe, name, directory) or []
        elif isinstance(teacher, ServedTeacherConfig):
            directory = beside.get(f"teachers.{name}")
            if directory:
                checked.problems += attempt(checked.problems, _on_server, recipe, name, teacher, directory) or []
            elif plan_only:
                directory = cached_directory(teacher.path)
        elif isinstance(teacher, ExternalTeacherConfig):
            of_hub = plan_only and not Path(teacher.tokenizer).is_dir()
            given = teacher.tokenizer, None, TOKENIZER_FILES, f"teachers.{name}.tokenizer"
            directory = cached_directory(given[0]) if of_hub else attempt(checked.problems, local_directory, *given)
        else:
            continue
        if tokenizer and directory and (has_tokenizer(directory) or not plan_only):
            checked.problems += attempt(checked.problems, _other_tokens, name, tokenizer, directory) or []
        else:
            checked.unchecked.append(f"the tokenizer of teachers.{name}, for want of its files or the policy's")
    checked.problems += attempt(checked.problems, lambda: [*_row_problems(recipe, absent)]) or []
    return checked


def _on_ranks(recipe: Recipe, name: str, directory: Path) -> list[Problem]:
    """Returns the problems of a model in its layout. Raises ModelError if it cannot be read."""
    more = ", or algorithm.distillation.system_tokens_max" if recipe.teachers_read_more else ""
    own = f"teachers.{name}.layout" if getattr(recipe.teachers[name], "layout", None) else "train.layout"
    return [
        replace(
            fault,
            where=fault.where.replace("train.layout", own),
            given=f"{fault.given} (teachers.{name}'s)",
            fix=fault.fix + more * ("_tokens_" in fault.where),
        )
        for fault in frozen_problems(recipe, name, read_architecture(directory))
    ]


def _on_server(recipe: Recipe, name: str, teacher: ServedTeacherConfig, directory: Path) -> Iterator[Problem]:
    """Yields the problems of a model that an engine serves. Raises ModelError if it cannot be read."""
    yield from teacher.settings.engine_kind.model_problems(directory)
    positions = _sizes(directory).get("max_position_embeddings")
    if isinstance(positions, int) and positions < recipe.taught_tokens_max:
        yield problem("sequence_beyond_a_teacher", recipe=recipe, name=name, positions=positions)


def _sizes(directory: Path) -> dict[str, Any]:
    """Returns the sizes of a language model, which may be beside a tower. Raises ModelError."""
    config = read_json(directory / "config.json")
    return config.get("text_config") or config


# --- tokenizers -------------------------------------------------------------------------------------------------------


def _other_tokens(name: str, ours: Path, theirs: Path) -> Iterator[Problem]:
    """Yields a problem with the first id that is another token to the teacher, or with one for which it has no weights.
    Raises ModelError."""
    if not has_tokenizer(theirs):
        yield problem("teacher_without_tokenizer", name=name, directory=theirs)
        return
    policy, teacher = tokens_by_id(ours), tokens_by_id(theirs)
    if policy != teacher:
        first, _ = min(policy.items() ^ teacher.items())
        given, needed = (brief(found[first]) if first in found else "no token" for found in (teacher, policy))
        of_pair = {"name": name, "first": first, "given": given, "needed": needed, "ours": ours, "theirs": theirs}
        yield problem("token_of_a_teacher", **of_pair)
        return
    vocab, last = _sizes(theirs).get("vocab_size") if (theirs / "config.json").is_file() else None, max(teacher)
    if isinstance(vocab, int) and vocab <= last:
        yield problem("token_beyond_a_teacher", name=name, vocab=vocab, last=last, token=brief(teacher[last]))


def tokens_by_id(directory: Path) -> dict[int, str]:
    """Returns all tokens of a tokenizer, added and special ones included. Raises ModelError if it cannot be read.

    Reads tokenizer.json as JSON: its own library takes four times as long for 150,000 tokens.
    """
    path, config = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if not path.is_file():
        from megagrpo.tokenizer import load_tokenizer  # imports transformers, which takes seconds

        return {number: token for token, number in load_tokenizer(directory).get_vocab().items()}
    read, more = read_json(path), read_json(config) if config.is_file() else {}
    try:
        listed = read["model"]["vocab"]  # Unigram's is a list
        pairs = (
            enumerate(row[0] for row in listed) if isinstance(listed, list) else ((listed[one], one) for one in listed)
        )
        tokens = {int(number): str(token) for number, token in pairs}
        tokens |= {int(added["id"]): str(added["content"]) for added in read.get("added_tokens") or ()}
        decoder = (more.get("added_tokens_decoder") or {}).items()
        return tokens | {int(number): str(added["content"]) for number, added in decoder}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ModelError(problem("unreadable_tokenizer", path=path, reason=first_line(error))) from None


# --- rows -------------------------------------------------------------------------------------------------------------


def _row_problems(recipe: Recipe, absent: Collection[str]) -> Iterator[Problem]:
    """Yields problems of the columns with teachers' names and with given responses, and a problem if no row has one.
    Raises DataError."""
    distillation = recipe.algorithm.distillation
    if distillation is None:
        return
    paths, all_here = list[tuple[str, ColumnsConfig]](), True
    for file in recipe.data.train:
        here = [] if not file.location or file.location in absent else files_of(file.location)
        # Others are remote, or their problems are the data's.
        read = [path for path in here if not is_remote(path) and not quick_look(path, prompt_schema(file.columns))]
        paths += ((path, file.columns) for path in read)
        all_here = all_here and bool(here) and len(read) == len(here)
    if distillation.given_responses is not None:
        yield from _response_problems(distillation.given_responses.column, paths, all_here)
    if not (distillation.by_source or distillation.column):
        return
    problems: list[Problem] = []
    sources, names = dict[str, None](), set[str | None]()
    for path, mapping in paths:
        for number, source, value in sources_with(path, mapping, distillation.column):
            sources[source] = None
            try:
                names.add(recipe.teacher_of(source, {distillation.column or "": value}))
            except ValueError:
                where = f"{place(path, number)}, {distillation.column}"
                problems.append(problem("teacher_of_a_row", where=where, name=brief(value), known=[*recipe.teachers]))
    yield from problems[:PROBLEMS_OF_A_PART]
    if all_here and names == {None} and not problems:
        yield problem("no_row_with_a_teacher", sources=[*sources])


def _response_problems(column: str, paths: Sequence[tuple[str, ColumnsConfig]], all_here: bool) -> Iterator[Problem]:
    """Yields the problem of the first row with a given response that is no text, or that no row has one."""
    for path, mapping in paths:
        for row in stream(path, prompt_schema(mapping), Findings(path)):
            if (text := row.extra_info.get(column)) is not None:
                yield from text_problems(text, f"{place(path, row.number)}, {column}")
                return
    if all_here:
        yield problem("no_row_with_a_response", column=column)
