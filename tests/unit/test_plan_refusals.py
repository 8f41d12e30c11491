"""Impossible recipes, each a change or two to one that works: a plan alone gives the reason and a remedy."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megagrpo.errors import MegagrpoError
from megagrpo.plan.advice import impossible
from megagrpo.plan.plan import plan_of
from megagrpo.preflight.preflight import preflight
from megagrpo.recipe.load import load
from megagrpo.reward.sandbox import programs
from tests.tiny_run import make_run

RECIPES = Path(__file__).parents[2] / "yaml_recipes"
SMALL, LORA = "gsm8k_qwen2.5_0.5b_1gpu", "lora_qwen3_8b_1gpu"
NODE, NODES, EXPERTS = "math_qwen3_8b_8gpu", "math_qwen3_32b_4x8", "math_qwen3_30b_a3b_2x8"
LONG, LLAMA, DEEPSEEK = "long_context_qwen3_8b_2x8", "grpo_70b", "deepseek_v3_671b"
NO_LOGPROBS = "train.logprob_tokens_per_microbatch=null"

# recipe, overrides, and what one of the problems says: where, what was given, and the fix
IMPOSSIBLE: list[tuple[str, str, str, str, str]] = [
    # the recipe by itself
    (SMALL, "train.layout.tensr=2", "train.layout.tensr", "unknown key", "did you mean `tensor`"),
    (SMALL, "rollout.samples_per_prompt=1", "rollout.samples_per_prompt", "1, with", "samples_per_prompt: 8"),
    (SMALL, "reward.functions.0.function=gsm8", "reward.functions.0.function", "gsm8", "did you mean gsm8k"),
    (SMALL, "cluster.gpu=H1000", "cluster.gpu", "H1000", "did you mean H100"),
    (SMALL, "rollout.sglang.tp_size=2", "rollout.sglang.tp_size", "2", "set rollout.layout.tensor"),
    (SMALL, "rollout.sglang.load_format=dummy", "rollout.sglang.load_format", "dummy", "remove it"),
    # against the model
    (NODE, "train.layout.virtual_pipeline=2", "train.layout.virtual_pipeline", "pipeline 1", "virtual_pipeline: 1"),
    (NODES, "rollout.layout.tensor=3", "rollout.layout", "attention heads: 64", "tensor of 1, 2, 4, 8, 16 or 32"),
    (EXPERTS, "cluster.gpu=A100-80GB", "train.recompute.modules", "auto, which takes local", "moe in its place"),
    (EXPERTS, "rollout.layout.expert=3", "rollout.layout.expert", "3, with tensor 4", "expert: 1"),
    (LONG, f"rollout.response_tokens_max=40000 train.tokens_per_microbatch=12000 {NO_LOGPROBS}",
     "rollout.response_tokens_max", "42048 tokens", "lower rollout.response_tokens_max"),
    (DEEPSEEK, "train.layout.last_stage_layers=6", "layout.last_stage_layers", "61 layers", "last_stage_layers: 1"),
    (DEEPSEEK, "train.layout.virtual_pipeline=2", "train.layout.last_stage_layers", "61 layers", "virtual_pipeline: 1"),
    (LLAMA, "cluster.address=ray://head:10001", "cluster.address", "not a node", "ray job submit"),
    # against the machines
    (SMALL, "model.path=Qwen/Qwen3-8B", "memory of training", "optimizer", "train.lora"),
    (SMALL, "rollout.sglang.mem_fraction_static=0.9", "memory of training", "engine cache", "mem_fraction_static"),
    (LORA, "train.lora=null", "memory of training", "optimizer", "train.lora"),
    (NODE, "train.offload=[]", "memory of training, engine, rollout", "engine cache", "mem_fraction_static"),
    (NODE, "cluster.gpu=A100-40GB", "memory of training", "most of it", "train.layout.tensor"),
    (NODES, "rollout.layout.tensor=1 rollout.engines=32", "rollout.layout.tensor", "cache of 0 tokens", "more tensor"),
    (NODES, "cluster.gpus_per_node=6", "rollout.layout.tensor", "engine 1 on GPUs 4-7", "a divisor of 6"),
    (LLAMA, "train.layout.data=4", "memory of training", "engine cache", "mem_fraction_static"),
    (DEEPSEEK, "rollout.quantization=null", "rollout.layout.tensor", "weights of 1", "more tensor ranks"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with neither data, models nor SGLang."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megagrpo.preflight.model.cached_directory", lambda path: None)
    monkeypatch.setattr("megagrpo.rollout.arguments.asked", lambda *asked: {"environment": "", "problems": []})


@pytest.mark.parametrize(
    ("recipe", "overrides", "where", "given", "fix"), IMPOSSIBLE, ids=[f"{case[0]} {case[1]}" for case in IMPOSSIBLE]
)
def test_an_impossible_recipe_gets_the_reason_and_a_remedy(
    recipe: str, overrides: str, where: str, given: str, fix: str
) -> None:
    try:
        ready = preflight(load(RECIPES / f"{recipe}.yaml", overrides.split()), plan_only=True)
        problems = impossible(plan_of(ready.recipe, ready.architecture))
    except MegagrpoError as error:
        problems = error.problems
    assert any(where in problem.where and given in problem.given and fix in problem.fix for problem in problems)


def test_a_model_that_sglang_holds_in_no_layout_needs_another_engine(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    recipe = make_run(tmp_path, model_type="mixtral", tie_word_embeddings=True, **experts)
    said = r"mixtral over tensor(?s:.)*tied embeddings(?s:.)*fix: rollout.engine: transformers"
    with pytest.raises(MegagrpoError, match=said):
        preflight(load(recipe, ["rollout.engine=sglang"]), plan_only=True)


@pytest.mark.parametrize(
    ("template", "given"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "2 s or 2 GB"),
        ("{{ 'a' * 10**10 }}", "2 s or 2 GB"),
        ("{% if messages[0].role == 'robot' %}{{ messages }}{% endif %}", "renders as nothing"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ messages[0].content.a.b }}", "UndefinedError"),
        ("{{ messages | surprise }}", "TemplateAssertionError"),
        ("{{ 9 ** (9 ** 9) }}", "2 s or 2 GB"),
        ("{{ " + 9999 * "(", "nested too deeply"),
    ],
)
def test_a_chat_template_without_an_end_or_a_result_is_refused(template: str, given: str, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(template)
    with pytest.raises(MegagrpoError, match=f"chat_template(?s:.)*{given}"):
        preflight(load(make_run(tmp_path), [f"model.chat_template={tmp_path}/own.jinja"]), plan_only=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('a system message is needed') if messages[0].role != 'system' }}{{ messages[1].content }}",
        "{{ bos_token + strftime_now('%Y') + messages[1].content.strip() }}",
        "{{ style.upper() }}{% generation %}{{ messages | tojson(indent=1) }}{% endgeneration %}",
    ],
)
def test_a_chat_template_that_the_data_may_suit_is_taken(template: str, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(template)
    arguments = "{style: brief}" if "style" in template else "{}"
    given = [f"model.chat_template={tmp_path}/own.jinja", f"data.chat_template_arguments={arguments}"]
    preflight(load(make_run(tmp_path), given), plan_only=True)


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ("{enable_thinkng: false}", "did you mean `enable_thinking`?"),
        ("{x: 1, enable_thinking: true}", "remove it"),
        ("{tokenize: true}", "remove it"),
        ("{add_generation_prompt: false}", "remove it"),
    ],
)
@pytest.mark.parametrize("field", ["data.chat_template_arguments", "agent.template_arguments"])
def test_an_argument_that_the_chat_template_does_not_read_is_refused(
    arguments: str, fix: str, field: str, tmp_path: Path
) -> None:
    template = "{{ 'x' if enable_thinking }}{{ messages[0].content }}{{ '>' if add_generation_prompt }}"
    (tmp_path / "own.jinja").write_text(template)
    given = [f"model.chat_template={tmp_path}/own.jinja", "agent={function: 'a.py:a'}", f"{field}={arguments}"]
    with pytest.raises(MegagrpoError) as raised:
        preflight(load(make_run(tmp_path), given), plan_only=True)
    found = [problem for problem in raised.value.problems if "template_arguments" in problem.where]
    assert [(problem.fix, "enable_thinking" in problem.needed) for problem in found] == [(fix, True)]


@pytest.mark.parametrize("file", ["recipe.yaml", "train.jsonl", "model/config.json", "model/tokenizer_config.json"])
def test_a_pipe_that_nobody_writes_to_is_refused(file: str, tmp_path: Path) -> None:
    recipe = make_run(tmp_path)
    (tmp_path / file).unlink()
    os.mkfifo(tmp_path / file)
    with pytest.raises(MegagrpoError, match=r"a pipe|a special file"):
        preflight(load(recipe), plan_only=True)


def test_tensors_that_are_not_trained_or_not_loaded_are_listed_once(tmp_path: Path) -> None:
    loaded = load(make_run(tmp_path))
    weights = tmp_path / "model" / "model.safetensors"
    names = ("mtp.a.weight", "mtp.b.weight", "adapter.weight")
    save_file(load_file(weights) | {name: np.zeros(2**17) for name in names}, weights)
    ready = preflight(loaded, plan_only=True)
    assert ready.unchecked[0].startswith("1 tensors of its files, which are not of the model or loaded: [")
    text = "2 tensors of the model's files, which exports copy: mtp.* (2.0 MiB); layers that predict further tokens no"
    assert ready.found["not trained"].startswith(text)


def test_a_sandbox_that_this_machine_cannot_make_is_missing_in_a_run_and_unchecked_in_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_library(**_: bool) -> bytes:
        raise OSError("libseccomp.so.2: cannot open shared object file")

    monkeypatch.setattr("megagrpo.reward.sandbox.sandbox.filter_bytes", no_library)
    programs.search.cache_clear()
    recipe = make_run(tmp_path)
    try:
        planned = preflight(load(recipe, ["reward.functions=[{function: code}]"]), plan_only=True)
        assert any("libseccomp" in text for text in planned.unchecked)
        with pytest.raises(MegagrpoError, match="libseccomp"):
            preflight(load(recipe, ["reward.functions=[{function: code}]"]))
        wrong = load(recipe, ["reward.functions=[{function: code, arguments: {isolation: docker}}]"])
        with pytest.raises(MegagrpoError, match="docker"):
            preflight(wrong, plan_only=True)
    finally:
        programs.search.cache_clear()
