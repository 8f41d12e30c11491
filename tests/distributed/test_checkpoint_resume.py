"""A run saved in one layout continues in any other with the numbers of a run that was never interrupted."""

from __future__ import annotations

import pickle
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.checkpoint.store import SavedFile, describe
from megagrpo.errors import CheckpointError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import snapshot
from megagrpo.megatron.model_rank import SftRank
from tests.distributed.conftest import Tiny
from tests.distributed.layouts import ROWS, Row, soak
from tests.distributed.step_case import conversations, make_sft_recipe
from tests.distributed.step_ranks import on_ranks, save, sft_steps, states_of, with_noise, write

TENSOR = Row(ParallelLayout(tensor=2), "qwen2_tied", distributed_optimizer=True)


def in_row(function: Callable[..., Any], model: Path, row: Row, *args: Any, **train: Any) -> list[Any]:
    recipe = make_sft_recipe(row.layout, row.dtype, distributed_optimizer=row.distributed_optimizer, **train)
    return on_ranks(function, recipe, conversations(model), *args)


def save_and_continue(rank: SftRank, batch: RankBatch, _: None, directory: Path) -> dict[str, Any]:
    """Two steps, a snapshot, two more steps, and only then the files. The losses and norms of the last two steps."""
    sft_steps(rank, batch, 2)
    rank.take_snapshot()
    random = torch.rand(3).tolist()
    after = sft_steps(rank, batch, 2)
    write(rank, directory)
    return {"after": after, "states": states_of(rank.policy), "random": random}


def load_and_continue(rank: SftRank, batch: RankBatch, _: None, directory: Path) -> dict[str, Any]:
    """Loads a checkpoint into a model of noise, and returns the next two steps."""
    with_noise(rank).load(directory)
    random = torch.rand(3).tolist()
    return {"after": sft_steps(rank, batch, 2), "states": states_of(rank.policy), "random": random}


def four_steps(rank: SftRank, batch: RankBatch, _: None) -> dict[str, Any]:
    return {"after": sft_steps(rank, batch, 4)[4:]}


# Each row of four layers is saved, and loaded in the next of its kind.
CHAINS = {
    "qwen2_tied": ["unequal, data", "tensor", "context, data", "three stages", "one rank"],
    "qwen3_moe": ["expert, data", "tensor, unequal", "one rank", "expert over tensor", "all"],
    "deepseek_v3": ["tensor, data", "unequal, context, expert", "virtual, context"],
}
PAIRS = [
    (family, saved, loaded)
    for family, names in CHAINS.items()
    for saved, loaded in zip(names, [*names[1:], names[0]], strict=True)
]
IN_EVERY_RUN = [next(pair for pair in PAIRS if pair[0] == family) for family in CHAINS]
LONG = [("qwen2_tied", "context, data", "three stages"), ("qwen3_moe", "expert over tensor", "all")]
LONG += [("qwen3_moe", "all", "expert, data"), ("deepseek_v3", "unequal, context, expert", "virtual, context")]


@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [
        *IN_EVERY_RUN,
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in LONG),
        *soak(*(pair for pair in PAIRS if pair not in (*IN_EVERY_RUN, *LONG))),
    ],
)
def test_a_run_continues_in_another_layout(family: str, saved: str, loaded: str, tiny: Tiny, tmp_path: Path) -> None:
    first, second = (replace(ROWS[name], layout=ROWS[name].of(family), dtype="float32") for name in (saved, loaded))
    # Two steps of Adam enlarge what float32 rounds in another order.
    between_layouts = 3e-5 if family == "deepseek_v3" else 5e-6
    run, alone, resumed = (
        figures(in_row(function, tiny(family), row, *args))
        for function, row, *args in (
            (save_and_continue, first, tmp_path),
            (four_steps, ROWS["one rank"]),
            (load_and_continue, second, tmp_path),
        )
    )
    assert run == pytest.approx(alone, rel=between_layouts)
    assert resumed == pytest.approx(run, rel=between_layouts)


@pytest.mark.long
@pytest.mark.parametrize("saved_by", ["local", "transformer_engine"])
def test_a_run_continues_with_the_other_layers_and_their_adam(saved_by: str, tiny: Tiny, tmp_path: Path) -> None:
    """Transformer Engine's Adam counts its steps for groups of parameters, torch's for each."""
    saved, loaded = ROWS["expert, data"], replace(ROWS["tensor, data"], family="qwen3_moe")
    (loaded_by,) = {"local", "transformer_engine"} - {saved_by}
    run = figures(in_row(save_and_continue, tiny("qwen3_moe"), saved, tmp_path, layer_spec=saved_by))
    resumed = figures(in_row(load_and_continue, tiny("qwen3_moe"), loaded, tmp_path, layer_spec=loaded_by))
    assert resumed == pytest.approx(run, rel=5e-6)


def figures(results: list[dict[str, Any]]) -> list[float]:
    """Losses and norms of the steps, alike on all ranks that know them."""
    (found,) = {tuple(result["after"]) for result in results if result["after"]}
    return list(found)


@pytest.mark.parametrize("name", [*soak("tensor", "unequal, data"), "tensor, unequal", "expert, data"])
def test_in_the_same_layout_a_run_continues_bit_for_bit(name: str, tiny: Tiny, tmp_path: Path) -> None:
    row = ROWS[name]
    run, resumed = (
        in_row(function, tiny(row.family), row, tmp_path) for function in (save_and_continue, load_and_continue)
    )
    for whole, continued in zip(run, resumed, strict=True):
        assert continued["after"] == whole["after"]
        assert continued["random"] == whole["random"]
        assert continued["states"].keys() == whole["states"].keys()
        for tensor, value in continued["states"].items():
            assert torch.equal(value, whole["states"][tensor]), tensor


