"""Advice: each rule speaks where it should, with a remedy that silences it, and is silent elsewhere."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megagrpo.errors import PreflightError
from megagrpo.plan.advice import STATE_BYTES, checkpoint_bytes, disk_problems, impossible, unwise
from megagrpo.plan.parameters import total_parameters
from megagrpo.plan.units import byte_text
from megagrpo.preflight.preflight import preflight
from megagrpo.recipe.load import load
from tests.plans import LLAMA_8B, QWEN_30B, architecture, plan, planned, recipe
from tests.tiny_run import make_run

EXPERTS: dict[str, Any] = {
    "model.path": QWEN_30B,
    "train.layout": {"tensor": 4, "expert": 4, "data": 4},
    "rollout.layout": {"tensor": 4},
    "rollout.engines": 4,
}
ONE_NODE: dict[str, Any] = {"model.path": LLAMA_8B, "train.layout": {"tensor": 2, "data": 4}, "rollout.engines": 1}

TURNS: dict[str, Any] = {"tools": ["python"], "tokens_max": 16384}

# what is unwise, where, and a remedy
CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"train.layout": {"tensor": 16, "data": 8}}, "train.layout.tensor", {"train.layout": {"tensor": 8, "data": 16}}),
    ({**ONE_NODE, "train.layout": {"tensor": 2, "data": 6}, "rollout.layout": {"tensor": 4}}, "cluster.gpus_per_node",
     {"train.layout": {"tensor": 2, "data": 8}, "rollout.engines": 4}),
    (EXPERTS, "train.layout.expert_tensor",
     {"train.layout": {"tensor": 4, "expert": 4, "expert_tensor": 1, "data": 4}}),
    ({"algorithm.minibatches": 256, "train.layout": {"tensor": 8, "data": 16}}, "train.layout.data",
     {"algorithm.minibatches": 2}),
    ({"train.tokens_per_microbatch": 200_000, "algorithm.minibatches": 16, "rollout.response_tokens_max": 2048},
     "train.tokens_per_microbatch", {"train.tokens_per_microbatch": 10240}),
    ({"train.layout": {"tensor": 8, "context": 2, "data": 8}}, "train.layout.context",
     {"train.layout": {"tensor": 8, "data": 16}}),
    ({**ONE_NODE, "train.recompute": "full", "cluster.gpu": "B300"}, "train.recompute", {"train.recompute": "none"}),
    ({**ONE_NODE, "cluster.gpu": "A100-80GB", "train.layer_spec": "transformer_engine"}, "train.layer_spec",
     {"train.layer_spec": "auto"}),
    ({"train.recompute": "selective"}, "train.recompute", {"train.recompute": "none"}),
    ({"train.recompute": {"modules": ["layernorm", "mlp"]}}, "train.recompute",
     {"train.recompute": {"modules": ["mlp"]}}),
    ({"train.distributed_optimizer": False}, "train.distributed_optimizer", {"train.distributed_optimizer": True}),
    ({"rollout.sglang": {"mem_fraction_static": 0.23, "enable_memory_saver": True}}, "rollout.layout.tensor",
     {"rollout.sglang": {"mem_fraction_static": 0.7, "enable_memory_saver": True}}),
    ({"rollout.layout": {"tensor": 16}, "rollout.engines": 8}, "rollout.layout.tensor",
     {"rollout.layout": {"tensor": 8, "pipeline": 2}}),
    ({"rollout.engines": 4}, "rollout.engines", {"rollout.engines": 16}),
    ({**ONE_NODE, "rollout.layout": {"tensor": 1}, "rollout.engines": 8, "rollout.prompts_per_step": 4,
      "rollout.samples_per_prompt": 1, "algorithm.advantage": {"name": "reinforce_plus_plus"}}, "rollout.engines",
     {"rollout.prompts_per_step": 64}),
    ({"cluster.placement": "disaggregated", "train.offload": [], "rollout.engines": 2}, "cluster.placement",
     {"rollout.engines": 32}),
    ({"cluster.placement": "disaggregated", "train.offload": [], "rollout.sglang": {}, "rollout.engines": 4},
     "cluster.placement", {"schedule": {"kind": "async", "max_staleness": 2}}),
    ({"schedule": {"kind": "sync", "oversample": 64}}, "schedule.oversample",
     {"schedule": {"kind": "sync", "carry_over": 64, "max_staleness": 2}}),
    ({"rollout.timeout_seconds": 30.0}, "rollout.timeout_seconds", {"rollout.timeout_seconds": 3600.0}),
    ({"checkpoint": {"every_steps": 500}}, "checkpoint.every_steps", {"checkpoint": {"every_steps": 20}}),
    ({"train.optimizer": {"lr": 1e-3}}, "train.optimizer.lr", {"train.optimizer": {"lr": 1e-6}}),
    ({"deterministic": True}, "deterministic", {"deterministic": False}),
    ({"cluster.gpu": "L40S"}, "train.layout.tensor", {"cluster.gpu": "H100"}),
    ({"agent": {"tools": ["python"]}}, "agent.tokens_max", {"agent": TURNS, "train.tokens_per_microbatch": 16384}),
    ({"agent": TURNS | {"rollouts_at_once": 8192}, "train.tokens_per_microbatch": 16384,
      "rollout.sglang": {"mem_fraction_static": 0.35}}, "agent.rollouts_at_once",
     {"rollout.sglang": {"mem_fraction_static": 0.7}, "agent": TURNS | {"rollouts_at_once": 1024}}),
    ({"train.layout": {"tensor": 8, "pipeline": 8, "data": 2}, "rollout.prompts_per_step": 2}, "train.layout.pipeline",
     {"train.layout": {"tensor": 8, "pipeline": 2, "data": 8}, "rollout.prompts_per_step": 256}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "where", "remedy"), CASES, ids=[f"{where} {i}" for i, (_, where, _) in enumerate(CASES)]
)
def test_what_is_unwise_is_told_until_it_is_remedied(
    changes: dict[str, Any], where: str, remedy: dict[str, Any]
) -> None:
    told = [problem for problem in unwise(plan(changes)) if problem.where == where]
    assert told
    assert all(problem.given and problem.needed and problem.fix for problem in told)
    assert where not in [problem.where for problem in unwise(plan({**changes, **remedy}))]


def test_a_good_recipe_gets_no_advice() -> None:
    of = plan()
    assert not unwise(of)
    assert not impossible(of)


def test_engines_over_the_edges_of_nodes_cannot_run() -> None:
    of = plan(rollout__layout={"tensor": 8}, rollout__engines=16, cluster__gpus_per_node=12)
    assert [problem.where for problem in impossible(of)] == ["rollout.layout.tensor"]


def test_a_checkpoint_is_twelve_bytes_for_each_trained_parameter() -> None:
    of = recipe(model__path=LLAMA_8B)
    model = architecture(of)
    whole = STATE_BYTES * total_parameters(model)
    assert checkpoint_bytes(planned(of)) == whole
    follows = recipe(
        model__path=LLAMA_8B, algorithm={"kl": {"coefficient": 0.1}, "reference": {"update_every_steps": 10}}
    )
    assert checkpoint_bytes(planned(follows)) == whole + 4 * total_parameters(model)
    adapters = recipe(model__path=LLAMA_8B, train__lora={"rank": 16})
    assert 0 < checkpoint_bytes(planned(adapters)) < whole / 50


def test_checkpoints_need_room_where_they_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    of = recipe({**ONE_NODE, "checkpoint.directory": str(tmp_path)})
    model = architecture(of)
    each = checkpoint_bytes(planned(of))

    def free(checkpoints: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(each * checkpoints)))

    free(0.9)
    (problem,) = disk_problems(of, model)
    assert problem.where == "checkpoint.directory"
    free(2.5)
    assert not list(disk_problems(of, model))
    (problem,) = unwise(planned(of))
    assert "2 checkpoints and the next" in problem.needed
    (tmp_path / "step_000010").mkdir()  # takes its room already
    assert not unwise(planned(of))
    kept = of.model_copy(update={"checkpoint": of.checkpoint.model_copy(update={"keep_batches": 10**6})})
    (problem,) = unwise(planned(kept))
    assert problem.where == "checkpoint.keep_batches"
    few = kept.model_copy(update={"checkpoint": kept.checkpoint.model_copy(update={"keep_batches": 1})})
    narrowed = few.model_copy(update={"rollout": few.rollout.model_copy(update={"top_k": 10**5})})
    (alone, with_sets) = (list(unwise(planned(one))) for one in (few, narrowed))
    assert not alone
    assert any(problem.where == "checkpoint.keep_batches" for problem in with_sets)
    changes = {"export_every_steps": 1, "keep_last": 1}
    exported = of.model_copy(update={"checkpoint": of.checkpoint.model_copy(update=changes)})
    (problem,) = unwise(planned(exported))
    steps = of.train.total_steps or 0
    assert f"for {steps + 1} exported models" in problem.needed  # one after each step, and the final one
    assert byte_text(2 * total_parameters(model)) in problem.needed


def test_a_run_that_could_not_save_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(make_run(tmp_path))
    preflight(loaded)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(PreflightError, match=r"for one checkpoint"):
        preflight(loaded)
