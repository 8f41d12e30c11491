"""Work of the driver itself in a step of a large asynchronous run: seconds of one core, and memory. No GPU, no Ray.

    python benchmarks/driver.py                    # 25,000 to 100,000 samples in flight: a minute

1,024 training ranks (tensor 8, pipeline 8, data 16) and 128 engines. The driver's own code runs: admission, requests,
the pool, groups, advantages, packing for every data rank, staleness. Engines, rewards and ranks answer at once, and
nothing is sent: serialising and sending are Ray's, and are not in it. What requests have so far stays with the engines'
nodes, and is read once, as for a checkpoint in this step. Half of the samples in flight are trained in the
step, half go on.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from megagrpo.algorithm.admission import Admission
from megagrpo.algorithm.advantage_method import AdvantageInputs
from megagrpo.algorithm.advantages import GrpoConfig
from megagrpo.batching.rank_batches import TrainSequence, make_rank_batches
from megagrpo.batching.work import work_of
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.parameters import known_models
from megagrpo.rollout.engine import SoFar
from megagrpo.rollout.pool import Order, Pool
from megagrpo.rollout.requests import requests_for
from megagrpo.trainer.sampling import staleness_metrics
from megagrpo.trainer.step import flat_scores, group_of_row, train_sequences
from megagrpo.types import Group, Prompt, Request, Sample, SamplingParams, Score
from megagrpo.weights.families import read_architecture

LAYOUT = ParallelLayout(tensor=8, pipeline=8, data=16)
ENGINES = 128
SAMPLES = 8
PROMPT_TOKENS, MEAN_TOKENS = 256, 1024
STEP_SECONDS = 60.0
SCORES = tuple(Score(float(index % 2)) for index in range(SAMPLES))
SAMPLING = SamplingParams(max_tokens=8 * MEAN_TOKENS)


class Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin


def answer(request: Request, draw: np.random.Generator) -> Sample:
    length = int(min(draw.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0) + 1, SAMPLING.max_tokens))
    tokens = np.zeros(length, np.int32)
    return Sample(request.prompt_id, request.index, tokens, tokens.astype(np.float32), tokens, "stop", "")


def one_step(in_flight: int, *, traced: bool) -> tuple[Clock, int]:
    """Seconds of the driver by part in a step of a run with so many samples in flight; its bytes if `traced`, which is
    slower."""
    clock, draw = Clock(), np.random.default_rng(0)
    prompts = in_flight // SAMPLES // 2
    admission = Admission(per_step=prompts, max_staleness=1, at_once=2 * prompts, steps=10)
    pool = Pool(-(-in_flight // ENGINES))
    for index in range(ENGINES):
        pool.join(f"engine {index}")
    orders: dict[int, Order] = {}
    complete: list[Order] = []
    text = tuple(range(PROMPT_TOKENS))
    if traced:
        tracemalloc.start()
    with clock.part("prompts begin"):
        while admission.room:
            number = admission.admit().number
            prompt = Prompt(f"prompt {number}", text, "math", "1")
            asked = requests_for(prompt, samples=SAMPLES, sampling=SAMPLING, recipe_seed=0, step=1)
            orders[number] = Order(asked, prompt=prompt)
        pool.add(orders.values())
    with clock.part("requests to engines"):
        handed = pool.hand_out()
    answers = {
        engine: {ticket: answer(request, draw) for ticket, request in requests.items()}
        for engine, requests in handed.items()
    }
    so_far = {
        engine: SoFar.of({ticket: replace(one, finish="abort") for ticket, one in samples.items()})
        for engine, samples in answers.items()
    }
    with clock.part("tokens so far, for a checkpoint"):
        for engine, told in so_far.items():
            told.samples(handed[engine])
    del so_far  # it is not in the driver's memory
    with clock.part("samples of engines"):
        for engine, samples in answers.items():
            complete += pool.answered(engine, samples)
    with clock.part("groups of the step"):
        for number in orders:
            admission.complete(number)
        taken = admission.take() or []
        groups: list[Group] = []
        for admitted in taken:
            groups.append(orders[admitted.number].group())
        groups = [Group(group.prompt, group.samples, SCORES) for group in groups]
        staleness_metrics(groups, 0)
    with clock.part("advantages"):
        lengths = np.array([len(sample.tokens) for group in groups for sample in group.samples])
        inputs = AdvantageInputs(
            flat_scores(groups), group_of_row(groups), lengths, np.zeros((len(lengths), 0)), np.zeros(0)
        )
        GrpoConfig(name="grpo").advantages(inputs)
    with clock.part("batches of ranks"):
        sequences: list[TrainSequence] = train_sequences(groups, np.ones(len(lengths), bool))
        make_rank_batches(
            sequences, layout=LAYOUT, minibatches=1, tokens_per_microbatch=16 * MEAN_TOKENS, seed=0,
            work=work_of(read_architecture(known_models()["meta-llama/Llama-3.1-70B-Instruct"])),
        )  # fmt: skip
    held, _ = tracemalloc.get_traced_memory()
    if traced:
        tracemalloc.stop()
    return clock, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[25_000, 50_000, 100_000])
    for in_flight in parser.parse_args().samples:
        clock, _ = one_step(in_flight, traced=False)
        _, held = one_step(in_flight, traced=True)
        total = sum(clock.seconds.values())
        seconds = f"{total:.2f} s, {total / STEP_SECONDS:.1%} of a step of {STEP_SECONDS:g} s"
        memory = f"{held / 2**20:,.0f} MiB, {held / in_flight / 1024:.1f} KiB a sample"
        print(f"{in_flight:,} samples in flight: {seconds}; {memory}")
        print("    " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in clock.seconds.items()))


if __name__ == "__main__":
    main()
