"""Rules between fields, and between the recipe and the model: each names the field to change, the numbers and a fix."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.layout.parallel import ParallelLayout, layers_of_chunk
from megagrpo.recipe.checks import evaluation_metrics, recipe_problems
from megagrpo.recipe.fields import is_field
from megagrpo.recipe.model_checks import model_problems
from megagrpo.recipe.overrides import apply_overrides
from megagrpo.recipe.places import Places
from megagrpo.recipe.rule_problem import RuleProblem
from megagrpo.recipe.schema import Recipe
from megagrpo.trainer import evaluation
from megagrpo.types import Group, Prompt, Sample, Score
from megagrpo.weights.families import architecture_of
from tests.tiny_run import CONFIG, EXPERTS, recipe

EVAL = "eval.files=[{path: held_out.jsonl}]"


def recipe_with(*overrides: str) -> Recipe:
    tree, _, problems = apply_overrides(recipe(Path("tiny")), Places("recipe.yaml"), overrides)
    assert not problems
    return Recipe.model_validate(tree)


RECIPE_CASES: list[tuple[list[str], str, str]] = [
    (["train.total_steps=null"], "train.total_steps", "exactly one of total_steps, total_epochs, total_episodes"),
    (["train.total_epochs=1"], "train.total_steps", "given: total_steps and total_epochs"),
    (["train.total_steps=null", "train.total_episodes=15"], "train.total_episodes", "at least 16"),
    (["algorithm.minibatches=3"], "algorithm.minibatches", "fix: minibatches: 2"),
    (["algorithm.minibatches=8", "train.layout.data=4"], "train.layout.data", "so 2 samples in each"),
    (["rollout.top_p=0.9"], "rollout.top_p", "whole vocabulary"),
    (["rollout.top_k=5"], "rollout.top_k", "whole vocabulary"),
    (["train.tokens_per_microbatch=31"], "train.tokens_per_microbatch", "at least 32"),
    (
        [
            "train.tokens_per_microbatch=16",
            "train.layout.context=2",
            "rollout.response_tokens_max=15",
            "data.prompt_tokens_max=18",
        ],
        "train.tokens_per_microbatch",
        "padded to 36",
    ),
    (
        ["train.logprob_tokens_per_microbatch=96", "algorithm.minibatches=2"],
        "train.logprob_tokens_per_microbatch",
        "fix: 128, or remove it",
    ),
    (["train.logprob_tokens_per_microbatch=128"], "train.logprob_tokens_per_microbatch", "the update's own pass"),
    (["train.layout.virtual_pipeline=2"], "train.layout.virtual_pipeline", "pipeline of at least 2"),
    (["train.layout.last_stage_layers=2"], "train.layout.last_stage_layers", "fix: remove it"),
    (
        ["train.layout.tensor=2", "train.layout.expert=2"],
        "train.layout.expert",
        "expert_tensor 2 (the default: as tensor)",
    ),
    (["train.layout.expert=3", "train.layout.data=2"], "train.layout.expert", "must divide"),
    (["cluster.trainer_devices=4", "train.layout.tensor=2"], "cluster.trainer_devices", "train.layout.data: 2"),
    (["cluster.trainer_devices=3", "train.layout.tensor=2"], "cluster.trainer_devices", "= 2 ranks"),
    (["cluster.engine_devices=1"], "cluster.engine_devices", "placement: disaggregated"),
    (
        ["cluster.engine_devices=2", "cluster.placement=disaggregated"],
        "cluster.engine_devices",
        "2 devices for 1 engine",
    ),
    (["train.optimizer.min_lr=1e-3"], "train.optimizer.min_lr", "min_lr 0.001 above lr 1e-06"),
    (["train.optimizer.min_lr=1e-7"], "train.optimizer.min_lr", "schedule: linear or cosine"),
    (["train.optimizer.warmup_steps=3"], "train.optimizer.warmup_steps", "3 of 2 steps"),
    (["train.offload=[optimizer, optimizer]"], "train.offload", "optimizer more than once"),
    (["train.offload=[reference]"], "train.offload", "none without a KL penalty"),
    (["train.offload=[optimizer]", "cluster.placement=disaggregated"], "train.offload", "no engine to make room for"),
    (["cluster.device=cpu", "train.layer_spec=transformer_engine"], "train.layer_spec", "CUDA only"),
    (["eval.samples_per_prompt=4"], "eval.samples_per_prompt", "greedy decoding"),
    (["eval.top_p=0.5"], "eval.top_p", "with temperature 0"),
    ([EVAL, "eval.early_stopping={}"], "eval.early_stopping", "neither target nor patience"),
    (["eval.early_stopping.target=0.9"], "eval.early_stopping.metric", "no eval.files"),
    (["checkpoint.keep_best=mean@1"], "checkpoint.keep_best", "no eval.files"),
    ([EVAL, "checkpoint.keep_best=pass@4"], "checkpoint.keep_best", "did you mean `pass@1`?"),
    ([EVAL, "checkpoint.keep_best=accuracy"], "checkpoint.keep_best", "one of mean@1, pass@1, maj@1"),
    (["rollout.urls=[http://a:1]"], "rollout.urls", "engine: external"),
    (["rollout.api_key_variable=KEY"], "rollout.api_key_variable", "engine: external"),
    (["rollout.engine=external"], "rollout.urls", "0 urls for 1 engine"),
    (["rollout.engine=external", "rollout.urls=[http://a:1, http://b:1]"], "rollout.urls", "engines: 2"),
    (["rollout.engine=external", "rollout.engines=2", "rollout.urls=[http://a:1, http://a:1]"], "rollout.urls", "once"),
    (["rollout.engine=external", "rollout.urls=[host:30000]"], "rollout.urls", "http://host:30000"),
    (["rollout.sglang={mem_fraction_static: 0.5}"], "rollout.sglang", "engine: sglang"),
    (["rollout.layout.tensor=2"], "rollout.layout.tensor", "engine: sglang"),
    (
        ["rollout.engine=external", "rollout.urls=[http://a:1]", "rollout.layout={tensor: 2, expert: 3}"],
        "rollout.layout.expert",
        "a divisor",
    ),
    (
        ["rollout.engine=sglang", "cluster.device=cpu", "train.layout.data=2", "rollout.layout={tensor: 2, expert: 2}"],
        "rollout.layout.expert",
        "expert: 1",
    ),
    (["weights.transfer=broadcast"], "weights.transfer", "shared_memory or process_group"),
    (["weights.directory=/tmp"], "weights.directory", "transfer: disk"),
    ([EVAL, "checkpoint.keep_best=sums/maen@1"], "checkpoint.keep_best", "did you mean `sums/mean@1`?"),
]


@pytest.mark.parametrize(
    ("overrides", "field", "words"), RECIPE_CASES, ids=[" ".join(case[0]) for case in RECIPE_CASES]
)
def test_a_broken_rule_names_field_numbers_and_fix(overrides: list[str], field: str, words: str) -> None:
    (problem,) = recipe_problems(recipe_with(*overrides))
    assert_speaks(problem, field, words)


def assert_speaks(problem: RuleProblem, field: str, words: str) -> None:
    assert problem.where == field
    assert words in str(problem)
    assert all((problem.given, problem.needed, problem.fix))
    assert all(is_field(name, Recipe) for name in problem.fields)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.minibatches=16"],
        ["train.layout.data=16"],
        ["train.layout.expert=2", "train.layout.data=2"],
        ["train.layout.tensor=2", "train.layout.expert=2", "train.layout.expert_tensor=1"],
        ["cluster.trainer_devices=4", "train.layout.tensor=2", "train.layout.pipeline=2"],
        ["cluster.placement=disaggregated", "cluster.engine_devices=2", "rollout.engines=4"],
        ["train.offload=[reference, gradients]", "algorithm.kl.coefficient=0.1"],
        ["algorithm.advantage.standard_deviation=none"],
        [EVAL, "eval.samples_per_prompt=4", "eval.temperature=1", "eval.early_stopping={metric: maj@4, patience: 2}"],
        [EVAL, "eval.samples_per_prompt=6", "eval.temperature=1", "checkpoint.keep_best=openai/gsm8k/pass@4"],
        ["train.optimizer={lr: 1e-5, min_lr: 1e-6, schedule: cosine, warmup_steps: 2}"],
        ["train.total_steps=null", "train.total_episodes=16"],
        ["rollout.engine=sglang", "rollout.sglang={python: /usr/bin/python3, mem_fraction_static: 0.7}"],
        ["rollout.engine=sglang", "rollout.layout={tensor: 2, expert: 2}", "train.layout.data=2"],
        ["rollout.engine=external", "rollout.urls=[http://a:1]", "weights={transfer: disk, directory: /shared}"],
    ],
)
def test_a_sensible_recipe_breaks_no_rule(overrides: list[str]) -> None:
    assert recipe_problems(recipe_with(*overrides)) == []


def test_metric_names_are_those_that_an_evaluation_gives() -> None:
    prompt = Prompt("p", (1,), "sums", "2")
    sample = Sample("p", 0, np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop", "2")
    for samples in (1, 2, 6, 8):
        group = Group(prompt, (sample,) * samples, (Score(1.0),) * samples)
        given = [name for name in evaluation.evaluation_metrics([group], samples) if "@" in name]
        assert given == evaluation_metrics(samples)


def test_all_broken_rules_are_found_at_once() -> None:
    found = recipe_problems(recipe_with("rollout.top_p=0.5", "train.total_steps=null", "cluster.trainer_devices=7"))
    assert [problem.where for problem in found] == ["rollout.top_p", "train.total_steps", "cluster.trainer_devices"]


LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "v_head_dim": 5,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 6, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
MODEL_CASES: list[tuple[list[str], dict[str, Any], str, str]] = [
    (["train.layout.pipeline=3"], {}, "train.layout.pipeline", "pipeline of 1, 2 or 4"),
    (["train.layout.pipeline=2", "train.layout.virtual_pipeline=4"], {}, "train.layout.virtual_pipeline", "of 1 or 2"),
    (["train.layout.pipeline=3"], {}, "train.layout.pipeline", "last_stage_layers: 2 only, which leaves 1 on each"),
    (["train.layout.pipeline=3"], {"num_hidden_layers": 2}, "train.layout.pipeline", "fix: pipeline of 1 or 2"),
    (
        ["train.layout.pipeline=16"],
        {"num_hidden_layers": 61},
        "train.layout.pipeline",
        "pipeline of 1 or 61; or last_stage_layers: 1 only, which leaves 4 on each other stage",
    ),
    (
        ["train.layout.pipeline=2", "train.layout.last_stage_layers=4"],
        {},
        "train.layout.last_stage_layers",
        "0 layers are left for the 1 other pipeline stages",
    ),
    (["train.layout.tensor=8"], {}, "train.layout.tensor", "divides 4"),
    (["train.layout.tensor=4"], {"intermediate_size": 22}, "train.layout.tensor", "22 MLP columns"),
    (["train.layout.tensor=3"], {"num_attention_heads": 6, "hidden_size": 24}, "train.layout.tensor", "2 query groups"),
    (["train.layout.expert=2", "train.layout.data=2"], {}, "train.layout.expert", "has no experts"),
    (["train.layout.tensor=2", "train.layout.expert_tensor=1"], {}, "train.layout.expert_tensor", "has no experts"),
    (["train.layout.expert=3", "train.layout.data=3"], EXPERTS, "train.layout.expert", "divides 4"),
    (["train.layout.tensor=4"], EXPERTS, "train.layout.expert_tensor", "each expert has 6 columns"),
    (
        ["train.layout.tensor=2", "train.layout.expert_tensor=1"],
        EXPERTS,
        "train.layout.expert_tensor",
        "gradients over the wrong ranks",
    ),
    (
        ["train.layout.tensor=4", "train.layout.expert=4", "train.layout.expert_tensor=1"],
        LATENT,
        "train.layout.tensor",
        "of the shared experts",
    ),
    (
        ["train.layout.tensor=2", "train.layout.expert=2", "train.layout.expert_tensor=1"],
        LATENT | {"intermediate_size": 27},
        "train.layout.tensor",
        "27 MLP columns",
    ),
    (["rollout.response_tokens_max=49"], {}, "rollout.response_tokens_max", "at most 64"),
    ([EVAL, "eval.response_tokens_max=49"], {}, "eval.response_tokens_max", "16 + 49 = 65"),
    (["rollout.stop_token_ids=[5, 31]"], {}, "rollout.stop_token_ids", "ids below 31"),
]


@pytest.mark.parametrize(
    ("overrides", "config", "field", "words"), MODEL_CASES, ids=[" ".join(case[0]) for case in MODEL_CASES]
)
def test_a_layout_that_does_not_fit_the_model_is_named(
    overrides: list[str], config: dict[str, Any], field: str, words: str
) -> None:
    (problem,) = model_problems(recipe_with(*overrides), architecture_of(CONFIG | config))
    assert_speaks(problem, field, words)


@pytest.mark.parametrize(
    ("overrides", "config"),
    [
        (["train.layout.tensor=4"], {}),  # a multiple of the 2 query groups; 31 rows of vocabulary are padded
        (["train.layout.pipeline=2", "train.layout.virtual_pipeline=2"], {}),
        (["train.layout.pipeline=2", "train.layout.first_stage_layers=3"], {}),
        (["train.layout.pipeline=3", "train.layout.last_stage_layers=2"], {}),
        (["train.layout.tensor=2", "train.layout.expert=2", "train.layout.expert_tensor=1"], EXPERTS),
        (["train.layout.expert=4", "train.layout.data=4"], EXPERTS),
        (["rollout.response_tokens_max=48"], {}),
    ],
)
def test_a_layout_that_fits_the_model_is_accepted(overrides: list[str], config: dict[str, Any]) -> None:
    assert model_problems(recipe_with(*overrides), architecture_of(CONFIG | config)) == []


sizes = st.integers(1, 6)


@settings(max_examples=40)
@given(pipeline=st.integers(2, 6), virtual=sizes, layers=st.integers(1, 24))
def test_an_accepted_pipeline_places_every_layer_once(pipeline: int, virtual: int, layers: int) -> None:
    checked = recipe_with(f"train.layout.pipeline={pipeline}", f"train.layout.virtual_pipeline={virtual}")
    found = model_problems(checked, architecture_of(CONFIG | {"num_hidden_layers": layers}))
    placed = [
        layer
        for chunk in range(virtual)
        for stage in range(pipeline)
        for layer in layers_of_chunk(layers, ParallelLayout(pipeline=pipeline, virtual_pipeline=virtual), stage, chunk)
    ]
    assert (placed == list(range(layers))) == (not found)
