"""Groups that are sampled and scored in the background, until a step takes them.

Admission (algorithm/admission.py) decides which prompts begin and which groups a step takes. The thread of the engines
(cluster/rollouts.py) delivers samples; a thread here scores them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megagrpo.algorithm.admission import Admission, Admitted, cut_metrics
from megagrpo.checkpoint.groups import Pending
from megagrpo.cluster.rollouts import require_alive
from megagrpo.errors import REPORT, EngineError, MegagrpoError, Problem
from megagrpo.progress import progress
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.schedule import OneStepOffConfig, SyncConfig
from megagrpo.rollout.pool import Order
from megagrpo.rollout.requests import with_baseline
from megagrpo.trainer.batches import Sampled, logged_group
from megagrpo.trainer.run import Run
from megagrpo.trainer.schedule import EngineSource
from megagrpo.trainer.step import any_ended, none_ended, require_version, sync, with_signal
from megagrpo.types import Group, Prompt, Sample

CLOSE_SECONDS = 5.0
LOOK_SECONDS = 0.2
OF_CUT_AGENTS = ("cut/samples", "cut/trained_tokens_mean", "cut/trained_tokens_p90")
"""Metrics of a cut that need no lengths of unended rollouts."""


@dataclass(eq=False)
class Begun:
    """A prompt that has begun and that no step has taken."""

    admitted: Admitted
    prompt: Prompt
    order: Order
    since: float
    group: Group | None = None
    """With scores, once it is complete."""


class Background(EngineSource):
    """Groups that are in progress while others train. Prompts begin once `resume` is called. Methods are for the thread
    that trains; they raise the errors of engines and rewards.

    sync, with carry_over or oversample   sampling ends when a step has its groups; the others continue in the next
                                          step, or are dropped (oversample)
    async, one_step_off                   engines sample while the ranks train, also as they get weights. With
                                          one_step_off they begin no more than the next step's prompts, and finish them
                                          before they get weights
    """

    def __init__(self, run: Run, step: int = 0, pending: Pending | None = None) -> None:
        """Starts the scoring thread. step, pending: of the checkpoint resumed from."""
        super().__init__(run)
        recipe, rollouts = run.recipe, run.rollouts
        self._cursor, self._rollouts = run.cursor, rollouts
        self._recipe, self._per_step = recipe, recipe.rollout.prompts_per_step
        self._changed = rollouts.changed
        """Guards all that follows."""
        self._drawn: deque[Prompt] = deque()
        self._begun: dict[int, Begun] = {}
        self._unscored: deque[Begun] = deque()
        self._dropped: list[Begun] = []
        self._paused = True
        self._failure: MegagrpoError | OSError | None = None
        self._closed = False
        self._admission = Admission(
            per_step=self._per_step,
            max_staleness=recipe.schedule.max_staleness,
            at_once=recipe.prompts_at_once,
            steps=run.total_steps,
            step=step,
            number=pending.next_number if pending else step * self._per_step,
            spare=recipe.schedule.oversample if isinstance(recipe.schedule, SyncConfig) else 0,
        )
        if pending:
            self._restore(pending)
        self._thread = threading.Thread(target=self._score, name="scores samples", daemon=True)
        self._thread.start()

    def sample(self, step: int) -> Sampled:
        clock, schedule = self.run.clock, self._recipe.schedule
        if not isinstance(schedule, SyncConfig):
            with clock.phase("rollout"):
                self.resume()
                return self.take()
        with self.engines_alone(), clock.phase("rollout"):
            self.resume()
            sampled = self.take(then_pause=True)
            self.pause()
            return self.cut(sampled) if schedule.oversample else sampled

    def sync(self, version: int, *, changed: bool) -> None:
        if isinstance(self._recipe.schedule, OneStepOffConfig):
            with self.run.clock.phase("rollout"):
                self._rollouts.wait(lambda: not self._incomplete())  # also before a stop: the samples are saved
        if not self.run.stopping.requested:
            sync(self.run, version, changed=changed)
            self.advance(version)

    def resume(self) -> None:
        """Starts prompts as admission allows, and resumes those that `pause` withdrew."""
        with self._changed:
            if self._paused:
                self._paused = False
                self._rollouts.add([begun.order for begun in self._incomplete()])
            self._admit()

    def take(self, *, then_pause: bool = False) -> Sampled:
        """Waits for the groups of the next step, and returns them. then_pause: no prompt begins in their place, as
        `pause` follows. Raises EngineError if the staleness exceeds the recipe's limit: a token's version is older than
        its group's first or newer than the policy's, or the group's last step has passed; or if no sample ended within
        rollout.timeout_seconds."""
        taken: list[Admitted] = []

        with progress("generating and scoring", self._per_step, "groups") as work:

            def ready() -> bool:
                if self._failure is not None:
                    raise self._failure
                require_alive(self._thread)
                work.done = min(self._per_step, sum(begun.group is not None for begun in self._begun.values()))
                if self._dropped:
                    work.unit = f"groups; {len(self._dropped):,} others taught nothing"
                taken.extend(self._admission.take() or ())
                return bool(taken)

            self._rollouts.wait(ready)
        with self._changed:
            begun = [self._begun.pop(admitted.number) for admitted in taken]
            dropped, self._dropped = sorted(self._dropped, key=lambda begun: begun.admitted.number), []
            self._paused = then_pause
            self._admit()
            oldest = min((later.since for later in self._begun.values()), default=None)
        ended = [(one.admitted, one.order.joints, one.group) for one in (*begun, *dropped) if one.group]
        everything = [group for _, _, group in ended]
        groups = everything[: len(begun)]
        version = self._admission.version
        for admitted, group in zip(taken, groups, strict=True):
            if version + 1 > admitted.last_step:
                given, fix = f"step {version + 1} of the run, after version {admitted.version}", REPORT
                needed = f"a step until {admitted.last_step}"
                raise EngineError(Problem(f"group {admitted.number}", f"{given}, with which it began", needed, fix))
            require_version([group], version, admitted.version)
        if not any_ended(groups):
            raise none_ended(groups, version + 1, self._recipe)
        metrics = staleness_metrics(groups, version) | {
            "staleness/carried_over": float(sum(admitted.version < version for admitted in taken)),
            "staleness/continued": float(sum(one.order.continued for one in begun)),
            "staleness/oldest_seconds": 0.0 if oldest is None else time.monotonic() - oldest,
        }
        logged = [
            logged_group(at.number, at.version, group, joints, trained=place < len(begun))
            for place, (at, joints, group) in enumerate(ended)
        ]
        return Sampled(groups, everything, metrics=metrics, logged=logged)

    def advance(self, version: int) -> None:
        """Sets the weight version with which engines sample from now on."""
        with self._changed:
            self._admission.advance(version)
            self._admit()

    def drop(self) -> None:
        with self._changed:
            self._paused = True
            self._rollouts.drop([begun.order for begun in self._incomplete()])

    def pause(self) -> None:
        """Withdraws all incomplete groups: engines work on none of them until `resume`."""
        with self._changed:
            self._paused = True
            orders = [begun.order for begun in self._incomplete()]
        self._rollouts.withdraw(orders)

    def cut(self, sampled: Sampled) -> Sampled:
        """Drops all groups in progress, after `pause`. Adds metrics of the effect on the step's response lengths."""
        with self._changed:
            cut = list(self._begun.values())
            for begun in cut:
                self._admission.drop(begun.admitted.number)
            self._begun.clear()
            self._unscored.clear()
        self._rollouts.drop([begun.order for begun in cut if not begun.order.complete])
        trained = [len(sample.tokens) for group in sampled.groups for sample in group.samples if not sample.given]
        samples = [sample for group in sampled.all for sample in group.samples]
        samples += [sample for begun in cut for sample in begun.order.finished()]
        samples = [sample for sample in samples if not sample.given]
        ended = [len(sample.tokens) for sample in samples if sample.finish != "abort"]
        if not trained or not ended:  # all that is trained on is given
            return sampled
        unended = [len(sample.tokens) for sample in samples if sample.finish == "abort"]
        left = [begun.order.requests[index].begun for begun in cut for index in begun.order.missing()]
        unended += [0 if sample is None else len(sample.tokens) for sample in left]
        metrics = cut_metrics(trained, ended, unended)
        if self._recipe.agent:  # nothing here knows how far rollouts were that were cut
            metrics = {name: metrics[name] for name in OF_CUT_AGENTS}
        return replace(sampled, metrics={**sampled.metrics, **metrics})

    def set_aside(self, ids: Iterable[str]) -> None:
        with self._changed:
            self._cursor.set_aside(ids)
            kept = deque(prompt for prompt in self._drawn if not self._cursor.is_set_aside(prompt.id))
            # Groups that are drawn together have numbers that are counted together: no two have the same seeds.
            self._admission.next_number += len(self._drawn) - len(kept)
            self._drawn = kept

    def pending(self) -> Pending:
        with self._changed:
            begun = [*self._dropped, *self._begun.values()]
            groups = [one.group or Group(one.prompt, one.order.finished()) for one in begun]
            read = self._rollouts.so_far()
            left = [
                [(one.order, index, one.order.requests[index].begun) for index in one.order.missing()] for one in begun
            ]
            drawn = list(self._drawn)
            oldest = min((one.admitted.version for one in begun), default=self._admission.version)

            def unfinished() -> list[list[Sample]]:
                running = read()
                so_far = [[running.get((order, index), before) for order, index, before in group] for group in left]
                known = [[sample for sample in group if sample and len(sample.tokens)] for group in so_far]
                return known + [[] for _ in drawn]

            return Pending(
                groups=(*groups, *(Group(prompt, ()) for prompt in drawn)),
                dropped=len(self._dropped),
                numbers=tuple(one.admitted.number for one in begun),
                versions=tuple(one.admitted.version for one in begun),
                next_number=self._admission.next_number,
                cursor=self._cursor.state(),
                joints=tuple({at: tuple(joints) for at, joints in one.order.joints.items()} for one in begun),
                verified=[v for v in sorted(self.run.weights.verified_versions) if v >= oldest],
                unfinished=tuple if self._recipe.one_version else unfinished,
            )

    def close(self) -> None:
        self._closed = True
        self._thread.join(CLOSE_SECONDS)

    # --- prompts begin ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        orders = []
        while self._admission.room and not self._paused:
            if not self._drawn:
                if self._cursor.exhausted:
                    break
                self._drawn += self._cursor.next(self._per_step)
            begun = self._begin(self._admission.admit(), self._drawn.popleft())
            if begun.order.complete:  # its response is given
                self._completed(begun.admitted.number)
            orders.append(begun.order)
        if orders:
            self._rollouts.add(orders)

    def _begin(self, admitted: Admitted, prompt: Prompt) -> Begun:
        number = admitted.number
        order = self._rollouts.order(prompt, step_of(number, self._recipe), lambda order: self._completed(number))
        self._begun[number] = begun = Begun(admitted, prompt, order, time.monotonic())
        return begun

    def _restore(self, pending: Pending) -> None:
        self.run.weights.verified_versions.update(pending.verified)
        unfinished = [*pending.unfinished(), *([()] * len(pending.groups))]
        all_joints = [*pending.joints, *([{}] * len(pending.groups))]  # none in files of earlier versions
        saved = list(zip(pending.numbers, pending.versions, pending.groups, unfinished, all_joints, strict=False))
        for number, version, group, _, joints in saved[: pending.dropped]:
            order = self._rollouts.order(group.prompt, step_of(number, self._recipe))
            order.joints = {at: list(ends) for at, ends in joints.items()}
            admitted = Admitted(number, version, version, complete=True)
            self._dropped.append(Begun(admitted, group.prompt, order, time.monotonic(), group))
        for number, version, group, running, joints in saved[pending.dropped :]:
            begun = self._begin(self._admission.readmit(number, version), group.prompt)
            order = begun.order
            if not order.complete:  # else its response is given
                order.samples = {sample.index: sample for sample in group.responses if not sample.given}
                known = {sample.index for sample in (*group.responses, *running)}  # the others begin anew
                order.joints = {at: list(ends) for at, ends in joints.items() if at in known}
                for sample in running:
                    order.resume_after(sample.index, sample)
            if group.scores:
                begun.group = with_baseline(group, self._recipe)  # earlier versions saved the baseline as a sample
                self._admission.complete(number)
            elif order.complete:
                self._completed(number)
        self._drawn += (group.prompt for group in pending.groups[len(pending.numbers) :])

    def _incomplete(self) -> list[Begun]:
        return [begun for begun in self._begun.values() if not begun.order.complete and begun.group is None]

    # --- the thread that scores ---------------------------------------------------------------------------------------

    def _completed(self, number: int) -> None:
        """Queues a group for scoring, as its order is complete. The engines' thread calls it."""
        with self._changed:
            if begun := self._begun.get(number):  # else it was cut meanwhile
                self._unscored.append(begun)
                self._changed.notify_all()

    def _score(self) -> None:
        try:
            while not self._closed:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._unscored) or self._closed, LOOK_SECONDS)
                    complete = list(self._unscored)
                    self._unscored.clear()
                if not complete or self._closed:
                    continue
                groups = [with_baseline(begun.order.group(), self._recipe) for begun in complete]
                scored = self.run.teachers.beside(groups, self.run.scorer.score)
                with self._changed:
                    for begun, group in zip(complete, scored, strict=True):
                        self._take_in(begun, group)
                    if not self._closed:
                        self._admit()
                    self._changed.notify_all()
        except (MegagrpoError, OSError) as error:
            self._failure = error

    def _take_in(self, begun: Begun, group: Group) -> None:
        """Takes a scored group, unless it was cut meanwhile; drops one without signal in dynamic sampling."""
        number = begun.admitted.number
        if number in self._begun:
            begun.group = group
            if not self._recipe.rollout.dynamic_sampling or with_signal([group], self._recipe):
                self._admission.complete(number)
            else:
                self._admission.drop(number)
                self._dropped.append(self._begun.pop(number))


