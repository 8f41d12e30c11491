"""The engines as the trainer sees them: prompts in, groups out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megagrpo.cluster.actors import EngineActor
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.waiting import call_all, wait_for
from megagrpo.errors import EngineError
from megagrpo.recipe.schema import Recipe
from megagrpo.rollout.generate import evaluation_sampling, groups_of, requests_for, rollout_sampling
from megagrpo.rollout.spread import assign
from megagrpo.types import Group, Prompt, Sample, SamplingParams
from megagrpo.weights.boxes import Manifest


class Rollouts:
    """One actor per engine. Created at once, ready after `wait_until_ready`."""

    def __init__(self, runtime: Runtime, recipe: Recipe, model_directory: Path, tokenizer_directory: Path) -> None:
        self._recipe = recipe
        engines = range(recipe.rollout.engines)
        self.actors: dict[str, Any] = {
            f"engine {index}": runtime.start_actor(
                EngineActor, runtime.devices.bundle_of_engine[index], runtime.devices.engine_share
            )
            for index in engines
        }
        threads = max(1, (os.cpu_count() or 1) // len(engines))
        self._starting = {
            name: actor.start.remote(
                recipe, index, str(model_directory), str(tokenizer_directory), runtime.device, threads
            )
            for index, (name, actor) in enumerate(self.actors.items())
        }

    def wait_until_ready(self) -> None:
        """Raises EngineError naming the engines that did not start in `cluster.start_timeout_seconds`."""
        wait_for(
            self._starting,
            doing="starting",
            timeout_seconds=self._recipe.cluster.start_timeout_seconds,
            error=EngineError,
        )

    def manifests(self) -> list[Manifest]:
        timeout = self._recipe.cluster.start_timeout_seconds
        return list(
            call_all(
                self.actors,
                lambda a: a.call.remote("manifest"),
                doing="manifest",
                timeout_seconds=timeout,
                error=EngineError,
            ).values()
        )

    def generate(self, prompts: Sequence[Prompt], step: int) -> list[Group]:
        """Training rollouts of step `step`, in the order of the prompts."""
        return self._generate(prompts, self._recipe.rollout.samples_per_prompt, rollout_sampling(self._recipe), step)

    def generate_for_evaluation(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Evaluation responses. The seeds are the same at every evaluation, so that only the weights differ."""
        return self._generate(prompts, self._recipe.eval.samples_per_prompt, evaluation_sampling(self._recipe), step=0)

    def _generate(self, prompts: Sequence[Prompt], per_prompt: int, sampling: SamplingParams, step: int) -> list[Group]:
        requests = requests_for(
            prompts, samples_per_prompt=per_prompt, sampling=sampling, recipe_seed=self._recipe.seed, step=step
        )
        shares = assign(requests, len(self.actors))
        answers = wait_for(
            {
                name: actor.call.remote("generate", [requests[i] for i in share])
                for (name, actor), share in zip(self.actors.items(), shares, strict=True)
                if share
            },
            doing="rollout",
            timeout_seconds=self._recipe.rollout.timeout_seconds,
            error=EngineError,
        )
        samples: dict[int, Sample] = {}
        for name, share in zip(self.actors, shares, strict=True):
            samples |= zip(share, answers.get(name, ()), strict=True)
        return groups_of(prompts, [samples[i] for i in range(len(requests))], per_prompt)
