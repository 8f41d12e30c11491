"""A recipe from a file of another framework: read, translated, written as YAML with comments, checked by itself, and a
report of what became of each option."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pydantic

from megagrpo.errors import Problem
from megagrpo.importing import open_instruct, slime, trl, verl
from megagrpo.importing.options import (
    Given,
    NotKnownError,
    command_line,
    flags,
    hydra_overrides,
    unknown_in,
    value_of,
    yaml_options,
)
from megagrpo.importing.rows import Kind
from megagrpo.importing.shell_words import UNKNOWN
from megagrpo.importing.translate import Field, Framework, Outcome, Translation, translate
from megagrpo.recipe.problems import schema_problems
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.yaml12 import to_text
from megagrpo.section import broken_rules, tree_of

SCRIPT_SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm")
FRAMEWORKS: dict[str, Framework] = {
    "verl": Framework(
        "verl", "verl", r"(.*/)?main_(ppo|dapo)\.py|.*\.main_(ppo|dapo)", "python3 -m verl.trainer.main_ppo ...",
        hydra_overrides, verl, {"": yaml_options},
    ),
    "open_instruct": Framework(
        "open_instruct", "open-instruct", r"(.*/)?grpo(_fast)?\.py|.*\.grpo(_fast)?",
        "python open_instruct/grpo_fast.py ...", flags, open_instruct, negates=True,
    ),
    "slime": Framework("slime", "slime", r"(.*/)?train(_async)?\.py", "python3 train.py ...", flags, slime),
    "trl": Framework(
        "trl", "TRL", r"grpo|(.*/)?grpo(_trainer)?\.py", "trl grpo ...", flags, trl,
        {".py": trl.python_options, "": yaml_options},
    ),
}  # fmt: skip
COMMENT_AT, WIDTH = 44, 120
SECRET = re.compile(r"(api_key|wandb_key|password|secret|auth_token|hf_token)$")
TITLES: dict[Kind, str] = {
    "missing": "No counterpart",
    "unknown": "Not known",
    "same": "Nothing to write: so it is here by default, or it has no effect",
    "translated": "Translated",
}


@dataclass(frozen=True)
class Imported:
    """A recipe made from another framework's file. problems: of the recipe by itself."""

    translation: Translation
    text: str
    problems: Sequence[Problem]


def import_recipe(framework: str, path: Path, set_to: Mapping[str, str], environment: Mapping[str, str]) -> Imported:
    """Translates a file. set_to: values of a script's variables, or of options by their names. Raises RecipeError if
    the file cannot be read, or has nothing of that framework."""
    peer, notes, given = FRAMEWORKS[framework], list[str](), dict[str, Given]()
    suffix = path.suffix if path.suffix in peer.files else ""
    if path.suffix not in SCRIPT_SUFFIXES and suffix in peer.files:
        given = peer.files[suffix](path)
    else:
        words, notes = command_line(path, peer.program, set_to, environment, peer.command)
        for name, option in peer.words(words).items():
            switch = name.removeprefix("no_")
            off = peer.negates and name not in peer.table and switch in peer.table
            given |= {switch: Given(switch, False, option.line)} if off else {name: option}
    given |= {name: Given(name, value_of(value), 0) for name, value in set_to.items() if peer.row(name)}
    translation = translate(peer, path, given, notes)
    problems = recipe_problems(translation)
    return Imported(translation, recipe_text(translation, problems), problems)


# --- the recipe's text ------------------------------------------------------------------------------------------------


def recipe_text(translation: Translation, problems: Sequence[Problem]) -> str:
    """Returns YAML: the fields, each with its source; below them, options that have not been translated."""
    source, title = translation.path.name, translation.framework.title
    lines = [
        "# yaml-language-server: $schema=recipe.schema.json",
        "#",
        f"# From {source}, a configuration of {title}. Behind each field is the option that it comes from.",
    ]
    parts = [(f"{one.where}: {one.given}", one.needed and f"needed: {one.needed}", one.fix) for one in problems]
    lines += _comment("It does not run before these are correct:", ["; ".join(filter(None, part)) for part in parts])
    lines += _comment("Read this first:", translation.notes)
    lines += _mapping(tree_of({field.path: field for field in translation.fields}), 0)
    for kind in ("missing", "unknown"):
        listed = [f"{option_text(one)}: {one.why}" for one in translation.of_kind(kind)]
        lines += ["", *_comment(f"{TITLES[kind]}:", listed)[1:]] if listed else []
    return "\n".join(lines).rstrip("\n") + "\n"


