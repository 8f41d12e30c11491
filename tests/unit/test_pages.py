"""README and docs show only commands, targets, files, settings and exit codes that exist."""

from __future__ import annotations

import contextlib
import importlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.scripts.scripts import cli as ray_cli

from megagrpo import cli, errors
from megagrpo.recipe.load import load_any
from megagrpo.recipe.schema import Recipe, SftRecipe
from megagrpo.recipe.yaml12 import parse
from tests.tiny_run import recipe

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = {"README.md": (REPOSITORY / "README.md").read_text("utf-8")} | {
    path.relative_to(DOCS).as_posix(): path.read_text("utf-8") for path in DOCS.rglob("*.md")
}
CLUSTERS, SLURM = PAGES["clusters.md"], PAGES["slurm.md"]
COMMAND = re.compile(r"^ *\$ (.+?)(?:\s+#.*)?$", re.MULTILINE)
COMMANDS = [shlex.split(found) for page in sorted(PAGES) for found in COMMAND.findall(PAGES[page])]
OF_SLURM = [shlex.split(found) for found in COMMAND.findall(SLURM)]
IN_TEXT = re.compile(r"(?<!`)`megagrpo ((?:[a-z]+-?)+ [^`…]+)`")
RECIPES = {
    f"{page}-{index}": text
    for page in sorted(PAGES)
    for index, text in enumerate(re.findall(r"^```yaml\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL))
}
EXIT_CODE = re.compile(r"^\| (\d+) \|", re.MULTILINE)


def test_megagrpo_takes_every_command_shown() -> None:
    for words in (words for words in COMMANDS if words[0] == "megagrpo"):
        cli.parse(words[1:])


def test_a_command_in_a_sentence_has_no_argument_that_megagrpo_does_not_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = [found for page in PAGES.values() for found in IN_TEXT.findall(page)]
    for command in written:
        with contextlib.suppress(SystemExit):  # what it lacks is in the reader's hands
            cli.parse(shlex.split(command))
        said = capsys.readouterr().err
        assert "unrecognized" not in said, command
        assert "invalid choice" not in said, command
    assert written


def test_overrides_shown_are_fields_of_the_recipe_that_they_are_for() -> None:
    checked = 0
    for words in (words for words in COMMANDS if words[0] == "megagrpo"):
        for name in (word for word in words if word.startswith("yaml_recipes/") and (REPOSITORY / word).exists()):
            load_any(REPOSITORY / name, [word for word in words[2:] if re.match(r"[A-Za-z_][\w.]*=", word)])
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_shown_is_one_or_a_part_of_one(name: str) -> None:
    shown = parse(RECIPES[name], str).tree
    if shown.get("kind") == "sft":
        SftRecipe.model_validate(shown)
    else:
        Recipe.model_validate(merged(recipe(Path("tiny")), shown))


def test_the_verifier_shown_finds_years() -> None:
    (shown,) = re.findall(r"<!-- example: rewards/year.py -->\n```python\n(.*?)```", PAGES["extending.md"], re.DOTALL)
    place: dict[str, Any] = {}
    exec(shown, place)
    assert place["year"]("In 1969, or 1970?", "1970") == {"score": 1.0, "answer": "1970"}
    assert place["year"]("No idea", "1970")["score"] == 0.0


def merged(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """`whole` with what `part` says otherwise."""
    below = {
        key: merged(whole[key], value) if isinstance(value, dict) and isinstance(whole.get(key), dict) else value
        for key, value in part.items()
    }
    return whole | below


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
        beside = REPOSITORY if name == "README.md" else (DOCS / name).parent
        missing = [to for to in re.findall(r"\]\((?!https?://)([^)#]+)", page) if not (beside / to).exists()]
        assert not missing, name


def test_exit_codes_of_the_command_are_those_of_the_errors() -> None:
    codes = [errors.EXIT_USER_ERROR, errors.EXIT_RUN_FAILED, errors.EXIT_NODE_LOST, errors.EXIT_STOPPED]
    by_signal = [cli.EXIT_INTERRUPTED, 128 + signal.SIGKILL, 128 + signal.SIGTERM]
    assert list(map(int, EXIT_CODE.findall(CLUSTERS))) == [0, 1, *codes, *by_signal]


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
        file = "yaml_recipes/grpo_70b.yaml" if script == "slurm/grpo_70b.sh" else overrides.pop(0)
        load_any(REPOSITORY / file, overrides)


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


# --- Kubernetes -------------------------------------------------------------------------------------------------------

# The fields of KubeRay's resources that a manifest may have, as its API reference lists them.
RAY_JOB = """
activeDeadlineSeconds backoffLimit clusterSelector deletionStrategy entrypoint entrypointNumCpus entrypointNumGpus
entrypointResources jobId managedBy metadata rayClusterSpec runtimeEnvYAML shutdownAfterJobFinishes submissionMode
submitterConfig submitterPodTemplate suspend ttlSecondsAfterFinished
"""
RAY_CLUSTER = """
authOptions autoscalerOptions enableInTreeAutoscaling gcsFaultToleranceOptions headGroupSpec headServiceAnnotations
managedBy rayVersion suspend workerGroupSpecs
"""
HEAD_GROUP = "enableIngress headService rayStartParams serviceType template"
WORKER_GROUP = """
groupName idleTimeoutSeconds maxReplicas minReplicas numOfHosts rayStartParams replicas scaleStrategy suspend template
"""


def test_the_ray_job_has_fields_that_kuberay_has_and_the_devices_that_its_recipe_needs() -> None:
    job = yaml.safe_load((REPOSITORY / "kubernetes" / "rayjob.yaml").read_text("utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    cluster = spec["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for found, known in ((spec, RAY_JOB), (cluster, RAY_CLUSTER), (head, HEAD_GROUP), (workers, WORKER_GROUP)):
        assert set(found) <= set(known.split())
    assert f"ray=={cluster['rayVersion']}" in (REPOSITORY / "requirements" / "gpu.txt").read_text("utf-8").splitlines()
    for group in (head, workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    _, _, script = shlex.split(spec["entrypoint"])
    planned, trained = (part.split()[1:] for part in script.split(" && ") if part.startswith("megagrpo "))
    assert (planned[0], trained[0]) == ("plan", "train")
    cli.parse(trained)
    run = load_any(REPOSITORY / trained[1], trained[2:]).recipe
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus == run.cluster.gpus_per_node
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    assert workers["replicas"] * gpus == run.train.layout.parallel().ranks
