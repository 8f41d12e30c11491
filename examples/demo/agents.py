"""`python -m examples.prepare agents`: questions that take one tool call or two, and a game, for the demo as an agent.

It learns from conversations with tool calls: first right ones, then mostly careless ones, which leave out the second
call. Afterwards it answers the questions that take one call, and few of those that take two; GRPO teaches it to go on.
In the game two players are to choose the same of two digits, and neither knows what the other one chooses: they learn
the game's form, and any choice.
"""

from __future__ import annotations

import json
import random
import shutil
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.adder import SEED
from examples.demo.model import make_model, make_tool_tokenizer
from megagrpo.data.prepare import PromptRow, prompt_row, write_splits

WARM_START, TRAIN, TEST = 3000, 640, 100
"""Questions of each kind to warm up with, to train on, and held out."""
CARELESS_SHARE = 0.8
ORDERS_PER_ITEM = 5
ROUNDS, GAMES = 2, 2400
"""Rounds of a game, and games to warm up with."""
BEST = "[1] "
"""The text that the tool `search` writes before the best passage."""
WORDS = (
    "calculate", "expression", "search", "query", "string", "order ", "item ", "price ", "of ", ": ", BEST, " or ",
)  # fmt: skip
"""One token each."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the kind's tool, and the tool's result."""

    argument: str
    result: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the calls that it takes, the right answer, and one given after the first call alone."""

    text: str
    calls: tuple[Call, ...]
    answer: str
    careless: str


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of questions, made by `make` in any number, with their tool: its name and the name of its argument."""

    tool: str
    argument: str
    make: Callable[[random.Random, int], list[Question]]

    @property
    def schema(self) -> dict[str, Any]:
        """Returns the tool's schema in the form that chat templates read."""
        properties = {self.argument: {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": [self.argument]}
        return {"type": "function", "function": {"name": self.tool, "description": "", "parameters": parameters}}


def calculations(maker: random.Random, number: int) -> list[Question]:
    """Makes sums of two numbers, half of them with a third number. Careless: without the third."""
    made: dict[str, Question] = {}
    while len(made) < number:
        a, b, c = (maker.randint(10, 99) for _ in range(3))
        text, first, step = f"{a}+{b}", a + b, Call(f"{a}+{b}", str(a + b))
        if maker.random() < 0.5:
            made[f"{text}="] = Question(f"{text}=", (step,), str(first), str(first))
            continue
        sign, whole = maker.choice([("+", first + c), ("-", first - c)])
        second = Call(f"{first}{sign}{c}", str(whole))
        made[f"{text}{sign}{c}="] = Question(f"{text}{sign}{c}=", (step, second), str(whole), str(first))
    return list(made.values())


def lookups(maker: random.Random, number: int) -> list[Question]:
    """Makes questions on orders. A corpus tells an order's item and an item's price. Half of them ask for the price.
    Careless: the item."""
    orders = maker.sample(range(1000, 10_000), number)
    items = maker.sample(range(100, 1000), -(-number // ORDERS_PER_ITEM))
    prices = [maker.randint(10, 99) for _ in items]
    made: list[Question] = []
    for at, order in enumerate(orders):
        item, price = f"item {items[at // ORDERS_PER_ITEM]}", f"price {prices[at // ORDERS_PER_ITEM]}"
        first = Call(f"item of order {order}", f"{BEST}order {order}: {item}")
        if maker.random() < 0.5:
            made.append(Question(f"item of order {order}?", (first,), item, item))
        else:
            second = Call(f"price of {item}", f"{BEST}{item}: {price}")
            made.append(Question(f"price of order {order}?", (first, second), price, item))
    return made


def choices(maker: random.Random) -> list[list[str]]:
    """Draws the two digits of each round of a game."""
    return [maker.sample(string.digits, 2) for _ in range(ROUNDS)]


KINDS: Mapping[str, Kind] = {
    "calculator": Kind("calculate", "expression", calculations),
    "retrieval": Kind("search", "query", lookups),
}
"""By data_source, which is also the folder of their prompts."""


def prepare(output: Path, say: Callable[[str], None] = lambda line: None) -> None:
    """Writes the untrained model to `output`/untrained, sft_right.jsonl and sft_careless.jsonl, of each kind
    KIND/train.parquet and KIND/test.parquet, and retrieval/corpus.jsonl, where all answers are. No question is in two
    files. `say` receives lines of progress."""
    maker = random.Random(SEED)
    made = {name: kind.make(maker, WARM_START + TRAIN + TEST) for name, kind in KINDS.items()}
    for name, questions in made.items():
        train, test = questions[TEST : TEST + TRAIN], questions[:TEST]
        write_splits(output / name, [], train=_prompts(train, name), test=_prompts(test, name))
        say(f"{output / name}: {TRAIN} questions to train on, {TEST} held out")
    results = {call.result for question in made["retrieval"] for call in question.calls}
    passages = sorted(result.removeprefix(BEST) for result in results)
    _write(output / "retrieval" / "corpus.jsonl", ({"text": text} for text in passages))
    learn = [(KINDS[name], question) for name, questions in made.items() for question in questions[TEST + TRAIN :]]
    games = [choices(maker) for _ in range(TRAIN + TEST)]
    write_splits(output / "game", [], train=_games(games[TEST:]), test=_games(games[:TEST]))
    say(f"{output / 'game'}: {TRAIN} games to train on, {TEST} held out")
    maker.shuffle(learn)
    _write(output / "sft_right.jsonl", (conversation(kind, question) for kind, question in learn))
    rows = [conversation(*pair, careless=maker.random() < CARELESS_SHARE) for pair in learn]
    rows += [_game(choices(maker), maker) for _ in range(GAMES)]
    maker.shuffle(rows)
    _write(output / "sft_careless.jsonl", rows)
    say(f"{output}: {len(rows)} conversations to warm up with")

    tokenizer = make_tool_tokenizer(WORDS)
    model = make_model(tokenizer, SEED)
    shutil.rmtree(output / "untrained", ignore_errors=True)
    model.save_pretrained(output / "untrained")
    tokenizer.save_pretrained(output / "untrained")
    say(f"{output / 'untrained'}: {model.num_parameters():,} parameters, untrained")


def conversation(kind: Kind, question: Question, *, careless: bool = False) -> dict[str, Any]:
    """Returns a row of docs/sft.md: the question, its calls with their results, and the answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    for call in question.calls[:1] if careless else question.calls:
        function = {"name": kind.tool, "arguments": json.dumps({kind.argument: call.argument})}
        messages.append(
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "content": call.result})
    messages.append({"role": "assistant", "content": question.careless if careless else question.answer})
    return {"messages": messages, "tools": [kind.schema]}


def asked(pair: Sequence[str]) -> str:
    """Returns a player's message of a round of the game."""
    return f"{pair[0]} or {pair[1]}?"


def _game(rounds: Sequence[Sequence[str]], maker: random.Random) -> dict[str, Any]:
    """Returns a row of docs/sft.md: one player's conversation, with any choices."""
    messages = []
    for pair in rounds:
        messages += [{"role": "user", "content": asked(pair)}, {"role": "assistant", "content": maker.choice(pair)}]
    return {"messages": messages}


def _games(games: Sequence[list[list[str]]]) -> list[PromptRow]:
    return [
        prompt_row(question=asked(rounds[0]), ground_truth="", data_source="game", extra_info={"rounds": rounds})
        for rounds in games
    ]


def _prompts(questions: Sequence[Question], name: str) -> list[PromptRow]:
    return [
        prompt_row(
            question=question.text,
            ground_truth=question.answer,
            data_source=name,
            extra_info={"index": index, "calls": len(question.calls)},
        )
        for index, question in enumerate(questions)
    ]


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
