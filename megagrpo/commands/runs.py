"""`megagrpo runs`: the runs of a directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megagrpo.commands.arguments import add_command
from megagrpo.progress import is_terminal


def add_runs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "list runs with their state, step, scores and age, the newest first"
    added = add_command(commands, "runs", text, runs)
    text = "track.directory of the recipes; default: runs"
    added.add_argument("directory", nargs="?", type=Path, default=Path("runs"), metavar="DIRECTORY", help=text)
    added.add_argument("--json", action="store_true", help="print a list of objects instead")


def runs(asked: argparse.Namespace) -> int:
    from megagrpo.report.listing import WIDTH, draw, runs_in

    found = runs_in(asked.directory)
    if asked.json:
        import json

        print(json.dumps([run.as_json() for run in found], indent=2))
        return 0
    if not found:
        print(f"no runs in {asked.directory}")
        return 0
    from rich.console import Console

    draw(found, Console(highlight=False, width=None if is_terminal(sys.stdout) else WIDTH))
    return 0
