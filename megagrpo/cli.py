"""The megagrpo command. Errors of its subcommands (commands/) become a message and an exit code."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn

from megagrpo import __version__
from megagrpo.commands.convert import add_convert, add_import
from megagrpo.commands.data import add_data, add_prepare
from megagrpo.commands.plan import add_doctor, add_plan
from megagrpo.commands.report import add_report, add_runs, add_track
from megagrpo.commands.train import add_train
from megagrpo.errors import MachineError, MegagrpoError, PreflightError, Problem, path_problem, printable
from megagrpo.progress import is_terminal, shown_by, usual_display

EXIT_INTERRUPTED = 130
SHORTAGES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
NO_THREAD = "can't start new thread"
"""A thread's EAGAIN, which Python raises as RuntimeError."""


class Unfailing(io.FileIO):
    """Standard output or error: what cannot be written, because its reader is gone or a disk is full, is dropped."""

    def write(self, text: Any) -> int:
        try:
            return super().write(text) or 0
        except OSError:
            return len(text)

    @classmethod
    def standard(cls, descriptor: int) -> io.TextIOWrapper:
        opened = cls(os.dup(descriptor), "w")
        return io.TextIOWrapper(io.BufferedWriter(opened), encoding="utf-8", errors="replace", line_buffering=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for what the user can correct, others as in errors.py."""
    args = parse(arguments)
    return run_command(partial(args.command, args), debug=args.debug, console=getattr(args, "console", None))


def run_command(command: Callable[[], int], *, debug: bool = False, console: str | None = None) -> int:
    """Runs a command; makes an exit code and a message of what the user, the machine or Ctrl-C ends it with. console:
    the output that the command makes itself, without the usual display."""
    if sys.stdout is sys.__stdout__:
        sys.stdout, sys.stderr = Unfailing.standard(1), Unfailing.standard(2)
    report = partial(_print_last, debug=debug, console=console)
    try:
        with nullcontext() if console else shown_by(usual_display()):
            return command()
    except MegagrpoError as error:
        return report(error)
    except (MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and (problem := path_problem(error)):
            return report(PreflightError(problem))
        number = error.errno if isinstance(error, OSError) else errno.EAGAIN if NO_THREAD in str(error) else None
        if number not in SHORTAGES and not isinstance(error, MemoryError):
            raise
        room = "make room (disk, memory, ulimit -n)"
        if number == errno.EAGAIN:
            room = "allow more processes and threads (ulimit -u, or pids.max of the container or job)"
        fix = f"{room}, then start the same command again: a run continues"
        shortage = MachineError(Problem("this machine", str(error) or "out of memory", "room for the command", fix))
        return report(shortage)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _print_last(error: MegagrpoError, *, debug: bool, console: str | None) -> int:
    """Prints the error once, as the last output of a command, in colours on a terminal. Returns the exit code."""
    if debug:
        traceback.print_exc()
    if console == "json":
        import json

        problems = [{field: getattr(p, field) for field in ("where", "given", "needed", "fix")} for p in error.problems]
        print(json.dumps({"event": "error", "title": error.title, "exit_code": error.exit_code, "problems": problems}))
    if not is_terminal(sys.stderr):
        print(error, file=sys.stderr)
        return error.exit_code
    from rich.console import Console
    from rich.text import Text

    text = Text(str(error))
    text.highlight_regex(r"\A.*", "bold red")
    text.highlight_regex(r"(?m)^ +(given|needed):", "dim")
    text.highlight_regex(r"(?m)^ +fix:", "green")
    Console(stderr=True).print(text, soft_wrap=True)
    return error.exit_code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; `command` is the function to call. Exits with code 2 if they are not valid."""
    parser: argparse.ArgumentParser = _Parser(
        prog="megagrpo", description="GRPO for large language models.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"megagrpo {__version__}")
    parser.add_argument("--debug", action="store_true", help="also print where in the code an error was raised")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_train(commands)
    for add_looking in (add_plan, add_runs, add_report, add_track, add_doctor):
        add_looking(commands)
    for add_making in (add_data, add_prepare, add_convert, add_import):
        add_making(commands)
    args, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(args, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # overrides behind a flag: argparse does not join them with earlier ones
        args.overrides = [*args.overrides, *rest]
    if getattr(args, "gpus", None) is not None and not args.search:
        parser.error("--gpus is for --search")
    return args


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


if __name__ == "__main__":
    sys.exit(main())
