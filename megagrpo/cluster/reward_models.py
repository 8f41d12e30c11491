"""The models beside ranks and engines, of reward.models and teachers: an actor for each, on devices of its own, until
the run ends.

A server that ends or does not answer is restarted, and so is an actor that dies. Requests that fail meanwhile are
retried, or masked and counted.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from megagrpo.algorithm.distillation import TeacherTopKConfig
from megagrpo.cluster.actors import prepare_process
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.waiting import Wait, end_actors
from megagrpo.errors import EngineError, MegagrpoError, Problem
from megagrpo.processes import importing
from megagrpo.recipe.defaults import run_directory
from megagrpo.recipe.schema import ClassifierConfig, EngineLayoutConfig, Recipe
from megagrpo.recipe.schema.teachers import ServedTeacherConfig
from megagrpo.reward.executors import Served
from megagrpo.reward.judging.asked import Reply
from megagrpo.reward.judging.classifier import Conversation
from megagrpo.reward.judging.client import CHAT, HttpEndpoint
from megagrpo.rollout.engine import ServerSpec
from megagrpo.rollout.kinds import EngineKind
from megagrpo.rollout.server import Server
from megagrpo.rollout.token_scores import TokenScores

if TYPE_CHECKING:  # torch follows prepare_process
    from megagrpo.cluster.classifier import Classifier

RESTARTS_MAX = 10
HEALTH_SECONDS = 60.0
"""Time to generate a token for a server that missed the deadline of a request, before it is restarted."""
RETRY_SECONDS = 60.0
"""Pause before a server that could not start is retried."""
CLOSE_SECONDS = 15.0
ANSWER_BYTES, BYTES_PER_ID = 1 << 20, 200
"""Most bytes of a teacher's answer: of all but ids, and of each id with its logprob and the text that vLLM adds."""
Gpus = Sequence[int | str]
"""The GPUs of a model, as its node names them."""
Post = Callable[[Mapping[str, Any], float], Awaitable[Reply]]
"""Posts to a server, as an Endpoint does (reward/judging/client.py)."""


@ray.remote(max_restarts=RESTARTS_MAX, max_task_retries=1)
class ClassifierActor:
    """A classifier, which the driver asks. The first call to a new or restarted actor loads the model."""

    def __init__(self, recipe: Recipe, gpus: Gpus, path: str, directory: Path, device: str, dtype: str) -> None:
        prepare_process(device, recipe, gpus)
        self._config: Any = recipe.models_beside[path]
        self._directory, self._device, self._dtype = directory, device, dtype
        self._one_by_one = bool(recipe.deterministic)
        self._classifier: Classifier | None = None

    def ready(self) -> None:
        """Returns once the model is loaded."""
        self._loaded()

    def labels(self) -> list[str]:
        return self._loaded().labels

    def logits(self, conversations: Sequence[Conversation]) -> list[list[float] | str]:
        return self._loaded().logits(conversations)

    def _loaded(self) -> Classifier:
        if self._classifier is None:
            with importing():
                from megagrpo.cluster.classifier import Classifier

            on: dict[str, Any] = {"device": self._device, "dtype": self._dtype, "one_by_one": self._one_by_one}
            self._classifier = Classifier(self._directory, self._config, **on)
        return self._classifier


