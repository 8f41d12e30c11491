"""Published configs that come with megagrpo: their parameter counts, and plans on a machine that has nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from megagrpo.cli import main
from megagrpo.errors import PreflightError
from megagrpo.plan.parameters import known_models, total_parameters
from megagrpo.preflight.preflight import preflight
from megagrpo.recipe.load import load
from megagrpo.weights.families import read_architecture
from tests.tiny_run import make_run

# As in the index files of the published checkpoints, tied embeddings once. DeepSeek-V3 without multi-token prediction.
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
}
KNOWN = "model.path=Qwen/Qwen3-8B"


def test_known_models_have_the_published_numbers_of_parameters() -> None:
    found = {name: total_parameters(read_architecture(directory)) for name, directory in known_models().items()}
    assert found == PARAMETERS


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path)


def test_a_plan_needs_no_files_of_a_known_model(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), KNOWN]) == 0
    printed = capsys.readouterr().out
    assert "8.2B parameters" in printed
    assert "the tokenizer of Qwen/Qwen3-8B: not on this machine" in printed


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
