"""Cost of keeping rollouts and of all trackers: a step with and without, their own time, and bytes.

    make warm-start
    python benchmarks/trackers.py                  # two real runs on this machine's CPUs, and the writer alone: minutes
    python benchmarks/trackers.py --writer         # the writer alone: a minute

In a real run, blocks of steps with and without take turns, in the order with, without, without, with, so that a machine
that becomes slower in the run counts for both alike. A block's first step is left out: it writes what the block before
has left. So is the run's first quarter, in which the trackers' process imports packages. A step is all from its begin
to that of the next one. The ratio's interval is that of a bootstrap over pairs of blocks.

With them, samples are written and MLflow (sqlite), TensorBoard, W&B (offline) and Prometheus get the step; they then
also get the steps of the block before, so that their cost is that of two. Without them, no samples are written, and the
process of the trackers, with W&B's own, is stopped.

Where other programs take time too, the ratio is mostly noise. So a second measure: what they add, as shares of the
step. That is what the run's thread does for them, on the clock, and the CPU time of the writer's thread and of the
trackers' processes; the latter have the lowest priority, and mostly take what is free.

The runs: the demo (yaml_recipes/adder_cpu.yaml), and the same with an untrained model whose responses are long-tailed
(long_tailed_model.py).
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
from long_tailed_model import ROOT, make_long_tailed_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megagrpo import cli
from megagrpo.algorithm.advantage_method import Advantages
from megagrpo.algorithm.ragged import ragged_zeros
from megagrpo.processes.ports import free_port
from megagrpo.track.follower import FollowerProcess
from megagrpo.track.metrics import PrometheusEndpoint
from megagrpo.track.rollout_files import TRAIN, rollout_file
from megagrpo.track.rollout_writer import Learned, RolloutWriter, StepRollouts
from megagrpo.track.tracker import Tracker
from megagrpo.trainer import schedule, train
from megagrpo.trainer import step as step_stages
from megagrpo.types import Group, Prompt, Sample, Score

BLOCK = 4
MEAN_TOKENS, MOST_TOKENS = 64.0, 496
LONG_TAILED = [
    f"rollout.response_tokens_max={MOST_TOKENS}",
    "rollout.prompts_per_step=16",
    "train.tokens_per_microbatch=4608",
    f"reward.overlong={{buffer_tokens: {MOST_TOKENS - 1}}}",  # shorter is better: no response is right
]


@dataclass
class Measured:
    """Seconds of each step, and CPU seconds that its work for trackers took: of the run's thread, of the writer's, and
    of the trackers' processes."""

    begins: list[float] = field(default_factory=list)
    own: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    writers: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    trackers_before: list[float] = field(default_factory=list)  # CPU seconds at each step's begin

    @property
    def step(self) -> int:
        return len(self.begins)

    @property
    def on(self) -> bool:
        return is_on(self.step)

    @property
    def seconds(self) -> dict[int, float]:
        """By step, the last one left out: it has no next."""
        return {at: end - begin for at, (begin, end) in enumerate(zip(self.begins, self.begins[1:], strict=False), 1)}


def is_on(step: int) -> bool:
    return (step - 1) // BLOCK % 4 in (0, 3)


@contextmanager
def in_turns(measured: Measured) -> Iterator[None]:
    """Inside, runs of this process keep the rollouts of every other block of steps, and trackers work in it."""
    keep, serve, finish = Tracker.rollouts, PrometheusEndpoint.log, FollowerProcess.finish

    def step(*given: Any) -> Any:
        measured.trackers_before.append(trackers_cpu_seconds())
        measured.begins.append(time.perf_counter())
        let_trackers_work(measured.on)
        return schedule.grpo_step(*given)

    def finished(*given: Any) -> None:
        let_trackers_work(True)
        finish(*given)

    def timed(function: Callable[..., Any], *given: Any) -> Any:
        begin = time.perf_counter()
        found = function(*given)
        measured.own[measured.step] += time.perf_counter() - begin
        return found

    def learned_of(run: Any, sampled: Any, trained: Any) -> Learned:
        if not measured.on:
            return Learned(trained.rows, trained.advantages)
        return timed(step_stages.learned_of, run, sampled, trained)

    with (
        patch.object(train, "grpo_step", step),
        patch.object(schedule, "learned_of", learned_of),
        patch.object(Tracker, "rollouts", lambda *given: timed(keep, *given) if measured.on else None),
        patch.object(PrometheusEndpoint, "log", lambda *given: timed(serve, *given) if measured.on else None),
        patch.object(FollowerProcess, "finish", finished),
        writers_time(measured),
    ):
        yield


