"""Scores per second of every verifier, its slowest responses, and how scores grow with workers.

    python benchmarks/rewards.py                        # every verifier with a golden table, a few minutes
    python benchmarks/rewards.py math code --workers 1 2 4

Responses are the right and wrong answers of tests/golden/verifiers/, after 1,000 characters of reasoning. A time is
that of one call in this process; scores per second are of the whole Scorer, which sends responses to worker processes
and reads their outcomes. Verifiers that run on the driver (in brackets) use no worker.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from megagrpo.recipe.reward_functions import executor_of
from megagrpo.recipe.schema import RewardConfig
from megagrpo.reward.functions import Function, Task, function_specs, load
from megagrpo.reward.scorer import Scorer
from megagrpo.types import Group, Prompt, Sample

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "verifiers"
REASONING = ("First we look at what is given, and then at what is asked. " * 20)[:1000] + "\n"
SAMPLES = 8
TIMED_CALLS = 400


def golden_groups(name: str) -> tuple[dict[str, Any], list[Group]]:
    """The arguments that most lines of a verifier's table have, and these lines as groups of one prompt each."""
    lines = [json.loads(line) for line in (GOLDEN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    usable = [line for line in lines if line["score"] is not None and isinstance(line.get("response"), str)]
    counted = Counter(json.dumps(line.get("arguments", {}), sort_keys=True) for line in usable)
    ((arguments, _),) = counted.most_common(1)
    chosen = [line for line in usable if json.dumps(line.get("arguments", {}), sort_keys=True) == arguments]
    return json.loads(arguments), [group_of(number, line) for number, line in enumerate(chosen)]


def group_of(number: int, line: Mapping[str, Any]) -> Group:
    prompt = Prompt(
        f"{number}", (), line.get("data_source", ""), line["ground_truth"], extra_info=line.get("extra_info", {}),
        messages=tuple(line.get("prompt", ())), text=line.get("prompt_text", ""),
    )  # fmt: skip
    tokens = np.array(line.get("tokens", []), np.int32)
    text = REASONING + line["response"]
    samples = (
        Sample(prompt.id, i, tokens, tokens.astype(np.float32), tokens, line.get("finish", "stop"), text)
        for i in range(SAMPLES)
    )
    return Group(prompt, tuple(samples))


def call_seconds(function: Function, groups: Sequence[Group]) -> np.ndarray:
    """Seconds of each call in this process."""
    seconds = []
    for group in islice(cycle(groups), TIMED_CALLS):
        arguments = Task(group.prompt, group.samples[:1]).arguments(function.wanted)
        begin = time.perf_counter()
        function.function(**arguments)
        seconds.append(time.perf_counter() - begin)
    return np.array(seconds)


def scores_per_second(reward: RewardConfig, groups: Sequence[Group], seconds: float) -> float:
    """Responses that a Scorer scores in a second, over about so many seconds, once its processes are warm."""
    scorer = Scorer(reward, response_tokens_max=1)
    try:
        scorer.score(list(groups))
        scored, begin = 0, time.perf_counter()
        while (took := time.perf_counter() - begin) < seconds:
            scorer.score(list(groups))
            scored += len(groups) * SAMPLES
        return scored / took
    finally:
        scorer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="verifiers; all that have a golden table if none is given")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    arguments = parser.parse_args()
    names = arguments.names or sorted(path.stem for path in GOLDEN.glob("*.jsonl"))
    print(f"{os.cpu_count()} cores; scores/s by the number of workers\n")
    columns = "".join(f"{f'{count} workers':>12}" for count in arguments.workers)
    print(f"{'verifier':20}{'median ms':>10}{'p99 ms':>10}{columns}")
    for name in names:
        given, groups = golden_groups(name)
        reward = RewardConfig.model_validate(
            {"functions": [{"function": name, "arguments": given}], "failed_share_max": 1.0}
        )
        function = load(function_specs(reward)[0])
        if inspect.iscoroutinefunction(function.function):
            print(f"{name:20}  asks a server")
            continue
        times = 1000 * call_seconds(function, groups)
        inline = executor_of(name) == "inline"
        counts = arguments.workers[:1] if inline else arguments.workers
        rates = (
            scores_per_second(reward.model_copy(update={"workers": count}), groups, arguments.seconds)
            for count in counts
        )
        shown = "".join(f"{rate:12,.0f}" for rate in rates)
        label = f"({name})" if inline else name
        print(f"{label:20}{np.median(times):10.3f}{np.quantile(times, 0.99):10.3f}{shown}", flush=True)


if __name__ == "__main__":
    main()
