"""README and docs show only commands, targets, files, settings and exit codes that exist."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ray.scripts.scripts import cli as ray_cli

from megagrpo import cli, errors
from megagrpo.recipe.load import load_any

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = {path.name: path.read_text("utf-8") for path in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]}
CLUSTERS, SLURM = PAGES["clusters.md"], PAGES["slurm.md"]
COMMAND = re.compile(r"^ *\$ (.+?)(?:\s+#.*)?$", re.MULTILINE)
COMMANDS = [shlex.split(found) for page in sorted(PAGES) for found in COMMAND.findall(PAGES[page])]
OF_SLURM = [shlex.split(found) for found in COMMAND.findall(SLURM)]
EXIT_CODE = re.compile(r"^\| (\d+) \|", re.MULTILINE)


def test_megagrpo_takes_every_command_shown() -> None:
    for words in (words for words in COMMANDS if words[0] == "megagrpo"):
        cli.parse(words[1:])


def test_every_make_target_shown_exists() -> None:
    targets = {words[1] for words in COMMANDS if words[0] == "make"}
    makefile = (REPOSITORY / "Makefile").read_text()
    assert targets
    assert targets <= set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))


def test_ray_takes_every_command_shown() -> None:
    shown = [words[1:] for words in COMMANDS if words[0] == "ray"]
    assert {tuple(words[:2]) for words in shown} >= {("start", "--head"), ("job", "submit")}
    for name, *arguments in shown:
        group = ray_cli
        if name == "job":
            group, (name, *arguments) = ray_cli.commands["job"], arguments
        group.commands[name].make_context(name, arguments)
        if name == "submit":
            cli.parse(shlex.split(arguments[-1].rpartition("&& megagrpo ")[2]))


def test_every_link_leads_to_a_file() -> None:
    for name, page in PAGES.items():
        beside = REPOSITORY / ("" if name == "README.md" else "docs")
        missing = [to for to in re.findall(r"\]\((?!https?://)([^)#]+)", page) if not (beside / to).exists()]
        assert not missing, name


def test_exit_codes_of_the_command_are_those_of_the_errors() -> None:
    codes = [errors.EXIT_USER_ERROR, errors.EXIT_RUN_FAILED, errors.EXIT_NODE_LOST, errors.EXIT_STOPPED]
    assert list(map(int, EXIT_CODE.findall(CLUSTERS))) == [0, *codes, cli.EXIT_INTERRUPTED]


def test_the_tables_of_scaling_are_those_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    scaling = importlib.import_module("scaling")
    written = PAGES["scaling.md"].splitlines()
    for name, size in scaling.SIZES.items():
        assert f"### {name}: {size.model} on {size.gpu}" in written
        assert all(any(line.startswith(f"| {gpus:,} |") for line in written) for gpus in size.gpus)
    for name, gpus in (("8B", 8), ("70B", 16)):
        assert set(scaling.table(name, (gpus,))) <= set(written)


# --- Slurm ------------------------------------------------------------------------------------------------------------


def test_what_is_submitted_is_there_and_its_overrides_are_keys() -> None:
    for words in (words for words in OF_SLURM if words[0] == "sbatch"):
        script, *overrides = [word for word in words[1:] if not word.startswith("--")]
        assert (REPOSITORY / script).exists()
        recipe = "yaml_recipes/grpo_70b.yaml" if script == "slurm/grpo_70b.sh" else overrides.pop(0)
        load_any(REPOSITORY / recipe, overrides)


def test_other_programs_know_their_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a configuration Slurm's programs don't even print their help.
    lines = ("ClusterName=test", "SlurmctldHost=localhost", "NodeName=n1", "PartitionName=test Nodes=n1")
    (tmp_path / "slurm.conf").write_text("\n".join([*lines, ""]))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    shown: dict[str, set[str]] = {name: set() for name in ("hf", "scancel", "squeue", "sbatch")}
    for name, *words in OF_SLURM:
        if name in shown:
            shown[name] |= {word.partition("=")[0] for word in words if word.startswith("--")}
    for name, options in shown.items():
        program = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
        assert options, name
        if program is not None:  # some machines have no Slurm
            asked = [program, "download", "--help"] if name == "hf" else [program, "--help"]
            known = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
            assert not [option for option in options if option not in known], name


def test_settings_and_exit_codes_are_those_of_the_script() -> None:
    script = (REPOSITORY / "slurm" / "ray_cluster.sh").read_text(encoding="utf-8")
    for name, default in re.findall(r"^\| `([A-Z_]+)` \| `?([^ `]+)`? \|", SLURM, re.MULTILINE):
        assert f"{name}=${{{name}:-{default}}}" in script
    codes = set(EXIT_CODE.findall(SLURM))
    assert codes == {"0", "1", "2", "3", "4", "75", "143"}
    said = script[: script.index("CONTAINER=")]
    assert all(re.search(rf"\b{code}\b", said) for code in codes)


def test_files_that_the_page_names_are_there() -> None:
    for name in re.findall(r"`((?:slurm|yaml_recipes)/[^`{]+\.(?:sh|yaml))`", SLURM):
        assert (REPOSITORY / name).exists(), name
