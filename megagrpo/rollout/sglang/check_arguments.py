"""Checks the arguments on standard input against the ServerArgs of the installed SGLang.

Standard input is a JSON object: `options`, and `names_only`, to check no values. Run by the interpreter that has
SGLang, which need not have megagrpo. Prints one line of JSON: `environment`, what is wrong with the environment itself,
and what is `needed`; or `problems`, each with where (an option), given, needed and fix.
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

OLDEST_SGLANG = "0.5.23"
OLDEST_PYTHON = (3, 11)


def main() -> None:
    settings = json.load(sys.stdin)
    options = settings["options"]
    environment, needed = environment_problem()
    problems: list[dict[str, str]] = []
    if options and not environment:
        names = declared_names() if settings["names_only"] else set()
        problems = name_problems(options, names) if names else option_problems(options)
    print(json.dumps({"environment": environment, "needed": needed, "problems": problems}))


def environment_problem() -> tuple[str, str]:
    """Returns what is given and what is needed; empty strings if all is well."""
    if sys.version_info < OLDEST_PYTHON:
        return f"{sys.executable} is Python {sys.version.split()[0]}", "Python 3.11 or later"
    if importlib.util.find_spec("sglang") is None:
        return f"{sys.executable} has no SGLang", "the package sglang"
    from packaging.version import Version

    installed = importlib.metadata.version("sglang")
    if Version(installed) < Version(OLDEST_SGLANG):
        return f"SGLang {installed} in {sys.prefix}", f"SGLang {OLDEST_SGLANG} or later"
    return "", ""


def declared_names() -> set[str]:
    """Reads the fields of ServerArgs from SGLang's source, because its import takes seconds. Returns an empty set if
    they are not where 0.5.23 has them."""
    spec = importlib.util.find_spec("sglang")
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for place in places for file in Path(place, "srt", "arg_groups", "fields").glob("*.py")]
    classes = [
        node
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    return {
        field.target.id
        for group in classes
        for field in group.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
    }


def name_problems(options: dict[str, Any], known: set[str]) -> list[dict[str, str]]:
    problems = []
    for name in (name for name in options if name not in known):
        nearest = difflib.get_close_matches(name, known, n=1)
        problems.append(
            {
                "where": name,
                "given": repr(options[name]),
                "needed": "an argument of sglang.launch_server, with underscores",
                "fix": f"did you mean `{nearest[0]}`?" if nearest else "remove it",
            }
        )
    return problems


def option_problems(options: dict[str, Any]) -> list[dict[str, str]]:
    from typing import get_type_hints

    from pydantic import ConfigDict, TypeAdapter, ValidationError
    from sglang.srt.arg_groups.arg_utils import Arg, record_fields
    from sglang.srt.server_args import ServerArgs

    known = {field.name for field in record_fields(ServerArgs) if not field.name.startswith("_")}
    hints, annotated = get_type_hints(ServerArgs), get_type_hints(ServerArgs, include_extras=True)
    problems = name_problems(options, known)
    for name in (name for name in options if name in known):
        hint, value = hints[name], options[name]
        problem = {"where": name, "given": repr(value)}
        try:
            TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
        except ValidationError as error:
            reasons = sorted({str(detail["msg"]) for detail in error.errors()})
            written = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            problems.append({**problem, "needed": f"{written}: {'; '.join(reasons)}", "fix": ""})
            continue
        metadata = [item for item in getattr(annotated[name], "__metadata__", ()) if isinstance(item, Arg)]
        choices = metadata[0].choices if metadata else None
        if choices and value is not None and not isinstance(value, list) and value not in choices:
            problems.append({**problem, "needed": f"one of {', '.join(map(str, choices))}", "fix": ""})
    return problems


if __name__ == "__main__":
    main()
