"""The engines as the trainer sees them: prompts in, groups out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import ray

from megagrpo.cluster.engines import EngineActor, EngineNodeActor, EngineSpec, visible_gpus
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.waiting import settle, wait_for
from megagrpo.errors import EngineError, MegagrpoError
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.eval import EvalConfig
from megagrpo.recipe.schema.rollout import RolloutConfig
from megagrpo.rollout.engine import MemoryTag
from megagrpo.rollout.requests import assign, groups_of, requests_for, sampling_of
from megagrpo.types import Group, Prompt, Request, Sample, SamplingParams
from megagrpo.weights.boxes import Manifest, Place

END_SECONDS = 30.0
CLOSE_SECONDS = 5.0
"""Time for an engine that may be stuck to close its server and remove its files before it is killed."""

ABORT_MARGIN_SECONDS = 60.0
"""After rollout.timeout_seconds an engine aborts its requests, which takes up to 30 s, and sends its samples. If it
counted as dead earlier, a few long samples would cost all the others."""


class Rollouts:
    """One actor per engine. Created at once, ready after `wait_until_ready`."""

    def __init__(self, runtime: Runtime, recipe: Recipe, model_directory: Path, tokenizer_directory: Path) -> None:
        self._runtime, self._recipe = runtime, recipe
        self._directories = model_directory, tokenizer_directory
        self._index = {f"engine {index}": index for index in range(recipe.rollout.engines)}
        self.actors: dict[str, Any] = {}
        self._other_nodes: dict[str, list[Any]] = {}
        """Actors of engines on several nodes, on all but the first."""
        self._starting = self._start(self._index)
        self.bring_back: Callable[[Mapping[str, MegagrpoError]], None] | None = None
        """Restarts engines with the weights that the others have. Set by the weight sync."""

    @property
    def external(self) -> bool:
        """Whether the engines are servers that other programs run."""
        return self._recipe.rollout.engine == "external"

    def wait_until_ready(self) -> None:
        """Raises EngineError naming the engines that did not start in `cluster.start_timeout_seconds`."""
        timeout = self._recipe.cluster.start_timeout_seconds
        watch = self._runtime.watch
        wait_for(self._starting, doing="starting", timeout_seconds=timeout, error=EngineError, watch=watch)

    def restart(self, engines: Iterable[str]) -> None:
        """Ends these engines, whatever they do, and starts new ones in their place. Raises EngineError."""
        engines = list(engines)
        self._end(engines)
        self._starting = self._start(engines)
        self.wait_until_ready()
        self.actors = {name: self.actors[name] for name in self._index}

    def give_up(self) -> None:
        """Ends all engines, whatever they do. They cannot be used afterwards."""
        self._end(list(self.actors))

    def manifests(self) -> dict[str, list[Manifest]]:
        """What the ranks of each engine hold."""
        return self._on_all("manifests", lambda actor: actor.manifests.remote())

    def places(self) -> tuple[Place, ...]:
        """Node and device of every rank of every engine, in the order of `manifests`."""
        found: list[Place] = []
        for name, manifests in self.manifests().items():
            own = self._runtime.places_of_engine(self._index[name])
            found += own or [Place(name)] * len(manifests)
        return tuple(found)

    def visible_gpus(self) -> list[tuple[int | str, ...]]:
        """GPUs seen by the process of every rank of every engine that the run starts, in the order of `places`."""
        places = self._runtime.places
        on_node = (own for index in range(len(self._index)) for own in self._runtime.places_of_engine_by_node(index))
        return [visible_gpus(own, places) for own in on_node for _ in own]

    def generate(self, prompts: Sequence[Prompt], step: int) -> list[Group]:
        """Training rollouts of a step, in the order of the prompts."""
        return self._groups(prompts, step, self._asked(self._recipe.rollout))[0]

    def generate_with_greedy(self, prompts: Sequence[Prompt], step: int) -> tuple[list[Group], list[Group]]:
        """Training rollouts, and a group of one greedy response for each prompt, generated together."""
        per_prompt, sampling = self._asked(self._recipe.rollout)
        greedy = replace(sampling, temperature=0.0)
        sampled, likeliest = self._groups(prompts, step, (per_prompt, sampling), (1, greedy))
        return sampled, likeliest

    def generate_for_evaluation(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Evaluation responses. The seeds are the same at every evaluation, so that only the weights differ."""
        return self._groups(prompts, 0, self._asked(self._recipe.eval))[0]

    def release_memory(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> bool:
        """Frees the engines' memory for training on the same devices. Returns whether they can."""
        memory_saver = (self._recipe.rollout.sglang.model_extra or {}).get("enable_memory_saver")
        started = self._recipe.rollout.engine == "sglang" and bool(self.actors)
        can = started and memory_saver and self._recipe.cluster.placement == "colocated"
        if can:
            self._on_all("release_memory", lambda actor: actor.release_memory.remote(tags))
        return bool(can)

    def close(self) -> None:
        """Ends the engines and the servers that they started: in up to 30 s, or 5 s for engines that still start."""
        _, starting = ray.wait(list(self._starting.values()), num_returns=len(self._starting), timeout=0)
        self._end([name for name, start in self._starting.items() if start in starting and name in self.actors])
        self._end(list(self.actors), END_SECONDS)

    def _end(self, engines: Sequence[str], patience_seconds: float = CLOSE_SECONDS) -> None:
        """Asks these engines to close, and kills them."""
        ended = [self.actors.pop(name) for name in engines]
        ended += [actor for name in engines for actor in self._other_nodes.pop(name)]
        if not ended:
            return
        ray.wait([actor.close.remote() for actor in ended], num_returns=len(ended), timeout=patience_seconds)
        for actor in ended:
            ray.kill(actor)

    def _asked(self, section: RolloutConfig | EvalConfig) -> tuple[int, SamplingParams]:
        return section.samples_per_prompt, sampling_of(self._recipe, section)

    def _groups(self, prompts: Sequence[Prompt], step: int, *asked: tuple[int, SamplingParams]) -> list[list[Group]]:
        """The groups of all prompts for each (samples per prompt, sampling), generated together."""
        requests: list[Request] = []
        first = 0
        for count, sampling in asked:
            requests += requests_for(
                prompts,
                samples_per_prompt=count,
                sampling=sampling,
                recipe_seed=self._recipe.seed,
                step=step,
                first_index=first,
            )
            first += count
        shares = dict(zip(self.actors, assign(requests, len(self.actors)), strict=True))
        by_request = self._ask(requests, {name: share for name, share in shares.items() if share})
        samples = (by_request[i] for i in range(len(requests)))
        return [groups_of(prompts, list(islice(samples, count * len(prompts))), count) for count, _ in asked]

    def _ask(self, requests: Sequence[Request], shares: Mapping[str, Sequence[int]]) -> dict[int, Sample]:
        """Samples by index of their request. An engine that fails is brought back and asked again, once in a step."""
        samples: dict[int, Sample] = {}
        left = dict(shares)
        longest = self._recipe.rollout.timeout_seconds + ABORT_MARGIN_SECONDS
        for attempt in range(2):
            answers, failed = settle(
                {name: self.actors[name].generate.remote([requests[i] for i in share]) for name, share in left.items()},
                doing="rollout",
                timeout_seconds=longest,
                error=EngineError,
                watch=self._runtime.watch,
                grace_seconds=longest,
            )
            for name, answer in answers.items():
                samples |= zip(left[name], answer, strict=True)
            left = {name: left[name] for name in failed}
            if not left:
                break
            if attempt or self.bring_back is None:
                raise EngineError(problem for error in failed.values() for problem in error.problems)
            self.bring_back(failed)
        return samples

    def _start(self, engines: Iterable[str]) -> dict[str, ray.ObjectRef[None]]:
        starting = {}
        for name in engines:
            index = self._index[name]
            self.actors[name] = self._runtime.start_engine(EngineActor, index)
            nodes = range(1, self._runtime.devices.engine_nodes)
            others = [self._runtime.start_engine(EngineNodeActor, index, node) for node in nodes]
            for node, other in zip(nodes, others, strict=True):
                other.prepare.remote(self._spec(index, node))
            self._other_nodes[name] = others
            starting[name] = self.actors[name].start.remote(self._spec(index), others)
        return starting

    def _spec(self, index: int, node: int = 0) -> EngineSpec:
        model, tokenizer = self._directories
        on_nodes = self._runtime.places_of_engine_by_node(index)
        return EngineSpec(
            recipe=self._recipe,
            index=index,
            model_directory=str(model),
            tokenizer_directory=str(tokenizer),
            device=self._runtime.device,
            gpus=visible_gpus(on_nodes[node] if on_nodes else (), self._runtime.places),
            api_key=os.environ.get(self._recipe.rollout.api_key_variable or ""),
        )

    def _on_all(self, doing: str, method: Callable[[Any], Any]) -> dict[str, Any]:
        return wait_for(
            {name: method(actor) for name, actor in self.actors.items()},
            doing=doing,
            timeout_seconds=self._recipe.cluster.start_timeout_seconds,
            error=EngineError,
            watch=self._runtime.watch,
        )
