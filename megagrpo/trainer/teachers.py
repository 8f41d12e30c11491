"""The teachers that answer requests: asked for logprobs of sampled tokens, while reward functions score the samples."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np

from megagrpo.cluster.reward_models import asked_ids, asked_of_teachers, scored
from megagrpo.errors import EngineError, Problem, TeacherError, brief
from megagrpo.progress import progress
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.teachers import AskedTeacher, ExternalTeacherConfig
from megagrpo.reward.executors import waited
from megagrpo.reward.judging.client import RETRIED, HttpEndpoint, Reply
from megagrpo.rollout.kinds import ENGINES
from megagrpo.trainer.batches import branches_of
from megagrpo.types import Group, Prompt, Sample, TeacherTokens

BACKOFF_SECONDS, BACKOFF_SECONDS_MAX = 1.0, 30.0
"""The wait before the first retry, doubled before each further one, and the longest."""
CLOSE_SECONDS = 5.0
SHOWN_MAX = 300
"""Most characters of a failure in a sample's error; the first failure is reported whole."""
TRIED = (0, 0)
"""Token ids of a trial request."""
T = TypeVar("T")


class Teacher(Protocol):
    """A teacher on a server: of the run (ActorEndpoint), or one that runs already."""

    async def score(self, tokens: np.ndarray, first: int, timeout_seconds: float) -> Reply:
        """Asks for the logprobs of tokens from `first` on: TeacherTokens as the `answer` of a reply of status 200.
        Raises OSError if there is no reply, TimeoutError if it is late."""

    async def close(self) -> None: ...


class ExternalTeacher:
    """A teacher on a server that runs already. For the event loop in which it is made."""

    def __init__(self, recipe: Recipe, config: ExternalTeacherConfig, api_key: str | None) -> None:
        kind = ENGINES[config.engine]
        self._scores, self._ids = kind.token_scores, asked_ids(recipe)
        self._endpoint = HttpEndpoint(config.url, api_key, 0, **asked_of_teachers(recipe, kind))

    async def score(self, tokens: np.ndarray, first: int, timeout_seconds: float) -> Reply:
        return await scored(self._endpoint, self._scores, tokens, first, self._ids, timeout_seconds)

    async def close(self) -> None:
        await self._endpoint.close()


@dataclass
class Count:
    """Requests to a teacher since the last step's metrics, and their results."""

    requests: int = 0
    retries: int = 0
    failed: int = 0
    """Responses without logprobs in the end."""
    seconds: float = 0.0
    """Sum over requests."""

    def metrics(self, name: str) -> dict[str, float]:
        figures = {**vars(self), "seconds": self.seconds / max(self.requests, 1)}
        return {f"teacher/{name}/{metric}": float(value) for metric, value in figures.items()}


@dataclass(frozen=True)
class Question:
    """A sample, by its place, whose row has a teacher. Its answer: logprobs, or why there are none."""

    group: int
    sample: int
    teacher: str
    answer: Future[TeacherTokens | str]


