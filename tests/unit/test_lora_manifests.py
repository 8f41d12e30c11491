"""Adapters that ranks hold: together all of every A and B, in every layout; and the offsets of A."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megagrpo.errors import WeightPlanError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.coverage import check_sources
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.files.adapters import (
    TARGETS,
    adapted_linears,
    adapted_matrices,
    adapter_manifest,
    adapter_tensors,
    initial_a,
    peft_config,
)
from tests.tiny_models import make_model
from tests.weight_streams import manifests

ALL = sorted(set(TARGETS.values()))
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(tensor=2, pipeline=2, data=2),
    ParallelLayout(tensor=4, context=2),
    ParallelLayout(pipeline=2, virtual_pipeline=2),
    ParallelLayout(tensor=2, expert=2, pipeline=2),
    ParallelLayout(expert=4, data=4),
]


def adapters_of(arch: Architecture, layout: ParallelLayout, targets: list[str]) -> list[Manifest]:
    ranks = manifests(arch, layout, "bfloat16")
    return [adapter_manifest(base, adapted_linears(arch, base, targets), 4) for base in ranks]


@pytest.mark.parametrize("family", ["llama", "qwen2_tied", "mixtral"])
def test_ranks_hold_all_of_every_adapter(family: str, tmp_path: Path) -> None:
    arch = read_architecture(make_model(family, tmp_path / family))
    for targets in (ALL, ["k_proj", "down_proj"], ["up_proj"]):
        matrices = adapted_matrices(arch, targets)
        tensors = adapter_tensors(matrices, 4)
        assert len(tensors) == 2 * len(matrices)
        for layout in LAYOUTS:
            if not arch.experts:
                layout = replace(layout, expert=1, expert_tensor=layout.tensor)
            held = adapters_of(arch, layout, targets)
            check_sources(tensors, held)
            for manifest in held:
                for name, storage in manifest.storages.items():
                    assert storage.shape[1 if name.endswith("lora_B") else 0] % 4 == 0
    with pytest.raises(WeightPlanError):
        check_sources(tensors, adapters_of(arch, ParallelLayout(pipeline=2), ["up_proj"])[:1])


def test_a_begins_as_peft_has_it_by_name_and_seed_alone() -> None:
    first = initial_a("model.layers.0.mlp.up_proj.weight", 16, 400, seed=1)
    assert torch.equal(first, initial_a("model.layers.0.mlp.up_proj.weight", 16, 400, seed=1))
    assert not torch.equal(first, initial_a("model.layers.1.mlp.up_proj.weight", 16, 400, seed=1))
    assert not torch.equal(first, initial_a("model.layers.0.mlp.up_proj.weight", 16, 400, seed=2))
    # Uniform within 1 / sqrt(inputs): what kaiming_uniform with a = sqrt(5) comes to.
    bound = 400**-0.5
    assert 0.99 * bound < first.abs().max() <= bound
    assert first.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
    assert abs(first.mean().item()) < 0.03 * bound


def test_the_config_names_modules_as_the_family_does(tmp_path: Path) -> None:
    arch = read_architecture(make_model("mixtral", tmp_path / "mixtral"))
    config = peft_config(adapted_matrices(arch, ["q_proj", "gate_proj", "down_proj"]), 4, 6.5, "base")
    assert config["target_modules"] == ["q_proj", "w1", "w2"]
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 6.5, "LORA")
    assert peft_config([], 4, 6.0, "base")["lora_alpha"] == 6
