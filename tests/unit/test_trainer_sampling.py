"""Groups in the background, over engines that sample while a run waits: what a checkpoint keeps of them, which prompts
begin, and a replay of their schedule."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megagrpo.checkpoint.groups import PENDING, Pending, pending_of, write_pending
from megagrpo.data.cursor import Cursor
from megagrpo.errors import UnusableCheckpointError
from megagrpo.recipe.schema import Recipe
from megagrpo.rollout.pool import Order
from megagrpo.rollout.requests import after_begun, training_order
from megagrpo.track.jsonl import SCHEDULE_FILE
from megagrpo.trainer.batches import Sampled
from megagrpo.trainer.sampling import OF_CUT_AGENTS, Background
from megagrpo.trainer.schedule import grpo_step
from megagrpo.trainer.schedule_log import Logged, read_schedule, schedule_line
from megagrpo.trainer.step import baselines_of
from megagrpo.types import Group, Prompt, Request, Sample
from tests.step_fakes import FakeScorer, checkpoint_of, make_run, number
from tests.tiny_run import recipe_with
from tests.unit.test_checkpoint_groups import comparable

STEPS = 5
REMAX = "algorithm.advantage.name=remax"
GIVEN = (
    "algorithm.distillation={objective: full_vocabulary, given_responses: {share: 0.2, column: answer}}; "
    "teachers={a: {kind: ranks, path: x}}; rollout.dynamic_sampling={}"
)
ASYNC = ("cluster.placement=disaggregated", "schedule=async", "rollout.response_tokens_max=24")


class Engines:
    """They sample three tokens of every request whenever a run waits for more than scores. A token follows from the
    request's seed, its place and the weights' version, its logprob also from how many tokens were read before those
    that were sampled. Sample 3 of a prompt whose number divides by 3 is given up after 4 tokens."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self.version = recipe, 0
        self.scores_lack: Callable[[], bool] = lambda: False
        self._read: dict[tuple[Order, int], tuple[int, int]] = {}
        """Version that samples a request, and how many of its tokens it has read."""
        self.changed = threading.Condition()
        self.serving = 1
        self.orders: list[Order] = []

    def order(self, prompt: Prompt, step: int, on_complete: Callable[[Order], None] = lambda order: None) -> Order:
        return training_order(self._recipe, prompt, step, on_complete)

    def add(self, orders: Sequence[Order]) -> None:
        self.orders += orders

    def wait(self, until: Callable[[], bool]) -> None:
        while True:
            with self.changed:
                if until():
                    return
                if not self.scores_lack():
                    self.work()
            time.sleep(0.001)

    def work(self) -> None:
        for order in self.orders:
            for index, request in enumerate(order.requests):
                if index not in order.samples:
                    begun = len(request.begun.tokens) if request.begun else 0
                    if self._read.get((order, index), (-1, 0))[0] != self.version:
                        self._read[order, index] = self.version, begun
                    sample = self._sampled(request, begun, self._read[order, index][1])
                    if sample.finish == "abort" and not self._gives_up(sample):
                        order.requests[index] = replace(request, begun=sample)
                    else:
                        order.samples[index] = sample
        complete = [order for order in self.orders if order.complete]
        self.orders = [order for order in self.orders if not order.complete]
        for order in complete:
            order.on_complete(order)

    def lose(self) -> None:
        """All engines end, and others go on with what they have sampled."""
        self._read.clear()
        for order in self.orders:
            for index in order.missing():
                if begun := order.requests[index].begun:
                    order.resume_after(index, begun)

    def _sampled(self, request: Request, begun: int, read: int) -> Sample:
        tokens: list[int] = []
        while len(tokens) < min(3, request.tokens_left) and 0 not in tokens:
            tokens.append((request.seed + 31 * (begun + len(tokens)) + 7 * self.version) % 11)
        new = np.array(tokens, np.int32)
        ended = "length" if begun + len(tokens) == request.sampling.max_tokens else "abort"
        return after_begun(
            request,
            Sample(
                request.prompt_id,
                request.index,
                new,
                np.float32(-0.01 * read) - new.astype(np.float32),
                np.full_like(new, self.version),
                "stop" if 0 in tokens else ended,
                "",
            ),
        )

    def _gives_up(self, sample: Sample) -> bool:
        prompt = int(sample.prompt_id[1:].partition("+")[0])
        return sample.index == 3 and prompt % 3 == 0 and len(sample.tokens) >= 4

    def withdraw(self, orders: Sequence[Order]) -> None:
        self.orders = [order for order in self.orders if order not in orders]

    def drop(self, orders: Sequence[Order]) -> None:
        self.withdraw(orders)

    def drain(self) -> None:
        pass

    def so_far(self) -> Callable[[], dict[tuple[Order, int], Sample]]:
        return dict  # orders have it

    def idle(self) -> tuple[float, float]:
        return 0.0, 1.0

    release_memory = drain


