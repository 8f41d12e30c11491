"""Rules between a recipe and its model: what divides what. Each names the field to change, and sizes that fit."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megagrpo.layout.parallel import ParallelLayout, layers_of_chunk
from megagrpo.recipe.defaults import recipe_for_teacher
from megagrpo.recipe.model_rules import frozen_problems, model_problems
from megagrpo.recipe.schema.train import too_long
from megagrpo.weights.families import architecture_of, read_architecture
from megagrpo.weights.files.adapters import TARGETS
from tests import tiny_models
from tests.tiny_run import CONFIG, EXPERTS, recipe_with

EVAL = "eval.sets={main: {files: [{path: held_out.jsonl}]}}"
LORA = "train.lora={rank: 4}"
DISTILLED = "algorithm.distillation={}"
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "v_head_dim": 5,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 6, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
LONGROPE: dict[str, Any] = {
    "model_type": "phi3", "original_max_position_embeddings": 40,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [2.0, 2.3]},
}  # fmt: skip
SPLIT_HEADS = {"num_attention_heads": 6, "hidden_size": 24}
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    *(
        (f"train.layout.{field}", " ".join(f"train.layout.{size}" for size in layout.split()), config, words)
        for field, layout, config, words in (
            ("pipeline", "pipeline=3", {}, "pipeline of 1, 2 or 4; or last_stage_layers: 2 only"),
            ("virtual_pipeline", "pipeline=2 virtual_pipeline=4", {}, "of 1 or 2"),
            ("pipeline", "pipeline=3", {"num_hidden_layers": 2}, "pipeline of 1 or 2"),
            ("pipeline", "pipeline=16", {"num_hidden_layers": 61}, "61; or last_stage_layers: 1 only, which leaves 4"),
            ("last_stage_layers", "pipeline=2 last_stage_layers=4", {}, ""),
            ("tensor", "tensor=8", {}, "tensor of 1, 2 or 4"),
            ("tensor", "tensor=4", {"intermediate_size": 22}, "tensor of 1 or 2"),
            ("tensor", "tensor=3", SPLIT_HEADS, "tensor of 1 or 2"),
            ("expert", "expert=2 data=2", {}, "expert: 1"),
            ("expert_tensor", "tensor=2 expert_tensor=1", {}, "remove it"),
            ("expert", "expert=3 data=3", EXPERTS, "expert of 1, 2 or 4"),
            ("expert_tensor", "tensor=4", EXPERTS, "expert_tensor: 1"),
            ("expert_tensor", "tensor=2 expert_tensor=1", EXPERTS, "raise expert"),  # gradients over the wrong ranks
            ("tensor", "tensor=4 expert=4 expert_tensor=1", LATENT, "tensor of 1 or 2"),  # the shared experts' columns
            ("tensor", "tensor=2 expert=2 expert_tensor=1", LATENT | {"intermediate_size": 27}, "tensor of 1"),
        )
    ),
    *(
        (f"train.recompute.{field}", f"train.layout.pipeline=2 train.recompute={{{again}}}", config, words)
        for field, again, config, words in (
            ("modules", "modules: [moe]", {}, "does not have experts"),
            ("modules", "modules: [mla_up_proj]", {}, "latent attention"),
            ("modules", "modules: [mlp]", EXPERTS, "a layer without experts"),
            ("modules", "modules: [shared_experts]", EXPERTS, "shared experts"),
            ("layers", "layers: 3", {}, "the longest stage has 2 layers"),
        )
    ),
    ("rollout.response_tokens_max", "rollout.response_tokens_max=49", {}, "at most 64"),
    ("rollout.response_tokens_max", "rollout.response_tokens_max=25", LONGROPE, "at most 40, the model's original_max"),
    ("eval.response_tokens_max", f"{EVAL} eval.response_tokens_max=49", {}, "16 + 49 = 65"),
    ("eval.sets.main.response_tokens_max", f"{EVAL} eval.sets.main.response_tokens_max=49", {}, "16 + 49 = 65"),
    ("rollout.stop_token_ids", "rollout.stop_token_ids=[5,31,32]", {}, "31, 32"),
    ("algorithm.routing", "algorithm.routing=replay", {}, "routing: auto"),
    ("rollout.mismatch.own_routes_every_steps", "rollout.mismatch.own_routes_every_steps=4", {}, "no experts"),
    ("train.megatron.moe_router_fusion", "train.megatron.moe_router_fusion=true", EXPERTS, "routing: own"),
    ("train.lora.rank", "train.lora={rank: 65}", {}, "at most 24"),
    ("train.layout.expert_tensor", f"{LORA} train.layout.tensor=2", EXPERTS, "2 (the default: as tensor)"),
]


def overrides_of(text: str) -> list[str]:
    return re.split(r" (?=[a-z_.]+=)", text)


@pytest.mark.parametrize(("field", "overrides", "config", "words"), REFUSED)
def test_a_recipe_that_does_not_fit_the_model_is_refused(
    field: str, overrides: str, config: dict[str, Any], words: str
) -> None:
    (problem,) = model_problems(recipe_with(*overrides_of(overrides)), architecture_of(CONFIG | config))
    assert problem.where == field
    assert words in str(problem)
    assert all((problem.given, problem.needed, problem.fix))


def test_muon_needs_whole_query_groups_and_ranks_that_matrices_are_dealt_out_to() -> None:
    muon, groups = "train.optimizer.kind=muon", architecture_of(CONFIG).query_groups
    split = f"train.layout.tensor={2 * groups}"
    assert not model_problems(recipe_with(split), architecture_of(CONFIG))
    assert not model_problems(recipe_with(muon, f"train.layout.tensor={groups}"), architecture_of(CONFIG))
    (problem,) = model_problems(recipe_with(muon, split), architecture_of(CONFIG))
    assert problem.where == "train.layout.tensor"
    assert "kind: adam" in problem.fix
    alone = (muon, "train.layout={tensor: 4, expert: 2, expert_tensor: 1}")
    moe = architecture_of(CONFIG | EXPERTS | {"num_key_value_heads": 4})
    (problem,) = model_problems(recipe_with(*alone), moe)
    assert "2 ranks with the same experts" in problem.given
    for other in ("train.distributed_optimizer=false", "train.layout.data=2", "train.optimizer.kind=adam"):
        assert not model_problems(recipe_with(*alone, other), moe), other


def test_latent_attention_has_no_adapters(tmp_path: Path) -> None:
    architecture = read_architecture(tiny_models.make_model("deepseek_v3", tmp_path / "model"))
    assert "train.lora" in {problem.where for problem in model_problems(recipe_with(LORA), architecture)}


@pytest.mark.parametrize(
    ("family", "refused"),
    [
        ("glm4", {"gate_proj", "up_proj"}),
        ("gpt_oss", {"gate_proj", "up_proj", "down_proj"}),
        ("phi3", {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}),
        ("qwen3_next", {"q_proj"}),
    ],
)
def test_matrices_that_files_fuse_have_no_adapters(family: str, refused: set[str], tmp_path: Path) -> None:
    architecture = read_architecture(tiny_models.make_model(family, tmp_path / "model"))
    (problem,) = model_problems(recipe_with("train.lora={rank: 4}"), architecture)
    assert set(re.findall(r"\w+_proj", problem.given)) == refused
    rest = sorted(set(TARGETS.values()) - refused)
    assert not model_problems(recipe_with(f"train.lora={{rank: 4, targets: [{', '.join(rest)}]}}"), architecture)


def test_experts_with_biases_are_not_cut_nor_dealt_out_by_muon(tmp_path: Path) -> None:
    architecture = read_architecture(tiny_models.make_model("gpt_oss", tmp_path / "model"))
    (problem,) = model_problems(recipe_with("train.layout={tensor: 2}"), architecture)
    assert "experts have biases" in problem.given
    muon = "train.optimizer.kind=muon", "train.layout={data: 2, expert: 2}"
    (problem,) = model_problems(recipe_with(*muon), architecture)
    assert problem.where == "train.distributed_optimizer"
    assert not model_problems(recipe_with(*muon, "train.distributed_optimizer=false"), architecture)


@pytest.mark.parametrize(
    ("overrides", "config"),
    [
        (["train.layout.tensor=4"], {}),  # a multiple of the 2 query groups; 31 rows of vocabulary are padded
        (["train.layout.pipeline=2", "train.layout.first_stage_layers=3"], {}),
        (["train.layout.pipeline=3", "train.layout.last_stage_layers=2"], {}),
        (["train.layout.tensor=2", "train.layout.expert=2", "train.layout.expert_tensor=1"], EXPERTS),
        (["train.layout.expert=4", "train.layout.data=4"], EXPERTS),
        (["rollout.response_tokens_max=48"], {}),
        (["train.recompute={layers: 2}", "train.layout.pipeline=2"], {}),
        ([LORA, "train.layout.tensor=2", "train.layout.expert=2", "train.layout.expert_tensor=1"], EXPERTS),
        ([LORA, "train.layout.tensor=2"], {}),
    ],
)
def test_a_layout_that_fits_the_model_is_accepted(overrides: list[str], config: dict[str, Any]) -> None:
    assert model_problems(recipe_with(*overrides), architecture_of(CONFIG | config)) == []


def test_experts_are_split_beside_a_dense_teacher_on_the_ranks() -> None:
    """The rules of the policy's experts are not the teacher's."""
    teacher = "teachers.t={kind: ranks, path: x}"
    for layout in ("expert=2", "tensor=2 train.layout.expert_tensor=1 train.layout.expert=2"):
        recipe = recipe_with("train.layout.data=2", *f"train.layout.{layout}".split(), LORA, teacher, DISTILLED)
        assert model_problems(recipe, architecture_of(CONFIG))
        assert not frozen_problems(recipe, "t", architecture_of(CONFIG))


def test_a_teacher_fits_its_own_layout() -> None:
    for tensor, fits in ((2, True), (4, False)):
        own = f"teachers.t={{kind: ranks, path: x, layout: {{tensor: {tensor}, data: {8 // tensor}}}}}"
        recipe = recipe_with("train.layout.data=8", own, DISTILLED)
        teacher = architecture_of(CONFIG | {"num_attention_heads": 2, "num_key_value_heads": 2})
        assert bool(frozen_problems(recipe, "t", teacher)) != fits


@given(
    context=st.sampled_from([1, 2, 4]),
    own=st.sampled_from([1, 2, 8]),
    tokens=st.integers(5, 100),
    system=st.integers(1, 100),
)
def test_a_teachers_microbatch_has_room_for_the_longest_sequence(
    context: int, own: int, tokens: int, system: int
) -> None:
    teacher = f"teachers.t={{kind: ranks, path: x, layout: {{context: {own}, data: {8 // own}}}}}"
    distilled = f"algorithm.distillation={{system: Add., system_tokens_max: {system}}}"
    layout = f"train.layout={{context: {context}, data: {8 // context}}}"
    recipe = recipe_with(layout, f"train.tokens_per_microbatch={tokens}", teacher, distilled)
    assume(not [*too_long(recipe.train, recipe.sequence_tokens_max)])
    assert not [*too_long(recipe_for_teacher(recipe, "t").train, recipe.taught_tokens_max)]


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
