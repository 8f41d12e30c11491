"""The host of agents with real processes, a real gateway and a scripted policy."""

from __future__ import annotations

import asyncio
import json
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from examples.demo.model import make_tokenizer
from megagrpo.agents import host as agents_host
from megagrpo.agents.chat import Chat
from megagrpo.agents.host import AgentHost
from megagrpo.agents.processes import Program
from megagrpo.errors import AgentError, MegagrpoError
from megagrpo.recipe.schema.agent import AgentConfig
from megagrpo.report.text import conversation
from megagrpo.rollout.pool import Order
from megagrpo.track.metrics import undocumented
from megagrpo.track.rollout_files import TRAIN
from megagrpo.track.rollout_writer import StepRollouts, TokenTexts, tables
from megagrpo.trainer.step_metrics import agent_metrics
from megagrpo.types import Group, Prompt, Request, Sample, SamplingParams
from tests.loop.small_run import wait_until

SECONDS = 120.0
TOKENIZER = make_tokenizer()
SAMPLING = SamplingParams(max_tokens=20)
AGENT = """
    import asyncio, json, os, signal, time, urllib.error, urllib.request


    def ask(endpoint, messages):
        body = json.dumps({"model": endpoint.model, "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]


    async def rollout(task, endpoint):
        what, messages = task.messages[0]["content"], list(task.messages)
        endpoint.event("pid", pid=os.getpid(), sample=task.sample)
        if what == "tells":
            endpoint.event("turn", said="x")
            endpoint.event("tool", name=3, seconds=1.0)
            endpoint.event("tool", name="add", seconds=float("nan"))
            endpoint.event("odd", ready=True, failed="x", end=[1], event=[1], trace=3, at="x", value=float("inf"))
            deep = []
            for _ in range(500):
                deep = [deep]
            endpoint.event("deep", value=deep)
            endpoint.event("large", value=["x" * 1000] * 30_000, name="kept")
            endpoint.event("tool", name="add", seconds=1.0)
            return 1.0
        if what == "returns much":
            return {"score": 1.0, "turn_rewards": [0.123456789] * 2_000_000}
        if what == "waits":
            await asyncio.sleep(1000)
        if what == "blocks":
            time.sleep(1000)
        for turn in range(2):
            messages.append(await asyncio.to_thread(ask, endpoint, messages))
            if what == "raises":
                raise ValueError(f"sample {task.sample}")
            if what == "dies" and task.sample == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "dies":
                await asyncio.sleep(1000)
            if what == "waits after a turn":
                await asyncio.sleep(1000)
            messages.append({"role": "user", "content": f"on {turn}"})
        return {"score": task.sample, "turn_rewards": [0.5, 1.0] if what != "bad rewards" else [1.0] * 9}


    def in_a_thread(task, endpoint):
        if task.messages[0]["content"] == "blocks":
            time.sleep(1000)
        ask(endpoint, task.messages)
        return 1.0
"""


@dataclass
class Hosted:
    """A host, and what it has said. `answers`: what the policy waits for before it answers a turn."""

    make: Callable[..., AgentHost]
    samples: dict[tuple[str, int], Sample] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    failures: list[MegagrpoError] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)
    engines: bool = True
    finish: str = "stop"

    async def ask(self, request: Request, key: str) -> Sample:
        self.asked.append(request)
        while not self.answers.is_set():
            await asyncio.sleep(0.01)
        tokens = np.array([*TOKENIZER.encode("fine"), TOKENIZER.eos_token_id], np.int32)
        zeros = np.zeros(len(tokens), np.float32)
        return Sample(request.prompt_id, request.index, tokens, zeros, zeros.astype(np.int32), self.finish, "fine")  # type: ignore[arg-type]

    def finished(self, order: Order, index: int, key: str, sample: Sample | None) -> None:
        if sample is None:
            self.gone.append(index)
        else:
            self.samples[sample.prompt_id, index] = sample

    def errors(self) -> list[str]:
        return [sample.agent.error for sample in self.samples.values() if sample.agent]

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.samples) == count or bool(self.failures), f"{count} samples", SECONDS)
        assert not self.failures


def order(what: str, samples: int = 2) -> Order:
    messages = ({"role": "user", "content": what},)
    prompt = Prompt(what, (1,), "sums", "2", messages=messages)
    return Order([Request(what, index, (1,), index, SAMPLING) for index in range(samples)], prompt=prompt)


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Hosted]:
    file = tmp_path / "agent.py"
    file.write_text(textwrap.dedent(AGENT))
    program = Program(str(file), file.read_text(), "rollout", {})
    agent = AgentConfig(function=f"{file}:rollout", rollouts_at_once=64, timeout_seconds=SECONDS, turns_max=5)
    begun: list[AgentHost] = []

    def make(prepare_seconds: float = SECONDS, **changes: Any) -> AgentHost:
        of_program = {name: changes.pop(name) for name in ("function", "source") if name in changes}
        begun.append(
            AgentHost(
                agent.model_copy(update=changes),
                replace(program, **of_program),
                300,
                tmp_path,
                lambda: Chat(TOKENIZER, []),
                found.ask,
                finished=found.finished,
                failed=found.failures.append,
                sampling=lambda keys: set(keys) if found.engines else set(),
                say=found.said.append,
                prepare_seconds=prepare_seconds,
            )
        )
        return begun[-1]

    found = Hosted(make)
    found.answers.set()
    yield found
    for one in begun:
        one.close()
        assert not one.thread.is_alive()
    assert not [child for child in psutil.Process().children(recursive=True) if "runner.py" in str(child.cmdline())]


