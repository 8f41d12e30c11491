"""Files into ranks: every rank of every layout gets what the naive oracle says, reading only what it owns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.executors.checkpoint_files import load
from megagrpo.weights.families import read_architecture
from megagrpo.weights.sides import megatron_local
from megagrpo.weights.views import torch_dtype
from safetensors.torch import load_file
from tests.tiny_models import FAMILIES, make_model
from tests.weights_oracle import rank_tensors

LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(tensor=2),
    ParallelLayout(tensor=4),  # more ranks than query groups
    ParallelLayout(pipeline=2),
    ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2),
    ParallelLayout(data=2, context=2, expert=4),
    ParallelLayout(tensor=2, pipeline=2, data=2, expert=2, expert_tensor=2),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def empty(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Tensors for a manifest, full of a value that no checkpoint holds."""
    return {
        name: torch.full(storage.shape, torch.nan, dtype=torch_dtype(storage.dtype))
        for name, storage in manifest.storages.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_of_every_layout_holds_what_the_oracle_says(family: str, models: Path) -> None:
    directory = make_model(family, models / family)
    arch = read_architecture(directory)
    checkpoint = load_file(directory / "model.safetensors")
    for layout in LAYOUTS:
        for where in rank_grid(layout):
            manifest = megatron_local.manifest(arch, layout, where, "float32")
            tensors = empty(manifest)
            load(directory, manifest, tensors)
            expected = rank_tensors(arch, layout, where, checkpoint)
            assert tensors.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(tensors[name], tensor), (str(layout), where.rank, name)
