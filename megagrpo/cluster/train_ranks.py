"""All training ranks as one object: TrainRanks, and Policy for GRPO and PPO.

Every call has a deadline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import ray

from megagrpo.algorithm.ragged import Ragged, ragged_zeros
from megagrpo.batching.rank_batches import RankBatch
from megagrpo.cluster import lost_ranks
from megagrpo.cluster.actors import FILES, RankActor, ask
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.waiting import Wait
from megagrpo.errors import DIVERGED_FIX, CheckpointError, MegagrpoError, ModelError, Problem, RankError, RankLostError
from megagrpo.layout.parallel import rank_grid
from megagrpo.processes.store import StoreHost
from megagrpo.progress import progress
from megagrpo.recipe.defaults import run_directory
from megagrpo.recipe.schema import AnyRecipe

if TYPE_CHECKING:
    from megagrpo.checkpoint.store import SavedFile
    from megagrpo.rank_results import CriticMetrics, StepMetrics, TokenNumbers
    from megagrpo.weights.files.export import Export
    from megagrpo.weights.plan import WeightPlan


OF_MACHINES = (RuntimeError, OSError, MemoryError)
"""Errors of a rank by no fault of the code: torch's errors of memory, devices and lost peers are RuntimeErrors."""
FILE_GRACE_SECONDS = 60.0
"""Time for the other ranks to finish their files when one could not write its own."""
BROKEN_NAMED = 3
"""Most tensors that an error names of those that are not finite."""


ByToken = Literal["token_kl", "token_values", "token_energy", "token_teacher", "token_divergence", "token_agreement"]


