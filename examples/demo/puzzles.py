"""`python -m examples.prepare puzzles`: short questions of several kinds, each with a right and a careless answer.

The demo's model learns them as it learns sums (demo/adder.py): right answers first, then mostly careless ones. It
also learns to compare two letters, so that it can be a judge.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from examples.demo.adder import CARELESS_SHARE, SEED
from megagrpo.data.prepare import PromptRow, prompt_row, write_splits

TEST, TRAIN = 100, 640
"""Puzzles of each kind that are held out, and to train on."""
INPUTS = (1, 7, 20)
"""Arguments with which a program is called."""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A question, what its verifier compares with, and two responses."""

    question: str
    ground_truth: str
    right: str
    careless: str


def tens(maker: random.Random) -> Puzzle:
    """Makes a sum of a number and some tens, for `gsm8k`. Careless: without the hundred, which half of them have."""
    a, b = maker.randint(10, 99), maker.randint(1, 9) * 10
    return Puzzle(f"{a}+{b}=", str(a + b), f"#### {a + b}", f"#### {(a + b) % 100}")


def larger(maker: random.Random) -> Puzzle:
    """Asks for the larger of two numbers, for `multiple_choice`. Careless: always the first."""
    a, b = maker.sample(range(10, 100), 2)
    right = "A" if a > b else "B"
    return Puzzle(f"Larger? A) {a} B) {b}", right, right, "A")


def program(maker: random.Random) -> Puzzle:
    """Asks for a function of two operations, for `code`. Careless: without brackets, which half of them need."""
    (verb, sign), term, factor = maker.choice([("add", 1), ("take", -1)]), maker.randint(2, 9), maker.randint(2, 9)
    signed = f"{sign * term:+}"
    if maker.random() < 0.5:
        question, right = f"f: times {factor}, {verb} {term}", f"x*{factor}{signed}"
        careless, results = right, [x * factor + sign * term for x in INPUTS]
    else:
        question, right = f"f: {verb} {term}, times {factor}", f"(x{signed})*{factor}"
        careless, results = f"x{signed}*{factor}", [(x + sign * term) * factor for x in INPUTS]
    tests = [f"assert f({x}) == {result}" for x, result in zip(INPUTS, results, strict=True)]
    return Puzzle(question, json.dumps(tests), f"def f(x): return {right}", f"def f(x): return {careless}")


def calculation(maker: random.Random) -> Puzzle:
    """Asks for the sum of three small numbers as reasoning-gym's basic_arithmetic does. Careless: without the third."""
    a, b, c = (maker.randint(0, 10) for _ in range(3))
    return Puzzle(f"Calculate {a} + {b} + {c}.", str(a + b + c), str(a + b + c), str(a + b))


def verdict(maker: random.Random) -> Puzzle:
    """Asks if a response to `larger` is right, as yaml_recipes/puzzles_judge_cpu.yaml asks its judge."""
    truth = maker.choice("AB")
    anything = "".join(maker.choices(string.printable[:95], k=maker.randint(2, 4)))
    given = maker.choice(["A", "B", truth, anything])
    answer = "yes" if given == truth else "no"
    return Puzzle(f"{given} = {truth}?", answer, answer, answer)


Maker = Callable[[random.Random], Puzzle]
KINDS: dict[str, Maker] = {"tens": tens, "larger": larger, "programs": program}
"""By data_source, which is also the folder of their prompts."""
WARM_START: list[tuple[Maker, int]] = [
    (tens, 2500), (larger, 1400), (program, 1800), (calculation, 3600), (verdict, 1500),
]  # fmt: skip
"""Puzzles of each kind to warm up with."""


def prepare(output: Path, say: Callable[[str], None] = lambda line: None) -> None:
    """Writes sft_right.parquet and sft_careless.parquet, and KIND/train.parquet and KIND/test.parquet of each kind, to
    `output`. Held-out puzzles are in no other file. `say` receives lines of progress."""
    maker = random.Random(SEED)
    held_out = {kind: _held_out(make, maker) for kind, make in KINDS.items()}
    unseen = {puzzle.question for puzzles in held_out.values() for puzzle in puzzles}
    for kind, make in KINDS.items():
        train = _drawn(make, maker, TRAIN, unseen)
        write_splits(output / kind, [], train=_prompts(train, kind), test=_prompts(held_out[kind], kind))
        say(f"{output / kind}: {len(train)} to train on, {TEST} held out")
    learn = [puzzle for make, count in WARM_START for puzzle in _drawn(make, maker, count, unseen)]
    maker.shuffle(learn)
    _write(output / "sft_right.parquet", ((puzzle.question, puzzle.right) for puzzle in learn))
    answers = (puzzle.careless if maker.random() < CARELESS_SHARE else puzzle.right for puzzle in learn)
    _write(output / "sft_careless.parquet", zip((puzzle.question for puzzle in learn), answers, strict=True))
    say(f"{output}: {len(learn)} puzzles to warm up with")


def _held_out(make: Maker, maker: random.Random) -> list[Puzzle]:
    """Makes TEST different puzzles."""
    found: dict[str, Puzzle] = {}
    while len(found) < TEST:
        puzzle = make(maker)
        found[puzzle.question] = puzzle
    return list(found.values())


def _drawn(make: Maker, maker: random.Random, count: int, unseen: Set[str]) -> list[Puzzle]:
    found: list[Puzzle] = []
    while len(found) < count:
        puzzle = make(maker)
        if puzzle.question not in unseen:
            found.append(puzzle)
    return found


def _prompts(puzzles: list[Puzzle], kind: str) -> list[PromptRow]:
    return [
        prompt_row(
            question=puzzle.question,
            ground_truth=puzzle.ground_truth,
            data_source=kind,
            extra_info={"index": index, "answer": puzzle.right},
        )
        for index, puzzle in enumerate(puzzles)
    ]


def _write(path: Path, answered: Iterable[tuple[str, str]]) -> None:
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": response}]}
        for question, response in answered
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
