"""Plans of recipes with an agent: turns, tools, caches, and what they do to seconds and memory."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megagrpo.plan.assumptions import Assumptions, lengths_of
from megagrpo.plan.engine import EngineSpeed
from megagrpo.plan.plan import Plan
from megagrpo.plan.show.terminal import draw
from megagrpo.plan.time import Sampling, StepTime, Turns, rollout_seconds
from megagrpo.plan.training_time import BatchSize
from megagrpo.recipe.schema import EngineLayoutConfig
from tests import plans
from tests.plans import H100, LLAMA_8B, known_model

AGENT = {"tools": ["python"], "tokens_max": 16384, "rollouts_at_once": 1024}


def planned(*given: str, agent: dict[str, Any] = AGENT, **more: Any) -> Plan:
    return plans.plan(given=given, agent=agent, **{"train__tokens_per_microbatch": 16384} | more)


def time_of(plan: Plan) -> StepTime:
    assert plan.time
    return plan.time


def rollout(plan: Plan) -> dict[str, float]:
    return dict(next(phase.parts for phase in time_of(plan).phases if phase.phase == "rollout"))


@given(
    turns_max=st.integers(1, 200),
    tokens_max=st.integers(2000, 200_000),
    answer=st.integers(16, 32_000),
    between=st.floats(0, 50_000),
    sampled=st.none() | st.floats(1, 1e6),
)
def test_conversations_are_never_longer_than_allowed(
    turns_max: int, tokens_max: int, answer: int, between: float, sampled: float | None
) -> None:
    agent = AGENT | {"turns_max": turns_max, "tokens_max": tokens_max}
    recipe = plans.recipe(agent=agent, rollout__response_tokens_max=answer)
    lengths = lengths_of(recipe, Assumptions(given_tokens=between, response_tokens=sampled))
    assert 1 <= lengths.turns <= turns_max
    assert 0 < lengths.response <= lengths.longest * (1 + 1e-9)
    assert lengths.sequence <= tokens_max * (1 + 1e-9)
    assert lengths.prompt + lengths.longest * (1 + lengths.given) <= tokens_max * (1 + 1e-9)
    assert lengths.longest <= turns_max * answer


def engine(**assumed: float) -> EngineSpeed:
    return EngineSpeed(known_model(LLAMA_8B), EngineLayoutConfig(), H100, Assumptions(**assumed), 2)


def test_one_turn_without_tools_is_a_response_as_ever() -> None:
    lengths = lengths_of(plans.recipe(), Assumptions())
    plain = Turns(256, 256, lengths.response, 0, 0, lengths.sequence, 0, 0, 0)
    found, known = (rollout_seconds(Sampling(engine(), 1, 256, 8, turns), lengths, 64) for turns in (plain, None))
    assert {name: found[name] for name in known} == pytest.approx(known)
    assert found["reading turns"] == 0
    assert found["waiting for tools"] == pytest.approx(0, abs=1e-9)


@given(running=st.floats(1, 512), wait=st.floats(0, 100), slots=st.integers(1, 512), new=st.floats(0, 4000))
def test_waits_cost_no_more_than_themselves_and_are_hidden_behind_other_conversations(
    running: float, wait: float, slots: int, new: float
) -> None:
    turns = Turns(512, slots, 400, new, 0, 4000, wait, 1, 512)
    still = replace(turns, wait=0)
    seconds, without = (sum(one.pace(engine(), running, 4000.0)) for one in (turns, still))
    assert without * (1 - 1e-6) <= seconds <= (without + wait / 400) * (1 + 1e-6)
    assert all(part >= -1e-12 for part in turns.pace(engine(), running, 4000.0))


def test_slow_tools_new_tokens_and_forgotten_histories_take_time() -> None:
    at_best = {"tool_seconds": 0, "given_tokens": 0, "prefix_share": 1, "response_tokens": 2000}
    at_best["longest_response_tokens"] = 4000

    def seconds(**other: float) -> float:
        return time_of(planned(*(f"{name}={value}" for name, value in (at_best | other).items()))).phase_seconds

    for other in ({"tool_seconds": 30}, {"given_tokens": 600}, {"prefix_share": 0}, {"sequences": 2}):
        assert seconds(**other) > seconds(), other
    assert rollout(planned("tool_seconds=30"))["waiting for tools"] > 10 * rollout(planned())["waiting for tools"] > 0
    assert rollout(planned("prefix_share=0"))["reading turns"] > 2 * rollout(planned())["reading turns"]


def test_conversations_beyond_the_cache_are_read_again() -> None:
    many = AGENT | {"rollouts_at_once": 8192}
    whole, crowded = planned(), planned(agent=many, rollout__sglang={"mem_fraction_static": 0.35})
    few, some = Sampling.of(whole).turns, Sampling.of(crowded).turns
    assert few
    assert some
    assert few.cached == few.conversations == 64
    assert some.cached < some.conversations == 128
    assert some.reuse < few.reuse == pytest.approx(0.95)
    uncached = planned(rollout__sglang={"mem_fraction_static": 0.7, "disable_radix_cache": True})
    assert "keep nothing" in uncached.summary["prefixes"]


def test_memory_holds_the_longest_conversation() -> None:
    small, large = planned(), planned(agent=AGENT | {"tokens_max": 32768}, train__tokens_per_microbatch=32768)
    sizes = [max(kind.fullest.bytes for kind in of.memory) for of in (small, large)]
    assert sizes[0] < sizes[1]


def test_several_sequences_of_a_rollout_are_trained_with_the_tokens_that_they_share() -> None:
    lengths = lengths_of(plans.recipe(agent=AGENT), Assumptions())
    one, three = (BatchSize.of(10, replace(lengths, sequences=count)) for count in (1, 3))
    assert one.tokens == pytest.approx(10 * lengths.sequence)
    assert (three.sequences, three.head_tokens) == (30, one.head_tokens)
    assert three.tokens == pytest.approx(one.tokens * (1 / 3 + 2 / 3 + 1))
    assert three.squares == pytest.approx(one.squares * (1 / 9 + 4 / 9 + 1))


def test_schedules_wait_for_tools_too() -> None:
    apart: dict[str, Any] = {"cluster__placement": "disaggregated", "train__offload": []}
    slow, quick = (planned(f"tool_seconds={seconds}", **apart) for seconds in (60, 0))
    names = [time.name for time in slow.schedules]
    assert "async, max_staleness 2" in names
    for patient, other in zip(slow.schedules, quick.schedules, strict=True):
        assert patient.seconds > other.seconds, other.name


def test_a_plan_tells_of_turns_and_only_a_plan_with_an_agent_does() -> None:
    told = []
    for plan in (planned("turns=6"), plans.plan()):
        stream = io.StringIO()
        draw(plan, None, Console(file=stream, width=200))
        told.append(stream.getvalue())
    with_agent, without = told
    for text in ("tools python", "about 6 of", "waiting for tools", "tool_seconds", "turns *"):
        assert text in with_agent
        assert text not in without
    function = planned(agent=AGENT | {"tools": [], "function": "mine.py:rollout"})
    assert "mine.py:rollout" in function.summary["agent"]