def recipe_problems(translation: Translation) -> list[Problem]:
    """Returns problems of the recipe by itself, without model and data, each with the options that it comes from."""
    tree = tree_of({field.path: field.value for field in translation.fields})
    try:
        problems = broken_rules(Recipe.model_validate(tree))
    except pydantic.ValidationError as error:
        problems = schema_problems(tree, error.errors(), Recipe)
    return [replace(problem, where=f"{problem.where}{_origin(problem.where, translation)}") for problem in problems]


def _origin(path: str, translation: Translation) -> str:
    """Returns the options that give a field, or those that would if their values were known."""

    def among(other: str) -> bool:
        return other != "" and f"{path}.".startswith(f"{other}.")

    sources = [field.source for field in translation.fields if among(field.path) or field.path.startswith(f"{path}.")]
    unknown = translation.of_kind("missing", "unknown")
    rows = [(option_text(one), translation.framework.row(one.option)) for one in unknown]
    sources = sources or [name for name, row in rows if row and among(row.fields)]
    return f", from {', '.join(dict.fromkeys(sources))}" if sources else ""


def report(translation: Translation) -> str:
    """Returns the report of the options' outcomes, for a terminal."""
    counts = {kind: len(translation.of_kind(kind)) for kind in TITLES}
    path = translation.path
    lines = [
        f"{len(translation.outcomes)} options of {path}: {counts['translated']} translated, {counts['same']} with "
        f"nothing to write, {counts['missing']} without counterpart, {counts['unknown']} not known"
    ]
    for kind in ("missing", "unknown", "same"):
        of_kind = translation.of_kind(kind)
        if of_kind:
            lines += ["", f"{TITLES[kind]}:"]
        for one in of_kind:
            text = f"{path.name}:{one.line} {option_text(one)}: {one.why}"
            lines.append(
                textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
            )
    if translation.notes:
        notes = [textwrap.fill(note, WIDTH - 2, break_on_hyphens=False) for note in translation.notes]
        lines += ["", "Read this:", *(textwrap.indent(note, "  ") for note in notes)]
    return "\n".join(lines)


def option_text(outcome: Outcome) -> str:
    """Returns OPTION=VALUE, without values of apparent secrets; of an array from another file, the name alone."""
    if UNKNOWN in outcome.option:
        return outcome.option.replace(UNKNOWN, "")
    value = "..." if SECRET.search(outcome.option.lower()) else outcome.value
    text = str(value).replace(UNKNOWN, "").replace("\n", " ")
    return f"{outcome.option}={text if len(text) <= 60 else text[:57] + '...'}"


def _comment(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    lines = ["#", f"# {title}"]
    for item in items:
        text = " ".join(item.replace(UNKNOWN, "").split())
        wrapped = textwrap.wrap(
            text, WIDTH - 4, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        lines += [f"#   {line}" for line in wrapped]
    return lines


def _mapping(tree: dict[str, Any], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for key, value in tree.items():
        name = to_text({key: None}).partition(":")[0] if not key.isidentifier() else key
        if isinstance(value, Field):
            yield from _field(f"{indent}{name}:", value, depth)
        else:
            if depth == 0:
                yield ""
            yield f"{indent}{name}:"
            yield from _mapping(value, depth + 1)


def _field(start: str, field: Field, depth: int) -> Iterator[str]:
    if unknown_in(field.value):
        raise NotKnownError(f"{field.path} from {field.source}")
    value, below = field.value, ""
    if value and (isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, dict) for one in value))):
        text, below = "", textwrap.indent(to_text(value), "  " * (depth + 1)).rstrip("\n")
    elif isinstance(value, list):
        text = f" [{', '.join(to_text([item]).removeprefix('- ').strip() for item in value)}]"
    else:
        text = " {}" if value == {} else f" {to_text({'x': value}).removeprefix('x: ').rstrip()}"
    yield f"{start}{text}".ljust(COMMENT_AT - 1) + f" # {field.source}"
    if below:
        yield below
