"""`python -m examples.prepare adder`: an untrained model, sums to warm it up with, and prompts, made once.

The warm start teaches the model to add two-digit numbers, first with right answers, then with answers that mostly leave
out the carry. Afterwards it answers sums without a carry rightly. For the others it knows both answers and prefers the
wrong one, so that about half of all sums are right. GRPO sees both answers in one group of samples, and teaches it to
carry.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from examples.demo.model import FAMILIES, make_model, make_tokenizer
from megagrpo.data.prepare import PromptRow, prompt_row, write_splits

DATA_SOURCE = "adder"
LOWEST, HIGHEST = 10, 99
WARM_START_PAIRS = 2400
TEST_PAIRS = 260
SEED = 0
CARELESS_SHARE = 0.8
HELD_OUT_FROM_TRAIN = 256  # not from the test's sums, of which the warm start sees nothing


@dataclass(frozen=True, slots=True)
class Sum:
    """One question, such as 37+45."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def careless_answer(self) -> str:
        """Returns the sum without the carry from units to tens: 72 for 37+45. Right only if there is no carry."""
        return str((self.a // 10 + self.b // 10) * 10 + (self.a + self.b) % 10)

    @property
    def response(self) -> str:
        """Returns the answer in GSM8K's form, which the gsm8k reward reads."""
        return f"#### {self.answer}"

    @property
    def careless_response(self) -> str:
        return f"#### {self.careless_answer}"


@dataclass(frozen=True, slots=True)
class Splits:
    """The sums of each split. a+b and b+a share a split: a model that knows one cannot answer the other from memory."""

    warm_start: tuple[Sum, ...]
    train: tuple[Sum, ...]
    test: tuple[Sum, ...]


def make_splits() -> Splits:
    """Splits all 8,100 sums, shuffled by a fixed seed: about 520 to test, 4,700 to warm up, the others to train."""
    pairs = [(a, b) for a in range(LOWEST, HIGHEST + 1) for b in range(a, HIGHEST + 1)]
    random.Random(SEED).shuffle(pairs)
    warm_start_end = TEST_PAIRS + WARM_START_PAIRS
    return Splits(
        warm_start=both_orders(pairs[TEST_PAIRS:warm_start_end]),
        train=both_orders(pairs[warm_start_end:]),
        test=both_orders(pairs[:TEST_PAIRS]),
    )


def both_orders(pairs: Iterable[tuple[int, int]]) -> tuple[Sum, ...]:
    return tuple(Sum(*order) for a, b in pairs for order in dict.fromkeys([(a, b), (b, a)]))


@dataclass(frozen=True)
class AdderFiles:
    """The files that `prepare` writes to its output directory."""

    model: Path  # Hugging Face directory of an untrained model, with the tokenizer; other families' are beside it
    right: Path  # conversations with right answers
    careless: Path  # the same questions; most answers leave out the carry
    held_out: Path  # other questions, answered like careless
    train: Path  # prompts for GRPO
    test: Path  # held-out prompts, seen by neither warm start nor GRPO
    fingerprint: Path  # written last: the others are complete if it is there

    @classmethod
    def within(cls, directory: Path) -> AdderFiles:
        return cls(
            model=directory / "untrained",
            right=directory / "sft_right.parquet",
            careless=directory / "sft_careless.parquet",
            held_out=directory / "sft_held_out.parquet",
            train=directory / "train.parquet",
            test=directory / "test.parquet",
            fingerprint=directory / "fingerprint",
        )


def fingerprint() -> str:
    """Returns a digest of this package's code, which has all the settings."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def is_prepared(directory: Path) -> bool:
    """Returns whether the directory holds what this code makes."""
    files = AdderFiles.within(directory)
    return files.fingerprint.is_file() and files.fingerprint.read_text(encoding="utf-8").strip() == fingerprint()


def prepare(output: Path, say: Callable[[str], None] = lambda line: None) -> AdderFiles:
    """Makes the model and all files in `output`, unless they are there. `say` receives lines of progress."""
    files = AdderFiles.within(output)
    if is_prepared(output):
        say(f"{output}: model, examples and prompts are there already")
        return files
    files.fingerprint.unlink(missing_ok=True)
    splits = make_splits()
    write_splits(output, [], train=_prompts(splits.train, "train"), test=_prompts(splits.test, "test"))
    teacher = random.Random(SEED)
    learn = teacher.sample(splits.warm_start, len(splits.warm_start))  # a+b and b+a apart
    _write(files.right, ((example, example.response) for example in learn))
    _write(files.careless, ((example, _carelessly(example, teacher)) for example in learn))
    _write(files.held_out, ((example, _carelessly(example, teacher)) for example in splits.train[:HELD_OUT_FROM_TRAIN]))
    say(f"{output}: {len(learn)} sums to warm up with, {len(splits.train)} to train on, {len(splits.test)} held out")

    tokenizer = make_tokenizer()
    for family in FAMILIES:
        directory = files.model if family == "qwen2" else files.model.with_name(f"untrained_{family}")
        model = make_model(tokenizer, SEED, family)
        shutil.rmtree(directory, ignore_errors=True)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        say(f"{directory}: {model.num_parameters():,} parameters, untrained")
    files.fingerprint.write_text(fingerprint() + "\n", encoding="utf-8")
    return files


def _carelessly(example: Sum, teacher: random.Random) -> str:
    return example.careless_response if teacher.random() < CARELESS_SHARE else example.response


def _write(path: Path, answered: Iterable[tuple[Sum, str]]) -> None:
    rows = [
        {"messages": [{"role": "user", "content": example.question}, {"role": "assistant", "content": response}]}
        for example, response in answered
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def _prompts(sums: tuple[Sum, ...], split: str) -> list[PromptRow]:
    return [
        prompt_row(
            question=example.question,
            ground_truth=example.answer,
            data_source=DATA_SOURCE,
            ability="arithmetic",
            extra_info={"split": split, "index": index, "answer": example.response},
        )
        for index, example in enumerate(sums)
    ]
