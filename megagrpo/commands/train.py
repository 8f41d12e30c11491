"""`megagrpo train`, `sft`, `eval` and `replay`: the commands that start processes that compute."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.commands import Commands, add_command, add_output, add_overrides, whole_number
from megagrpo.errors import PreflightError, Problem
from megagrpo.processes import importing
from megagrpo.progress import progress

if TYPE_CHECKING:
    from megagrpo.preflight.preflight import Preflight
    from megagrpo.recipe.load import Kind, LoadedRecipe
    from megagrpo.recipe.schema.run import ConsoleMode

EXIT_DIFFERENT = 1
OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=")
"""The beginning of an override, among models: a path or URL has a slash before its `=`."""


def add_train(commands: Commands) -> None:
    for name, command, text in (
        ("train", train, "check a recipe, then train; continues from the run's newest checkpoint"),
        ("sft", sft, "the same for supervised fine-tuning on conversations: recipes of kind sft, see docs/sft.md"),
    ):
        added = add_command(commands, name, text, command)
        added.add_argument("recipe", type=Path, metavar="RECIPE", help="YAML file, see docs/recipes.md")
        add_overrides(added)
        add_output(added)
        if command is train:
            half = added.add_mutually_exclusive_group()
            text = "sample and score all steps with the starting weights, and save the batches; see docs/debugging.md"
            half.add_argument("--rollout-only", action="store_true", help=text)
            text = "train on the batches that another run has saved, without engines"
            half.add_argument("--train-only", type=Path, metavar="RUN_DIRECTORY", help=text)
            text = "repeat the order of a run that sampled in the background, from its schedule.jsonl"
            half.add_argument("--replay-schedule", type=Path, metavar="RUN_DIRECTORY", help=text)

    text = "evaluate a model on a recipe's evaluation sets, or two models and compare them; see docs/evaluation.md"
    added = add_command(commands, "eval", text, evaluate)
    text = "a model (two to compare): directory, hub id, run, checkpoint or URL of a server; then KEY=VALUE overrides"
    added.add_argument("models", nargs="+", metavar="MODEL", help=text)
    added.add_argument("--recipe", type=Path, required=True, metavar="RECIPE", help="YAML file, see docs/recipes.md")
    text = "for responses and results; existing files are kept; default: eval in the run's directory"
    added.add_argument("--output", type=Path, metavar="DIR", help=text)
    text = "environment variable with the API key of a server"
    added.add_argument("--api-key-variable", metavar="NAME", help=text)
    add_output(added)
    added.set_defaults(overrides=[])

    text = "train a step of a run again from its saved batch, and compare its metrics; exits with 1 if they differ"
    added = add_command(commands, "replay", text, replay)
    added.add_argument("directory", type=Path, metavar="RUN_DIRECTORY", help="such as runs/NAME")
    text = "a step whose batch checkpoint.keep_batches has kept"
    added.add_argument("--step", type=whole_number(1, 10**9), required=True, metavar="K", help=text)
    add_overrides(added)


def train(args: argparse.Namespace) -> int:
    from megagrpo.recipe.load import load

    ready = _checked(load(args.recipe, args.overrides), args.console, engines_too=args.train_only is None)
    with progress("loading libraries"), importing():
        from megagrpo.trainer import one_half, train  # import ray: only once the recipe is known to be good

    if args.rollout_only:
        return one_half.rollout_only(ready)
    if args.replay_schedule:
        return train.replay_schedule(ready, args.replay_schedule)
    return train.train(ready) if args.train_only is None else one_half.train_only(ready, args.train_only)


def sft(args: argparse.Namespace) -> int:
    from megagrpo.recipe.load import load_sft

    ready = _checked(load_sft(args.recipe, args.overrides), args.console)
    with progress("loading libraries"), importing():
        from megagrpo.trainer.sft import sft as run  # imports ray: only once the recipe is known to be good

    return run(ready)


def _checked(loaded: LoadedRecipe[Kind], console: ConsoleMode | None, *, engines_too: bool = True) -> Preflight[Kind]:
    """Checks a recipe, and prints the items that could not be checked."""
    from megagrpo.preflight.preflight import preflight

    with progress("checking the recipe, the model and the data"), importing():
        ready = preflight(loaded, engines_too=engines_too)
    for text in ready.unchecked:
        print(text, file=sys.stderr)
    return replace(ready, console=console)


def evaluate(args: argparse.Namespace) -> int:
    words = [*args.models, *args.overrides]
    overrides = [word for word in words if OVERRIDE.match(word)]
    models = [word for word in words if word not in overrides]
    if len(models) not in (1, 2):
        needed = "one, or two to compare"
        raise PreflightError(Problem("megagrpo eval: MODEL", f"{len(models)}: {' '.join(models)}", needed, "name one"))
    with progress("loading libraries"), importing():
        from megagrpo.evaluation.evaluate import evaluate as run

    return run(models, args.recipe, overrides, args.output, args.api_key_variable, args.console)


def replay(args: argparse.Namespace) -> int:
    from megagrpo.preflight.preflight import preflight
    from megagrpo.trainer.one_half import load_replay
    from megagrpo.trainer.one_half import replay as replay_step

    ready = preflight(load_replay(args.directory, args.step, args.overrides), engines_too=False)
    return 0 if replay_step(ready, args.directory, args.step, print) else EXIT_DIFFERENT
