"""The transformer-engine side against what Megatron's own code said of itself (tests/golden/te_manifest.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.weights.boxes import Box, Placement
from megagrpo.weights.coverage import Region, tiling_error
from megagrpo.weights.sides.megatron_rank import TE_SPEC
from megagrpo.weights.views import box_view
from tests.weights_oracle import ARCHITECTURES, random_checkpoint, rank_tensors

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "te_manifest.json").read_text())[
    "cases"
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_names_shapes_and_sharding_are_megatrons(case: dict[str, Any]) -> None:
    arch = ARCHITECTURES[case["kind"]](**case["architecture"])
    layout = ParallelLayout(**case["layout"])
    one = ParallelLayout()
    unsharded: dict[Box, Placement] = {}
    for placement in TE_SPEC.manifest(arch, one, rank_grid(one)[0], "float32").placements:
        unsharded.setdefault(placement.box, placement)
    for where, recorded in zip(rank_grid(layout), case["ranks"], strict=True):
        manifest = TE_SPEC.manifest(arch, layout, where, "float32")
        assert {name: list(storage.shape) for name, storage in manifest.storages.items()} == {
            name: parameter["shape"] for name, parameter in recorded.items()
        }
        regions: dict[str, list[Region]] = {name: [] for name in recorded}
        for placement in manifest.placements:
            whole = next(around for box, around in unsharded.items() if box.intersect(placement.box) == placement.box)
            regions[placement.storage].append((whole.part(placement.box).at, placement.local_shape))
            assert [int(word) for word in placement.box.tensor.split(".") if word.isdigit()] == recorded[
                placement.storage
            ]["index"]
        for name, parameter in recorded.items():
            inside = [tuple(map(tuple, part)) for part in parameter["parts"]]
            assert sum(len(by_part(part, regions[name])) for part in inside) == len(regions[name]), name
            for part in inside:
                assert not tiling_error(part, by_part(part, regions[name])), (where.rank, name)


def by_part(part: Region, regions: list[Region]) -> list[Region]:
    """The regions that lie inside a part."""
    return [
        region
        for region in regions
        if all(low <= at and at + size <= low + all_ for low, all_, at, size in zip(*part, *region, strict=True))
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_values_are_the_oracles(case: dict[str, Any]) -> None:
    arch = ARCHITECTURES[case["kind"]](**case["architecture"])
    checkpoint = random_checkpoint(arch)
    layout = ParallelLayout(**case["layout"])
    for where in rank_grid(layout):
        expected = rank_tensors(arch, layout, where, checkpoint, te=True)
        manifest = TE_SPEC.manifest(arch, layout, where, "float32")
        assert manifest.storages.keys() == expected.keys()
        for placement in manifest.placements:
            box = placement.box
            whole = Placement(box.tensor, box.start, tuple(range(len(box.shape))), box)
            held = box_view(expected[placement.storage], placement)
            assert torch.equal(held, box_view(checkpoint[box.tensor], whole)), (where.rank, placement)
