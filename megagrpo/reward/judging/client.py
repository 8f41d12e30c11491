"""Client of a judge behind an OpenAI-compatible endpoint: its retries, a step's budget, and a cache of answers.

The cache is a file of the run's directory: no request is sent and paid for twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sqlite3
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Protocol, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator

from megagrpo.errors import Problem, RewardError, brief
from megagrpo.section import Count, NonNegativeFloat, Number, PositiveFloat, PositiveInt, Seconds, Section

RETRIED = (0, 408, 409, 425, 429, 500, 502, 503, 504, 529)
"""HTTP statuses after which a later request may succeed; 0 for no reply."""
BACKOFF_SECONDS_MAX = 60.0
CHARACTERS_PER_TOKEN = 4
"""Estimate for a server that does not report its tokens."""
OWNED = ("model", "messages", "n", "stream", "stream_options")
SHOWN_MAX, ANSWER_SHOWN_MAX = 5, 300
"""Most problems of arguments in one error, and most characters of an answer."""
MAX_TOKENS = 1024
ANSWER_BYTES_MAX = 4 << 20
CHAT = "/chat/completions"
Read = TypeVar("Read")


class JudgeError(ValueError):
    """The error of a missing verdict: the response is masked, and counted as an error."""


class OverBudgetError(JudgeError):
    """The error of a step whose budget is spent."""


class Arguments(Section):
    """The arguments that a recipe gives to a function that asks a model, checked like the sections of a recipe."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Checks the given arguments and returns them. Raises ValueError with the problems in one line."""
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            problems = [
                ": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, "))))
                for one in error.errors()[:SHOWN_MAX]
            ]
            raise ValueError("; ".join(problems)) from None


class BudgetConfig(Section):
    """The budget of a judge in a step of training (or in an evaluation). Requests in flight are finished."""

    tokens: PositiveInt | None = None
    """Most tokens of prompts and answers together."""

    cost: PositiveFloat | None = None
    """Most cost, in the currency of `price`."""

    seconds: Seconds | None = None
    """Most seconds of waiting for this judge."""

    then: Literal["mask"] | Number = "mask"
    """For responses beyond the budget. mask: they are left out and counted. A number: their score."""


class PriceConfig(Section):
    """Prices per million tokens."""

    input: NonNegativeFloat
    output: NonNegativeFloat


class AskConfig(Arguments):
    """Arguments that judge, judge_pairs and judge_ranking share: the model and its requests."""

    model: str
    """The model's name at `url`; without it, the name of a generative model of reward.models."""

    url: str | None = None
    """An OpenAI-compatible endpoint up to and with its version, such as https://api.openai.com/v1."""

    api_key_variable: str | None = None
    """Environment variable with the endpoint's API key. It is read when the run starts."""

    system: str | None = None
    """A message of the system, before the rubric."""

    sampling: dict[str, Any] = Field(default_factory=dict)
    """Fields of the request, such as temperature (0 by default), max_tokens (1024), seed or response_format. null
    removes one."""

    concurrency: Count = 32
    """Requests at once."""

    retries: Annotated[int, Field(ge=0, le=100)] = 4
    """Most retries of a request that failed, or whose answer has no verdict."""

    backoff_seconds: Seconds = 1.0
    """Wait before the first retry, doubled before each further one. Retry-After is respected."""

    timeout_seconds: Seconds = 120.0
    """Timeout of one request."""

    price: PriceConfig | None = None
    """Prices for budget.cost and its metric."""

    budget: BudgetConfig = BudgetConfig()
    """The budget of a step."""

    cache: bool = True
    """Answers are kept in the run's directory: an equal request is not sent again."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raises ValueError if the url, its key, the sampling or the price is wrong."""
        if self.url is None and self.api_key_variable is not None:
            raise ValueError("api_key_variable is for a url: a model of reward.models has no key of yours")
        url = "http://" if self.url is None else self.url
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url {self.url!r}: it begins with http:// or https://")
        if "?" in url or urlsplit(url).username is not None:
            raise ValueError("url has a query or a password: errors would show it; api_key_variable is for keys")
        if taken := sorted(self.sampling.keys() & set(OWNED)):
            raise ValueError(f"sampling has {taken[0]}, which is not yours to set")
        if self.budget.cost is not None and self.price is None:
            raise ValueError("budget.cost needs price: {input: ..., output: ...}, per million tokens")
        return self

    def body(self, text: str) -> dict[str, Any]:
        """Returns the body of the request that asks `text`."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        limit = {} if "max_completion_tokens" in self.sampling else {"max_tokens": MAX_TOKENS}
        given = {"temperature": 0.0, **limit, **self.sampling}
        fields = {key: value for key, value in given.items() if value is not None}
        return {"model": self.model, "messages": [*system, {"role": "user", "content": text}], **fields}


@dataclass(frozen=True)
class Reply:
    """The reply of an endpoint: `answer` is its JSON if the status is 200. Status 0: why there is none, as `text`."""

    status: int
    answer: Any = None
    text: str = ""
    """The beginning of any other answer."""
    retry_after: float | None = None


class Endpoint(Protocol):
    """The receiver of requests. `identity` names the model that answers."""

    identity: str

    async def post(self, body: Mapping[str, Any], timeout_seconds: float) -> Reply:
        """Sends a request and returns the reply. Raises OSError if there is none, TimeoutError if it is late."""

    async def close(self) -> None: ...


class HttpEndpoint:
    """A server at a URL, which is asked at `path`. concurrency: most connections to it, 0 for any number. bytes_max: of
    an answer. proxies: use those that the environment names."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        concurrency: int,
        *,
        path: str = CHAT,
        bytes_max: int = ANSWER_BYTES_MAX,
        proxies: bool = True,
    ) -> None:
        import aiohttp  # a fifth of a second

        self.identity, self._api_key, self._bytes_max = url, api_key, bytes_max
        self._url = f"{url.rstrip('/')}{path}"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connector = aiohttp.TCPConnector(limit=concurrency)
        self._session = aiohttp.ClientSession(headers=headers, connector=connector, trust_env=proxies)

    async def post(self, body: Mapping[str, Any], timeout_seconds: float) -> Reply:
        from megagrpo.reward.http_post import post  # imports aiohttp

        status, data, after = await post(self._session, self._url, timeout_seconds, self._bytes_max, json=body)
        if data is None:
            return Reply(status, text=f"more than {self._bytes_max:,} bytes")
        answer = None
        if status == 200:
            with suppress(ValueError, RecursionError):
                answer = json.loads(data)
        text = data.decode(errors="replace")
        shown = text.replace(self._api_key, "***") if self._api_key else text
        return Reply(status, answer, shown[:ANSWER_SHOWN_MAX], after)

    async def close(self) -> None:
        await self._session.close()


