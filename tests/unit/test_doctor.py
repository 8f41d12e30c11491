"""The doctor: packages that are missing, too old, or do not fit (also found before a run), and this machine."""

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from megagrpo import doctor
from megagrpo.cli import main
from megagrpo.doctor import Finding, fit_findings, package_findings, purposes
from megagrpo.plan.parameters import known_models
from megagrpo.preflight.machine import device_problems, package_problems
from megagrpo.recipe.kernels import Installed
from megagrpo.reward.sandbox.sandbox import Kind
from megagrpo.weights.families import read_architecture
from tests.tiny_run import recipe_with

REQUIRED = [
    "torch>=2.9",
    "megatron-core<0.20,>=0.19.2; python_version >= '3.99'",
    'sglang<0.6,>=0.5.23; extra == "sglang"',
    'transformer-engine[pytorch]<2.12,>=2.9; extra == "te"',
    "emerging_optimizers<0.4,>=0.3; python_version >= '3.12' and extra == 'muon'",
    'pytest>=8; extra == "dev"',
]


def packages(versions: Mapping[str, str]) -> dict[str, Finding]:
    return {finding.part: finding for finding in package_findings(REQUIRED, versions.get)}


def test_a_missing_or_wrong_version_of_a_needed_package_is_wrong_and_says_what_to_install() -> None:
    found = packages({"torch": "2.8.1+cu128"})
    assert found["torch"].state == found["megatron-core"].state == "wrong"
    assert "torch>=2.9" in found["torch"].remedy
    assert "2.8.1+cu128" in found["torch"].found
    assert (
        found["megatron-core"].remedy == "pip install --no-deps --ignore-requires-python 'megatron-core<0.20,>=0.19.2'"
    )


def test_optional_packages_may_be_absent_but_not_of_a_wrong_version_and_developers_tools_are_left_out() -> None:
    found = packages({"torch": "2.14.1", "megatron-core": "0.19.2", "sglang": "0.4.0"})
    assert found["torch"].state == found["megatron-core"].state == "ok"
    assert found["transformer-engine"].state == "absent"
    assert found["transformer-engine"].remedy == purposes()["te"]
    assert found["sglang"].state == "wrong"
    assert "pytest" not in found
    assert found["emerging_optimizers"].state == "absent"
    assert packages({"emerging_optimizers": "0.2.0"})["emerging_optimizers"].state == "wrong"


def test_what_a_package_asks_of_others_is_compared_with_what_is_here() -> None:
    asked = {"sglang": ["torch==2.14.1", "transformers==5.19.0", 'timm==1.0; extra == "images"', "einops"]}
    versions = {"sglang": "0.5.23", "torch": "2.13.0+cpu", "transformers": "5.19.0", "timm": "2.0", "ray": "2.60.0"}
    found = {finding.part: finding for finding in fit_findings(lambda name: asked.get(name, []), versions.get)}
    assert set(found) == {"sglang 0.5.23", "ray 2.60.0", "transformers 5.19.0"}
    assert found["ray 2.60.0"].state == "ok"
    assert found["sglang 0.5.23"].state == "doubtful"
    assert found["sglang 0.5.23"].found == "asks for torch==2.14.1, and 2.13.0+cpu is here"


@pytest.mark.parametrize(("engine", "state"), [("2.8.0", "doubtful"), ("2.11.0", "ok"), ("2.12.0", "doubtful")])
def test_the_transformer_engine_that_megatron_names_in_an_extra_is_compared(engine: str, state: str) -> None:
    versions = {"megatron-core": metadata.version("megatron-core"), "transformer-engine": engine}
    asked = {"megatron-core": ['transformer-engine[pytorch]<2.12,>=2.9; extra == "dev"']}  # as 0.16.1 did
    found = {
        finding.part.split()[0]: finding for finding in fit_findings(lambda name: asked.get(name, []), versions.get)
    }
    assert found["megatron-core"].state == state


def test_what_torch_needs_to_compile_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "g++-99")
    recipe = recipe_with("train.recompute={modules: [layernorm]}", "cluster.device=cuda")
    assert any("g++-99" in problem.given for problem in package_problems(recipe))


def test_every_optional_extra_says_what_it_is_for() -> None:
    extras = set(metadata.metadata("megagrpo").get_all("Provides-Extra") or [])
    assert extras - {"dev", "docs"} == set(purposes())


