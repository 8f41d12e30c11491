"""Cost of the gateway for agents, and how many sequences its rollouts are, beside rendering every turn anew.

    python benchmarks/gateway.py                        # two minutes
    python benchmarks/gateway.py --tokenizer DIRECTORY  # a model's own tokenizer and template

Times are CPU time, since the machine may be shared. The engine answers at once, with tokens made beforehand. Without
a tokenizer, one of 12,000 tokens is trained on Python's own sources; its template is like Qwen's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import sys
import sysconfig
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import psutil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megagrpo.agents.answers import Answers
from megagrpo.agents.chat import TOOL, Chat
from megagrpo.agents.dialects import chat_completions
from megagrpo.agents.dialects.chat_request import Kept, Message
from megagrpo.agents.gateway import Gateway
from megagrpo.agents.turns import Limits, Rollout
from megagrpo.batching.rank_batches import make_rank_batches
from megagrpo.checkpoint.groups import write_groups
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.schema import Recipe
from megagrpo.tokenizer import load_chat_tokenizer
from megagrpo.track.rollout_files import TRAIN
from megagrpo.track.rollout_writer import StepRollouts, TokenTexts, tables
from megagrpo.trainer.step import advantage_inputs, train_sequences, turns_of
from megagrpo.trainer.step_metrics import agent_metrics, rollout_metrics
from megagrpo.types import Group, Prompt, Request, Sample, SamplingParams, Score

TEMPLATE = """
{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You help.' }}
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}
{%- for t in m.tool_calls or [] %}{{ '\n' }}<tool_call>
{"name": "{{ t.function.name }}", "arguments": {{ t.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LIMITS = Limits(10_000, 10**6, SamplingParams(4096), seed=0)
HISTORIES = (1_000, 4_000, 10_000, 30_000, 60_000)
ROLLOUTS, TURNS, SAMPLES = 1000, 20, 8
RECIPE = Recipe.model_validate(
    {
        "name": "step",
        "model": {"path": "unused"},
        "data": {"train": [{"path": "unused"}]},
        "agent": {"function": "agent.py:rollout", "tokens_max": 100_000},
        "rollout": {"prompts_per_step": ROLLOUTS // SAMPLES, "samples_per_prompt": SAMPLES},
        "reward": {"functions": [{"function": "agent"}]},
        "train": {"layout": {}, "total_steps": 1, "tokens_per_microbatch": 65_536, "optimizer": {"lr": 1.0e-6}},
        "algorithm": {"credit": "discounted"},
    }
)
T = TypeVar("T")
Messages = list[dict[str, Any]]


def sources() -> list[str]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:100]
    return [file.read_text(encoding="utf-8", errors="ignore") for file in files]


def small_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=12_000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sources(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def chat_of(directory: str) -> Chat:
    tokenizer = load_chat_tokenizer(directory) if directory else small_tokenizer()
    return Chat(tokenizer, [])


def words(rng: random.Random, count: int, known: list[str] = " ".join(sources()[:4]).split()) -> str:  # noqa: B008
    return " ".join(rng.choice(known).replace("<", "") for _ in range(count))


def call_text(arguments: str) -> str:
    return f'\n<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


@dataclass
class Canned:
    """Answers at once."""

    tokens: np.ndarray  # int32

    @classmethod
    def of(cls, chat: Chat, said: str) -> Canned:
        return cls(np.array([*chat.encode(said), chat.tokenizer.eos_token_id], np.int32))

    async def ask(self, request: Request, key: str) -> Sample:
        logprobs, versions = self.tokens.astype(np.float32), np.zeros_like(self.tokens)
        return Sample(request.prompt_id, request.index, self.tokens, logprobs, versions, "stop", "")


@dataclass
class Asked:
    """A turn: what its client sent, and what it cost."""

    messages: Messages
    tokens: int  # of the prompt
    seconds: float


async def rollout_of(answers: Answers, rng: random.Random, turns: int, result: str) -> tuple[Rollout, list[Asked]]:
    """An agent whose every turn calls a tool; the gateway's own path, from JSON to JSON, without HTTP."""
    rollout, asked = Rollout("prompt", 0, LIMITS, opened=0.0), list[Asked]()
    messages: Messages = [{"role": "system", "content": words(rng, 100)}, {"role": "user", "content": words(rng, 50)}]
    for _ in range(turns):
        raw = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]})
        begin = time.process_time()
        request = chat_completions.read(json.loads(raw), Kept())
        answer = await answers.answer("key", rollout, request)
        written = chat_completions.written(request, answer)
        json.dumps(written)
        asked.append(Asked(messages, len(answer.prompt), time.process_time() - begin))
        message = written["choices"][0]["message"]
        call = message["tool_calls"][0]["id"]
        messages = [*messages, message, {"role": "tool", "content": result, "tool_call_id": call}]
    return rollout, asked


def answers_of(chat: Chat, said: str) -> Answers:
    return Answers(chat, Canned.of(chat, said).ask, parser="hermes", audited=1 / 32)


def timed(function: Callable[[], object], times: int = 5) -> float:
    begin = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - begin) / times


