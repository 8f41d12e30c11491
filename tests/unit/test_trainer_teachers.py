"""Teachers on servers: what they say of samples, and what becomes of a sample when they are slow, dead or wrong."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from megagrpo.errors import RewardError, TeacherError
from megagrpo.reward.judging.asked import Reply
from megagrpo.track.metrics import undocumented
from megagrpo.trainer import teachers as module
from megagrpo.trainer.taught import given_rows
from megagrpo.trainer.teachers import Teachers
from megagrpo.types import AgentRun, Branch, Group, Prompt, Sample, Score, TeacherTokens
from tests.teacher_server import TeacherServer, teacher_server
from tests.tiny_run import recipe_with

PROMPT = (1, 2)
UNSCORED = Score(None, masked="given")


def sample(index: int, tokens: Sequence[int] = (3, 4, 5), **values: Any) -> Sample:
    ids = np.array(tokens, np.int32)
    return replace(Sample("p0", index, ids, -ids / np.float32(9), np.zeros_like(ids), "stop", ""), **values)


def group(*samples: Sample, source: str = "sums", **extra: Any) -> Group:
    return Group(Prompt("p0", PROMPT, source, "2", extra_info=extra), samples)


def scores(groups: Sequence[Group]) -> list[Group]:
    return [
        replace(one, scores=tuple(Score(1.0, {"math": 1.0}, counted=(1.0,)) for _ in one.samples)) for one in groups
    ]


@pytest.fixture(autouse=True)
def _without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_SECONDS", 0.01)


@pytest.fixture
def server() -> Iterator[TeacherServer]:
    with teacher_server() as started:
        yield started


@contextmanager
def asking(
    server: TeacherServer, *overrides: str, contact: bool = True, served: Any = MappingProxyType({}), **options: Any
) -> Iterator[Teachers]:
    given = {"kind": "external", "url": server.url, "tokenizer": "unused", "retries": 2}
    teachers = Teachers(
        recipe_with(f"teachers.big={json.dumps(given)}", "algorithm.distillation={}", *overrides), served, **options
    )
    try:
        if contact:
            teachers.contact()
            server.bodies.clear()
        yield teachers
    finally:
        teachers.close()


def logprobs(one: Sample) -> list[float] | None:
    return None if one.teacher is None else one.teacher.logprobs.tolist()


def test_each_sample_gets_the_logprobs_of_its_own_tokens(server: TeacherServer) -> None:
    given = [
        group(sample(0), sample(1, (7,))),
        group(sample(0, (9, 9)), sample(1, (3,), finish="abort"), sample(2, ())),
    ]
    with asking(server) as teachers:
        first, second = teachers.beside(given, scores)
        assert [logprobs(one) for one in first.samples] == [[-3 / 8, -4 / 8, -5 / 8], [-7 / 8]]
        assert [logprobs(one) for one in second.samples] == [[-9 / 8, -9 / 8], None, None]
        assert first.scores == scores(given)[0].scores
        assert sorted(body["input_ids"] for body in server.bodies) == [[1, 2, 3, 4, 5], [1, 2, 7], [1, 2, 9, 9]]
        assert {body["logprob_start_len"] for body in server.bodies} == {1}
        metrics = teachers.take_metrics()
        assert metrics["teacher/big/requests"] == 3
        assert metrics["teacher/big/retries"] == metrics["teacher/big/failed"] == 0
        assert metrics["teacher/big/seconds"] > 0
        assert metrics["teacher/big/tokens"] == 5 + 3 + 4
        assert not undocumented(metrics)
        assert set(teachers.take_metrics().values()) == {0.0}


def test_a_teacher_reads_its_own_prompt_before_the_same_response(server: TeacherServer) -> None:
    given = replace(group(sample(0)), prompt=replace(group().prompt, taught=(6, 1, 2)))
    with asking(server) as teachers:
        (found,) = teachers.beside([given], scores)
    assert [(body["input_ids"], body["logprob_start_len"]) for body in server.bodies] == [([6, 1, 2, 3, 4, 5], 2)]
    assert logprobs(found.samples[0]) == [-3 / 8, -4 / 8, -5 / 8]


def test_a_rollout_of_an_agent_is_asked_branch_by_branch_up_to_the_last_token_of_the_policy(
    server: TeacherServer,
) -> None:
    def branch(first: int, trained: str) -> Branch:
        mask = np.array([letter == "T" for letter in trained])
        return Branch(np.arange(first, first + len(mask), dtype=np.int32), mask)

    run = AgentRun((branch(1, "..TT.TT.."), branch(30, "..."), branch(60, ".T")), (), ())
    tokens = np.array([3, 4, 6, 7, 61], np.int32)
    with asking(server) as teachers:
        (found,) = teachers.beside([group(sample(0, tokens, agent=run))], scores)
    assert logprobs(found.samples[0]) == (-tokens / 8).tolist()
    asked = sorted((body["input_ids"], body["logprob_start_len"]) for body in server.bodies)
    assert asked == [([*range(1, 8)], 1), ([60, 61], 0)]


def test_rows_have_the_teacher_of_their_source_or_column(server: TeacherServer) -> None:
    by_source = ("algorithm.distillation={by_source: {math: big}, column: teacher}",)
    given = [group(sample(0), source=source, **extra) for source, extra in (
        ("math", {}), ("code", {}), ("code", {"teacher": "big"}), ("math", {"teacher": ""})
    )]  # fmt: skip
    with asking(server, *by_source) as teachers:
        assert [logprobs(one.samples[0]) is not None for one in teachers.beside(given, scores)] == [
            True,
            False,
            True,
            False,
        ]
        for named in ("bigger", 3):
            with pytest.raises(TeacherError, match=rf"prompt p0\n *given: {named!r}\n *needed: one of big"):
                teachers.beside([group(sample(0), teacher=named)], scores)


def test_teachers_answer_while_rewards_score_and_not_more_at_once_than_allowed(server: TeacherServer) -> None:
    answered = threading.Event()

    def score(groups: Sequence[Group]) -> list[Group]:
        assert answered.wait(60)
        return scores(groups)

    server.hold = lambda number: answered.set() if number == 7 else answered.wait(0.01)
    with asking(server, "teachers.big.requests_at_once=2") as teachers:
        (found,) = teachers.beside([group(*(sample(i, (i,)) for i in range(8)))], score)
    assert all(one.teacher for one in found.samples)
    assert server.most_at_once == 2


def test_no_teacher_is_waited_for_when_rewards_fail_or_the_run_is_told_to_stop(server: TeacherServer) -> None:
    end = threading.Event()
    server.hold = lambda number: end.wait(60)

    def stop() -> None:
        raise KeyboardInterrupt

    def fail(groups: Sequence[Group]) -> list[Group]:
        raise RewardError([])

    with asking(server, contact=False, served={"big": Slow()}, check=stop) as teachers:
        with pytest.raises(KeyboardInterrupt):
            teachers.beside([group(sample(0))], scores)
        with pytest.raises(RewardError):
            teachers.beside([group(sample(0))], fail)
    end.set()


class Slow:
    """A teacher that never answers."""

    identity = "slow"

    async def score(self, *given: Any) -> Any:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


OTHER = {"meta_info": {"input_token_logprobs": [[None, 2, None], [-1.0, 8, None], [-1.0, 4, None], [-1.0, 5, None]]}}
NAN = {"meta_info": {"input_token_logprobs": [[None, 2, None], [None, 3, None], [-1.0, 4, None], [-1.0, 5, None]]}}
FAULTS: dict[str, tuple[int, Any, str]] = {
    "broken": (500, {"error": "CUDA"}, 'HTTP 500: {"error": "CUDA"}'),
    "other tokens": (200, OTHER, "token 8 in the place of 3, token 2"),
    "NaN": (200, NAN, "nan as the logprob of a token"),
    "text": (200, {"choices": []}, "KeyError: 'meta_info'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_failed_is_sent_again(server: TeacherServer, fault: str) -> None:
    with asking(server) as teachers:
        server.fault = lambda number: FAULTS[fault][:2] if number < 2 else None
        (found,) = teachers.beside([group(sample(0))], scores)
        assert logprobs(found.samples[0]) == [-3 / 8, -4 / 8, -5 / 8]
        assert found.scores[0].value == 1.0
        metrics = teachers.take_metrics()
    assert (metrics["teacher/big/requests"], metrics["teacher/big/retries"], metrics["teacher/big/failed"]) == (3, 2, 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_on_which_its_teacher_fails_in_the_end_is_masked_and_counted(
    server: TeacherServer, fault: str
) -> None:
    status, answer, why = FAULTS[fault]
    said: list[str] = []
    with asking(server, say=said.append, judged_responses=8) as teachers:
        server.fault = lambda number: (status, answer) if server.bodies[number]["input_ids"][-1] == 5 else None
        (found,) = teachers.beside([group(sample(0), sample(1, (7,)))], scores)
        metrics = teachers.take_metrics()
    assert found.samples[0].teacher is None
    score = found.scores[0]
    assert (score.value, score.parts, score.counted) == (None, {"math": 1.0}, ())
    assert score.error.startswith("teacher big: ")
    assert why in score.error
    assert "(3 times): " in score.error
    assert (logprobs(found.samples[1]), found.scores[1].value) == ([-7 / 8], 1.0)
    assert (metrics["teacher/big/requests"], metrics["teacher/big/retries"], metrics["teacher/big/failed"]) == (4, 2, 1)
    assert (
        said[-1]
        == f"warning: teacher big failed for the first time: prompt p0: {score.error.removeprefix('teacher big: ')}"
    )


def test_a_refused_request_is_not_sent_again(server: TeacherServer) -> None:
    with asking(server, "algorithm.distillation.failed_share_max=1") as teachers:
        server.fault = lambda number: (400, {"error": "too long"})
        (found,) = teachers.beside([group(sample(0))], scores)
    assert found.scores[0].error == 'teacher big: no logprobs: HTTP 400: {"error": "too long"}'
    assert len(server.bodies) == 1


def test_a_teacher_that_is_late_or_gone_masks_its_samples(server: TeacherServer) -> None:
    end = threading.Event()
    options = "teachers.big.timeout_seconds=0.2", "teachers.big.retries=1", "algorithm.distillation.failed_share_max=1"
    with asking(server, *options) as teachers:
        server.hold = lambda number: end.wait(60)
        (found,) = teachers.beside([group(sample(0))], scores)
        end.set()
        assert found.scores[0].error == "teacher big: no logprobs (2 times): no answer in 0.2 s"
    with teacher_server() as gone, asking(gone, *options) as teachers:
        pass
    with asking(gone, *options, contact=False) as teachers, pytest.raises(TeacherError) as caught:
        teachers.contact()
    (problem,) = caught.value.problems
    assert problem.where == "teachers.big.url"
    assert "refused" in problem.given
    assert gone.url in problem.given


def test_a_server_that_is_paused_or_killed_masks_its_samples_until_it_goes_on() -> None:
    serves = "with teacher_server() as server:\n    print(server.url, flush=True)\n    input()"
    command = [sys.executable, "-c", f"from tests.teacher_server import teacher_server\n{serves}"]
    options = "teachers.big.timeout_seconds=0.5", "teachers.big.retries=1", "algorithm.distillation.failed_share_max=1"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with asking(TeacherServer(process.stdout.readline().strip()), *options) as teachers:
            for sent, answered in ((signal.SIGSTOP, False), (signal.SIGCONT, True), (signal.SIGKILL, False)):
                process.send_signal(sent)
                (found,) = teachers.beside([group(sample(0), sample(1, (7,)))], scores)
                assert [bool(one.teacher) for one in found.samples] == [answered] * 2
                assert [(one.value, bool(one.error)) for one in found.scores] == [
                    (1.0 if answered else None, not answered)
                ] * 2
                metrics = teachers.take_metrics()
                assert (metrics["teacher/big/retries"], metrics["teacher/big/failed"]) == (
                    (0, 0) if answered else (2, 2)
                )


@pytest.mark.parametrize(("judged", "failing", "ends"), [(1, 2, False), (1, 3, True), (8, 4, False), (8, 5, True)])
def test_a_run_ends_if_teachers_fail_on_too_large_a_share(
    server: TeacherServer, judged: int, failing: int, ends: bool
) -> None:
    def parts() -> None:
        for begin in range(0, 8, 4):
            teachers.beside([group(*(sample(i, (10 + i,)) for i in range(begin, begin + 4)))], scores)

    with asking(server, "teachers.big.retries=0", judged_responses=judged) as teachers:
        server.fault = lambda number: (500, {}) if server.bodies[number]["input_ids"][-1] < 10 + failing else None
        if not ends:
            parts()
            return
        with pytest.raises(TeacherError) as caught:
            parts()
    (problem,) = caught.value.problems
    asked = 4 if judged == 1 else 8
    assert problem.given.startswith(
        f"no logprobs for {failing} of {asked} responses; the first failure of each teacher:"
    )
    assert "big: prompt p0: no logprobs: HTTP 500" in problem.given
    assert problem.needed == "at most a share of 0.5 (algorithm.distillation.failed_share_max)"


def test_a_sample_that_has_no_score_keeps_its_reason(server: TeacherServer) -> None:
    def none(groups: Sequence[Group]) -> list[Group]:
        return [replace(one, scores=(Score(None, masked="cut off"),)) for one in groups]

    with asking(server, "algorithm.distillation.failed_share_max=1") as teachers:
        server.fault = lambda number: (400, {})
        (found,) = teachers.beside([group(sample(0))], none)
    assert found.scores == (Score(None, masked="cut off"),)


# --- budgets, and answers that are known ------------------------------------------------------------------------------


def test_responses_beyond_a_steps_tokens_are_left_out_and_are_no_failures(server: TeacherServer) -> None:
    options = (
        "teachers.big.requests_at_once=1",
        "teachers.big.budget.tokens=5",
        "algorithm.distillation.failed_share_max=0.01",
    )
    responses = [group(*(sample(i, (3 + i,)) for i in range(4)))]
    with asking(server, *options) as teachers:
        (of_step,) = teachers.beside(responses, scores)
        assert [logprobs(one) for one in of_step.samples] == [[-3 / 8], [-4 / 8], None, None]
        assert [one.value for one in of_step.scores] == [1.0, 1.0, None, None]
        assert [(bool(one.masked), one.error) for one in of_step.scores] == [(False, "")] * 2 + [(True, "")] * 2
        metrics = teachers.take_metrics()
        assert (metrics["teacher/big/over_budget"], metrics["teacher/big/failed"]) == (2, 0)
        given = [group(sample(0, tokens, finish="given")) for tokens in ((3, 4, 5), (6, 7, 8))]  # of a new step
        found = teachers.beside(given, lambda groups: [replace(one, scores=(UNSCORED,)) for one in groups])
        assert [bool(one.samples[0].teacher) for one in found] == given_rows(found).tolist() == [True, False]


def test_a_step_waits_for_a_teacher_no_longer_than_its_budget(server: TeacherServer) -> None:
    end = threading.Event()
    with asking(server, "teachers.big.budget.seconds=0.3") as teachers:
        server.hold = lambda number: end.wait(60)
        found = teachers.beside([group(sample(0), sample(1, (7,)))], scores)[0]
        end.set()
        assert [(one.value, bool(one.masked), one.error) for one in found.scores] == [(None, True, "")] * 2
        metrics = teachers.take_metrics()
    assert metrics["teacher/big/over_budget"] == 2
    assert 0.3 <= metrics["teacher/big/seconds"] < 10


@dataclass
class Known:
    """A teacher in this process, which counts its requests."""

    k: int
    identity: str = "known"
    asked: int = 0

    async def score(self, tokens: np.ndarray, first: int, timeout_seconds: float) -> Reply:
        self.asked += 1
        await asyncio.sleep(0.01)
        draws, shape = np.random.default_rng(tokens), (len(tokens) - first, self.k)
        logprobs, at_ids = (-draws.random(size, np.float32) for size in (shape[0], shape))
        return Reply(200, TeacherTokens(logprobs, draws.integers(0, 9, shape, np.int32), at_ids))

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("k", [0, 3])
def test_equal_requests_are_sent_once_and_kept_for_a_continued_run(
    server: TeacherServer, tmp_path: Path, k: int
) -> None:
    objective = (
        f"algorithm.distillation.objective={{name: teacher_top_k, k: {k}}}" if k else "algorithm.distillation={}"
    )
    given = [group(sample(0), sample(1), sample(2, (7,)))]

    def asked(teacher: Known, cached: int, *, cache: bool = True) -> list[Any]:
        overrides = objective, f"teachers.big.cache={json.dumps(cache)}", f"track.directory={tmp_path}"
        with asking(server, *overrides, contact=False, served={"big": teacher}) as teachers:
            (found,) = teachers.beside(given, scores)
            assert teachers.take_metrics()["teacher/big/cached"] == cached
        told = [one.teacher for one in found.samples if one.teacher]
        return [array.tolist() for one in told for array in (one.logprobs, one.ids, one.ids_logprobs)]

    first, without, again, other = Known(k), Known(k), Known(k), Known(k, "other")
    expected = asked(first, 1)
    assert (asked(without, 1, cache=False), asked(again, 3), asked(other, 1)) == (expected, expected, expected)
    assert [one.asked for one in (first, without, again, other)] == [2, 2, 0, 2]


# --- servers that run already -----------------------------------------------------------------------------------------


def test_a_server_is_tried_once_with_its_key(server: TeacherServer, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("TEACHER_KEY", "secret")
    with asking(server, "teachers.big.api_key_variable=TEACHER_KEY", contact=False, say=said.append) as teachers:
        teachers.contact()
    assert said == [f"teacher big: models/teacher at {server.url} (sglang)"]
    assert server.keys == ["Bearer secret"]
    monkeypatch.delenv("TEACHER_KEY")
    with (
        asking(server, "teachers.big.api_key_variable=TEACHER_KEY", contact=False) as teachers,
        pytest.raises(TeacherError, match="TEACHER_KEY, which is not set"),
    ):
        teachers.contact()


@pytest.mark.parametrize(
    ("engine", "fault", "said"),
    [
        ("vllm", None, "/v1/models: HTTP Error 404"),
        ("sglang", (200, {"text": "x"}), "KeyError: 'meta_info'"),
        ("sglang", (400, {"error": "no logprobs"}), "HTTP 400"),
    ],
)
def test_a_server_of_another_kind_or_without_logprobs_is_refused_with_its_url(
    server: TeacherServer, engine: str, fault: Any, said: str
) -> None:
    server.fault = lambda number: fault
    options = f"teachers.big.engine={engine}", "teachers.big.retries=0"
    with asking(server, *options, contact=False) as teachers, pytest.raises(TeacherError) as caught:
        teachers.contact()
    (problem,) = caught.value.problems
    assert problem.where == "teachers.big.url"
    assert problem.given.startswith(f"{server.url}: ")
    assert said in problem.given
    assert f"a {engine} server" in problem.needed