def test_rollouts_become_samples_with_their_turns_and_rewards(hosted: Hosted) -> None:
    hosted.answers.clear()
    hosted.make(processes=2, rollouts_at_once=16).begin([order("talks", 8), order("other", 8)])
    wait_until(lambda: len(hosted.asked) == 16, "all first turns", SECONDS)
    hosted.answers.set()
    hosted.wait_for(16)
    assert hosted.errors() == [""] * 16
    pids = Counter[int]()
    for (_, index), sample in hosted.samples.items():
        run = sample.agent
        assert run is not None
        assert sample.finish == "stop"
        assert run.reward == {"score": index}
        assert [turn.reward for turn in run.turns] == [0.5, 1.0]
        assert len(run.branches) == 1
        assert (run.branches[0].tokens[run.branches[0].trained] == sample.tokens).all()
        assert [event["kind"] for event in run.events] == ["pid", "turn", "turn"]
        assert run.events[0]["sample"] == index
        pids[run.events[0]["pid"]] += 1
    assert list(pids.values()) == [8, 8]


def test_what_is_seen_of_rollouts_has_metrics_and_reads_as_a_conversation(hosted: Hosted) -> None:
    hosted.make().begin([order("talks"), order("raises")])
    hosted.wait_for(4)
    group = Group(Prompt("talks", (1,), "sums", "2"), tuple(hosted.samples.values()))
    metrics = agent_metrics([group])
    assert metrics["agent/turns/mean"] == 1.5
    assert metrics["agent/failed"] == 2
    assert metrics["agent/seconds/max"] >= metrics["agent/seconds/mean"] > 0
    assert not undocumented(metrics)
    (table,) = tables(StepRollouts(1, {TRAIN: [group]}, 0, 0), TokenTexts(TOKENIZER))
    talked = next(number for number, sample in enumerate(group.samples) if sample.finish == "stop")
    shown = conversation(table.to_pylist()[talked])
    places = [shown.index(text) for text in ("talks", "turn 0", "fine", "on 0", "turn 1")]
    assert places == sorted(places)
    assert "reward 0.5" in shown


def test_what_an_agent_raises_masks_its_rollout_and_says_why(hosted: Hosted) -> None:
    hosted.make().begin([order("raises"), order("bad rewards"), order("talks")])
    hosted.wait_for(6)
    for (what, index), sample in hosted.samples.items():
        assert sample.agent is not None
        assert (sample.finish == "abort") == (what != "talks")
        assert sample.agent.counts.get("failed", 0.0) == (what != "talks")
        if what == "raises":
            assert sample.agent.error == f"ValueError: sample {index}"
            assert len(sample.agent.turns) == 1, "what it did is kept for its trace"
    assert len([line for line in hosted.said if "for the first time" in line]) == 1


def test_a_process_that_dies_costs_the_rollouts_in_it_and_another_takes_its_place(hosted: Hosted) -> None:
    host = hosted.make()
    host.begin([order("waits", 1), order("dies")])
    hosted.wait_for(3)
    assert all("SIGKILL" in error for error in hosted.errors())
    wait_until(lambda: host.restarts == 1, "a new process", SECONDS)
    host.begin([order("talks")])
    hosted.wait_for(5)
    assert hosted.errors()[3:] == ["", ""]


@pytest.mark.parametrize("when_late", ["mask", "score"])
def test_a_rollout_that_is_late_ends(when_late: str, hosted: Hosted) -> None:
    hosted.make(timeout_seconds=1.0, when_late=when_late).begin([order("waits after a turn", 1)])
    hosted.wait_for(1)
    (sample,) = hosted.samples.values()
    run = sample.agent
    assert run is not None
    assert run.counts["late"] == 1.0
    assert "failed" not in run.counts
    assert sample.finish == ("length" if when_late == "score" else "abort")
    assert "longer than 1 s" in run.error
    assert len(run.turns) == 1


def test_an_agent_that_raises_at_a_limit_is_truncated_not_masked(hosted: Hosted) -> None:
    hosted.make(turns_max=1).begin([order("talks", 1)])
    hosted.wait_for(1)
    (sample,) = hosted.samples.values()
    assert sample.agent is not None
    assert (sample.finish, sample.agent.error) == ("length", "HTTPError: HTTP Error 400: Bad Request")
    assert "failed" not in sample.agent.counts