def sample_of(request: Request) -> Sample:
    none = np.zeros(0, np.int32)
    return Sample(request.prompt_id, request.index, none, none.astype(np.float32), none, "stop", "")


def test_over_sampling_throws_away_what_is_late_and_says_what_that_does_to_lengths() -> None:
    """Also what is complete, and what is being scored, when the step has its groups."""
    entered, go_on = threading.Event(), threading.Event()

    def slowly(groups: Sequence[Group]) -> list[Group]:
        entered.set()
        assert go_on.wait(60)
        return quickly(groups)

    recipe = recipe_with("schedule={kind: sync, oversample: 6}", "rollout.response_tokens_max=24")
    per_step, samples = recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt
    biases, seen = [], set()
    with in_background(recipe) as run:
        quickly = run.scorer.score
        for step in range(1, STEPS):
            run.sampling.resume()
            taken = run.sampling.take(then_pause=True)
            late = list(run.rollouts.orders)
            run.sampling.pause()
            if late:
                for request in late[0].requests:
                    late[0].samples[request.index] = after_begun(request, sample_of(request))
                run.scorer.score = slowly
                late[0].on_complete(late[0])
                assert entered.wait(60)
            cut = run.sampling.cut(taken)
            for order in late:
                order.on_complete(order)
            run.scorer.score = quickly
            go_on.set()
            lengths = [len(sample.tokens) for group in cut.groups for sample in group.samples]
            assert len(cut.groups) == per_step
            assert cut.metrics["cut/samples"] == 6 * samples
            assert cut.metrics["cut/trained_tokens_mean"] == pytest.approx(np.mean(lengths))
            biases.append(cut.metrics["cut/bias"])
            ids = {group.prompt.id for group in cut.groups}
            assert not ids & seen
            seen |= ids
            assert not run.sampling.pending().numbers
            run.rollouts.version = step
            run.sampling.advance(step)
    assert max(biases) > 0.0


def test_of_rollouts_of_agents_that_were_cut_no_lengths_are_reported():
    agent = {"agent.function": "agent.py:rollout", "agent.tokens_max": 64}
    overrides = [f"{name}={value}" for name, value in agent.items()]
    with in_background(recipe_with("schedule={kind: sync, oversample: 6}", *overrides)) as run:
        run.sampling.resume()
        taken = run.sampling.take(then_pause=True)
        run.sampling.pause()
        metrics = run.sampling.cut(taken).metrics
    assert metrics["cut/samples"] > 0
    assert {name for name in metrics if name.startswith("cut/")} == set(OF_CUT_AGENTS)
    with in_background(recipe_with(*ASYNC)) as run:
        assert not [name for taken in trained(run, [1]) for name in taken.metrics if name.startswith("cut/")]


def odd(group: Group) -> bool:
    return number(group.prompt) % 2 == 1


