"""Manifests of SGLang's ranks and of Megatron's with transformer-engine, and docs/families.md: a new family is one
function. Against whole tensors padded, cut and fused, and Megatron's own answers (tests/golden/te_manifest.json)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megagrpo import cli
from megagrpo.convert.targets import to_hugging_face, to_megatron
from megagrpo.errors import ModelError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.boxes import Box, Placement
from megagrpo.weights.coverage import storage_problems, tiling_error
from megagrpo.weights.families import FAMILIES, Family, read_architecture
from megagrpo.weights.families.architecture import Architecture, critic_of
from megagrpo.weights.families.reading import ConfigReader
from megagrpo.weights.families.sglang_classes import SglangClass
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides import sglang
from megagrpo.weights.sides.checkpoint import transformers_manifest
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC, TE_SPEC
from tests.safetensors_files import assert_same_files
from tests.tiny_run import make_run
from tests.weight_streams import Case, assert_equal, carry_out, manifests, through_ranks
from tests.weights_oracle import (
    ARCHITECTURES,
    architecture,
    engine_tensors,
    held_by_ranks,
    latent_architecture,
    moe_architecture,
    random_checkpoint,
)

# --- SGLang -----------------------------------------------------------------------------------------------------------


@st.composite
def engines(draw: st.DrawFn) -> Case:
    """A model and an engine that can hold it. Sizes that need padding, and sizes that do not."""
    tensor, device = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from(["cpu", "cuda"]))
    per_rank = draw(st.integers(1, 2))
    groups = tensor * per_rank if device == "cpu" or tensor == 3 else draw(st.sampled_from([1, 2, 4, 8]))
    heads = max(groups, tensor) * draw(st.integers(1, 2))
    changes: dict[str, Any] = {
        "layers": draw(st.integers(1, 3)),
        "heads": heads,
        "groups": groups,
        "head_dim": draw(st.sampled_from([3, 6])),
        "vocab": draw(st.sampled_from([31, 64, 65, 129, 192])),
        # Only the CPU pads MLPs that do not divide.
        "ffn": 12 * draw(st.integers(1, 9)) - (draw(st.integers(0, 1)) if device == "cpu" else 0),
    }
    kind = draw(st.sampled_from(["dense", "experts", "mixtral", "latent"]))
    sizes = {"pipeline": draw(st.integers(1, changes["layers"])), "attention_data": 1}
    if kind != "mixtral":
        sizes["attention_data"] = draw(st.sampled_from([size for size in (1, 2, 3, 4) if tensor % size == 0]))
    if kind == "dense":
        own = {"family": "qwen3", "norm": True} if sizes["attention_data"] > 1 else {}
        arch = architecture(**changes, **own, tied_embeddings=draw(st.booleans()))
        return Case(arch, ParallelLayout(), tensor, device=device, **sizes)
    expert = draw(st.sampled_from([size for size in (1, 2, 3, 4) if tensor % size == 0]))
    changes |= {"experts": 12, "expert_ffn": 12 * draw(st.integers(1, 9))}
    make = latent_architecture if kind == "latent" else moe_architecture
    if kind == "mixtral":
        hidden = heads * changes["head_dim"]  # SGLang's mixtral derives head_dim from it
        changes |= {"family": "mixtral", "hidden": hidden, "norm": False}
    if kind == "latent":
        shared, dense = changes["expert_ffn"] * draw(st.integers(1, 2)), draw(st.integers(0, 1))
        changes |= {"query_rank": draw(st.sampled_from([None, 12])), "plain_dim": changes["head_dim"] - 2}
        changes |= {"shared_ffn": shared, "dense": dense}
    return Case(make(**changes), ParallelLayout(), tensor, expert=expert, device=device, **sizes)


@settings(max_examples=40)
@given(case=engines())
def test_engine_ranks_get_what_the_oracle_says(case: Case) -> None:
    checkpoint = random_checkpoint(case.arch)
    plan = replace(case, one_node=False).plan()
    assert not [problem for manifest in plan.destinations for problem in storage_problems(manifest)]
    for rank, tensors in enumerate(carry_out(plan, case.held(checkpoint))):
        assert plan.destinations[rank].holder == f"engine 0 rank {rank}"
        assert_equal(tensors, case.served(checkpoint, rank))


NINE_ROWS = moe_architecture(expert_ffn=9)


@pytest.mark.parametrize(
    ("arch", "layout", "device", "named"),
    [
        (architecture(), {"tensor": 3}, "cuda", ["attention heads: 4", "ffn: 28", "a multiple or a divisor of 3"]),
        (architecture(), {"tensor": 4}, "cpu", ["key-value heads: 2", "a multiple of 4, on the CPU"]),
        (architecture(heads=12, groups=4), {"tensor": 6}, "cuda", ["key-value heads: 4"]),
        (moe_architecture(), {"tensor": 4, "expert": 3}, "cuda", ["a divisor of tensor = 4"]),
        (moe_architecture(), {"tensor": 4, "attention_data": 3}, "cuda", ["a divisor of tensor = 4"]),
        (architecture(), {"tensor": 2, "attention_data": 2}, "cuda", ["SGLang has it for", "qwen3"]),
        (architecture(layers=2), {"pipeline": 3}, "cuda", ["2 layers", "a layer for each stage"]),
        (architecture(family="llama", tied_embeddings=True), {"pipeline": 2}, "cuda", ["tied", "has no head"]),
        (latent_architecture(heads=8), {"tensor": 8, "expert": 4}, "cuda", ["experts: 4", "at least 8"]),
        (NINE_ROWS, {"tensor": 2}, "cuda", ["expert ffn: 9"]),
        (NINE_ROWS, {"tensor": 2}, "cpu", ["expert ffn: 9"]),  # SGLang would leave the last row out
        (critic_of(architecture()), {"tensor": 1}, "cuda", ["qwen2 on SGLang", "a value head"]),
        (latent_architecture(), {"tensor": 3}, "cpu", ["deepseek_v3", "attention heads: 4"]),
        (moe_architecture(family="mixtral"), {"tensor": 1}, "cuda", ["head_dim"]),
        (moe_architecture(tied_embeddings=True), {"tensor": 1}, "cuda", ["tied", "a head of its own"]),
        (latent_architecture(family="glm4_moe_lite", query_rank=None), {"tensor": 1}, "cuda", ["q_lora_rank"]),
        (architecture(family="qwen2_moe"), {"tensor": 1}, "cuda", ["MLPs in some layers"]),
        (architecture(family="gemma2"), {"tensor": 1}, "cuda", ["a head of its own"]),
        (architecture(family="exaone4"), {"tensor": 1}, "cuda", ["head_dim"]),
        (architecture(family="granite"), {"pipeline": 2}, "cuda", ["pipeline = 2", "no stages"]),
        (moe_architecture(family="gpt_oss"), {"tensor": 2, "expert": 2}, "cuda", ["does not load parts"]),
    ],
)
def test_what_an_engine_cannot_hold_is_refused(
    arch: Architecture, layout: dict[str, int], device: str, named: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        sglang.manifest(arch, EngineLayoutConfig(**layout), 0, "float32", device)
    assert all(text in str(caught.value) for text in named), caught.value


def test_a_class_whose_blocks_are_others_is_not_quantised() -> None:
    (problem,) = sglang.split_problems(moe_architecture(family="gpt_oss"), EngineLayoutConfig(), "cuda", "fp8")
    assert "not all in blocks" in str(problem)


def test_an_engine_keeps_the_biases_of_routers_in_float32() -> None:
    manifest = sglang.manifest(latent_architecture(), EngineLayoutConfig(), 0, "bfloat16", "cpu")
    wide = {name for name, storage in manifest.storages.items() if storage.dtype != "bfloat16"}
    assert wide == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}


# --- Megatron with transformer-engine ---------------------------------------------------------------------------------

CASES = json.loads((Path(__file__).parents[1] / "golden" / "te_manifest.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_names_shapes_and_sharding_are_megatrons(case: dict[str, Any]) -> None:
    arch, layout = ARCHITECTURES[case["kind"]](**case["architecture"]), ParallelLayout(**case["layout"])
    unsharded: dict[Box, Placement] = {}
    for placement in manifests(arch, ParallelLayout(), spec=TE_SPEC)[0].placements:
        unsharded.setdefault(placement.box, placement)
    for manifest, recorded in zip(manifests(arch, layout, spec=TE_SPEC), case["ranks"], strict=True):
        assert {name: list(storage.shape) for name, storage in manifest.storages.items()} == {
            name: parameter["shape"] for name, parameter in recorded.items()
        }
        regions: dict[str, list[Box]] = {name: [] for name in recorded}
        for placement in manifest.placements:
            whole = next(around for box, around in unsharded.items() if box.intersect(placement.box) == placement.box)
            at = whole.part(placement.box).at
            regions[placement.storage].append(Box("", at, placement.local_shape))
            numbers = [int(word) for word in placement.box.tensor.split(".") if word.isdigit()]
            assert numbers == recorded[placement.storage]["index"]
        for name, parameter in recorded.items():
            inside = [Box("", *map(tuple, part)) for part in parameter["parts"]]
            assert sum(len(by_part(part, regions[name])) for part in inside) == len(regions[name]), name
            for part in inside:
                assert not tiling_error(part, by_part(part, regions[name])), (manifest.holder, name)


def by_part(part: Box, regions: list[Box]) -> list[Box]:
    """The regions that lie inside a part."""
    return [region for region in regions if region.intersect(part) == region]


# --- a new family -----------------------------------------------------------------------------------------------------


def toy(config: Mapping[str, Any]) -> Architecture:
    """The whole of a family's file: biases and norms of queries and keys together, which no other family has."""
    read = ConfigReader(config)
    read.refuse_if_set("mlp_bias")
    return read.model([read.layer(read.attention(bias=True, norm="head"), read.mlp())] * read.layers)


