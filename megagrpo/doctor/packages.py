"""Checks of the packages that setup.py asks for: installed or not, their versions, and whether they fit one another."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from megagrpo.recipe.schema import SglangConfig
from megagrpo.rollout.sglang.arguments import sglang_problems
from megagrpo.track.trackers import TRACKERS

State = Literal["ok", "absent", "doubtful", "wrong"]

IMPORT_SECONDS = 120.0
CUDNN_MIN = 92400
"""The cuDNN that Transformer Engine 2.17.1 was built for, as torch prints versions."""
WITHOUT: Mapping[str, str] = {
    "sglang": "rollouts by SGLang (pip install megagrpo[sglang]; make sglang-cpu on CPUs); the embedded engine is slow",
    "te": "Transformer Engine's fused layers (pip install megagrpo[te]); without it GPUs run Megatron's local layers",
    "muon": "train.optimizer.kind: muon (pip install megagrpo[muon]; docs/recipes.md has the command for Python 3.11)",
    "ifeval": "the verifier of IFEval's constraints (pip install megagrpo[ifeval])",
    "language": "the verifier of a response's language (pip install megagrpo[language])",
    "search": "a search tool of agents, examples/agents/bm25_search.py (pip install megagrpo[search])",
    "mcp": "MCP servers as tools of agents (pip install megagrpo[mcp])",
    "reasoning-gym": "tasks made by reasoning-gym, and their scorer (pip install megagrpo[reasoning-gym])",
    "prometheus": "a run's gauges for Prometheus (pip install megagrpo[prometheus])",
    **{
        name: f"tracking by {tracker.title} (pip install megagrpo[{name}])"
        for name, tracker in TRACKERS.items()
        if tracker.package
    },
}
"""Purpose of each optional extra of setup.py."""
CORNERSTONES = ("megatron-core", "sglang", "transformer-engine", "transformers", "ray", "mlflow")
"""Packages whose own requirements are compared with what is installed."""
IN_EXTRAS = {"megatron-core": "transformer-engine"}
"""A cornerstone, and the package that it names in extras only and that megagrpo uses with it."""
APEX = "pip uninstall apex, then build NVIDIA's from https://github.com/NVIDIA/apex, with its C++ and CUDA extensions"

WITHOUT_APEX = (
    "fused Adam and accumulation of gradients on GPUs, built from https://github.com/NVIDIA/apex; without it both are "
    "slower, and Transformer Engine's Adam is used where it is installed"
)


@dataclass(frozen=True)
class Finding:
    """The state of one part of the environment.

    absent: an optional part that is not here; `remedy` says what it is for. doubtful: it may fail in some uses. wrong:
    it must be repaired before anything runs.
    """

    part: str
    state: State
    found: str
    remedy: str = ""


def judged(part: str, good: bool, found: str, remedy: str, otherwise: State = "doubtful") -> Finding:
    """Returns the finding of a part that is as it should be, or needs the remedy."""
    return Finding(part, "ok", found) if good else Finding(part, otherwise, found, remedy)


def package_findings(
    requirements: list[str] | None = None,
    version_of: Callable[[str], str | None] | None = None,
    extras: Collection[str] = tuple(WITHOUT),
) -> Iterator[Finding]:
    """Yields one finding for each requirement of megagrpo and of these extras."""
    version_of = version_of or installed_version
    if requirements is None and installed_version("megagrpo") is None:
        yield Finding("megagrpo", "doubtful", "not installed, so nothing says what it requires", "pip install .")
        return
    for text in requirements if requirements is not None else _requirements("megagrpo"):
        requirement = Requirement(text)
        extra = next((name for name in extras if _is_of(requirement, name)), None)
        if "extra" not in str(requirement.marker) or extra is not None:
            yield _required(requirement, version_of(requirement.name), extra)


def fit_findings(
    requirements_of: Callable[[str], list[str]] | None = None, version_of: Callable[[str], str | None] | None = None
) -> Iterator[Finding]:
    """Yields a finding for each installed cornerstone: requirements installed in versions that it does not accept."""
    requirements_of, version_of = requirements_of or _requirements, version_of or installed_version
    for name in CORNERSTONES:
        version = version_of(name)
        if version is None:
            continue
        wrong = []
        for requirement in map(Requirement, requirements_of(name)):
            found = version_of(requirement.name)
            marker = requirement.marker
            applies = marker is None or marker.evaluate({"extra": ""}) or requirement.name == IN_EXTRAS.get(name)
            if applies and found is not None and not requirement.specifier.contains(found, prereleases=True):
                wrong.append(f"{requirement.name}{requirement.specifier}, and {found} is here")
        remedy = f"install {name} as it declares, or in an environment of its own"
        if name == "sglang":
            remedy += " (rollout.sglang.python); make sglang-cpu installs it so, and it runs on CPUs"
        fit = f"asks for {'; '.join(wrong)}" if wrong else "fits what else is installed"
        yield judged(f"{name} {version}", not wrong, fit, remedy)


def working_findings() -> Iterator[Finding]:
    """Checks whether the installed optional packages can be used. Asks SGLang in a process of its own."""
    if find_spec("amp_C") is not None:  # a compiled module beside it; the package apex on PyPI is something else
        fused = "without" if find_spec("fused_weight_gradient_mlp_cuda") is None else "with"
        yield Finding("apex", "ok", f"NVIDIA's, {fused} fused accumulation of gradients")
    elif find_spec("apex") is not None:
        yield Finding("apex", "wrong", "not NVIDIA's, or built without its extensions", APEX)
    else:
        yield Finding("apex", "absent", "not installed", WITHOUT_APEX)
    if installed_version("transformer-engine") is not None:
        yield _transformer_engine()
    if installed_version("sglang") is not None:
        wrong = [
            Finding("SGLang", "wrong", one.given, one.fix or one.needed) for one in sglang_problems(SglangConfig())
        ]
        yield from wrong or [Finding("SGLang", "ok", "its servers' arguments can be read")]


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements(name: str) -> list[str]:
    return metadata.requires(name) or []


def _is_of(requirement: Requirement, extra: str) -> bool:
    """Returns whether an extra asks for the requirement, on Python 3.13."""
    marker = requirement.marker
    newest = {"python_version": "3.13", "python_full_version": "3.13.0"}
    return marker is not None and marker.evaluate(newest | {"extra": extra}) and not marker.evaluate({"extra": ""})


def _required(requirement: Requirement, version: str | None, extra: str | None) -> Finding:
    asked = f"{requirement.name}{requirement.specifier}"
    if version is None and extra is not None:
        return Finding(requirement.name, "absent", "not installed", WITHOUT[extra])
    older = requirement.marker is not None and not requirement.marker.evaluate({"extra": extra or ""})
    command = f"pip install {'--no-deps --ignore-requires-python ' if older else ''}'{asked}'"
    if version is None:
        return Finding(requirement.name, "wrong", "not installed", command)
    fits = requirement.specifier.contains(version, prereleases=True)
    return judged(requirement.name, fits, version if fits else f"{version}, and {asked} is needed", command, "wrong")


def missing_to_compile() -> list[str]:
    """Returns the parts that torch needs to compile a function in C++ and this machine lacks."""
    beside = os.pathsep.join(filter(None, (os.environ.get("PATH"), str(Path(sys.executable).parent))))
    compiler, headers = os.environ.get("CXX", "c++").split()[0], Path(sysconfig.get_path("include"), "Python.h")
    needed = {
        f"{compiler} (apt-get install g++)": shutil.which(compiler) is not None,
        "ninja (pip install ninja)": shutil.which("ninja", path=beside) is not None,
        f"{headers} (apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev)": headers.is_file(),
    }
    return [name for name, is_here in needed.items() if not is_here]


def _transformer_engine() -> Finding:
    code = "import torch, transformer_engine.pytorch; print(torch.backends.cudnn.version())"  # torch brings NCCL along
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Finding("Transformer Engine", "wrong", f"not imported after {IMPORT_SECONDS:g} s", "install it anew")
    remedy = "build it for the installed torch: docs/gpu.md has the command"
    if done.returncode == 0:
        cudnn = done.stdout.split()[-1]
        old = cudnn.isdecimal() and int(cudnn) < CUDNN_MIN
        newer = "a torch with cuDNN 9.24 or later (2.14): with 9.19 the backward pass of attention failed"
        return judged("Transformer Engine", not old, f"can be imported{f'; cuDNN {cudnn}' if old else ''}", newer)
    reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding("Transformer Engine", "wrong", f"cannot be imported: {reason}", remedy)
