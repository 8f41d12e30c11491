"""Requests to vLLM and its answers; arguments and memory of its servers. (Real servers: tests/vllm.)"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagrpo.errors import EngineError, ModelError, Problem
from megagrpo.plan.case import Case
from megagrpo.preflight.machine import engine_problems
from megagrpo.recipe.schema import EngineLayoutConfig, VllmConfig
from megagrpo.rollout.client import Endpoint
from megagrpo.rollout.engine import EngineSpec, ServerSpec
from megagrpo.rollout.kinds import ENGINES
from megagrpo.rollout.requests import SEED_BITS, nothing_sampled
from megagrpo.rollout.vllm.arguments import (
    ARGUMENTS,
    context_problems,
    installed_version,
    interpreter,
    server_arguments,
    server_environment,
)
from megagrpo.rollout.vllm.check_arguments import VllmCheck
from megagrpo.rollout.vllm.client import VllmAnswer, VllmClient, generate_body, seed_of
from megagrpo.rollout.vllm.engine import AS_STARTED, check_server
from megagrpo.rollout.vllm.launch import tell_versions, words
from megagrpo.rollout.vllm.memory import engine_memory, rank_parameters
from megagrpo.types import SamplingParams
from megagrpo.weights.families import read_architecture
from megagrpo.weights.sides import vllm as side
from tests import plans, tiny_models
from tests.rollout_engines import request
from tests.tiny_run import make_model, recipe_with


def spec(directory: Path, **values: Any) -> ServerSpec:
    given: dict[str, Any] = {"name": "engine 0", "log": Path("log"), "settings": VllmConfig(), "dtype": "float32"}
    given |= {"layout": EngineLayoutConfig(), "device": "cpu", "threads": 2, "model_directory": str(directory)}
    return ServerSpec(**given | {"requests_at_once": 8, "tokens_per_request": 100} | values)


def part(tokens: list[int], finish: str | None = None, spans: Any = None, **changes: Any) -> dict[str, Any]:
    entries = [{"token_id": token, "logprob": -float(token)} for token in tokens]
    choice = {"token_ids": tokens, "logprobs": {"content": entries}, "finish_reason": finish, "weight_versions": spans}
    return {"choices": [choice | changes]}


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def test_a_request_asks_for_one_stream_of_its_version_by_its_seed_and_ends_at_our_tokens_alone() -> None:
    one = request((5, 6), SamplingParams(9, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, stop_tokens=(3,)), seed=8)
    body = generate_body(one, "id", 4, {2, 3})
    assert (body["request_id"], body["token_ids"], body["cache_salt"], body["stream"]) == ("id", [5, 6], "4", True)
    asked = body["sampling_params"]
    assert [asked[name] for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p")] == [9, 0.5, 0.9, 7, 0.1]
    assert (asked["stop_token_ids"], asked["ignore_eos"], asked["logprobs"], asked["seed"]) == ([2, 3], True, 0, 8)


def test_a_response_that_resumes_is_drawn_by_other_numbers_than_its_first_tokens() -> None:
    one = request((5, 6), SamplingParams(9), seed=2**SEED_BITS - 1)
    begun = replace(nothing_sampled(one), tokens=np.array([7, 8], np.int32))
    resumed = replace(one, begun=begun)
    body = generate_body(resumed, "id", 0, ())
    assert (body["token_ids"], body["sampling_params"]["max_tokens"]) == ([5, 6, 7, 8], 7)
    seeds = [seed_of(one), seed_of(resumed), seed_of(replace(one, begun=replace(begun, tokens=begun.tokens[:1])))]
    assert len({seed % 2**32 for seed in seeds}) == 3  # torch's generator on CPUs takes the lower half
    assert all(0 <= seed < 2**SEED_BITS for seed in seeds)


def test_an_answer_has_the_versions_that_were_told_so_far() -> None:
    answer = VllmAnswer(request((5, 6), SamplingParams(5)))
    answer.add(part([1, 2], spans=[span("3", 0, 2)]))
    assert (answer.so_far().tokens.tolist(), answer.so_far().versions.tolist()) == ([1, 2], [3, 3])
    answer.add(part([3], spans=[span("3", 0, 2), span("4", 2, 3)]))
    answer.add(part([], "abort", [span("3", 0, 2), span("4", 2, 3)]))
    sample = answer.sample(lambda tokens, finish: finish, "engine 0")
    assert (sample.tokens.tolist(), sample.logprobs.tolist()) == ([1, 2, 3], [-1, -2, -3])
    assert (sample.versions.tolist(), sample.finish, sample.text) == ([3, 3, 4], "abort", "abort")


@pytest.mark.parametrize(
    "wrong",
    [
        part([1], "stop", [span("default", 0, 1)]),
        part([1], "stop", None),
        part([1], "error", [span("1", 0, 1)]),
        part([1], "stop", [span("1", 0, 1)], logprobs={"content": [{"token_id": 2, "logprob": -1.0}]}),
        part([1], "stop", [span("1", 0, 1)], logprobs=None),
    ],
    ids=["another's version", "no version", "an error", "logprobs of other tokens", "no logprobs"],
)
def test_answers_that_do_not_fit_together_are_errors(wrong: dict[str, Any]) -> None:
    answer = VllmAnswer(request((5, 6), SamplingParams(5)))
    answer.add(wrong)
    with pytest.raises(EngineError, match="a weight version of this run for each"):
        answer.sample(lambda tokens, finish: "", "engine 0")


def test_an_error_in_a_stream_is_a_refusal() -> None:
    client = VllmClient(Endpoint("http://127.0.0.1:1"), failure=Problem, timeout_seconds=1)
    assert client.refusal(part([1])) is None
    assert client.refusal({"error": {"message": "too long"}}) == {"message": "too long"}
    client.close()


def test_every_part_of_a_stream_tells_its_versions() -> None:
    class State:
        def _new_completion_output(self, last: bool) -> Any:
            return type("Output", (), {"weight_versions": ["told"] if last else None})()

        def _weight_version_spans(self) -> list[str]:
            return ["so far"]

    module = type("Module", (), {"RequestState": State})
    tell_versions(module)
    assert [State()._new_completion_output(last=last).weight_versions for last in (False, True)] == [
        ["so far"],
        ["told"],
    ]


def test_arguments_are_words_of_a_command_line() -> None:
    given = {"enforce_eager": True, "enable_prefix_caching": False, "hf_overrides": {"a": 1}, "uds": None, "seed": 0}
    assert words({**given, "served_model_name": ["a", "b"]}) == [
        *("--enforce-eager", "--no-enable-prefix-caching", '--hf-overrides={"a": 1}', "--seed=0"),
        *("--served-model-name", "a", "b"),
    ]


def test_the_recipes_arguments_win_over_defaults_but_not_over_ours(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model")
    found = server_arguments(spec(directory, settings=VllmConfig(block_size=32, enforce_eager=False)))  # type: ignore[call-arg]
    assert (found["block_size"], found["enforce_eager"]) == (32, False)
    assert (found["load_format"], found["skip_tokenizer_init"], found["max_model_len"]) == ("dummy", True, 100)
    assert (found["logprobs_mode"], found["generation_config"]) == ("processed_logprobs", "vllm")
    assert found["kv_cache_memory_bytes"] >= 2**26
    kept = server_arguments(spec(directory, keeps_weights=True, chat_model="grader"))
    assert (kept["load_format"], kept["skip_tokenizer_init"]) == ("auto", False)
    assert not {"worker_extension_cls", "logprobs_mode"} & kept.keys()
    on_gpu = server_arguments(spec(directory, device="cuda", settings=VllmConfig(hf_overrides={"a": 1})))  # type: ignore[call-arg]
    assert on_gpu["hf_overrides"] == {"head_dtype": "float32", "a": 1}
    assert "moe_backend" not in on_gpu
    assert not {"enforce_eager", "kv_cache_memory_bytes"} & on_gpu.keys()
    assert server_arguments(spec(directory, deterministic=True))["max_num_seqs"] == 1


def test_experts_on_gpus_get_the_kernel_that_keeps_their_layout_unless_the_recipe_names_one(tmp_path: Path) -> None:
    on_gpu = spec(tiny_models.make_model("qwen3_moe", tmp_path / "moe"), device="cuda")
    assert server_arguments(on_gpu)["moe_backend"] == "triton"
    named = VllmConfig(moe_backend="flashinfer_cutlass")  # type: ignore[call-arg]
    assert server_arguments(replace(on_gpu, settings=named))["moe_backend"] == "flashinfer_cutlass"
    assert "moe_backend" not in server_arguments(replace(on_gpu, device="cpu"))
    assert "moe_backend" not in server_arguments(replace(on_gpu, chat_model="judge"))


def test_a_window_that_no_layer_has_and_blocks_of_files_are_kept_from_vllm(tmp_path: Path) -> None:
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    unused = make_model(tmp_path / "a", sliding_window=4, use_sliding_window=False, quantization_config=blocks)
    assert server_arguments(spec(unused))["hf_overrides"] == {"sliding_window": None, "quantization_config": None}
    assert server_arguments(spec(unused, keeps_weights=True))["hf_overrides"] == {"sliding_window": None}
    used = tiny_models.make_model("mistral_window", tmp_path / "b")
    assert server_arguments(spec(used))["hf_overrides"] == {}


def test_a_context_beyond_longropes_first_one_is_refused(tmp_path: Path) -> None:
    directory = tiny_models.make_model("phi3_long", tmp_path / "long")
    arch, recipe = read_architecture(directory), recipe_with("rollout.engine=vllm", "rollout.vllm.max_model_len=33")
    (problem,) = recipe.rollout.kind.context_problems(arch, recipe.rollout)
    assert "at most 32" in problem.needed
    assert problem in engine_problems(recipe, arch, plan_only=True)
    assert not context_problems(arch, 32)
    assert context_problems(arch, "auto")
    assert not context_problems(read_architecture(make_model(tmp_path / "other")), 10**6)
    with pytest.raises(ModelError, match="max_model_len"):
        server_arguments(spec(directory, tokens_per_request=33))
    assert server_arguments(spec(directory, tokens_per_request=32))["max_model_len"] == 32


def test_keys_that_vllm_reads_and_a_config_lacks_are_named(tmp_path: Path) -> None:
    directory = tiny_models.make_model("kimi_k2", tmp_path / "model")
    problems = ENGINES["vllm"].model_problems(directory)
    assert [problem.where.rpartition(": ")[2] for problem in problems] == ["topk_method", "scoring_func"]
    assert not ENGINES["vllm"].model_problems(tiny_models.make_model("deepseek_v3", tmp_path / "whole"))


def test_ranks_and_engines_on_cpus_share_cores_and_nothing_of_our_own_environment(tmp_path: Path) -> None:
    one = server_environment(spec(tmp_path))
    assert (one["OMP_NUM_THREADS"], one["VLLM_CPU_OMP_THREADS_BIND"], one["PYTHONPATH"]) == ("2", "nobind", "")
    two = server_environment(spec(tmp_path, layout=EngineLayoutConfig(tensor=2)))
    assert two["OMP_NUM_THREADS"] == "1"
    assert two["VLLM_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert "OMP_NUM_THREADS" not in server_environment(spec(tmp_path, device="cuda"))


def test_arguments_of_ours_are_refused_with_the_key_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megagrpo.rollout.arguments.asked", lambda *asked: {"environment": "", "problems": []})
    settings = VllmConfig(tensor_parallel_size=2, port=8000, seed=1)  # type: ignore[call-arg]
    found = ARGUMENTS.problems(settings, "rollout.vllm", "rollout.engine", plan_only=True)
    assert {problem.where: problem.fix for problem in found} == {
        "rollout.vllm.tensor_parallel_size": "set rollout.layout.tensor",
        "rollout.vllm.port": "remove it",
    }


def test_the_environment_beside_the_run_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "installed" / "megagrpo"))
    monkeypatch.setattr("megagrpo.rollout.vllm.arguments.asked", lambda *asked: pytest.fail("a process was started"))
    monkeypatch.setattr("megagrpo.rollout.vllm.arguments.find_spec", lambda name: None)
    assert interpreter(VllmConfig()) == sys.executable
    assert installed_version() == ("", "")
    for folder in ("installed", "."):
        made = tmp_path / folder / ".venv-vllm" / "bin" / "python"
        made.parent.mkdir(parents=True)
        made.touch()
        assert interpreter(VllmConfig()) == str(made)
    assert interpreter(VllmConfig(python="other")) == "other"


@pytest.mark.parametrize(("version", "needed"), [("0.31.2", "or later"), ("0.32.0", ""), ("0.33.0", "below 0.33")])
def test_versions_whose_modules_lie_elsewhere_are_refused(
    version: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(VllmCheck, "installed_version", lambda self: version)
    given, found = VllmCheck().environment_problem()
    assert (version in given, found.endswith(needed)) == (bool(needed), True)


@pytest.mark.parametrize(
    ("rule", "override"),
    [
        ("kept_sets_of_another_engine", "rollout.top_p=0.9"),
        ("quantization_of_another_engine", "rollout.quantization=fp8"),
        ("replay_without_routes", "algorithm.routing=replay"),
        ("context_of_servers", "rollout.vllm={max_model_len: 4}"),
        ("engine_of_one_node", "rollout.layout.tensor=16"),
    ],
)
def test_what_vllm_does_not_return_or_hold_is_refused(rule: str, override: str) -> None:
    recipe = recipe_with("rollout.engine=vllm", override)
    assert recipe.RULES.get(rule, lambda _: False)(recipe) or any(recipe.rollout.RULES.get(rule, dict)(recipe.rollout))


def test_parallel_sizes_that_were_not_compared_are_refused(tmp_path: Path) -> None:
    recipe = recipe_with("rollout.engine=vllm", "rollout.layout={tensor: 2, pipeline: 2}", "cluster.device=cuda")
    arch = read_architecture(make_model(tmp_path / "model"))
    assert any("pipeline = 2" in str(problem) for problem in engine_problems(recipe, arch, plan_only=True))


def test_a_plan_states_the_memory_of_a_vllm_engine() -> None:
    changes = {"rollout.engine": "vllm", "rollout.sglang": None, "rollout.vllm": {"gpu_memory_utilization": 0.5}}
    recipe = plans.recipe(changes)
    case = Case(recipe, plans.known_model(plans.LLAMA_70B), plans.H100)
    held = engine_memory(case)
    assert held.weights == rank_parameters(case.architecture, recipe.rollout.layout, "cuda") * 2
    assert held.weights == pytest.approx(2 * 70.6e9 / 8, rel=0.01)
    assert held.weights + held.cache + held.working <= (case.card_bytes or 0) // 2
    assert held.freed_by == ("rollout.vllm.enable_sleep_mode",)
    assert not side.split_problems(case.architecture, recipe.rollout.layout, "cuda")


def test_a_server_that_runs_already_is_what_the_recipe_says(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "model"))
    recipe = recipe_with("rollout.engine=external_vllm", "rollout.urls=[http://a:1]", "rollout.layout.tensor=2")
    of_engine, arch = EngineSpec(recipe, 0, model, model, "cpu"), read_architecture(model)
    parallel = {"tensor_parallel_size": 2, **AS_STARTED}
    check_server(
        {"vllm_config": {"model_config": {"dtype": "torch.float32"}, "parallel_config": parallel}}, of_engine, arch
    )
    parallel |= {"worker_extension_cls": "", "tensor_parallel_size": 1}
    with pytest.raises(EngineError) as caught:
        check_server({"vllm_config": {"model_config": {"dtype": "half"}, "parallel_config": parallel}}, of_engine, arch)
    (problem,) = caught.value.problems
    assert problem.given == "worker_extension_cls , tensor_parallel_size 1, dtype half"
    assert "model.dtype, rollout.layout.tensor" in problem.fix
    with pytest.raises(EngineError, match="that of vLLM"):
        check_server({"vllm_config": "text"}, of_engine, arch)