def step_of(number: int, recipe: Recipe) -> int:
    """Returns the step number in the seeds of this group's samples: of a synchronous run that trains every group."""
    return number // recipe.rollout.prompts_per_step + 1


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Returns metrics of staleness: by how many versions the weights that sampled each token lag behind the policy."""
    samples = [sample for group in groups for sample in group.samples if len(sample.tokens) and not sample.given]
    counts = np.zeros(version + 1, np.int64)  # tokens by age
    mixed = 0
    for sample in samples:
        first, last = sample.versions[0], sample.versions[-1]
        if first == last and sample.agent is None:  # versions only grow, but from branch to branch
            counts[version - first] += len(sample.tokens)
        else:
            mixed += int((sample.versions != first).any())
            of_sample = np.bincount(version - sample.versions)
            counts[: len(of_sample)] += of_sample
    tokens, ages = max(int(counts.sum()), 1), counts.nonzero()[0]
    return {
        "staleness/mean": float(counts @ np.arange(version + 1) / tokens),
        "staleness/max": float(ages.max(initial=0)),
        "staleness/above_1_share": float(counts[2:].sum() / tokens),
        "staleness/mixed_share": mixed / max(len(samples), 1),
        **{f"staleness/{age}_share": float(counts[age] / tokens) for age in ages},
    }
