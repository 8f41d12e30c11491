"""Waiting for Ray actors: always with a deadline, and an error that names who was waited for.

Every wait also ends when the run loses a node, and where that is allowed when it is told to stop: `watch` raises then.
Only what is closed is waited for without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskUnschedulableError,
    WorkerCrashedError,
)

from megagrpo.cluster.nodes import NodeWatch
from megagrpo.errors import MegagrpoError, Problem

SLICE_SECONDS = 0.2
"""Of a wait, between two looks at its watch."""


def wait_for(
    results: Mapping[str, ray.ObjectRef[Any]],
    *,
    doing: str,
    timeout_seconds: float,
    error: type[MegagrpoError],
    watch: NodeWatch,
) -> dict[str, Any]:
    """Results by name, once all are there.

    Fails as soon as one of them does, not only at the deadline: a dead rank leaves its peers hanging in a collective.
    Errors of ours that an actor raised are raised as they are; others become `error`, naming the actor.
    """
    done: dict[str, Any] = {}
    for name, answer in _as_they_come(results, doing, timeout_seconds, error, watch):
        if isinstance(answer, MegagrpoError):
            raise answer
        done[name] = answer
    return done


def settle(
    results: Mapping[str, ray.ObjectRef[Any]],
    *,
    doing: str,
    timeout_seconds: float,
    error: type[MegagrpoError],
    at_first_failure: Callable[[str], None],
    grace_seconds: float,
    watch: NodeWatch | None,
) -> tuple[dict[str, Any], dict[str, MegagrpoError]]:
    """What everyone answered: results, and errors, by name. Raises nothing but what `watch` raises.

    After the first failure `at_first_failure` is called with its text, to release those who wait for the one that
    failed; the others then have `grace_seconds` to answer, and who has not is an error too.
    """
    done: dict[str, Any] = {}
    failed: dict[str, MegagrpoError] = {}

    def take(refs: Mapping[str, ray.ObjectRef[Any]], seconds: float) -> None:
        for name, answer in _as_they_come(refs, doing, seconds, error, watch):
            if isinstance(answer, MegagrpoError):
                failed[name] = answer
                return
            done[name] = answer

    take(results, timeout_seconds)
    if failed:
        at_first_failure(str(next(iter(failed.values()))))
    deadline = time.monotonic() + grace_seconds
    while len(done) + len(failed) < len(results):
        left = {name: ref for name, ref in results.items() if name not in done and name not in failed}
        take(left, max(0.0, deadline - time.monotonic()))
    return done, failed


def _as_they_come(
    results: Mapping[str, ray.ObjectRef[Any]],
    doing: str,
    timeout_seconds: float,
    error: type[MegagrpoError],
    watch: NodeWatch | None,
) -> Iterator[tuple[str, Any]]:
    """(name, answer or error), one after another. At the deadline, an error for each that is missing."""
    deadline = time.monotonic() + timeout_seconds
    names = {ref: name for name, ref in results.items()}
    while names:
        if watch:
            watch.check()
        left = max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(names), num_returns=1, timeout=min(left, SLICE_SECONDS))
        if not ready and left > SLICE_SECONDS:
            continue
        if not ready:
            late = [name for name in results if name in names.values()]
            for name in late:
                yield name, _late(late, results, doing, timeout_seconds, error)
            return
        for ref in ready:
            name = names.pop(ref)
            yield name, _answer(ref, name, doing, error, watch)


def _late(
    late: Sequence[str], asked: Iterable[str], doing: str, timeout_seconds: float, error: type[MegagrpoError]
) -> MegagrpoError:
    return error(
        Problem(
            where=f"{doing}: no answer from {', '.join(late)}",
            given=f"nothing after {timeout_seconds:g} s",
            needed="an answer from every one of " + ", ".join(asked),
            fix="look for the first error in the logs of those named; if they were slow, raise the timeout",
        )
    )


def _answer(ref: ray.ObjectRef[Any], name: str, doing: str, error: type[MegagrpoError], watch: NodeWatch | None) -> Any:
    """What the actor returned, or the error that it is."""
    try:
        return ray.get(ref, timeout=60.0)
    except RayTaskError as failure:
        if isinstance(failure.cause, MegagrpoError):
            return failure.cause
        return error(Problem(where=f"{doing}: {name} raised", given=str(failure).strip()))
    except (RayActorError, WorkerCrashedError, TaskUnschedulableError, NodeDiedError) as failure:
        if watch:
            watch.after_failure(failure)
        return error(
            Problem(
                where=f"{doing}: {name} died",
                given=str(failure).strip(),
                fix="start the same command again: it continues from the newest checkpoint",
            )
        )
    except (GetTimeoutError, RayError) as failure:
        return error(Problem(where=f"{doing}: no result from {name}", given=str(failure).strip()))


def call_all(
    actors: Mapping[str, Any],
    method: Callable[[Any], Any],
    *,
    doing: str,
    timeout_seconds: float,
    error: type[MegagrpoError],
    watch: NodeWatch,
) -> dict[str, Any]:
    """Calls `method(actor)`, which must return an object reference, on every actor at once and waits for all."""
    return wait_for(
        {name: method(actor) for name, actor in actors.items()},
        doing=doing,
        timeout_seconds=timeout_seconds,
        error=error,
        watch=watch,
    )
