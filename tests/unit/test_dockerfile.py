"""The pins of the GPU environment: they satisfy what we, and the packages that we build on, declare."""

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megagrpo.doctor import fit_findings, installed_version, package_findings
from megagrpo.rollout.vllm.arguments import ENVIRONMENT

ROOT = Path(__file__).parents[2]
PINS = dict(
    line.split("==")
    for line in (ROOT / "requirements/gpu.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def pinned(name: str) -> str | None:
    return PINS.get(re.sub(r"[-_.]+", "-", name).lower())


def test_the_pins_are_what_setup_py_asks_for() -> None:
    found = {finding.part: finding for finding in package_findings(version_of=pinned)}
    assert {name for name, finding in found.items() if finding.state == "absent"} == {"wandb", "tensorboard"}
    assert [finding for finding in found.values() if finding.state == "wrong"] == []


def test_the_pins_are_those_versions_that_fit_the_packages_tested_here() -> None:
    for name in ("megatron-core", "sglang", "ray", "mlflow"):
        assert pinned(name) == metadata.version(name)
    found = fit_findings(lambda name: metadata.requires(name) or [] if installed_version(name) else [], pinned)
    assert [finding for finding in found if finding.state != "ok"] == []


def test_setup_py_asks_for_no_version_that_megatron_or_sglang_refuses() -> None:
    ours = {}
    for text in re.findall(
        r'^ +(?:"\w+": \[)?"([\w.-]+(?:\[\w+\])?[<>=~][^"]*)"', (ROOT / "setup.py").read_text(), re.MULTILINE
    ):
        ours[Requirement(text).name] = Requirement(text).specifier
    assert {"torch", "transformers", "sglang", "transformer-engine"} <= ours.keys()
    compared = set()
    for package in ("megatron-core", "sglang"):
        for theirs in map(Requirement, metadata.requires(package) or []):
            bounds = {Version(each.version) for each in (*ours.get(theirs.name, ()), *theirs.specifier)}
            near = [
                Version(f"{v.major}.{v.minor + step}") for v in bounds for step in (-1, 0, 1) if v.minor + step >= 0
            ]
            both = [v for v in (*bounds, *near) if v in ours.get(theirs.name, SpecifierSet()) and v in theirs.specifier]
            if theirs.name in ours:
                compared.add(theirs.name)
                assert both, f"{package} asks for {theirs}"
            if theirs.name == "transformer-engine":  # it has no other use
                assert [v for v in near if v in ours[theirs.name]] == [v for v in near if v in both]
    assert {"torch", "transformers", "transformer-engine", "einops"} <= compared


def test_transformer_engine_is_there_for_one_cuda_only() -> None:
    # Those for CUDA 12 and 13 install the same files: the last one would win.
    assert [name for name in PINS if name.startswith("transformer-engine-cu")] == ["transformer-engine-cu13"]


def test_what_the_dockerfile_installs_first_is_pinned() -> None:
    [first] = re.findall(r"pip install \$\(grep -E '\^\((.+)\)=='", (ROOT / "Dockerfile").read_text())
    assert set(first.split("|")) <= PINS.keys()


def test_the_image_has_what_sglang_calls_when_it_starts() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^FROM nvidia/cuda:\S+-devel-", text, re.MULTILINE)  # nvcc, for kernels that it compiles
    [packages] = re.findall(r"apt-get install (.*?)&&", text, re.DOTALL)
    assert {"numactl", "libnuma1", "ninja-build", "python3-dev"} <= set(packages.split())


def test_the_dockerfile_copies_what_is_there() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copied = [path for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for path in line.split()[:-1]]
    assert {"requirements/gpu.txt", "Makefile", "tools", "benchmarks"} <= set(copied)  # the last three: make gpu-check
    assert [path for path in copied if not (ROOT / path).exists()] == []


def test_vllms_environment_in_the_image_is_the_one_that_is_found_by_default() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (own,) = re.findall(r"python3 -m venv (\S+) \\", text)
    (vllms,) = re.findall(r"python3 -m venv (\S+) && (?=\1/bin/pip install --no-deps -r /tmp/vllm_gpu.txt)", text)
    assert Path(vllms) / "bin/python" == Path(own).parent / ENVIRONMENT


def test_apex_is_pinned_to_a_commit() -> None:
    [commit] = re.findall(r"^ARG APEX=([0-9a-f]{40})$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert f"git checkout {commit}" in (ROOT / "docs/gpu.md").read_text()
