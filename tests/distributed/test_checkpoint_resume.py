"""A run saved in one layout continues in any other with the numbers of a run that was never interrupted."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from megagrpo.checkpoint.store import describe
from megagrpo.errors import CheckpointError
from megagrpo.megatron import state
from tests.distributed.conftest import Tiny
from tests.distributed.tiny_training import TinyTraining, options
from tests.rank_group import run_ranks


def save_and_continue(model: Path, directory: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Two steps, a save, two more steps. The files, and the losses and norms of the last two."""
    training = TinyTraining(model, **options(layout))
    training.steps(2)
    files = state.save(training.state, directory)
    random = torch.rand(3).tolist()
    return {"files": files, "after": training.steps(2), "tensors": training.tensors(), "random": random}


def load_and_continue(model: Path, directory: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """What the two steps after a load give, started from weights that are noise."""
    training = TinyTraining(model, **options({"weights": False, **layout}))
    state.load(training.state, directory)
    random = torch.rand(3).tolist()
    return {"after": training.steps(2), "tensors": training.tensors(), "random": random}


def ranks_of(layout: dict[str, Any]) -> int:
    result = 1
    for axis in ("tensor", "pipeline", "context", "data"):
        result *= layout.get(axis, 1)
    return result


def just_train(model: Path) -> list[tuple[float, float]]:
    return TinyTraining(model, {}).steps(4)[2:]


ONE = {"tensor": 1}
DENSE = [
    ({"tensor": 2, "pipeline": 2}, [ONE, {"tensor": 2}, {"pipeline": 2, "first_stage_layers": 3}, {"data": 2}]),
    ({"tensor": 2, "data": 2}, [{"pipeline": 2, "virtual_pipeline": 2, "distributed_optimizer": False}]),
    ({"pipeline": 2, "virtual_pipeline": 2}, [{"context": 2}]),
    ({"data": 2, "distributed_optimizer": False}, [{"tensor": 2, "data": 2}]),
]
EXPERTS = [
    ({"expert": 2, "data": 2}, [ONE, {"tensor": 2, "expert_tensor": 2}, {"expert": 2, "tensor": 2}]),
    ({"tensor": 2, "expert_tensor": 2, "distributed_optimizer": False}, [{"expert": 2, "data": 2}]),
    (ONE, [{"expert": 2, "data": 2, "pipeline": 2}]),
]
LATENT = [({"tensor": 2, "pipeline": 2, "expert_tensor": 2}, [{"expert": 2, "data": 2}])]


@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [
        ("qwen2_tied", *DENSE[0]),
        ("qwen3_moe", *EXPERTS[0]),
        ("deepseek_v3", *LATENT[0]),
        *(pytest.param("qwen2_tied", *case, marks=pytest.mark.long) for case in DENSE[1:]),
        *(pytest.param("qwen3_moe", *case, marks=pytest.mark.long) for case in EXPERTS[1:]),
        *(pytest.param("deepseek_v3", *case, marks=pytest.mark.long) for case in LATENT[1:]),
    ],
)
def test_a_run_continues_in_other_layouts(
    family: str,
    saved: dict[str, Any],
    loaded: list[dict[str, Any]],
    tiny: Tiny,
    tmp_path: Path,
) -> None:
    run = run_ranks(ranks_of(saved), save_and_continue, tiny(family), tmp_path, saved)[0]
    between_layouts = 1e-5 if family == "deepseek_v3" else 2e-6  # its gradients are larger, after two steps of Adam
    alone = run_ranks(1, just_train, tiny(family))[0]
    assert close(run["after"], alone, between_layouts), (run["after"], alone)
    for layout in loaded:
        resumed = run_ranks(ranks_of(layout), load_and_continue, tiny(family), tmp_path, layout)[0]
        assert close(resumed["after"], run["after"]), (layout, resumed["after"], run["after"])


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_tied", {"tensor": 2, "data": 2, "dtype": torch.bfloat16}),
        (
            "qwen2_tied",
            {"pipeline": 2, "last_stage_layers": 1, "dtype": torch.bfloat16, "distributed_optimizer": False},
        ),
        ("qwen3_moe", {"expert": 2, "data": 2}),
    ],
)
def test_in_the_same_layout_a_run_continues_bit_for_bit(
    family: str, layout: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    run = run_ranks(ranks_of(layout), save_and_continue, tiny(family), tmp_path, layout)
    resumed = run_ranks(ranks_of(layout), load_and_continue, tiny(family), tmp_path, layout)
    for whole, continued in zip(run, resumed, strict=True):
        assert continued["after"] == whole["after"]
        assert continued["random"] == whole["random"]
        assert continued["tensors"].keys() == whole["tensors"].keys()
        for name, tensor in continued["tensors"].items():
            assert torch.equal(tensor, whole["tensors"][name]), name


def test_what_the_ranks_report_is_what_lies_in_the_directory(tiny: Tiny, tmp_path: Path) -> None:
    results = run_ranks(2, save_and_continue, tiny("qwen2_tied"), tmp_path, {"tensor": 2})
    files = [file for result in results for file in result["files"]]
    assert sorted(file.path for file in files) == sorted(path.name for path in tmp_path.iterdir())
    assert all(describe(tmp_path, tmp_path / file.path) == file for file in files)


def load_and_report(model: Path, directory: Path, layout: dict[str, Any]) -> tuple[str, bool]:
    """The error of a load, and whether the rank's weights and states are still as they were."""
    training = TinyTraining(model, **options(layout))
    training.step()
    before = training.tensors()
    try:
        state.load(training.state, directory)
    except CheckpointError as error:
        after = training.tensors()
        return str(error), all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    return "", False


def test_another_model_is_refused_by_name_on_every_rank_before_anything_changes(tiny: Tiny, tmp_path: Path) -> None:
    run_ranks(1, save_and_continue, tiny("qwen2_tied"), tmp_path, ONE)
    for message, untouched in run_ranks(2, load_and_report, tiny("qwen3_moe"), tmp_path, {"pipeline": 2}):
        assert untouched
        assert "exp_avg.model.layers.0.mlp.experts.0.gate_proj.weight" in message  # rank 0's, and
        assert "param.lm_head.weight" in message  # rank 1's, on both


@pytest.mark.parametrize("file", [".metadata", "common.pt", "__1_0.distcp"])
def test_files_that_cannot_be_read_are_a_checkpoint_error_on_every_rank(file: str, tiny: Tiny, tmp_path: Path) -> None:
    run_ranks(2, save_and_continue, tiny("qwen2_tied"), tmp_path, {"tensor": 2})
    (tmp_path / file).write_bytes(b"")
    for message, _ in run_ranks(2, load_and_report, tiny("qwen2_tied"), tmp_path, {"tensor": 2}):
        assert message.startswith("checkpoint error")
        assert "cannot be read" in message


def save_on_a_full_disk(model: Path, directory: Path, full_rank: int) -> tuple[str, list[str]]:
    """The error of a save while one rank cannot write, and the processes that it left behind."""
    training = TinyTraining(model, {"tensor": 2})
    training.step()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        state.save(training.state, directory)
    except CheckpointError as error:
        return str(error), [child.name() for child in psutil.Process().children()]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    return "", []


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_a_checkpoint_error_on_all(full_rank: int, tiny: Tiny, tmp_path: Path) -> None:
    results = run_ranks(2, save_on_a_full_disk, tiny("qwen2_tied"), tmp_path, full_rank)
    for message, processes in results:
        assert message.startswith("checkpoint error")
        assert "File too large" in message
        assert processes == []


def test_a_tied_embedding_that_data_ranks_cut_on_two_stages_is_saved_once(tiny: Tiny, tmp_path: Path) -> None:
    # So large that data ranks would cut it differently on the two stages, had it no bucket of its own.
    model = tiny("qwen2_tied", vocab_size=1001)
    layout = {"pipeline": 2, "data": 2}
    run = run_ranks(4, save_and_continue, model, tmp_path, layout)[0]
    resumed = run_ranks(1, load_and_continue, model, tmp_path, ONE)[0]
    assert close(resumed["after"], run["after"])


def close(some: list[tuple[float, float]], others: list[tuple[float, float]], atol: float = 2e-6) -> bool:
    return torch.allclose(torch.tensor(some), torch.tensor(others), rtol=0, atol=atol)
