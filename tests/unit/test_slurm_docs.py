"""docs/slurm.md: its commands are complete and can be given as they stand. (megagrpo's own: see test_readme.py.)"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo.recipe.load import load_any

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "slurm.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in re.findall(r"^ *\$ (.+)$", PAGE, re.MULTILINE)]
SUBMITTED = [words for words in COMMANDS if words[0] == "sbatch"]
RECIPE_OF = {"slurm/grpo_70b.sh": "yaml_recipes/grpo_70b.yaml"}


@pytest.mark.parametrize("words", SUBMITTED, ids=" ".join)
def test_what_is_submitted_is_there_and_its_overrides_are_keys(words: list[str]) -> None:
    arguments = [word for word in words[1:] if not word.startswith("--")]
    script, overrides = arguments[0], arguments[1:]
    assert (REPOSITORY / script).exists()
    recipe = RECIPE_OF.get(script) or overrides.pop(0)
    load_any(REPOSITORY / recipe, overrides)


def test_other_programs_know_their_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a configuration Slurm's programs don't even print their help.
    lines = ("ClusterName=test", "SlurmctldHost=localhost", "NodeName=n1", "PartitionName=test Nodes=n1")
    (tmp_path / "slurm.conf").write_text("\n".join([*lines, ""]))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    others = [words for words in COMMANDS if words[0] in {"hf", "scancel", "squeue", "sbatch"}]
    assert {words[0] for words in others} == {"hf", "scancel", "squeue", "sbatch"}
    beside = str(Path(sys.executable).parent)
    for words in others:
        program = shutil.which(words[0], path=beside) or shutil.which(words[0])
        if program is None:  # no Slurm here
            continue
        asked = [program, "download", "--help"] if words[0] == "hf" else [program, "--help"]
        known = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        for option in [word.partition("=")[0] for word in words if word.startswith("--")]:
            assert option in known, " ".join(words)


def test_settings_and_exit_codes_are_those_of_the_script() -> None:
    script = (REPOSITORY / "slurm" / "ray_cluster.sh").read_text(encoding="utf-8")
    for name, default in re.findall(r"^\| `([A-Z_]+)` \| `?([^ `]+)`? \|", PAGE, re.MULTILINE):
        assert f"{name}=${{{name}:-{default}}}" in script
    codes = set(re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE))
    assert codes == {"0", "1", "2", "3", "4", "75", "143"}
    said = script[: script.index("CONTAINER=")]
    assert all(re.search(rf"\b{code}\b", said) for code in codes)


def test_files_that_the_page_names_are_there() -> None:
    for name in re.findall(r"`((?:slurm|yaml_recipes)/[^`{]+\.(?:sh|yaml))`", PAGE):
        assert (REPOSITORY / name).exists(), name