def test_a_dense_family_is_one_function_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FAMILIES, "toy", Family(toy, sglang=SglangClass(attention_groups=True)))
    recipe = make_run(tmp_path, model_type="toy", head_dim=6, tie_word_embeddings=False)
    model = tmp_path / "model"
    arch, layout = read_architecture(model), ParallelLayout(tensor=2, pipeline=2)
    checkpoint = random_checkpoint(arch)
    save_file(checkpoint, model / "model.safetensors", {"format": "pt"})
    sizes = EngineLayoutConfig(tensor=2, attention_data=2)
    engines = [sglang.manifest(arch, sizes, rank, "float32", "cpu") for rank in range(2)]
    for spec in (LOCAL_SPEC, TE_SPEC):
        out = tmp_path / ("te" if spec is TE_SPEC else "local")
        held, ranks = manifests(arch, layout, spec=spec), through_ranks(model, out, layout, spec=spec)
        assert_same_files(model, out)
        for tensors, expected in zip(ranks, held_by_ranks(arch, layout, checkpoint, spec is TE_SPEC), strict=True):
            assert_equal(tensors, expected)
        for rank, tensors in enumerate(carry_out(make_plan(held, engines), ranks)):
            assert_equal(tensors, engine_tensors(arch, sizes, rank, "cpu", checkpoint))
        (whole,) = carry_out(make_plan(held, [transformers_manifest(arch, "float32")]), ranks)
        assert_equal(whole, checkpoint)
    to_megatron(model, tmp_path / "megatron")
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    assert_same_files(model, tmp_path / "back")
    assert cli.main(["plan", str(recipe), "rollout.engine=sglang", "cluster.device=cuda"]) == 0
    assert "toy of" in capsys.readouterr().out
