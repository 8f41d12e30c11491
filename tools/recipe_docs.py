"""The references of a recipe's fields, docs/reference/, and the JSON schemas by which editors complete and check them.

`python -m tools.recipe_docs` writes them. A section that several fields have is described where it comes first, but
the policy's layout in train.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megagrpo.plan.advice import IMPOSSIBLE, START_RULES, UNWISE
from megagrpo.recipe.model_rules import MODEL_RULES
from megagrpo.recipe.problems import Expected
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe
from megagrpo.recipe.schema.train import LayoutConfig
from megagrpo.section import FILE_AND_FUNCTION, rule_texts

REPOSITORY = Path(__file__).resolve().parents[1]
YAML_RECIPES = REPOSITORY / "yaml_recipes"
PAGES: dict[type[AnyRecipe], Path] = {
    Recipe: REPOSITORY / "docs" / "reference" / "recipe.md",
    SftRecipe: REPOSITORY / "docs" / "reference" / "sft.md",
}
SCHEMAS: dict[type[AnyRecipe], Path] = {
    Recipe: YAML_RECIPES / "recipe.schema.json",
    SftRecipe: YAML_RECIPES / "sft.schema.json",
}
TITLES: dict[type[AnyRecipe], tuple[str, str]] = {
    Recipe: ("Fields of a recipe", "For `megagrpo train`. [Recipes](../recipes.md) says how they are written."),
    SftRecipe: (
        "Fields of a recipe of kind sft",
        "For [`megagrpo sft`](../sft.md). Recipes for `megagrpo train` have [other fields](recipe.md).",
    ),
}
RULES_BEGINNING = (
    "`megagrpo plan` and `megagrpo train` check these rules, all at once. A broken one is printed with",
    "the field, what was given, what is needed, and a fix. Names in capitals stand for values. Rules of one field, its",
    "type and its bounds, are with [the fields](recipe.md). The last tables are of rules of a plan: what its machines",
    "cannot run, and settings that `megagrpo plan` calls unwise. Made from the code by `python -m tools.recipe_docs`.",
)
ITEM, NAME = "[]", ".NAME"
"""Suffixes of the path of a list's item, and of a mapping's value."""
UNBOUNDED = re.compile(r" (and )?of at (most|least) (-?1000000000(\.0)?|9223372036854775807)\b")
"""Bounds that no value reaches."""


def json_schema(recipe_class: type[AnyRecipe]) -> str:
    """Returns the schema's text, JSON Schema draft 2020-12."""
    described = recipe_class.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **described, "title": "megagrpo recipe"}
    return json.dumps(schema, indent=2) + "\n"


def first_line(recipe_class: type[AnyRecipe]) -> str:
    """Returns the line with which a recipe beside the schema names it."""
    return f"# yaml-language-server: $schema={SCHEMAS[recipe_class].name}"


def reference(recipe_class: type[AnyRecipe]) -> str:
    """Returns the page in Markdown: each field with its path as its anchor, then type, default and meaning."""
    title, beginning = TITLES[recipe_class]
    return "\n".join(
        [
            f"# {title}",
            "",
            f"{beginning} Every field with its type, its default and its meaning, in the order in which",
            "data flows. On the command line a field is set by its path: `train.layout.tensor=4`; items of lists are",
            "counted from 0. Made from the code by `python -m tools.recipe_docs`.",
            "",
            *_Page(recipe_class).lines(recipe_class),
        ]
    )


