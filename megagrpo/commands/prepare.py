"""`megagrpo prepare`: prompt files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.agents.environments.prepare import add_preparers
from megagrpo.commands.arguments import add_command, whole_number
from megagrpo.errors import DataError, Problem, first_line

if TYPE_CHECKING:
    from megagrpo.data.prepare import Prepared

PATTERNS = ["*.parquet", "*.json", "*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.arrow"]


def add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    preparers = add_command(commands, "prepare", "write prompt files (parquet)").add_subparsers(
        title="data sets", required=True, metavar="DATA_SET"
    )
    files = "for train.parquet and test.parquet"
    for name, command, text, written in (
        ("gsm8k", prepare_gsm8k, "GSM8K, from the folder with its own parquet or JSONL files", files),
        ("math", prepare_math, "MATH, from the folder with its own JSON, JSONL or parquet files", files),
        ("livecodebench", prepare_livecodebench, "LiveCodeBench, from its own JSONL files", "for train.parquet"),
    ):
        added = add_command(preparers, name, text, command)
        source = added.add_mutually_exclusive_group(required=True)
        source.add_argument("--source", type=Path, metavar="DIR", help="folder with the data set's files")
        hub = "name of the data set on the Hugging Face hub, such as openai/gsm8k"
        source.add_argument("--hub", metavar="NAME", help=hub)
        added.add_argument("--output", type=Path, required=True, metavar="DIR", help=written)

    add_preparers(
        lambda name, text, prepare: add_command(preparers, name, text, lambda asked: _print_prepared(prepare(asked))),
        whole_number,
    )

    jsonl = add_command(preparers, "jsonl", "your own questions and answers, JSONL or parquet", prepare_jsonl)
    jsonl.add_argument("--source", type=Path, required=True, metavar="FILE", help="one object or row per question")
    jsonl.add_argument("--output", type=Path, required=True, metavar="DIR", help=files)
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


def prepare_gsm8k(asked: argparse.Namespace) -> int:
    from megagrpo.data.prepare import prepare_gsm8k as prepare

    return _print_prepared(prepare(_source(asked), asked.output))


def prepare_math(asked: argparse.Namespace) -> int:
    from megagrpo.data.prepare_math import prepare_math as prepare

    return _print_prepared(prepare(_source(asked), asked.output))


def prepare_livecodebench(asked: argparse.Namespace) -> int:
    from megagrpo.data.prepare_livecodebench import prepare_livecodebench as prepare

    return _print_prepared(prepare(_source(asked), asked.output))


def _source(asked: argparse.Namespace) -> Path:
    """Returns the folder with a data set's own files: here, or from the hub."""
    return asked.source if asked.hub is None else downloaded(asked.hub)


def downloaded(name: str) -> Path:
    """Returns the folder with the data files of a data set, from the local cache or the hub. Raises DataError.

    HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT are honoured.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=PATTERNS))
    except (OSError, HFValidationError, IncompleteSnapshotError) as error:
        given = f"{name}: {type(error).__name__}: {first_line(error)}"
        needed = "a data set in the local cache, or one that can be downloaded"
        fix = "check the name, the network, HF_HUB_OFFLINE and HF_TOKEN; or copy its files here (--source)"
        raise DataError(Problem("the Hugging Face hub does not give the data set", given, needed, fix)) from None


def prepare_jsonl(asked: argparse.Namespace) -> int:
    from megagrpo.data.prepare import prepare_jsonl as prepare

    prepared = prepare(
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
    return _print_prepared(prepared)


def _print_prepared(prepared: Prepared) -> int:
    print(f"{prepared.train_rows} rows in {prepared.train}")
    if prepared.test is not None:
        print(f"{prepared.test_rows} rows in {prepared.test}")
    return 0
