"""Scores from a server of your own, over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from megagrpo.errors import brief
from megagrpo.reward.answer_text import after_thinking, last_program
from megagrpo.reward.functions import RewardCallable, RewardReturn
from megagrpo.reward.http_post import post

BATCH_MAX = 64
"""Most calls of an async function that a worker runs at once."""
ANSWER_BYTES_MAX = 8 << 20
PAUSE_SECONDS_MAX = 30.0
"""The longest pause before another attempt, also if the server asks for a longer one."""
BUSY = (408, 425, 429, 502, 503, 504)
"""Statuses after which the same request is sent again, later."""

Item = Mapping[str, Any]
Score = asyncio.Future[RewardReturn | Exception | None]


class PostError(Exception):
    """The error of a POST without scores. `busy`: the server could not take it, whatever it contained. `again`: a retry
    may succeed. `after`: seconds that the server asks to wait."""

    def __init__(self, text: str, *, busy: bool = False, again: bool = True, after: float = 0.0) -> None:
        super().__init__(text)
        self.busy, self.again, self.after = busy, again, after


def make(
    url: str,
    shape: Literal["items", "open_instruct_code"] = "items",
    batch: int = 32,
    batch_ms: float = 5.0,
    timeout_seconds: float = 5.0,
    retries: int = 3,
    pause_seconds: float = 0.5,
    headers: Mapping[str, str] | None = None,
    max_execution_time: float = 1.0,
    pass_rate_min: float = 0.0,
) -> RewardCallable:
    """Makes a reward function: the score that the server at `url` returns for a POST of JSON.

    shape `items`: {"items": [{data_source, prompt, response, ground_truth, extra_info}, ...]} is answered by
    {"scores": [...]}, each a number or an object with `score`, metrics and notes, or null where there is no score. The
    calls of one worker are sent together: at most `batch` of them, none waiting longer than `batch_ms`.

    shape `open_instruct_code`: {"program", "tests", "max_execution_time"} is answered by {"results": [0, 1, ...]}
    (open_instruct/code_utils/api.py). The program is the last block of Python behind any reasoning, or all behind it,
    the tests are the ground truth; the score is the share of tests passed, 0 below `pass_rate_min`.

    A POST may take `timeout_seconds`. If no connection is made or kept, or the server is busy (BUSY; `Retry-After` is
    heeded), it is sent again up to `retries` times, after pauses that double from `pause_seconds`. If the server fails
    over a batch, answers garbage or nothing in time, each item is sent alone. No redirect is followed.

    `headers` may name environment variables, as "Bearer ${TOKEN}"; their values are in no error and no log. Raises
    ValueError for other arguments and variables that are not set.

    >>> make("localhost:8000/score")
    Traceback (most recent call last):
    ValueError: url is 'localhost:8000/score', not http://HOST/PATH or https://HOST/PATH
    """
    check_arguments(
        url, batch=(batch, 1, BATCH_MAX), batch_ms=(batch_ms, 0, 10_000), retries=(retries, 0, 20),
        timeout_seconds=(timeout_seconds, 0.001, 86_400), pause_seconds=(pause_seconds, 0, PAUSE_SECONDS_MAX),
        max_execution_time=(max_execution_time, 0.001, 86_400), pass_rate_min=(pass_rate_min, 0, 1),
    )  # fmt: skip
    is_code = shape == "open_instruct_code"
    server = Server(
        url, expanded(headers or {}),
        partial(code_body, max_execution_time) if is_code else lambda items: {"items": items},
        partial(code_scores, pass_rate_min) if is_code else items_scores,
        1 if is_code else batch, batch_ms / 1000, timeout_seconds, retries, pause_seconds,
    )  # fmt: skip

    async def remote(
        data_source: str,
        prompt: Sequence[Mapping[str, Any]],
        response: str,
        ground_truth: str,
        extra_info: Mapping[str, Any],
        prompt_text: str = "",
    ) -> RewardReturn:
        text = after_thinking(response, prompt_text) if is_code else response
        item = {"data_source": data_source, "prompt": prompt, "response": text, "ground_truth": ground_truth}
        return await server.score({**item, "extra_info": extra_info})

    return remote


def check_arguments(url: str, **numbers: tuple[float, float, float]) -> None:
    for name, (value, least, most) in numbers.items():
        if not least <= value <= most:
            raise ValueError(f"{name} is {value:g}, not a number from {least:g} to {most:g}")
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
    raise ValueError(f"url is {brief(without_secrets(url))}, not http://HOST/PATH or https://HOST/PATH")


def without_secrets(url: str) -> str:
    """Returns the URL as an error may show it, without user, password and query.

    >>> without_secrets("http://me:secret@host:80/score?key=secret")
    'http://host:80/score'
    """
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    place = re.split("[?#]", rest)[0]
    hidden = "@" in rest and "@" not in place  # a password with such a mark in it, or a query
    return scheme + mark + ("…" if hidden else place.rpartition("@")[2])


def expanded(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers with the values of the variables that they name. Raises ValueError if one is not set."""

    def value_of(variable: re.Match[str]) -> str:
        value = os.environ.get(variable[1])
        if value is None:
            given = f"headers name the environment variable {variable[1]}, which is not set"
            raise ValueError(f"{given}, or which reward.environment does not name")
        return value.strip()

    values = {name: re.sub(r"\$\{(\w+)\}", value_of, text) for name, text in headers.items()}
    for name, value in values.items():
        if not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII) or not re.fullmatch(r"[ -~\t]*", value):
            raise ValueError(f"the header {name!r} has characters that HTTP does not allow")  # its value may be secret
    return values


