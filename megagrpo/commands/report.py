"""Commands on runs: `megagrpo report` shows them, `runs` lists them, and `track` sends one to its trackers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.commands import Commands, add_command, add_group, whole_number
from megagrpo.errors import Problem, ReportError
from megagrpo.progress import is_terminal

if TYPE_CHECKING:
    from megagrpo.report.run import RunRead

PAGE, COMPARISON = "report.html", "comparison.html"
"""Files in a run's directory: its own page, which the run's end writes as well, and a comparison with other runs."""


def add_report(commands: Commands) -> None:
    text = "write a run's page: its health, curves, time, samples and recipe; for several runs, a comparison"
    added = add_command(commands, "report", text, report)
    text = "such as runs/NAME; or where `megagrpo eval` has written"
    added.add_argument("directories", type=Path, nargs="+", metavar="RUN_DIRECTORY", help=text)
    text = f"the page; default: RUN_DIRECTORY/{PAGE}, and with several runs {COMPARISON} in the first one's"
    added.add_argument("--output", type=Path, metavar="FILE", help=text)
    text = "most samples in the page, the newest ones, however large it becomes; default: 5,000"
    added.add_argument("--samples", type=whole_number(1, 10**9), metavar="N", help=text)
    instead = added.add_mutually_exclusive_group()
    instead.add_argument("--serve", action="store_true", help="show the page on loopback instead, and follow the run")
    text = "print what proves that the trained tokens are those sampled, and how far their logprobs differ, instead"
    instead.add_argument("--mismatch", action="store_true", help=text)
    text = "print a rollout of this step as a conversation instead: its first, or that NUMBER, from 0"
    instead.add_argument("--rollout", type=_rollout, metavar="STEP[:NUMBER]", help=text)
    text = "of --serve; default: a free one"
    added.add_argument("--port", type=whole_number(0, 65535), default=0, metavar="N", help=text)
    text = "last steps of --mismatch; default: 20"
    added.add_argument("--steps", type=whole_number(1, 10**9), default=20, metavar="N", help=text)


def report(args: argparse.Namespace) -> int:
    if args.mismatch or args.rollout:
        from megagrpo.report.mismatch import mismatch_report
        from megagrpo.report.text import rollout_report

        if len(args.directories) > 1:
            given = f"{len(args.directories)} directories"
            raise ReportError(Problem("--rollout" if args.rollout else "--mismatch", given, "one run"))
        directory = args.directories[0]
        text, code = (
            (rollout_report(directory, *args.rollout), 0) if args.rollout else mismatch_report(directory, args.steps)
        )
        print(text)
        return code
    if args.serve:
        from megagrpo.report.page import serve

        serve(args.directories, args.port, lambda line: print(line, flush=True))
        return 0
    from megagrpo.report.page import page, write_page
    from megagrpo.report.run import read_run

    runs = [read_run(directory) for directory in args.directories]
    written = args.output or args.directories[0] / (PAGE if len(runs) == 1 else COMPARISON)
    write_page(written, page(runs, samples=args.samples))
    for run in runs:
        print("\n".join(_firings(run)))
    print(f"open {written} in a browser: it needs no network and no other file")
    return 0


def _firings(run: RunRead) -> list[str]:
    """Returns a run's last step, and a line for each rule that fires; without steps, the models evaluated there."""
    from megagrpo.report.rules import RULES, firings
    from megagrpo.report.run import responses_in

    if not len(run.steps) and (evaluated := responses_in(run.directory)):
        return [f"{run.name}: responses of {', '.join(path.absolute().parent.name for path in evaluated)}"]
    last = f"step {run.steps[-1]:,}" if len(run.steps) else "no step yet"
    spans: dict[str, list[str]] = {}
    for firing in firings(run.steps, run.metrics):
        text = str(firing.first) if firing.first == firing.last else f"{firing.first}-{firing.last}"
        spans.setdefault(RULES[firing.rule].title, []).append(text)
    fired = [f"  {title}: step {', '.join(steps[-6:])}" for title, steps in spans.items()]
    fire = {0: "no rule fires", 1: "1 rule fires:"}.get(len(fired), f"{len(fired)} rules fire:")
    return [f"{run.name}: {last}, {fire}", *fired]


def _rollout(text: str) -> tuple[int, int]:
    """Parses STEP:NUMBER; the first of a step's rollouts if there is no number."""
    step, colon, number = text.partition(":")
    return whole_number(0, 10**9)(step), whole_number(0, 10**9)(number) if colon else 0


def add_runs(commands: Commands) -> None:
    text = "list runs with their state, step, scores and age, the newest first"
    added = add_command(commands, "runs", text, runs)
    text = "track.directory of the recipes; default: runs"
    added.add_argument("directory", nargs="?", type=Path, default=Path("runs"), metavar="DIRECTORY", help=text)
    added.add_argument("--json", action="store_true", help="print a list of objects instead")


def runs(args: argparse.Namespace) -> int:
    from megagrpo.report.text import WIDTH, draw, runs_in

    listed = runs_in(args.directory)
    if args.json:
        import json

        print(json.dumps(listed, indent=2))
        return 0
    if not listed:
        print(f"no runs in {args.directory}")
        return 0
    from rich.console import Console

    draw(listed, Console(highlight=False, width=None if is_terminal(sys.stdout) else WIDTH))
    return 0


def add_track(commands: Commands) -> None:
    group = add_group(commands, "track", "send runs to their trackers, see docs/tracking.md")
    text = "send trackers the missing data of a run that has ended; repeating it changes nothing"
    added = add_command(group, "sync", text, track_sync)
    added.add_argument("directory", type=Path, metavar="RUN_DIRECTORY", help="such as runs/NAME")
    text = "an MLflow server in place of the recipe's: a URI such as http://HOST:5000 or sqlite:////PATH/mlflow.db"
    added.add_argument("--mlflow", metavar="URI", help=text)
    text = "send a running run until it ends; a run with trackers starts this itself"
    added.add_argument("--follow", action="store_true", help=text)


def track_sync(args: argparse.Namespace) -> int:
    from megagrpo.track import follower

    settings = {} if args.mlflow is None else {"mlflow": {"uri": args.mlflow}}
    if args.follow:
        follower.main(args.directory, settings)
    if not follower.sync(args.directory, settings, print):
        print("the run's recipe has no trackers besides files: name a server with --mlflow URI")
    return 0