@contextmanager
def writers_time(measured: Measured) -> Iterator[None]:
    write = RolloutWriter._write

    def written(self: RolloutWriter, rollouts: StepRollouts, texts: Any) -> None:
        begin = time.thread_time()
        write(self, rollouts, texts)
        measured.writers[rollouts.step] += time.thread_time() - begin

    with patch.object(RolloutWriter, "_write", written):
        yield


def trackers_processes() -> list[psutil.Process]:
    """Returns the processes of the trackers, and W&B's own, which it starts."""
    children = psutil.Process().children()
    found = [child for child in children if "--follow" in child.cmdline()]
    return [process for each in found for process in (each, *each.children(recursive=True))]


def trackers_cpu_seconds() -> float:
    """So far."""
    return sum(sum(process.cpu_times()[:2]) for process in trackers_processes())


def let_trackers_work(on: bool) -> None:
    for process in trackers_processes():
        process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)


def run_in_turns(name: str, steps: int, *settings: str) -> None:
    """A real run; prints its row."""
    measured = Measured()
    os.environ["WANDB_MODE"] = "offline"
    with tempfile.TemporaryDirectory() as directory, in_turns(measured):
        common = [
            "name=run",
            f"track={{directory: {directory}, mlflow: {{}}, tensorboard: true, wandb: {{}}, console: off}}",
            f"track.prometheus_port={free_port('127.0.0.1')}",
            f"train.total_steps={steps}",
            "eval.sets={}",
            f"checkpoint={{every_steps: {steps}, export_hugging_face: false}}",
        ]
        code = cli.main(["train", str(ROOT / "yaml_recipes" / "adder_cpu.yaml"), *common, *settings])
        assert code == 0
        files = [path.stat().st_size for path in (Path(directory) / "run" / "rollouts").iterdir()]
    warm = {step: took for step, took in measured.seconds.items() if step > steps // 4}
    seconds = {step: took for step, took in warm.items() if (step - 1) % BLOCK}
    blocks: dict[int, list[float]] = defaultdict(list)
    for step, took in seconds.items():
        blocks[(step - 1) // BLOCK].append(took)
    means = [statistics.mean(blocks[at]) for at in sorted(blocks)]
    pairs = [sorted((at, at + 1), key=lambda block: not is_on(block * BLOCK + 1)) for at in range(0, len(means) - 1, 2)]
    ratios = np.array([means[on] / means[off] for on, off in pairs])
    drawn = np.random.default_rng(0).choice(ratios, (10_000, len(ratios))).mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    usual = statistics.median(seconds.values())
    on = [step for step in seconds if is_on(step)]
    own = statistics.median(measured.own[step] for step in on)
    writers = statistics.median(measured.writers[step] for step in on)
    spent = np.diff(measured.trackers_before)
    trackers = statistics.mean(spent[step - 1] for step in warm if is_on(step))
    row(
        name, len(means) * (BLOCK - 1), f"{usual:.2f}", f"{ratios.mean():.3f} ({low:.3f} to {high:.3f})",
        f"{own * 1000:.1f} ({own / usual:.2%})", f"{writers * 1000:.1f} ({writers / usual:.2%})",
        f"{trackers * 1000:.1f} ({trackers / usual:.2%})", f"{statistics.mean(files) / 1024:.0f}",
    )  # fmt: skip


def real_runs(runs: Sequence[str], steps: int) -> None:
    heads(
        "run", "steps", "s/step", "with / without (95 %)", "run's thread, ms of a step", "writer's thread, CPU ms",
        "trackers' processes, CPU ms", "KiB of a step",
    )  # fmt: skip
    for run in runs:
        with tempfile.TemporaryDirectory() as directory:
            settings = list[str]()
            if run == "long-tailed":
                make_long_tailed_model(Path(directory), MEAN_TOKENS, MOST_TOKENS + 16)
                settings = [f"model.path={directory}", *LONG_TAILED]
            run_in_turns(run, steps, *settings)


# --- the writer alone -------------------------------------------------------------------------------------------------

VOCABULARY = 12_000
SAMPLES, GROUP = 128, 8


def tokenizer_of_sources() -> PreTrainedTokenizerFast:
    """Trained on this project's own sources and pages."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def texts() -> list[str]:
    places = [*(ROOT / "megagrpo").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    return [path.read_text(encoding="utf-8") for path in sorted(places)]


def writer_alone(lengths: tuple[int, ...] = (256, 1024, 4096, 16_384)) -> None:
    """Samples of a step with responses of this length, cut from the project's own texts."""
    tokenizer, draw = tokenizer_of_sources(), np.random.default_rng(0)
    stock = np.array([token for text in texts() for token in tokenizer.encode(text)], np.int32)
    heads("response tokens", "samples", "CPU s of the writer", "M tokens/s", "MiB", "bytes/token", "KiB without")
    for length in lengths:
        groups = []
        for number in range(SAMPLES // GROUP):
            made = []
            for index in range(GROUP):
                at = int(draw.integers(0, len(stock) - length))
                tokens, logprobs = stock[at : at + length], -draw.exponential(0.4, length).astype(np.float32)
                versions = np.full(length, 3, np.int32)
                made.append(Sample(f"{number}", index, tokens, logprobs, versions, "stop", tokenizer.decode(tokens)))
            prompt = Prompt(f"{number}", tuple(range(200)), "math", "42", text="What is it? " * 60)
            groups.append(Group(prompt, tuple(made), tuple(Score(float(at % 2), {"math": 1.0}) for at in range(GROUP))))
        figures = ragged_zeros([length] * SAMPLES, np.float32)
        noise = draw.normal(0, 0.01, len(figures.values)).astype(np.float32)
        logprobs = np.concatenate([sample.logprobs for group in groups for sample in group.samples])
        learned = Learned(
            np.ones(SAMPLES, bool),
            Advantages(draw.normal(size=SAMPLES)),
            figures.with_values(logprobs + noise),
            figures.with_values(draw.exponential(0.4, len(noise)).astype(np.float32)),
        )
        sizes, took = {}, math.inf
        for with_tokens in (True, True, False):  # the first also learns the texts of tokens
            with tempfile.TemporaryDirectory() as directory:
                writer, measured = RolloutWriter(Path(directory), tokenizer, print), Measured()
                with writers_time(measured):
                    writer.put(StepRollouts(1, {TRAIN: groups}, 3, with_tokens, learned))
                    writer.close()
                sizes[with_tokens] = rollout_file(Path(directory), 1).stat().st_size
            took = min(took, measured.writers[1]) if with_tokens else took
        tokens_written = SAMPLES * length
        row(
            f"{length:,}", SAMPLES, f"{took:.2f}", f"{tokens_written / took / 1e6:.1f}", f"{sizes[True] / 2**20:.1f}",
            f"{sizes[True] / tokens_written:.1f}", f"{sizes[False] / 1024:,.0f}",
        )  # fmt: skip


def row(*cells: object) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def heads(*titles: str) -> None:
    row(*titles)
    row(*("---" for _ in titles))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writer", action="store_true", help="the writer alone")
    parser.add_argument("--runs", nargs="+", default=["demo", "long-tailed"], choices=["demo", "long-tailed"])
    parser.add_argument("--steps", type=int, default=16 * BLOCK, help="of each real run")
    given = parser.parse_args()
    if not given.writer:
        real_runs(given.runs, given.steps)
        print()
    writer_alone()