@dataclass(frozen=True)
class Answer(Generic[Read]):
    """An answer: the value read from it, its text, and its metrics."""

    read: Read
    text: str
    metrics: Mapping[str, float]


class Judge:
    """A client of one endpoint for one reward function. For one event loop."""

    def __init__(self, config: AskConfig, endpoint: Endpoint, cache: AnswerCache | None) -> None:
        self.config = config
        self._endpoint, self._cache = endpoint, cache if config.cache else None
        self._slots = asyncio.Semaphore(config.concurrency)
        self._in_flight: dict[bytes, asyncio.Task[Answer[Any]]] = {}
        """Questions in flight, by key."""
        self._not_before = 0.0
        """The time at which the server accepts requests again, on time.monotonic's clock."""
        self._active, self._since, self._seconds = 0, 0.0, 0.0
        """Number of awaited questions; start of the current wait; seconds of earlier waits in this step."""
        self.spent: defaultdict[str, float] = defaultdict(float)

    def new_step(self) -> dict[str, float]:
        """Returns the totals that the step has spent. Begins a new budget."""
        spent = {"seconds": self._waited(), **self.spent}
        self.spent.clear()
        self._seconds, self._since = 0.0, time.monotonic()
        return spent

    async def close(self) -> None:
        await self._endpoint.close()

    async def ask(self, text: str, read: Callable[[str], Read]) -> Answer[Read]:
        """Returns the answer to `text` with the verdict that `read` finds; `read` raises ValueError if there is none.

        Raises OverBudgetError if the budget is spent, JudgeError if no readable answer came.
        """
        body = self.config.body(text)
        if self._cache is None:
            async with self._waiting():
                return await self._answer(body, read)
        key = key_of(self._endpoint.identity, body)
        if (request := self._in_flight.get(key)) is not None:  # equal questions at one time are one request
            answer: Answer[Read] = await request
            self.spent["cached"] += 1
            return replace(answer, metrics={})
        if (text_before := self._cache.get(key)) is not None:
            with suppress(ValueError):  # another rule for verdicts wrote it
                answer = Answer(read(text_before), text_before, {})
                self.spent["cached"] += 1
                return answer
        self._in_flight[key] = asyncio.create_task(self._answer(body, read))
        try:
            async with self._waiting():
                answer = await self._in_flight[key]
        finally:
            del self._in_flight[key]
        self._cache.put(key, answer.text)
        return answer

    async def _answer(self, body: dict[str, Any], read: Callable[[str], Read]) -> Answer[Read]:
        tokens, failure, attempt = 0.0, "", 0
        for attempt in range(self.config.retries + 1):
            if attempt:
                self.spent["retries"] += 1
                longest = min(BACKOFF_SECONDS_MAX, self.config.backoff_seconds * 2 ** (attempt - 1))
                await asyncio.sleep(min(random.uniform(0.5, 1.0) * longest, self._seconds_left()))
            async with self._slots:
                await asyncio.sleep(min(max(0.0, self._not_before - time.monotonic()), self._seconds_left()))
                self._require_budget()
                reply = await self._reply(body)
            if reply.status != 200:
                failure = f"HTTP {reply.status}: {brief(reply.text)}" if reply.status else reply.text
                if reply.status not in RETRIED:
                    break
                self._not_before = max(self._not_before, time.monotonic() + (reply.retry_after or 0.0))
                continue
            if (text := text_of(reply.answer)) is None:
                failure = f"no chat completion: {brief(reply.text)}"
                continue
            tokens += self._count(body, text, reply.answer)
            try:
                if (ended := reply.answer["choices"][0].get("finish_reason")) not in ("stop", None):
                    raise ValueError(f"it ended by {brief(ended)}, not by itself")
                return Answer(read(text), text, {"tokens": tokens})
            except ValueError as error:
                self.spent["unreadable"] += 1
                failure = f"no verdict in {brief(text[-200:])}: {error}"
        self.spent["failed"] += 1
        times = f" ({attempt + 1} times)" if attempt else ""
        raise JudgeError(f"{self.config.model} at {self._endpoint.identity} gave no verdict{times}: {failure}")

    async def _reply(self, body: dict[str, Any]) -> Reply:
        """Sends a request. Returns its reply. Raises OverBudgetError when the time is spent."""
        self.spent["requests"] += 1
        left = max(1e-3, self._seconds_left())
        try:
            return await self._endpoint.post(body, min(self.config.timeout_seconds, left))
        except TimeoutError:
            if left <= self.config.timeout_seconds:
                raise self._over("seconds", self.config.budget.seconds) from None
            return Reply(0, text=f"no answer in {self.config.timeout_seconds:g} s")
        except OSError as error:
            return Reply(0, text=f"{type(error).__name__}: {error}")

    def _count(self, body: dict[str, Any], text: str, answer: Any) -> float:
        """Returns the tokens of a request and its answer, and adds them to the totals."""
        usage = answer.get("usage")
        sent = sum(len(message["content"]) for message in body["messages"])
        given, written = _tokens(usage, "prompt_tokens", sent), _tokens(usage, "completion_tokens", len(text))
        self.spent["input_tokens"] += given
        self.spent["output_tokens"] += written
        if (price := self.config.price) is not None:
            self.spent["cost"] += (given * price.input + written * price.output) / 1e6
        return given + written

    def _require_budget(self) -> None:
        budget, tokens = self.config.budget, self.spent["input_tokens"] + self.spent["output_tokens"]
        for limit, spent, most in (
            ("tokens", tokens, budget.tokens),
            ("cost", self.spent["cost"], budget.cost),
            ("seconds", self._waited(), budget.seconds),
        ):
            if most is not None and spent >= most:
                raise self._over(limit, most)

    def _over(self, limit: str, most: float | None) -> OverBudgetError:
        return OverBudgetError(f"the step's budget is spent: {limit} {most or 0:g}")

    def _waited(self) -> float:
        return self._seconds + (time.monotonic() - self._since if self._active else 0.0)

    def _seconds_left(self) -> float:
        limit = self.config.budget.seconds
        return float("inf") if limit is None else limit - self._waited()

    @asynccontextmanager
    async def _waiting(self) -> AsyncIterator[None]:
        if not self._active:
            self._since = time.monotonic()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._seconds += time.monotonic() - self._since


