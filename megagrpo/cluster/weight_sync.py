"""New weights from the training ranks into the engines: planned once, verified by digest every time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any
from urllib.parse import urlsplit

import ray

from megagrpo.cluster.engines import ask_engine
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.train_ranks import Policy
from megagrpo.cluster.waiting import Wait
from megagrpo.errors import REPORT, EngineError, MegagrpoError, Problem, RankError, WeightSyncError
from megagrpo.processes.ports import own_address
from megagrpo.processes.store import LOOPBACK
from megagrpo.recipe.defaults import sync_directory
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.blocks import prepare
from megagrpo.weights.boxes import Box, Manifest, Topology, classes_of
from megagrpo.weights.digest import digest_problems, expected_digests
from megagrpo.weights.plan import make_plan
from megagrpo.weights.transport.buckets import bucket_problems
from megagrpo.weights.transport.choice import Channel, TransportName, choose_transport
from megagrpo.weights.transport.disk import remove_all, remove_older
from megagrpo.weights.transport.rendezvous import RendezvousHost
from megagrpo.weights.transport.shared_memory import remove_left_over

GRACE_SECONDS = 30.0
"""Time for all others to answer once a sync was given up; a process that does not answer counts as lost too."""
CLOSE_SECONDS = 10.0


def with_transport(recipe: Recipe, runtime: Runtime) -> Recipe:
    """Returns the recipe with the transport that `auto` means on these devices: training ranks set up their memory for
    it before they import torch. Raises RecipeError if the recipe names one that cannot work here."""
    if not recipe.rollout.kind.started_by_us:
        return recipe
    ranks = runtime.places_of(runtime.devices.bundle_of_rank)
    engines = runtime.places_of(chain.from_iterable(runtime.devices.bundles_of_engine))
    transport = choose_transport(recipe.weights.transfer, Topology(ranks, engines))
    weights = recipe.weights.model_copy(update={"transfer": transport.value})
    return recipe.model_copy(update={"weights": weights})


class WeightSync:
    """The weight plan between all ranks and all engines. Every engine was verified to hold `version`."""

    def __init__(self, policy: Policy, rollouts: Rollouts, recipe: Recipe, say: Callable[[str], None]) -> None:
        """Plans the sync. `say` takes a line for the user. Raises WeightPlanError, WeightSyncError or RecipeError."""
        self._policy, self._rollouts, self._recipe, self._say = policy, rollouts, recipe, say
        self.version = -1  # nothing is verified yet
        manifests = rollouts.engines.manifests()
        topology = Topology(policy.places, rollouts.engines.places())
        self.transport = choose_transport(recipe.transfer, topology)
        topology = replace(topology, two_hops=self.transport is TransportName.TWO_HOPS)
        served = sharing(list(chain(*manifests.values())))
        sources, preparation = prepare(sharing(policy.call("manifest")), served, topology.sources)
        self.plan = make_plan(sources, served, topology)
        self._bytes = sum(held.bytes for end in served for held in end.storages.values())
        self.received_bytes = 0
        """Bytes that all engines together received in the last sync."""
        self._verified: dict[str, Any] = {}
        """Actors of the engines that were verified to hold `version`."""
        self.verified_versions: set[int] = set()
        """Versions that an engine was verified to hold. A resumed run adds those of its samples (trainer/sampling)."""
        ends = accumulate(map(len, manifests.values()), initial=0)
        self._destinations = {name: tuple(range(*span)) for name, span in zip(manifests, pairwise(ends), strict=True)}
        self._host = RendezvousHost(_host(recipe.rollout.urls), recipe.weights.timeout_seconds)
        self._channel = Channel(self.transport, self._host.rendezvous, recipe.weights.bucket_bytes)
        self._shared_plan, prepared = ray.put(self.plan), ray.put(preparation)
        connecting = {
            name: actor.connect.remote(self._shared_plan, source, self._channel, prepared)
            for source, (name, actor) in enumerate(policy.actors.items())
        }
        self._connected: dict[str, Any] = {}
        """Actors of the engines whose receiving ends are open."""
        with ExitStack() as undoing:
            undoing.callback(self.close)  # for the ranks that did connect
            seconds = recipe.weights.timeout_seconds + GRACE_SECONDS
            Wait("planning weight sync", seconds, WeightSyncError, policy.watch).for_all(connecting)
            undoing.pop_all()
        rollouts.bring_back, rollouts.say = self.bring_back, say

    def sync(self, version: int, *, changed: bool = True) -> None:
        """Brings every engine to the policy's weights and calls them `version`.

        changed: whether they have changed since the last sync. If not, engines that all hold them still acknowledge the
        new version, and nothing is sent.
        An engine that fails is started again beside the others, and gets weights in a later sync; so do engines that
        have started again since the last sync. No engine samples before its update is committed. If all fail, the sync
        waits for the first that has started again, `weights.attempts` times.
        All parts in train.offload but the parameters are moved to host memory and stay there: engines on the same
        devices take their weights back before the cache.
        Raises RankError if a training rank fails; WeightSyncError, naming tensors, buckets and engines, if no engine
        can be brought to this version; EngineError if no engine starts.
        """
        self._policy.release(keep=["parameters"])
        kept = not changed and self._keep(version)
        self.received_bytes = 0 if kept else self._bytes
        if not kept:
            with self._policy.needed(["parameters"]):
                self._bring(version)
        self.version = version
        if self.transport is TransportName.DISK:
            remove_older(sync_directory(self._recipe), version)

    def bring_back(self) -> None:
        """Brings an engine that has restarted, when all are lost, to the version that the ranks hold. This is the next
        version if they have trained since the last sync. Raises as `sync` does."""
        version = max(self.version, self._policy.step or 0)
        with self._policy.needed(["parameters"]):
            self._bring(version)
        self.version = version

    def give_up(self) -> None:
        """Releases the training ranks from a sync whose result is not needed any more."""
        self._host.abort([Problem("weight sync given up", "the run was told to stop")])

    def check_replicas(self) -> None:
        """Raises WeightSyncError, naming tensors and ranks, if ranks that hold the same box hold different bytes."""
        answers = self._policy.wait("comparing replicas", [a.replica_digests.remote() for a in self._policy.ranks])
        if problems := replica_problems(dict(zip(self._policy.actors, answers, strict=True))):
            raise WeightSyncError(problems)

    def close(self) -> None:
        """Frees what the training ranks hold for the engines."""
        closing = {name: actor.disconnect.remote() for name, actor in self._policy.actors.items()}
        Wait("closing weight sync", CLOSE_SECONDS, RankError, watch=None).settle(closing)
        remove_left_over(self._host.rendezvous.run)
        if self.transport is TransportName.DISK:
            remove_all(sync_directory(self._recipe))

    def _keep(self, version: int) -> bool:
        """Makes the engines call the weights that they hold `version`. Returns False if not all can, as after a
        restart, or where their memory was given to training."""
        engines = self._rollouts.wait_for_engines()
        if engines != self._verified:
            return False
        self._rollouts.hold(engines)
        doing = f"weight sync: version {version} has the same weights"
        keeping = {name: ask_engine(actor, "keep_weights", version) for name, actor in engines.items()}
        failed = self._settle(keeping, doing)[1]
        self._rollouts.serve({name: actor for name, actor in engines.items() if name not in failed})
        if not failed:
            self.verified_versions.add(version)
        return not failed

    def _bring(self, version: int) -> None:
        self._verified = {}
        reasons: list[Problem] = []
        for _ in range(self._recipe.weights.attempts + 1):
            reasons = self._bring_those_up(version)
            if not reasons:
                return
        raise WeightSyncError(reasons)

    def _bring_those_up(self, version: int) -> list[Problem]:
        """Brings the engines that are up to `version`; restarts those that fail. Returns the reasons if all fail."""
        engines, reasons = self._connect(self._rollouts.wait_for_engines())
        retried: set[str] = set()
        brought, without_blame = False, 0
        while engines:
            failed, to_blame = self._attempt(version, engines)
            verified = {name: actor for name, actor in engines.items() if name not in failed}
            self._verified |= verified
            if verified:
                self.verified_versions.add(version)
            self._rollouts.serve(verified)
            brought |= len(failed) < len(engines)
            reasons = [problem for error in failed.values() for problem in error.problems]
            without_blame += bool(failed) and not to_blame
            if without_blame > self._recipe.weights.attempts:
                raise WeightSyncError(reasons)
            # An engine that answers may hold wrong bytes by chance: it is asked once more before it is restarted.
            wrong = {name for name in to_blame if isinstance(failed[name], WeightSyncError)}
            for name in to_blame:
                if name not in wrong - retried:
                    self._rollouts.lose(name, engines[name], failed[name])
                    del failed[name]
            retried |= wrong
            engines = {name: engines[name] for name in failed}
            if engines:
                self._say(f"weight sync to version {version}: {reasons[0].where}: {reasons[0].given}; trying again")
        return [] if brought else reasons

    def _attempt(self, version: int, engines: Mapping[str, Any]) -> tuple[dict[str, MegagrpoError], list[str]]:
        """Runs one attempt. Returns the errors of engines not at `version` afterwards, and the names to blame."""
        ranks = self._policy.actors
        destinations = list(chain(*(self._destinations[name] for name in engines)))
        self._rollouts.hold(engines)
        self._host.open(version, destinations)
        sending = {name: actor.send_weights.remote(version, destinations) for name, actor in ranks.items()}
        updating = {name: ask_engine(actor, "update", version) for name, actor in engines.items()}
        given_up: list[Problem] = []

        def give_up(reason: str) -> None:
            given_up.append(Problem("weight sync given up", reason))
            self._host.abort(given_up)

        doing = f"weight sync to version {version}"
        done, failed = self._settle(sending | updating, doing, GRACE_SECONDS, at_first_failure=give_up)
        for name, error in failed.items():
            if name in ranks and not isinstance(error, WeightSyncError):
                raise self._policy.lost(error) if isinstance(error, EngineError) else RankError(error.problems)
        if failed:
            first, reason = next(iter(failed.items()))
            echoes = (reason.problems, tuple(given_up))
            to_blame = [
                name for name in engines if name in failed and (name == first or failed[name].problems not in echoes)
            ]
            return {name: failed.get(name, WeightSyncError(reason.problems)) for name in engines}, to_blame
        expected = expected_digests(done[name] for name in ranks)
        verified = []
        for name in engines:
            if problems := self._digest_problems(name, engines[name], expected, done[name], destinations):
                failed[name] = WeightSyncError(problems)
            else:
                verified.append(name)
        committing = {name: ask_engine(engines[name], "commit_update", version) for name in verified}
        failed |= self._settle(committing, f"weight sync: commit of version {version}")[1]
        return failed, list(failed)

    def _settle(
        self, results: Mapping[str, ray.ObjectRef[Any]], doing: str, more_seconds: float = 0.0, **how: Any
    ) -> tuple[dict[str, Any], dict[str, MegagrpoError]]:
        """Returns results, and the errors of those that fail or do not answer in time, by name."""
        seconds = self._recipe.weights.timeout_seconds + more_seconds
        wait = Wait(doing, seconds, EngineError, self._policy.watch)
        return wait.settle(results, **{"grace_seconds": GRACE_SECONDS, **how})

    def _digest_problems(
        self,
        engine: str,
        actor: Any,
        expected: Mapping[int, Mapping[str, int]],
        arrived: Sequence[Mapping[str, int]],
        active: Sequence[int],
    ) -> list[Problem]:
        """Compares every tensor on every rank of an engine with the digests that the training ranks expect there.

        The first tensor that differs is compared bucket by bucket too, if the transport has buckets.
        """
        problems = []
        ranks = self._policy.actors
        for destination, held in zip(self._destinations[engine], arrived, strict=True):
            wanted = expected[destination]
            problems += digest_problems(self.plan.destinations[destination].holder, wanted, held)
            differing = sorted(name for name in wanted.keys() & held.keys() if wanted[name] != held[name])
            if not differing:
                continue
            tensor = differing[0]
            digests = {name: rank.bucket_digests.remote(tensor, active) for name, rank in ranks.items()}
            digests[engine] = ask_engine(actor, "bucket_digests", tensor, active)
            answers, failed = self._settle(digests, f"looking for the bucket of {tensor}", grace_seconds=0.0)
            if failed:  # the tensor is named already; the next attempt finds the process that failed
                continue
            sent = {label: digest for name in ranks for label, digest in answers[name].items()}
            for of_rank in answers[engine]:
                problems += bucket_problems(tensor, sent | of_rank["sent"], of_rank["arrived"])
        return problems

    def _connect(self, engines: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        """Opens the receiving ends of engines that have started since the last sync. Returns the engines that are left,
        and the problems of those lost. Raises an error that every start would meet again."""
        new = {name: actor for name, actor in engines.items() if self._connected.get(name) is not actor}
        if new and self._connected:
            # No process in the last sync may have noticed that they ended; connections to them must be made anew.
            self._host.abort([Problem(f"{', '.join(new)}: restarted")])
        connecting = {
            name: ask_engine(actor, "connect", self._shared_plan, self._destinations[name], self._channel)
            for name, actor in new.items()
        }
        failed = self._settle(connecting, "connecting", GRACE_SECONDS)[1]
        for name, error in failed.items():
            if not isinstance(error, EngineError):
                raise error
            self._rollouts.lose(name, engines[name], error)
        up = {name: actor for name, actor in engines.items() if name not in failed}
        self._connected |= up
        return up, [problem for error in failed.values() for problem in error.problems]


def _host(urls: Iterable[str]) -> str:
    """Returns this node's address for ranks and engines: external servers elsewhere do not reach loopback."""
    node = ray.util.get_node_ip_address()
    ways = [own_address(urlsplit(url).hostname or node) for url in urls] if node == LOOPBACK else []
    return next((way for way in ways if way != LOOPBACK), node)


def sharing(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Returns the same manifests, in which replicas share objects: each manifest came from its own process."""
    shared = list(manifests)
    for alike in classes_of(manifests):
        for index in alike.members:
            shared[index] = replace(alike.manifest, holder=manifests[index].holder)
    return shared


def replica_problems(digests: Mapping[str, Mapping[Box, int]]) -> list[Problem]:
    """Returns a problem for each box whose digest differs between its ranks. `digests` are by rank's name."""
    holders: dict[Box, dict[int, list[str]]] = {}
    for rank, by_box in digests.items():
        for box, digest in by_box.items():
            holders.setdefault(box, {}).setdefault(digest, []).append(rank)
    return [
        Problem(
            where=f"{box.tensor} from {box.start}, shape {box.shape}",
            given="; ".join(f"digest {digest:016x} on {', '.join(ranks)}" for digest, ranks in by_digest.items()),
            needed="the same bytes on every rank that holds it",
            fix=f"start again from the newest checkpoint; if it happens again: {REPORT}",
        )
        for box, by_digest in holders.items()
        if len(by_digest) > 1
    ]
