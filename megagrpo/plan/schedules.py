"""Step times under each schedule, and the waiting of trainer and engines: a run is simulated, response by response.

Engines decode what is in their slots, token by token; requests wait in one queue, and a free slot takes the next one.
`algorithm/admission.py` decides which groups begin and which are trained. Lengths are drawn independently of one
another, within a group too, and are the same for all schedules.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from megagrpo.algorithm.admission import Admission, Admitted
from megagrpo.plan.assumptions import Lengths
from megagrpo.plan.case import Case
from megagrpo.plan.time import Sampling, StepTime, prompts_of_rounds
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.run import Pause
from megagrpo.recipe.schema.schedule import AsyncConfig, OneStepOffConfig, ScheduleConfig, SyncConfig
from megagrpo.section import broken_rules

SYNC, ASYNC = SyncConfig(kind="sync"), AsyncConfig(kind="async")
ONE_STEP_OFF = OneStepOffConfig(kind="one_step_off")

STEPS = 12
"""Steps that are measured, after those in which a run fills up."""

RESPONSES_MAX = 512
"""Responses in a step of a plan's simulation. A larger run is simulated in part: fewer engines and prompts, in
proportion."""

BATCHES = 24
"""Sizes of batches for which the seconds of a token are computed."""

ABOUT_AS_FAST = 1.05
"""The best schedule is the least stale of those that take at most so many times as long as the fastest."""

TRAINER_PHASES = ("reward", "logprobs", "update", "driver")
"""The trainer's phases for the groups of a step, one after another."""

TokenSeconds = Callable[[float, float], float]
"""Takes the number of responses in decoding and their mean context in tokens; returns the seconds of a token."""

ReadSeconds = Callable[[float, float, int], float]
"""Takes tokens, the sum of squared lengths, and responses; returns the seconds in which an engine reads them."""