@contextmanager
def in_background(recipe: Recipe, pending: Pending | None = None, step: int = 0) -> Iterator[SimpleNamespace]:
    """With dynamic sampling, groups of odd prompts teach something."""
    data = [Prompt(f"p{i}", (i + 1,), "sums", "2", extra_info={"answer": "4"}, given=(4, 0)) for i in range(40)]
    engines, cursor = Engines(recipe), Cursor(data, seed=0, shuffle=False)
    if pending:
        cursor.restore(pending.cursor)
    engines.version = step
    alike = recipe.rollout.dynamic_sampling is not None

    def scores(prompt: int) -> tuple[float, ...]:
        return (0.0,) * 4 if alike and prompt % 2 == 0 else (0.0, 0.0, 1.0, prompt)

    run: Any = replace(
        make_run(scores=lambda prompt: ()),
        recipe=recipe,
        total_steps=STEPS,
        cursor=cursor,
        rollouts=engines,
        scorer=FakeScorer(scores, lambda prompt: 0.5, None),
        weights=SimpleNamespace(
            sync=lambda version, changed: setattr(engines, "version", version),
            received_bytes=0,
            verified_versions={step},
        ),
    )
    sampling = Background(run, step, pending)
    whole = recipe.rollout.samples_per_prompt + recipe.algorithm.greedy_responses

    def scores_lack() -> bool:
        groups = [group for group in sampling.pending().groups if not group.scores]
        return any(group.given or len(group.samples) == whole for group in groups)

    engines.scores_lack = scores_lack
    try:
        yield SimpleNamespace(**vars(run), run=run, sampling=sampling)
    finally:
        sampling.close()


def trained(run: SimpleNamespace, steps: Iterable[int]) -> list[Sampled]:
    """Weights change, and engines are lost, in the middle of responses, whatever the threads' speed."""
    found = []
    for step in steps:
        run.sampling.resume()
        found.append(run.sampling.take())
        with run.rollouts.changed:
            run.rollouts.work()
            if step % 2:
                run.rollouts.lose()
                run.rollouts.work()
        run.rollouts.version = step
        run.sampling.advance(step)
    return found


def written(pending: Pending, directory: Path) -> Pending:
    """Returns the pending groups as a checkpoint gives them back."""
    write_pending(directory / PENDING, pending)
    checkpoint: Any = checkpoint_of(SimpleNamespace(step=1))  # type: ignore[arg-type]
    checkpoint.rank_directory = directory
    restored = pending_of(checkpoint)
    assert restored is not None
    return restored


@pytest.mark.parametrize("given", ["rollout.dynamic_sampling={}", REMAX, GIVEN])
def test_a_replay_samples_each_token_with_the_weights_that_its_run_sampled_it_with(given: str, tmp_path: Path) -> None:
    recipe, remax = recipe_with(*ASYNC, *given.split("; ")), given == REMAX
    with in_background(recipe) as run:
        steps = trained(run, [1, 2, 3])
        with run.rollouts.changed:
            run.rollouts.work()
        pending = written(run.sampling.pending(), tmp_path)
    with in_background(recipe, pending, step=3) as run:
        steps += trained(run, [4, 5])
    lines = [json.dumps(schedule_line(step, sampled)) for step, sampled in enumerate(steps, start=1)]
    (tmp_path / SCHEDULE_FILE).write_text("\n".join(lines) + "\n" + lines[0][:-9])
    said: list[str] = []
    with in_background(recipe) as again:
        logged = Logged(again.run, read_schedule(tmp_path, recipe), said.append)
        for step, sampled in enumerate(steps, start=1):
            again.rollouts.version = step - 1
            found = logged.sample(step)
            assert comparable(found.groups) == comparable(sampled.groups)
            assert comparable(found.all) == comparable(sampled.all)
            assert np.isfinite(baselines_of(found.groups)).all() == remax
            assert json.dumps(schedule_line(step, found)) == lines[step - 1]
            assert found.metrics.items() <= sampled.metrics.items()
    assert not said
    given_groups = [group for sampled in steps for group in sampled.groups if group.given]
    assert {len(group.samples) for group in given_groups} == ({1} if given == GIVEN else set())
    with in_background(recipe) as again:
        again.rollouts.version = 1  # other weights
        Logged(again.run, read_schedule(tmp_path, recipe), said.append).sample(1)
    # The first step takes what is complete first: given responses.
    assert ["responses have other lengths" in line for line in said] == [True] * (given != GIVEN)
    samples = [sample for sampled in steps for group in sampled.all for sample in group.samples]
    assert any(len(set(sample.versions.tolist())) > 1 for sample in samples)
    assert any(sample.finish == "abort" for sample in samples)
    groups = [group for line in lines for group in json.loads(line)["groups"]]
    joined = [a[0] == b[0] for group in groups for each in group["samples"] for a, b in pairwise(each)]
    assert any(joined), "a response went on with the same weights"
    dropped = any(len(sampled.all) > len(sampled.groups) for sampled in steps)
    assert dropped == (given == "rollout.dynamic_sampling={}"), "groups with a teacher teach"

    with pytest.raises(UnusableCheckpointError, match="responses to a prompt"):
        read_schedule(tmp_path, recipe_with("rollout.samples_per_prompt=8"))
    (tmp_path / SCHEDULE_FILE).write_text("\n".join(lines[2:]) + "\n")
    with pytest.raises(UnusableCheckpointError, match="no steps 1 to 2"):
        read_schedule(tmp_path, recipe)


