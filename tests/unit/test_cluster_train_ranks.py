"""Parts of training ranks on the device, and engines' memory there, at every moment of a run."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megagrpo.algorithm.ragged import Ragged
from megagrpo.cluster.train_ranks import Policy
from megagrpo.cluster.waiting import NodeWatch
from megagrpo.cluster.weight_sync import WeightSync
from megagrpo.trainer import step, train
from megagrpo.types import Group, Prompt
from megagrpo.weights.transport.choice import TransportName
from tests import step_fakes
from tests.step_fakes import FakePolicy, make_run

PARTS: Any = ("parameters", "gradients", "optimizer")


class Device:
    """A GPU with a training rank and an engine, too small for more than the engine and the parameters."""

    def __init__(self) -> None:
        self.policy: set[str] = set(PARTS)
        self.engine: set[str] = set()

    def call(self, method: str, parts: Sequence[str] = ()) -> None:
        if method == "broken":
            return
        self.policy = self.policy - set(parts) if method == "release" else self.policy | set(parts)
        assert "cache" not in self.engine or not self.policy
        assert not self.engine or self.policy <= {"parameters"}


class OnDevice(Policy):
    """Ranks of a few lines, driven by the real driver."""

    def __init__(self, device: Device) -> None:
        self._offload, self._away, self.device = [*PARTS], set(), device
        self.updates = FakePolicy()
        self.places, self._pulse, self.watch = (), SimpleNamespace(), NodeWatch({})
        self.device_type = "cpu"
        named = SimpleNamespace(remote=device.call)
        self.actors = {"train rank 0": SimpleNamespace(call=SimpleNamespace(options=lambda name: named))}

    def wait(self, doing: str, answers: Sequence[Any]) -> list[Any]:
        return []

    def update(self, *arguments: Any) -> Any:
        assert self.device.policy == set(PARTS)
        return self.updates.update(*arguments)

    def token_figures(self, lengths: np.ndarray) -> tuple[Ragged, Ragged | None]:
        return self.updates.token_figures(lengths)

    def load_batch(self, batches: Any) -> None:
        pass


class Sync(WeightSync):
    def __init__(self, policy: OnDevice, run: Any) -> None:
        self._policy, self._rollouts, self.version = policy, run.rollouts, 0
        self.transport = TransportName.SHARED_MEMORY
        self._device = policy.device
        self.brought, self._bytes, self.verified_versions = list[int](), 0, {0}

    def _bring(self, version: int) -> None:
        assert "parameters" in self._device.policy
        self._device.engine |= {"weights"}
        self.brought.append(version)

    def check_replicas(self) -> None:
        assert "parameters" in self._device.policy


def test_engines_and_training_never_need_more_than_a_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(
        "train.total_steps=3", "eval.every_steps=1", "checkpoint.every_steps=2", scores=lambda _: [0, 1, 0, 1]
    )
    device = Device()
    policy = OnDevice(device)
    run.__dict__.update(policy=policy, weights=Sync(policy, run), total_steps=3)
    generate = run.rollouts.generate
    saved = []

    def generate_on_device(prompts: list[Prompt], step: int) -> list[Group]:
        assert "weights" in device.engine, "an engine that was released generates only after a sync"
        device.engine.add("cache")
        assert not device.policy
        return generate(prompts, step)

    def release_memory() -> bool:
        device.engine.clear()
        return True

    def save(state: Any) -> None:
        assert device.policy == set(PARTS)
        saved.append(state.step)

    run.rollouts.generate, run.rollouts.release_memory = generate_on_device, release_memory
    monkeypatch.setattr(train, "report_mismatch", lambda *given: None)
    for module in (step, train):
        monkeypatch.setattr(module, "require_version", lambda *given: None)
    run.weights.sync(0)
    nothing = lambda *given: None  # noqa: E731
    tracker: Any = SimpleNamespace(
        log=nothing, rollouts=nothing, evaluated=nothing, say=nothing, confirm=nothing, run_ids={}
    )
    assert step_fakes.run_loop(run, tracker, save).step == 3
    assert saved == [2, 3]
    assert run.weights.brought == [0, 1, 2, 2, 3], "again after a save in their place, but not after the last step"
