"""Files into ranks and ranks into files: every rank holds what the oracle says, and the same bits come out again."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megagrpo.errors import CheckpointError, ModelError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.rollout.transformers_engine import load_model
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files import loading
from megagrpo.weights.files.export import begin_export, finish_export
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides import checkpoint
from megagrpo.weights.sides.checkpoint import PROBLEMS_MAX, extra_tensors, file_tensors, transformers_manifest
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC, TE_SPEC
from megagrpo.weights.views import model_tensors
from tests.safetensors_files import LARGE, assert_same_files, in_fp8, saved, stack_experts, with_tensors
from tests.tiny_models import COMPOSITES, OTHER_FAMILIES, TINY_FAMILIES, USUAL_FAMILIES, make_model
from tests.weight_streams import assert_equal, carry_out, loaded, manifests, through_ranks
from tests.weights_oracle import Tensors, held_by_ranks

LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(tensor=2),
    ParallelLayout(tensor=4),  # more ranks than query groups
    ParallelLayout(pipeline=2),
    ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2),
    ParallelLayout(pipeline=3, last_stage_layers=2),
    ParallelLayout(data=2, context=2, expert=4),
    ParallelLayout(tensor=2, pipeline=2, data=2, expert=2, expert_tensor=2),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "weights_models"


@pytest.fixture
def model(models: Path, tmp_path: Path) -> Path:
    """A copy of a model, to be damaged."""
    return Path(shutil.copytree(make_model("qwen3_moe", models / "qwen3_moe"), tmp_path / "model"))


@pytest.mark.parametrize("family", USUAL_FAMILIES)
def test_every_layout_loads_what_the_oracle_says_and_exports_the_same_bits(
    family: str, models: Path, tmp_path: Path
) -> None:
    model = make_model(family, models / family)
    arch, checkpoint = read_architecture(model), saved(model)
    for number, layout in enumerate(LAYOUTS):
        spec = TE_SPEC if number % 2 else LOCAL_SPEC
        ranks = through_ranks(model, tmp_path / str(number), layout, spec=spec)
        for tensors, expected in zip(ranks, held_by_ranks(arch, layout, checkpoint, spec is TE_SPEC), strict=True):
            assert_equal(tensors, expected)
        assert_same_files(model, tmp_path / str(number))


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_the_files_of_every_family_come_out_of_ranks_as_they_went_in(family: str, models: Path, tmp_path: Path) -> None:
    model = make_model(family, models / family)
    layouts = [ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2)]
    layouts += [ParallelLayout(tensor=2, data=2, expert=4)] * (read_architecture(model).experts > 0)
    for number, layout in enumerate(layouts):
        through_ranks(model, tmp_path / str(number), layout)
        assert_same_files(model, tmp_path / str(number))


@pytest.mark.parametrize("family", [*TINY_FAMILIES, *COMPOSITES])
def test_ranks_send_the_embedded_engine_the_weights_that_it_loads_from_the_files(family: str, models: Path) -> None:
    model = make_model(family, models / family)
    arch, engine = read_architecture(model), load_model(str(model), "cpu", "float32")
    layout = ParallelLayout(tensor=2, data=2, expert=2) if arch.experts else ParallelLayout(tensor=2)
    held, of_engine = manifests(arch, layout), transformers_manifest(arch, "float32")
    [sent] = carry_out(make_plan(held, [of_engine]), loaded(model, held))
    assert_equal(sent, model_tensors(engine, of_engine))


@pytest.mark.parametrize("dtype_of_ranks", ["float32", "bfloat16"])
def test_ranks_and_an_export_can_be_in_another_dtype(dtype_of_ranks: str, models: Path, tmp_path: Path) -> None:
    model = make_model("qwen3", models / "qwen3")
    through_ranks(model, tmp_path / "out", ParallelLayout(tensor=2), dtype_of_ranks, "bfloat16")
    assert_equal(saved(tmp_path / "out"), {name: tensor.bfloat16() for name, tensor in saved(model).items()})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_weights_in_fp8_are_loaded_and_exported_as_what_they_stand_for(models: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "fp8", tmp_path / "out"
    stands_for = in_fp8(model, make_model("deepseek_v3", models / "deepseek_v3_large", **LARGE))
    layout = ParallelLayout(tensor=2, pipeline=2, data=2, expert=2, expert_tensor=2)
    ranks = through_ranks(model, out, layout, "bfloat16", "bfloat16")
    for tensors, expected in zip(ranks, held_by_ranks(read_architecture(model), layout, stands_for), strict=True):
        assert_equal(tensors, expected)
        wide = [name for name, tensor in tensors.items() if tensor.dtype == torch.float32]
        assert wide == [name for name in tensors if name.endswith("expert_bias")]
    assert_equal(saved(out), stands_for)
    assert all(tensor.dtype == stands_for[name].dtype for name, tensor in saved(out).items())
    assert extra_tensors(file_tensors(model), read_architecture(model)) == [
        f"model.layers.4.eh_proj.weight{kind}" for kind in ("", "_scale_inv")
    ]
    read = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert read.dtype == torch.bfloat16
    assert read.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32


# --- loading ----------------------------------------------------------------------------------------------------------


def load_one(directory: Path) -> Tensors:
    """The second of two tensor ranks. Nothing may be written if it fails."""
    manifest = manifests(read_architecture(directory), ParallelLayout(tensor=2), "bfloat16")[1]
    return loaded(directory, [manifest])[0]


def refused(directory: Path, problems: int, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_one(directory)
    assert len(caught.value.problems) == problems
    assert all(word in str(caught.value) for word in words), caught.value


def test_stacked_experts_and_several_files_are_read_too(model: Path) -> None:
    before = load_one(model)
    with_tensors(model, model, stack_experts(saved(model)) | {"an.unknown.tensor": torch.zeros(2)})
    assert_equal(load_one(model), before)
    (model / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors"):
        load_one(model)


def test_all_missing_tensors_and_wrong_shapes_and_dtypes_are_named(model: Path) -> None:
    tensors = saved(model)
    del tensors["model.norm.weight"], tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    tensors["lm_head.weight"] = torch.zeros(130, 48)
    tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(4, 48, dtype=torch.int8)
    save_file(tensors, model / "model.safetensors")
    refused(model, 4, "model.norm.weight", "experts.3.up_proj", "[130, 48]", "[131, 48] by config.json", "dtype I8")


def test_of_many_tensors_that_are_missing_the_first_are_named_and_the_rest_counted(model: Path) -> None:
    tensors = saved(model)
    save_file({name: tensors[name] for name in tensors if "layers.2" not in name}, model / "model.safetensors")
    lost = sum("layers.2" in name for name in tensors)
    refused(model, PROBLEMS_MAX + 1, "model.layers.2.", f"{lost - PROBLEMS_MAX} more tensors")


def test_fp8_without_its_scales_is_refused(models: Path, tmp_path: Path) -> None:
    in_fp8(tmp_path / "fp8", make_model("deepseek_v3", models / "deepseek_v3_large", **LARGE))
    scales = load_file(tmp_path / "fp8" / "b.safetensors")
    lost = scales.pop("model.layers.0.self_attn.o_proj.weight_scale_inv")
    scales["model.layers.1.self_attn.o_proj.weight_scale_inv"] = lost[:1, :1].repeat(1, 9)
    save_file(scales, tmp_path / "fp8" / "b.safetensors")
    refused(tmp_path / "fp8", 2, "layers.0.self_attn.o_proj.weight", "fp8 without scales", "F32 [1, 9]", "F32 [2, 1]")


def test_files_that_are_no_safetensors_are_named(model: Path) -> None:
    path = model / "model.safetensors"
    whole = path.read_bytes()
    no_header, no_object = b"\x10" + bytes(7) + b"not a header....", (2).to_bytes(8, "little") + b"[]"
    for content in (whole[:-1], whole[:100], b"", no_header, no_object):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            load_one(model)
    path.unlink()
    with pytest.raises(ModelError, match="no such file"):
        load_one(model)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"


@pytest.mark.parametrize(
    ("renamed", "written", "words"),
    [
        ("", {"model.safetensors": POINTER}, ["model.safetensors", "Git LFS"]),
        ("", {"config.json": POINTER}, ["config.json", "Git LFS"]),
        ("model.safetensors", {"pytorch_model.bin": ""}, ["pytorch_model.bin", "save_pretrained"]),
        ("model.safetensors", {"model-00001-of-00002.safetensors": ""}, ["model.safetensors.index.json"]),
        ("model.safetensors", {"adapter_config.json": "{}"}, ["an adapter", "merge-lora"]),
        ("", {"model.safetensors.index.json": '{"weight_map": {"a": "b.safetensors"}}'}, ["model.safetensors.index"]),
        ("", {"model-00001-of-00002.safetensors": ""}, ["model-00001-of-00002.safetensors", "earlier save"]),
        ("model.safetensors", {"model.safetensors.index.json": '{"weight_map": {"a": "b", "c": "d"}}'}, ["2 of its 2"]),
    ],
)
def test_files_in_place_of_the_models_weights_are_one_problem(
    renamed: str, written: dict[str, str], words: list[str], model: Path
) -> None:
    if renamed:
        (model / renamed).unlink()
    for name, text in written.items():
        (model / name).write_text(text)
    refused(model, 1, *words)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "base_model.model.", "module.", ""])
def test_names_that_begin_otherwise_are_one_problem(prefix: str, model: Path) -> None:
    names = {name: prefix + (name if prefix else name.removeprefix("model.")) for name in saved(model)}
    save_file({names[name]: tensor for name, tensor in saved(model).items()}, model / "model.safetensors")
    refused(model, 1, prefix or "without model.", "model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("model.layers.3.self_attn.q_proj.bias", False),
        ("model.layers.0.mlp.experts.0.up_proj.lora_A.weight", False),
        ("model.norm.bias", False),
        ("lm_head.bias", False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("model.layers.4.eh_proj.weight", True),
        ("mtp.layers.0.eh_proj.weight", True),
    ],
)
def test_only_tensors_outside_of_the_models_layers_and_modules_may_be_left_out(
    name: str, taken: bool, model: Path
) -> None:
    save_file(saved(model) | {name: torch.zeros(3)}, model / "model.safetensors")
    if taken:
        load_one(model)
        assert extra_tensors(file_tensors(model), read_architecture(model)) == [name]
    else:
        refused(model, 1, name)


def test_only_the_bytes_that_a_rank_owns_are_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values taken from the files, against what the manifest holds."""
    counts, real = [], loading.read_region

    def counting(*region: Any) -> torch.Tensor:
        counts.append(math.prod(region[-1]))
        return real(*region)

    monkeypatch.setattr(loading, "read_region", counting)
    tensors = load_one(model)
    padding = 48 * 2  # one row of 131 in the embedding and in the head
    assert sum(counts) == sum(tensor.numel() for tensor in tensors.values()) - padding


