"""Executors call reward functions, each in its own place. Every call has a future, so the order of results is free.

Inline calls them in this thread, Asking those that ask models in an event loop, WorkerPool (workers.py) in processes.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar, cast

from megagrpo.errors import Problem, RewardError
from megagrpo.reward.functions import Function, FunctionSpec, Outcome, Signature, Task, failure_of, load, outcomes_of
from megagrpo.reward.judging.asked import AnswerCache, OverBudgetError
from megagrpo.reward.judging.classifier import ScoringModel, ServedClassifier
from megagrpo.reward.judging.client import AskConfig, Endpoint, HttpEndpoint, Judge

if TYPE_CHECKING:
    from megagrpo.recipe.schema import RewardConfig

CHECK_SECONDS = 0.2
CLOSE_SECONDS = 10.0
CACHE_FILE = "judge_cache.sqlite"
Specs = Mapping[int, FunctionSpec]
Calls = Sequence[tuple[int, Task]]
"""Calls of functions: the number of the function in the recipe, and its input."""
Outcomes = Future[list[Outcome]]
"""The outcomes of one call: one for each response that it scores."""
Served = Endpoint | ServedClassifier
"""A model that the run has started: a generative one or a classifier."""
T = TypeVar("T")


class Executor:
    """The base of executors. One is made from specs, by their numbers in the recipe, and the section `reward`.

    Methods are called by one thread at a time.
    """

    functions: Mapping[int, Signature]

    def by_group(self, check: Callable[[], None]) -> dict[int, bool]:
        """Returns, for each function, whether one call scores all responses of a group. Raises RewardError if a
        function cannot be loaded. Calls `check` while it waits, in this thread: a run stops by its main thread only."""
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


class Inline(Executor):
    """Calls functions at once, in this thread."""

    def __init__(self, specs: Specs, _: RewardConfig) -> None:
        self.functions: dict[int, Function] = {number: load(spec) for number, spec in specs.items()}

    def submit(self, calls: Calls) -> list[Outcomes]:
        return [self._called(self.functions[number], task) for number, task in calls]

    def _called(self, function: Function, task: Task) -> Outcomes:
        future = Outcomes()
        try:
            returned = function.function(**task.arguments(function.wanted))
        except Exception as raised:  # noqa: BLE001  (a row or a response may hold anything: it costs one score)
            future.set_result([failure_of(raised)] * len(task.samples))
        else:
            future.set_result(outcomes_of(returned, function.by_group, len(task.samples)))
        return future


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


# --- functions that ask models ----------------------------------------------------------------------------------------


class Asking(Executor):
    """Calls functions that ask models, in an event loop of a thread of its own.

    directory: that of the cache of judges' answers; None: no cache. served: the models of reward.models, by name. The
    constructor raises RewardError if the variable of an API key is not set, or if a model is not served.
    """

    def __init__(
        self,
        specs: Specs,
        _: RewardConfig,
        directory: Path | None = None,
        served: Mapping[str, Served] = MappingProxyType({}),
    ) -> None:
        self.functions: dict[int, Function] = {number: load(spec) for number, spec in specs.items()}
        self._directory, self._served = directory, served
        self._names = {number: spec.name for number, spec in specs.items()}
        self._keys = {number: _api_key(self.functions[number], spec, served) for number, spec in specs.items()}
        self._judges: dict[int, Judge | ScoringModel] = {}
        self._cache: AnswerCache | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread()
        self._left = 0  # calls of the last `submit` that are under way

    def submit(self, calls: Calls) -> list[Outcomes]:
        if not calls:
            return []
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="asks models", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._started(calls), self._loop).result()

    def take_metrics(self) -> dict[str, float]:
        """Returns the judges' metrics since the last call, as `judge/NAME/METRIC`. Begins new budgets."""
        if self._loop is None:
            return {}
        return asyncio.run_coroutine_threadsafe(self._take_metrics(), self._loop).result()

    def close(self) -> None:
        """Cancels the running calls, and closes the judges and the cache. A later `submit` opens them again."""
        if self._loop is None:
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        self._loop.close()
        self._loop = None

    async def _started(self, calls: Calls) -> list[Outcomes]:
        """Starts the calls in the loop's thread, so that all of them begin before any continues."""
        self._left, loop = len(calls), asyncio.get_running_loop()
        return [asyncio.run_coroutine_threadsafe(self._outcomes(number, task), loop) for number, task in calls]

    async def _outcomes(self, number: int, task: Task) -> list[Outcome]:
        try:
            if number not in self._judges:
                self._judges[number] = self._opened(number)
            return await self._call(self.functions[number], self._judges[number], task)
        finally:
            self._left -= 1
            if self._left == 0 and self._cache is not None:
                self._cache.write()

    async def _call(self, function: Function, model: Judge | ScoringModel, task: Task) -> list[Outcome]:
        try:
            returned = await function.function(model, **task.arguments(function.wanted))
        except OverBudgetError as over:
            model.spent["over_budget"] += len(task.samples)
            then = function.arguments.budget.then
            left_out = Outcome(None, masked=str(over)) if then == "mask" else Outcome(float(then))
            return [left_out] * len(task.samples)
        except ValueError as raised:  # no verdict, or a row that the rubric does not fit
            return [Outcome(None, error=failure_of(raised).error)] * len(task.samples)
        except Exception as raised:  # noqa: BLE001  (a row may hold anything: it costs one score)
            return [failure_of(raised)] * len(task.samples)
        return outcomes_of(returned, function.by_group, len(task.samples))

    def _opened(self, number: int) -> Judge | ScoringModel:
        config = self.functions[number].arguments
        served = self._served.get(config.model)
        if not isinstance(config, AskConfig):
            return ScoringModel(cast(ServedClassifier, served))
        if self._cache is None and self._directory is not None:
            self._cache = AnswerCache(self._directory / CACHE_FILE)
        if config.url is not None:
            served = HttpEndpoint(config.url, self._keys[number], config.concurrency)
        return Judge(config, cast(Endpoint, served), self._cache)

    async def _take_metrics(self) -> dict[str, float]:
        metrics: defaultdict[str, float] = defaultdict(float)
        for number, judge in self._judges.items():
            for name, value in judge.new_step().items():
                metrics[f"judge/{self._names[number]}/{name}"] += value
        return metrics

    async def _close(self) -> None:
        closing = asyncio.current_task()
        for task in asyncio.all_tasks() - {closing}:
            task.cancel()
        for judge in self._judges.values():
            await judge.close()
        self._judges.clear()
        if self._cache is not None:
            self._cache.close()
            self._cache = None


def _api_key(function: Function, spec: FunctionSpec, served: Mapping[str, Served]) -> str | None:
    """Returns the key of a judge's endpoint. Raises RewardError if it is not set, or if the model is not served."""
    arguments, where = function.arguments, f"{spec.where}.arguments"
    if getattr(arguments, "url", None) is None:
        if arguments.model not in served:
            needed = "a model of reward.models that this command has started: training starts them"
            raise RewardError(Problem(f"{where}.model", arguments.model, needed))
        return None
    if (variable := arguments.api_key_variable) is None:
        return None
    if key := os.environ.get(variable):
        return key
    given = f"{variable}, which is not set"
    raise RewardError(Problem(f"{where}.api_key_variable", given, "the API key", f"export {variable}=..."))
