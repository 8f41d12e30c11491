"""Two-digit sums in three disjoint splits: warm start, GRPO's prompts, held-out prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass

LOWEST, HIGHEST = 10, 99
WARM_START_PAIRS = 2400
TEST_PAIRS = 260
SEED = 0


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
        """Without the carry from the units to the tens: 72 for 37+45. Right only if there is none."""
        return str((self.a // 10 + self.b // 10) * 10 + (self.a + self.b) % 10)

    @property
    def response(self) -> str:
        """The answer as in GSM8K, which the gsm8k reward reads."""
        return f"#### {self.answer}"

    @property
    def careless_response(self) -> str:
        return f"#### {self.careless_answer}"


@dataclass(frozen=True, slots=True)
class Splits:
    """a+b and b+a are always in the same split, so that a model that knows one cannot answer the other from memory."""

    warm_start: tuple[Sum, ...]
    train: tuple[Sum, ...]
    test: tuple[Sum, ...]


def make_splits() -> Splits:
    """All 8,100 sums, shuffled by a fixed seed: 520 or so to test, 4,700 to warm up, the others to train."""
    pairs = [(a, b) for a in range(LOWEST, HIGHEST + 1) for b in range(a, HIGHEST + 1)]
    random.Random(SEED).shuffle(pairs)
    warm_start_end = TEST_PAIRS + WARM_START_PAIRS
    return Splits(
        warm_start=_both_orders(pairs[TEST_PAIRS:warm_start_end]),
        train=_both_orders(pairs[warm_start_end:]),
        test=_both_orders(pairs[:TEST_PAIRS]),
    )


def _both_orders(pairs: list[tuple[int, int]]) -> tuple[Sum, ...]:
    return tuple(Sum(*order) for a, b in pairs for order in dict.fromkeys([(a, b), (b, a)]))
