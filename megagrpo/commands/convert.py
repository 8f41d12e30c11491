"""`megagrpo convert`, for the checkpoints of other frameworks, and `megagrpo import`, for their configurations."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megagrpo.commands import Commands, add_command, add_group
from megagrpo.errors import Problem, RecipeError, few

EXIT_DIFFERENT = 1
SHOWN = 10
KNOWN_VARIABLES = ("HOME", "USER", "PWD")
"""Variables of this machine that scripts may use. Others may be secrets, or another machine's."""


def add_convert(commands: Commands) -> None:
    text = "change the format of a checkpoint, or compare two"
    converters = add_group(commands, "convert", text, "conversions", "CONVERSION")
    dtypes = ("float32", "bfloat16", "float16")
    source = "Hugging Face model, Megatron-LM's torch_dist, or a training checkpoint of megagrpo"
    model = "Hugging Face model that gives config and tokenizer to a checkpoint without them"
    for name, text in (
        ("hf-to-megatron", "write torch_dist, which Megatron-LM loads in any layout"),
        ("megatron-to-hf", "write a Hugging Face model directory"),
        ("merge-lora", "write a Hugging Face model directory with a low-rank adapter added to the weights"),
    ):
        added = add_command(converters, name, text, convert)
        added.set_defaults(conversion=name)
        added.add_argument("--source", type=Path, required=True, metavar="DIR", help=source)
        added.add_argument("--output", type=Path, required=True, metavar="DIR", help="appears when it is complete")
        if name == "merge-lora":
            adapter = "PEFT adapter, or a training checkpoint of megagrpo with train.lora"
            added.add_argument("--adapter", type=Path, required=True, metavar="DIR", help=adapter)
        added.add_argument("--model", type=Path, metavar="DIR", help=model)
        added.add_argument("--dtype", choices=dtypes, help="default: as stored")
        if name != "hf-to-megatron":
            reference = "write a training checkpoint's reference policy (algorithm.reference), not its policy"
            added.add_argument("--reference", action="store_true", help=reference)
        added.add_argument("--overwrite", action="store_true", help="replace an existing output, as the last act")
    text = "compare two checkpoints of any formats bit by bit; exits with 1 if they differ"
    added = add_command(converters, "verify", text, verify)
    added.add_argument("first", type=Path, metavar="FIRST", help=source)
    added.add_argument("second", type=Path, metavar="SECOND", help=source)
    added.add_argument("--model", type=Path, metavar="DIR", help=model)
    added.add_argument("--dtype", choices=dtypes, help="compare after a cast to this; default: as stored")


def convert(args: argparse.Namespace) -> int:
    from megagrpo.convert.merge_lora import merge_lora
    from megagrpo.convert.targets import to_hugging_face, to_megatron

    how = {"model": args.model, "dtype": args.dtype, "overwrite": args.overwrite}
    match args.conversion:
        case "hf-to-megatron":
            done = to_megatron(args.source, args.output, **how)
        case "megatron-to-hf":
            done = to_hugging_face(args.source, args.output, reference=args.reference, **how)
        case _:
            done = merge_lora(args.source, args.adapter, args.output, reference=args.reference, **how)
    if done.left_out:
        print(f"not converted, because they are not the model's: {few(done.left_out, SHOWN)}", file=sys.stderr)
    if done.continued:
        print(f"continued: {done.continued} parts were on disk from an earlier attempt", file=sys.stderr)
    print(f"{done.tensors} tensors, {done.bytes / 1e9:.3f} GB, in {done.directory}")
    return 0


def verify(args: argparse.Namespace) -> int:
    from megagrpo.convert.verify import verify as compare

    comparison = compare(args.first, args.second, model=args.model, dtype=args.dtype)
    for directory, names in comparison.left_out:
        print(f"not compared, only in {directory}: {few(names, SHOWN)}")
    if not comparison.differences:
        print(f"the same: {comparison.tensors} tensors, {comparison.bytes / 1e9:.3f} GB")
        return 0
    for difference in comparison.differences[:SHOWN]:
        print(difference)
    if (more := len(comparison.differences) - SHOWN) > 0:
        print(f"and {more} more")
    print(f"{len(comparison.differences)} tensors differ, by at most {comparison.largest:.3g}", file=sys.stderr)
    return EXIT_DIFFERENT


def add_import(commands: Commands) -> None:
    text = "make a recipe from a configuration of another framework, and list what has no counterpart; runs nothing"
    added = add_command(commands, "import", text, import_)
    frameworks = ("verl", "open_instruct", "slime", "trl")
    added.add_argument("framework", choices=frameworks, help="framework of the configuration")
    text = "a shell script that starts training, a YAML file (verl, trl), or a Python file with GRPOConfig(...) (trl)"
    added.add_argument("source", type=Path, metavar="FILE", help=text)
    added.add_argument("-o", "--output", type=Path, metavar="RECIPE", help="write it here; default: print it")
    added.add_argument("--overwrite", action="store_true", help="replace an existing file")
    text = "value of an option, or of a variable that a script takes from elsewhere; repeatable"
    added.add_argument("--set", action="append", default=[], type=_variable, metavar="NAME=VALUE", help=text)


def import_(args: argparse.Namespace) -> int:
    from megagrpo.importing.read import import_recipe, report

    output: Path | None = args.output
    if output and output.exists() and not args.overwrite:
        raise RecipeError(Problem(str(output), "it exists", "a new file", "another name, or --overwrite"))
    environment = {name: os.environ[name] for name in KNOWN_VARIABLES if name in os.environ}
    made = import_recipe(args.framework, args.source, dict(args.set), environment)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(made.text, encoding="utf-8")
    else:
        print(made.text, end="")
    print(report(made.translation), file=sys.stdout if output else sys.stderr)
    if made.problems:
        raise RecipeError(made.problems)
    if output:
        print(f"\n{output} is written. Next: megagrpo plan {output}")
    return 0


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.replace(".", "_").isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