@pytest.mark.parametrize("shares", [("0.2", "1.0"), ("1.0", "0.2"), ("1.0", "0.0001")])
def test_groups_go_on_when_another_share_of_the_responses_is_given(shares: tuple[str, str], tmp_path: Path) -> None:
    before, after = (recipe_with(*ASYNC, *GIVEN.replace("0.2", share).split("; ")) for share in shares)
    with in_background(before) as run:
        run.sampling.resume()
        with run.rollouts.changed:
            run.rollouts.work()
        pending = written(run.sampling.pending(), tmp_path)
    with in_background(after, pending) as again:
        groups = [group for sampled in trained(again, [1, 2]) for group in sampled.groups]
    per_step, samples = after.rollout.prompts_per_step, after.rollout.samples_per_prompt
    assert len(groups) == 2 * per_step
    assert all(len(group.samples) == (1 if group.given else samples) for group in groups)


@pytest.mark.parametrize("schedule", [ASYNC, ("rollout.response_tokens_max=24",)], ids=["async", "sync"])
def test_unfinished_samples_of_a_checkpoint_go_on_after_their_tokens_unless_groups_have_one_version(
    schedule: tuple[str, ...], tmp_path: Path
) -> None:
    recipe = recipe_with(*schedule)
    with in_background(recipe) as run:
        run.sampling.resume()
        with run.rollouts.changed:
            run.rollouts.work()
        pending = written(run.sampling.pending(), tmp_path)
    known = {(one.prompt_id, one.index): one for each in pending.unfinished() for one in each}
    assert bool(known) == (schedule == ASYNC)
    with in_background(recipe, pending=pending) as again:
        again.sampling.resume()
        orders = list(again.rollouts.orders)
        left = {(at.prompt_id, index): at for order in orders for index, at in enumerate(order.requests)}
        assert {at: one.begun.tokens.tolist() for at, one in left.items() if one.begun} == {
            at: one.tokens.tolist() for at, one in known.items()
        }
        assert sum(order.continued for order in orders) == len(known)
        again.rollouts.wait(lambda: all(order.complete for order in orders))
    samples = {(one.prompt_id, one.index): one for order in orders for one in order.finished()}
    for at, before in known.items():
        count = len(before.tokens)
        assert samples[at].tokens[:count].tolist() == before.tokens.tolist()
        assert samples[at].logprobs[:count].tolist() == before.logprobs.tolist()


def test_a_resumed_run_knows_the_verified_versions_that_may_have_sampled_its_groups(tmp_path: Path) -> None:
    recipe = recipe_with(*ASYNC)
    with in_background(recipe) as run:
        run.weights.verified_versions.update({1, 3})  # no sync has verified 2
        trained(run, [1, 2, 3])
        pending = written(run.sampling.pending(), tmp_path)
    oldest = min(pending.versions)
    assert 0 < oldest < 3
    assert pending.verified == tuple(version for version in (1, 3) if version >= oldest)
    with in_background(recipe, pending, step=3) as again:
        assert again.weights.verified_versions == {*pending.verified, 3}


