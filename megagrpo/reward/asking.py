"""Calls of reward functions that ask models, in an event loop of this process, beside the workers' calls."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from megagrpo.errors import Problem, RewardError
from megagrpo.reward.functions import Function, FunctionSpec, Outcome, Task, failure_of, outcomes_of
from megagrpo.reward.judging.cache import AnswerCache
from megagrpo.reward.judging.client import AskConfig, Endpoint, Judge, OverBudgetError
from megagrpo.reward.judging.scoring import ScoringModel, ServedClassifier

CHECK_SECONDS = 0.2
CLOSE_SECONDS = 10.0

Served = Endpoint | ServedClassifier
"""A model that the run has started: a generative one or a classifier."""


@dataclass(frozen=True)
class Models:
    """The models that functions may ask, and the directory of the cache."""

    directory: Path | None = None
    """Directory of the cache of judges' answers. None: no cache."""

    served: Mapping[str, Served] = field(default_factory=dict)
    """The models of reward.models, by name."""


class AskingFunctions:
    """The functions of a recipe that ask models, by their indices among its specs.

    The constructor raises RewardError if the variable of an API key is not set, or if a model is not served.
    """

    def __init__(self, functions: Mapping[int, Function], specs: Sequence[FunctionSpec], models: Models) -> None:
        self._functions, self._models = functions, models
        self._names = {place: specs[place].name for place in functions}
        self._keys = {place: _api_key(function.arguments, specs[place]) for place, function in functions.items()}
        for place, function in functions.items():
            _require_model(function.arguments, specs[place], models)
        self._judges: dict[int, Judge | ScoringModel] = {}
        self._cache: AnswerCache | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread()

    def begin(self, calls: Sequence[tuple[int, Task]]) -> Future[list[list[Outcome]]]:
        """Starts the calls (index of the function, task). Returns the future for `wait`."""
        if not calls:
            nothing: Future[list[list[Outcome]]] = Future()
            nothing.set_result([])
            return nothing
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="asks models", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._outcomes(calls), self._loop)

    def wait(self, begun: Future[list[list[Outcome]]], check: Callable[[], None]) -> list[list[Outcome]]:
        """Returns the outcomes of each call. If `check` raises, cancels the calls and raises the same."""
        while True:
            try:
                return begun.result(CHECK_SECONDS)
            except TimeoutError:
                if begun.done():
                    raise
                try:
                    check()
                except BaseException:
                    begun.cancel()
                    raise

    def take_metrics(self) -> dict[str, float]:
        """Returns the judges' metrics since the last call, as `judge/NAME/METRIC`. Begins new budgets."""
        if self._loop is None:
            return {}
        return asyncio.run_coroutine_threadsafe(self._take_metrics(), self._loop).result()

    def close(self) -> None:
        """Cancels the running calls, and closes the judges and the cache. A later `begin` opens them again."""
        if self._loop is None:
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        self._loop.close()
        self._loop = None

    async def _outcomes(self, calls: Sequence[tuple[int, Task]]) -> list[list[Outcome]]:
        for place in {place for place, _ in calls} - self._judges.keys():
            self._judges[place] = self._opened(place)
        try:
            return list(await asyncio.gather(*(self._call(place, task) for place, task in calls)))
        finally:
            if self._cache is not None:
                self._cache.write()

    async def _call(self, place: int, task: Task) -> list[Outcome]:
        function, model = self._functions[place], self._judges[place]
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

    def _opened(self, place: int) -> Judge | ScoringModel:
        config = self._functions[place].arguments
        served = self._models.served.get(config.model)
        if not isinstance(config, AskConfig):
            return ScoringModel(cast(ServedClassifier, served))
        if self._cache is None and self._models.directory is not None:
            self._cache = AnswerCache(self._models.directory)
        from megagrpo.reward.judging.endpoint import HttpEndpoint  # aiohttp takes a fifth of a second

        if config.url is None:
            return Judge(config, cast(Endpoint, served), self._cache)
        return Judge(config, HttpEndpoint(config.url, self._keys[place], config.concurrency), self._cache)

    async def _take_metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for place, judge in self._judges.items():
            for what, value in judge.new_step().items():
                name = f"judge/{self._names[place]}/{what}"
                found[name] = found.get(name, 0.0) + value
        return found

    async def _close(self) -> None:
        own = asyncio.current_task()
        for task in asyncio.all_tasks() - {own}:
            task.cancel()
        for judge in self._judges.values():
            await judge.close()
        self._judges.clear()
        if self._cache is not None:
            self._cache.close()
            self._cache = None


def _require_model(arguments: Any, spec: FunctionSpec, models: Models) -> None:
    if getattr(arguments, "url", None) is None and arguments.model not in models.served:
        needed = "a model of reward.models that this command has started: training starts them"
        raise RewardError(Problem(f"{spec.where}.arguments.model", arguments.model, needed))


def _api_key(arguments: Any, spec: FunctionSpec) -> str | None:
    if not isinstance(arguments, AskConfig) or (variable := arguments.api_key_variable) is None:
        return None
    if not (key := os.environ.get(variable)):
        where = f"{spec.where}.arguments.api_key_variable"
        raise RewardError(Problem(where, f"{variable}, which is not set", "the API key", f"export {variable}=..."))
    return key
