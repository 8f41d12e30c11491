"""Client of a judge behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, Literal, Protocol, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator

from megagrpo.errors import brief
from megagrpo.recipe.schema.teachers import BudgetConfig
from megagrpo.reward.judging.asked import AnswerCache, Asked, Reply, Terms, key_of
from megagrpo.section import Count, NonNegativeFloat, Number, PositiveFloat, Seconds, Section

CHARACTERS_PER_TOKEN = 4
"""Estimate for a server that does not report its tokens."""
OWNED = ("model", "messages", "n", "stream", "stream_options")
SHOWN_MAX, ANSWER_SHOWN_MAX = 5, 300
"""Most problems of arguments in one error, and most characters of an answer."""
MAX_TOKENS = 1024
ANSWER_BYTES_MAX = 4 << 20
CHAT = "/chat/completions"
Read = TypeVar("Read")


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


class JudgeBudgetConfig(BudgetConfig):
    """The budget of a judge in a step of training (or in an evaluation)."""

    cost: PositiveFloat | None = None
    """Most cost, in the currency of `price`."""

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

    budget: JudgeBudgetConfig = JudgeBudgetConfig()
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


@dataclass
class Question:
    """A question to a judge. `tokens`: of the requests and answers to it so far."""

    body: dict[str, Any]
    read: Callable[[str], Any]
    tokens: float = 0.0


class Judge(Asked[Question, Answer[Any]]):
    """A client of one endpoint for one reward function."""

    def __init__(self, config: AskConfig, endpoint: Endpoint, cache: AnswerCache | None) -> None:
        waits = config.concurrency, config.retries, config.backoff_seconds, config.timeout_seconds
        terms = Terms(*waits, budget=config.budget.model_dump(exclude={"then"}))
        failed = f"{config.model} at {endpoint.identity} gave no verdict"
        super().__init__(terms, failed, cache if config.cache else None)
        self.config, self._endpoint = config, endpoint

    async def close(self) -> None:
        await self._endpoint.close()

    async def ask(self, text: str, read: Callable[[str], Read]) -> Answer[Read]:
        """Returns the answer to `text` with the verdict that `read` finds; `read` raises ValueError if there is none.

        Raises as `answered`.
        """
        question = Question(self.config.body(text), read)
        key = key_of(self._endpoint.identity, question.body) if self._cache else None
        answer, known = await self.answered(question, key)
        return replace(answer, metrics={}) if known else answer

    async def _send(self, question: Question, timeout_seconds: float) -> Reply:
        return await self._endpoint.post(question.body, timeout_seconds)

    def _read(self, question: Question, reply: Reply) -> Answer[Any]:
        if (text := text_of(reply.answer)) is None:
            raise ValueError(f"no chat completion: {brief(reply.text)}")
        question.tokens += self._count(question.body, text, reply.answer)
        try:
            if (ended := reply.answer["choices"][0].get("finish_reason")) not in ("stop", None):
                raise ValueError(f"it ended by {brief(ended)}, not by itself")
            return Answer(question.read(text), text, {"tokens": question.tokens})
        except ValueError as error:
            self.spent["unreadable"] += 1
            raise ValueError(f"no verdict in {brief(text[-200:])}: {error}") from error

    def _packed(self, value: Answer[Any]) -> str:
        return value.text

    def _unpacked(self, question: Question, kept: Any) -> Answer[Any]:
        return Answer(question.read(kept), kept, {})

    def _spent(self, limit: str) -> float:
        tokens = self.spent["input_tokens"] + self.spent["output_tokens"]
        return tokens if limit == "tokens" else super()._spent(limit)

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
