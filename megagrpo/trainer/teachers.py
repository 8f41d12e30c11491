"""The teachers that answer requests: asked for logprobs of sampled tokens, while reward functions score the samples."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np

from megagrpo.cluster.reward_models import asked_ids, asked_of_teachers, scored
from megagrpo.errors import EngineError, Problem, TeacherError
from megagrpo.progress import progress
from megagrpo.recipe.defaults import run_directory
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.teachers import AskedTeacher, ExternalTeacherConfig, ServedTeacherConfig
from megagrpo.reward.executors import waited
from megagrpo.reward.judging.asked import AnswerCache, Asked, OverBudgetError, Reply, Terms, UnansweredError, key_of
from megagrpo.reward.judging.client import HttpEndpoint
from megagrpo.rollout.kinds import ENGINES
from megagrpo.rollout.requests import teacher_of
from megagrpo.trainer.batches import branches_of
from megagrpo.types import Group, Prompt, Sample, TeacherTokens

BACKOFF_SECONDS = 1.0
"""The wait before the first retry, doubled before each further one."""
CACHE_FILE = "teacher_cache.sqlite"
CLOSE_SECONDS = 5.0
TOTALS = ("requests", "retries", "cached", "tokens")
SHOWN_MAX = 300
"""Most characters of a failure in a sample's error; the first failure is reported whole."""
AskedConfig = ServedTeacherConfig | ExternalTeacherConfig
T = TypeVar("T")


class Teacher(Protocol):
    """A teacher on a server: of the run (ActorEndpoint), or one that runs already. `identity` names its model."""

    identity: str

    async def score(self, tokens: np.ndarray, first: int, timeout_seconds: float) -> Reply:
        """Asks for the logprobs of tokens from `first` on: TeacherTokens as the `answer` of a reply of status 200.
        Raises OSError if there is no reply, TimeoutError if it is late."""

    async def close(self) -> None: ...


class ExternalTeacher:
    """A teacher on a server that runs already. For the event loop in which it is made."""

    def __init__(self, recipe: Recipe, config: ExternalTeacherConfig, api_key: str | None, model: str) -> None:
        kind, self.identity = ENGINES[config.engine], f"{config.url} {model}"
        self._scores, self._ids = kind.token_scores, asked_ids(recipe)
        self._endpoint = HttpEndpoint(config.url, api_key, 0, **asked_of_teachers(recipe, kind))

    async def score(self, tokens: np.ndarray, first: int, timeout_seconds: float) -> Reply:
        return await scored(self._endpoint.post, self._scores, tokens, first, self._ids, timeout_seconds)

    async def close(self) -> None:
        await self._endpoint.close()


class TeacherClient(Asked[tuple[np.ndarray, int], TeacherTokens]):
    """A teacher that is asked about tokens, from one of them on. Equal questions at one time are one request."""

    def __init__(self, teacher: Teacher, config: AskedConfig, k: int, cache: AnswerCache | None) -> None:
        waits = config.requests_at_once, config.retries, BACKOFF_SECONDS, config.timeout_seconds
        super().__init__(Terms(*waits, config.budget.model_dump()), "no logprobs", cache if config.cache else None)
        self.teacher, self._k = teacher, k

    async def logprobs(self, tokens: np.ndarray, first: int) -> TeacherTokens:
        """Returns the teacher's logprobs of tokens from `first` on. Raises as `answered`."""
        key = key_of(self.teacher.identity, [self._k, first, tokens.tolist()])
        return (await self.answered((tokens, first), key))[0]

    async def _send(self, question: tuple[np.ndarray, int], timeout_seconds: float) -> Reply:
        return await self.teacher.score(*question, timeout_seconds)

    def _read(self, question: tuple[np.ndarray, int], reply: Reply) -> TeacherTokens:
        self.spent["tokens"] += len(question[0])
        return reply.answer  # type: ignore[no-any-return]

    def _packed(self, value: TeacherTokens) -> bytes:
        return b"".join(array.tobytes() for array in (value.logprobs, value.ids, value.ids_logprobs))

    def _unpacked(self, question: tuple[np.ndarray, int], kept: Any) -> TeacherTokens:
        shape = count, k = len(question[0]) - question[1], self._k
        logprobs, ids, ids_logprobs = np.split(np.frombuffer(kept, np.float32), [count, count * (1 + k)])
        return TeacherTokens(logprobs, ids.view(np.int32).reshape(shape), ids_logprobs.reshape(shape))


