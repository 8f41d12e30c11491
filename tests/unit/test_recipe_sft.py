"""Recipes of supervised fine-tuning: their own keys and rules, in the same words, and told apart from those of GRPO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megagrpo.cli import main
from megagrpo.errors import EXIT_USER_ERROR
from megagrpo.recipe.load import Places, apply_overrides, dump, load_any, load_sft
from megagrpo.recipe.schema import SftRecipe
from megagrpo.section import broken_rules
from tests.tiny_run import make_model, make_run

CONTEXT = "train.layout.context=2"
ROW = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}


def recipe(directory: Path) -> dict[str, Any]:
    """Only what has no default, as plain values."""
    return {
        "kind": "sft",
        "name": "tiny",
        "model": {"path": str(directory / "model")},
        "data": {"train": [{"path": str(directory / "train.jsonl")}], "examples_per_step": 4, "tokens_max": 32},
        "train": {"total_steps": 2, "tokens_per_microbatch": 64},
        "track": {"directory": str(directory / "runs")},
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(ROW)}\n" * 8)
    written = tmp_path / "recipe.yaml"
    written.write_text(yaml.safe_dump(recipe(tmp_path), sort_keys=False))
    return written


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("train.total_steps", ["train.total_steps=null"]),
        ("train.total_steps", ["train.total_epochs=1"]),
        ("train.total_episodes", ["train.total_episodes=100"]),
        ("data.examples_per_step", ["train.layout.data=8"]),
        ("train.tokens_per_microbatch", ["data.tokens_max=65"]),
        ("train.tokens_per_microbatch", ["data.tokens_max=66", "train.tokens_per_microbatch=33", CONTEXT]),
        ("train.offload", ["train.offload=[optimizer]"]),
        ("train.quantization", ["train.quantization=same_as_rollout"]),
        ("train.logprob_tokens_per_microbatch", ["train.logprob_tokens_per_microbatch=640"]),
        ("cluster.placement", ["cluster.placement=disaggregated"]),
        ("cluster.engine_devices", ["cluster.engine_devices=1"]),
        ("checkpoint.keep_best", ["checkpoint.keep_best=mean@1"]),
        ("checkpoint.keep_batches", ["checkpoint.keep_batches=1"]),
        ("train.layout.virtual_pipeline", ["train.layout.virtual_pipeline=2"]),
        ("train.optimizer.min_lr", ["train.optimizer.min_lr=1e-3"]),
    ],
)
def test_a_broken_rule_names_the_field_and_a_fix(field: str, overrides: list[str]) -> None:
    places = Places("recipe.yaml", recipe_class=SftRecipe)
    tree, _, wrong = apply_overrides(recipe(Path("tiny")), places, overrides)
    assert not wrong
    (problem,) = broken_rules(SftRecipe.model_validate(tree))
    assert problem.where == field
    assert problem.fix


def test_the_resolved_recipe_loads_as_itself(path: Path) -> None:
    loaded = load_any(path).recipe
    assert isinstance(loaded, SftRecipe)
    path.write_text(dump(loaded))
    assert load_sft(path).recipe == loaded


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == EXIT_USER_ERROR
    return capsys.readouterr().err


def test_plan_prints_its_sizes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(path), "train.layout.data=2"]) == 0
    printed = capsys.readouterr().out
    assert "ranks        2 (data 2)\n" in printed
    assert "step         4 examples, about 2 on each of 2 data ranks\n" in printed
    assert printed.endswith("OK\n")


def test_each_command_sends_the_other_kind_to_the_other(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "train", str(path))
    assert f"{path}:1 kind" in told
    assert f"fix: `megagrpo sft {path}`" in told
    path.write_text(path.read_text().replace("kind: sft", "kind: grpo"))
    assert f"fix: `megagrpo train {path}`" in refused(capsys, "sft", str(path))
    assert "add `kind:`" in refused(capsys, "sft", str(make_run(path.parent / "without_kind")))


def test_all_mistakes_are_found_at_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = path.read_text().replace("kind: sft", "kind: stf").replace("examples_per_step: 4", "example_per_step: 4")
    path.write_text(text.replace("tokens_max: 32", "tokens_max: long"))
    told = refused(capsys, "plan", str(path))
    for words in ("(3 problems)", f"{path}:1 kind", "`sft`", "`examples_per_step`", "data.tokens_max"):
        assert words in told, told


@pytest.mark.parametrize("row", [{"prompt": []}, {"messages": ROW["messages"][:1]}])
def test_its_data_is_looked_at_before_it_starts(
    path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any]
) -> None:
    (path.parent / "train.jsonl").write_text(json.dumps(row) + "\n")
    assert "data.train.0.path" in refused(capsys, "sft", str(path), "cluster.device=cpu")


def test_examples_longer_than_the_model_takes_are_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "plan", str(path), "data.tokens_max=65", "train.tokens_per_microbatch=65")
    assert "data.tokens_max=65" in told
    assert "at most 64" in told