@dataclass
class Beside:
    """A turn, and the same rendered and encoded anew."""

    tokens: int
    json_bytes: int
    seconds: float
    anew_seconds: float


async def per_turn(chat: Chat, histories: Sequence[int], turns: int) -> list[Beside]:
    """The turns with about so many tokens of history, of a rollout of so many turns."""
    rng, found = random.Random(0), list[Beside]()
    answers = answers_of(chat, words(rng, 150) + call_text('{"k": 1}'))
    _, asked = await rollout_of(answers, rng, turns, words(rng, 150))
    for history in histories:
        at = min(range(len(asked)), key=lambda turn: abs(asked[turn].tokens - history))
        mine = float(np.median([one.seconds for one in asked[max(1, at - 2) : at + 3]]))
        messages = chat_completions.read({"messages": asked[at].messages}, Kept()).messages
        anew = timed(partial(rendered, chat, messages))
        found.append(Beside(asked[at].tokens, len(json.dumps(asked[at].messages)), mine, anew))
    answers.close()
    return found


async def print_turns(chat: Chat) -> None:
    print("\nCPU ms per turn, by tokens of history")
    print(f"{'history':>8}{'JSON':>8}{'gateway':>9}{'rendered and encoded anew':>27}{'times':>7}")
    for one in await per_turn(chat, HISTORIES, turns=140):
        times = one.anew_seconds / one.seconds
        mine, anew = 1000 * one.seconds, 1000 * one.anew_seconds
        print(f"{one.tokens:8,}{one.json_bytes // 1024:7,}k{mine:9.2f}{anew:27.2f}{times:7.1f}")


def rendered(chat: Chat, messages: Sequence[Message]) -> list[int]:
    return chat.encode(chat.render(messages, [TOOL]))


async def step(chat: Chat) -> None:
    """Time and memory of the driver's process for the rollouts of a step."""
    rng = random.Random(1)
    answers, result = answers_of(chat, words(rng, 100) + call_text('{"k": 1}')), words(rng, 100)
    gc.collect()
    tracemalloc.start()
    before, kept = tracemalloc.get_traced_memory()[0], []
    for _ in range(20):
        kept.append((await rollout_of(answers, rng, TURNS, result))[0])
    gc.collect()
    used = (tracemalloc.get_traced_memory()[0] - before) / len(kept)
    tracemalloc.stop()
    tokens = len(kept[0].turns[-1].tokens())
    sampled = sum(len(turn.sampled) for turn in kept[0].turns)
    print(
        f"\nmemory of a rollout of {TURNS} turns, {tokens:,} tokens, {sampled:,} of them sampled: {used / 1024:.0f} KiB"
    )
    seconds, rollouts = 0.0, []
    for _ in range(ROLLOUTS):
        rollout, asked = await rollout_of(answers, rng, TURNS, result)
        seconds += sum(one.seconds for one in asked)
        rollouts.append(rollout)
    request = Request("prompt", 0, (), 0, LIMITS.sampling)
    begin = time.process_time()
    samples = [rollout.sample(request, "stop") for rollout in rollouts]
    ended = time.process_time() - begin
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{ROLLOUTS:,} rollouts of {TURNS} turns: {seconds:.1f} s of one core for their turns"
        f" ({1000 * seconds / ROLLOUTS / TURNS:.2f} ms each), {ended:.1f} s for their samples;"
        f" {resident:.1f} GiB resident"
    )
    answers.close()
    parts = step_of_driver(samples, TokenTexts(chat.tokenizer))
    print(f"the driver's step with them, {sum(parts.values()):.1f} s of one core:")
    print("    " + ", ".join(f"{name} {spent:.2f}" for name, spent in parts.items()))


