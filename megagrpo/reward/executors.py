"""Executors call reward functions, each in its own place. Every call has a future, so the order of results is free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from megagrpo.reward.functions import Function, FunctionSpec, Outcome, Signature, Task, failure_of, load, outcomes_of

if TYPE_CHECKING:
    from megagrpo.recipe.schema import RewardConfig

CHECK_SECONDS = 0.2
Specs = Mapping[int, FunctionSpec]
Calls = Sequence[tuple[int, Task]]
"""Calls of functions: the number of the function in the recipe, and its input."""
Outcomes = Future[list[Outcome]]
"""The outcomes of one call: one for each response that it scores."""
T = TypeVar("T")


class Executor:
    """The base of executors. One is made from specs, by their numbers in the recipe, and the section `reward`.

    Methods are called by one thread at a time.
    """

    functions: Mapping[int, Signature]

    def by_group(self, check: Callable[[], None]) -> dict[int, bool]:
        """Returns, for each function, whether one call scores all responses of a group. Raises RewardError if a
        function cannot be loaded. Calls `check` while it waits."""
        return {number: function.by_group for number, function in self.functions.items()}

    def submit(self, calls: Calls) -> list[Outcomes]:
        """Starts a batch of calls. Returns a future for each; cancelling all of them ends the batch. A function that
        fails gives an outcome; an exception of a future is an error of the executor."""
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

    def exception(self, timeout: float | None = None) -> None:
        return None

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        fn(self)

    def cancel(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"Answered({self._answer!r})"


class Inline(Executor):
    """Calls functions at once, in this thread."""

    def __init__(self, specs: Specs, _: RewardConfig) -> None:
        self.functions: dict[int, Function] = {number: load(spec) for number, spec in specs.items()}

    def submit(self, calls: Calls) -> list[Outcomes]:
        return [self._called(self.functions[number], task) for number, task in calls]

    def _called(self, function: Function, task: Task) -> Outcomes:
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
