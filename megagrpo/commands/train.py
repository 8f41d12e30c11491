"""`megagrpo train`, `sft`, `eval` and `replay`: the commands that start processes that compute."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

from megagrpo.commands.arguments import add_command, add_output, add_overrides, whole_number
from megagrpo.errors import PreflightError, Problem
from megagrpo.processes.imports import importing
from megagrpo.progress import progress

EXIT_DIFFERENT = 1
OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=")
"""The beginning of an override, among models: a path or URL has a slash before its `=`."""


def add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    text = "Hugging Face directory or hub id, run or checkpoint, or URL of an SGLang server; then KEY=VALUE"
    added.add_argument("models", nargs="+", metavar="MODEL", help=text)
    added.add_argument("--recipe", type=Path, required=True, metavar="RECIPE", help="YAML file, see docs/recipes.md")
    text = "for responses and results; what is in it already is kept; default: eval in the run's directory"
    added.add_argument("--output", type=Path, metavar="DIR", help=text)
    text = "environment variable with the API key of a server"
    added.add_argument("--api-key-variable", metavar="NAME", help=text)
    add_output(added)
    added.set_defaults(overrides=[])

    text = "train a step of a run again from its saved batch, and compare its metrics; exits with 1 if they differ"
    added = add_command(commands, "replay", text, replay)
    added.add_argument("directory", type=Path, metavar="RUN_DIRECTORY", help="such as runs/NAME")
    added.add_argument(
        "--step",
        type=whole_number(1, 10**9),
        required=True,
        metavar="K",
        help="one of those that checkpoint.keep_batches kept",
    )
    add_overrides(added)


def train(asked: argparse.Namespace) -> int:
    from megagrpo.preflight.preflight import preflight
    from megagrpo.recipe.load import load

    loaded = load(asked.recipe, asked.overrides)
    with progress("checking the recipe, the model and the data"), importing():
        ready = replace(preflight(loaded, engines_too=asked.train_only is None), console=asked.console)
    for text in ready.unchecked:
        print(text, file=sys.stderr)
    with progress("loading libraries"), importing():
        from megagrpo.trainer import one_half, train  # import ray: only once the recipe is known to be good

    if asked.rollout_only:
        return one_half.rollout_only(ready)
    if asked.replay_schedule:
        return train.replay_schedule(ready, asked.replay_schedule)
    return train.train(ready) if asked.train_only is None else one_half.train_only(ready, asked.train_only)


def sft(asked: argparse.Namespace) -> int:
    from megagrpo.preflight.preflight import preflight
    from megagrpo.recipe.load import load_sft

    loaded = load_sft(asked.recipe, asked.overrides)
    with progress("checking the recipe, the model and the data"), importing():
        ready = replace(preflight(loaded), console=asked.console)
    for text in ready.unchecked:
        print(text, file=sys.stderr)
    with progress("loading libraries"), importing():
        from megagrpo.trainer.sft import sft as run  # imports ray: only once the recipe is known to be good

    return run(ready)


def evaluate(asked: argparse.Namespace) -> int:
    words = [*asked.models, *asked.overrides]
    overrides = [word for word in words if OVERRIDE.match(word)]
    models = [word for word in words if word not in overrides]
    if len(models) not in (1, 2):
        needed = "one, or two to compare"
        raise PreflightError(Problem("megagrpo eval: MODEL", f"{len(models)}: {' '.join(models)}", needed, "name one"))
    with progress("loading libraries"), importing():
        from megagrpo.evaluation.evaluate import evaluate as run

    return run(models, asked.recipe, overrides, asked.output, asked.api_key_variable, asked.console)


def replay(asked: argparse.Namespace) -> int:
    from megagrpo.preflight.preflight import preflight
    from megagrpo.trainer.one_half import load_replay
    from megagrpo.trainer.one_half import replay as replay_step

    ready = preflight(load_replay(asked.directory, asked.step, asked.overrides), engines_too=False)
    return 0 if replay_step(ready, asked.directory, asked.step, print) else EXIT_DIFFERENT
