"""`megagrpo report`, a run's directory to look at, and `megagrpo runs`, a list of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.commands.arguments import add_command, whole_number
from megagrpo.errors import Problem, ReportError
from megagrpo.progress import is_terminal

if TYPE_CHECKING:
    from megagrpo.report.run import RunRead

PAGE, COMPARISON = "report.html", "comparison.html"
"""Files in a run's directory: its own page, which the run's end writes as well, and a comparison with other runs."""


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "write a run's page: its health, curves, time, samples and recipe; of several runs, each beside the others"
    added = add_command(commands, "report", text, report)
    text = "such as runs/NAME; or where `megagrpo eval` has written"
    added.add_argument("directories", type=Path, nargs="+", metavar="RUN_DIRECTORY", help=text)
    text = f"the page; default: RUN_DIRECTORY/{PAGE}, and with several runs {COMPARISON} in the first one's"
    added.add_argument("--output", type=Path, metavar="FILE", help=text)
    text = "most samples in the page, the newest ones, however large it becomes; default: 5,000"
    added.add_argument("--samples", type=whole_number(1, 10**9), metavar="N", help=text)
    instead = added.add_mutually_exclusive_group()
    instead.add_argument("--serve", action="store_true", help="show the page on loopback instead, and follow the run")
    text = "print how far training and rollout logprobs differ instead, and in which tokens"
    instead.add_argument("--mismatch", action="store_true", help=text)
    text = "print a rollout of this step as a conversation instead: its first, or that NUMBER, from 0"
    instead.add_argument("--rollout", type=_rollout, metavar="STEP[:NUMBER]", help=text)
    added.add_argument(
        "--port", type=whole_number(0, 65535), default=0, metavar="N", help="of --serve; default: a free one"
    )
    added.add_argument(
        "--steps", type=whole_number(1, 10**9), default=20, metavar="N", help="last steps of --mismatch; default: 20"
    )


def report(asked: argparse.Namespace) -> int:
    if asked.mismatch or asked.rollout:
        print(_text(asked))
        return 0
    if asked.serve:
        from megagrpo.report.serve import serve

        serve(asked.directories, asked.port, lambda line: print(line, flush=True))
        return 0
    from megagrpo.report.page import page, write_page
    from megagrpo.report.run import read_run

    runs = [read_run(directory) for directory in asked.directories]
    written = asked.output or asked.directories[0] / (PAGE if len(runs) == 1 else COMPARISON)
    write_page(written, page(runs, samples=asked.samples))
    for run in runs:
        print("\n".join(_firings(run)))
    print(f"open {written} in a browser: it needs no network and no other file")
    return 0


def _text(asked: argparse.Namespace) -> str:
    from megagrpo.report.text import mismatch_report, rollout_report

    if len(asked.directories) > 1:
        given = f"{len(asked.directories)} directories"
        raise ReportError(Problem("--rollout" if asked.rollout else "--mismatch", given, "one run"))
    directory = asked.directories[0]
    return rollout_report(directory, *asked.rollout) if asked.rollout else mismatch_report(directory, asked.steps)


def _firings(run: RunRead) -> list[str]:
    """Returns a run's last step, and a line for each rule that fires; without steps, the models evaluated there."""
    from megagrpo.report.rules import RULES, firings
    from megagrpo.report.run import responses_in

    if not len(run.steps) and (evaluated := responses_in(run.directory)):
        return [f"{run.name}: responses of {', '.join(path.absolute().parent.name for path in evaluated)}"]
    steps = f"step {run.steps[-1]:,}" if len(run.steps) else "no step yet"
    spans: dict[str, list[str]] = {}
    for firing in firings(run.steps, run.metrics):
        text = str(firing.first) if firing.first == firing.last else f"{firing.first}-{firing.last}"
        spans.setdefault(RULES[firing.rule].title, []).append(text)
    told = [f"  {title}: step {', '.join(found[-6:])}" for title, found in spans.items()]
    fire = {0: "no rule fires", 1: "1 rule fires:"}.get(len(told), f"{len(told)} rules fire:")
    return [f"{run.name}: {steps}, {fire}", *told]


def _rollout(text: str) -> tuple[int, int]:
    """Parses STEP:NUMBER; the first of a step's rollouts if there is no number."""
    step, colon, number = text.partition(":")
    return whole_number(0, 10**9)(step), whole_number(0, 10**9)(number) if colon else 0


def add_runs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "list runs with their state, step, scores and age, the newest first"
    added = add_command(commands, "runs", text, runs)
    text = "track.directory of the recipes; default: runs"
    added.add_argument("directory", nargs="?", type=Path, default=Path("runs"), metavar="DIRECTORY", help=text)
    added.add_argument("--json", action="store_true", help="print a list of objects instead")


def runs(asked: argparse.Namespace) -> int:
    from megagrpo.report.listing import WIDTH, draw, runs_in

    listed = runs_in(asked.directory)
    if asked.json:
        import json

        print(json.dumps(listed, indent=2))
        return 0
    if not listed:
        print(f"no runs in {asked.directory}")
        return 0
    from rich.console import Console

    draw(listed, Console(highlight=False, width=None if is_terminal(sys.stdout) else WIDTH))
    return 0