@pytest.mark.parametrize("when_failed", ["mask", "score"])
def test_an_agent_that_raises_after_a_truncated_answer_has_failed(when_failed: str, hosted: Hosted) -> None:
    hosted.finish = "length"
    hosted.make(when_failed=when_failed).begin([order("raises", 1), order("returns much", 1)])
    hosted.wait_for(2)
    for sample in hosted.samples.values():
        assert sample.agent is not None
        assert sample.finish == ("length" if when_failed == "score" else "abort")
        assert sample.agent.counts["failed"] == 1.0
    raised, large = sorted(hosted.errors())
    assert (raised, large.endswith(" bytes")) == ("ValueError: sample 0", True)


def test_whatever_an_agent_tells_its_process_lives_and_readers_can_read_it(hosted: Hosted) -> None:
    host = hosted.make()
    host.begin([order("tells", 1)])
    hosted.wait_for(1)
    assert host.restarts == 0
    run = hosted.samples["tells", 0].agent
    assert run is not None
    assert run.reward == {"score": 1.0}
    json.dumps(run.events, allow_nan=False)
    kinds = ["pid", "told_turn", "told_tool", "told_tool", "odd", "deep", "large", "tool"]
    assert [event["kind"] for event in run.events] == kinds
    assert run.events[6]["name"] == "kept"
    assert len(str(run.events)) < 100_000


def test_time_limits_stand_still_while_rollouts_are_held_and_while_no_engine_samples(hosted: Hosted) -> None:
    hosted.answers.clear()
    host, held = hosted.make(timeout_seconds=2.0), order("talks", 1)
    host.begin([held])
    wait_until(lambda: bool(hosted.asked), "a turn", SECONDS)
    host.hold([held])
    host.begin([order("waits", 1)])
    hosted.wait_for(1)  # one that is not held, and was begun later, is late
    hosted.engines = False
    host.begin([held])
    host.begin([order("waits", 2)], first=True)
    hosted.answers.set()
    wait_until(lambda: ("talks", 0) in hosted.samples, "the end of what was held", SECONDS)
    found = hosted.samples["talks", 0]
    assert found.agent is not None
    assert found.agent.error == ""


def test_as_many_rollouts_as_may_begin_do_and_those_that_are_held_leave_room(hosted: Hosted) -> None:
    hosted.answers.clear()
    host, first, second = hosted.make(rollouts_at_once=3), order("talks", 4), order("other", 4)
    host.begin([first])
    wait_until(lambda: len(hosted.asked) == 3, "three turns", SECONDS)
    host.hold([first])
    host.begin([second])
    wait_until(lambda: len(hosted.asked) == 6, "three more turns", SECONDS)
    assert [request.prompt_id for request in hosted.asked] == ["talks"] * 3 + ["other"] * 3
    hosted.answers.set()
    hosted.wait_for(7)
    host.begin([first])
    hosted.wait_for(8)


def test_what_is_cancelled_ends_in_its_process_and_in_the_engine(hosted: Hosted) -> None:
    hosted.answers.clear()
    host, one = hosted.make(rollouts_at_once=2), order("talks", 4)
    host.begin([one])
    wait_until(lambda: len(hosted.asked) == 2, "two turns", SECONDS)
    host.cancel([one])
    wait_until(lambda: sorted(hosted.gone) == [0, 1], "their end", SECONDS)
    hosted.answers.set()
    host.begin([order("other")])
    hosted.wait_for(2)
    assert {name for name, _ in hosted.samples} == {"other"}


def test_a_process_whose_event_loop_is_blocked_is_started_again(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents_host, "BLOCKED_SECONDS", 1.0)
    host = hosted.make(timeout_seconds=3.0)
    host.begin([order("blocks", 1)])
    hosted.wait_for(1)
    wait_until(lambda: any("restarting" in line for line in hosted.said), "a new process", SECONDS)
    host.begin([order("talks")])
    hosted.wait_for(3)
    assert hosted.errors()[1:] == ["", ""]


def test_a_slow_environment_holds_back_no_other_rollout(hosted: Hosted) -> None:
    """Also one that blocks its thread, in the same process."""
    hosted.make(function="in_a_thread").begin([order("blocks", 8), order("talks", 8)])
    hosted.wait_for(8)
    assert {name for name, _ in hosted.samples} == {"talks"}


@pytest.mark.parametrize("source", ["import nowhere", "import os; os._exit(7)"])
def test_an_agent_that_cannot_be_loaded_ends_the_run(source: str, hosted: Hosted) -> None:
    hosted.make(source=source).begin([order("talks")])
    wait_until(lambda: bool(hosted.failures), "an error", SECONDS)
    (error,) = hosted.failures
    assert isinstance(error, AgentError)


def test_a_process_that_is_never_ready_ends_the_run(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents_host, "START_FAILURES_MAX", 1)
    hangs = "import asyncio\nasync def prepare(): await asyncio.sleep(1000)\nasync def rollout(task, endpoint): ..."
    hosted.make(prepare_seconds=0.1, source=hangs)
    wait_until(lambda: bool(hosted.failures), "an error", SECONDS)
    assert isinstance(hosted.failures[0], AgentError)