@dataclass(frozen=True)
class Work:
    """The work of each step of a run, and the engines and times that it takes."""

    engines: int
    slots: int  # responses that an engine decodes at once
    prompts: int
    samples: int
    lengths: Lengths
    token_seconds: TokenSeconds
    train_seconds: float  # from the groups of a step until its weights are there: rewards, logprobs, update, driver
    sync_seconds: float
    pause: Pause = "in_place"  # the engines' treatment of responses that run when an update begins
    read_seconds: ReadSeconds = lambda tokens, squares, responses: 0.0
    """Seconds for prompts and earlier tokens of resumed responses, whose keys and values are recomputed."""

    @classmethod
    def of(cls, case: Case, time: StepTime) -> Work:
        """Returns the work of a GRPO recipe whose phases take `time` one after the other. Prompts of all rounds of
        dynamic sampling begin at once."""
        by = Sampling.of(case)
        slots, factor = max(1, int(by.at_once)), case.assumptions.rollout_factor
        return cls(
            engines=by.engines,
            slots=slots,
            prompts=sum(prompts_of_rounds(case)),
            samples=by.samples,
            lengths=case.lengths,
            token_seconds=token_seconds(by, case.lengths, slots, factor),
            train_seconds=time.of(*TRAINER_PHASES),
            sync_seconds=time.of("weight_sync"),
            pause=case.grpo.rollout.layout.pause_of(case.grpo.weights.pause),
            read_seconds=lambda *read: factor * by.engine.prefill_seconds(*read),
        )

    def part(self, responses_max: int) -> Work:
        """Returns a part with at most `responses_max` responses in a step: fewer prompts and engines in the same
        proportion. The last bit is done by engines with fewer slots, each of which counts for several. Slots are whole:
        an engine that has too many is slower for it."""
        prompts = min(self.prompts, max(1, responses_max // self.samples))
        share = prompts / self.prompts
        engines = max(1, round(self.engines * share))
        due = self.slots * self.engines * share / engines
        slots = max(1, round(due))
        return replace(
            self,
            engines=engines,
            slots=slots,
            prompts=prompts,
            token_seconds=lambda n, context: slots / due * self.token_seconds(n * self.slots / slots, context),
            read_seconds=lambda *read: self.slots / due * self.read_seconds(*read),
        )


def token_seconds(by: Sampling, lengths: Lengths, slots: int, factor: float) -> TokenSeconds:
    """Returns a function that interpolates between some numbers of responses. Reading a prompt, once for all samples,
    is spread over the tokens of its responses; and so is agents' waiting between turns."""
    prompt = by.engine.prefill_seconds(lengths.prompt, lengths.prompt**2, 1) / by.samples / lengths.response
    points = np.unique(np.geomspace(1, max(2, slots), BATCHES).round())
    most = lengths.prompt + lengths.longest * (1 + lengths.given)
    first, last = (
        np.array([by.token_seconds(batch, context) + batch * prompt for batch in points]) for context in (0.0, most)
    )
    every = np.arange(slots + 1)
    begin, more = ((factor * np.interp(every, points, seconds)).tolist() for seconds in (first, (last - first) / most))
    return lambda running, context: begin[int(running)] + more[int(running)] * context


@dataclass(frozen=True)
class ScheduleTime:
    """The step time, waits and staleness under a schedule. Shares are of the time of all steps."""

    schedule: ScheduleConfig
    seconds: float  # of a step
    trainer_waits: float  # share in which the trainer waits for responses
    engines_idle: float  # share in which an engine decodes nothing
    slots_empty: float  # share in which a slot of an engine decodes nothing
    staleness: float  # mean over groups, in versions: the version that is trained minus the newest when the group began
    staleness_max: int
    old_tokens: float  # share of the trained tokens whose weights are more than one version older
    thrown_tokens: float = 0.0  # share of the sampled tokens that are thrown away (oversample)
    shorter: float = 0.0  # share by which trained responses are shorter than those that begin, in the mean

    @property
    def name(self) -> str:
        bound = f", max_staleness {self.schedule.max_staleness}" if isinstance(self.schedule, AsyncConfig) else ""
        given = ((key, getattr(self.schedule, key, 0)) for key in ("carry_over", "oversample", "prompts_at_once"))
        return self.schedule.kind + bound + "".join(f", {key} {prompts}" for key, prompts in given if prompts)


def allowed(recipe: Recipe, schedule: ScheduleConfig) -> bool:
    """Returns whether the recipe breaks the same rules with that schedule as with sync."""
    broken, under_sync = (
        broken_rules(recipe.model_copy(update={"schedule": kind}), checked=recipe) for kind in (schedule, SYNC)
    )
    return broken == under_sync


def compared(recipe: Recipe) -> list[ScheduleConfig]:
    """Returns the schedules to compare: sync, the others that the recipe's rules allow, and its own."""
    half = max(1, recipe.rollout.prompts_per_step // 2)
    others: list[ScheduleConfig] = [SyncConfig(kind="sync", carry_over=half, max_staleness=2), ONE_STEP_OFF]
    others += [AsyncConfig(kind="async", max_staleness=bound) for bound in (1, 2, 4)]
    kinds = [SYNC, *(schedule for schedule in others if allowed(recipe, schedule))]
    return kinds if recipe.schedule in kinds else [*kinds, recipe.schedule]


def steady_seconds(case: Case, time: StepTime, schedule: AsyncConfig | OneStepOffConfig) -> float:
    """Returns a step's seconds if trainer and engines waited only for each other: a bound to compare many splits."""
    by, lengths, prompts = Sampling.of(case), case.lengths, sum(prompts_of_rounds(case))
    responses, underway = prompts * by.samples / by.engines, lengths.underway
    batch = min(by.at_once, responses * (1 + schedule.max_staleness))
    sampling = responses / batch * lengths.response * by.token_seconds(batch, underway)
    sampling += by.engine.prefill_seconds(lengths.prompt, lengths.prompt**2, 1) * prompts / by.engines
    if case.grpo.weights.pause == "retract":
        sampling += by.engine.prefill_seconds(batch * underway, batch * underway**2, batch)
    return max(time.of(*TRAINER_PHASES), sampling * case.assumptions.rollout_factor) + time.of("weight_sync")


def best(times: Iterable[ScheduleTime]) -> ScheduleTime:
    """Returns the least stale of the schedules that throw nothing away and are about as fast as the fastest."""
    times = [time for time in times if not time.thrown_tokens]
    fastest = min(time.seconds for time in times)
    fast = [time for time in times if time.seconds <= ABOUT_AS_FAST * fastest]
    return min(fast, key=lambda time: (time.staleness, time.seconds))


def schedule_time(
    work: Work, schedule: ScheduleConfig, *, steps: int = STEPS, responses_max: int = RESPONSES_MAX, seed: int = 0
) -> ScheduleTime:
    """Returns means over `steps` steps of a simulated run, without those in which it fills up. The simulation covers a
    part of the run with at most `responses_max` responses in a step."""
    part, filling = work.part(responses_max), schedule.max_staleness + 2
    given = {name: getattr(schedule, name, None) for name in ("carry_over", "oversample", "prompts_at_once")}
    scaled = {name: max(1, round(part.prompts / work.prompts * n)) for name, n in given.items() if n}
    run = SimulatedRun(part, schedule.model_copy(update=scaled), filling + steps, seed)
    before, end = run.steps[filling - 1], run.steps[-1]
    seen = run.steps[filling:]
    seconds, slots = end.end - before.end, part.engines * part.slots
    stale = [staleness for step in seen for staleness in step.staleness]
    thrown = sum(step.thrown for step in seen)
    trained = [number for step in seen for number in step.groups]
    began = [number for step in seen for number in step.groups + step.dropped]
    return ScheduleTime(
        schedule=schedule,
        seconds=seconds / steps,
        trainer_waits=sum(step.waited for step in seen) / seconds,
        engines_idle=1 - (end.busy_seconds - before.busy_seconds) / seconds / part.engines,
        slots_empty=1 - (end.slot_seconds - before.slot_seconds) / seconds / slots,
        staleness=sum(stale) / len(stale),
        staleness_max=max(stale),
        old_tokens=run.old_tokens(seen),
        thrown_tokens=float(thrown / (thrown + sum(run.lengths[list(step.groups)].sum() for step in seen))),
        shorter=float(1 - run.lengths[trained].mean() / run.lengths[began].mean()),
    )


# --- simulation ------------------------------------------------------------------------------------------------------


@dataclass
class _Engine:
    """A simulated engine with one count of decoded tokens: all its responses decode together. A response that begins at
    a count ends at that count plus its length."""

    index: int
    count: float = 0.0
    at: float = 0.0  # the time of that count
    rate: float = 1.0  # seconds of a token, as long as nothing begins or ends
    ends: list[tuple[float, int]] = field(default_factory=list)
    """Heap of running responses: the count at which each ends, and its number."""

    begun: float = 0.0  # sum of the counts at which running responses began
    next_at: float = math.inf  # time at which the next response ends, if nothing else begins
    reads_until: float = 0.0  # until then it reads resumed responses, and decodes nothing
    busy_seconds: float = 0.0
    slot_seconds: float = 0.0
    versions: list[float] = field(default_factory=list)  # counts at which the engine got version 1, 2, ...

    def settle(self, now: float) -> None:
        """Decodes until now."""
        if running := len(self.ends):
            spent = now - self.at
            self.count += min(spent, max(0.0, now - self.reads_until)) / self.rate
            self.busy_seconds += spent
            self.slot_seconds += spent * running
        self.at = now


@dataclass(frozen=True)
class SimulatedStep:
    """A step of a run. Seconds of engines are sums over all of them, from the run's start to the end of the step."""

    step: int
    groups: tuple[int, ...]
    staleness: tuple[int, ...]
    waited: float  # seconds in which the trainer waited for responses
    end: float
    busy_seconds: float
    slot_seconds: float
    dropped: tuple[int, ...] = ()  # groups that began, and were thrown away
    thrown: float = 0.0  # tokens that were sampled of these groups


class SimulatedRun:
    """The first `steps` steps of an endless run, on a simulated clock that begins at 0."""

    def __init__(self, work: Work, schedule: ScheduleConfig, steps: int, seed: int = 0) -> None:
        self.work, self.schedule, prompts = work, schedule, work.prompts
        if isinstance(schedule, AsyncConfig):
            at_once = schedule.prompts_at_once or prompts * (1 + schedule.max_staleness)
        else:
            at_once = prompts + (schedule.beyond if isinstance(schedule, SyncConfig) else 0)
        bound, spare = schedule.max_staleness, schedule.oversample if isinstance(schedule, SyncConfig) else 0
        self.admission = Admission(
            per_step=prompts, max_staleness=bound, at_once=max(at_once, prompts), steps=steps + bound + 1, spare=spare
        )
        groups = (prompts + spare) * (steps + bound + 1)
        self.prompt, self.growth = work.lengths.prompt, 1 + work.lengths.given
        self.lengths = work.lengths.drawn(groups * work.samples, seed).reshape(groups, work.samples)
        self.tokens = self.lengths.ravel().tolist()
        self.left = [work.samples] * groups
        self.engine_of = [0] * len(self.tokens)
        self.began = [0.0] * len(self.tokens)
        """By response: the engine, and its count when the response began."""

        self.now = 0.0
        self.complete = 0
        """Complete groups that no step has taken."""

        self.queue: deque[int] = deque()
        self.engines = [_Engine(index) for index in range(work.engines)]
        self.events = [(math.inf, index) for index in range(work.engines)]
        self.steps: list[SimulatedStep] = []
        self._begin()
        for step in range(1, steps + 1):
            self.steps.append(self._step(step))

    def _step(self, step: int) -> SimulatedStep:
        """Simulates one step; schedules differ only here."""
        sync, one_step_off = (isinstance(self.schedule, kind) for kind in (SyncConfig, OneStepOffConfig))
        begin, thrown = self.now, 0.0
        dropped: tuple[int, ...] = ()
        taken = self._take()
        waited = self.now - begin
        if sync:
            self._pause()
            if self.admission.spare:
                dropped, thrown = self._cut()
            self.now += self.work.train_seconds
        else:
            self._begin()
            trained = self.now + self.work.train_seconds
            while (engine := self._earliest()).next_at <= trained:
                self._next(engine)
            self.now = trained
            while (one_step_off or self.work.pause == "finish") and (engine := self._earliest()).ends:
                self._next(engine, begins=one_step_off)
            waited += self.now - trained
            self._pause()
        self.now += self.work.sync_seconds
        self.admission.advance(step)
        busy = sum(engine.busy_seconds for engine in self.engines)
        slots = sum(engine.slot_seconds for engine in self.engines)
        self._resume()
        self._begin()
        stale, numbers = tuple(step - 1 - group.version for group in taken), tuple(group.number for group in taken)
        return SimulatedStep(step, numbers, stale, waited, self.now, busy, slots, dropped, thrown)

    def _take(self) -> list[Admitted]:
        """Samples until a step can take its groups: it tries again with every group that is complete."""
        while self.complete < self.work.prompts or (taken := self.admission.take()) is None:
            complete = self.complete
            while self.complete == complete:
                self._next(self._earliest())
        self.complete -= self.work.prompts
        return taken

    # Engines. Invariant: while a request waits, every slot is taken, unless running responses finish before an update.

    def _begin(self) -> None:
        """Queues the groups for which there is room, and fills free slots from the queue, the emptiest engine first."""
        samples, slots = self.work.samples, self.work.slots
        for _ in range(self.admission.room):
            first = self.admission.admit().number * samples
            self.queue.extend(range(first, first + samples))
        if not self.queue:
            return
        emptiest = [(len(engine.ends), engine.index) for engine in self.engines]
        heapify(emptiest)
        changed = set()
        while self.queue and emptiest[0][0] < slots:
            running, index = emptiest[0]
            engine = self.engines[index]
            if index not in changed:
                engine.settle(self.now)
                changed.add(index)
            self._start(engine)
            heapreplace(emptiest, (running + 1, index))
        for index in sorted(changed):
            self._plan(self.engines[index])

    def _start(self, engine: _Engine) -> None:
        response = self.queue.popleft()
        self.engine_of[response], self.began[response] = engine.index, engine.count
        engine.begun += engine.count
        heappush(engine.ends, (engine.count + self.tokens[response], response))

    def _plan(self, engine: _Engine) -> None:
        """Computes the time at which the engine's next response ends."""
        engine.next_at = math.inf
        if running := len(engine.ends):
            ahead = engine.ends[0][0] - engine.count
            context = self.prompt + self.growth * (engine.count - engine.begun / running + ahead / 2)
            engine.rate = self.work.token_seconds(running, context)
            engine.next_at = max(self.now, engine.reads_until) + ahead * engine.rate
        heappush(self.events, (engine.next_at, engine.index))

    def _earliest(self) -> _Engine:
        """Returns the engine whose next response ends first. An event is stale if its engine was planned again."""
        while self.events[0][0] != (engine := self.engines[self.events[0][1]]).next_at:
            heappop(self.events)
        return engine

    def _next(self, engine: _Engine, *, begins: bool = True) -> None:
        """Ends the engine's next response; with `begins`, its slot takes a waiting one."""
        self.now = engine.next_at
        engine.settle(self.now)
        engine.count, response = heappop(engine.ends)
        engine.begun -= self.began[response]
        number = response // self.work.samples
        self.left[number] -= 1
        if self.left[number] == 0:
            self.admission.complete(number)
            self.complete += 1
        if self.queue and begins:
            self._start(engine)
        self._plan(engine)

    def _pause(self) -> None:
        for engine in self.engines:
            engine.settle(self.now)

    def _cut(self) -> tuple[tuple[int, ...], float]:
        """Throws away all groups that have begun, and returns their numbers and sampled tokens."""
        samples, dropped = self.work.samples, tuple(self.admission.waiting)
        left = {response: self.tokens[response] for response in self.queue}  # tokens that were not sampled
        self.queue.clear()
        self.complete = 0
        for engine in self.engines:
            left |= {response: end - engine.count for end, response in engine.ends}
            engine.ends.clear()
            engine.begun = 0.0
        for number in dropped:
            self.admission.drop(number)
        whole = sum(sum(self.tokens[number * samples : (number + 1) * samples]) for number in dropped)
        return dropped, whole - sum(left.values())

    def _resume(self) -> None:
        """Resumes running responses with the next version. Their keys and values are recomputed first under sync, whose
        engines have given them back, and with weights.pause: retract."""
        again = self.work.pause == "retract" or isinstance(self.schedule, SyncConfig)
        for engine in self.engines:
            engine.at = self.now
            if again and engine.ends:
                read = [self.prompt + self.growth * (engine.count - self.began[number]) for _, number in engine.ends]
                engine.reads_until = self.now + self.work.read_seconds(sum(read), sum(n * n for n in read), len(read))
            engine.versions.append(engine.count)
            self._plan(engine)

    def old_tokens(self, steps: Sequence[SimulatedStep]) -> float:
        """Returns the share of these steps' tokens that were sampled more than one version before the trained one."""
        versions = np.array([engine.versions for engine in self.engines])  # [engines, steps]
        samples, old, whole = np.arange(self.work.samples), 0.0, 0.0
        tokens, began, engine_of = self.lengths.ravel(), np.array(self.began), np.array(self.engine_of)
        for step in steps:
            responses = (np.array(step.groups)[:, None] * self.work.samples + samples).ravel()
            whole += tokens[responses].sum()
            if step.step > 2:  # it trains version step - 1: what came before version step - 2 is older
                decoded = versions[engine_of[responses], step.step - 3] - began[responses]
                old += np.clip(decoded, 0.0, tokens[responses]).sum()
        return float(old / whole)
