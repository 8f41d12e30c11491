"""Scores from a server, which here is a real one that also fails, hangs, answers garbage and asks to wait."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from megagrpo.errors import RewardError
from megagrpo.reward.functions import FunctionSpec, load, outcome_of
from megagrpo.reward.verifiers import remote

Answer = Callable[[dict], Awaitable[web.StreamResponse] | web.StreamResponse]
TOKEN = "s3cret-t0ken"
ROW = {
    "data_source": "s", "prompt": [{"role": "user", "content": "?"}], "ground_truth": "42", "extra_info": {"split": "x"}
}  # fmt: skip


def length(item: dict) -> float:
    return float(len(item["response"]))


def good(body: dict) -> web.Response:
    return web.json_response({"scores": [length(item) for item in body["items"]]})


def status(code: int, **headers: str) -> Answer:
    return lambda body: web.Response(status=code, text=f"refused: {TOKEN}", headers=headers)


def text(answer: str | bytes, **headers: str) -> Answer:
    data = answer.encode() if isinstance(answer, str) else answer
    return lambda body: web.Response(body=data, headers=headers)


async def hang(body: dict) -> web.Response:
    await asyncio.sleep(60)
    return good(body)


async def break_off(body: dict) -> web.Response:
    raise asyncio.CancelledError  # aiohttp closes the connection without an answer


@asynccontextmanager
async def serving(*answers: Answer) -> AsyncIterator[tuple[str, list]]:
    """A server that gives these answers in turn, the last of them for ever: its URL, and the requests that it got."""
    requests: list = []

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        requests.append((body, dict(request.headers)))
        answered = answers[min(len(requests), len(answers)) - 1](body)
        return await answered if asyncio.iscoroutine(answered) else answered

    app = web.Application()
    app.router.add_post("/score", handle)
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/score?key={TOKEN}", requests
    finally:
        await runner.cleanup()


def calls(responses: Sequence[str], *answers: Answer, ground_truth: str = "42", **arguments):
    """Returns the results or errors of remote for each response, called side by side, and the requests that the server
    got."""

    async def run() -> tuple[list, list]:
        async with serving(*answers) as (url, requests):
            function = remote.make(**{"url": url, "pause_seconds": 0.001, **arguments})
            coming = (function(response=response, **{**ROW, "ground_truth": ground_truth}) for response in responses)
            return await asyncio.wait_for(asyncio.gather(*coming, return_exceptions=True), 30), requests

    return asyncio.run(run())


def sizes(requests) -> list[int]:
    return [len(body["items"]) for body, _ in requests]


def test_an_item_has_all_that_a_server_may_want():
    _, [(body, _)] = calls(["a"], good)
    assert body == {"items": [{**ROW, "response": "a"}]}


def test_calls_side_by_side_go_together_and_each_gets_its_own_score():
    returned, requests = calls(["a" * n for n in range(1, 11)], good, batch=4)
    assert returned == [float(n) for n in range(1, 11)]
    assert sizes(requests) == [4, 4, 2]


def test_a_server_may_answer_with_metrics_and_notes_or_that_it_has_no_score():
    answer = {"score": 0.5, "fluency": 0.25, "answer": "b"}
    returned, _ = calls(["a", "b"], text(json.dumps({"scores": [answer, None]})))
    assert outcome_of(returned[0]).metrics == {"fluency": 0.25}
    assert isinstance(returned[1], ValueError)


@pytest.mark.parametrize("busy", [*map(status, (429, 502, 503, 504)), break_off])
def test_a_server_that_is_busy_or_breaks_off_gets_the_same_batch_again(busy):
    returned, requests = calls(["a", "bb"], busy, busy, good)
    assert returned == [1.0, 2.0]
    assert sizes(requests) == [2, 2, 2]


def test_as_many_attempts_are_made_as_asked_for():
    [error], requests = calls(["a"], status(503), retries=2)
    assert isinstance(error, RuntimeError)
    assert len(requests) == 3


def test_the_server_says_how_long_to_wait(monkeypatch):
    pauses = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def slow_body() -> AsyncIterator[bytes]:
        yield b"wait"
        await asyncio.Event().wait()

    def slow(body: dict) -> web.Response:
        return web.Response(status=503, body=slow_body(), headers={"Retry-After": "9"})

    monkeypatch.setattr(remote.asyncio, "sleep", note)
    after = (status(429, **{"Retry-After": "7"}), status(429, **{"Retry-After": "999999"}), slow)
    returned, _ = calls(["a"], *after, good, timeout_seconds=2)
    assert returned == [1.0]
    assert [seconds for seconds in pauses if seconds] == [7.0, remote.PAUSE_SECONDS_MAX, 9.0]


@pytest.mark.parametrize("code", [301, 400, 401, 404, 413, 422])
def test_a_refusal_is_not_asked_for_twice(code):
    [error], requests = calls(["a"], status(code, Location="/score"))
    assert str(code) in str(error)
    assert len(requests) == 1


DEEP = "[" * 100_000
PACKED = gzip.compress(b'{"scores": [1]}')
GARBAGE = [
    "", "oops", "[]", "{}", '{"scores": 1}', '{"scores": []}', '{"scores": [1, 2]}', '{"scores": ["1"]}', DEEP,
    '{"scores": [' + "1" * 5000 + "]}", b"\xff\xfe", PACKED,
]  # fmt: skip


@pytest.mark.parametrize("answer", [*map(text, GARBAGE), text(PACKED, **{"Content-Encoding": "gzip"})])
def test_garbage_is_an_error_and_nothing_is_unpacked(answer):
    [error], _ = calls(["a"], answer, retries=1)
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize("score", ["NaN", "Infinity", "{}", '{"score": "1"}'])
def test_a_score_that_is_no_finite_number_is_an_error(score):
    [returned], _ = calls(["a"], text('{"scores": [' + score + "]}"))
    assert outcome_of(returned).error


def test_an_answer_that_never_ends_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(remote, "ANSWER_BYTES_MAX", 1000)
    [error], _ = calls(["a"], text('{"scores": [1' + " " * 100_000 + "]}"), retries=0)
    assert "1,000 bytes" in str(error)


def test_a_server_that_hangs_costs_the_time_allowed():
    errors, _ = calls(["a", "bb"], hang, timeout_seconds=0.05, retries=1)
    assert all("0.05 s" in str(error) for error in errors)


@pytest.mark.parametrize("failure", [status(500), status(400), text("oops")])
def test_an_item_that_a_server_cannot_bear_costs_its_own_score_only(failure):
    def unless_poison(body: dict):
        return failure(body) if any(item["response"] == "poison" for item in body["items"]) else good(body)

    returned, _ = calls(["a", "poison", "ccc"], unless_poison, retries=1)
    assert [returned[0], returned[2]] == [1.0, 3.0]
    assert isinstance(returned[1], RuntimeError)


def test_a_server_that_is_not_there_is_an_error():
    [error], _ = calls(["a"], good, url="http://127.0.0.1:9/score", retries=1)
    assert "127.0.0.1:9" in str(error)


def test_a_call_whose_time_is_over_does_not_end_the_others():
    async def run() -> list:
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def late(body: dict) -> web.Response:
            asked.set()
            await go_on.wait()
            return good(body)

        async with serving(late) as (url, _):
            function = remote.make(url)
            both = [asyncio.create_task(function(response=response, **ROW)) for response in ("a", "bb")]
            await asked.wait()
            both[0].cancel()
            await asyncio.sleep(0)
            go_on.set()
            return await asyncio.gather(*both, return_exceptions=True)

    cancelled, score = asyncio.run(asyncio.wait_for(run(), 30))
    assert isinstance(cancelled, asyncio.CancelledError)
    assert score == 2.0


def test_when_nothing_waits_any_more_the_server_is_left_alone():
    async def run() -> None:
        async with serving(hang) as (url, requests):
            function = remote.make(url)
            only = asyncio.create_task(function(response="a", **ROW))
            while not requests:
                await asyncio.sleep(0.001)
            before = asyncio.all_tasks()
            only.cancel()
            await asyncio.gather(only, return_exceptions=True)
            while len(asyncio.all_tasks()) > len(before) - 2:  # the call, and the POST that it waited for
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_batch_whose_calls_are_all_cancelled_is_not_sent_and_takes_no_later_call():
    async def run() -> tuple[list, list]:
        async with serving(good) as (url, requests):
            function = remote.make(url, batch_ms=50)
            alone, *three = (asyncio.create_task(function(response="a" * n, **ROW)) for n in range(4))
            await asyncio.sleep(0)
            for call in (alone, *three):
                call.cancel()
            await asyncio.gather(alone, *three, return_exceptions=True)
            late, kept = (asyncio.create_task(function(response=text, **ROW)) for text in ("aaaaa", "aaaaaa"))
            await asyncio.sleep(0)
            late.cancel()
            return await kept, [item["response"] for body, _ in requests for item in body["items"]]

    assert asyncio.run(asyncio.wait_for(run(), 30)) == (6.0, ["aaaaaa"])


def test_what_json_cannot_hold_fails_alone():
    async def run() -> object:
        function = remote.make("http://127.0.0.1:9/", batch_ms=0)
        return await function(response="", **{**ROW, "extra_info": {(1, 2): 3}})

    with pytest.raises(TypeError):
        asyncio.run(asyncio.wait_for(run(), 5))


# --- headers ----------------------------------------------------------------------------------------------------------


def test_a_variable_is_sent_and_in_no_error(monkeypatch):
    monkeypatch.setenv("SCORE_TOKEN", TOKEN)
    headers = {"Authorization": "Bearer ${SCORE_TOKEN}", "X-Plain": "a $HOME b"}
    for answer in (status(401), status(500), text(TOKEN), break_off):
        [error], requests = calls(["a"], answer, headers=headers, retries=0)
        assert requests[0][1]["Authorization"] == f"Bearer {TOKEN}"
        assert requests[0][1]["X-Plain"] == "a $HOME b"
        while error is not None:
            assert TOKEN not in f"{error!r} {error}"
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("SCORE_TOKEN", raising=False)
    with pytest.raises(ValueError, match="SCORE_TOKEN"):
        remote.make("http://h/", headers={"Authorization": "${SCORE_TOKEN}"})


def test_a_value_that_would_be_two_headers_is_refused_without_being_shown(monkeypatch):
    monkeypatch.setenv("SCORE_TOKEN", f"{TOKEN}\r\nX-Other: 1")
    with pytest.raises(ValueError) as refused:
        remote.make("http://h/", headers={"Authorization": "${SCORE_TOKEN}"})
    assert TOKEN not in str(refused.value)


BAD = [
    {"url": "ftp://h/"}, {"url": "http:///score"}, {"url": "http://h:99999/"}, {"url": 5},
    {"batch": 0}, {"batch": 65}, {"batch": 1.5}, {"batch_ms": -1}, {"timeout_seconds": 0}, {"timeout_seconds": "5"},
    {"retries": -1}, {"pause_seconds": float("nan")}, {"max_execution_time": 0}, {"pass_rate_min": 2},
    {"headers": {"a b": "c"}}, {"headers": {"a": 1}}, {"headers": {1: "a"}}, {"headers": ["a"]},
]  # fmt: skip


@pytest.mark.parametrize("arguments", BAD, ids=repr)
def test_an_argument_that_cannot_be_is_refused(arguments):
    with pytest.raises(RewardError):
        load(FunctionSpec("remote", "remote", 1.0, {"url": "http://h/", **arguments}, "reward.functions[0]"))


def test_the_recipe_names_it_and_it_is_async():
    spec = FunctionSpec("remote", "remote", 1.0, {"url": "http://h/"}, "reward.functions[0]")
    assert load(spec).is_async


# --- open-instruct's code server --------------------------------------------------------------------------------------

PROGRAM = "Think.\n```python\ndef f(): return 1\n```\nBetter:\n```python\ndef f(): return 2\n```\n"
TESTS = json.dumps(["assert f() == 2", "assert f() > 0", "assert f() < 0", "assert f() == 3"])
CODE = {"shape": "open_instruct_code", "ground_truth": TESTS, "max_execution_time": 2.0}


def results(*passed: object) -> Answer:
    return text(json.dumps({"results": passed, "runtimes": [0.1] * len(passed)}))


def test_code_is_sent_as_open_instructs_server_takes_it_one_program_at_a_time():
    returned, requests = calls([PROGRAM, "f = lambda: 2"], results(1, 1, 0, 0), **CODE)
    assert returned == [{"score": 0.5, "pass_rate": 0.5, "tests": 4.0}] * 2
    bodies = [{**body, "tests": json.dumps(body["tests"])} for body, _ in requests]
    common = {"tests": TESTS, "max_execution_time": 2.0}
    assert sorted(bodies, key=str) == [
        {"program": "def f(): return 2", **common},
        {"program": "f = lambda: 2", **common},
    ]


def test_code_in_the_reasoning_alone_is_not_sent():
    _, requests = calls(["<think>" + PROGRAM, PROGRAM + "</think>f = 2"], results(0, 0, 0, 0), **CODE)
    assert sorted(body["program"] for body, _ in requests) == ["", "f = 2"]


def test_a_share_of_tests_below_the_least_one_is_nothing():
    [returned], _ = calls([PROGRAM], results(1, 1, 0, 0), **CODE, pass_rate_min=0.75)
    assert (returned["score"], returned["pass_rate"]) == (0.0, 0.5)


@pytest.mark.parametrize("passed", [(), (1,), (1, 1, 0, 2), (1, 1, 0, "1"), (1, 1, 0, None)])
def test_results_that_do_not_fit_the_tests_are_an_error(passed):
    [error], _ = calls([PROGRAM], results(*passed), **CODE, retries=0)
    assert isinstance(error, RuntimeError)


def test_tests_in_another_encoding_are_the_servers_to_read():
    [returned], [(body, _)] = calls([PROGRAM], results(1, True), **{**CODE, "ground_truth": "eJzLSM3JyQcABiwCFQ=="})
    assert body["tests"] == "eJzLSM3JyQcABiwCFQ=="
    assert returned["score"] == 1.0


@pytest.mark.parametrize("empty", ["", "[]"])
def test_a_row_without_tests_is_refused_and_nothing_is_sent(empty):
    [error], requests = calls([PROGRAM], results(1), **{**CODE, "ground_truth": empty})
    assert isinstance(error, ValueError)
    assert not requests


@pytest.mark.parametrize(
    "url",
    [
        "http://me:secret@host:99999/score?key=secret",
        "ftp://host/score?key=secret#secret",
        "http://me:sec?secret@host/score",
        "me:secret@host/score",
        "http://[me:secret@host",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_secrets(url):
    with pytest.raises(ValueError) as refused:
        remote.make(url)
    assert "sec" not in str(refused.value)
