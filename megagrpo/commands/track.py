"""`megagrpo track`: the data that a run's trackers have of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from megagrpo.commands.arguments import add_command


def add_track(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = add_command(commands, "track", "bring runs to their trackers, see docs/tracking.md").add_subparsers(
        title="what to do", required=True, metavar="WHAT"
    )
    text = "bring MLflow, W&B and TensorBoard what they lack of a run that has ended; a second time changes nothing"
    added = add_command(what, "sync", text, track_sync)
    added.add_argument("directory", type=Path, metavar="RUN_DIRECTORY", help="such as runs/NAME")
    text = "an MLflow server in place of the recipe's: a URI such as http://HOST:5000 or sqlite:////PATH/mlflow.db"
    added.add_argument("--mlflow", metavar="URI", help=text)
    text = "send a running run until it ends; a run with trackers starts this itself"
    added.add_argument("--follow", action="store_true", help=text)


def track_sync(asked: argparse.Namespace) -> int:
    from megagrpo.track import follower

    if asked.follow:
        follower.main(asked.directory, asked.mlflow)
    follower.sync(asked.directory, asked.mlflow, print)
    return 0
