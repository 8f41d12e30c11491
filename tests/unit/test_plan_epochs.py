"""Days of recipes that count epochs: known where the rows of the data are."""

import json
from pathlib import Path
from typing import Any

import pytest

from megagrpo.cli import main

RECIPE = str(Path(__file__).parents[2] / "yaml_recipes" / "gsm8k_qwen2.5_0.5b_1gpu.yaml")


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Overrides: 100 rows, 16 prompts in a step."""
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "1+1"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 100)
    return f"data.train=[{{path: {tmp_path}/train.jsonl}}]"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", RECIPE, "--json", *arguments]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_rows_of_files_that_are_here_are_counted(capsys: pytest.CaptureFixture[str], data: str) -> None:
    plan = told(capsys, data, "train.total_epochs=3")
    time = plan["time"]
    assert time["steps"] == 19  # 300 prompts, 16 in a step
    assert time["days"] == pytest.approx(19 * time["seconds"] / 86400)
    assert plan["summary"]["length"] == "3 passes over the training prompts, 100 rows: 19 steps at most"
    rows = next(assumed for assumed in plan["assumptions"] if assumed["name"] == "epoch_rows")
    assert rows == {"name": "epoch_rows", "value": 100, "unit": "rows", "origin": "counted"}


def test_rows_that_are_given_count_more(capsys: pytest.CaptureFixture[str], data: str) -> None:
    plan = told(capsys, data, "--assume", "epoch_rows=7473")
    assert plan["time"]["steps"] == 468
    assert plan["summary"]["length"] == "1 pass over the training prompts, 7473 rows: 468 steps at most"


def test_without_the_files_it_says_how_to_give_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys)["time"]["days"] is None
    assert main(["plan", RECIPE]) == 0
    assert "--assume epoch_rows=N" in capsys.readouterr().out
