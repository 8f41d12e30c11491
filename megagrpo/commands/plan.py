"""`megagrpo plan`: the layout, memory and time of a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from megagrpo.commands.arguments import add_command, add_overrides, whole_number
from megagrpo.errors import PreflightError

GPUS_MAX = 100_000


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "check a recipe and estimate its layout, memory and time, without GPUs; starts nothing"
    planner = add_command(commands, "plan", text, plan)
    planner.add_argument("recipe", type=Path, metavar="RECIPE", help="YAML file, see docs/recipes.md")
    add_overrides(planner)
    planner.add_argument("--html", type=Path, metavar="FILE", help="write the plan as one self-contained page")
    planner.add_argument("--json", action="store_true", help="print everything as JSON instead, see docs/plan.md")
    planner.add_argument("--search", action="store_true", help="find the fastest layouts that fit")
    planner.add_argument(
        "--gpus", type=whole_number(1, GPUS_MAX), metavar="N", help="GPUs for --search; default: the recipe's"
    )
    planner.add_argument(
        "--assume", action="append", default=[], metavar="NAME=VALUE", help="such as response_tokens=2000; repeatable"
    )
    planner.add_argument(
        "--calibrate", type=Path, metavar="RUN_DIRECTORY", help="take assumptions from what a run measured"
    )


def plan(asked: argparse.Namespace) -> int:
    from megagrpo.preflight.preflight import preflight
    from megagrpo.recipe.load import load_any

    loaded = load_any(asked.recipe, asked.overrides)
    ready = preflight(loaded, plan_only=True)
    from megagrpo.plan.plan import plan_of
    from megagrpo.plan.search import search
    from megagrpo.weights.families import read_architecture

    planned = plan_of(
        ready.recipe,
        ready.architecture,
        given=asked.assume,
        run_directory=asked.calibrate,
        unchecked=ready.unchecked,
        epoch_rows=ready.epoch_rows,
        agent=ready.agent,
        critic=read_architecture(ready.critic_directory) if ready.critic_directory else None,
    )
    found = search(planned, asked.gpus) if asked.search else None
    if asked.html:
        from megagrpo.plan.show.page import page, write_page

        write_page(asked.html, page(planned, found))
    if asked.json:
        from megagrpo.plan.show.as_json import plan_json

        print(plan_json(planned, found))
    else:
        from rich.console import Console

        from megagrpo.plan.show.terminal import draw

        draw(planned, found, Console(highlight=False))
    problems = found.problems if found else planned.problems
    if problems:
        raise PreflightError(map(loaded.places.located, problems))
    if not asked.json and not planned.problems:
        print("OK")
        if loaded.recipe.kind != "sft":
            print(f"megagrpo data check {asked.recipe} tries each row's reward on the row's own ground truth")
    return 0
