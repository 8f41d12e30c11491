"""Arguments that a recipe may give in rollout.sglang, and the size of caches, asked of the installed SGLang."""

import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megagrpo.errors import Problem
from megagrpo.plan.engine import cache_of
from megagrpo.plan.parameters import known_models
from megagrpo.recipe.schema import EngineLayoutConfig, SglangConfig
from megagrpo.rollout.arguments import CHECK_SECONDS
from megagrpo.rollout.engine import EngineNode
from megagrpo.rollout.sglang import arguments, launch
from megagrpo.rollout.sglang.arguments import server_arguments
from megagrpo.rollout.sglang.check_arguments import SglangCheck
from megagrpo.weights.families import read_architecture
from tests.engines.servers import server_spec

TOKENS = 64

POOLS = """
import json, sys
from megagrpo.rollout.sglang.launch import fill_gaps_on_cpus
fill_gaps_on_cpus()
import numpy as np, torch
from sglang.srt.mem_cache import memory_pool
found = []
for name, sizes in json.loads(sys.argv[1]):
    kind = getattr(memory_pool, name)
    pool = kind(dtype=torch.bfloat16, page_size=1, device="cpu", enable_memory_saver=False, **sizes)
    found.append(int(np.sum(pool.get_kv_size_bytes())))
print(json.dumps(found))
"""


def sglang_problems(settings: SglangConfig, *, plan_only: bool = False) -> list[Problem]:
    return arguments.ARGUMENTS.problems(settings, "rollout.sglang", "rollout.engine", plan_only=plan_only)


def test_every_port_that_sglang_takes_after_a_given_one_is_looked_at() -> None:
    (root,) = (find_spec("sglang") or pytest.fail("no SGLang")).submodule_search_locations or ()
    text = Path(root, "srt", "server_args.py").read_text()
    after_zmq, handshake = (
        int(re.findall(rf"^{name}_PORT_DELTA = (\d+)$", text, re.MULTILINE)[0])
        for name in ("ZMQ_TCP", "DP_ATTENTION_HANDSHAKE")
    )
    fixed = {0, *(1 + int(port) for port in ("0", *re.findall(r"_port = port_base \+ (\d)$", text, re.MULTILINE)))}
    assert fixed == set(range(7))  # dist_init_port, port_base and the five after it
    assert {after_zmq + port for port in fixed} == set(arguments.PROGRAM.later_ports)
    assert {handshake, *fixed} - {0} <= set(EngineNode.LATER_PORTS)


def test_all_wrong_arguments_are_found_at_once_with_what_is_right() -> None:
    wrong: dict[str, tuple[Any, str]] = {
        "mem_fraction_statik": (0.7, "did you mean `mem_fraction_static`?"),
        "mem_fraction_static": ("a lot", "valid number"),
        "chunked_prefill_size": (1.5, "valid integer"),
        "attention_backend": ("flash", "one of"),
        "kv_cache_dtype": ("int3", "fp8_e5m2"),
        "disable_radix_cache": ("yes", "valid boolean"),
        "tp_size": (2, "rollout.layout.tensor"),
        "moe_runner_backend": ("flashinfer_cutlass", "kernels other than Triton's"),  # it would hold up before gate
        "trust_remote_code": (True, "code of models is never run"),
        "speculative_algorithm": ("EAGLE", "a draft model would keep its first weights"),
        "model_path": ("elsewhere", "model.path"),
        "api_key": ("secret", "megagrpo starts the server"),
        "quantization": ("fp8", "rollout.quantization"),
        "ep_num_redundant_experts": (2, "weights are sent to models that rollout.layout splits"),
        "attn_dp_size": (2, "rollout.layout.attention_data"),
    }
    right = {"max_total_tokens": 4096, "schedule_policy": "lpm", "enable_metrics": True, "cuda_graph_bs_decode": [1, 2]}
    given = {name: value for name, (value, _) in wrong.items()}
    found = {problem.where: str(problem) for problem in sglang_problems(SglangConfig(**given, **right))}
    assert found.keys() == {f"rollout.sglang.{name}" for name in wrong}
    for name, (_, words) in wrong.items():
        assert words in found[f"rollout.sglang.{name}"]


def test_a_plan_knows_the_names_of_all_arguments_without_importing_sglang() -> None:
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    public = {field.name for field in record_fields(ServerArgs) if not field.name.startswith("_")}
    assert SglangCheck().declared_names() == public
    (problem,) = sglang_problems(SglangConfig(mem_fraction_statik=0.7, mem_fraction_static=0.7), plan_only=True)  # type: ignore[call-arg]
    assert problem.where == "rollout.sglang.mem_fraction_statik"
    assert problem.fix == "did you mean `mem_fraction_static`?"


