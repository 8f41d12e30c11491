"""The language model of `make demo-llm`: its sums, its recipe, and how a GGUF file becomes a model's directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo import language_model
from megagrpo.data.rows import prompt_schema, read
from megagrpo.errors import ModelError
from megagrpo.recipe.load import load
from megagrpo.reward.functions import function_specs, outcome_of
from megagrpo.reward.functions import load as load_function

RECIPE = Path(__file__).resolve().parents[2] / "yaml_recipes" / "smollm2_cpu.yaml"


def test_no_held_out_sum_is_trained_on_in_either_order(tmp_path: Path) -> None:
    language_model.prepare_sums(tmp_path)
    train, test = (
        {row.messages[-1]["content"]: row.ground_truth for row in read(tmp_path / f"{split}.parquet", prompt_schema())}
        for split in ("train", "test")
    )
    numbers = range(language_model.LOWEST, language_model.HIGHEST + 1)
    assert train | test == {language_model.QUESTION.format(a=a, b=b): str(a + b) for a in numbers for b in numbers}
    assert len(train) + len(test) == len(numbers) ** 2
    assert all(language_model.QUESTION.format(a=b, b=a) in test for a, b in map(_numbers, test))


def _numbers(question: str) -> list[int]:
    return [int(word.strip(".")) for word in question.split() if word.strip(".").isdigit()]


@pytest.mark.parametrize(
    ("response", "score"), [("26 + 27 = 53", 1), ("The answer is 53.", 1), ("53", 1), ("26 + 27 = ", 0), ("5", 0)]
)
def test_the_recipe_takes_the_last_number_for_the_answer(response: str, score: float) -> None:
    recipe = load(RECIPE).recipe
    (spec,) = function_specs(recipe.reward)
    assert {Path(entry.path).parent for entry in recipe.data.train} == {Path(recipe.model.path).parent}
    assert outcome_of(load_function(spec).function(response=response, ground_truth="53")).score == score


def test_a_missing_package_is_named_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "PACKAGE", "torch")
    monkeypatch.setattr(language_model, "READERS", ("no_such_package",))
    with pytest.raises(ModelError, match=r"(?s)no_such_package.*make smollm2"):
        language_model.prepare(tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.needs("gguf")
def test_a_gguf_file_becomes_a_directory_in_float32_with_its_tokenizer(tmp_path: Path) -> None:
    vocabulary = ["<|end|>", "a", "b", "ab"]
    weights = _write_gguf(tmp_path / "tiny.gguf", vocabulary)
    language_model.convert(tmp_path / "tiny.gguf", tmp_path / "model")
    model, tokenizer = (kind.from_pretrained(tmp_path / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    read = model.state_dict()["model.layers.0.mlp.down_proj.weight"]
    torch.testing.assert_close(read, weights, rtol=0, atol=0.01)  # 8 bits: to 1/127 of the largest of 32
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.decode(tokenizer.encode("abba")) == "abba"
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, len(vocabulary))


def _write_gguf(path: Path, vocabulary: list[str]) -> torch.Tensor:
    """A llama of one layer with two heads, tied embeddings and matrices in 8 bits; its down_proj [64, 96] as it was."""
    import gguf

    width, inner = 64, 96
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_context_length(32)
    writer.add_vocab_size(len(vocabulary))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, 1, 1, 1])  # the first is a control token
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    torch.manual_seed(0)
    shapes = {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (width, width)),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (inner, width)),
        "ffn_down": (width, inner),
    }
    eight_bits = gguf.GGMLQuantizationType.Q8_0
    matrices = {name: torch.rand(shape) for name, shape in shapes.items()}
    for name, tensor in matrices.items():
        writer.add_tensor(f"blk.0.{name}.weight", gguf.quantize(tensor.numpy(), eight_bits), raw_dtype=eight_bits)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", torch.ones(width).numpy())
    writer.add_tensor("token_embd.weight", torch.rand(len(vocabulary), width).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return matrices["ffn_down"]
