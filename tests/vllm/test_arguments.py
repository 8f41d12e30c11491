"""Arguments of `vllm serve` that the installed vLLM refuses, and that a plan refuses without importing it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo.recipe.schema import VllmConfig
from megagrpo.rollout.arguments import FIND, RUN
from megagrpo.rollout.vllm.arguments import ARGUMENTS, server_arguments
from tests.engines.servers import vllm_python
from tests.tiny_run import make_model
from tests.unit.test_rollout_vllm import spec

pytestmark = pytest.mark.needs("vllm")


def found(plan_only: bool = False, **options: object) -> dict[str, str]:
    settings = VllmConfig(python=str(vllm_python()), **options)  # type: ignore[arg-type]
    problems = ARGUMENTS.problems(settings, "rollout.vllm", "rollout.engine", plan_only=plan_only)
    return {problem.where: str(problem) for problem in problems}


def test_wrong_values_are_refused_by_vllms_own_parser_and_right_ones_are_not() -> None:
    right = {"block_size": 32, "enforce_eager": False, "hf_overrides": {"a": 1}, "gpu_memory_utilization": 0.5}
    wrong = {
        "max_num_batched_tokens": "many",
        "kv_cache_dtype": "fp7",
        "enable_prefix_caching": 3,
        "max_model_lem": 8,
    }
    problems = found(**right, **wrong)
    assert set(problems) == {f"rollout.vllm.{name}" for name in wrong}
    assert "did you mean `max_model_len`?" in problems["rollout.vllm.max_model_lem"]
    assert "fp8" in problems["rollout.vllm.kv_cache_dtype"]


def test_a_plan_knows_the_names_of_all_arguments_without_importing_vllm(tmp_path: Path) -> None:
    (problem,) = found(plan_only=True, max_model_lem=8, max_model_len=9).values()
    assert "did you mean `max_model_len`?" in problem
    ask = "from megagrpo.rollout.vllm.check_arguments import VllmCheck; import json, sys; {}"
    told = ask.format("print(json.dumps([sorted(VllmCheck().declared_names()), 'torch' in sys.modules]))")
    parser = ask.format(
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser as make; "
        "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser; "
        "print(json.dumps(sorted(action.dest for action in make(Parser())._actions)))"
    )
    declared, imported = run(told)
    assert not imported
    assert set(run(parser)) - set(declared) <= {"help", "config", "headless", "api_server_count", "model_tag", "grpc"}
    assert set(ARGUMENTS.owned) <= set(declared) | {"weight_transfer_config"}
    made = server_arguments(spec(make_model(tmp_path / "model")))
    assert set(made) <= set(declared)


def run(program: str) -> list:  # type: ignore[type-arg]
    program = RUN.partition("runpy.run_module")[0] + program
    done = subprocess.run([str(vllm_python()), "-c", program, str(FIND)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: list = json.loads(done.stdout.splitlines()[-1])  # type: ignore[type-arg]
    return answer


def test_an_interpreter_without_vllm_is_named_and_how_to_get_it(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    (problem,) = ARGUMENTS.problems(VllmConfig(python=str(bare)), "rollout.vllm", "rollout.engine", plan_only=False)
    assert "has no vLLM" in problem.given
    assert "make vllm-cpu" in problem.fix
    assert not ARGUMENTS.problems(VllmConfig(python=str(bare)), "rollout.vllm", "rollout.engine", plan_only=True)
    assert not found()
