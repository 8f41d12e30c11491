"""`megagrpo` with something of it altered: python -m tests.loop.altered_runs ALTERATION ... COMMAND RECIPE ...

`signal NAME CALL N`: it is sent a signal the Nth time that it calls its training ranks' CALL, such as update or save,
while they work. Nothing comes after that call before the signal was sent.
`signal_rank NAME CALL N`: likewise, one of its two training ranks is sent the signal as soon as both have begun.
`signal_ranks NAME CALL N`: the same, and from then on at each CALL.
`await_lost_node FILE CALL N`: likewise, it makes FILE and waits until Ray has lost a node, before it waits for them.
`on_node ADDRESS`: it joins Ray on the node with this address, of several on this machine.
`gate FILE`: it ends no step beyond the number in FILE, as long as FILE has none that is greater.
`lie`: one trained token of each step has a rollout logprob that is 3 nats too low: the third of the first trained
sample that has so many. Which sample it is, is printed.
`without_advantages`: every advantage is 0, the control that shows what GRPO's signal does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import ray

from megagrpo import cli
from megagrpo.algorithm.advantage_method import Advantages
from megagrpo.algorithm.advantages import GroupMethod
from megagrpo.batching.rank_batches import TrainSequence
from megagrpo.cluster.train_ranks import TrainRanks
from megagrpo.track.tracker import Tracker
from megagrpo.trainer import step
from megagrpo.types import Group
from tests.loop.conftest import actors_of

AFTER_SECONDS = 0.1
LOWER = 3.0
POSITION = 2

true_wait, true_wait_beside = TrainRanks.wait, TrainRanks.wait_beside
true_sequences = step.train_sequences


def send_itself(name: str, call: str, nth: str) -> None:
    left = int(nth)

    def signalled_wait(ranks: TrainRanks, doing: str, answers: Any, wait: Any = true_wait) -> Any:
        nonlocal left
        left -= doing == call
        if doing != call or left:
            return wait(ranks, doing, answers)
        timer = Timer(AFTER_SECONDS, os.kill, (os.getpid(), signal.Signals[name]))
        timer.start()
        try:
            return wait(ranks, doing, answers)
        finally:
            timer.join()

    TrainRanks.wait = signalled_wait
    TrainRanks.wait_beside = partialmethod(signalled_wait, wait=true_wait_beside)


def signal_rank(name: str, call: str, nth: str, *, again: bool) -> None:
    left = int(nth)

    def deadly_wait(ranks: TrainRanks, doing: str, answers: Any, wait: Any = true_wait) -> Any:
        nonlocal left
        left -= doing == call
        if doing == call and (left <= 0 if again else left == 0):
            of_ranks = [pid for pid, actor in actors_of(os.getpid()).items() if actor == "RankActor"]
            os.kill(of_ranks[-1], signal.Signals[name])
        return wait(ranks, doing, answers)

    TrainRanks.wait = deadly_wait
    TrainRanks.wait_beside = partialmethod(deadly_wait, wait=true_wait_beside)


def await_lost_node(file: str, call: str, nth: str) -> None:
    left = int(nth)

    def late_wait(ranks: TrainRanks, doing: str, answers: Any) -> Any:
        nonlocal left
        left -= doing == call
        if doing == call and not left:
            Path(file).touch()
            while all(node["Alive"] for node in ray.nodes()):
                time.sleep(0.1)
        return true_wait(ranks, doing, answers)

    TrainRanks.wait = late_wait


def open_gate(file: Path, step: int) -> None:
    """For the steps up to this one. The number is there as a whole or not at all."""
    number = file.with_suffix(".new")
    number.write_text(str(step))
    number.replace(file)


def gate(file: str) -> None:
    true_log = Tracker.log

    def gated_log(tracker: Tracker, step: int, metrics: Mapping[str, float]) -> None:
        while step > int(Path(file).read_text()):
            time.sleep(0.02)
        true_log(tracker, step, metrics)

    Tracker.log = gated_log


def lying_sequences(groups: Sequence[Group], rows: np.ndarray, **options: bool) -> list[TrainSequence]:
    sequences = true_sequences(groups, rows, **options)
    index = next(i for i, sequence in enumerate(sequences) if sequence.loss_mask.sum() > POSITION)
    logprobs = sequences[index].rollout_logprobs.copy()
    logprobs[sequences[index].loss_mask.argmax() + POSITION] -= LOWER
    sequences[index] = replace(sequences[index], rollout_logprobs=logprobs)
    sample = [sample for group in groups for sample in group.samples][sequences[index].row]
    print(f"altered: {sample.tokens[POSITION]} at {POSITION} of sample {sample.index} of prompt {sample.prompt_id}")
    return sequences


if __name__ == "__main__":
    alteration, *words = sys.argv[1:]
    if alteration == "signal":
        send_itself(*words[:3])
        words = words[3:]
    elif alteration in ("signal_rank", "signal_ranks"):
        signal_rank(*words[:3], again=alteration == "signal_ranks")
        words = words[3:]
    elif alteration == "await_lost_node":
        await_lost_node(*words[:3])
        words = words[3:]
    elif alteration == "gate":
        gate(words[0])
        words = words[1:]
    elif alteration == "on_node":
        ray.init = partial(ray.init, _node_ip_address=words[0])
        words = words[1:]
    elif alteration == "lie":
        step.train_sequences = lying_sequences
    elif alteration == "without_advantages":
        GroupMethod.advantages = lambda self, inputs: Advantages(np.zeros(len(inputs.scores)))
    else:
        sys.exit(f"no such alteration: {alteration}")
    sys.exit(cli.main(words))
