"""`megagrpo data`, a look at prompts and a check of them, and `megagrpo prepare`, which writes prompt files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megagrpo.commands import Commands, add_command, add_group, add_overrides, whole_number
from megagrpo.errors import DataError, Problem

EXIT_WRONG = 1
PROBLEMS_SHOWN = 20


def add_data(commands: Commands) -> None:
    looks = add_group(commands, "data", "show prompts, and check them before a run")
    text = "print rows as the model will see them, with token counts and a histogram of lengths"
    show = add_command(looks, "show", text, data_show)
    show.add_argument("file", metavar="FILE", help="a file, folder, pattern or URL, or an entry of the recipe")
    how = show.add_mutually_exclusive_group()
    how.add_argument("--model", metavar="DIR", help="Hugging Face model with the tokenizer and its chat template")
    text = "recipe that says the model, the template, and which columns hold what"
    how.add_argument("--recipe", type=Path, metavar="RECIPE", help=text)
    show.add_argument("--rows", type=whole_number(0, 10_000), default=3, metavar="N", help="rows to print; default: 3")
    add_overrides(show)

    text = (
        "check a recipe's files, template and lengths, and each row's reward functions on the row's own ground truth: "
        "it must get full marks, and a wrong answer must not; exits with 1 if a row fails"
    )
    check = add_command(looks, "check", text, data_check)
    check.add_argument("recipe", type=Path, metavar="RECIPE", help="YAML file, see docs/recipes.md")
    check.add_argument("--rows", type=whole_number(1, 10**9), metavar="N", help="of each set of files; default: all")
    add_overrides(check)


def data_show(args: argparse.Namespace) -> int:
    from rich.console import Console

    from megagrpo.data.show import View, draw, entry_of, look
    from megagrpo.tokenizer import load_chat_tokenizer

    if args.file.endswith((".yaml", ".yml")):
        fix = f"name a file of its data, and the recipe by --recipe {args.file}"
        raise DataError(Problem("FILE", given=f"{args.file}, a recipe", needed="a file of data", fix=fix))
    entry, view = entry_of(args.file, []), View()
    if args.recipe:
        from megagrpo.preflight.preflight import tokenizer_of
        from megagrpo.recipe.load import load

        recipe = load(args.recipe, args.overrides).recipe
        held_out = [file for files in recipe.eval.files_of_sets().values() for file in files]
        entry = entry_of(args.file, [*recipe.data.train, *held_out])
        data = recipe.data
        view = View(tokenizer_of(recipe), data.chat_template_arguments, data.system_prompt, data.prompt_tokens_max)
    elif args.model:
        view = View(load_chat_tokenizer(args.model))
    draw(*look(entry, view, args.rows), view, Console(highlight=False))
    return 0


def data_check(args: argparse.Namespace) -> int:
    from megagrpo.preflight.data_check import check_recipe
    from megagrpo.preflight.preflight import tokenizer_of
    from megagrpo.recipe.load import load

    recipe = load(args.recipe, args.overrides).recipe
    wrong = 0
    for name, files, checked in check_recipe(recipe, tokenizer_of(recipe), args.rows):
        print(f"{name}:")
        for file in files:
            print(f"  {file.text('prompts')}")
        for text in checked.lines():
            print(f"  {text}")
        for problem in checked.problems[:PROBLEMS_SHOWN]:
            print(f"  {str(problem).replace(chr(10), chr(10) + '  ')}")
        if (more := len(checked.problems) - PROBLEMS_SHOWN) > 0:
            print(f"  and {more} more")
        wrong += len(checked.problems)
    print(f"{wrong} problem{'s' if wrong > 1 else ''}" if wrong else "OK")
    return EXIT_WRONG if wrong else 0


def add_prepare(commands: Commands) -> None:
    preparers = add_group(commands, "prepare", "write prompt files (parquet)", "data sets", "DATA_SET")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        added = add_command(preparers, name, text, prepare)
        added.set_defaults(data_set=name)
        added.add_argument(
            "--output", type=Path, required=True, metavar="DIR", help="for train.parquet and test.parquet"
        )
        return added

    jsonl = add("jsonl", "your own questions and answers, JSONL or parquet")
    jsonl.add_argument("--source", type=Path, required=True, metavar="FILE", help="one object or row per question")
    jsonl.add_argument("--prompt-column", default="prompt", metavar="NAME", help="default: prompt")
    jsonl.add_argument("--answer-column", default="answer", metavar="NAME", help="default: answer")
    text = "data_source of the rows, which rewards receive; default: the file's name"
    jsonl.add_argument("--data-source", metavar="NAME", help=text)
    jsonl.add_argument("--instruction", default="", metavar="TEXT", help="appended to every question")
    jsonl.add_argument("--system-prompt", default="", metavar="TEXT", help="system message of every prompt")
    text = "share of the questions held out; default: 0"
    jsonl.add_argument("--test-share", type=float, default=0.0, metavar="X", help=text)
    text = "chooses the questions held out; default: 0"
    jsonl.add_argument("--seed", type=whole_number(0, 2**63 - 1), default=0, metavar="N", help=text)

    verifiers = add("verifiers", "the tasks of an environment of the verifiers package, for agent.verifiers")
    verifiers.add_argument("environment", metavar="ENVIRONMENT", help="as in the recipe: a name, or FILE.py:FUNCTION")
    text = "interpreter that has the package, as agent.python; default: this one"
    verifiers.add_argument("--python", metavar="FILE", help=text)
    text = "its arguments, as in the recipe: an object of JSON"
    verifiers.add_argument("--arguments", type=_object, default={}, metavar="JSON", help=text)
    text = "most tasks of each split; default: all"
    verifiers.add_argument("--size", type=whole_number(1, 10**8), metavar="N", help=text)

    openenv = add("openenv", "a row for each seed of an OpenEnv environment's episodes, for agent.openenv")
    openenv.add_argument("--prompt", required=True, metavar="TEXT", help="text before the first observation")
    openenv.add_argument("--system-prompt", default="", metavar="TEXT", help="system message of every prompt")
    rows, held_out = whole_number(1, 10**7), whole_number(0, 10**7)
    openenv.add_argument("--size", dest="train", type=rows, default=1000, metavar="N", help="rows; default: 1000")
    text = "rows held out, of the seeds that follow; default: 0"
    openenv.add_argument("--test-size", dest="test", type=held_out, default=0, metavar="N", help=text)


def prepare(args: argparse.Namespace) -> int:
    from megagrpo.agents.environments.prepare import prepare_openenv, prepare_verifiers
    from megagrpo.data.prepare import prepare_jsonl

    preparers: dict[str, Callable[..., object]]
    preparers = {"jsonl": prepare_jsonl, "verifiers": prepare_verifiers, "openenv": prepare_openenv}
    options = {name: value for name, value in vars(args).items() if name not in ("command", "debug", "data_set")}
    print(preparers[args.data_set](**options))
    return 0


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no object of JSON")
    return value