@ray.remote(max_restarts=RESTARTS_MAX, max_task_retries=1)
class ServerActor:
    """The server of a judge or a teacher on this node, and the requests to it: it listens on loopback alone."""

    def __init__(self, recipe: Recipe, gpus: Gpus, path: str, directory: Path, device: str, dtype: str) -> None:
        prepare_process(device, recipe, gpus)
        self._spec = server_spec(recipe, path, directory, device, dtype)
        self._asked: dict[str, Any] = {"path": f"/v1{CHAT}"}
        if not self._spec.chat_model:
            self._asked = asked_of_teachers(recipe, self._spec.settings.engine_kind)
        self._start_seconds = recipe.cluster.start_timeout_seconds
        self._server: Server | None = None
        self._endpoint: HttpEndpoint | None = None
        self._starting = asyncio.Lock()
        self._closed = threading.Event()
        self._failed: tuple[float, MegagrpoError] | None = None
        """Time and error of the server's last failed start."""

    async def ready(self) -> None:
        """Returns once the server generates."""
        await self._running()

    async def post(self, body: Mapping[str, Any], timeout_seconds: float) -> Reply:
        """Sends a request; first starts a server that is down. Returns 503 if it fails to start, ends, or is late."""
        try:
            endpoint = await self._running()
            return await endpoint.post(body, timeout_seconds)
        except TimeoutError:
            async with self._starting:  # ends the server if it is ill: the next request starts another
                try:
                    if self._server is not None:
                        await asyncio.to_thread(self._server.wait_until_ready, HEALTH_SECONDS)
                except EngineError:
                    await self._end()
            return Reply(503, text=f"no answer in {timeout_seconds:g} s")
        except (MegagrpoError, OSError) as error:
            return Reply(503, text=str(error))

    async def score(self, tokens: np.ndarray, first: int, timeout_seconds: float) -> Reply:
        """Asks a teacher for the logprobs of tokens, as `scored`."""
        scores = self._spec.settings.engine_kind.token_scores
        return await scored(self.post, scores, tokens, first, self._spec.top_ids or 0, timeout_seconds)

    async def close(self) -> None:
        self._closed.set()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)

    async def _running(self) -> HttpEndpoint:
        async with self._starting:
            if self._server is not None:
                try:
                    self._server.check_running()
                except EngineError:
                    await self._end()
            if self._failed is not None and time.monotonic() < self._failed[0] + RETRY_SECONDS:
                raise self._failed[1]
            if self._endpoint is None:
                try:
                    self._server = await asyncio.to_thread(self._start)
                except MegagrpoError as error:
                    self._failed = time.monotonic(), error
                    raise
                self._endpoint = HttpEndpoint(self._server.url, self._server.api_key, 0, **self._asked, proxies=False)
            return self._endpoint

    async def _end(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
        self._server = self._endpoint = None

    def _start(self) -> Server:
        if self._closed.is_set():
            raise EngineError(Problem(self._spec.name, "the run has ended"))
        server: Server = self._spec.settings.engine_kind.server(self._spec)
        try:
            server.wait_until_ready(self._start_seconds)
        except EngineError:
            server.close()
            raise
        return server


async def scored(
    post: Post, scores: TokenScores, tokens: np.ndarray, first: int, k: int, timeout_seconds: float
) -> Reply:
    """Asks a server for the logprobs of tokens from `first` on. The reply's `answer` is TeacherTokens; status 0: the
    answer is not of these tokens. Raises as `post`."""
    asked = tokens.tolist(), first, k
    reply = await post(scores.body(*asked), timeout_seconds)
    if reply.status != 200:
        return reply
    try:
        return replace(reply, answer=scores.read(reply.answer, *asked))
    except EngineError as error:
        return Reply(0, text=f"{error.problems[0].where}: {error.problems[0].given}")


def server_spec(recipe: Recipe, path: str, directory: Path, device: str, dtype: str) -> ServerSpec:
    """Returns the spec of a server on this node, which keeps its weights: a judge's, which answers chats, or a
    teacher's. path: of the model in the recipe."""
    config: Any = recipe.models_beside[path]
    teaches = isinstance(config, ServedTeacherConfig)
    called, name = "teacher" if teaches else "reward model", path.split(".", 1 if teaches else 2)[-1]
    return ServerSpec(
        name=f"{called} {name}",
        log=(run_directory(recipe) / "logs" / f"{called.replace(' ', '_')}_{name}.log").absolute(),
        settings=config.settings,
        model_directory=str(directory),
        layout=EngineLayoutConfig(tensor=config.devices),
        dtype=dtype,
        device=device,
        requests_at_once=config.requests_at_once,
        tokens_per_request=recipe.taught_tokens_max + 1 if teaches else config.tokens_max,
        threads=max(1, (os.cpu_count() or 1) // 2),
        deterministic=teaches and bool(recipe.deterministic),
        keeps_weights=True,
        chat_model="" if teaches else name,
        top_ids=asked_ids(recipe) if teaches else None,
    )


def asked_ids(recipe: Recipe) -> int:
    """Returns the number of most likely ids for which teachers are asked in the place of each token."""
    distillation = recipe.algorithm.distillation
    objective = distillation.objective if distillation else None
    return objective.k if isinstance(objective, TeacherTopKConfig) else 0


def asked_of_teachers(recipe: Recipe, kind: EngineKind) -> dict[str, Any]:
    """Returns where teachers of this kind are asked, and the most bytes of an answer, as HttpEndpoint takes them."""
    ids = (asked_ids(recipe) + 1) * recipe.taught_tokens_max
    return {"path": kind.token_scores.path, "bytes_max": ANSWER_BYTES + BYTES_PER_ID * ids}


class RewardModels:
    """The actors of all models. The constructor starts them; they are ready after `wait_until_ready`."""

    def __init__(self, runtime: Runtime, recipe: Recipe, directories: Mapping[str, Path]) -> None:
        self._runtime, self._recipe = runtime, recipe
        self._actors: dict[str, Any] = {}
        for number, (path, config) in enumerate(recipe.models_beside.items()):
            bundles, directory = runtime.devices.bundles_of_model[number], directories[path].absolute()
            gpus = tuple(place.device for place in runtime.places_of(bundles) if place.device is not None)
            on_cpu = isinstance(config, ClassifierConfig) and config.device == "cpu"
            device = "cpu" if on_cpu else runtime.device
            dtype = config.dtype if config.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
            actor_class = ClassifierActor if isinstance(config, ClassifierConfig) else ServerActor
            of_model = recipe, gpus, path, directory, device, dtype
            self._actors[path] = runtime.start(actor_class, bundles, 1.0, *of_model)
        self._starting = {path: actor.ready.remote() for path, actor in self._actors.items()}

    def wait_until_ready(self) -> None:
        """Raises ModelError or EngineError naming the models that did not start in cluster.start_timeout_seconds."""
        if self._starting:
            seconds = self._recipe.cluster.start_timeout_seconds
            wait = Wait("starting", seconds, EngineError, self._runtime.watch)
            wait.for_all(self._starting, "starting models beside")

    def served(self) -> dict[str, Served]:
        """Returns the models that reward functions ask, by name."""
        start_seconds = self._recipe.cluster.start_timeout_seconds
        return {
            name: ActorClassifier(actor, start_seconds)
            if model.kind == "classifier"
            else ActorEndpoint(actor, model.path, start_seconds)
            for name, model in self._recipe.reward.models.items()
            for actor in [self._actors[f"reward.models.{name}"]]
        }

    def teachers(self) -> dict[str, ActorEndpoint]:
        """Returns the teachers on servers of the run, by name."""
        start_seconds = self._recipe.cluster.start_timeout_seconds
        return {
            name: ActorEndpoint(self._actors[f"teachers.{name}"], model.path, start_seconds)
            for name, model in self._recipe.teachers.items()
            if isinstance(model, ServedTeacherConfig)
        }

    def close(self) -> None:
        """Ends the models and their servers."""
        models = self._recipe.models_beside
        served = {path for path, model in models.items() if not isinstance(model, ClassifierConfig)}
        end_actors([actor for path, actor in self._actors.items() if path in served], CLOSE_SECONDS)
        for path in self._actors.keys() - served:
            ray.kill(self._actors[path])


class ActorEndpoint:
    """An Endpoint (reward/judging/client.py), and a teacher, that sends requests to an actor's server."""

    def __init__(self, actor: Any, identity: str, start_seconds: float) -> None:
        self.identity, self._actor, self._start_seconds = identity, actor, start_seconds

    async def post(self, body: Mapping[str, Any], timeout_seconds: float) -> Reply:
        return await self._asked(self._actor.post.remote(body, timeout_seconds), timeout_seconds)

    async def score(self, tokens: np.ndarray, first: int, timeout_seconds: float) -> Reply:
        """Asks for the logprobs of tokens, as `scored`."""
        return await self._asked(self._actor.score.remote(tokens, first, timeout_seconds), timeout_seconds)

    async def _asked(self, answer: Any, timeout_seconds: float) -> Reply:
        limit = timeout_seconds + HEALTH_SECONDS + self._start_seconds
        return await _answer(answer, limit)  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Does nothing: the run ends the server."""


class ActorClassifier:
    """A ServedClassifier (reward/judging/classifier.py) that asks an actor."""

    def __init__(self, actor: Any, start_seconds: float) -> None:
        self._actor, self._start_seconds = actor, start_seconds

    async def labels(self) -> list[str]:
        return await _answer(self._actor.labels.remote(), self._start_seconds)  # type: ignore[no-any-return]

    async def logits(self, conversations: Sequence[Conversation]) -> list[list[float] | str]:
        limit = self._start_seconds + len(conversations)
        return await _answer(self._actor.logits.remote(conversations), limit)  # type: ignore[no-any-return]


async def _answer(answer: Any, limit_seconds: float) -> Any:
    """Waits for an actor's answer. Raises OSError if it died or raised, TimeoutError if it does not answer."""
    try:
        return await asyncio.wait_for(answer, limit_seconds)
    except RayError as failure:
        lines = str(failure).strip().splitlines()
        raise OSError(lines[-1 if isinstance(failure, RayTaskError) else 0]) from failure
