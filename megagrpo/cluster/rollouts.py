"""The engines as the trainer sees them: prompts in, groups out.

A thread collects samples and hands requests to engines with free slots. An engine that fails leaves: its requests go
elsewhere, and the next weight sync brings it back. If none is left, the thread that waits for samples brings them back.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from megagrpo.cluster.engines import EngineActor, EngineNodeActor, EngineSpec, visible_gpus
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.waiting import SLICE_SECONDS, answer_of, wait_for
from megagrpo.errors import EngineError, MegagrpoError, Problem
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.eval import EvalConfig
from megagrpo.recipe.schema.rollout import RolloutConfig
from megagrpo.rollout.engine import MemoryTag, SoFar
from megagrpo.rollout.pool import Order, Pool
from megagrpo.rollout.requests import groups_of, requests_for, sampling_of, training_requests
from megagrpo.types import Group, Prompt, Request, Sample, SamplingParams
from megagrpo.weights.boxes import Manifest, Place

END_SECONDS = 30.0
CLOSE_SECONDS = 5.0
"""Time for an engine that may be stuck to close its server and remove its files before it is killed."""

ABORT_MARGIN_SECONDS = 60.0
"""After rollout.timeout_seconds an engine aborts its requests, which takes up to 30 s, and sends its samples. If it
counted as dead earlier, a few long samples would cost all the others."""

ANSWER_SECONDS = 5.0
"""After which an engine without new samples says so. As often it says what its requests have so far."""
SILENT_SECONDS = 300.0
"""For an engine with requests and verified weights to sample a token."""
READ_SECONDS = 10.0
"""For what an engine's requests have so far to come from its node."""


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
        self.say: Callable[[str], None] = lambda line: None
        """Takes a line of text for the user. Set by the weight sync."""
        self.changed = threading.Condition()
        """Notified when an order is complete. Guards all that follows."""
        # The embedded engine samples batch after batch: what it has at once, it samples in batches of its own choice.
        self._pool = Pool(None if recipe.rollout.engine == "transformers" else recipe.rollout.requests_at_once)
        self.lost: dict[str, MegagrpoError] = {}
        """Engines that failed since the last sync, and why."""
        self._asked: dict[ray.ObjectRef[Any], str] = {}
        """Engines by their next answer."""
        self._so_far: dict[str, ray.ObjectRef[SoFar]] = {}
        """What each engine's requests had when it last said so: on its node, read only if it is needed."""
        self._next_so_far: dict[ray.ObjectRef[Any], ray.ObjectRef[SoFar]] = {}
        """What comes with an engine's next answer, by that."""
        self._heard: dict[str, float] = {}
        """When each last answered."""
        self._handed: dict[int, float] = {}
        """When each request was handed to an engine, by ticket."""
        self._idle, self._seconds, self._counted = 0.0, 0.0, 0.0
        """Seconds times the share of slots that sampled nothing; all seconds; until when. 0: no engine has served."""
        self._held = False
        self._failure: MegagrpoError | OSError | None = None
        self._closed = False
        self._collecting = threading.Thread(target=self._collect, name="collects samples", daemon=True)
        self._collecting.start()

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
        if not engines:
            return
        with self.changed:
            for engine in engines:
                self._leave(engine)
                self.lost.pop(engine, None)
        self._end(engines)
        self._starting = self._start(engines)
        self.wait_until_ready()
        self.actors = {name: self.actors[name] for name in self._index}

    def serve(self, engines: Iterable[str]) -> None:
        """These engines have the newest weights: they get requests, unless they were lost meanwhile."""
        with self.changed:
            for engine in engines:
                if engine in self.lost:
                    continue
                self._pool.join(engine)
                if engine not in self._asked.values():
                    self._ask(engine)
            self._hand_out()

    def give_up(self) -> None:
        """Ends all engines, whatever they do. They cannot be used afterwards."""
        self._stop_collecting()
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
        return self._groups(prompts, step, self._training)[0]

    def generate_with_greedy(self, prompts: Sequence[Prompt], step: int) -> tuple[list[Group], list[Group]]:
        """Training rollouts, and a group of one greedy response for each prompt, generated together."""
        per_prompt, sampling = self._training
        greedy = replace(sampling, temperature=0.0)
        sampled, likeliest = self._groups(prompts, step, (per_prompt, sampling), (1, greedy))
        return sampled, likeliest

    def generate_for_evaluation(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Evaluation responses. The seeds are the same at every evaluation, so that only the weights differ."""
        return self._groups(prompts, 0, self._asked_by(self._recipe.eval))[0]

    def release_memory(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> bool:
        """Frees the engines' memory for training on the same devices. Returns whether they can."""
        memory_saver = (self._recipe.rollout.sglang.model_extra or {}).get("enable_memory_saver")
        started = self._recipe.rollout.engine == "sglang" and bool(self.actors)
        can = started and memory_saver and self._recipe.cluster.placement == "colocated"
        if can:
            self._on_all("release_memory", lambda actor: actor.release_memory.remote(tags), without=self.lost)
        return bool(can)

    def order(self, prompt: Prompt, step: int, on_complete: Callable[[Order], None] = lambda order: None) -> Order:
        """Training rollouts of a prompt, with the seeds of a step; to be added."""
        return Order(training_requests(self._recipe, prompt, step), on_complete)

    def add(self, orders: Sequence[Order], *, first: bool = False) -> None:
        with self.changed:
            self._pool.add(orders, first=first)
            self._hand_out()

    def so_far(self) -> Callable[[], dict[tuple[Order, int], Sample]]:
        """A function that reads what each unfinished request has now, by its order and index: from the engines' nodes,
        at any later time, in any thread."""
        with self.changed:
            tickets = {number: ticket for running in self._pool.engines.values() for number, ticket in running.items()}
            requests = {number: ticket.request for number, ticket in tickets.items()}
            found = list(self._so_far.values())

        def read() -> dict[tuple[Order, int], Sample]:
            samples = read_so_far(found, requests)
            return {(tickets[number].order, tickets[number].index): sample for number, sample in samples.items()}

        return read

    def drop(self, orders: Sequence[Order]) -> None:
        """Takes orders back that are not added again."""
        with self.changed:
            for engine, tickets in self._pool.withdraw(orders).items():
                self.actors[engine].give_back.remote(tickets)

    def withdraw(self, orders: Sequence[Order]) -> None:
        """Takes orders back, with the tokens that were sampled of them. Raises as `wait` does."""
        self.drop(orders)
        self.wait(lambda: not self._pool.running(orders))

    def wait(self, until: Callable[[], bool]) -> None:
        """Returns once `until`, asked with `changed` held. Raises EngineError if no engine is left and none comes back,
        and what the run's watch raises."""
        while True:
            with self.changed:
                if self._failure is not None:
                    raise self._failure
                require_alive(self._collecting)
                if until():
                    return
                gone = dict(self.lost) if not self._pool.engines else {}
                if not gone:
                    self.changed.wait(SLICE_SECONDS)
            if gone:
                if self.bring_back is None:
                    raise EngineError(problem for error in gone.values() for problem in error.problems)
                self.bring_back(gone)
            self._runtime.watch.check()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside it engines get weights: what runs there waits for them, unless it is to finish first."""
        with self.changed:
            self._count_idle()
            self._held = self._recipe.pause != "finish"
        try:
            yield
        finally:
            with self.changed:
                self._count_idle()
                self._held = False

    def idle(self) -> tuple[float, float]:
        """Since the last call: seconds in which a slot sampled nothing, mean over all engines' slots; all seconds."""
        with self.changed:
            self._count_idle()
            counted = self._idle, self._seconds
            self._idle = self._seconds = 0.0
        return counted

    def close(self) -> None:
        """Ends the engines and the servers that they started: in up to 30 s, or 5 s for engines that still start."""
        self._stop_collecting()
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

    @property
    def _training(self) -> tuple[int, SamplingParams]:
        return self._asked_by(self._recipe.rollout)

    def _asked_by(self, section: RolloutConfig | EvalConfig) -> tuple[int, SamplingParams]:
        return section.samples_per_prompt, sampling_of(self._recipe, section)

    def _groups(self, prompts: Sequence[Prompt], step: int, *asked: tuple[int, SamplingParams]) -> list[list[Group]]:
        """The groups of all prompts for each (samples per prompt, sampling), generated together: all requests of a
        prompt are one order."""
        orders = [Order([]) for _ in prompts]
        first = 0
        for count, sampling in asked:
            requests = requests_for(
                prompts,
                samples_per_prompt=count,
                sampling=sampling,
                recipe_seed=self._recipe.seed,
                step=step,
                first_index=first,
            )
            for index, order in enumerate(orders):
                order.requests += requests[index * count : (index + 1) * count]
            first += count
        self.add(orders, first=True)  # a step waits for them, and for an evaluation: not for what is in the background
        self.wait(lambda: all(order.complete for order in orders))
        found, first = [], 0
        for count, _ in asked:
            samples = [sample for order in orders for sample in order.there()[first : first + count]]
            found.append(groups_of(prompts, samples, count))
            first += count
        return found

    # --- the thread that collects -------------------------------------------------------------------------------------

    def _collect(self) -> None:
        try:
            while not self._closed:
                self._collect_once()
        except (MegagrpoError, OSError) as error:
            self._failure = error

    def _collect_once(self) -> None:
        with self.changed:
            asked = list(self._asked)
        if not asked:
            time.sleep(SLICE_SECONDS)
            return
        ray.wait(asked, num_returns=1, timeout=SLICE_SECONDS)
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=0)
        for ref in ready:
            self._take(ref)
        with self.changed:
            self._lose_silent()

    def _take(self, ref: ray.ObjectRef[Any]) -> None:
        """An engine's answer: its samples, or why it failed."""
        with self.changed:
            engine, so_far = self._asked.pop(ref, None), self._next_so_far.pop(ref, None)
        if engine is None or self._closed:
            return
        try:
            answer = answer_of(ref, engine, "rollout", EngineError, None)
        except (OSError, MemoryError) as lack:
            answer = EngineError(Problem("rollout: this process cannot read samples", str(lack)))
        completed: list[Order] = []
        with self.changed:
            if engine not in self._pool.engines:
                return
            if isinstance(answer, MegagrpoError):
                self._lose(engine, answer)
            else:
                self._count_idle()
                completed = self._pool.answered(engine, answer.samples)
                for ticket in answer.samples:
                    self._handed.pop(ticket, None)
                if answer.reported and so_far is not None:
                    self._so_far[engine] = so_far
                if answer.silent_seconds > SILENT_SECONDS:
                    given, needed = f"no token for {answer.silent_seconds:.0f} s", f"one within {SILENT_SECONDS:g} s"
                    self._lose(engine, EngineError(Problem(f"rollout: {engine} hangs", given, needed)))
                else:
                    self._ask(engine)
            self._hand_out()
        for order in completed:
            order.on_complete(order)
        with self.changed:
            self.changed.notify_all()

    def _count_idle(self) -> None:
        now = time.monotonic()
        seconds, self._counted = now - (self._counted or now), now
        self._idle += seconds * (1.0 if self._held else self._pool.free_share)
        self._seconds += seconds

    def _ask(self, engine: str) -> None:
        self._heard[engine] = time.monotonic()
        answer, so_far = self.actors[engine].finished.remote(ANSWER_SECONDS)
        self._asked[answer], self._next_so_far[answer] = engine, so_far

    def _hand_out(self) -> None:
        self._count_idle()
        now = time.monotonic()
        for engine, requests in self._pool.hand_out().items():
            self.actors[engine].begin.remote(requests)
            self._handed |= dict.fromkeys(requests, now)

    def _lose_silent(self) -> None:
        """Engines that do not answer, or that have a request for longer than any may take, are lost."""
        now, longest = time.monotonic(), self._recipe.rollout.timeout_seconds + ABORT_MARGIN_SECONDS
        for engine, tickets in list(self._pool.engines.items()):
            silent = now - self._heard[engine]
            oldest = now - min((self._handed[ticket] for ticket in tickets), default=now)
            if silent > ANSWER_SECONDS + ABORT_MARGIN_SECONDS and not self._has_answered(engine):
                given = f"nothing after {silent:.0f} s"
                self._lose(engine, EngineError(Problem(f"rollout: no answer from {engine}", given, "samples")))
            elif oldest > longest:
                given = f"a request without a sample after {oldest:.0f} s"
                needed = f"one within {longest:g} s (rollout.timeout_seconds, and a minute)"
                self._lose(engine, EngineError(Problem(f"rollout: {engine}", given, needed)))

    def _has_answered(self, engine: str) -> bool:
        """Whether its answer is there, and this thread has not come to it yet."""
        asked = [ref for ref, other in self._asked.items() if other == engine]
        return bool(asked and ray.wait(asked, timeout=0)[0])

    def _lose(self, engine: str, error: MegagrpoError) -> None:
        self.lost[engine] = error
        self._leave(engine)
        self.say(f"{error.problems[0].where}: {error.problems[0].given}; {len(self._pool.engines)} engines are left")
        self._hand_out()
        self.changed.notify_all()

    def _leave(self, engine: str) -> None:
        self._asked = {ref: other for ref, other in self._asked.items() if other != engine}
        self._next_so_far = {ref: so_far for ref, so_far in self._next_so_far.items() if ref in self._asked}
        running = {number: ticket.request for number, ticket in self._pool.engines.get(engine, {}).items()}
        so_far = read_so_far([ref for ref in [self._so_far.pop(engine, None)] if ref], running)
        for ticket in self._pool.engines.get(engine, ()):
            self._handed.pop(ticket, None)
        try:
            self._pool.leave(engine, so_far)
        except EngineError as error:
            self._failure = error

    def _stop_collecting(self) -> None:
        self._closed = True
        with self.changed:
            self._pool.engines.clear()
        if self._collecting.is_alive():
            self._collecting.join(CLOSE_SECONDS)

    # --- actors -------------------------------------------------------------------------------------------------------

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

    def _on_all(self, doing: str, method: Callable[[Any], Any], without: Collection[str] = ()) -> dict[str, Any]:
        return wait_for(
            {name: method(actor) for name, actor in self.actors.items() if name not in without},
            doing=doing,
            timeout_seconds=self._recipe.cluster.start_timeout_seconds,
            error=EngineError,
            watch=self._runtime.watch,
        )


def read_so_far(found: Iterable[ray.ObjectRef[SoFar]], requests: Mapping[int, Request]) -> dict[int, Sample]:
    """What these requests have so far, by ticket. Nothing from a node that is lost, or too slow."""
    samples: dict[int, Sample] = {}
    for ref in found:
        with suppress(ray.exceptions.RayError, OSError, MemoryError):
            samples |= ray.get(ref, timeout=READ_SECONDS).samples(requests)
    return samples


def require_alive(thread: threading.Thread) -> None:
    """Raises EngineError if a thread of the run has ended by an error that it does not expect."""
    if not thread.is_alive():
        given = "it has ended: its traceback is in the output of this process"
        raise EngineError(Problem(f"the thread that {thread.name}", given, fix="report it"))
