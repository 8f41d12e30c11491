"""docs/recipes.md shows what the commands really print."""

import json
import re
import shlex
from pathlib import Path

import pytest

from megagrpo.cli import main
from tests.tiny_run import ROW, make_model

TEXT = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPE = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)[0]
COMMANDS = re.findall(r"```console\n\$ megagrpo ([^\n]*)\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_prints_what_the_page_shows(
    command: str,
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(Path("models/sums"))
    for directory in ("data", "yaml_recipes"):
        Path(directory).mkdir()
    Path("data/train.jsonl").write_text(f"{json.dumps(ROW)}\n" * 8)
    Path("yaml_recipes/sums.yaml").write_text(RECIPE)
    wrong = RECIPE.replace("tensor: 2", "tensr: 4").replace("prompts_per_step: 32", "prompts_per_step: many")
    Path("yaml_recipes/wrong.yaml").write_text(wrong)
    code = main(shlex.split(command))
    printed = capsys.readouterr()
    assert code == (2 if "problem" in output else 0)
    shown, cut, _ = output.partition("…\n")
    if cut:
        assert printed.out.startswith(shown)
    elif output:
        assert printed.out + printed.err == output