def step_of_driver(samples: Sequence[Sample], texts: TokenTexts) -> dict[str, float]:
    """CPU seconds of what the driver does with a step's rollouts once they are there, by part."""
    seconds, groups = dict[str, float](), list[Group]()
    for number in range(len(samples) // SAMPLES):
        prompt = Prompt(f"prompt {number}", (1,), "search", "1")
        own = [replace(samples[SAMPLES * number + at], prompt_id=prompt.id, index=at) for at in range(SAMPLES)]
        groups.append(Group(prompt, tuple(own), tuple(Score(float(at % 2)) for at in range(SAMPLES))))

    def part(name: str, function: Callable[[], T]) -> T:
        begin = time.process_time()
        found = function()
        seconds[name] = time.process_time() - begin
        return found

    def credited() -> None:
        inputs = advantage_inputs(RECIPE, groups)
        RECIPE.algorithm.credit.advantages(RECIPE.algorithm.advantage, inputs, turns_of(RECIPE, groups))

    def written() -> None:
        with tempfile.TemporaryDirectory() as directory:
            write_groups(Path(directory) / "groups", groups)

    rows = np.ones(SAMPLES * len(groups), bool)
    part("advantages of turns", credited)
    sequences = part("sequences", lambda: train_sequences(groups, rows))
    layout = ParallelLayout(data=16)
    size = 4 * max(len(sequence.tokens) for sequence in sequences)
    part(
        "batches of ranks",
        lambda: make_rank_batches(sequences, layout=layout, minibatches=1, tokens_per_microbatch=size, seed=0),
    )
    part("metrics", lambda: (rollout_metrics(groups), agent_metrics(groups)))
    part(
        "rollouts as tables, in the background", lambda: list(tables(StepRollouts(1, {TRAIN: groups}, 0, True), texts))
    )
    part("file of groups", written)
    return seconds


async def serve(chat: Chat, keys: int) -> None:
    rng = random.Random(0)
    canned = Canned.of(chat, words(rng, 20) + call_text('{"k": 1}'))
    gateway = Gateway(chat, canned.ask, parser="hermes")
    await gateway.start()
    opened = [gateway.open("prompt", 0, LIMITS) for _ in range(keys)]
    print(json.dumps({"url": gateway.url, "keys": opened}), flush=True)
    await asyncio.Event().wait()


async def http(tokenizer: str) -> None:
    """A gateway in a process of its own; its CPU time over the requests that it answered."""
    arguments = [__file__, "--serve", "500", *(["--tokenizer", tokenizer] if tokenizer else [])]
    server = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, limit=2**22
    )
    try:
        assert server.stdout is not None
        told = json.loads(await server.stdout.readline())
        process, keys = psutil.Process(server.pid), told["keys"]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            print("\nover HTTP, 10 turns of each rollout, all rollouts at once")
            for history, rollouts in ((300, 200), (10_000, 60)):
                mine, keys = keys[:rollouts], keys[rollouts:]
                before = process.cpu_times()
                text = words(random.Random(2), history // 3)
                await asyncio.gather(*(http_rollout(session, told["url"], key, text) for key in mine))
                after = process.cpu_times()
                seconds = after.user + after.system - before.user - before.system
                count = 10 * rollouts
                print(f"{history:8,} tokens of history: {count / seconds:7,.0f} requests per second of one core")
    finally:
        server.terminate()
        await server.wait()


async def http_rollout(session: aiohttp.ClientSession, url: str, key: str, text: str) -> None:
    messages: Messages = [{"role": "user", "content": text}]
    for _ in range(10):
        body = {"model": "policy", "messages": messages, "tools": [TOOL]}
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            message = (await response.json())["choices"][0]["message"]
        messages += [message, {"role": "tool", "content": "4", "tool_call_id": message["tool_calls"][0]["id"]}]


@dataclass
class OddTokens:
    """An engine whose tokens are not those that the tokenizer would make of the same text, as any policy's."""

    chat: Chat
    odd: bool

    async def ask(self, request: Request, key: str) -> Sample:
        rng = random.Random(request.seed)
        space = " " if rng.random() < 0.5 else ""
        called = call_text(f'{{"k":{space}{rng.randrange(1000)}}}')
        ends = request.tokens.count(self.chat.tokenizer.eos_token_id) > 2 * rng.randint(3, 6)
        tokens = list[int]()
        for token in self.chat.encode(words(rng, 30) + ("" if ends else called)):
            piece = self.chat.text([token])
            cut = rng.randrange(1, len(piece)) if self.odd and len(piece) > 2 and rng.random() < 0.1 else 0
            tokens += self.chat.encode(piece[:cut]) + self.chat.encode(piece[cut:]) if cut else [token]
        made = np.array([*tokens, self.chat.tokenizer.eos_token_id], np.int32)
        return Sample("prompt", 0, made, made.astype(np.float32), np.zeros_like(made), "stop", "")


async def sequences(chat: Chat, rollouts: int = 64) -> None:
    print(f"\n{rollouts} rollouts as sequences to train")
    print(f"{'sampled tokens':>16}{'turns':>7}{'gateway':>9}{'tokens':>10}{'rendered anew':>15}{'tokens':>10}")
    for odd in (False, True):
        answers = Answers(chat, OddTokens(chat, odd).ask, parser="hermes", audited=0.0)
        turns = branches = tokens = anew = anew_tokens = 0
        for number in range(rollouts):
            limits = Limits(100, 10**6, LIMITS.sampling, seed=number)
            rollout = Rollout("prompt", 0, limits, opened=0.0)
            messages: Messages = [{"role": "user", "content": f"Task {number}"}]
            seen: list[int] = []
            while True:
                request = chat_completions.read({"messages": messages, "tools": [TOOL]}, Kept())
                answer = await answers.answer("key", rollout, request)
                prompt = chat.encode(chat.render(request.messages, [TOOL]))
                if seen and prompt[: len(seen)] != seen:
                    anew, anew_tokens = anew + 1, anew_tokens + len(seen)
                seen = [*prompt, *answer.choices[0].tokens]
                message = chat_completions.written(request, answer)["choices"][0]["message"]
                if not message.get("tool_calls"):
                    break
                call = message["tool_calls"][0]["id"]
                messages = [*messages, message, {"role": "tool", "content": "4", "tool_call_id": call}]
            anew, anew_tokens = anew + 1, anew_tokens + len(seen)
            run = rollout.agent_run()
            turns += len(run.turns)
            branches += len(run.branches)
            tokens += sum(len(branch.tokens) for branch in run.branches)
        name = "in odd pieces" if odd else "as usual"
        print(f"{name:>16}{turns:7,}{branches:9,}{tokens:10,}{anew:15,}{anew_tokens:10,}")
        answers.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="", help="a model's directory")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chat = chat_of(arguments.tokenizer)
    if arguments.serve:
        asyncio.run(serve(chat, arguments.serve))
        return
    seconds = timed(lambda: Chat(chat.tokenizer, []))
    print(f"tokenizer of {len(chat.tokenizer):,} tokens; to ask its template takes {1000 * seconds:.0f} ms")
    asyncio.run(print_turns(chat))
    asyncio.run(sequences(chat))
    asyncio.run(http(arguments.tokenizer))
    asyncio.run(step(chat))


if __name__ == "__main__":
    main()
