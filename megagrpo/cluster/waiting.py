"""Waiting for Ray actors: always with a deadline, and an error that names who was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from megagrpo.errors import MegagrpoError, Problem


def wait_for(
    results: Mapping[str, ray.ObjectRef[Any]], *, doing: str, timeout_seconds: float, error: type[MegagrpoError]
) -> dict[str, Any]:
    """Results by name, once all are there.

    Fails as soon as one of them does, not only at the deadline: a dead rank leaves its peers hanging in a collective.
    Errors of ours that an actor raised are raised as they are; others become `error`, naming the actor.
    """
    deadline = time.monotonic() + timeout_seconds
    names = {ref: name for name, ref in results.items()}
    done: dict[str, Any] = {}
    while len(done) < len(results):
        pending = [ref for ref, name in names.items() if name not in done]
        ready, _ = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(name for name in results if name not in done)
            raise error(
                Problem(
                    where=f"{doing}: no answer from {late}",
                    given=f"nothing after {timeout_seconds:g} s",
                    needed="an answer from every one of " + ", ".join(results),
                    fix="look for the first error in the logs of those named; if they were slow, raise the timeout",
                )
            )
        for ref in ready:
            done[names[ref]] = _get(ref, names[ref], doing, error)
    return done


def _get(ref: ray.ObjectRef[Any], name: str, doing: str, error: type[MegagrpoError]) -> Any:
    try:
        return ray.get(ref, timeout=60.0)
    except RayTaskError as failure:
        if isinstance(failure.cause, MegagrpoError):
            raise failure.cause from None
        raise error(Problem(where=f"{doing}: {name} raised", given=str(failure).strip())) from failure
    except RayActorError as failure:
        raise error(
            Problem(
                where=f"{doing}: {name} died",
                given=str(failure).strip(),
                fix="start the same command again: it continues from the newest checkpoint",
            )
        ) from failure
    except (GetTimeoutError, RayError) as failure:
        raise error(Problem(where=f"{doing}: no result from {name}", given=str(failure).strip())) from failure


def call_all(
    actors: Mapping[str, Any],
    method: Callable[[Any], Any],
    *,
    doing: str,
    timeout_seconds: float,
    error: type[MegagrpoError],
) -> dict[str, Any]:
    """Calls `method(actor)`, which must return an object reference, on every actor at once and waits for all."""
    return wait_for(
        {name: method(actor) for name, actor in actors.items()},
        doing=doing,
        timeout_seconds=timeout_seconds,
        error=error,
    )