def rules() -> str:
    """Returns the page of all rules in Markdown: a table for each of a recipe's sections, one of kind sft, and those of
    the checks that look beyond the recipe."""
    places: dict[tuple[str, str], str] = {}  # the title of each rule at each place
    for kind in PAGES:
        for section, path in _Page(kind).sections().items():
            for name in getattr(section, "RULES", {}):
                where = f"{path}.{rule_texts()[name].where}" if path else rule_texts()[name].where
                first = re.split(r"\W", where)[0] if kind is Recipe else "kind: sft"
                places.setdefault((name, where), f"`{first}`" if first else "Several sections")
    plans = {"cannot run": {**IMPOSSIBLE, **START_RULES}, **UNWISE}
    of_plans = {name: f"Plan: {title}" for title, of_title in plans.items() for name in of_title}
    of_sections = {name for name, _ in places}
    for name in (name for name in rule_texts() if name not in of_sections):
        title = "A recipe and its model" if name in MODEL_RULES else of_plans.get(name, "Before a run")
        places[name, rule_texts()[name].where] = title
    tables: dict[str, list[str]] = {}
    for name, where in places:
        text = rule_texts()[name]
        parts = (_text(_filled(part)) for part in (text.given, text.needed, text.fix))
        tables.setdefault(places[name, where], []).append(f"| {' | '.join((f'`{_filled(where)}`', *parts))} |")
    lines = ["# Rules of a recipe", "", *RULES_BEGINNING]
    for title, rows in tables.items():
        lines += ["", f"## {title}", "", "| field | given | needed | fix |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _filled(template: str) -> str:
    """Returns the template of a problem with a name in capitals for each value."""
    value = r"(?<!\{)\{([\w.]+?)(\[\d\])?(:[^{}]*)?\}"
    shown = re.sub(value, lambda found: found[1].rpartition(".")[2].upper(), template)
    return shown.replace("{{", "{").replace("}}", "}")


class _Page:
    def __init__(self, recipe_class: type[AnyRecipe]) -> None:
        self.places: dict[type[BaseModel], str] = {recipe_class: "", LayoutConfig: "train.layout"}
        """The path at which each section is described."""
        self.anchors: set[str] = set()

    def sections(self) -> dict[type[BaseModel], str]:
        """Returns the path of every section."""
        whole, _ = self.places
        for _ in self.lines(whole):
            pass
        return self.places

    def lines(self, section: type[BaseModel]) -> Iterator[str]:
        yield from self._fields(section, "")
        for name in section.model_fields:
            yield from self._below(name, Expected(section).below(name), level=2)

    def _fields(self, section: type[BaseModel], path: str, chosen_by: str = "") -> Iterator[str]:
        """Yields a list of the fields, except one that chose the section and has one value."""
        for name, info in section.model_fields.items():
            at = f"{path}.{name}" if path else name
            expected = Expected(info.annotation, tuple(info.metadata))
            if name == chosen_by and len(get_args(info.annotation)) == 1:
                continue
            facts = [_type(at, expected), _default(info)]
            yield f"- {self._anchor(at, expected)}**`{at}`** · {' · '.join(filter(None, facts))}"
            if info.description:
                yield f"  <br>{_text(info.description)}"
        yield ""

    def _anchor(self, path: str, expected: Expected) -> str:
        """Returns the anchor of the first field with a path; "" for later ones, or if its heading has that name."""
        if path in self.anchors or (_slug(path) == path and list(_sections(expected))):
            return ""
        self.anchors.add(path)
        return f'<a id="{path}"></a>'

    def _below(self, path: str, expected: Expected | None, level: int) -> Iterator[str]:
        """Yields the sections at a path, each with a heading, and those inside them."""
        if expected is None:
            return
        for suffix, part in _sections(expected):
            at = path + suffix
            members = part.choice[1] if part.choice else {}
            if not members:
                (section,) = _models(part)
                yield from self._section(at, section, f"{'#' * level} `{at}`", min(level + 1, 3))
                continue
            yield from (f"{'#' * level} `{at}`", "")
            key = part.choice[0].key if part.choice else ""
            yield from (f"One of {len(members)}, chosen by `{key}`; a name alone is that one with its defaults.", "")
            for name, section in members.items():
                heading = f"{'#' * (level + 1)} `{at}`: `{name}`"
                yield from self._section(at, section, heading, level + 1, chosen_by=key)

    def _section(
        self, path: str, section: type[BaseModel], heading: str, level: int, chosen_by: str = ""
    ) -> Iterator[str]:
        yield from (heading, "")
        if (first := self.places.get(section, path)) != path:
            yield from (f"The fields of [`{first}`](#{_slug(first)}).", "")
            return
        self.places[section] = path
        yield from (paragraph for each in _paragraphs(section) for paragraph in (each, ""))
        yield from self._fields(section, path, chosen_by)
        for name in section.model_fields:
            yield from self._below(f"{path}.{name}", Expected(section).below(name), level)


def _sections(expected: Expected) -> Iterator[tuple[str, Expected]]:
    """Yields (suffix of a path, type) for the section, or the choice of sections, in a type."""
    if expected.choice or _models(expected):
        yield "", expected
    elif expected.is_list and (item := expected.below("0")):
        yield from ((ITEM + suffix, part) for suffix, part in _sections(item))
    elif any(get_origin(kind) is dict for kind in expected.alternatives) and (value := expected.below("NAME")):
        yield from ((NAME + suffix, part) for suffix, part in _sections(value))


def _models(expected: Expected) -> list[type[BaseModel]]:
    return [a for a in expected.alternatives if isinstance(a, type) and issubclass(a, BaseModel)]


def _type(path: str, expected: Expected) -> str:
    """Returns the type in words; a section is a link to its description."""
    sections = list(_sections(expected))
    if not sections:
        return _plain(expected)
    suffix, section = sections[0]
    anchor = f"#{_slug(path + suffix)}"
    if section.choice:
        kinds = [f"one of {', '.join(f'`{name}`' for name in section.choice[1])} ([each]({anchor}))"]
    else:
        plain = [a for a in section.alternatives if a is not type(None) and a not in _models(section)]
        kinds = [*(_plain(Expected(a)) for a in plain), f"a [section]({anchor})"]
    kind = " or ".join(kinds)
    for end, words in ((ITEM, "a list, each "), (NAME, "by name, each ")):
        if suffix.endswith(end):
            kind, suffix = words + kind, suffix.removesuffix(end)
    return kind + (" or null" if type(None) in expected.alternatives else "")


def _plain(expected: Expected) -> str:
    """Returns the type and bounds of a value that is no section."""
    words = _text(expected.words())
    for each in expected.alternatives:
        if get_origin(each) is Literal:
            values = list(map(str, get_args(each)))
            allowed = values[0] if len(values) == 1 else f"one of {', '.join(values)}"
            words = words.replace(_text(allowed), ", ".join(f"`{value}`" for value in values))
    words = UNBOUNDED.sub("", words)
    words = re.sub(r"of at least (\S+) and of at most (\S+)", r"from \1 to \2", words)
    return re.sub(r"\b\d{5,}\b", lambda number: f"{int(number[0]):,}", words)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        name = next((getattr(value, key) for key in ("name", "kind", "level") if key in type(value).model_fields), None)
        return f"default `{name}`" if name else ""
    return f"default `{json.dumps(value, ensure_ascii=False)}`".replace('`"', "`").replace('"`', "`")


def _paragraphs(section: type[BaseModel]) -> list[str]:
    return [_text(" ".join(text.split())) for text in inspect.cleandoc(section.__doc__ or "").split("\n\n") if text]


def _text(words: str) -> str:
    """Returns a docstring as Markdown: pages that it names become links; text in backquotes stays as it is."""
    words = " ".join(words.split()).replace(FILE_AND_FUNCTION, "FILE.py:FUNCTION")
    parts = words.split("`")
    parts[::2] = (re.sub(r"[\\*|[]", r"\\\g<0>", part).replace("<", "&lt;") for part in parts[::2])
    return re.sub(r"docs/(\w+)\.md", r"[\1](../\1.md)", "`".join(parts))


def _slug(path: str) -> str:
    """Returns the anchor of the path's heading, as GitHub and the site make it."""
    return re.sub(r"[^\w-]", "", path).lower()


def written() -> dict[Path, str]:
    """Returns the text of every file that is made from the recipes' classes."""
    pages = {path: reference(kind) for kind, path in PAGES.items()}
    schemas = {path: json_schema(kind) for kind, path in SCHEMAS.items()}
    return pages | schemas | {REPOSITORY / "docs" / "reference" / "rules.md": rules()}


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
        print(path)
