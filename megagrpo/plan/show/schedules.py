"""Schedules side by side, in words and figures."""

from __future__ import annotations

from collections.abc import Sequence

from megagrpo.plan.schedules import ASYNC, ScheduleTime, allowed, best
from megagrpo.plan.search import Split
from megagrpo.plan.time import StepTime
from megagrpo.plan.units import second_text
from megagrpo.recipe.schema import Recipe

HEADS = ("a step", "speed", "trainer waits", "engines idle", "slots empty", "staleness", "old tokens")


def figures(time: ScheduleTime, sync: ScheduleTime) -> tuple[str, ...]:
    """Returns a cell for each of the heads. Speed is a multiple of `sync`'s; staleness is the mean and the most."""
    stale = f"{time.staleness:.1f}, {time.staleness_max}" if time.staleness_max else "0"
    return (
        second_text(time.seconds),
        f"{sync.seconds / time.seconds:.2f}x",
        f"{time.trainer_waits:.0%}",
        f"{time.engines_idle:.0%}",
        f"{time.slots_empty:.0%}",
        stale,
        f"{time.old_tokens:.0%}",
    )


def judgement(times: Sequence[ScheduleTime], recipe: Recipe) -> str:
    """Describes the best schedule, its price, and the recipe's own. sync is the first of `times`."""
    found, sync, own = best(times), times[0], recipe.schedule
    if found is sync:
        text = "best here: sync, whose samples are never stale"
    else:
        faster = f"{sync.seconds / found.seconds:.2f} times as fast as sync"
        late = f"groups are trained {found.staleness:.1f} versions late in the mean, {found.staleness_max} at most"
        old = f"{found.old_tokens:.0%} of their tokens are more than one version old"
        text = f"best here: {found.name}, {faster}; its price: {late}, and {old}"
    if own != sync.schedule:
        ours = next(time for time in times if time.schedule == own)
        text += f"; the recipe's is {ours.name}, {sync.seconds / ours.seconds:.2f} times as fast as sync"
    apart = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"placement": "disaggregated"})})
    if allowed(apart, ASYNC) and not allowed(recipe, ASYNC):
        text += "; engines on devices of their own can sample during training, too: --search compares"
    return text


def headline(time: StepTime, own: ScheduleTime | None) -> str:
    """Formats the seconds of a step, with the schedule if they are not those of all phases."""
    if own is None:
        return second_text(time.seconds)
    return (
        f"{second_text(time.seconds)} under {own.name} ({second_text(time.phase_seconds)} if phases follow one another)"
    )


def of_split(split: Split) -> str:
    """Describes a step in which engines on GPUs of their own sample all the time."""
    found, time = split.schedule, split.estimate.time
    speed = f"{second_text(found.seconds)} a step, {time.tokens / found.seconds / time.gpus:,.0f} tokens/s/GPU"
    return f"{speed}; the trainer waits {found.trainer_waits:.0%}, engines are idle {found.engines_idle:.0%}"