def text_of(answer: Any) -> str | None:
    """Returns the text of a chat completion, or None for any other answer."""
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return None
    return text if isinstance(text, str) else None


def _tokens(usage: Any, name: str, characters: int) -> int:
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int and count >= 0 else -(-characters // CHARACTERS_PER_TOKEN)


# --- answers that are kept --------------------------------------------------------------------------------------------

FILE = "judge_cache.sqlite"
WAIT_SECONDS = 30.0
"""Timeout while another process writes."""
WRITE_SECONDS = 1.0
"""Time between two writes: each waits for the disk."""


class AnswerCache:
    """Answers by the hash of their request. Several processes may open one cache. An answer is stored whole or not at
    all; those of the last second are stored once `write` is called. For one thread. Raises RewardError if the file
    cannot be read or written."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._new: dict[bytes, str] = {}
        self._written = time.monotonic()
        directory.mkdir(parents=True, exist_ok=True)
        with self._reported():
            self._file = sqlite3.connect(self._path, timeout=WAIT_SECONDS, isolation_level=None)
            self._file.execute("PRAGMA synchronous = NORMAL")
            self._file.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, text TEXT) WITHOUT ROWID")

    def get(self, key: bytes) -> str | None:
        if key in self._new:
            return self._new[key]
        with self._reported():
            row = self._file.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def put(self, key: bytes, text: str) -> None:
        self._new[key] = text
        if time.monotonic() > self._written + WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Writes all new answers to the file."""
        if not self._new:
            return
        with self._reported(), self._file:
            self._file.execute("BEGIN IMMEDIATE")
            self._file.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", self._new.items())
        self._new.clear()
        self._written = time.monotonic()

    def close(self) -> None:
        try:
            self.write()
        finally:
            self._file.close()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            fix = "make room, or delete the file: its answers are asked for again; cache: false does without"
            where, needed = f"{self._path}: the answers of judges", "a file to write"
            raise RewardError(Problem(where, str(error), needed, fix)) from error


def key_of(identity: str, body: dict[str, Any]) -> bytes:
    """Returns the key of a request. identity: the endpoint, or the model's directory. body: all that is sent to it."""
    return hashlib.sha256(json.dumps([identity, body], sort_keys=True).encode()).digest()
