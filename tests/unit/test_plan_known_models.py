"""Published configs that come with megagrpo: their parameter counts, and plans on a machine that has nothing else."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagrpo.batching.work import work_of
from megagrpo.cli import main
from megagrpo.errors import PreflightError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.engine import SequenceCache, cache_of
from megagrpo.plan.parameters import (
    active_parameters,
    expert_parameters,
    known_models,
    rank_parameters,
    total_parameters,
)
from megagrpo.preflight.preflight import preflight
from megagrpo.recipe.kernels import Attention, Installed, attention_of, layers_on, local_kernels
from megagrpo.recipe.load import load
from megagrpo.recipe.model_rules import model_problems
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import critic_of
from tests import plans
from tests.plans import known_model
from tests.tiny_run import make_run

QWEN_NEXT, QWEN_35 = "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3.5-35B-A3B"
GPT_OSS, GLM_AIR = "openai/gpt-oss-20b", "zai-org/GLM-4.5-Air"
# As in the index files of the published checkpoints, tied embeddings once; without multi-token prediction.
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
    QWEN_NEXT: 79_674_391_296,
    GPT_OSS: 20_914_757_184,
    GLM_AIR: 106_852_251_264,
    QWEN_35: 34_660_610_688,
}
KNOWN = "model.path=Qwen/Qwen3-8B"


def test_known_models_have_the_published_numbers_of_parameters() -> None:
    assert {name: total_parameters(known_model(name)) for name in known_models()} == PARAMETERS


@pytest.mark.parametrize("model", known_models())
def test_parameters_are_those_of_the_checkpoint(model: str) -> None:
    for arch in (known_model(model), critic_of(known_model(model))):
        tensors = tensors_of(arch)
        assert total_parameters(arch) == sum(prod(tensor.shape) for tensor in tensors)
        assert expert_parameters(arch) == sum(prod(tensor.shape) for tensor in tensors if tensor.expert is not None)


@pytest.mark.parametrize(
    ("model", "active"),
    [
        (plans.QWEN_235B, 22.19e9),  # the model card says 22B,
        (plans.QWEN_30B, 3.35e9),  # 3.3B,
        (plans.DEEPSEEK, 37.55e9),  # arXiv:2412.19437 37B
        (QWEN_NEXT, 3.875e9),  # the name 3B: embedding and head are 0.6B
        (QWEN_35, 3.455e9),  # the name 3B: embedding and head are 1.0B
        (GPT_OSS, 3.61e9 + 201088 * 2880),  # arXiv:2508.10925 3.61B, without the embedding
        (GLM_AIR, 13.42e9),  # the model card 12B: embedding and head are 1.2B
    ],
)
def test_active_parameters_are_those_of_the_models_names(model: str, active: float) -> None:
    assert active_parameters(known_model(model)) == pytest.approx(active, rel=2e-3)


def test_windows_and_states_bound_what_is_cached_and_computed() -> None:
    windows, states = known_model(GPT_OSS), known_model(QWEN_NEXT)
    assert cache_of(windows.kinds, 1, 2) == SequenceCache(12 * 2048, ((128, 12 * 2048),))
    of_sequence = 36 * (4 * 32 * 128 * 128 + 2 * 3 * (2 * 2048 + 4096))
    assert cache_of(states.kinds, 1, 2) == SequenceCache(24 * 1024, (), of_sequence)
    one, ten = (work_of(windows).of(np.array([tokens])) for tokens in (100, 1000))
    pairs = 12 * 2 * 64 * 64
    assert ten - 10 * one == pytest.approx(pairs * (1000**2 - 10 * 100**2 + 1000**2 - 872**2 - 10 * 100**2))


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("openai/gpt-oss-20b", "windows"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "gated delta nets"),
        (plans.QWEN_30B, None),
    ],
)
def test_models_with_parts_of_2026_take_local_layers(model: str, part: str | None) -> None:
    arch, train = known_model(model), plans.recipe(plans.ON_2048).train
    layers = layers_on((9, 0), Installed(transformer_engine=True), attention_of(arch, train, half=True))
    assert (layers.spec == "local") == (part is not None) == (f"no {part}" in layers.why)
    by_hand = train.model_copy(update={"layer_spec": "transformer_engine"})
    problems = model_problems(plans.recipe(plans.ON_2048).model_copy(update={"train": by_hand}), arch)
    assert any(f"no {part}" in str(problem) for problem in problems) == (part is not None)


@pytest.mark.parametrize(
    ("model", "changes", "named"),
    [
        (GPT_OSS, {}, ["no windows", "windows of 128: torch's memory", "full attention: torch's flash", "experts:"]),
        (GPT_OSS, {"train.layout.context": 2}, ["windows of 128 and full attention: torch's memory-efficient"]),
        (QWEN_NEXT, {}, ["no gated delta nets", "delta nets: flash-linear", "full attention: torch's flash"]),
        (GLM_AIR, {}, ["no rotation of a part of a head", "full attention: torch's flash"]),
        (plans.QWEN_30B, {}, ["Transformer Engine's layers: cuDNN's fused attention"]),
        (plans.QWEN_30B, {"train.layer_spec": "local"}, ["(layer_spec: local); full attention: torch's flash"]),
    ],
)
def test_a_plan_names_what_computes_attention(model: str, changes: dict[str, Any], named: list[str]) -> None:
    told = plans.plan(**{"model.path": model, **changes}).summary["kernels"]
    assert all(text in told for text in named), told


def test_capped_scores_are_planned_without_a_kernel() -> None:
    arch = known_model(plans.QWEN_HALF_B)
    layer = arch.layers[0]
    capped = replace(layer, attention=replace(layer.attention, score_cap=30.0, window=64))
    kernels = local_kernels((9, 0), replace(arch, layers=(capped,)), Attention(64, 64, half=True), 128)
    assert kernels["windows of 64 with capped scores"].startswith("torch in float32, no fused kernel")


def test_all_ranks_of_671b_on_2048_gpus_hold_the_whole_model() -> None:
    deepseek, llama = known_model(plans.DEEPSEEK), known_model(plans.LLAMA_70B)
    layout = plans.recipe(plans.ON_2048).train.layout.parallel()
    held = [rank_parameters(deepseek, layout, stage, fused=True) for stage in range(16)]
    assert sum(rank.experts for rank in held) * layout.expert == 58 * 256 * 3 * 7168 * 2048
    of_llama = ParallelLayout(tensor=8, pipeline=4, data=4)
    whole = sum(rank_parameters(llama, of_llama, stage, fused=True).total for stage in range(4))
    norms = (2 * 80 + 1) * llama.hidden * 7  # on each tensor rank
    assert whole * 8 == total_parameters(llama) + norms


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path)


def test_a_plan_needs_no_files_of_a_known_model(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), KNOWN]) == 0
    printed = capsys.readouterr().out
    assert "8.2B parameters" in printed
    assert "the tokenizer of Qwen/Qwen3-8B: not on this machine" in printed
    assert " room on disk and this machine's devices: checked when the run starts" in printed


def test_a_plan_says_which_data_it_could_not_look_at(recipe: Path) -> None:
    loaded = load(recipe, ["data.train.0.path=/on/the/cluster/train.parquet"])
    data, of_a_run = preflight(loaded, plan_only=True).unchecked
    assert data == "/on/the/cluster/train.parquet: no such file on this machine"
    assert "this machine's devices" in of_a_run
    with pytest.raises(PreflightError, match="no such file"):
        preflight(loaded)


def test_a_plan_refuses_a_misspelt_data_file_and_what_is_wrong_in_one(recipe: Path) -> None:
    Path("held_back.jsonl").write_text("{}\n")
    with pytest.raises(PreflightError, match=r"did you mean held_back\.jsonl"):
        preflight(load(recipe, ["data.train.0.path=held_bak.jsonl"]), plan_only=True)
    with pytest.raises(PreflightError, match="no 'prompt'"):
        preflight(load(recipe, ["data.train.0.path=held_back.jsonl"]), plan_only=True)
    Path("template.jinja").write_text("{% for message in messages %}")
    with pytest.raises(PreflightError, match=r"model\.chat_template"):
        preflight(load(recipe, [KNOWN, "model.chat_template=template.jinja"]), plan_only=True)


def test_training_asks_for_the_real_files_of_a_known_model(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PreflightError, match=r"model\.path") as caught:
        preflight(load(recipe, [KNOWN]))
    assert "the Hugging Face hub does not give it" in str(caught.value)
