"""`megagrpo prepare adder`: the demo's model and prompt files, made once."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from megagrpo.data.prepared import PromptRow, prompt_row, write_splits
from megagrpo.demo.model import make_model
from megagrpo.demo.sums import SEED, Sum, make_splits
from megagrpo.demo.tokenizer import make_tokenizer
from megagrpo.demo.warm_start import WarmStart, encode, exact_match, warm_start

DATA_SOURCE = "adder"
HELD_OUT_FROM_TRAIN = 512
THREADS = 2  # fixed, because sums of floats depend on it and the model should not


@dataclass(frozen=True)
class AdderFiles:
    """What `prepare` leaves in its output directory."""

    model: Path  # Hugging Face directory with the tokenizer
    train: Path  # prompts for GRPO
    test: Path  # held-out prompts, seen by neither warm start nor GRPO
    warm_start: Path  # what the warm start was trained on
    fingerprint: Path  # written last: the others are complete if it is there

    @classmethod
    def within(cls, directory: Path) -> AdderFiles:
        return cls(
            model=directory / "model",
            train=directory / "train.parquet",
            test=directory / "test.parquet",
            warm_start=directory / "warm_start.parquet",
            fingerprint=directory / "fingerprint",
        )


def fingerprint() -> str:
    """Digest of this package's code, which has all the settings."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def is_prepared(directory: Path) -> bool:
    """True if the directory holds what this code makes."""
    files = AdderFiles.within(directory)
    return files.fingerprint.is_file() and files.fingerprint.read_text(encoding="utf-8").strip() == fingerprint()


def prepare(
    output: Path, settings: WarmStart | None = None, say: Callable[[str], None] = lambda line: None
) -> AdderFiles:
    """Make the model and the prompt files in `output`, unless they are there. `say` receives lines of progress."""
    files = AdderFiles.within(output)
    if is_prepared(output):
        say(f"{output}: model and prompts are there already")
        return files
    files.fingerprint.unlink(missing_ok=True)
    splits = make_splits()
    write_splits(output, [], train=_rows(splits.train, "train"), test=_rows(splits.test, "test"))
    pq.write_table(pa.Table.from_pylist(_rows(splits.warm_start, "warm_start")), files.warm_start)
    say(f"{output}: {len(splits.train)} prompts to train on, {len(splits.test)} held out")

    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        _make_model(files.model, settings or WarmStart(), splits.warm_start, splits.train, splits.test, say)
    finally:
        torch.set_num_threads(threads)
    files.fingerprint.write_text(fingerprint() + "\n", encoding="utf-8")
    return files


def _make_model(
    directory: Path,
    settings: WarmStart,
    learn: Sequence[Sum],
    train: Sequence[Sum],
    test: Sequence[Sum],
    say: Callable[[str], None],
) -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, SEED)
    steps = settings.steps + settings.careless_steps
    say(f"warm start: {model.num_parameters():,} parameters, {len(learn)} sums, {steps} steps")
    warm_start(
        model,
        learn,
        train[:HELD_OUT_FROM_TRAIN],  # not the test's: those stay unseen in every way
        tokenizer,
        settings,
        SEED,
        lambda step, loss: say(f"  step {step}: loss {loss:.3f}") if step % 50 == 0 else None,
    )
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    say(f"{directory}: {exact_match(model, encode(test, tokenizer)):.3f} of held-out sums right")


def _rows(sums: Sequence[Sum], split: str) -> list[PromptRow]:
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
