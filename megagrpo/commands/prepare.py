"""`megagrpo prepare`: prompt files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.commands.arguments import add_command, whole_number

if TYPE_CHECKING:
    from megagrpo.data.prepare import Prepared


def add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    preparers = add_command(commands, "prepare", "write prompt files (parquet)").add_subparsers(
        title="data sets", required=True, metavar="DATA_SET"
    )

    def add(name: str, text: str, prepare: Callable[[argparse.Namespace], Prepared]) -> argparse.ArgumentParser:
        def command(asked: argparse.Namespace) -> int:
            print(prepare(asked))
            return 0

        added = add_command(preparers, name, text, command)
        added.add_argument(
            "--output", type=Path, required=True, metavar="DIR", help="for train.parquet and test.parquet"
        )
        return added

    jsonl = add("jsonl", "your own questions and answers, JSONL or parquet", _jsonl)
    jsonl.add_argument("--source", type=Path, required=True, metavar="FILE", help="one object or row per question")
    jsonl.add_argument("--prompt-column", default="prompt", metavar="NAME", help="default: prompt")
    jsonl.add_argument("--answer-column", default="answer", metavar="NAME", help="default: answer")
    jsonl.add_argument(
        "--data-source", metavar="NAME", help="what rewards receive as data_source; default: the file's name"
    )
    jsonl.add_argument("--instruction", default="", metavar="TEXT", help="appended to every question")
    jsonl.add_argument("--system-prompt", default="", metavar="TEXT", help="system message of every prompt")
    jsonl.add_argument(
        "--test-share", type=float, default=0.0, metavar="X", help="share of the questions held out; default: 0"
    )
    seed = "chooses the questions held out; default: 0"
    jsonl.add_argument("--seed", type=whole_number(0, 2**63 - 1), default=0, metavar="N", help=seed)

    verifiers = add(
        "verifiers", "the tasks of an environment of the verifiers package, for agent.verifiers", _verifiers
    )
    verifiers.add_argument("environment", metavar="ENVIRONMENT", help="as in the recipe: a name, or FILE.py:FUNCTION")
    text = "interpreter that has the package, as agent.python; default: this one"
    verifiers.add_argument("--python", metavar="FILE", help=text)
    text = "its arguments, as in the recipe: an object of JSON"
    verifiers.add_argument("--arguments", type=_object, default={}, metavar="JSON", help=text)
    text = "most tasks of each split; default: all"
    verifiers.add_argument("--size", type=whole_number(1, 10**8), metavar="N", help=text)

    openenv = add("openenv", "a row for each seed of an OpenEnv environment's episodes, for agent.openenv", _openenv)
    openenv.add_argument("--prompt", required=True, metavar="TEXT", help="text before the first observation")
    openenv.add_argument("--system-prompt", default="", metavar="TEXT", help="system message of every prompt")
    openenv.add_argument("--size", type=whole_number(1, 10**7), default=1000, metavar="N", help="rows; default: 1000")
    text = "rows held out, of the seeds that follow; default: 0"
    openenv.add_argument("--test-size", type=whole_number(0, 10**7), default=0, metavar="N", help=text)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no object of JSON")
    return value


def _jsonl(asked: argparse.Namespace) -> Prepared:
    from megagrpo.data.prepare import prepare_jsonl

    return prepare_jsonl(
        asked.source,
        asked.output,
        prompt_column=asked.prompt_column,
        answer_column=asked.answer_column,
        data_source=asked.data_source,
        instruction=asked.instruction,
        system_prompt=asked.system_prompt,
        test_share=asked.test_share,
        seed=asked.seed,
    )


def _verifiers(asked: argparse.Namespace) -> Prepared:
    from megagrpo.agents.environments.prepare import prepare_verifiers

    return prepare_verifiers(
        asked.environment, asked.output, arguments=asked.arguments, python=asked.python, size=asked.size
    )


def _openenv(asked: argparse.Namespace) -> Prepared:
    from megagrpo.agents.environments.prepare import prepare_openenv

    return prepare_openenv(
        asked.prompt, asked.output, system_prompt=asked.system_prompt, train=asked.size, test=asked.test_size
    )
