"""Malformed recipes, models and data, through the command line: exit code 2, the place is named, no traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megagrpo.cli import main
from megagrpo.errors import EXIT_USER_ERROR, PreflightError
from megagrpo.preflight.preflight import preflight
from megagrpo.recipe.load import load
from tests.tiny_run import ROW, make_run

Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """The error that `megagrpo plan RECIPE OVERRIDE...` ends with."""

    def refused(recipe: Path, *overrides: str) -> str:
        assert main(["plan", str(recipe), *overrides]) == EXIT_USER_ERROR
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(("recipe error", "cannot start"))
        assert "Traceback" not in printed.err
        return printed.err

    return refused


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"", "recipe.yaml"),
        (b"# nothing\n", "recipe.yaml"),
        (b"name: a\nseed: \xe9\n", "recipe.yaml:2"),
        (b"name: \x00\x01", "recipe.yaml:1"),
        (b"- name: a\n", "recipe.yaml"),
        (b"recipe", "recipe.yaml"),
        (b"model:\n\tpath: x\n", "recipe.yaml:2"),
        (b"[" * 600, "recipe.yaml"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(content: bytes, place: str, tmp_path: Path, refused: Refused) -> None:
    recipe = make_run(tmp_path)
    recipe.write_bytes(content)
    assert place in refused(recipe)


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("name: tiny", "name: [tiny", "recipe.yaml"),
        ("name: tiny", "name: tiny\n---", "recipe.yaml"),
        ("name: tiny", "name: tiny\nname: other", "recipe.yaml:2 name"),
        ("name: tiny", "name: !!python/name:os.system ''", "recipe.yaml:1"),
        ("model:", "train: &a {layout: *a}\nmodel:", "recipe.yaml"),
        ("rollout:", "rollouts:", "rollouts"),
        ("tensor: 1", "tensr: 1", "train.layout.tensr"),
        ("reward:\n  functions:\n  - function: gsm8k\n", "", "reward"),
        ("  prompts_per_step: 4\n", "", "prompts_per_step"),
        ("/model\n", "/modle\n", "model.path"),
        ("/model\n", f"/{'x' * 300}\n", "recipe.yaml:3 model.path"),
        ("\ntrain:\n", "\ntrain:\n  recompute: null\n", "train.recompute"),
        ("\ntrain:\n", "\ntrain:\n  recompute: some\n", "train.recompute"),
        ("\ntrain:\n", "\ntrain:\n  recompute: [mlp]\n", "train.recompute"),
        ("\ntrain:\n", "\ntrain:\n  recompute: {layers: many}\n", "train.recompute.layers"),
        ("\ntrain:\n", "\ntrain:\n  recompute: {layer: 1}\n", "train.recompute.layer"),
        ("model:\n", 'model:\n  chat_template: "\\0"\n', "model.chat_template"),
        ("name: tiny", 'name: "tiny\\ud800"', "recipe.yaml:1 name"),
    ],
)
def test_a_mistake_in_a_recipe_is_located(old: str, new: str, place: str, tmp_path: Path, refused: Refused) -> None:
    recipe = make_run(tmp_path)
    text = recipe.read_text()
    assert old in text
    recipe.write_text(text.replace(old, new))
    assert place in refused(recipe)


@pytest.mark.parametrize("file", ["tiny", "tiny/checkpoints", "tiny/hugging_face", "weights", "cache"])
def test_a_file_in_place_of_a_directory_is_refused(file: str, tmp_path: Path, refused: Refused) -> None:
    runs = tmp_path / "runs"
    (runs / file).parent.mkdir(parents=True)
    (runs / file).write_text("")
    inside = [f"weights.directory={runs}/weights/inside", "weights.transfer=disk", f"data.cache={runs}/cache/inside"]
    told = refused(make_run(tmp_path), f"track.directory={runs}", *inside)
    assert f"{file} is a file" in told
    assert {"weights": "weights.directory", "cache": "data.cache"}.get(file, "track.directory") in told
    assert "fix: name another directory, or move that file away" in told


@pytest.mark.parametrize("content", [None, b"garbage" * 99])
def test_what_is_no_database_of_mlflow_is_refused(content: bytes | None, tmp_path: Path, refused: Refused) -> None:
    recipe, database = make_run(tmp_path), tmp_path / "mlflow.db"
    database.mkdir() if content is None else database.write_bytes(content)
    assert "mlflow.db" in refused(recipe, "track.mlflow={}", f"track.directory={tmp_path}")


def test_a_missing_recipe_is_refused_with_its_neighbours(tmp_path: Path, refused: Refused) -> None:
    make_run(tmp_path).rename(tmp_path / "other.yaml")
    assert "other.yaml" in refused(tmp_path / "recipe.yaml")


WRONG = """
    train.total_steps=many seed='3' train.layout.tensor=1.5 train.optimizer.lr=-1e-6 train.optimizer.lr=.inf
    data.shuffle=yes algorithm.aggregation=seq-mean-token-mean data.train=[] data.train.0.amount=half train.layout=
    model.path= model.path={tmp}/adder/hugging_face
    name=../tiny train.total_steps data.train.1.path=x seed.value=1 train.total_steps=null
    train.megatron.hiden_dropout=0 model.chat_template={tmp}/broken.jinja data.train.0.path={tmp}/none.jsonl
    data.train.0.path={tmp}/cut.parquet checkpoint.keep_best=held_out/products/mean@1 reward.functions.0.function=gsm8
    data.train.0.amount=1000000000 data.train.0.amount=1e300 algorithm.loss.dual_clip=1e300
    reward.functions.0.function={tmp}/mine.py:score track.directory={tmp}/train.jsonl