def test_a_network_variable_that_names_no_interface_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nonesuch0")
    found = {finding.part: finding for finding in doctor.machine_findings()}
    assert found["NCCL_SOCKET_IFNAME"].state == "wrong"
    for good in ("lo", "=lo", "nonesuch0,lo", "^nonesuch0"):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", good)
        assert "NCCL_SOCKET_IFNAME" not in {finding.part for finding in doctor.machine_findings()}, good


def test_a_sandbox_without_bubblewrap_is_doubtful_and_says_what_was_refused() -> None:
    assert doctor.sandbox_finding(Kind("bubblewrap", user_namespace=True), ()).state == "ok"
    for kind in (Kind("seccomp"), None):
        found = doctor.sandbox_finding(kind, ("bwrap: No permissions to create a new namespace",))
        assert found.state == "doubtful"
        assert "No permissions" in found.found


@pytest.mark.parametrize(
    ("capability", "peers", "nvcc", "state"), [((7, 0), False, None, "doubtful"), ((9, 0), True, "/nvcc", "ok")]
)
def test_gpus_their_links_and_the_compiler_that_sglang_needs_are_looked_at(
    capability: tuple[int, int], peers: bool, nvcc: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = SimpleNamespace(name="card", total_memory=80 << 30, major=capability[0], minor=capability[1])
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: card)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: capability)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda one, other: peers)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 30, 7))
    monkeypatch.setattr("shutil.which", lambda name, path=None: nvcc)
    found = {finding.part: finding for finding in doctor.gpu_findings()}
    assert {part: found[part].state for part in ("GPU 0", "GPU 1", "peer access", "CUDA compiler")} == dict.fromkeys(
        ("GPU 0", "GPU 1", "peer access", "CUDA compiler"), state
    )
    assert found["CUDA"].found == "13.0, NCCL 2.30.7"


def test_the_command_prints_every_chapter_and_fails_if_something_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = dict(doctor.CHAPTERS) | {"do the optional ones work": lambda: ()}  # starts processes
    monkeypatch.setattr(doctor, "CHAPTERS", asked)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for title in doctor.CHAPTERS:
        assert f"{title}:" in printed
    assert "0 wrong" in printed
    broken = Finding("disk", "wrong", "full", "remove something")
    monkeypatch.setattr(doctor, "CHAPTERS", {"machine": lambda: [broken]})
    assert main(["doctor"]) == 1
    assert "fix: remove something" in capsys.readouterr().out


def test_a_recipe_is_refused_for_wrong_versions_of_what_it_uses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.8.1", "sglang": "0.4.0", "transformer-engine": "1.0"}
    monkeypatch.setattr("megagrpo.doctor.installed_version", lambda name: versions.get(name) or metadata.version(name))
    problems = {problem.where: problem for problem in package_problems(recipe_with("rollout.engine=sglang"))}
    assert set(problems) == {"package torch", "package sglang"}
    assert "pip install 'torch>=2.9'" in problems["package torch"].fix
    assert [problem.where for problem in package_problems(recipe_with())] == ["package torch"]
    moments = package_problems(recipe_with("train.optimizer.moment_dtype=bfloat16", "model.dtype=bfloat16"))
    assert "package transformer-engine" in {problem.where for problem in moments}


def test_muon_without_its_package_is_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megagrpo.preflight.machine.find_spec", lambda name: None)
    (problem,) = package_problems(recipe_with("train.optimizer.kind=muon"))
    assert problem.where == "train.optimizer.kind"
    assert "emerging_optimizers" in problem.needed
    assert not list(package_problems(recipe_with()))


def test_a_machines_layers_are_those_that_auto_takes_on_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("megagrpo.preflight.machine", "megagrpo.megatron.config"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: name)
    monkeypatch.setattr("megagrpo.megatron.config.installed", lambda: Installed(transformer_engine=True))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("megagrpo.doctor.installed_version", lambda name: "1.0")
    model = read_architecture(known_models()["Qwen/Qwen3-30B-A3B"])
    recipe = recipe_with("cluster.device=cuda", "model.dtype=bfloat16", "train.recompute={modules: [moe_act]}")
    for card, fused in (((9, 0), True), ((8, 0), False)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda card=card: card)
        packages = {problem.where for problem in package_problems(recipe, model)}
        assert ("package transformer-engine" in packages) == fused
        refused = {problem.where for problem in device_problems(recipe, model)}
        assert ("train.recompute.modules" not in refused) == fused