class TrainRanks:
    """One actor per training rank. Ready once constructed."""

    def __init__(self, runtime: Runtime, recipe: AnyRecipe, model_directory: Path) -> None:
        self.step: int | None = None
        """The step that all ranks have finished in this process; None: none, or an update has begun."""
        self._timeout, self.watch = recipe.cluster.step_timeout_seconds, runtime.watch
        self._pulse = runtime.pulse
        self.device_type = runtime.device
        self._offload = list(recipe.train.offload)
        self._away: set[str] = set()
        layout = recipe.train.layout.parallel()
        self._data_rank = {f"train rank {at.rank}": at.data for at in rank_grid(layout)}
        # One of the last stage's ranks that hold the same tokens.
        last = [at for at in rank_grid(layout) if at.pipeline == layout.pipeline - 1 and at.tensor == 0]
        self._answering = [f"train rank {at.rank}" for at in last]
        self.places = runtime.places_of(runtime.devices.bundle_of_rank)
        self.actors: dict[str, Any] = {
            name: runtime.start(RankActor, [bundle], runtime.devices.rank_share)
            for name, bundle in zip(self._data_rank, runtime.devices.bundle_of_rank, strict=True)
        }
        starting, logs = recipe.cluster.start_timeout_seconds, run_directory(recipe).absolute() / "logs"
        self._processes: dict[str, lost_ranks.ProcessAt] = {}
        logging = {n: a.begin_log.remote(logs / f"{n.replace(' ', '_')}.log") for n, a in self.actors.items()}
        self._processes = self._wait(logging, "starting", starting, "starting training ranks")
        self._store = StoreHost(ray.util.get_node_ip_address())  # in which the ranks find each other
        started = {
            name: actor.start.remote(recipe, rank, self._store.address, str(model_directory), runtime.device)
            for rank, (name, actor) in enumerate(self.actors.items())
        }
        self._wait(started, "starting", starting, "loading the model in training ranks")

    @property
    def ranks(self) -> list[Any]:
        """Returns the actors by rank."""
        return list(self.actors.values())

    def close(self) -> None:
        """Kills all ranks: left alone, they would hold their devices' memory for seconds after the run."""
        for actor in self.actors.values():
            ray.kill(actor)

    def end_lost(self) -> None:
        """Kills all ranks, including those that are stopped or hang where Ray cannot end them."""
        self.close()
        lost_ranks.end_all(self._processes)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Limits the watch to nodes with ranks, inside the block: only their loss ends the run."""
        of_run = self.watch
        self.watch = of_run.of({place.node for place in self.places})
        self._pulse.names = self.watch.names
        try:
            yield
        finally:
            self.watch = of_run
            self._pulse.names = of_run.names

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of every rank with the same arguments. Returns and raises as `wait`."""
        return self.wait(method, [ask(actor, method, *arguments) for actor in self.ranks])

    def answer(self, method: str, *arguments: Any) -> Any:
        """Calls a method of every rank. Returns the answer of the one rank that has it. Raises as `wait`."""
        return next(answer for answer in self.call(method, *arguments) if answer is not None)

    def wait(self, doing: str, answers: Sequence[ray.ObjectRef[Any]]) -> list[Any]:
        """Returns the answers in the order of `actors`, within cluster.step_timeout_seconds. Raises RankError."""
        named = dict(zip(self.actors, answers, strict=True))
        return list(self._wait(named, doing, self._timeout).values())

    def memory_peak(self) -> int | None:
        """Returns the most bytes of tensors that torch has held at a time on a rank's GPU since `updating` began: the
        maximum over ranks; None on CPUs."""
        if self.device_type != "cuda":
            return None
        return max(self.wait("memory_peak", [rank.memory_peak.remote() for rank in self.ranks]))

    def load_batch(self, batches: Sequence[RankBatch]) -> None:
        """Hands each data rank its part of the step; ranks of one data rank read one shared object."""
        shared = [ray.put(batch) for batch in batches]
        ranks = self.actors.items()
        self.wait("load_batch", [ask(actor, "load_batch", shared[self._data_rank[name]]) for name, actor in ranks])

    def compute_teachers(self, batches: Mapping[str, Sequence[RankBatch] | None]) -> None:
        """Runs teachers' passes, as TrainRank.compute_teachers; all ranks read one shared object."""
        shared = ray.put(batches)
        self.wait("compute_teachers", [ask(actor, "compute_teachers", shared) for actor in self.ranks])

    def begin_profile(self, ranks: Sequence[int], memory: bool) -> None:
        """Starts a profile on each of these ranks."""
        names = [f"train rank {rank}" for rank in ranks]
        self._wait({n: self.actors[n].begin_profile.remote(memory) for n in names}, "profile", self._timeout)

    def end_profile(self, ranks: Sequence[int], directory: Path) -> list[str]:
        """Writes these ranks' profiles to files in `directory`. Returns the problems of those that failed."""
        names = [f"train rank {rank}" for rank in ranks]
        written = {name: self.actors[name].end_profile.remote(directory) for name in names}
        answers = self._wait(written, "writing a profile", self._timeout)
        return [f"{name}: {problem}" for name, problem in answers.items() if problem]

    def export(
        self, method: Literal["write_export", "copy_export"], export: Export, plan: WeightPlan, *adapters: bool
    ) -> None:
        """Writes every rank's boxes into an export's files (write_export: of the adapters, or of the model), or copies
        them to host memory for `write_copied_export` (copy_export). The sources of `plan` are the ranks' manifests."""
        shared, ranks = ray.put(plan), enumerate(self.ranks)
        self.wait("export", [ask(rank, method, export, shared, source, *adapters) for source, rank in ranks])

    def write_copied_export(self, export: Export) -> None:
        """Writes every rank's copied boxes, beside its other work. For any thread, as `write_snapshot`."""
        writing = [ask(actor, "write_copied_export", export, concurrency_group=FILES) for actor in self.ranks]
        self.wait_beside("export beside", writing)

    def write_snapshot(self, directory: Path) -> list[SavedFile]:
        """Writes every rank's copied state, beside its other work. Returns all files that were written.

        For any thread. When it raises, no rank writes any more, unless one has not answered at all.
        """
        beside: dict[str, Any] = {"concurrency_group": FILES, "num_returns": 2}
        answers = [ask(actor, "write_snapshot", directory, **beside) for actor in self.ranks]
        files = list(chain.from_iterable(self.wait_beside("save", [of_rank for of_rank, _ in answers])))
        contents = [of_rank for _, of_rank in answers]
        finishing = ask(self.ranks[0], "finish_snapshot", directory, *contents, concurrency_group=FILES)
        (last,) = self.wait_beside("end of a save", [finishing])
        return [*files, *last]

    def wait_beside(self, doing: str, answers: Sequence[ray.ObjectRef[Any]]) -> list[Any]:
        """Returns the first ranks' answers, for a thread beside the run's. Waits for all of them before it raises."""
        named, wait = dict(zip(self.actors, answers, strict=False)), Wait(doing, self._timeout, RankLostError, None)
        done, failed = wait.settle(named, FILE_GRACE_SECONDS)
        if failed:
            error = next((one for one in failed.values() if " died" in str(one)), next(iter(failed.values())))
            raise self.lost(error) if isinstance(error, RankLostError) else error
        return list(done.values())

    def begin(self, model: Path, saved: Path | None) -> None:
        """Loads the state of a checkpoint's rank directory if there is one. Raises ModelError, or CheckpointError for a
        saved one, if weights are not finite."""
        if saved is None:
            self._require_finite(str(model), ModelError, "download the model again, or take another")
        else:
            with progress("loading the checkpoint"):
                self.call("load", saved)
            self._require_finite(str(saved), CheckpointError, "remove this checkpoint: the run continues from another")

    @contextmanager
    def updating(self, step: int) -> Iterator[None]:
        """Encloses the update to the state of `step`, in its block. The loss of a node without ranks does not end it:
        half a step cannot be saved. Raises RankError if weights are not finite afterwards."""
        self.step = None
        with self.alone():
            try:
                if self.device_type == "cuda":
                    self.wait("begin_memory_peak", [rank.begin_memory_peak.remote() for rank in self.ranks])
                yield
            except RankError as error:
                first, *others = error.problems
                raise type(error)([replace(first, where=f"step {step}: {first.where}"), *others]) from error
            self._require_finite(f"step {step} has diverged", RankError, DIVERGED_FIX)
        self.step = step

    def _require_finite(self, where: str, error: type[MegagrpoError], fix: str) -> None:
        """Raises `error`, naming tensors, if weights are NaN, infinite, or so large that products overflow."""
        broken = dict(chain.from_iterable(of_rank.items() for of_rank in self.call("broken")))
        if broken:
            needed = "finite weights: nothing is saved, sent to an engine or sampled with these"
            left = len(broken) - BROKEN_NAMED
            named = sorted(broken)[:BROKEN_NAMED]
            problems = [Problem(f"{where}: {name}", broken[name], needed, fix) for name in named]
            raise error(problems + [Problem(f"{where}: {left} more tensors")] * (left > 0))

    @property
    def away(self) -> bool:
        """Returns whether some parts are in host memory."""
        return bool(self._away)

    def release(self, keep: Collection[str] = ()) -> None:
        """Moves the parts named in train.offload, except `keep`, to host memory, so that engines on the same devices
        have room. `released` and `needed` bring them back.
        """
        self._release([part for part in self._offload if part not in keep])

    @contextmanager
    def released(self) -> Iterator[None]:
        """Keeps the parts named in train.offload in host memory inside the block; none afterwards."""
        self.release()
        yield
        self._restore(list(self._away))

    @contextmanager
    def needed(self, parts: Collection[str] | None = None) -> Iterator[None]:
        """Keeps these parts (by default all) on the device inside the block; then moves them back."""
        away = [part for part in self._away if parts is None or part in parts]
        self._restore(away)
        yield
        self._release(away)

    def _release(self, parts: Sequence[str]) -> None:
        if parts:
            self._away |= set(parts)  # before the wait: ranks go on when it is given up; `_restore` undoes it
            self.call("release", parts)

    def _restore(self, parts: Sequence[str]) -> None:
        if parts:
            self.call("restore", parts)
            self._away -= set(parts)

    def _wait(
        self, answers: Mapping[str, ray.ObjectRef[Any]], doing: str, timeout_seconds: float, bar: str = ""
    ) -> dict[str, Any]:
        try:
            return Wait(doing, timeout_seconds, RankLostError, self.watch).for_all(answers, bar)
        except RankLostError as error:
            raise self.lost(error) from error

    def lost(self, error: MegagrpoError) -> RankError:
        """Returns the error to raise if a rank died, did not answer, or raised anything but a MegagrpoError."""
        if error.__cause__ is not None and not isinstance(error.__cause__, OF_MACHINES):
            return RankError(error.problems)
        return RankLostError([*error.problems, *lost_ranks.blamed_ranks(self._processes, self.watch.names)])