def test_a_tied_embedding_that_data_ranks_cut_on_two_stages_is_saved_once(tiny: Tiny, tmp_path: Path) -> None:
    # So large that data ranks would cut it differently on the two stages, had it no bucket of its own.
    model = tiny("qwen2_tied", vocab_size=1001)
    row = Row(ParallelLayout(pipeline=2, data=2), "qwen2_tied", distributed_optimizer=True)
    run = figures(in_row(save_and_continue, model, row, tmp_path))
    resumed = figures(in_row(load_and_continue, model, ROWS["one rank"], tmp_path))
    assert resumed == pytest.approx(run, rel=5e-6)


# --- files and errors -------------------------------------------------------------------------------------------------


def step_and_save(rank: SftRank, batch: RankBatch, _: None, directory: Path) -> tuple[SavedFile, ...]:
    sft_steps(rank, batch, 1)
    return save(rank, directory)


@pytest.fixture(scope="module")
def saved(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[SavedFile]]:
    """A checkpoint of two tensor ranks, and the files that they report."""
    directory = tmp_path_factory.mktemp("saved")
    return directory, [file for files in in_row(step_and_save, tiny("qwen2_tied"), TENSOR, directory) for file in files]


def test_what_the_ranks_report_is_what_lies_in_the_directory(saved: tuple[Path, list[SavedFile]]) -> None:
    directory, files = saved
    assert sorted(file.path for file in files) == sorted(path.name for path in directory.iterdir())
    assert all(describe(directory, directory / file.path) == file for file in files)


def failed_loads(rank: SftRank, batch: RankBatch, _: None, directories: list[Path]) -> list[str]:
    """The errors. The rank's weights and states stay as they were."""
    sft_steps(rank, batch, 1)
    before, errors = states_of(rank.policy), []
    for directory in directories:
        with pytest.raises(CheckpointError) as error:
            rank.load(directory)
        errors.append(str(error.value))
    assert all(torch.equal(tensor, before[name]) for name, tensor in states_of(rank.policy).items())
    return errors


def test_another_model_is_refused_by_name_on_every_rank_before_anything_changes(
    saved: tuple[Path, list[SavedFile]], tiny: Tiny
) -> None:
    for (message,) in in_row(failed_loads, tiny("qwen3_moe"), ROWS["three stages"], [saved[0]]):
        assert "exp_avg.model.layers.0.mlp.experts.0.gate_proj.weight" in message  # rank 0's, and
        assert "param.lm_head.weight" in message  # the last rank's, on all


def test_files_that_cannot_be_read_are_a_checkpoint_error_on_every_rank(
    saved: tuple[Path, list[SavedFile]], tiny: Tiny, tmp_path: Path
) -> None:
    files = [".metadata", "common.pt", "__1_0.distcp"]
    for file in files:
        shutil.copytree(saved[0], tmp_path / file)
        (tmp_path / file / file).write_bytes(b"")
    results = in_row(failed_loads, tiny("qwen2_tied"), TENSOR, [tmp_path / file for file in files])
    for message in [message for messages in results for message in messages]:
        assert message.startswith("checkpoint error")


def save_on_a_full_disk(rank: SftRank, batch: RankBatch, _: None, directories: list[Path]) -> list[str]:
    """The errors of saves during which this rank cannot write: no other rank waits for it, or fails with it."""
    sft_steps(rank, batch, 1)
    limits, errors = resource.getrlimit(resource.RLIMIT_FSIZE), []
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for full_rank, directory in enumerate(directories):
        rank.take_snapshot()
        if dist.get_rank() != full_rank:
            rank.write_snapshot(directory)
            continue
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        with pytest.raises(CheckpointError) as error:
            rank.write_snapshot(directory)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        errors.append(str(error.value))
    return errors


def test_a_full_disk_is_a_checkpoint_error_of_the_rank_that_finds_it(tiny: Tiny, tmp_path: Path) -> None:
    directories = [tmp_path / "rank 0", tmp_path / "rank 1"]
    for directory in directories:
        directory.mkdir()
    for (message,) in in_row(save_on_a_full_disk, tiny("qwen2_tied"), TENSOR, directories):
        assert "File too large" in message


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def save_with_code(rank: SftRank, batch: RankBatch, _: None, directories: dict[str, Path]) -> None:
    """Checkpoints as a stranger may have made them: with an object that runs code when it is unpickled."""
    sft_steps(rank, batch, 1)
    for where, directory in directories.items():
        code = Touches(directory / "ran")
        if where == "generators":
            snapshot.generators = lambda code=code: {"torch": code}  # type: ignore[misc]
        save(rank, directory)
        if where == ".metadata":
            (directory / where).write_bytes(pickle.dumps(code))
        if where == "common.pt":
            torch.save({"format": 1, "code": code}, directory / where)


def test_code_in_a_checkpoint_does_not_run(tiny: Tiny, tmp_path: Path) -> None:
    directories = {name: tmp_path / name for name in (".metadata", "common.pt", "generators")}
    for directory in directories.values():
        directory.mkdir()
    in_row(save_with_code, tiny("qwen2_tied"), ROWS["one rank"], directories)
    for directory in directories.values():
        ((message,),) = in_row(failed_loads, tiny("qwen2_tied"), ROWS["one rank"], [directory])
        assert directory.name in message
        assert not (directory / "ran").exists()
