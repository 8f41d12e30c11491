"""A policy that says what it is told, to many agents at once; and whether what is trained is what it saw."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerFast

from megagrpo.agents.chat import Chat
from megagrpo.agents.turns import Rollout
from megagrpo.types import Request, Sample
from tests.agents.families import chat_of, tokenizer_of

STOP = "<|im_end|>"


def tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_of("thinking")


def chat() -> Chat:
    return chat_of("thinking")


TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def adder(text: str, seed: int, tool: str = "add") -> str:
    """Adds the numbers behind the last "Add:" two by two with a tool, sometimes in odd or broken JSON; it may think."""
    rng = random.Random(seed)
    turns = TURN.findall(text)
    last = max(i for i, (role, said) in enumerate(turns) if role == "user" and "Add:" in said)
    numbers = [int(x) for x in re.findall(r"-?\d+", turns[last][1].rpartition("Add:")[2])]
    results = [result for _, said in turns[last + 1 :] for result in RESULT.findall(said)]
    done = [int(found[-1]) for result in results if (found := re.findall(r"-?\d+", result))]
    think = f"<think>\n{len(done)} of {len(numbers) - 1} sums.\n</think>\n\n" if rng.random() < 0.4 else ""
    if len(done) >= len(numbers) - 1 or len(turns) > 58:
        return f"{think}The sum is {done[-1] if done else numbers[0]}.{STOP}"
    a, b = (done[-1] if done else numbers[0]), numbers[len(done) + 1]
    pairs = [("name", tool), ("arguments", {"b": b, "a": a} if rng.random() < 0.5 else {"a": a, "b": b})]
    body = json.dumps(
        dict(pairs[:: rng.choice((1, -1))]), separators=(",", ":") if rng.random() < 0.5 else (", ", ": ")
    )
    body = body[:-1] if rng.random() < 0.05 else body
    said = rng.choice(("", "Next: ", "I call it.\n"))
    return f"{think}{said}<tool_call>\n{body}\n</tool_call>{STOP}"


@dataclass
class Policy:
    """`ask` for a gateway. `say(text of the prompt, seed)` is what it says, cut into tokens unlike the tokenizer's.
    `before(key)` is waited for before each answer."""

    say: Callable[[str, int], str]
    before: Callable[[str], Awaitable[None]] = lambda key: asyncio.sleep(0)
    version: int = 0
    running: int = 0
    most_running: int = 0
    given_up: int = 0
    seen: dict[str, list[tuple[tuple[int, ...], Sample]]] = field(default_factory=dict)

    async def ask(self, request: Request, key: str) -> Sample:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.before(key)
            sample = self._sample(request)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        finally:
            self.running -= 1
        self.seen.setdefault(key, []).append((request.read, sample))
        return sample

    def _sample(self, request: Request) -> Sample:
        text = tokenizer().decode(list(request.tokens))
        tokens, most = self._pieces(self.say(text, request.seed), request.seed), request.sampling.max_tokens
        cut = len(tokens) > most
        tokens = tokens[:most]
        logprobs = [-((token * 31 + at) % 97) / 100 for at, token in enumerate(tokens)]  # known by token and place
        return Sample(
            request.prompt_id, request.index, np.array(tokens, np.int32), np.array(logprobs, np.float32),
            np.full(len(tokens), self.version, np.int32), "length" if cut else "stop", tokenizer().decode(tokens),
        )  # fmt: skip

    def _pieces(self, text: str, seed: int) -> list[int]:
        rng, tokens = random.Random(seed), list[int]()
        for token in tokenizer().encode(text, add_special_tokens=False):
            piece = tokenizer().decode([token])
            if len(piece) > 2 and piece.isascii() and "<" not in piece and rng.random() < 0.2:
                cut = rng.randrange(1, len(piece))
                halves = [i for half in (piece[:cut], piece[cut:]) for i in tokenizer().encode(half)]
                if tokenizer().decode(halves) == piece:
                    tokens += halves
                    continue
            tokens.append(token)
        return tokens


def check(record: Rollout, sample: Sample, seen: Sequence[tuple[tuple[int, ...], Sample]]) -> None:
    """The path before each turn is what the engine saw, token for token, and each sampled token is trained once.
    `seen`: all prompts and answers of this rollout."""
    by_prompt: dict[tuple[int, ...], list[Sample]] = {}
    for prompt, answer in seen:
        by_prompt.setdefault(prompt, []).append(answer)
    trained: Counter[int] = Counter()
    parts = []
    for number, path in enumerate(record.paths()):
        before: list[int] = []
        marks: list[bool] = []
        for turn, is_trained in path:
            before += turn.added.tolist()
            count = len(turn.sampled)
            assert any(
                (answer.tokens[:count] == turn.sampled).all()
                and (answer.logprobs[:count] == turn.logprobs).all()
                and (answer.versions[:count] == turn.versions).all()
                for answer in by_prompt[tuple(before)]
                if len(answer.tokens) >= count
            )
            before += turn.sampled.tolist()
            marks += [False] * len(turn.added) + [is_trained] * count
            trained[turn.number] += is_trained
            parts += [turn] if is_trained else []
        branch = sample.agent.branches[number]  # type: ignore[union-attr]
        assert branch.tokens.tolist() == before
        assert branch.trained.tolist() == marks
    assert set(trained.values()) <= {1}
    for name in ("tokens", "logprobs", "versions"):
        of_turns = [getattr(turn, "sampled" if name == "tokens" else name) for turn in parts]
        assert getattr(sample, name).tolist() == [value for part in of_turns for value in part.tolist()]
