"""A run saved in one layout continues in any other with the numbers of a run that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_group import run_ranks
from tests.tiny_models import make_model

HERE = "tests.distributed.test_checkpoint_resume"


def save_and_continue(model: Path, directory: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Two steps, a save, two more steps. The files, and the losses and norms of the last two."""
    from megagrpo.megatron import state
    from tests.distributed.tiny_training import TinyTraining, options

    training = TinyTraining(model, **options(layout))
    before = training.steps(2)
    files = state.save(training.state, directory)
    return {"files": files, "before": before, "after": training.steps(2), "tensors": training.tensors()}


def load_and_continue(model: Path, directory: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """What the two steps after a load give, started from weights that are noise."""
    from megagrpo.megatron import state
    from tests.distributed.tiny_training import TinyTraining, options

    training = TinyTraining(model, **options({"weights": False, **layout}))
    state.load(training.state, directory)
    return {"after": training.steps(2), "tensors": training.tensors()}


def ranks_of(layout: dict[str, Any]) -> int:
    result = 1
    for axis in ("tensor", "pipeline", "context", "data"):
        result *= layout.get(axis, 1)
    return result


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_model(family, root / family) for family in ("qwen2_tied", "qwen3_moe")}


@pytest.fixture(scope="session")
def uninterrupted(models: dict[str, Path]) -> dict[str, Any]:
    """Losses and gradient norms of steps 3 and 4 on one rank."""
    return {family: run_ranks(1, f"{HERE}:just_train", model)[0] for family, model in models.items()}


def just_train(model: Path) -> list[tuple[float, float]]:
    from tests.distributed.tiny_training import TinyTraining

    return TinyTraining(model, {}).steps(4)[2:]


ONE = {"tensor": 1}
DENSE = [
    ({"tensor": 2, "pipeline": 2}, [ONE, {"tensor": 2}, {"pipeline": 2}, {"data": 2}]),
    ({"tensor": 2, "data": 2}, [{"pipeline": 2, "virtual_pipeline": 2, "distributed_optimizer": False}]),
    ({"pipeline": 2, "virtual_pipeline": 2}, [{"context": 2}]),
    ({"data": 2, "distributed_optimizer": False}, [{"tensor": 2, "data": 2}]),
]
EXPERTS = [
    ({"expert": 2, "data": 2}, [ONE, {"tensor": 2, "expert_tensor": 2}, {"expert": 2, "tensor": 2}]),
    ({"tensor": 2, "expert_tensor": 2, "distributed_optimizer": False}, [{"expert": 2, "data": 2}]),
    (ONE, [{"expert": 2, "data": 2, "pipeline": 2}]),
]


@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [("qwen2_tied", *case) for case in DENSE] + [("qwen3_moe", *case) for case in EXPERTS],
)
def test_a_run_continues_in_other_layouts(
    family: str,
    saved: dict[str, Any],
    loaded: list[dict[str, Any]],
    models: dict[str, Path],
    uninterrupted: dict[str, Any],
    tmp_path: Path,
) -> None:
    run = run_ranks(ranks_of(saved), f"{HERE}:save_and_continue", models[family], tmp_path, saved)[0]
    assert close(run["after"], uninterrupted[family]), (run["after"], uninterrupted[family])
    for layout in loaded:
        resumed = run_ranks(ranks_of(layout), f"{HERE}:load_and_continue", models[family], tmp_path, layout)[0]
        assert close(resumed["after"], run["after"]), (layout, resumed["after"], run["after"])


def close(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> bool:
    return all(torch.allclose(torch.tensor(a), torch.tensor(b), rtol=0, atol=2e-6) for a, b in zip(some, others, strict=True))
