"""Conversions of every family and kind of checkpoint: bit-identical there and back, and what is not of the model."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megagrpo.checkpoint.torch_dist import TorchCheckpoint, TorchFile, write_metadata
from megagrpo.convert import targets
from megagrpo.convert import verify as compare
from megagrpo.convert.source import _latest_iteration, open_source
from megagrpo.convert.targets import to_hugging_face, to_megatron
from megagrpo.errors import EXIT_USER_ERROR, CheckpointError, ModelError, UnusableCheckpointError
from megagrpo.weights.boxes import Box, Storage
from megagrpo.weights.sides import checkpoint
from tests.safetensors_files import (
    LARGE,
    assert_same_files,
    assert_same_tensors,
    in_fp8,
    saved,
    stack_experts,
    with_tensors,
)
from tests.tiny_models import USUAL_FAMILIES, make_model, reference_logits
from tests.weights_oracle import Tensors

SEQUENCES = [[1, 17, 40, 3], [130, 0, 5]]
BFLOAT16 = torch.bfloat16


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("family", USUAL_FAMILIES)
def test_there_and_back_gives_the_same_bits_which_transformers_loads(
    family: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family, models / family)
    (model / "tokenizer_config.json").write_text("{}")
    (model / "generation_config.json").write_text('{"eos_token_id": 3}')
    done = to_megatron(model, tmp_path / "megatron")
    assert not done.left_out
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 150_000)
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    assert_same_files(model, tmp_path / "back")
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 1
    assert (tmp_path / "back" / "tokenizer_config.json").exists()
    for ours, theirs in zip(
        reference_logits(tmp_path / "back", SEQUENCES), reference_logits(model, SEQUENCES), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "back").eos_token_id == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "megatron"]


@pytest.mark.parametrize("family", ["qwen2_tied", "deepseek_v3"])
def test_a_dtype_may_be_asked_for(family: str, models: Path, tmp_path: Path) -> None:
    model = make_model(family, models / family)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"torch_dtype": config["dtype"]}))
    to_megatron(model, tmp_path / "megatron", dtype="bfloat16")
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    to_hugging_face(model, tmp_path / "at_once", dtype="bfloat16")
    assert_same_files(tmp_path / "at_once", tmp_path / "back")
    keeps = "e_score_correction_bias"
    wanted = {name: its if name.endswith(keeps) else its.to(BFLOAT16) for name, its in saved(model).items()}
    assert_same_tensors(wanted, saved(tmp_path / "back"))
    (model / "config.json").write_text(json.dumps(config))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")


def in_mixed_dtypes(directory: Path, models: Path) -> Tensors:
    tensors = saved(make_model("qwen3", models / "qwen3"))
    mixed = {name: tensor if "norm" in name else tensor.to(BFLOAT16) for name, tensor in tensors.items()}
    return saved(with_tensors(models / "qwen3", directory, mixed))


def with_stacked_experts(directory: Path, models: Path) -> Tensors:
    tensors = saved(make_model("qwen3_moe", models / "qwen3_moe"))
    with_tensors(models / "qwen3_moe", directory, stack_experts(tensors))
    return tensors


def quantized(directory: Path, models: Path) -> Tensors:
    return in_fp8(directory, make_model("deepseek_v3", models / "deepseek_v3_large", **LARGE))


@pytest.mark.parametrize("write", [in_mixed_dtypes, with_stacked_experts, quantized])
def test_every_way_to_store_weights_comes_back_as_what_it_stands_for(
    write: Callable[[Path, Path], Tensors], models: Path, tmp_path: Path
) -> None:
    wanted = write(tmp_path / "model", models)
    done = to_megatron(tmp_path / "model", tmp_path / "megatron")
    assert any("eh_proj" in name for name in done.left_out) == (write is quantized)
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    assert_same_tensors(wanted, saved(tmp_path / "back"))
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_a_part_of_a_tensor_is_the_same_wherever_it_is_read(models: Path, tmp_path: Path) -> None:
    model = make_model("qwen3_moe", models / "qwen3_moe")
    to_megatron(model, tmp_path / "megatron")
    files, megatron = open_source(model), open_source(tmp_path / "megatron")
    for tensor in files.tensors:
        start = tuple(size // 3 for size in tensor.shape)
        part = Box(tensor.name, start, tuple(size - size // 3 - 1 for size in tensor.shape))
        assert torch.equal(files.read(part), megatron.read(part)), tensor.name


@pytest.mark.parametrize("family", ["qwen2_tied", "deepseek_v3"])
def test_large_tensors_go_in_pieces(family: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "CHUNK_BYTES", 3000)
    for module, limit in ((targets, 1100), (compare, 900)):
        monkeypatch.setattr(module, "PIECE_BYTES", limit)
    model = make_model(family, models / family)
    to_megatron(model, tmp_path / "megatron")
    stored = pickle.loads((tmp_path / "megatron" / "iter_0000000" / ".metadata").read_bytes())
    assert len(stored.state_dict_metadata["embedding.word_embeddings.weight"].chunks) == -(-131 // (3000 // 192))
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    assert_same_files(model, tmp_path / "back")
    assert not compare.verify(model, tmp_path / "megatron").differences


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_part_of_a_tensor_stored_in_any_chunks_is_read(data: st.DataObject, tmp_path: Path) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    values = torch.arange(math.prod(shape)).view(shape)
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    regions = list(itertools.product(*(itertools.pairwise(edges) for edges in cuts)))
    data.draw(st.randoms(use_true_random=False)).shuffle(regions)
    with TorchFile(tmp_path / "__0_0.distcp") as first, TorchFile(tmp_path / "__1_0.distcp") as second:
        written = [
            (first, second)[index % 2].add(
                "key",
                tuple(low for low, _ in region),
                values[tuple(slice(low, high) for low, high in region)].clone(),
            )
            for index, region in enumerate(regions)
        ]
    write_metadata(tmp_path, {"key": Storage("key", shape, "int64")}, written)
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    part = tuple(data.draw(st.integers(1, size - low)) for low, size in zip(start, shape, strict=True))
    wanted = values[tuple(slice(low, low + size) for low, size in zip(start, part, strict=True))]
    assert torch.equal(TorchCheckpoint(tmp_path).read("key", start, part), wanted)


def test_tensors_that_are_not_of_the_model_are_listed(models: Path, tmp_path: Path) -> None:
    model = make_model("qwen2", models / "qwen2")
    extra = {"model.layers.4.eh_proj.weight": torch.ones(3), "rotary.inv_freq": torch.ones(2)}
    with_tensors(model, tmp_path / "more", saved(model) | extra)
    assert to_megatron(tmp_path / "more", tmp_path / "megatron").left_out == tuple(sorted(extra))
    more = {"mtp.layers.0.eh_proj.weight": Storage("mtp.layers.0.eh_proj.weight", (3,), "float32")}
    add_tensors(tmp_path / "megatron" / "iter_0000000", more)
    assert to_hugging_face(tmp_path / "megatron", tmp_path / "back").left_out == tuple(more)


def test_padding_of_the_vocabulary_is_dropped(models: Path, tmp_path: Path) -> None:
    model = make_model("qwen2", models / "qwen2")
    to_megatron(model, tmp_path / "megatron")
    larger = {
        key: Storage(key, (256, 48), "float32") for key in ("embedding.word_embeddings.weight", "output_layer.weight")
    }
    embedding, head = (saved(model)[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    padding = torch.full((256 - 131, 48), 7.0)
    add_tensors(
        tmp_path / "megatron" / "iter_0000000",
        larger,
        [torch.cat([embedding, padding]), torch.cat([head, padding])],
    )
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    assert_same_files(model, tmp_path / "back")


def test_a_checkpoint_of_another_model_is_refused_by_name(models: Path, tmp_path: Path) -> None:
    model = make_model("qwen2", models / "qwen2")
    to_megatron(model, tmp_path / "megatron")
    wider = make_model("qwen2", models / "wider", vocab_size=140, intermediate_size=96)
    with pytest.raises(ModelError) as raised:
        to_hugging_face(tmp_path / "megatron", tmp_path / "back", model=wider)
    for text in ("embedding.word_embeddings.weight", "[131, 48]", "linear_fc1.weight", "[4, 192, 48] by config.json"):
        assert text in str(raised.value)
    assert not (tmp_path / "back").exists()


def test_what_is_not_a_checkpoint_is_refused(models: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        to_hugging_face(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="none of them"):
        to_hugging_face(tmp_path / "empty", tmp_path / "out")
    model = make_model("qwen2", models / "qwen2")
    to_megatron(model, tmp_path / "megatron")
    with pytest.raises(ModelError, match="--model DIR"):
        to_hugging_face(tmp_path / "megatron" / "iter_0000000", tmp_path / "out", model=tmp_path / "empty")
    (tmp_path / "megatron" / "hugging_face" / "config.json").unlink()
    with pytest.raises(ModelError, match="has no config of its own"):
        to_hugging_face(tmp_path / "megatron", tmp_path / "out")
    assert to_hugging_face(tmp_path / "megatron", tmp_path / "out", model=model).tensors == 51


def test_a_file_that_is_cut_short_or_missing_is_named(models: Path, tmp_path: Path) -> None:
    iteration = to_megatron(make_model("qwen2", models / "qwen2"), tmp_path / "megatron").directory / "iter_0000000"
    file = iteration / "__2_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    (iteration / "__3_0.distcp").unlink()
    with pytest.raises(CheckpointError) as raised:
        to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    assert f"{len(content)} bytes" in str(raised.value)
    assert "__3_0.distcp" in str(raised.value)


def test_a_list_of_contents_cannot_run_code(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "attacked",)  # type: ignore[return-value]

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError, match=r"file of torch\.distributed\.checkpoint"):
        TorchCheckpoint(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04exit\x85R.")
    with pytest.raises(CheckpointError):
        TorchCheckpoint(tmp_path)
    assert not (tmp_path / "attacked").exists()


class AsPython3112(pickle._Pickler):
    """Writes members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_a_list_of_contents_of_an_older_python_is_read(tmp_path: Path) -> None:
    with TorchFile(tmp_path / "__0_0.distcp") as file:
        written = [file.add("key", (0,), torch.arange(3))]
    write_metadata(tmp_path, {"key": Storage("key", (3,), "int64")}, written)
    contents = pickle.loads((tmp_path / ".metadata").read_bytes())
    with (tmp_path / ".metadata").open("wb") as rewritten:
        AsPython3112(rewritten).dump(contents)
    assert TorchCheckpoint(tmp_path).read("key", (0,), (3,)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("content", [b"", b"garbage", b"1", b"h\x07.", b"r\xff\xff\xff\x7f.", pickle.dumps([1])])
def test_a_list_of_contents_that_is_none_is_the_users_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"given: .+\n.*needed: .+\n.*fix: ") as said:
        TorchCheckpoint(tmp_path)
    assert said.value.exit_code == EXIT_USER_ERROR


def add_tensors(iteration: Path, stored: dict[str, Storage], values: list[torch.Tensor] | None = None) -> None:
    """Adds tensors to a torch_dist directory, or replaces them."""
    old = TorchCheckpoint(iteration)
    tensors = {key: old.read(key, (0,) * len(held.shape), held.shape) for key, held in old.tensors.items()}
    given = values or [torch.ones(held.shape) for held in stored.values()]
    tensors |= dict(zip(stored, given, strict=True))
    with TorchFile(iteration / "__100_0.distcp") as file:
        written = [file.add(key, (0,) * tensor.dim(), tensor) for key, tensor in tensors.items()]
    write_metadata(iteration, old.tensors | stored, written)


@pytest.mark.parametrize("content", [b"\xff\xfe1", b"9" * 5000, b"ten"])
def test_a_tracker_that_names_no_iteration_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(content)
    with pytest.raises(UnusableCheckpointError, match=r"latest_checkpointed_iteration.txt"):
        _latest_iteration(tmp_path)