# --- exporting --------------------------------------------------------------------------------------------------------


def test_transformers_loads_a_sharded_export(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 40_000)
    model, out = make_model("qwen2_tied", models / "qwen2_tied"), tmp_path / "out"
    (model / "tokenizer_config.json").write_text("{}")
    through_ranks(model, out, ParallelLayout(tensor=2, pipeline=2))
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    assert (out / "tokenizer_config.json").exists()
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (model, out)
    )
    assert_equal(after, before)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in saved(out).values())


def test_every_file_that_transformers_reads_beside_the_weights_is_exported(models: Path, tmp_path: Path) -> None:
    model, of = make_model("qwen2", models / "with_companions"), transformers.utils
    names = {of.CHAT_TEMPLATE_FILE, of.GENERATION_CONFIG_NAME, of.PROCESSOR_NAME, of.IMAGE_PROCESSOR_NAME}
    names |= {of.VIDEO_PROCESSOR_NAME, of.FEATURE_EXTRACTOR_NAME, f"{of.CHAT_TEMPLATE_DIR}/tool_use.jinja"}
    names |= {"tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "vocab.json"}
    names |= {"merges.txt", "tokenizer.model", "tekken.json", "qwen.tiktoken", "modeling_own.py", "chat_template.json"}
    names |= {"custom_generate/generate.py"}
    for name in names:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}")
    begin_export(tmp_path / "out", model, read_architecture(model), "bfloat16")
    copied = {str(path.relative_to(tmp_path / ".out.partial")) for path in (tmp_path / ".out.partial").rglob("*")}
    assert names <= copied


def test_a_second_export_replaces_the_first_and_leftovers(models: Path, tmp_path: Path) -> None:
    model = make_model("qwen2", models / "qwen2")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_text("cut short")
    through_ranks(model, tmp_path / "out", ParallelLayout())
    finish_export(begin_export(tmp_path / "out", model, read_architecture(model), "bfloat16"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_place_that_cannot_be_written_is_named(models: Path, tmp_path: Path) -> None:
    model = make_model("qwen2", models / "qwen2")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        begin_export(tmp_path / "file" / "out", model, read_architecture(model), "float32")