class Teachers:
    """The teachers that answer requests, asked in an event loop of a thread of its own.

    served: those on servers of the run, by name. `check` is called a few times a second while answers are awaited; an
    exception from it ends that. `say` reports the first failure of each teacher. One thread at a time asks.
    """

    def __init__(
        self,
        recipe: Recipe,
        served: Mapping[str, Teacher],
        check: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
        judged_responses: int = 1,
    ) -> None:
        self._recipe, self._check, self._say = recipe, check, say
        self._judged_responses, self._responses, self._asked, self._failed = judged_responses, 0, 0, 0
        self._first_failures: dict[str, str] = {}
        self._configs = {name: one for name, one in recipe.teachers.items() if isinstance(one, AskedTeacher)}
        self._slots = {name: asyncio.Semaphore(config.requests_at_once) for name, config in self._configs.items()}
        self._teachers = dict(served)
        self._counts = {name: Count() for name in self._configs}

    def contact(self) -> None:
        """Connects to the teachers that run already, and tries each. Raises TeacherError with those that do not answer
        as they must."""
        external = [(name, one) for name, one in self._configs.items() if isinstance(one, ExternalTeacherConfig)]
        problems = [problem for one in external if (problem := self._start(self._contact(*one)).result())]
        if problems:
            raise TeacherError(problems)
        self.take_metrics()  # those of the trials

    def beside(self, groups: Sequence[Group], score: Callable[[Sequence[Group]], list[Group]]) -> list[Group]:
        """Returns the groups as `score` returns them, with the logprobs of teachers in the samples whose rows have one.
        Asks for these while `score` runs. A sample on which its teacher failed has an error for a score.

        Raises TeacherError if teachers fail on more than algorithm.distillation.failed_share_max of the responses that
        they are asked about, judged once there are at least judged_responses.
        """
        questions = self._questions(groups)
        try:
            done = score(groups)
            with progress("asking teachers", len(questions), "responses") as work:
                for question in questions:
                    waited(question.answer, self._check)
                    work.advance(1)
        except BaseException:
            for question in questions:
                question.answer.cancel()
            raise
        answers = {(one.group, one.sample): (one.teacher, one.answer.result()) for one in questions}
        self._judge(groups, answers)
        return [_with_answers(group, row, answers) for row, group in enumerate(done)]

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of each teacher since the last call."""
        counts, self._counts = self._counts, {name: Count() for name in self._configs}
        return {metric: value for name, count in counts.items() for metric, value in count.metrics(name).items()}

    def close(self) -> None:
        """Cancels all requests, and drops the connections to teachers that run already."""
        if "_loop" in vars(self):
            with suppress(TimeoutError):
                self._start(self._close()).result(CLOSE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)

    # --- samples and scores -------------------------------------------------------------------------------------------

    def _questions(self, groups: Sequence[Group]) -> list[Question]:
        if not self._configs:
            return []
        named = [self._teacher_of(group.prompt) for group in groups]
        return [
            Question(row, member, name, self._start(self._answer(name, group.prompt, sample)))
            for row, (group, name) in enumerate(zip(groups, named, strict=True))
            if name in self._configs
            for member, sample in enumerate(group.samples)
            if sample.finish != "abort" and len(sample.tokens)
        ]

    def _teacher_of(self, prompt: Prompt) -> str:
        """Returns the name of a row's teacher, or "". Raises TeacherError if the row names another thing."""
        try:
            name = self._recipe.teacher_of(prompt.data_source, prompt.extra_info) or ""
        except ValueError as error:
            raise TeacherError(Problem(f"prompt {prompt.id}", str(error), "the name of a teacher")) from error
        if name and name not in self._recipe.teachers:
            known = ", ".join(self._recipe.teachers)
            raise TeacherError(Problem(f"prompt {prompt.id}", brief(name), f"one of {known}"))
        return name

    def _judge(self, groups: Sequence[Group], answers: Mapping[tuple[int, int], tuple[str, object]]) -> None:
        """Counts failures, and reports each teacher's first. Raises TeacherError, with these, if there are too many."""
        new = dict[str, str]()
        for (row, _), (name, answer) in answers.items():
            self._asked += 1
            if isinstance(answer, str):
                self._failed += 1
                self._counts[name].failed += 1
                if name not in self._first_failures:
                    self._first_failures[name] = new[name] = f"prompt {groups[row].prompt.id}: {answer}"
        for name, first in new.items():
            self._say(f"warning: teacher {name} failed for the first time: {first}")
        self._responses += sum(len(group.samples) for group in groups)
        if self._responses >= self._judged_responses:
            asked, failed = self._asked, self._failed
            self._responses = self._asked = self._failed = 0
            distillation = self._recipe.algorithm.distillation
            share_max = distillation.failed_share_max if distillation else 1.0
            if failed > share_max * asked:
                given = f"no logprobs for {failed} of {asked} responses; the first failure of each teacher:"
                given += "".join(f"\n{name}: {first}" for name, first in self._first_failures.items())
                needed = f"at most a share of {share_max:g} (algorithm.distillation.failed_share_max)"
                fix = "see logs/teacher_NAME.log, if the run has started it; raise its retries or timeout_seconds"
                raise TeacherError(Problem("teachers", given, needed, fix))

    # --- requests, in the event loop ----------------------------------------------------------------------------------

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="asks teachers", daemon=True).start()
        return loop

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _answer(self, name: str, prompt: Prompt, sample: Sample) -> TeacherTokens | str:
        """Asks about each sequence of the sample that has sampled tokens, up to the last of them, as teachers read."""
        requests, masks = [], []
        for branch in branches_of(np.array(prompt.taught or prompt.tokens, np.int32), sample):
            if len(trained := np.flatnonzero(branch.trained)):
                first, end = int(trained[0]), int(trained[-1]) + 1
                requests.append(self._asked_often(name, branch.tokens[:end], first))
                masks.append(branch.trained[first:end])
        parts = await asyncio.gather(*requests)
        if failures := [part for part in parts if isinstance(part, str)]:
            return failures[0]
        of_sample = [
            (part.logprobs[mask], part.ids[mask], part.ids_logprobs[mask])
            for part, mask in zip(parts, masks, strict=True)
            if isinstance(part, TeacherTokens)
        ]
        return TeacherTokens(*map(np.concatenate, zip(*of_sample, strict=True)))

    async def _asked_often(self, name: str, tokens: np.ndarray, first: int) -> TeacherTokens | str:
        """Asks until there is an answer, or one that no retry changes, or no retry is left."""
        config, failure = self._configs[name], ""
        for attempt in range(config.retries + 1):
            if attempt:
                self._counts[name].retries += 1
                await asyncio.sleep(min(BACKOFF_SECONDS * 2 ** (attempt - 1), BACKOFF_SECONDS_MAX))
            async with self._slots[name]:
                reply = await self._reply(name, tokens, first)
            if isinstance(reply.answer, TeacherTokens):
                return reply.answer
            failure = failure_of(reply)
            if reply.status not in RETRIED:
                break
        return f"{failure} ({attempt + 1} times)" if attempt else failure

    async def _reply(self, name: str, tokens: np.ndarray, first: int) -> Reply:
        begin, limit = time.monotonic(), self._configs[name].timeout_seconds
        try:
            return await self._teachers[name].score(tokens, first, limit)
        except TimeoutError:
            return Reply(0, text=f"no answer in {limit:g} s")
        except OSError as error:
            return Reply(0, text=f"{type(error).__name__}: {error}")
        finally:
            self._counts[name].requests += 1
            self._counts[name].seconds += time.monotonic() - begin

    async def _contact(self, name: str, config: ExternalTeacherConfig) -> Problem | None:
        where, variable = f"teachers.{name}", config.api_key_variable
        key = os.environ.get(variable) if variable else None
        if variable and not key:
            given, fix = f"{variable}, which is not set", f"export {variable}=..."
            return Problem(f"{where}.api_key_variable", given, "the API key", fix)
        self._teachers[name] = ExternalTeacher(self._recipe, config, key)
        try:
            model = await asyncio.to_thread(ENGINES[config.engine].served_model, config.url, key or "")
            reply = await self._reply(name, np.array(TRIED, np.int32), 1)
            failure = "" if isinstance(reply.answer, TeacherTokens) else failure_of(reply)
        except EngineError as error:
            model, failure = {}, error.problems[0].given
        if not failure:
            self._say(f"teacher {name}: {model.get('model_path', 'a model')} at {config.url} ({config.engine})")
            return None
        needed = f"an answer of a {config.engine} server with the logprobs of a prompt's token ids"
        most = max(1, asked_ids(self._recipe))
        fix = f"start the server (vLLM with --max-logprobs {most}), or correct url, engine or api_key_variable"
        return Problem(f"{where}.url", f"{config.url}: {failure}", needed, fix)

    async def _close(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        for teacher in self._teachers.values():
            await teacher.close()


def failure_of(reply: Reply) -> str:
    """Returns why a reply has no logprobs."""
    return f"HTTP {reply.status}: {reply.text}" if reply.status else reply.text


def _with_answers(group: Group, row: int, answers: Mapping[tuple[int, int], tuple[str, TeacherTokens | str]]) -> Group:
    """Returns the scored group with the answers about its samples."""
    samples, scores = list(group.samples), list(group.scores)
    for member in range(len(samples)):
        name, answer = answers.get((row, member), ("", None))
        if isinstance(answer, TeacherTokens):
            samples[member] = replace(samples[member], teacher=answer)
        elif answer is not None and (scores[member].value is not None or samples[member].given):
            error = f"teacher {name}: {answer[:SHOWN_MAX]}"
            scores[member] = replace(scores[member], value=None, counted=(), error=error, masked="")
    return replace(group, samples=tuple(samples), scores=tuple(scores))
