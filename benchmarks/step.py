"""Seconds per GRPO step, phase by phase, beside TRL's GRPOTrainer: same model, prompts, batch, sampling and reward.

    make benchmark-step            # makes .venv-trl, prepares the demo, runs this

Two workloads. `demo`: the demo's step, whose responses are of nearly one length. `long_tailed`: a model of the demo's
shape whose responses end at random, most soon, a few late, as those of a reasoning model do.

Both run in turn on the same machine, `--rounds` times, and the ratio is taken round by round. The first `--warmup`
steps of every run are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from long_tailed_model import make_long_tailed_model

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "yaml_recipes" / "adder_cpu.yaml"
TENSOR, DATA = ["train.layout.tensor=2"], ["train.layout.tensor=1", "train.layout.data=2"]
ALL_GROUPS = ["algorithm.skip_groups_without_signal=false"]
VARIANTS = {"tensor=2": TENSOR, "data=2": DATA, "data=2, all groups": DATA + ALL_GROUPS}
"""TRL trains on all groups, those without signal too; the last row does the same."""
PHASES = ("rollout", "reward", "logprobs", "update", "weight_sync")
PROMPTS, SAMPLES = 32, 8


@dataclass(frozen=True)
class Workload:
    model: Path
    data: Path
    reward: str
    """`gsm8k`, or the pattern of `format`."""
    response_tokens: int
    lr: float

    def overrides(self) -> list[str]:
        arguments = "{method: strict}" if self.reward == "gsm8k" else f"{{pattern: '{self.reward}'}}"
        function = "gsm8k" if self.reward == "gsm8k" else "format"
        return [
            f"model.path={self.model}",
            f"reward.functions=[{{function: {function}, arguments: {arguments}}}]",
            f"rollout.prompts_per_step={PROMPTS}",
            f"rollout.samples_per_prompt={SAMPLES}",
            f"rollout.response_tokens_max={self.response_tokens}",
            f"train.optimizer.lr={self.lr}",
        ]


def workload(name: str, directory: Path) -> Workload:
    """Makes what it needs in `directory`."""
    data = ROOT / ".cache" / "adder" / "train.parquet"
    if name == "demo":
        return Workload(ROOT / "runs" / "adder_sft_cpu" / "hugging_face", data, "gsm8k", 10, 6e-5)
    model = directory / "long_tailed"
    make_long_tailed_model(model, mean_tokens=48, positions=512)
    return Workload(model, data, "7", 384, 1e-6)  # lengths stay what they are


def run_megagrpo(work: Workload, overrides: list[str], steps: int, directory: str) -> list[dict[str, float]]:
    """metrics.jsonl of a training run without evaluations, checkpoints in between and trackers."""
    name = "benchmark-step"
    settings = [
        f"name={name}",
        "algorithm.kl.coefficient=0",  # as in TRL's default: no reference
        f"train.total_steps={steps}",
        f"track.directory={directory}",
        "track.console=off",
        "track.mlflow=null",
        "eval.sets={}",
        "eval.early_stopping=null",
        "checkpoint.keep_best=null",
        f"checkpoint.every_steps={steps}",
        "checkpoint.export_hugging_face=false",
    ]
    arguments = [*overrides, *work.overrides(), *settings]
    subprocess.run([sys.executable, "-m", "megagrpo.cli", "train", str(RECIPE), *arguments], check=True, cwd=ROOT)
    lines = (Path(directory) / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if "seconds/step" in entry]


def run_trl(python: str, work: Workload, steps: int, warmup: int) -> dict[str, list[float]]:
    """Seconds, mean rewards and mean response tokens of TRL's steps after the warm-up."""
    settings = {
        "model": work.model,
        "data": work.data,
        "reward": work.reward,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "response": work.response_tokens,
        "lr": work.lr,
        "steps": steps,
        "warmup": warmup,
    }
    done = subprocess.run(
        [python, str(ROOT / "benchmarks" / "trl_step.py"), *(f"--{key}={value}" for key, value in settings.items())],
        check=True,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    result: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def compare(name: str, work: Workload, given: argparse.Namespace) -> None:
    """Runs all variants and TRL in turn; prints a table."""
    ours: dict[str, list[list[dict[str, float]]]] = {variant: [] for variant in VARIANTS}
    trl: list[dict[str, list[float]]] = []
    for _ in range(given.rounds):
        for variant, overrides in VARIANTS.items():
            with tempfile.TemporaryDirectory() as directory:
                entries = run_megagrpo(work, overrides, given.warmup + given.steps, directory)
            ours[variant].append(entries[given.warmup :])
        trl.append(run_trl(given.trl_python, work, given.steps, given.warmup))
    trl_seconds = [statistics.median(round_["seconds"]) for round_ in trl]

    lengths = [entry["response_tokens/mean"] for rounds in ours.values() for entries in rounds for entry in entries]
    trl_lengths = [length for round_ in trl for length in round_["tokens"]]
    print(f"\n{name}: {PROMPTS} prompts x {SAMPLES} samples, medians of {given.steps} steps, {given.rounds} rounds")
    print(f"mean response tokens: {statistics.mean(lengths):.1f}, TRL {statistics.mean(trl_lengths):.1f}\n")
    print("| | s/step | samples/s | TRL / ours | " + " | ".join(PHASES) + " |")
    print("|---" * (4 + len(PHASES)) + "|")
    for variant, rounds in ours.items():
        seconds = [statistics.median(entry["seconds/step"] for entry in entries) for entries in rounds]
        ratio = statistics.median(b / a for a, b in zip(seconds, trl_seconds, strict=True))
        phases = [
            statistics.median(entry.get(f"seconds/{phase}", 0.0) for entries in rounds for entry in entries)
            for phase in PHASES
        ]
        middle = statistics.median(seconds)
        cells = [f"{middle:.3f}", f"{PROMPTS * SAMPLES / middle:.0f}", f"{ratio:.2f}", *(f"{s:.3f}" for s in phases)]
        print(f"| {variant} | " + " | ".join(cells) + " |")
    middle = statistics.median(trl_seconds)
    print(f"| TRL | {middle:.3f} | {PROMPTS * SAMPLES / middle:.0f} |" + " |" * (1 + len(PHASES)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=str(ROOT / ".venv-trl" / "bin" / "python"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", default=["demo", "long_tailed"], choices=["demo", "long_tailed"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for name in given.workloads:
            compare(name, workload(name, Path(directory)), given)


if __name__ == "__main__":
    main()
