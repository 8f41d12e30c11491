"""Whole runs that learn what models say which the run starts, and which are killed meanwhile: a trained classifier, and
a judge on SGLang."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megagrpo.trainer.batches import read_batch
from tests.engines.servers import vllm_python
from tests.loop import small_run
from tests.loop.altered_runs import open_gate
from tests.reward_models import make_judge, make_reward_model, reference_logits

RESPONSES = 64


def recipe(inputs: Path, output: Path, reward: dict[str, Any], steps: int, lr: float) -> dict[str, Any]:
    values = small_run.recipe(inputs, output)
    values["reward"] = reward
    values["rollout"] |= {"prompts_per_step": 8, "samples_per_prompt": RESPONSES // 8}
    values["algorithm"] = {"minibatches": 1}
    values["train"] |= {"total_steps": steps, "optimizer": {"lr": lr}}
    values["eval"] |= {"every_steps": steps, "samples_per_prompt": 8, "temperature": 1.0}
    values["checkpoint"] = {"every_steps": steps, "keep_batches": 2}
    return values


def run_and_kill(values: dict[str, Any], output: Path, kill: Callable[[list[psutil.Process]], None]) -> Path:
    """Runs the recipe, and calls `kill` with all processes of the run after a step. The run's directory."""
    directory, gate = output / values["name"], output / "gate"
    open_gate(gate, 1)
    through = ("tests.loop.altered_runs", "gate", str(gate))
    process: subprocess.Popen[str] = small_run.start(small_run.write(values, output), through=through)

    def stepped() -> bool:
        path = directory / "metrics.jsonl"
        return path.exists() and '"step": 1,' in path.read_text()

    small_run.wait_until(stepped, "a step", process=process)
    kill(psutil.Process(process.pid).children(recursive=True))
    open_gate(gate, values["train"]["total_steps"])
    small_run.end(process)
    return directory


def check_scored(directory: Path, steps: int, learns: bool) -> None:
    """Checks that each response was scored, and that held-out prompts have better responses in the end."""
    by_step = small_run.metrics(directory)
    assert not learns or by_step[steps]["eval/sums/mean@8/low"] > by_step[0]["eval/sums/mean@8/high"]
    assert [by_step[step]["reward/errors"] for step in range(1, steps + 1)] == [0] * steps


@pytest.mark.parametrize(("steps", "learns"), [(4, False), (20, True)])
@pytest.mark.soak
def test_a_run_learns_what_a_reward_model_prefers_though_that_dies(
    steps: int, learns: bool, inputs: Path, tmp_path: Path
) -> None:
    model = make_reward_model(tmp_path / "classifier")
    function = {"function": "reward_model", "arguments": {"model": "digits"}}
    reward = {"models": {"digits": {"kind": "classifier", "path": str(model)}}, "functions": [function]}

    def kill(processes: list[psutil.Process]) -> None:
        (actor,) = (process for process in processes if "ray::ClassifierActor" in command(process))
        actor.kill()

    directory = run_and_kill(recipe(inputs, tmp_path, reward, steps, lr=3e-3), tmp_path, kill)
    check_scored(directory, steps, learns)
    for step in (steps - 1, steps):
        assert small_run.metrics(directory)[step]["judge/reward_model/scored"] == RESPONSES
        for group in read_batch(directory, step).sampled.groups:
            texts = [sample.text for sample in group.samples]
            expected = reference_logits(model, texts, dict(group.prompt.messages[0]))
            scores = [score.value for score in group.scores]
            assert scores == pytest.approx([logits[0] for logits in expected], abs=1e-5)


@pytest.mark.parametrize("engine", ["sglang", pytest.param("vllm", marks=pytest.mark.needs("vllm"))])
@pytest.mark.soak
def test_a_run_learns_what_a_judge_says_though_its_server_dies(engine: str, inputs: Path, tmp_path: Path) -> None:
    steps = 40
    grader = {"kind": "generative", "path": str(make_judge(tmp_path / "judge")), "tokens_max": 256, "engine": engine}
    grader |= {"vllm": {"python": str(vllm_python())}} if engine == "vllm" else {}
    arguments = {"model": "grader", "rubric": "{{response}}", "verdict": "yes_no", "sampling": {"max_tokens": 8}}
    function = {"function": "judge", "arguments": {**arguments, "cache": False, "retries": 8}}
    killed: list[psutil.Process] = []

    def kill(processes: list[psutil.Process]) -> None:
        servers = [process for process in processes if f"{engine}/launch.py" in command(process)]
        (first,) = (process for process in servers if os.getpgid(process.pid) == process.pid)
        os.killpg(first.pid, signal.SIGKILL)
        killed.extend(servers)

    reward = {"models": {"grader": grader}, "functions": [function]}
    directory = run_and_kill(recipe(inputs, tmp_path, reward, steps, lr=1e-2), tmp_path, kill)
    check_scored(directory, steps, learns=True)
    assert all(small_run.metrics(directory)[step]["judge/judge/requests"] >= RESPONSES for step in range(1, steps + 1))
    log = directory / "logs" / "reward_model_grader.log"
    said = {"sglang": "server_args=", "vllm": "non-default args: "}[engine]
    assert log.read_text().count(said) == 2, "it was started twice"
    assert not log.with_name(f"{log.name}.leftovers.json").exists(), "the second was closed"
    assert not [process for process in killed if process.is_running()]


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
