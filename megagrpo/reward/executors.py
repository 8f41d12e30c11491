"""Executors call reward functions, each in its own place. Every call has a future, so the order of results is free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from megagrpo.reward.functions import Function, FunctionSpec, Outcome, Signature, Task, failure_of, load, outcomes_of

if TYPE_CHECKING:
    from megagrpo.recipe.schema import RewardConfig

CHECK_SECONDS = 0.2
Calls = Sequence[tuple[int, Task]]
"""Calls of an executor's functions: the place of the function among them, and its input."""
Outcomes = Future[list[Outcome]]
"""The outcomes of one call: one for each response that it scores."""
T = TypeVar("T")


class Executor:
    """The base of executors. One is made from the specs that name it and the section `reward`; BUILT_IN names them.

    Methods are called by one thread at a time.
    """

    functions: Sequence[Signature] = ()

    def by_group(self, check: Callable[[], None]) -> list[bool]:
        """Returns, for each function, whether one call scores all responses of a group. Raises RewardError if a
        function cannot be loaded. Calls `check` while it waits."""
        return [function.by_group for function in self.functions]

    def submit(self, calls: Calls) -> list[Outcomes]:
        """Starts a batch of calls. Returns a future for each; cancelling one of them ends all. A function that fails
        gives an outcome; an exception of a future is an error of the executor."""
        raise NotImplementedError

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call."""
        return {}

    def close(self) -> None:
        """Ends processes and connections. A later `submit` starts them again."""


class Answered(Future[T]):
    """A future that has its result from the start. It needs no lock, which would take as long as a fast function."""

    def __init__(self, result: T) -> None:
        self._answer = result

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> T:
        return self._answer

    def cancel(self) -> bool:
        return False


class Inline(Executor):
    """Calls functions at once, in this thread."""

    def __init__(self, specs: Sequence[FunctionSpec], _: RewardConfig) -> None:
        self.functions: list[Function] = [load(spec) for spec in specs]

    def submit(self, calls: Calls) -> list[Outcomes]:
        return [self._called(place, task) for place, task in calls]

    def _called(self, place: int, task: Task) -> Outcomes:
        function = self.functions[place]
        try:
            returned = function.function(**task.arguments(function.wanted))
        except Exception as raised:  # noqa: BLE001  (a row or a response may hold anything: it costs one score)
            return Answered([failure_of(raised)] * len(task.samples))
        return Answered(outcomes_of(returned, function.by_group, len(task.samples)))


def waited(future: Future[T], check: Callable[[], None]) -> T:
    """Returns the result of a future. If `check` raises, cancels the future and raises the same."""
    while True:
        with suppress(TimeoutError):
            return future.result(CHECK_SECONDS)
        if future.done():
            return future.result()
        try:
            check()
        except BaseException:
            future.cancel()
            raise


def fail(futures: Iterable[Future[T]], error: BaseException) -> None:
    """Gives an error to all futures without a result."""
    for future in futures:
        if not future.done() and future.set_running_or_notify_cancel():
            future.set_exception(error)