Asking = dict[tuple[int, int], tuple[str, Future[TeacherTokens | UnansweredError]]]
"""Samples whose rows have a teacher, by group and place in it: the teacher's name, and its logprobs or why there are
none."""


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
        directory = run_directory(recipe) if any(one.cache for one in self._configs.values()) else None
        self._cache = AnswerCache(directory / CACHE_FILE) if directory else None
        self._teachers = {name: self._client(name, teacher) for name, teacher in served.items()}
        self._left_out: Counter[tuple[str, str]] = Counter()
        """Responses by teacher and why they have no logprobs."""

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
        they are asked about, judged once there are at least judged_responses. A sample beyond a teacher's budget is
        masked, and no failure.
        """
        questions = self._questions(groups)
        try:
            done = score(groups)
            with progress("asking teachers", len(questions), "responses") as work:
                for _, answer in questions.values():
                    waited(answer, self._check)
                    work.advance(1)
        except BaseException:
            for _, answer in questions.values():
                answer.cancel()
            raise
        if self._cache is not None:
            self._cache.write()
        answers = {place: (name, answer.result()) for place, (name, answer) in questions.items()}
        self._judge(groups, answers)
        return [_with_answers(group, row, answers) for row, group in enumerate(done)]

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of each teacher since the last call. Begins new budgets."""
        return self._start(self._take_metrics()).result() if self._teachers else {}

    def close(self) -> None:
        """Cancels all requests, and drops the connections to teachers that run already."""
        if "_loop" in vars(self):
            with suppress(TimeoutError):
                self._start(self._close()).result(CLOSE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)

    # --- samples and scores -------------------------------------------------------------------------------------------

    def _questions(self, groups: Sequence[Group]) -> Asking:
        named = [teacher_of(self._recipe, group.prompt) for group in groups if self._configs]  # before any is asked
        return {
            (row, member): (name, self._start(self._answer(name, group.prompt, sample)))
            for row, (group, name) in enumerate(zip(groups, named, strict=False))
            if name in self._configs
            for member, sample in enumerate(group.samples)
            if sample.finish != "abort" and len(sample.tokens)
        }

    def _judge(self, groups: Sequence[Group], answers: Mapping[tuple[int, int], tuple[str, object]]) -> None:
        """Counts failures, and reports each teacher's first. Raises TeacherError, with these, if there are too many."""
        new = dict[str, str]()
        for (row, _), (name, answer) in answers.items():
            self._asked += 1
            if isinstance(answer, OverBudgetError):
                self._left_out[name, "over_budget"] += 1
            elif isinstance(answer, UnansweredError):
                self._failed += 1
                self._left_out[name, "failed"] += 1
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

    def _client(self, name: str, teacher: Teacher) -> TeacherClient:
        return TeacherClient(teacher, self._configs[name], asked_ids(self._recipe), self._cache)

    async def _answer(self, name: str, prompt: Prompt, sample: Sample) -> TeacherTokens | UnansweredError:
        """Asks about each sequence of the sample that has sampled tokens, up to the last of them, as teachers read."""
        requests, masks = [], []
        for branch in branches_of(np.array(prompt.taught or prompt.tokens, np.int32), sample):
            if len(trained := np.flatnonzero(branch.trained)):
                first, end = int(trained[0]), int(trained[-1]) + 1
                requests.append(self._teachers[name].logprobs(branch.tokens[:end], first))
                masks.append(branch.trained[first:end])
        parts = await asyncio.gather(*requests, return_exceptions=True)
        if errors := [part for part in parts if isinstance(part, BaseException)]:
            if isinstance(errors[0], UnansweredError):
                return errors[0]
            raise errors[0]
        of_sample = [
            (part.logprobs[mask], part.ids[mask], part.ids_logprobs[mask])
            for part, mask in zip(parts, masks, strict=True)
            if isinstance(part, TeacherTokens)
        ]
        return TeacherTokens(*map(np.concatenate, zip(*of_sample, strict=True)))

    async def _take_metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        left_out, self._left_out = self._left_out, Counter()
        for name, teacher in self._teachers.items():
            of_responses = {why: left_out[name, why] for why in ("failed", "over_budget")}
            of_step = dict.fromkeys(TOTALS, 0.0) | teacher.new_step() | of_responses
            metrics |= {f"teacher/{name}/{metric}": float(value) for metric, value in of_step.items()}
        return metrics

    async def _contact(self, name: str, config: ExternalTeacherConfig) -> Problem | None:
        where, variable = f"teachers.{name}", config.api_key_variable
        key = os.environ.get(variable) if variable else None
        if variable and not key:
            given, fix = f"{variable}, which is not set", f"export {variable}=..."
            return Problem(f"{where}.api_key_variable", given, "the API key", fix)
        try:
            served = await asyncio.to_thread(ENGINES[config.engine].served_model, config.url, key or "")
            model = served.get("model_path", "a model")
            teacher = ExternalTeacher(self._recipe, config, key, model)
            self._teachers[name] = self._client(name, teacher)
            reply = await self._teachers[name].reply((np.zeros(2, np.int32), 1))  # a trial
            failure = "" if reply.status == 200 else reply.failure
        except EngineError as error:
            failure = error.problems[0].given
        except OverBudgetError as error:
            failure = str(error)
        if not failure:
            self._say(f"teacher {name}: {model} at {config.url} ({config.engine})")
            return None
        needed = f"an answer of a {config.engine} server with the logprobs of a prompt's token ids"
        most = max(1, asked_ids(self._recipe))
        fix = f"start the server (vLLM with --max-logprobs {most}), or correct url, engine or api_key_variable"
        return Problem(f"{where}.url", f"{config.url}: {failure}", needed, fix)

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._teachers.values():
            await client.teacher.close()
        if self._cache is not None:
            self._cache.close()


def _with_answers(
    group: Group, row: int, answers: Mapping[tuple[int, int], tuple[str, TeacherTokens | UnansweredError]]
) -> Group:
    """Returns the scored group with the answers about its samples."""
    samples, scores = list(group.samples), list(group.scores)
    for member in range(len(samples)):
        name, answer = answers.get((row, member), ("", None))
        if isinstance(answer, TeacherTokens):
            samples[member] = replace(samples[member], teacher=answer)
        elif answer is not None and (scores[member].value is not None or samples[member].given):
            why, over = f"teacher {name}: {answer}"[:SHOWN_MAX], isinstance(answer, OverBudgetError)
            masked, error = (why, "") if over and not samples[member].given else ("", why)
            scores[member] = replace(scores[member], value=None, counted=(), masked=masked, error=error)
    return replace(group, samples=tuple(samples), scores=tuple(scores))
