"""The commands of `megagrpo`, one file per question: what each reads, the function that it calls, what it prints. Here:
arguments that several share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    commands: Commands, name: str, text: str, command: Callable[[argparse.Namespace], int] | None = None
) -> argparse.ArgumentParser:
    """Adds a command, or the parser of a group of commands if no function is given."""
    added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    # Also behind a command; SUPPRESS leaves what was given before it.
    added.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    if command:
        added.set_defaults(command=command)
    return added


def add_group(commands: Commands, name: str, text: str, title: str = "what to do", metavar: str = "WHAT") -> Commands:
    """Adds a group of commands, such as `data show` and `data check`."""
    return add_command(commands, name, text).add_subparsers(title=title, required=True, metavar=metavar)


def add_overrides(added: argparse.ArgumentParser) -> None:
    added.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="such as train.layout.tensor=4")


def add_output(added: argparse.ArgumentParser) -> None:
    """Adds --quiet and --json, for how much a long command prints, in place of track.console, for this time alone."""
    how = added.add_mutually_exclusive_group()
    how.add_argument(
        "--quiet", dest="console", action="store_const", const="off", help="print errors and results alone"
    )
    text = "print a JSON object per line for programs, see docs/console.md"
    how.add_argument("--json", dest="console", action="store_const", const="json", help=text)


def whole_number(least: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isdecimal() or len(text) > 20 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return whole
