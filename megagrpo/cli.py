"""The megagrpo command. Each subcommand reads its arguments, calls one function and prints what it returns."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megagrpo import __version__
from megagrpo.errors import MachineError, MegagrpoError, PreflightError, Problem, printable

if TYPE_CHECKING:
    from megagrpo.convert.job import Converted
    from megagrpo.data.prepare import Prepared

EXIT_DIFFERENT = 1
EXIT_WRONG = 1
EXIT_INTERRUPTED = 130
DIFFERENCES_SHOWN = 10
SHORTAGES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
NAMES = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR}
"""What is wrong with a path that a user named, wherever it is found first."""
GPUS_MAX = 100_000


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
    asked = parse(arguments)
    if sys.stdout is sys.__stdout__:
        sys.stdout, sys.stderr = Unfailing.standard(1), Unfailing.standard(2)
    try:
        code: int = asked.command(asked)
        return code
    except MegagrpoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno in NAMES and error.filename:
            needed, fix = "a path that this machine can have", "correct it in the recipe or the command"
            wrong = PreflightError(Problem(str(error.filename), error.strerror or str(error), needed, fix))
            print(wrong, file=sys.stderr)
            return wrong.exit_code
        if isinstance(error, OSError) and error.errno not in SHORTAGES:
            raise
        fix = "make room (disk, memory, ulimit -n), then start the same command again: a run continues"
        shortage = MachineError(Problem("this machine", str(error) or "out of memory", "room for the command", fix))
        print(shortage, file=sys.stderr)
        return shortage.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; `command` is the function to call. Exits with code 2 if they are not valid."""
    parser = _parser()
    asked, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(asked, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # overrides behind a flag: argparse does not add them to those before it
        asked.overrides = [*asked.overrides, *rest]
    if getattr(asked, "gpus", None) is not None and not asked.search:
        parser.error("--gpus is for --search")
    return asked


def train(asked: argparse.Namespace) -> int:
    from megagrpo.preflight.preflight import preflight
    from megagrpo.recipe.load import load

    ready = preflight(load(asked.recipe, asked.overrides), engines_too=asked.train_only is None)
    from megagrpo.trainer import one_half, train  # import ray: only once the recipe is known to be good

    if asked.rollout_only:
        return one_half.rollout_only(ready)
    if asked.replay_schedule:
        return train.replay_schedule(ready, asked.replay_schedule)
    return train.train(ready) if asked.train_only is None else one_half.train_only(ready, asked.train_only)


def replay(asked: argparse.Namespace) -> int:
    from megagrpo.preflight.preflight import preflight
    from megagrpo.trainer.replay import load_replay
    from megagrpo.trainer.replay import replay as replay_step

    ready = preflight(load_replay(asked.directory, asked.step, asked.overrides), engines_too=False)
    return 0 if replay_step(ready, asked.directory, asked.step, print) else EXIT_DIFFERENT


def sft(asked: argparse.Namespace) -> int:
    from megagrpo.preflight.preflight import preflight
    from megagrpo.recipe.load import load_sft

    ready = preflight(load_sft(asked.recipe, asked.overrides))
    from megagrpo.trainer.sft import sft as run  # imports ray: only once the recipe is known to be good

    return run(ready)


def plan(asked: argparse.Namespace) -> int:
    from megagrpo.preflight.preflight import preflight
    from megagrpo.recipe.load import load_any

    loaded = load_any(asked.recipe, asked.overrides)
    ready = preflight(loaded, plan_only=True)
    from megagrpo.plan.plan import plan_of
    from megagrpo.plan.search import search
    from megagrpo.weights.families import read_architecture

    planned = plan_of(
        ready.recipe,
        ready.architecture,
        given=asked.assume,
        run_directory=asked.calibrate,
        unchecked=ready.unchecked,
        epoch_rows=ready.epoch_rows,
        critic=read_architecture(ready.critic_directory) if ready.critic_directory else None,
    )
    found = search(planned, asked.gpus) if asked.search else None
    if asked.html:
        from megagrpo.plan.show.page import page, write_page

        write_page(asked.html, page(planned, found))
    if asked.json:
        from megagrpo.plan.show.as_json import plan_json

        print(plan_json(planned, found))
    else:
        from rich.console import Console

        from megagrpo.plan.show.terminal import draw

        draw(planned, found, Console(highlight=False))
    problems = found.problems if found else planned.problems
    if problems:
        raise PreflightError(map(loaded.places.located, problems))
    if not asked.json and not planned.problems:
        print("OK")
    return 0


def report(asked: argparse.Namespace) -> int:
    from megagrpo.report import report as report_of

    print(report_of(asked.directory, asked.steps))
    return 0


def doctor(asked: argparse.Namespace) -> int:
    if asked.clean:
        from megagrpo.weights.transport.shared_memory import remove_abandoned

        removed = remove_abandoned()
        print("\n".join([*(f"removed {path}" for path in removed), f"{len(removed)} files of killed runs"]))
        return 0
    from megagrpo.doctor.doctor import examine

    return 0 if examine(print) else EXIT_WRONG


def prepare_gsm8k(asked: argparse.Namespace) -> int:
    from megagrpo.data.prepare import prepare_gsm8k as prepare

    return _print_prepared(prepare(asked.source, asked.output))


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


def prepare_adder(asked: argparse.Namespace) -> int:
    from megagrpo.demo.prepare import prepare

    prepare(asked.output, say=print)
    return 0


def convert_to_megatron(asked: argparse.Namespace) -> int:
    from megagrpo.convert.megatron import to_megatron

    done = to_megatron(asked.source, asked.output, model=asked.model, dtype=asked.dtype, overwrite=asked.overwrite)
    return _print_converted(done)


def convert_to_hugging_face(asked: argparse.Namespace) -> int:
    from megagrpo.convert.hugging_face import to_hugging_face

    done = to_hugging_face(asked.source, asked.output, model=asked.model, dtype=asked.dtype, overwrite=asked.overwrite)
    return _print_converted(done)


def merge_lora(asked: argparse.Namespace) -> int:
    from megagrpo.convert.merge_lora import merge_lora as merge

    done = merge(
        asked.source, asked.adapter, asked.output, model=asked.model, dtype=asked.dtype, overwrite=asked.overwrite
    )
    return _print_converted(done)


def verify(asked: argparse.Namespace) -> int:
    from megagrpo.convert.verify import verify as compare

    found = compare(asked.first, asked.second, model=asked.model, dtype=asked.dtype)
    for directory, names in found.left_out:
        print(f"not compared, only in {directory}: {', '.join(names)}")
    if not found.differences:
        print(f"the same: {found.tensors} tensors, {found.bytes / 1e9:.3f} GB")
        return 0
    for difference in found.differences[:DIFFERENCES_SHOWN]:
        print(difference)
    if (more := len(found.differences) - DIFFERENCES_SHOWN) > 0:
        print(f"and {more} more")
    print(f"{len(found.differences)} tensors differ, by at most {found.largest:.3g}", file=sys.stderr)
    return EXIT_DIFFERENT


def _print_converted(done: Converted) -> int:
    if done.left_out:
        print(f"not converted, because they are not the model's: {', '.join(done.left_out)}", file=sys.stderr)
    if done.continued:
        print(f"continued: {done.continued} parts were on disk from an earlier attempt", file=sys.stderr)
    print(f"{done.tensors} tensors, {done.bytes / 1e9:.3f} GB, in {done.directory}")
    return 0


def _print_prepared(prepared: Prepared) -> int:
    print(f"{prepared.train_rows} rows in {prepared.train}")
    if prepared.test is not None:
        print(f"{prepared.test_rows} rows in {prepared.test}")
    return 0


def _whole(least: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isdecimal() or len(text) > 20 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return whole


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    command: Callable[[argparse.Namespace], int] | None = None,
) -> argparse.ArgumentParser:
    """A new command, or a group of commands if no function is given."""
    added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    if command:
        added.set_defaults(command=command)
    return added


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="megagrpo", description="GRPO for large language models.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"megagrpo {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    for name, command, text in (
        ("train", train, "check a recipe, then train; continues from the run's newest checkpoint"),
        ("sft", sft, "the same for supervised fine-tuning on conversations: recipes of kind sft, see docs/sft.md"),
        ("plan", plan, "check a recipe and estimate its layout, memory and time, without GPUs; starts nothing"),
    ):
        added = _add(commands, name, text, command)
        added.add_argument("recipe", type=Path, metavar="RECIPE", help="YAML file, see docs/recipes.md")
        _add_overrides(added)
        if command is train:
            half = added.add_mutually_exclusive_group()
            text = "sample and score all steps with the starting weights, and save the batches; see docs/debugging.md"
            half.add_argument("--rollout-only", action="store_true", help=text)
            text = "train on the batches that another run has saved, without engines"
            half.add_argument("--train-only", type=Path, metavar="RUN_DIRECTORY", help=text)
            text = "repeat the order of a run that sampled in the background, from its schedule.jsonl"
            half.add_argument("--replay-schedule", type=Path, metavar="RUN_DIRECTORY", help=text)
        if command is plan:
            _add_plan(added)

    text = "train a step of a run again from its saved batch, and compare its metrics; exits with 1 if they differ"
    added = _add(commands, "replay", text, replay)
    added.add_argument("directory", type=Path, metavar="RUN_DIRECTORY", help="such as runs/NAME")
    added.add_argument(
        "--step",
        type=_whole(1, 10**9),
        required=True,
        metavar="K",
        help="one of those that checkpoint.keep_batches kept",
    )
    _add_overrides(added)

    text = "print how far a run's training and rollout logprobs differ, and in which tokens"
    added = _add(commands, "report", text, report)
    added.add_argument("directory", type=Path, metavar="RUN_DIRECTORY", help="such as runs/NAME")
    added.add_argument(
        "--steps", type=_whole(1, 10**9), default=20, metavar="N", help="last steps to show; default: 20"
    )

    text = "check packages, GPUs, network and limits of this machine; each fault comes with a remedy, and exits with 1"
    clean = "remove what killed runs of this user left in /dev/shm, instead"
    _add(commands, "doctor", text, doctor).add_argument("--clean", action="store_true", help=clean)
    _add_prepare(commands)
    _add_convert(commands)
    return parser


def _add_overrides(added: argparse.ArgumentParser) -> None:
    added.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="such as train.layout.tensor=4")


def _add_plan(planner: argparse.ArgumentParser) -> None:
    planner.add_argument("--html", type=Path, metavar="FILE", help="write the plan as one self-contained page")
    planner.add_argument("--json", action="store_true", help="print everything as JSON instead, see docs/plan.md")
    planner.add_argument("--search", action="store_true", help="find the fastest layouts that fit")
    planner.add_argument(
        "--gpus", type=_whole(1, GPUS_MAX), metavar="N", help="GPUs for --search; default: the recipe's"
    )
    planner.add_argument(
        "--assume", action="append", default=[], metavar="NAME=VALUE", help="such as response_tokens=2000; repeatable"
    )
    planner.add_argument(
        "--calibrate", type=Path, metavar="RUN_DIRECTORY", help="take assumptions from what a run measured"
    )


def _add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    preparers = _add(commands, "prepare", "write prompt files (parquet)").add_subparsers(
        title="data sets", required=True, metavar="DATA_SET"
    )
    files = "for train.parquet and test.parquet"
    gsm8k = _add(preparers, "gsm8k", "GSM8K, from the folder with its own parquet or JSONL files", prepare_gsm8k)
    gsm8k.add_argument("--source", type=Path, required=True, metavar="DIR", help="folder with both splits")
    gsm8k.add_argument("--output", type=Path, required=True, metavar="DIR", help=files)

    text = "the demo's untrained model of a million parameters and its two-digit sums"
    adder = _add(preparers, "adder", text, prepare_adder)
    adder.add_argument("--output", type=Path, required=True, metavar="DIR", help="for untrained/ and parquet files")

    jsonl = _add(preparers, "jsonl", "your own questions and answers, JSONL or parquet", prepare_jsonl)
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
    jsonl.add_argument("--seed", type=_whole(0, 2**63 - 1), default=0, metavar="N", help=seed)


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    converters = _add(commands, "convert", "change the format of a checkpoint, or compare two").add_subparsers(
        title="conversions", required=True, metavar="CONVERSION"
    )
    dtypes = ("float32", "bfloat16", "float16")
    source = "Hugging Face model, Megatron-LM's torch_dist, or a training checkpoint of megagrpo"
    model = "Hugging Face model that gives config and tokenizer to a checkpoint without them"
    for name, command, text in (
        ("hf-to-megatron", convert_to_megatron, "write torch_dist, which Megatron-LM loads in any layout"),
        ("megatron-to-hf", convert_to_hugging_face, "write a Hugging Face model directory"),
        ("merge-lora", merge_lora, "write a Hugging Face model directory with a low-rank adapter added to the weights"),
    ):
        added = _add(converters, name, text, command)
        added.add_argument("--source", type=Path, required=True, metavar="DIR", help=source)
        added.add_argument("--output", type=Path, required=True, metavar="DIR", help="appears when it is complete")
        if command is merge_lora:
            adapter = "PEFT adapter, or a training checkpoint of megagrpo with train.lora"
            added.add_argument("--adapter", type=Path, required=True, metavar="DIR", help=adapter)
        added.add_argument("--model", type=Path, metavar="DIR", help=model)
        added.add_argument("--dtype", choices=dtypes, help="default: as stored")
        added.add_argument("--overwrite", action="store_true", help="replace an existing output, as the last act")
    text = "compare two checkpoints of any formats bit by bit; exits with 1 if they differ"
    added = _add(converters, "verify", text, verify)
    added.add_argument("first", type=Path, metavar="FIRST", help=source)
    added.add_argument("second", type=Path, metavar="SECOND", help=source)
    added.add_argument("--model", type=Path, metavar="DIR", help=model)
    added.add_argument("--dtype", choices=dtypes, help="compare after a cast to this; default: as stored")


if __name__ == "__main__":
    sys.exit(main())