def test_an_interpreter_without_sglang_is_named_and_how_to_get_it(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    (problem,) = sglang_problems(SglangConfig(python=str(bare)))
    assert "has no SGLang" in problem.given
    assert "make sglang-cpu" in problem.fix
    assert "pip install megagrpo[sglang]" in problem.fix
    assert sglang_problems(SglangConfig(python=str(bare)), plan_only=True) == []
    (problem,) = sglang_problems(SglangConfig(python=str(tmp_path / "none")))
    assert (problem.where, problem.given) == ("rollout.sglang.python", f"{tmp_path}/none: No such file or directory")
    assert sglang_problems(SglangConfig()) == []


def test_an_interpreter_that_takes_too_long_to_import_sglang_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    assert CHECK_SECONDS >= 300  # from a slow file system
    monkeypatch.setattr("megagrpo.rollout.arguments.CHECK_SECONDS", 0.1)
    (problem,) = sglang_problems(SglangConfig(python=str(slow)))
    assert (problem.where, problem.given) == ("rollout.sglang.python", f"{slow}: no answer in 0.1 s")


def test_the_recipes_arguments_win_over_defaults_but_not_over_ours() -> None:
    def of(settings: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
        given = {"layout": EngineLayoutConfig(tensor=2), "pause_seconds": 600.0, **values}
        return server_arguments(server_spec(**given, settings=SglangConfig(**settings or {})))

    found = of({"max_total_tokens": 77, "schedule_policy": "lpm"})
    assert found["max_total_tokens"] == 77
    assert found["schedule_policy"] == "lpm"
    assert found["tp_size"] == 2
    assert found["watchdog_timeout"] > 600
    assert of()["max_total_tokens"] == 800
    on_gpu = of(device="cuda")
    sizes = [on_gpu[name] for name in ("max_running_requests", "cuda_graph_max_bs_decode", "sleep_on_idle")]
    assert sizes == [8, 8, True]
    groups = of(device="cuda", layout=EngineLayoutConfig(tensor=6, attention_data=3))
    assert (groups["max_running_requests"], groups["cuda_graph_max_bs_decode"]) == (8, 3)  # of the engine, of a group
    assert groups["enable_dp_lm_head"]
    assert not {"attention_backend", "sampling_backend", "max_total_tokens"} & on_gpu.keys()
    assert on_gpu["enable_fp32_lm_head"]
    assert (on_gpu["moe_runner_backend"], on_gpu["load_format"]) == ("triton", "dummy")
    assert not on_gpu["enable_deterministic_inference"]
    assert of(device="cuda", deterministic=True)["enable_deterministic_inference"]
    assert not of({"enable_fp32_lm_head": False}, device="cuda", deterministic=True)["enable_fp32_lm_head"]
    own = {"json_model_override_args": '{"rope_theta": 5}'}
    changes = json.loads(of(own, quantization="fp8")["json_model_override_args"])
    assert changes.keys() == {"rope_theta", "quantization_config", "language_model_only"}
    assert json.loads(of()["json_model_override_args"])["quantization_config"] is None


@pytest.mark.long
def test_a_plans_cache_bytes_per_token_are_those_of_sglangs_pools() -> None:
    dense, latent = (
        read_architecture(known_models()[name]) for name in ("Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3")
    )
    of_heads = {"size": TOKENS, "layer_num": len(dense.layers), "head_num": 2, "head_dim": 128}
    of_latents = {
        "size": TOKENS,
        "layer_num": len(latent.layers),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    asked = json.dumps([["MHATokenToKVPool", of_heads], ["MLATokenToKVPool", of_latents]])
    # In a process of its own: what SGLang needs on a CPU changes modules that other tests import.
    command = [sys.executable, "-c", POOLS, asked]
    answered = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    held = json.loads(answered.stdout.splitlines()[-1])
    each = cache_of(dense.kinds, 2, 2).token, cache_of(latent.kinds, 8, 2).token
    assert held == [(TOKENS + 1) * size for size in each]  # with a slot for padding


def test_sglang_sets_no_other_settings_of_nccl_and_keeps_those_that_are_there() -> None:
    """Training ranks have these two alike (cluster/actors.py). NCCL_GRAPH_MIXING_SUPPORT is for a way of splitting
    engines that is refused."""
    installed = find_spec("sglang")
    assert installed is not None
    assert installed.origin is not None
    source = (Path(installed.origin).parent / "srt/entrypoints/engine.py").read_text()
    body = source.partition("def _set_envs_and_config")[2].partition("\ndef ")[0]
    named = set(re.findall(r'os\.environ\["(NCCL_\w+)"\]', body)) - {"NCCL_GRAPH_MIXING_SUPPORT"}
    assert named == {"NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"}
    assert all(f'"{name}" not in os.environ' in body for name in named)


def test_a_server_imports_the_module_of_its_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.os, "environ", environment := dict[str, str]())
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    models = Path(find_spec("sglang").submodule_search_locations[0], "srt", "models")  # type: ignore[union-attr, index]
    launch.skip_other_models(tmp_path, models)
    others = set(environment["SGLANG_DISABLED_MODEL_ARCHS"].split(","))
    assert "llama" in others
    assert not {"qwen2", "transformers"} & others