# --- shapes -----------------------------------------------------------------------------------------------------------


def items_scores(answer: Any, items: Sequence[Item]) -> list[RewardReturn | None]:
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != len(items):
        raise ValueError(f"no object with a list of {len(items)} scores")
    if not all(score is None or isinstance(score, int | float | dict) for score in scores):
        raise ValueError("a score that is no number, object or null")
    return scores


def code_body(max_execution_time: float, items: Sequence[Item]) -> object:
    """Returns the request of open-instruct's code server, for one program."""
    response, tests = items[0]["response"], tests_of(items[0]["ground_truth"])
    program = last_program(response)
    program = response if program is None else program.rstrip()
    return {"program": program, "tests": tests, "max_execution_time": max_execution_time}


def code_scores(pass_rate_min: float, answer: Any, items: Sequence[Item]) -> list[RewardReturn | None]:
    results = answer.get("results") if isinstance(answer, dict) else None
    tests = tests_of(items[0]["ground_truth"])
    if not isinstance(results, list) or not results or (isinstance(tests, list) and len(results) != len(tests)):
        raise ValueError("no object with a list of results, one for each test")
    if not all(isinstance(result, int | float) and 0 <= result <= 1 for result in results):
        raise ValueError("a result that is not from 0 to 1")
    rate = sum(results) / len(results)
    return [{"score": rate if rate >= pass_rate_min else 0.0, "pass_rate": rate, "tests": float(len(results))}]


