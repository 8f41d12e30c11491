"""Samples a second and idle shares of sync, carry-over, one_step_off and async schedules.

    python benchmarks/schedules.py --simulate     # 8 to 1,024 engines, one core, no GPU: minutes

Phases have the seconds that `megagrpo plan` predicts; a run is simulated response by response (plan/schedules.py).
The workload is that of verl's fully asynchronous benchmark on 128 H800s, with H100s: a 7B model (here Qwen3-8B), 16
responses for each of 512 prompts, up to 28,672 tokens, 64 engines of one GPU; other clusters have as many responses
for each engine. verl tells no lengths. Their mean is 0.19 of the longest here, as in one of three workloads of Seer
(arXiv:2511.14617: 7,615 of 40,960 tokens; 0.34 and 0.40 in the others), and their logarithm's deviation that of
docs/plan.md (response_spread); the second table varies both.
"""

from __future__ import annotations

import argparse

from megagrpo.plan.parameters import known_models
from megagrpo.plan.plan import Plan, plan_of
from megagrpo.plan.schedules import ScheduleTime, Work, compared, schedule_time
from megagrpo.plan.show.schedules import HEADS, figures
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.schedule import AsyncConfig, ScheduleConfig, SyncConfig
from megagrpo.weights.families import read_architecture

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
    assert plan.estimate is not None
    assert plan.estimate.fits, plan.problems
    return plan


def simulated(plan: Plan, schedule: ScheduleConfig, responses_max: int = RESPONSES_MAX) -> ScheduleTime:
    assert plan.estimate is not None
    return schedule_time(Work.of(plan, plan.estimate.time), schedule, responses_max=responses_max)


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
        times = [simulated(plan, schedule) for schedule in compared(prompts, colocated=False)]
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
    parser.add_argument("--simulate", action="store_true", required=True, help="print both tables of the simulator")
    parser.parse_args()
    by_size()
    print("\n64 engines, other lengths:\n")
    by_lengths()
