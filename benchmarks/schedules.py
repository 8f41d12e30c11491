"""Samples a second, idle shares and held-out score of sync, carry-over, one_step_off and async schedules.

    make sglang-cpu warm-start
    python benchmarks/schedules.py                # real runs with two SGLang servers on this machine's CPUs: minutes
    python benchmarks/schedules.py --simulate     # 8 to 1,024 engines, one core, no GPU: minutes

Real runs: the demo's model and sums, taught to pad its answers so that lengths are long-tailed
(long_tailed_model.py). All runs train as many samples, from the same model, with the same settings. Their time is that
from the evaluation of the start, when nothing has been sampled, to the last step's evaluation, when nothing is left.
Rounds are repetitions in turn.

The simulator: phases have the seconds that `megagrpo plan` predicts; a run is simulated response by response
(plan/schedules.py).
The workload is that of verl's fully asynchronous benchmark on 128 H800s, with H100s: a 7B model (here Qwen3-8B), 16
responses for each of 512 prompts, up to 28,672 tokens, 64 engines of one GPU; other clusters have as many responses
for each engine. verl tells no lengths. Their mean is 0.19 of the longest here, as in one of three workloads of Seer
(arXiv:2511.14617: 7,615 of 40,960 tokens; 0.34 and 0.40 in the others), and their logarithm's deviation that of
docs/plan.md (response_spread); the second table varies both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from long_tailed_model import ADDER, ROOT, make_long_tailed_adder

from megagrpo.plan.advice import impossible
from megagrpo.plan.parameters import known_models
from megagrpo.plan.plan import Plan, plan_of
from megagrpo.plan.schedules import ScheduleTime, Work, compared, schedule_time
from megagrpo.plan.show.terminal import HEADS, figures
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.schedule import AsyncConfig, ScheduleConfig, SyncConfig
from megagrpo.weights.families import read_architecture

# --- real runs --------------------------------------------------------------------------------------------------------

SCHEDULES = {
    "sync": "{kind: sync}",
    "sync, carry_over 8": "{kind: sync, carry_over: 8, max_staleness: 2}",
    "one_step_off": "{kind: one_step_off}",
    "async, max_staleness 2": "{kind: async, max_staleness: 2}",
}
PROMPTS, GROUP, EVALUATIONS = 16, 8, 2
MEDIAN, DEVIATION, MOST_LETTERS = 8.0, 1.2, 256
ANSWER_TOKENS = 10
"""An evaluation needs the answer alone, not the letters behind it."""


@dataclass(frozen=True)
class Entries:
    """metrics.jsonl of a run."""

    lines: list[dict[str, float]]

    @property
    def seconds(self) -> float:
        return self.lines[-1]["time"] - self.lines[0]["time"]

    def total(self, name: str) -> float:
        return sum(line.get(name, 0.0) for line in self.lines[1:])

    @property
    def trainer_idle(self) -> float:
        return self.total("trainer/idle_seconds") / self.total("seconds/step")

    @property
    def engines_idle(self) -> float:
        known = [line for line in self.lines[1:] if line["engines/idle_share"]]
        return self.total("engines/idle_seconds") / sum(
            line["engines/idle_seconds"] / line["engines/idle_share"] for line in known
        )

    @property
    def scores(self) -> list[tuple[float, float]]:
        """(seconds from the start, held-out score) of each evaluation."""
        began = self.lines[0]["time"]
        return [(line["time"] - began, line["eval/adder/mean@1"]) for line in self.lines if "eval/adder/mean@1" in line]


def trained(schedule: str, model: Path, given: argparse.Namespace) -> Entries:
    with tempfile.TemporaryDirectory() as directory:
        settings = [
            "name=run",
            f"track={{directory: {directory}, mlflow: null, console: off}}",
            f"model.path={model}",
            f"data.train=[{{path: {ADDER / 'train.parquet'}}}]",
            f"schedule={SCHEDULES[schedule]}",
            "cluster.placement=disaggregated",
            "rollout.engines=2",
            f"rollout.prompts_per_step={PROMPTS}",
            f"rollout.samples_per_prompt={GROUP}",
            f"rollout.requests_at_once={given.slots}",
            f"rollout.response_tokens_max={MOST_LETTERS}",
            "train.layout={tensor: 1}",
            f"train.total_steps={given.steps}",
            "train.tokens_per_microbatch=4608",
            f"train.optimizer={{lr: {given.lr}, schedule: linear, warmup_steps: 2}}",
            "algorithm.kl.coefficient=0",
            *([] if schedule == "one_step_off" else ["weights.pause=in_place"]),  # it finishes what runs
            f"algorithm.epochs={given.epochs}",
            "algorithm.rollout_logprobs_as_old=true",  # ratios to what sampled: samples may be stale
            f"eval={{sets: {{adder: {{files: [{{path: {ADDER / 'test.parquet'}}}]}}}}, "
            f"response_tokens_max: {ANSWER_TOKENS}, "
            f"every_steps: {-(-given.steps // EVALUATIONS)}, before_training: true}}",
            f"checkpoint={{every_steps: {given.steps}, export_hugging_face: false}}",
        ]
        recipe = ROOT / "yaml_recipes" / "adder_sglang_cpu.yaml"
        subprocess.run([sys.executable, "-m", "megagrpo.cli", "train", str(recipe), *settings], check=True, cwd=ROOT)
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return Entries([json.loads(line) for line in lines])


def measured(given: argparse.Namespace) -> None:
    model = make_long_tailed_adder(ROOT / "runs" / "long_tailed_adder", MEDIAN, DEVIATION, MOST_LETTERS)
    rounds = [{schedule: trained(schedule, model, given) for schedule in given.schedules} for _ in range(given.rounds)]
    heads("schedule", "s/step", "samples/s", "x sync", "trainer idle", "engines idle", "staleness", "held-out (at s)")
    for schedule in given.schedules:
        runs = [of[schedule] for of in rounds]
        first = [of[given.schedules[0]].seconds for of in rounds]
        seconds = statistics.median(run.seconds for run in runs)
        stale = statistics.mean(run.total("staleness/mean") / given.steps for run in runs)
        scores = (zip(*(run.scores[place] for run in runs), strict=True) for place in range(len(runs[0].scores)))
        row(
            schedule,
            f"{seconds / given.steps:.2f}",
            f"{PROMPTS * GROUP * given.steps / seconds:.1f}",
            ", ".join(f"{sync / run.seconds:.2f}" for sync, run in zip(first, runs, strict=True)),
            f"{statistics.mean(run.trainer_idle for run in runs):.0%}",
            f"{statistics.mean(run.engines_idle for run in runs):.0%}",
            f"{stale:.1f}",
            ", ".join(f"{statistics.mean(found):.2f} ({statistics.mean(at):.0f})" for at, found in scores),
        )


# --- the simulator ----------------------------------------------------------------------------------------------------

MODEL, SAMPLES, LONGEST, MEAN_SHARE, SPREAD = "Qwen/Qwen3-8B", 16, 28_672, 0.19, 1.0
PROMPTS_PER_ENGINE = 8
ENGINES = (8, 16, 64, 256, 1024)
TRAINERS = (1 / 8, 5 / 32, 3 / 16, 1 / 4, 1 / 2)
"""Training GPUs for each engine, of the splits that are tried."""

RESPONSES_MAX = 8192
"""Responses in a step of a simulation: all of 64 engines. More engines are simulated in part."""

SYNC = SyncConfig(kind="sync")
ASYNC = {bound: AsyncConfig(kind="async", max_staleness=bound) for bound in (2, 4)}


def planned(engines: int, trainers: int, share: float, spread: float, *, prompts: int, colocated: bool = False) -> Plan:
    """Engines of one GPU, beside so many training GPUs or on them."""
    memory = {"enable_memory_saver": True, "mem_fraction_static": 0.7} if colocated else {}
    rollout = {"engine": "sglang", "engines": engines, "prompts_per_step": prompts, "samples_per_prompt": SAMPLES}
    recipe = {
        "name": "schedules",
        "model": {"path": MODEL},
        "data": {"train": [{"path": "data/train.parquet"}], "prompt_tokens_max": 2048},
        "rollout": {**rollout, "response_tokens_max": LONGEST, "sglang": memory},
        "reward": {"functions": [{"function": "gsm8k"}]},
        "train": {
            "layout": {"tensor": 2, "data": trainers // 2},
            "total_steps": 500,
            "tokens_per_microbatch": 30_720,
            "recompute": "full",
            "offload": ["parameters", "gradients", "optimizer"] if colocated else [],
        },
        "cluster": {"device": "cuda", "gpu": "H100", "placement": "colocated" if colocated else "disaggregated"},
    }
    architecture = read_architecture(known_models()[MODEL])
    given = [f"response_tokens={share * LONGEST}", f"response_spread={spread}"]
    plan = plan_of(Recipe.model_validate(recipe), architecture, given=given)
    assert plan.time is not None
    assert plan.lacking_bytes == 0, impossible(plan)
    return plan


def simulated(plan: Plan, schedule: ScheduleConfig, responses_max: int = RESPONSES_MAX) -> ScheduleTime:
    assert plan.time is not None
    return schedule_time(Work.of(plan, plan.time), schedule, responses_max=responses_max)


def best_split(engines: int, share: float, spread: float) -> tuple[int, Plan]:
    """The number of training GPUs beside so many engines with which async trains most for each GPU, and the plan."""
    splits = {max(4, int(ratio * engines)) for ratio in TRAINERS if ratio * engines % 2 == 0}  # fewer hold no 8B
    plans = {own: planned(engines, own, share, spread, prompts=engines * PROMPTS_PER_ENGINE) for own in splits}
    worth = {own: 1 / simulated(plan, ASYNC[2], 1024).seconds / (engines + own) for own, plan in plans.items()}
    chosen = max(worth, key=lambda own: worth[own])
    return chosen, plans[chosen]


def colocated_seconds(gpus: int, prompts: int, share: float, spread: float) -> float:
    """A synchronous step on as many GPUs, each of which trains and samples in turn."""
    return simulated(planned(gpus, gpus, share, spread, prompts=prompts, colocated=True), SYNC).seconds


def row(*cells: object) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def heads(*titles: str) -> None:
    row(*titles)
    row(*("---" for _ in titles))


def by_size() -> None:
    heads("engines", "training GPUs", "schedule", "s/step", "samples/s", "x sync", *HEADS[2:])
    for engines in ENGINES:
        own, plan = best_split(engines, MEAN_SHARE, SPREAD)
        prompts = engines * PROMPTS_PER_ENGINE
        times = [simulated(plan, schedule) for schedule in compared(plan.grpo)]
        for time in times:
            speed = f"{prompts * SAMPLES / time.seconds:.1f}", f"{times[0].seconds / time.seconds:.2f}"
            row(engines, own, time.name, f"{time.seconds:.0f}", *speed, *figures(time, times[0])[2:])
        seconds = colocated_seconds(engines + own, prompts, MEAN_SHARE, SPREAD)
        speed = f"{prompts * SAMPLES / seconds:.1f}", f"{times[0].seconds / seconds:.2f}"
        row("on all GPUs", engines + own, "sync, colocated", f"{seconds:.0f}", *speed, *("" for _ in HEADS[2:]))


def by_lengths(engines: int = 64) -> None:
    """At the split that is best for each. `x`: times the speed of sync."""
    titles = [f"async {bound}: {title}" for bound in ASYNC for title in ("x sync", "x colocated sync", "trainer waits")]
    heads("mean / longest", "spread", "training GPUs", "sync s/step", *titles)
    for share in (0.1, MEAN_SHARE, 0.34, 0.4):
        for spread in (0.5, SPREAD, 1.5):
            own, plan = best_split(engines, share, spread)
            sync = simulated(plan, SYNC).seconds
            colocated = colocated_seconds(engines + own, engines * PROMPTS_PER_ENGINE, share, spread)
            cells = []
            for schedule in ASYNC.values():
                time = simulated(plan, schedule)
                cells += [f"{sync / time.seconds:.2f}", f"{colocated / time.seconds:.2f}", f"{time.trainer_waits:.0%}"]
            row(share, spread, own, f"{sync:.0f}", *cells)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="print both tables of the simulator")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--slots", type=int, default=32, help="responses that a server decodes at once")
    parser.add_argument("--epochs", type=int, default=1, help="algorithm.epochs: how much the trainer has to do")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    given = parser.parse_args()
    if given.simulate:
        by_size()
        print("\n64 engines, other lengths:\n")
        by_lengths()
    else:
        measured(given)
