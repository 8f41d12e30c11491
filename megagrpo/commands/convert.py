"""`megagrpo convert`: checkpoints of one kind into another, and a comparison of two."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megagrpo.commands.arguments import add_command

EXIT_DIFFERENT = 1
DIFFERENCES_SHOWN = 10


def add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    converters = add_command(commands, "convert", "change the format of a checkpoint, or compare two").add_subparsers(
        title="conversions", required=True, metavar="CONVERSION", dest="conversion"
    )
    dtypes = ("float32", "bfloat16", "float16")
    source = "Hugging Face model, Megatron-LM's torch_dist, or a training checkpoint of megagrpo"
    model = "Hugging Face model that gives config and tokenizer to a checkpoint without them"
    for name, text in (
        ("hf-to-megatron", "write torch_dist, which Megatron-LM loads in any layout"),
        ("megatron-to-hf", "write a Hugging Face model directory"),
        ("merge-lora", "write a Hugging Face model directory with a low-rank adapter added to the weights"),
    ):
        added = add_command(converters, name, text, convert)
        added.add_argument("--source", type=Path, required=True, metavar="DIR", help=source)
        added.add_argument("--output", type=Path, required=True, metavar="DIR", help="appears when it is complete")
        if name == "merge-lora":
            adapter = "PEFT adapter, or a training checkpoint of megagrpo with train.lora"
            added.add_argument("--adapter", type=Path, required=True, metavar="DIR", help=adapter)
        added.add_argument("--model", type=Path, metavar="DIR", help=model)
        added.add_argument("--dtype", choices=dtypes, help="default: as stored")
        added.add_argument("--overwrite", action="store_true", help="replace an existing output, as the last act")
    text = "compare two checkpoints of any formats bit by bit; exits with 1 if they differ"
    added = add_command(converters, "verify", text, verify)
    added.add_argument("first", type=Path, metavar="FIRST", help=source)
    added.add_argument("second", type=Path, metavar="SECOND", help=source)
    added.add_argument("--model", type=Path, metavar="DIR", help=model)
    added.add_argument("--dtype", choices=dtypes, help="compare after a cast to this; default: as stored")


def convert(asked: argparse.Namespace) -> int:
    from megagrpo.convert.hugging_face import to_hugging_face
    from megagrpo.convert.megatron import to_megatron
    from megagrpo.convert.merge_lora import merge_lora

    how = {"model": asked.model, "dtype": asked.dtype, "overwrite": asked.overwrite}
    match asked.conversion:
        case "hf-to-megatron":
            done = to_megatron(asked.source, asked.output, **how)
        case "megatron-to-hf":
            done = to_hugging_face(asked.source, asked.output, **how)
        case _:
            done = merge_lora(asked.source, asked.adapter, asked.output, **how)
    if done.left_out:
        print(f"not converted, because they are not the model's: {', '.join(done.left_out)}", file=sys.stderr)
    if done.continued:
        print(f"continued: {done.continued} parts were on disk from an earlier attempt", file=sys.stderr)
    print(f"{done.tensors} tensors, {done.bytes / 1e9:.3f} GB, in {done.directory}")
    return 0


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
