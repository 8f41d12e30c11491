"""Simulated runs under each schedule: what must hold of any, and what is known without a simulation."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megagrpo.plan.advice import unwise
from megagrpo.plan.assumptions import Lengths
from megagrpo.plan.schedules import (
    ONE_STEP_OFF,
    RESPONSES_MAX,
    SYNC,
    ScheduleTime,
    SimulatedRun,
    Work,
    best,
    compared,
    schedule_time,
    token_seconds,
)
from megagrpo.plan.show.as_json import plan_json
from megagrpo.plan.show.page import page
from megagrpo.plan.show.terminal import draw, judgement
from megagrpo.plan.time import Sampling
from megagrpo.plan.units import second_text
from megagrpo.recipe.schema.schedule import AsyncConfig, ScheduleConfig, SyncConfig
from megagrpo.section import broken_rules
from tests import plans

APART: dict[str, Any] = {
    "cluster.placement": "disaggregated", "train.offload": [], "rollout.sglang": {}, "rollout.prompts_per_step": 32,
}  # fmt: skip


def asynchronous(max_staleness: int, at_once: int | None = None) -> AsyncConfig:
    return AsyncConfig(kind="async", max_staleness=max_staleness, prompts_at_once=at_once)


LONG_TAILED = Work(
    engines=4,
    slots=32,
    prompts=32,
    samples=8,
    lengths=Lengths(200, 8000, 40_000),
    token_seconds=lambda running, context: 0.01 + 1e-4 * running + 1e-9 * running * context,
    train_seconds=100.0,
    sync_seconds=2.0,
)
SCHEDULES = st.one_of(
    st.just(SYNC),
    st.just(ONE_STEP_OFF),
    st.builds(SyncConfig, kind=st.just("sync"), carry_over=st.integers(1, 6), max_staleness=st.integers(1, 3)),
    st.builds(SyncConfig, kind=st.just("sync"), oversample=st.integers(1, 6)),
    st.builds(asynchronous, st.integers(0, 4), st.one_of(st.none(), st.integers(1, 20))),
)


@st.composite
def works(draw: st.DrawFn) -> Work:
    longest = draw(st.floats(10, 1000))
    return Work(
        engines=draw(st.integers(1, 5)),
        slots=draw(st.integers(1, 6)),
        prompts=draw(st.integers(1, 5)),
        samples=draw(st.integers(1, 4)),
        lengths=Lengths(10, draw(st.floats(0.1, 1)) * longest, longest, draw(st.floats(0.2, 2))),
        token_seconds=lambda running, context: 1 + 0.1 * running,
        train_seconds=draw(st.floats(0, 2000)),
        sync_seconds=draw(st.floats(0, 10)),
    )


@settings(max_examples=50)
@given(work=works(), schedule=SCHEDULES, seed=st.integers(0, 9))
def test_staleness_keeps_its_bound_and_every_group_is_trained_once(
    work: Work, schedule: ScheduleConfig, seed: int
) -> None:
    run = SimulatedRun(work, schedule, 8, seed)
    assert all(0 <= staleness <= schedule.max_staleness for step in run.steps for staleness in step.staleness)
    thrown = {group for step in run.steps for group in step.dropped}
    trained = Counter(group for step in run.steps for group in step.groups)
    assert set(trained.values()) == {1}
    assert len(trained) == 8 * work.prompts
    assert bool(thrown) == bool(isinstance(schedule, SyncConfig) and schedule.oversample)
    if thrown:
        assert not thrown & set(trained)
        assert all(len(step.dropped) == schedule.beyond for step in run.steps)
        return
    assert sorted([*trained, *run.admission.waiting]) == list(range(run.admission.next_number))
    assert all(run.left[group] == 0 for group in trained)
    running = {response for engine in run.engines for _, response in engine.ends}
    ended = [response for response in range(run.admission.next_number * work.samples) if response not in running]
    assert sum(work.samples - run.left[group] for group in range(run.admission.next_number)) == len(
        set(ended) - set(run.queue)
    )


def drained(lengths: list[float], work: Work) -> float:
    """Seconds in which an engine decodes all of these at once: between two ends fewer and fewer run."""
    seconds, before = 0.0, 0.0
    for ended, length in enumerate(sorted(lengths)):
        seconds += (length - before) * work.token_seconds(len(lengths) - ended, 0.0)
        before = length
    return seconds


@settings(max_examples=50)
@given(work=works(), seed=st.integers(0, 9))
def test_a_synchronous_step_takes_as_long_as_its_slowest_engine(work: Work, seed: int) -> None:
    responses = work.prompts * work.samples
    work = replace(work, slots=responses)
    run, begin = SimulatedRun(work, SYNC, 3, seed), 0.0
    for step in run.steps:
        first = (step.step - 1) * responses
        own = [run.tokens[first + engine : first + responses : work.engines] for engine in range(work.engines)]
        slowest = max(drained(lengths, work) for lengths in own)
        assert step.waited == pytest.approx(slowest)
        assert step.end - begin == pytest.approx(slowest + work.train_seconds + work.sync_seconds)
        begin = step.end


@settings(max_examples=50)
@given(work=works(), seed=st.integers(0, 9))
def test_asynchronous_steps_without_staleness_are_the_synchronous_ones(work: Work, seed: int) -> None:
    runs = [SimulatedRun(work, schedule, 5, seed).steps for schedule in (SYNC, asynchronous(0))]
    assert runs[0] == runs[1]


@settings(max_examples=50)
@given(work=works(), schedule=st.sampled_from([SYNC, ONE_STEP_OFF]), more=st.integers(1, 3), seed=st.integers(0, 9))
def test_more_engines_are_never_slower(work: Work, schedule: ScheduleConfig, more: int, seed: int) -> None:
    few, many = (
        SimulatedRun(each, schedule, 4, seed).steps[-1].end
        for each in (work, replace(work, engines=work.engines + more))
    )
    assert many <= few * (1 + 1e-9)


@settings(max_examples=15)
@given(engines=st.integers(1, 6), bound=st.integers(1, 4), seed=st.integers(0, 3))
def test_more_engines_are_not_slower_when_nothing_waits_for_a_step(engines: int, bound: int, seed: int) -> None:
    few, many = (
        schedule_time(replace(LONG_TAILED, engines=count), asynchronous(bound), seed=seed)
        for count in (engines, 2 * engines)
    )
    assert many.seconds < few.seconds * 1.02


def test_nothing_is_faster_than_training_nor_than_engines_that_never_rest() -> None:
    quick = replace(LONG_TAILED, token_seconds=lambda running, context: 1e-6)
    for schedule in compared(plans.recipe(APART)):
        time = schedule_time(quick, schedule)
        assert time.seconds == pytest.approx(102, rel=0.01)
        assert time.trainer_waits < 0.01
    slow = replace(LONG_TAILED, token_seconds=lambda running, context: 1.0, sync_seconds=0.0)
    time = schedule_time(slow, asynchronous(4))
    assert time.engines_idle == time.slots_empty == pytest.approx(0.0, abs=1e-6)
    assert time.seconds == pytest.approx(32 * 8 * 8000 / (4 * 32), rel=0.05)
    assert time.trainer_waits == pytest.approx(1 - 100 / time.seconds)


def test_schedules_with_a_long_tail_are_faster_the_less_they_wait() -> None:
    times = {time.name: time for time in (schedule_time(LONG_TAILED, each) for each in compared(plans.recipe(APART)))}
    order = ["sync", "one_step_off", *(f"async, max_staleness {bound}" for bound in (1, 2, 4))]
    seconds = [times[name].seconds for name in order]
    assert seconds == sorted(seconds, reverse=True)
    assert times["sync, carry_over 16"].seconds < times["sync"].seconds
    for time in times.values():
        assert 0 <= time.engines_idle <= time.slots_empty <= 1
        assert (time.old_tokens > 0) == (time.staleness_max > 1)
        assert 0 <= time.staleness <= time.staleness_max <= time.schedule.max_staleness


def test_cutting_off_the_slowest_is_no_faster_than_carrying_them_over_and_trains_on_shorter_responses() -> None:
    late = {"cut": {"oversample": 16}, "carried": {"carry_over": 16, "max_staleness": 2}}
    times = {name: schedule_time(LONG_TAILED, SyncConfig(kind="sync", **keys)) for name, keys in late.items()}
    cut, carried, sync = times["cut"], times["carried"], schedule_time(LONG_TAILED, SYNC)
    assert carried.seconds < cut.seconds < sync.seconds
    assert cut.thrown_tokens > 0.2
    assert cut.shorter > 0.1
    assert carried.thrown_tokens == carried.shorter == sync.thrown_tokens == sync.shorter == 0.0
    assert best([sync, cut]) is sync
    # All responses begin at once: a group of one response is cut if it is longer than the others.
    alone = Work(1, 100, 2, 1, LONG_TAILED.lengths, lambda running, context: 1.0, 0.0, 0.0)
    for step in SimulatedRun(alone, SyncConfig(kind="sync", oversample=3), 4).steps:
        lengths = SimulatedRun(alone, SyncConfig(kind="sync", oversample=3), 4).tokens
        slowest = max(lengths[group] for group in step.groups)
        assert all(lengths[group] > slowest for group in step.dropped)
        assert step.thrown == pytest.approx(3 * slowest)


def test_tokens_are_as_old_as_the_version_that_engines_had() -> None:
    """All groups of a trainer that is slow have ended two versions before they are trained."""
    slow = replace(LONG_TAILED, lengths=Lengths(10, 100, 100), train_seconds=1e5)
    two, one = (schedule_time(slow, asynchronous(bound)) for bound in (2, 1))
    assert (two.staleness, two.old_tokens) == (2.0, 1.0)
    assert (one.staleness, one.old_tokens) == (1.0, 0.0)
    # The fourth group begins with version 1, at 250, and is trained at 450: 100 of its tokens came before version 2.
    long = Work(1, 4, 1, 1, Lengths(10, 150, 150), lambda running, context: 1.0, 100.0, 0.0)
    run = SimulatedRun(long, asynchronous(2), 4)
    assert [step.staleness for step in run.steps] == [(0,), (1,), (2,), (2,)]
    assert [run.old_tokens([step]) for step in run.steps] == pytest.approx([0.0, 0.0, 1.0, 100 / 150])


def test_responses_that_go_on_over_an_update_are_read_again_unless_they_keep_their_keys_or_finish_first() -> None:
    """The fourth group begins with the first update, at 210. In place it ends at 360. Retracted it reads 70 tokens
    again at 270, then 123 and the 63 of the next. To finish first, each update waits for the one group that runs."""
    work = Work(1, 4, 1, 1, Lengths(10, 150, 150), lambda running, context: 1.0, 60.0, 0.0)
    work = replace(work, read_seconds=lambda tokens, squares, responses: 0.1 * tokens)
    ends = {}
    for pause in ("in_place", "retract", "finish"):
        run = SimulatedRun(replace(work, pause=pause), asynchronous(2), 4)
        ends[pause] = run.steps[3].end
        assert run.steps[3].busy_seconds == pytest.approx(ends[pause] - 60)  # all but the first training
    assert ends == pytest.approx({"in_place": 360 + 60, "retract": 385.6 + 60, "finish": 210 + 3 * 150})


def test_a_part_of_a_run_stands_for_the_whole() -> None:
    large = replace(LONG_TAILED, engines=16, prompts=128)
    part = large.part(RESPONSES_MAX)
    assert (part.engines, part.prompts, part.slots) == (8, 64, 32)
    one = replace(large, engines=1).part(RESPONSES_MAX)
    assert (one.engines, one.prompts, one.slots) == (1, 64, 16)
    for schedule in (SYNC, ONE_STEP_OFF, asynchronous(2)):
        whole = schedule_time(large, schedule, responses_max=10**6)
        assert schedule_time(large, schedule).seconds == pytest.approx(whole.seconds, rel=0.06)


def test_a_part_of_an_engine_with_many_prompts_is_no_faster_than_its_share() -> None:
    one = replace(LONG_TAILED, engines=1, slots=8, prompts=1024)
    assert one.part(RESPONSES_MAX).slots == 1  # half a slot is its share
    whole = schedule_time(one, SYNC, steps=2, responses_max=10**6)
    assert schedule_time(one, SYNC).seconds == pytest.approx(whole.seconds, rel=0.1)


def test_the_best_is_the_least_stale_of_the_fast_ones() -> None:
    times = [ScheduleTime(SYNC, seconds, 0, 0, 0, stale, 4, 0) for seconds, stale in ((100, 0), (52, 2), (50, 4))]
    assert best(times) is times[1]
    assert best(times[:1]) is times[0]


def test_seconds_of_a_token_are_those_of_the_engine() -> None:
    case = plans.plan()
    by, lengths = Sampling.of(case), case.lengths
    found = token_seconds(by, lengths, 256, factor=2.0)
    prompt = by.engine.prefill_seconds(lengths.prompt, lengths.prompt**2, 1) / 8 / lengths.response
    for running, context in ((1, 300), (7, 1000), (100, 2000), (256, 4000)):
        expected = 2.0 * (by.engine.decode_seconds(running, context) + running * prompt)
        assert found(running, context) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("of", ["colocated", "long"])
def test_a_simulated_synchronous_step_is_about_as_long_as_the_sum_of_its_phases(of: str) -> None:
    long = {"rollout.response_tokens_max": 32768, "train.layout": {"tensor": 8, "context": 4, "pipeline": 2, "data": 2}}
    plan = plans.plan(long if of == "long" else {})
    assert plan.time is not None
    assert plan.schedules[0].seconds == pytest.approx(plan.time.seconds, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, {"sync", "carry_over", "one_step_off", "async"}),
        ({"cluster.placement": "colocated"}, {"sync", "carry_over"}),
        ({"deterministic": True}, {"sync", "one_step_off"}),
        ({"deterministic": "replayable"}, {"sync", "carry_over", "one_step_off", "async"}),
        ({"deterministic": "replayable", "weights": {"pause": "in_place"}}, {"sync"}),
        ({"weights": {"pause": "in_place"}}, {"sync", "carry_over", "async"}),
        ({"rollout.dynamic_sampling": {"rounds_max": 8}}, {"sync", "carry_over", "async"}),
    ],
)
def test_only_schedules_that_the_recipes_rules_allow_are_compared(changes: dict[str, Any], kinds: set[str]) -> None:
    of = plans.recipe({**APART, **changes})
    found = compared(of)
    assert {"carry_over" if getattr(each, "carry_over", 0) else each.kind for each in found} == kinds
    for each in found:
        assert not broken_rules(of.model_copy(update={"schedule": each}))


def test_a_repeatable_run_is_judged_and_advised_without_what_its_rules_refuse() -> None:
    """Engines on devices of their own that wait: async would be the best."""
    plan = plans.plan({**APART, "deterministic": True, "rollout.engines": 4})
    (told,) = (problem for problem in unwise(plan) if problem.where == "cluster.placement")
    assert "schedule: one_step_off" in told.fix
    assert "async" not in told.fix + judgement(plan.schedules, plan.grpo)
    at_once = plans.plan(
        {**APART, "deterministic": True, "rollout.engines": 4, "schedule": {"kind": "async", "max_staleness": 0}}
    )
    (told,) = (problem for problem in unwise(at_once) if problem.where == "cluster.placement")
    assert told.fix == "another split (--search)"
    beside = plans.recipe(deterministic=True)
    assert "--search compares" not in judgement(plan.schedules[:1], beside)
    assert "--search compares" in judgement(plan.schedules[:1], plans.recipe())


def test_carry_over_in_place_of_oversample_is_no_more_than_staleness_lets_begin() -> None:
    plan = plans.plan({"schedule": {"kind": "sync", "oversample": 600}})
    (told,) = (problem for problem in unwise(plan) if problem.where == "schedule.oversample")
    assert told.fix == "carry_over: 512, max_staleness: 2"
    remedy = plans.recipe({"schedule": {"kind": "sync", "carry_over": 512, "max_staleness": 2}})
    assert not broken_rules(remedy)


def test_a_plan_tells_them_side_by_side_in_text_json_and_page() -> None:
    plan = plans.plan({"cluster.placement": "disaggregated", "train.offload": [], "rollout.sglang": {}})
    names = [time.name for time in plan.schedules]
    assert names[0] == "sync"
    assert names[-1] == "async, max_staleness 4"
    stream = io.StringIO()
    draw(plan, None, Console(file=stream, width=80, highlight=False))
    section = stream.getvalue().partition("schedules, simulated\n")[2].partition("\n\n")[0]
    rows = [re.split("  +", line)[0] for line in section.splitlines()[2:8]]
    assert all(row.startswith(name) for row, name in zip(rows, names, strict=True))
    assert f"best here: {best(plan.schedules).name}, " in section
    told = json.loads(plan_json(plan))["schedules"]
    assert [schedule["name"] for schedule in told] == names
    assert told[-1]["schedule"]["max_staleness"] == 4
    assert told[0]["seconds"] == plan.schedules[0].seconds
    assert all(name in page(plan) for name in names)


def test_a_step_of_a_plan_takes_as_long_as_under_the_recipes_own_schedule() -> None:
    apart = {"cluster.placement": "disaggregated", "train.offload": [], "rollout.sglang": {}}
    plan = plans.plan({**apart, "schedule": {"kind": "async", "max_staleness": 2}})
    assert plan.time is not None
    assert plan.scheduled is not None
    time = plan.time
    assert time.seconds == plan.scheduled.seconds < 0.8 * time.phase_seconds
    assert time.phase_seconds == pytest.approx(sum(phase.seconds for phase in time.phases))
    assert time.days == pytest.approx((time.steps or 0) * plan.scheduled.seconds / 86400)
    assert time.tokens_per_second_per_gpu == pytest.approx(time.tokens / plan.scheduled.seconds / time.gpus)
    assert json.loads(plan_json(plan))["time"]["seconds"] == time.seconds
    stream = io.StringIO()
    draw(plan, None, Console(file=stream, width=200, highlight=False))
    assert f"a step: {second_text(time.seconds)} under async, max_staleness 2 (" in stream.getvalue()
    assert f"a step: {second_text(time.seconds)} under async" in page(plan)
    in_turn = plans.plan(apart)
    assert in_turn.scheduled is None
    assert in_turn.time is not None
    assert in_turn.time.seconds == time.phase_seconds
