"""All training ranks as one object, whatever they train for. Every call has a deadline."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray

from megagrpo.batching.microbatch import RankBatch
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.waiting import call_all, wait_for
from megagrpo.errors import RankError
from megagrpo.layout.parallel import rank_grid
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.topology import Place

if TYPE_CHECKING:
    from megagrpo.weights.files.export import Export
    from megagrpo.weights.plan import WeightPlan


class TrainRanks:
    """One actor per training rank. Ready once constructed."""

    actor_class: ClassVar[Any]  # decorated by ray.remote

    def __init__(self, runtime: Runtime, recipe: AnyRecipe, model_directory: Path) -> None:
        self._timeout, self.watch = recipe.cluster.step_timeout_seconds, runtime.watch
        self._offload = list(recipe.train.offload)
        self._away: set[str] = set()
        self._data_rank = {f"train rank {at.rank}": at.data for at in rank_grid(recipe.train.layout.parallel())}
        self._places = tuple(runtime.place_of_rank(rank) for rank in range(len(self._data_rank)))
        self.actors: dict[str, Any] = {
            name: runtime.start_rank(self.actor_class, rank) for rank, name in enumerate(self._data_rank)
        }
        first = next(iter(self.actors))
        address = wait_for(
            {first: self.actors[first].free_address.remote()},
            doing="starting",
            timeout_seconds=recipe.cluster.start_timeout_seconds,
            error=RankError,
            watch=self.watch,
        )[first]
        wait_for(
            {
                name: actor.start.remote(recipe, rank, address, str(model_directory), runtime.device)
                for rank, (name, actor) in enumerate(self.actors.items())
            },
            doing="starting",
            timeout_seconds=recipe.cluster.start_timeout_seconds,
            error=RankError,
            watch=self.watch,
        )

    def close(self) -> None:
        """Ends all ranks at once: left to themselves they take seconds, and their devices' memory, beyond the run."""
        for actor in self.actors.values():
            ray.kill(actor)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of every rank with the same arguments; results by rank. Raises RankError."""
        results = call_all(
            self.actors,
            lambda actor: actor.call.remote(method, *arguments),
            doing=method,
            timeout_seconds=self._timeout,
            error=RankError,
            watch=self.watch,
        )
        return [results[name] for name in self.actors]

    def manifests(self) -> list[Manifest]:
        return self.call("manifest")

    def places(self) -> tuple[Place, ...]:
        return self._places

    def write_export(self, export: Export, plan: WeightPlan) -> None:
        """Every rank writes its boxes into a Hugging Face export's files. `plan`'s sources are the ranks, in order."""
        self._write("write_export", export, plan)

    def adapter_manifests(self) -> list[Manifest]:
        return self.call("adapter_manifest")

    def write_adapter_export(self, export: Export, plan: WeightPlan) -> None:
        """The same for a PEFT export's file, with a plan from adapter_manifests."""
        self._write("write_adapter_export", export, plan)

    def _write(self, method: str, export: Export, plan: WeightPlan) -> None:
        shared = ray.put(plan)
        wait_for(
            {
                name: actor.call.remote(method, export, shared, rank)
                for rank, (name, actor) in enumerate(self.actors.items())
            },
            doing="export",
            timeout_seconds=self._timeout,
            error=RankError,
            watch=self.watch,
        )

    def load_batch(self, batches: Sequence[RankBatch]) -> None:
        """Hands each data rank its part of the step; ranks of one data rank read one shared object."""
        shared = [ray.put(batch) for batch in batches]
        wait_for(
            {
                name: actor.call.remote("load_batch", shared[self._data_rank[name]])
                for name, actor in self.actors.items()
            },
            doing="load_batch",
            timeout_seconds=self._timeout,
            error=RankError,
            watch=self.watch,
        )

    @property
    def away(self) -> bool:
        """Whether some parts are in host memory."""
        return bool(self._away)

    def release(self, keep: Collection[str] = ()) -> None:
        """Moves the parts named in train.offload to host memory, but those to keep: engines on the same devices then
        have room. They stay there until `restore`."""
        self._release([part for part in self._offload if part not in keep])

    def restore(self) -> None:
        """Brings back whatever is in host memory."""
        self._restore(list(self._away))

    @contextmanager
    def released(self) -> Iterator[None]:
        """Inside it, the parts named in train.offload are in host memory; afterwards nothing is."""
        self.release()
        yield
        self.restore()

    @contextmanager
    def needed(self, parts: Collection[str] | None = None) -> Iterator[None]:
        """Inside it, these parts (all of them, by default) are where they can be used; afterwards where they were."""
        away = [part for part in self._away if parts is None or part in parts]
        self._restore(away)
        yield
        self._release(away)

    def _release(self, parts: Sequence[str]) -> None:
        if parts:
            self._away |= set(parts)  # also if the wait is given up: it goes on, and is undone by a restore after it
            self.call("release", parts)

    def _restore(self, parts: Sequence[str]) -> None:
        if parts:
            self.call("restore", parts)
            self._away -= set(parts)
