"""New weights from the training ranks into the engines: planned once, verified by digest every time."""

from __future__ import annotations

from collections.abc import Mapping

import ray

from megagrpo.cluster.policy import Policy
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.cluster.waiting import wait_for
from megagrpo.errors import Problem, WeightSyncError
from megagrpo.weights.boxes import Box
from megagrpo.weights.digest import combine, primary_placements
from megagrpo.weights.plan import make_plan


class WeightSync:
    """The plan between all ranks and all engines. `version` is what every engine holds and has proven to hold."""

    def __init__(self, policy: Policy, rollouts: Rollouts, timeout_seconds: float) -> None:
        self._policy, self._rollouts, self._timeout = policy, rollouts, timeout_seconds
        self.version = -1  # nothing is proven yet
        sources, destinations = policy.manifests(), rollouts.manifests()
        self.plan = make_plan(sources, destinations)
        plan = ray.put(self.plan)
        primary = ray.put(primary_placements(sources))
        setting = {
            name: actor.set_plan.remote(plan, index, primary)
            for index, (name, actor) in enumerate(policy.actors.items())
        }
        setting |= {
            name: actor.set_plan.remote(plan, index) for index, (name, actor) in enumerate(rollouts.actors.items())
        }
        wait_for(setting, doing="planning weight sync", timeout_seconds=timeout_seconds, error=WeightSyncError)

    def sync(self, version: int) -> None:
        """Brings every engine to the policy's weights and calls them `version`.

        Raises WeightSyncError, naming tensors and engines, if any digest differs or anyone does not answer. No engine
        generates before its update is committed.
        """
        engines = len(self._rollouts.actors)
        packed = [
            actor.pack_weights.options(num_returns=engines).remote(engines) for actor in self._policy.actors.values()
        ]
        for_engine = [packed] if engines == 1 else list(zip(*packed, strict=True))
        wanted = {name: actor.weight_digests.remote() for name, actor in self._policy.actors.items()}
        arrived = {
            name: actor.update.remote(version, *buckets)
            for (name, actor), buckets in zip(self._rollouts.actors.items(), for_engine, strict=True)
        }
        answers = wait_for(wanted | arrived, doing="weight sync", timeout_seconds=self._timeout, error=WeightSyncError)
        expected = combine(answers[name] for name in wanted)
        problems = [problem for name in arrived for problem in digest_problems(name, expected, answers[name])]
        if problems:
            raise WeightSyncError(problems)
        wait_for(
            {name: actor.call.remote("commit_update", version) for name, actor in self._rollouts.actors.items()},
            doing="weight sync: commit",
            timeout_seconds=self._timeout,
            error=WeightSyncError,
        )
        self.version = version

    def check_replicas(self) -> None:
        """Raises WeightSyncError, naming tensors and ranks, if ranks that hold the same box hold different bytes."""
        answers = wait_for(
            {name: actor.replica_digests.remote() for name, actor in self._policy.actors.items()},
            doing="comparing replicas",
            timeout_seconds=self._timeout,
            error=WeightSyncError,
        )
        if problems := replica_problems(answers):
            raise WeightSyncError(problems)


def replica_problems(digests: Mapping[str, Mapping[Box, int]]) -> list[Problem]:
    """One problem for each box that several ranks hold and that has not the same digest on all. By rank's name."""
    holders: dict[Box, dict[int, list[str]]] = {}
    for rank, by_box in digests.items():
        for box, digest in by_box.items():
            holders.setdefault(box, {}).setdefault(digest, []).append(rank)
    return [
        Problem(
            where=f"{box.tensor} from {box.start}, shape {box.shape}",
            given="; ".join(f"digest {digest:016x} on {', '.join(ranks)}" for digest, ranks in by_digest.items()),
            needed="the same bytes on every rank that holds it",
            fix="the ranks have drifted apart: start again from the newest checkpoint, and report it",
        )
        for box, by_digest in holders.items()
        if len(by_digest) > 1
    ]


def digest_problems(engine: str, expected: Mapping[str, int], arrived: Mapping[str, int]) -> list[Problem]:
    """One problem for each tensor whose digest on `engine` is not the training ranks'."""
    return [
        Problem(
            where=f"{tensor} on {engine} after the sync",
            given=f"digest {arrived[tensor]:016x}" if tensor in arrived else "nothing",
            needed=f"digest {expected[tensor]:016x}, as on the training ranks"
            if tensor in expected
            else "no such tensor",
            fix="the bytes changed on the way, or a side places the tensor wrongly; this engine will not generate",
        )
        for tensor in sorted(expected.keys() | arrived.keys())
        if expected.get(tensor) != arrived.get(tensor)
    ]
