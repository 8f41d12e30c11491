"""`megagrpo import`: another framework's configuration as a recipe."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megagrpo.commands.arguments import add_command
from megagrpo.errors import Problem, RecipeError

KNOWN_VARIABLES = ("HOME", "USER", "PWD")
"""Variables of this machine that scripts may use. Others may be secrets, or another machine's."""


def add_import(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "make a recipe from a configuration of another framework, and list what has no counterpart; runs nothing"
    added = add_command(commands, "import", text, import_)
    added.add_argument("framework", choices=("verl", "open_instruct", "slime", "trl"), help="what it is for")
    text = (
        "a shell script that starts training, or a YAML file (verl, trl), or a Python file with GRPOConfig(...) (trl)"
    )
    added.add_argument("source", type=Path, metavar="FILE", help=text)
    added.add_argument("-o", "--output", type=Path, metavar="RECIPE", help="write it here; default: print it")
    added.add_argument("--overwrite", action="store_true", help="replace an existing file")
    text = "value of an option, or of a variable that a script takes from elsewhere; repeatable"
    added.add_argument("--set", action="append", default=[], type=_variable, metavar="NAME=VALUE", help=text)


def import_(asked: argparse.Namespace) -> int:
    from megagrpo.importing.read import import_recipe
    from megagrpo.importing.recipe_text import report

    output: Path | None = asked.output
    if output and output.exists() and not asked.overwrite:
        raise RecipeError(Problem(str(output), "it exists", "a new file", "another name, or --overwrite"))
    environment = {name: os.environ[name] for name in KNOWN_VARIABLES if name in os.environ}
    made = import_recipe(asked.framework, asked.source, dict(asked.set), environment)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(made.text, encoding="utf-8")
    else:
        print(made.text, end="")
    print(report(made.translation), file=sys.stdout if output else sys.stderr)
    if made.problems:
        raise RecipeError(made.problems)
    if output:
        print(f"\n{output} is written. Next: megagrpo plan {output}")
    return 0


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.replace(".", "_").isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