class Policy(TrainRanks):
    """The ranks of GRPO or PPO."""

    def by_token(self, method: ByToken, lengths: np.ndarray, absent: float = 0.0) -> Ragged:
        """Returns the ranks' numbers by response token: KL estimates against the reference, the critic's estimates
        of the return from that token on, before it was chosen, energies, or what concerns teachers.

        lengths: int64 [rows], response tokens of every sample of the step; those not loaded get `absent`.
        """
        return _together(self.call(method), lengths, absent)

    def update(self, advantages: np.ndarray | Ragged, lr: float, kl_coefficient: float, step: int) -> StepMetrics:
        """Trains on the loaded batch, in all minibatches and epochs.

        advantages: float [rows], or by response token. kl_coefficient: of the loss term. step: seeds random choices.
        """
        return self.answer("update", ray.put(advantages), lr, kl_coefficient, step)

    def token_figures(self, lengths: np.ndarray) -> tuple[Ragged, Ragged | None]:
        """Returns logprobs before the last update, and entropies as it first saw them (None: not computed), float32.

        lengths: int64 [rows], response tokens of the first samples of the step; those not loaded get zeros.
        """
        figures = {name: ask(self.actors[name], "token_figures", len(lengths)) for name in self._answering}
        logprobs, entropies = zip(*self._wait(figures, "token_figures", self._timeout).values(), strict=True)
        return _together(logprobs, lengths), _together(entropies, lengths) if any(entropies) else None

    def update_critic(self, returns: Ragged, lr: float) -> CriticMetrics:
        """Trains the critic, not the policy, on the loaded batch towards these returns: all minibatches and epochs."""
        return self.answer("update_critic", ray.put(returns), lr)


def _together(parts: Iterable[TokenNumbers | None], lengths: np.ndarray, absent: float = 0.0) -> Ragged:
    """Joins the ranks' numbers, float32; tokens that no rank has get `absent`."""
    ragged = ragged_zeros(lengths, np.float32)
    ragged.values.fill(absent)
    for part in parts:
        if part is not None:
            ragged.values[ragged.offsets[part.rows] + part.index] = part.values
    return ragged
