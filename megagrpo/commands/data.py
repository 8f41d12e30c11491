"""`megagrpo data`: a look at prompts, and a check of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from megagrpo.commands.arguments import add_command, add_overrides, whole_number
from megagrpo.errors import DataError, Problem

EXIT_WRONG = 1
PROBLEMS_SHOWN = 20


def add_data(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    looks = add_command(commands, "data", "look at prompts, and check them before they cost anything").add_subparsers(
        title="what to do", required=True, metavar="WHAT"
    )
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


def data_show(asked: argparse.Namespace) -> int:
    from rich.console import Console

    from megagrpo.data.show import View, draw, entry_of, look
    from megagrpo.tokenizer import load_chat_tokenizer

    if asked.file.endswith((".yaml", ".yml")):
        fix = f"name a file of its data, and the recipe by --recipe {asked.file}"
        raise DataError(Problem("FILE", given=f"{asked.file}, a recipe", needed="a file of data", fix=fix))
    entry, view = entry_of(asked.file, []), View()
    if asked.recipe:
        from megagrpo.preflight.preflight import tokenizer_of
        from megagrpo.recipe.load import load

        recipe = load(asked.recipe, asked.overrides).recipe
        held_out = [file for files in recipe.eval.files_of_sets().values() for file in files]
        entry = entry_of(asked.file, [*recipe.data.train, *held_out])
        data = recipe.data
        view = View(tokenizer_of(recipe), data.chat_template_arguments, data.system_prompt, data.prompt_tokens_max)
    elif asked.model:
        view = View(load_chat_tokenizer(asked.model))
    draw(look(entry, view, asked.rows), view, Console(highlight=False))
    return 0


def data_check(asked: argparse.Namespace) -> int:
    from megagrpo.preflight.data_check import check_recipe
    from megagrpo.preflight.preflight import tokenizer_of
    from megagrpo.recipe.load import load

    recipe = load(asked.recipe, asked.overrides).recipe
    wrong = 0
    for section in check_recipe(recipe, tokenizer_of(recipe), asked.rows):
        print(f"{section.name}:")
        for file in section.mixture.files if section.mixture else ():
            print(f"  {file.text('prompts')}")
        for text in section.checked.lines():
            print(f"  {text}")
        for problem in section.checked.problems[:PROBLEMS_SHOWN]:
            print(f"  {str(problem).replace(chr(10), chr(10) + '  ')}")
        if (more := len(section.checked.problems) - PROBLEMS_SHOWN) > 0:
            print(f"  and {more} more")
        wrong += len(section.checked.problems)
    print(f"{wrong} problem{'s' if wrong > 1 else ''}" if wrong else "OK")
    return EXIT_WRONG if wrong else 0