def test_a_scored_group_that_an_earlier_version_saved_has_its_baseline_as_last_sample() -> None:
    recipe = recipe_with(*ASYNC, REMAX)
    with in_background(recipe) as run:
        trained(run, [1])
        run.rollouts.wait(
            lambda: any(group.scores for group in run.sampling.pending().groups) and not run.rollouts.scores_lack()
        )
        pending = run.sampling.pending()
    scored = [(group, *filter(None, [group.baseline_score])) for group in pending.groups]
    earlier = [Group(group.prompt, group.responses, (*group.scores, *of_baseline)) for group, *of_baseline in scored]
    with in_background(recipe, pending=replace(pending, groups=earlier), step=1) as again:
        assert comparable(again.sampling.pending().groups) == comparable(pending.groups)


def test_a_checkpoint_keeps_the_groups_that_dynamic_sampling_has_dropped_since_the_last_step(tmp_path: Path) -> None:
    recipe = recipe_with(*ASYNC, "rollout.dynamic_sampling={}")
    with in_background(recipe) as run:
        trained(run, [1])
        run.rollouts.wait(lambda: run.sampling.pending().dropped > 1 and not run.rollouts.scores_lack())
        pending = run.sampling.pending()
    restored = written(pending, tmp_path)
    dropped = comparable(restored.groups[: restored.dropped])
    with in_background(recipe, restored, step=1) as again:
        assert comparable(again.sampling.pending().groups) == comparable(pending.groups)
        again.sampling.resume()
        sampled = again.sampling.take()
    first = len(sampled.groups)
    assert comparable(sampled.all[first : first + len(dropped)]) == dropped
    assert all(odd(group) for group in sampled.groups)


def test_a_prompt_that_is_set_aside_does_not_begin_though_it_was_drawn() -> None:
    recipe = recipe_with(*ASYNC, "schedule.prompts_at_once=6")
    with in_background(recipe) as run:
        run.sampling.resume()  # begins p0 to p5; p6 and p7 are drawn
        run.sampling.set_aside(["p1", "p6"])
        steps = trained(run, [1, 2, 3])
    begun = {
        group.prompt.id: at.number for sampled in steps for group, at in zip(sampled.all, sampled.logged, strict=True)
    }
    assert begun.items() >= {"p0": 0, "p1": 1, "p5": 5, "p7": 7, "p8": 8}.items()
    assert "p6" not in begun


def one_step_off(
    given: str, first: int, last: int, pending: Pending | None = None, *, told_to_stop: bool = False
) -> Any:
    """The groups of these steps, as the schedule takes them, and what a checkpoint after them keeps. told_to_stop: in
    the last one's update, so that engines get no weights after it."""
    recipe, found = recipe_with("cluster.placement=disaggregated", "schedule=one_step_off", given), []
    with in_background(recipe, pending, first - 1) as background:
        run, update = background.run, background.run.policy.update

        def stopped(*given: Any) -> Any:
            run.stopping.signal = signal.SIGTERM if told_to_stop and given[-1] == last else None
            return update(*given)

        run.policy.update = stopped
        for step in range(first, last + 1):
            done = grpo_step(run, background.sampling, step, 0.0)
            found.append((comparable(done.sampled.all), done.metrics.get("reward/greedy")))
        return found, background.sampling.pending()


@pytest.mark.parametrize(("told_to_stop", "given"), [(False, REMAX), (True, "algorithm.advantage.name=grpo")])
def test_one_step_off_goes_on_after_any_step_with_the_groups_of_a_run_that_was_not_interrupted(
    told_to_stop: bool, given: str, tmp_path: Path
) -> None:
    whole, _ = one_step_off(given, 1, STEPS)
    assert (whole[0][1] == 0.5) == (given == REMAX)
    for step in range(1, STEPS):
        first, pending = one_step_off(given, 1, step, told_to_stop=told_to_stop)
        rest, _ = one_step_off(given, step + 1, STEPS, written(pending, tmp_path))
        assert first + rest == whole