def tests_of(ground_truth: str) -> object:
    """Returns the list in the ground truth's JSON, else the text for the server. Raises ValueError if it is empty."""
    try:
        tests = json.loads(ground_truth)
    except ValueError:
        tests = ground_truth
    tests = tests if isinstance(tests, list) else ground_truth
    if not tests:
        raise ValueError("the ground truth has no tests")
    return tests


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Server:
    """The server that items are sent to, and the settings of its requests."""

    url: str
    headers: Mapping[str, str]
    body: Callable[[Sequence[Item]], object]
    """Makes a request from items."""
    read: Callable[[Any, Sequence[Item]], list[RewardReturn | None]]
    """Returns the items' scores in an answer, None for an item without one. Raises ValueError for any other answer."""
    batch_max: int
    batch_seconds: float
    timeout_seconds: float
    retries: int
    pause_seconds: float
    _filling: list[tuple[Item, Score]] = field(default_factory=list)
    """Items of the next POST, each with the score that its call waits for."""

    async def score(self, item: Item) -> RewardReturn:
        """Returns the item's score. Raises the server's failure for this item."""
        loop = asyncio.get_running_loop()
        coming: Score = loop.create_future()
        if all(score.done() for _, score in self._filling):  # none waits
            self._filling = []
            loop.call_later(self.batch_seconds, self._send, self._filling)
        self._filling.append((item, coming))
        if len(self._filling) == self.batch_max:
            self._send(self._filling)
        score = await coming
        if score is None:
            raise ValueError("the server has no score for this response")
        if isinstance(score, Exception):
            raise score
        return score

    def _send(self, batch: list[tuple[Item, Score]]) -> None:
        """Begins another batch, and sends the items of this one whose calls still wait, unless that is done."""
        if self._filling is not batch:
            return
        self._filling = []
        if waiting := [(item, coming) for item, coming in batch if not coming.done()]:
            sending = asyncio.create_task(self._answer(waiting))
            for _, coming in waiting:  # a call whose own time is over is cancelled; the last one cancels the POST
                coming.add_done_callback(lambda _: all(score.done() for _, score in waiting) and sending.cancel())

    async def _answer(self, waiting: Sequence[tuple[Item, Score]]) -> None:
        try:
            scores = await self._scores([item for item, _ in waiting])
        except Exception as unforeseen:  # noqa: BLE001  (its calls raise it)
            scores = [unforeseen for _ in waiting]
        for (_, coming), score in zip(waiting, scores, strict=True):
            if not coming.done():
                coming.set_result(score)

    async def _scores(self, items: Sequence[Item]) -> list[RewardReturn | Exception | None]:
        """Returns a score, None, or an exception for each item."""
        try:
            body = json.dumps(self.body(items), default=str).encode()
        except (ValueError, TypeError) as unusable:
            return [unusable for _ in items]
        attempt = 0
        while True:
            try:
                return list(await self._post(body, items))
            except PostError as failed:
                if len(items) > 1 and not failed.busy:
                    alone = await asyncio.gather(*(self._scores([item]) for item in items))
                    return [score for (score,) in alone]
                if not failed.again or attempt == self.retries:
                    text = f"{failed} ({attempt + 1} attempts)" if attempt else str(failed)
                    return [RuntimeError(text) for _ in items]
                pause = max(failed.after, self.pause_seconds * 2**attempt * random.uniform(0.5, 1.5))
            await asyncio.sleep(min(pause, PAUSE_SECONDS_MAX))
            attempt += 1

    async def _post(self, body: bytes, items: Sequence[Item]) -> list[RewardReturn | None]:
        """Returns the scores from one POST. Raises PostError without foreign texts, which may repeat headers."""
        # A connection for each POST: one that is kept may have been closed by the server. Nothing is decompressed, so
        # that a small answer stays small.
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json", **self.headers}
        where, limit = without_secrets(self.url), self.timeout_seconds
        try:
            async with aiohttp.ClientSession(auto_decompress=False) as session:
                status, data, after = await post(session, self.url, limit, ANSWER_BYTES_MAX, data=body, headers=headers)
        except TimeoutError:
            raise PostError(f"{where} did not answer in {limit:g} s") from None
        except OSError as error:
            kind = type(error.__cause__ or error).__name__
            raise PostError(f"{where} could not be reached, or broke off: {kind}", busy=True) from None
        if status != 200:
            again, busy = status in BUSY or status >= 500, status in BUSY
            raise PostError(f"{where} answered with status {status}", busy=busy, again=again, after=after or 0.0)
        if data is None:
            raise PostError(f"{where} answered with more than {ANSWER_BYTES_MAX:,} bytes")
        try:
            return self.read(json.loads(data), items)
        except RecursionError:
            raise PostError(f"{where} answered with brackets in brackets") from None
        except ValueError as wrong:
            reason = "no JSON" if isinstance(wrong, json.JSONDecodeError | UnicodeDecodeError) else wrong
            raise PostError(f"{where} answered with {reason}") from None
