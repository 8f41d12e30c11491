"""`megagrpo plan`, the layout, memory and time of a recipe, and `megagrpo doctor`, the state of a machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from megagrpo.commands import Commands, add_command, add_overrides, whole_number
from megagrpo.errors import PreflightError

GPUS_MAX = 100_000
EXIT_WRONG = 1


def add_plan(commands: Commands) -> None:
    text = "check a recipe and estimate its layout, memory and time, without GPUs; starts nothing"
    planner = add_command(commands, "plan", text, plan)
    planner.add_argument("recipe", type=Path, metavar="RECIPE", help="YAML file, see docs/recipes.md")
    add_overrides(planner)
    planner.add_argument("--html", type=Path, metavar="FILE", help="write the plan as one self-contained page")
    planner.add_argument("--json", action="store_true", help="print everything as JSON instead, see docs/plan.md")
    planner.add_argument("--search", action="store_true", help="find the fastest layouts that fit")
    text = "GPUs for --search; default: the recipe's"
    planner.add_argument("--gpus", type=whole_number(1, GPUS_MAX), metavar="N", help=text)
    text = "such as response_tokens=2000; repeatable"
    planner.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "take assumptions from a run's measurements"
    planner.add_argument("--calibrate", type=Path, metavar="RUN_DIRECTORY", help=text)


def plan(args: argparse.Namespace) -> int:
    from megagrpo.preflight.preflight import preflight
    from megagrpo.recipe.load import load_any

    loaded = load_any(args.recipe, args.overrides)
    ready = preflight(loaded, plan_only=True)
    from megagrpo.plan.advice import impossible
    from megagrpo.plan.plan import plan_of
    from megagrpo.plan.search import search
    from megagrpo.weights.families import read_architecture

    planned = plan_of(
        ready.recipe,
        ready.architecture,
        given=args.assume,
        run_directory=args.calibrate,
        unchecked=ready.unchecked,
        epoch_rows=ready.epoch_rows,
        found=ready.found,
        critic=read_architecture(ready.critic_directory) if ready.critic_directory else None,
        teachers={name: read_architecture(path) for name, path in ready.teachers.items()},
    )
    cannot_run = impossible(planned)
    searched = search(planned, args.gpus) if args.search else None
    if args.html:
        from megagrpo.plan.show.page import page, write_page

        write_page(args.html, page(planned, searched))
    if args.json:
        from megagrpo.plan.show.as_json import plan_json

        print(plan_json(planned, searched))
    else:
        from rich.console import Console

        from megagrpo.plan.show.terminal import draw

        draw(planned, searched, Console(highlight=False))
    problems = searched.problems if searched else cannot_run
    if problems:
        raise PreflightError(map(loaded.places.located, problems))
    if not args.json and not cannot_run:
        print("OK")
        if loaded.recipe.kind != "sft":
            print(f"megagrpo data check {args.recipe} tries each row's reward on the row's own ground truth")
    return 0


def add_doctor(commands: Commands) -> None:
    text = "check packages, GPUs, network and limits of this machine; prints remedies; exits with 1 if there is a fault"
    clean = "remove what killed runs of this user left in /dev/shm, instead"
    add_command(commands, "doctor", text, doctor).add_argument("--clean", action="store_true", help=clean)


def doctor(args: argparse.Namespace) -> int:
    if args.clean:
        from megagrpo.weights.transport.shared_memory import remove_abandoned

        removed = remove_abandoned()
        print("\n".join([*(f"removed {path}" for path in removed), f"{len(removed)} files of killed runs"]))
        return 0
    from megagrpo.doctor import examine

    return 0 if examine(print) else EXIT_WRONG
