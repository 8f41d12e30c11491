"""Options of other frameworks for on-policy distillation become teachers, or are reported."""

from __future__ import annotations

from pathlib import Path

from megagrpo.importing.read import Imported, import_recipe
from megagrpo.recipe.load import load
from megagrpo.recipe.schema import Recipe
from megagrpo.section import broken_rules

VERL = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-4B data.train_files=a.parquet "
    "data.train_batch_size=64 distillation.enabled=true distillation.nnodes=1 distillation.n_gpus_per_node=4 "
)
ONE = "distillation.teacher_models.teacher_model."
TWO = (
    "+distillation.teacher_models.a.key=openai/gsm8k +distillation.teacher_models.a.model_path=Qwen/Qwen3-32B "
    "+distillation.teacher_models.b.key=code +distillation.teacher_models.b.model_path=Qwen/Qwen3-8B "
)
SLIME = (
    "python3 train.py --hf-checkpoint Qwen/Qwen3-8B --prompt-data a.jsonl --num-rollout 3 "
    "--rollout-batch-size 8 --n-samples-per-prompt 4 --use-opd "
)
GKD = """
training_args = GKDConfig(output_dir="out", beta={beta}, lmbda={lmbda}, max_steps=10, per_device_train_batch_size=4)
trainer = GKDTrainer(model="Qwen/Qwen3-4B", teacher_model="Qwen/Qwen3-8B", args=training_args, train_dataset=data)
"""


def made(framework: str, tmp_path: Path, text: str, name: str = "run.sh") -> tuple[Recipe, Imported]:
    source, output = tmp_path / name, tmp_path / "recipe.yaml"
    source.write_text(text, encoding="utf-8")
    imported = import_recipe(framework, source, {}, {})
    output.write_text(imported.text, encoding="utf-8")
    assert not imported.problems, imported.problems
    recipe = load(output).recipe
    assert not broken_rules(recipe)
    return recipe, imported


def teacher(recipe: Recipe) -> dict[str, object]:
    (only,) = recipe.teachers.values()
    return only.model_dump(exclude_unset=True)


def kinds(imported: Imported) -> dict[str, str]:
    return {outcome.option: outcome.kind for outcome in imported.translation.outcomes}


def test_verls_teacher_is_a_server_and_its_top_k_an_objective(tmp_path: Path) -> None:
    loss = "distillation.distillation_loss."
    script = f"{VERL} {ONE}model_path=Qwen/Qwen3-32B {ONE}inference.name=vllm {loss}loss_mode=forward_kl_topk "
    recipe, imported = made("verl", tmp_path, f"{script} {loss}topk=64 {loss}distillation_loss_coef=0.5")
    assert teacher(recipe) == {"kind": "server", "engine": "vllm", "path": "Qwen/Qwen3-32B", "devices": 2}
    assert recipe.algorithm.distillation is not None
    assert recipe.algorithm.distillation.objective.model_dump() == {
        "name": "teacher_top_k", "k": 64, "divergence": "forward_kl", "beta": 0.5
    }  # fmt: skip
    assert recipe.algorithm.distillation.weight == 0.5
    assert recipe.reward.by_source
    assert kinds(imported)[f"{loss}topk"] == "translated"
    assert "missing" not in {kind for option, kind in kinds(imported).items() if option.startswith("distillation")}


def test_verls_reverse_kl_by_policy_gradient_without_task_rewards_is_sampled_token_alone(tmp_path: Path) -> None:
    loss = "distillation.distillation_loss."
    script = f"{VERL} {ONE}model_path=Qwen/Qwen3-32B {loss}loss_mode=k1 {loss}use_policy_gradient=true "
    recipe, _ = made("verl", tmp_path, f"{script} {loss}use_task_rewards=false")
    assert recipe.algorithm.distillation is not None
    assert recipe.algorithm.distillation.objective.name == "sampled_token"
    assert not recipe.reward.scores
    _, imported = made(
        "verl", tmp_path, f"{VERL} {ONE}model_path=Qwen/Qwen3-32B {loss}loss_mode=k3 {loss}loss_max_clamp=2"
    )
    assert kinds(imported)[f"{loss}loss_mode"] == kinds(imported)[f"{loss}loss_max_clamp"] == "missing"


def test_verls_teachers_by_key_are_teachers_by_source(tmp_path: Path) -> None:
    recipe, _ = made("verl", tmp_path, VERL + TWO)
    assert recipe.teachers.keys() == {"a", "b"}
    assert recipe.algorithm.distillation is not None
    assert recipe.algorithm.distillation.by_source == {"openai/gsm8k": "a", "code": "b"}
    off, imported = made("verl", tmp_path, (VERL + TWO).replace("enabled=true", "enabled=false"))
    assert not off.teachers
    assert set(kinds(imported).values()) <= {"translated", "same"}


def test_slimes_teachers_are_a_running_server_or_on_the_ranks(tmp_path: Path) -> None:
    of_opd = "slime.rollout.on_policy_distillation"
    functions = f"--custom-rm-path {of_opd}.reward_func --custom-reward-post-process-path {of_opd}.post_process_rewards"
    server = f"{SLIME} --opd-type sglang --opd-kl-coef 0.5 {functions} --rm-url http://10.0.0.1:30000/generate"
    recipe, imported = made("slime", tmp_path, server)
    assert teacher(recipe) == {"kind": "external", "url": "http://10.0.0.1:30000", "tokenizer": "Qwen/Qwen3-8B"}
    assert recipe.algorithm.distillation is not None
    assert recipe.algorithm.distillation.weight == 0.5
    assert "missing" not in kinds(imported).values()
    assert any("teachers.teacher.tokenizer" in note for note in imported.translation.notes)
    recipe, _ = made("slime", tmp_path, f"{SLIME} --opd-type megatron --opd-teacher-load /models/teacher")
    assert teacher(recipe) == {"kind": "ranks", "path": "/models/teacher"}
    source = tmp_path / "self.sh"
    source.write_text(f"{SLIME} --opd-type self --opsd-beta 0.5 --rm-type math")
    assert kinds(import_recipe("slime", source, {}, {}))["use_opd"] == "missing"


def test_trls_gkd_has_a_teacher_on_the_ranks_and_a_divergence_by_beta(tmp_path: Path) -> None:
    expected = {"0.0": ("forward_kl", 0.5), "1.0": ("reverse_kl", 0.5), "0.3": ("jsd", 0.3)}
    for beta, (divergence, mixture) in expected.items():
        recipe, imported = made("trl", tmp_path, GKD.format(beta=beta, lmbda=1.0), "gkd.py")
        assert teacher(recipe) == {"kind": "ranks", "path": "Qwen/Qwen3-8B"}
        assert recipe.algorithm.distillation is not None
        objective = recipe.algorithm.distillation.objective.model_dump()
        assert objective == {
            "name": "full_vocabulary", "divergence": divergence, "beta": mixture, "temperature": 1.0
        }  # fmt: skip
        assert (recipe.rollout.samples_per_prompt, recipe.rollout.response_tokens_max) == (1, 128)
        assert recipe.rollout.temperature == 0.9
        assert not recipe.reward.scores
        assert kinds(imported)["lmbda"] == "same"
        assert recipe.algorithm.distillation.given_responses is None
    recipe, imported = made("trl", tmp_path, GKD.format(beta=0.5, lmbda=0.7), "gkd.py")
    assert kinds(imported)["lmbda"] == "translated"
    assert recipe.algorithm.distillation is not None
    given = recipe.algorithm.distillation.given_responses
    assert given is not None
    assert given.share == 0.3
