"""The models of reward.models: an actor for each, on devices of its own, until the run ends.

A server that ends or does not answer is restarted, and so is an actor that dies. Requests that fail meanwhile are
retried, or masked and counted.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from megagrpo.cluster.actors import prepare_process
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.waiting import end_actors, wait_for
from megagrpo.errors import EngineError, MegagrpoError, Problem
from megagrpo.processes import importing
from megagrpo.recipe.defaults import run_directory
from megagrpo.recipe.schema import ClassifierConfig, EngineLayoutConfig, Recipe
from megagrpo.reward.executors import Served
from megagrpo.reward.judging.classifier import Conversation
from megagrpo.reward.judging.client import HttpEndpoint, Reply
from megagrpo.rollout.engine import Server, ServerSpec

if TYPE_CHECKING:  # torch follows prepare_process
    from megagrpo.cluster.classifier import Classifier

RESTARTS_MAX = 10
HEALTH_SECONDS = 60.0
"""Time to generate a token for a server that missed the deadline of a request, before it is restarted."""
RETRY_SECONDS = 60.0
"""Pause before a server that could not start is retried."""
CLOSE_SECONDS = 15.0
Gpus = Sequence[int | str]
"""The GPUs of a model, as its node names them."""


@ray.remote(max_restarts=RESTARTS_MAX, max_task_retries=1)
class ClassifierActor:
    """A classifier, which the driver asks. The first call to a new or restarted actor loads the model."""

    def __init__(self, recipe: Recipe, gpus: Gpus, name: str, directory: Path, device: str, dtype: str) -> None:
        prepare_process(device, recipe, gpus)
        self._config: Any = recipe.reward.models[name]
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
class JudgeActor:
    """A server on this node, and the requests to it: it listens on loopback alone."""

    def __init__(self, recipe: Recipe, gpus: Gpus, name: str, directory: Path, device: str, dtype: str) -> None:
        prepare_process(device, recipe, gpus)
        self._spec = judge_spec(recipe, name, directory, device, dtype)
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
                self._endpoint = HttpEndpoint(f"{self._server.url}/v1", self._server.api_key, 0, proxies=False)
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


def judge_spec(recipe: Recipe, name: str, directory: Path, device: str, dtype: str) -> ServerSpec:
    """Returns the spec of a judge's server on this node: an engine's, which keeps its weights and answers chats."""
    config: Any = recipe.reward.models[name]
    return ServerSpec(
        name=f"reward model {name}",
        log=(run_directory(recipe) / "logs" / f"reward_model_{name}.log").absolute(),
        settings=config.settings,
        model_directory=str(directory),
        layout=EngineLayoutConfig(tensor=config.devices),
        dtype=dtype,
        device=device,
        requests_at_once=config.requests_at_once,
        tokens_per_request=config.tokens_max,
        threads=max(1, (os.cpu_count() or 1) // 2),
        keeps_weights=True,
        chat_model=name,
    )


class RewardModels:
    """The actors of all models. The constructor starts them; they are ready after `wait_until_ready`."""

    def __init__(self, runtime: Runtime, recipe: Recipe, directories: Mapping[str, Path]) -> None:
        self._runtime, self._recipe = runtime, recipe
        self._actors: dict[str, Any] = {}
        for number, (name, config) in enumerate(recipe.reward.models.items()):
            bundles, directory = runtime.devices.bundles_of_model[number], directories[name].absolute()
            gpus = tuple(place.device for place in runtime.places_of(bundles) if place.device is not None)
            on_cpu = isinstance(config, ClassifierConfig) and config.device == "cpu"
            device = "cpu" if on_cpu else runtime.device
            dtype = config.dtype if config.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
            actor_class = ClassifierActor if isinstance(config, ClassifierConfig) else JudgeActor
            of_model = recipe, gpus, name, directory, device, dtype
            self._actors[name] = runtime.start(actor_class, bundles, 1.0, *of_model)
        self._starting = {f"reward model {name}": actor.ready.remote() for name, actor in self._actors.items()}

    def wait_until_ready(self) -> None:
        """Raises ModelError or EngineError naming the models that did not start in cluster.start_timeout_seconds."""
        if self._starting:
            seconds = self._recipe.cluster.start_timeout_seconds
            watch, bar = self._runtime.watch, "starting reward models"
            wait_for(self._starting, doing="starting", timeout_seconds=seconds, error=EngineError, watch=watch, bar=bar)

    def served(self) -> dict[str, Served]:
        """Returns the models that reward functions ask, by name."""
        start_seconds, models = self._recipe.cluster.start_timeout_seconds, self._recipe.reward.models
        return {
            name: ActorClassifier(actor, start_seconds)
            if models[name].kind == "classifier"
            else ActorEndpoint(actor, models[name].path, start_seconds)
            for name, actor in self._actors.items()
        }

    def close(self) -> None:
        """Ends the models and their servers."""
        judges = {name for name, model in self._recipe.reward.models.items() if model.kind == "generative"}
        end_actors([actor for name, actor in self._actors.items() if name in judges], CLOSE_SECONDS)
        for name in self._actors.keys() - judges:
            ray.kill(self._actors[name])


class ActorEndpoint:
    """An Endpoint (reward/judging/client.py) that sends requests to an actor's server."""

    def __init__(self, actor: Any, identity: str, start_seconds: float) -> None:
        self.identity, self._actor, self._start_seconds = identity, actor, start_seconds

    async def post(self, body: Mapping[str, Any], timeout_seconds: float) -> Reply:
        limit = timeout_seconds + HEALTH_SECONDS + self._start_seconds
        return await _answer(self._actor.post.remote(body, timeout_seconds), limit)  # type: ignore[no-any-return]

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