"""


@pytest.mark.parametrize("override", WRONG.split())
def test_a_value_that_cannot_be_is_named(override: str, tmp_path: Path, refused: Refused) -> None:
    recipe = make_run(tmp_path)
    (tmp_path / "broken.jinja").write_text("{% for %}")
    pq.write_table(pa.Table.from_pylist([ROW] * 50), tmp_path / "whole.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "whole.parquet").read_bytes()[:-40])
    evaluated = f"eval.sets={{held_out: {{files: [{{path: '{tmp_path}/train.jsonl'}}]}}}}"
    assert override.partition("=")[0] in refused(recipe, evaluated, override.replace("{tmp}", str(tmp_path)))


def test_a_wrong_function_of_an_evaluation_set_is_named_with_its_place(tmp_path: Path, refused: Refused) -> None:
    of_set = f"{{files: [{{path: '{tmp_path}/train.jsonl'}}], functions: [{{function: gsm8}}]}}"
    assert "eval.sets.hard.functions.0" in refused(make_run(tmp_path), f"eval.sets.hard={of_set}")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model/config.json", None, "config.json"),
        ("model/config.json", b"{", "config.json"),
        ("model/config.json", b'{"model_type": "gpt2"}', "gpt2"),
        ("model/model.safetensors", None, "model.safetensors"),
        ("model/tokenizer.json", None, "no tokenizer"),
        ("model/tokenizer.json", b"{}", "tokenizer.json"),
        ("model/tokenizer_config.json", b"{}", "chat template"),
        ("model/tokenizer_config.json", b"[]", "tokenizer_config.json"),
        ("model/tokenizer_config.json", b'{"model_max_length": "1e30"}', "model_max_length"),
        ("model/special_tokens_map.json", b"[]", "special_tokens_map.json"),
        ("model/config.json", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ("train.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ("train.jsonl", b"", "recipe.yaml:6 data.train.0.path: "),
        ("train.jsonl", b'{"question": "1+1", "answer": "2"}\n', "'data_source'"),
        ("train.jsonl", b'{"prompt": "\xe9"}\n', "line 1"),
    ],
)
def test_a_missing_or_broken_file_is_named(
    file: str, content: bytes | None, said: str, tmp_path: Path, refused: Refused
) -> None:
    recipe = make_run(tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / file).write_bytes(content)
    assert said in refused(recipe)


def test_weights_and_tokenizers_that_do_not_fit_the_config_are_refused(tmp_path: Path, refused: Refused) -> None:
    recipe = make_run(tmp_path, vocab_size=20)
    assert "ids below 20" in refused(recipe)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 32}))
    assert "mlp.gate_proj.weight" in refused(recipe)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "is cut short" in refused(recipe)
    weights.write_bytes(weights.read_bytes() + bytes(200))
    assert "bytes of no tensor" in refused(recipe)


def test_a_config_without_the_class_that_sglang_starts_is_refused_before_it_starts(
    tmp_path: Path, refused: Refused
) -> None:
    for number, names in enumerate((None, [], ["Qwen2Model"], ["Qwen2ForCausalLM"])):
        said = refused(
            make_run(tmp_path / str(number), architectures=names), "rollout.engine=sglang", "train.layout.tensor=3"
        )
        assert ("config.json: architectures" in said) == (number < 3)


def test_options_that_megatron_refuses_together_are_refused(tmp_path: Path, refused: Refused) -> None:
    assert "Megatron refuses" in refused(make_run(tmp_path), "train.megatron.moe_enable_deepep=true")


def test_a_tracker_without_its_package_is_refused(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "megagrpo[wandb]" in refused(make_run(tmp_path), "track.wandb={}")


def test_problems_of_recipe_model_and_data_come_in_one_error(tmp_path: Path, refused: Refused) -> None:
    recipe = make_run(tmp_path)
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "model" / "tokenizer.json").unlink()
    told = refused(recipe, "rollout.top_k=1", "train.layout.pipeline=3", "reward.functions.0.function=gsm8")
    assert told.startswith("cannot start (5 problems):")
    places = ("rollout.top_k", "train.layout.pipeline", "no tokenizer", "train.jsonl", "reward.functions.0.function")
    assert [place for place in places if place not in told] == []


@pytest.mark.parametrize("devices", [0, 1, 2])
def test_a_run_on_this_machine_needs_its_gpus(devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)  # whatever machine the test runs on
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    recipe, overrides = make_run(tmp_path), ["cluster.device=cuda", "train.layout.tensor=2"]
    if devices < 2:
        with pytest.raises(PreflightError, match=r"cluster\.device"):
            preflight(load(recipe, overrides))
    else:
        preflight(load(recipe, overrides))
    assert main(["plan", str(recipe), *overrides]) == 0
    preflight(load(recipe, [*overrides, "cluster.address=auto"]))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    preflight(load(recipe, overrides))


def test_a_hub_model_is_taken_from_the_cache_offline(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_run(tmp_path)
    cached = tmp_path / "cache" / "models--somebody--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    (tmp_path / "model").rename(cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    ready = preflight(load(recipe, ["model.path=somebody/tiny"]))
    assert ready.model_directory == ready.tokenizer_directory == cached / "snapshots" / ("0" * 40)
    assert "somebody/tiny at other" in refused(recipe, "model.path=somebody/tiny", "model.revision=other")
    told = refused(recipe, "model.path=nobody/nothing")
    assert "nobody/nothing" in told
    assert "HF_HUB_OFFLINE" in told
