"""`megagrpo doctor`: looks at this machine, its packages and its GPUs, and prints what it finds, part by part."""

from __future__ import annotations

import ipaddress
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import psutil
from packaging.requirements import Requirement

from megagrpo.plan.units import byte_text
from megagrpo.recipe.kernels import Attention, Capability, Installed, installed, layers_on
from megagrpo.recipe.schema import SglangConfig
from megagrpo.recipe.schema.train import COMPILED
from megagrpo.reward.sandbox.programs import search
from megagrpo.reward.sandbox.sandbox import Kind
from megagrpo.rollout.sglang.arguments import ARGUMENTS
from megagrpo.rollout.vllm import arguments as vllm
from megagrpo.section import table_beside
from megagrpo.track.trackers import TRACKERS

State = Literal["ok", "absent", "doubtful", "wrong"]

IMPORT_SECONDS = 120.0
CUDNN_MIN = 92400
"""The cuDNN that Transformer Engine 2.17.1 was built for, as torch prints versions."""
CORNERSTONES = ("megatron-core", "sglang", "transformer-engine", "transformers", "ray", "mlflow")
"""Packages whose own requirements are compared with what is installed."""
IN_EXTRAS = {"megatron-core": "transformer-engine"}
"""Optional requirements that megagrpo needs: a package, and the requirement of its extra."""
PYTHON = (3, 11)
OPEN_FILES = 65536  # as Ray's documentation recommends for larger clusters
SHARED_MEMORY_BYTES = 8 << 30  # room for a few buckets of a weight sync, and Ray's objects
DISK_BYTES = 50 << 30
INFINIBAND = Path("/sys/class/infiniband")
SHARED_MEMORY = Path("/dev/shm")


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


@cache
def remedies() -> dict[str, Any]:
    """Reads remedies.yaml."""
    read: dict[str, Any] = table_beside(__file__, "remedies.yaml")
    return read


def purposes() -> dict[str, str]:
    """Returns the purpose of each optional extra of setup.py."""
    trackers = {name: tracker.title for name, tracker in TRACKERS.items() if tracker.package}
    tracking = {name: f"tracking by {title} (pip install megagrpo[{name}])" for name, title in trackers.items()}
    return {**remedies()["extras"], **tracking}


def judged(
    part: str, good: bool, found: str, otherwise: State = "doubtful", *, remedy: str = "", **values: object
) -> Finding:
    """Returns the finding of a part that is as it should be, or needs its remedy, by the part or another name."""
    text = remedies()[remedy or part].format(**values)
    return Finding(part, "ok", found) if good else Finding(part, otherwise, found, text)


# --- the machine -----------------------------------------------------------------------------------------------------


def machine_findings() -> Iterator[Finding]:
    memory = byte_text(psutil.virtual_memory().total)
    described = f"{platform.python_version()}, {os.cpu_count()} cores, {memory} memory"
    yield judged("Python", sys.version_info >= PYTHON, described, "wrong", version=".".join(map(str, PYTHON)))
    if SHARED_MEMORY.is_dir():
        yield _space("/dev/shm", SHARED_MEMORY, SHARED_MEMORY_BYTES, "/dev/shm")
    else:
        yield judged("/dev/shm", False, "not there", remedy="no /dev/shm")
    yield from _limits()
    yield _space(f"disk at {Path.cwd()}", Path.cwd(), DISK_BYTES, "disk")
    yield _hostname()
    yield from _interfaces()
    slurm, address = shutil.which("sbatch") and "Slurm's sbatch", os.environ.get("RAY_ADDRESS")
    ray = f"RAY_ADDRESS {address}" if address else "no RAY_ADDRESS: runs start Ray on this machine"
    yield Finding("jobs", "ok", ", ".join(filter(None, (slurm, ray))))
    yield sandbox_finding(*search("auto"))


def _space(part: str, directory: Path, wanted_bytes: int, remedy: str) -> Finding:
    free, wanted = shutil.disk_usage(directory).free, byte_text(wanted_bytes)
    return judged(part, free >= wanted_bytes, f"{byte_text(free)} free", remedy=remedy, wanted=wanted)


def _limits() -> Iterator[Finding]:
    """Reports the limits on open files and locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    raised = "" if hard == resource.RLIM_INFINITY or hard >= OPEN_FILES else f" (its hard limit is {hard})"
    described, enough = "no limit" if unlimited else f"at most {soft}", unlimited or soft >= OPEN_FILES
    yield judged("open files", enough, described, wanted=OPEN_FILES, limit=raised)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited, needed = soft == resource.RLIM_INFINITY, bool(_infiniband())
    described = "no limit" if unlimited else f"at most {byte_text(soft)}"
    if not unlimited and not needed:
        described += "; only InfiniBand and pinned memory need more"
    yield judged("locked memory", unlimited or not needed, described)


def _hostname() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return judged(f"host name {name}", False, f"has no address: {error}", remedy="no address")
    loopback = ipaddress.ip_address(address).is_loopback
    described = f"is {address}" if loopback else address
    return judged(f"host name {name}", not loopback, described, remedy="host name")


def _interfaces() -> Iterator[Finding]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    addresses = [
        f"{name} {entry.address}"
        for name, entries in sorted(psutil.net_if_addrs().items())
        for entry in entries
        if name in up and entry.family is socket.AF_INET and not ipaddress.ip_address(entry.address).is_loopback
    ]
    text = ", ".join([*addresses, *(f"InfiniBand {name}" for name in _infiniband())])
    yield judged("network", bool(text), text or "loopback only")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        chosen = os.environ.get(variable, "")
        if chosen.startswith("^"):  # NCCL's way to say which not to use
            continue
        if chosen and not any(name.startswith(one) for name in up for one in chosen.lstrip("=").split(",")):
            given, names = f"{chosen}, which is no interface that is up", ", ".join(sorted(up))
            yield judged(variable, False, given, "wrong", remedy="interface", names=names)


def _infiniband() -> list[str]:
    return sorted(entry.name for entry in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []


def sandbox_finding(kind: Kind | None, refused: Sequence[str]) -> Finding:
    """Reports the sandbox in which the reward `code` runs programs."""
    whole, described = kind is not None and kind.isolation == "bubblewrap", "; ".join(refused)
    if kind is not None:
        described = str(kind) if whole else f"a seccomp filter only, without files ({described})"
    return judged("sandbox", whole, described)


# --- the packages that setup.py asks for ------------------------------------------------------------------------------


def package_findings(
    requirements: list[str] | None = None,
    version_of: Callable[[str], str | None] | None = None,
    extras: Collection[str] | None = None,
) -> Iterator[Finding]:
    """Yields one finding for each requirement of megagrpo and of these extras, or of all."""
    version_of, extras = version_of or installed_version, purposes() if extras is None else extras
    if requirements is None and installed_version("megagrpo") is None:
        yield Finding("megagrpo", "doubtful", "not installed, so its requirements are unknown", "pip install .")
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
            present = version_of(requirement.name)
            marker = requirement.marker
            applies = marker is None or marker.evaluate({"extra": ""}) or requirement.name == IN_EXTRAS.get(name)
            if applies and present is not None and not requirement.specifier.contains(present, prereleases=True):
                wrong.append(f"{requirement.name}{requirement.specifier}, and {present} is here")
        more = (
            " (rollout.sglang.python); make sglang-cpu installs it so, and it runs on CPUs" if name == "sglang" else ""
        )
        fit = f"asks for {'; '.join(wrong)}" if wrong else "fits what else is installed"
        yield judged(f"{name} {version}", not wrong, fit, remedy="cornerstone", name=name, more=more)


def working_findings() -> Iterator[Finding]:
    """Checks whether the installed optional packages can be used. Asks SGLang and vLLM in processes of their own."""
    if find_spec("amp_C") is not None:  # a compiled module beside it; the package apex on PyPI is something else
        fused = "without" if find_spec("fused_weight_gradient_mlp_cuda") is None else "with"
        yield Finding("apex", "ok", f"NVIDIA's, {fused} fused accumulation of gradients")
    elif find_spec("apex") is not None:
        yield judged("apex", False, "not NVIDIA's, or built without its extensions", "wrong")
    else:
        yield judged("apex", False, "not installed", "absent", remedy="no apex")
    if installed_version("transformer-engine") is not None:
        yield _transformer_engine()
    if installed_version("sglang") is not None:
        problems = ARGUMENTS.problems(SglangConfig(), "rollout.sglang", "rollout.engine", plan_only=False)
        wrong = [Finding("SGLang", "wrong", problem.given, problem.fix or problem.needed) for problem in problems]
        yield from wrong or [Finding("SGLang", "ok", "its servers' arguments can be read")]
    version, fault = vllm.installed_version()
    if fault:
        yield Finding("vLLM", "wrong", fault, vllm.ARGUMENTS.install)
    elif version:
        given = version if version == vllm.TRIED else f"{version}, which was not tried: {vllm.TRIED} was, on CPUs"
        yield Finding("vLLM", "ok" if version == vllm.TRIED else "doubtful", given)


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
    required = f"{requirement.name}{requirement.specifier}"
    if version is None and extra is not None:
        return Finding(requirement.name, "absent", "not installed", purposes()[extra])
    older = requirement.marker is not None and not requirement.marker.evaluate({"extra": extra or ""})
    command = f"pip install {'--no-deps --ignore-requires-python ' if older else ''}'{required}'"
    if version is None:
        return Finding(requirement.name, "wrong", "not installed", command)
    fits = requirement.specifier.contains(version, prereleases=True)
    if fits:
        return Finding(requirement.name, "ok", version)
    return Finding(requirement.name, "wrong", f"{version}, and {required} is needed", command)


def missing_to_compile() -> list[str]:
    """Returns the parts that torch needs to compile a function in C++ and this machine lacks."""
    search_path = os.pathsep.join(filter(None, (os.environ.get("PATH"), str(Path(sys.executable).parent))))
    compiler, headers = os.environ.get("CXX", "c++").split()[0], Path(sysconfig.get_path("include"), "Python.h")
    needed = {
        f"{compiler} (apt-get install g++)": shutil.which(compiler) is not None,
        "ninja (pip install ninja)": shutil.which("ninja", path=search_path) is not None,
        f"{headers} (apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev)": headers.is_file(),
    }
    return [name for name, is_here in needed.items() if not is_here]


def _transformer_engine() -> Finding:
    code = "import torch, transformer_engine.pytorch; print(torch.backends.cudnn.version())"  # torch brings NCCL along
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        given = f"not imported after {IMPORT_SECONDS:g} s"
        return judged("Transformer Engine", False, given, "wrong", remedy="slow import")
    if done.returncode == 0:
        cudnn = done.stdout.split()[-1]
        old = cudnn.isdecimal() and int(cudnn) < CUDNN_MIN
        return judged("Transformer Engine", not old, f"can be imported{f'; cuDNN {cudnn}' if old else ''}")
    reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return judged("Transformer Engine", False, f"cannot be imported: {reason}", "wrong", remedy="import")


# --- the GPUs ---------------------------------------------------------------------------------------------------------

BFLOAT16_SINCE = (8, 0)
"""Compute capability of the first GPUs that multiply matrices in bfloat16: Ampere."""


def gpu_findings() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None:
        yield judged("GPUs", False, f"torch {torch.__version__} is built without CUDA", "absent", remedy="no CUDA")
        return
    count = torch.cuda.device_count()
    if count == 0:
        yield judged("GPUs", False, f"torch is built for CUDA {torch.version.cuda} and finds none")
        return
    for index in range(count):
        card = torch.cuda.get_device_properties(index)
        capability = (card.major, card.minor)
        text = f"{card.name}, {card.total_memory / 2**30:.1f} GiB, compute capability {card.major}.{card.minor}"
        yield judged(f"GPU {index}", capability >= BFLOAT16_SINCE, text, remedy="GPU")
    for capability in sorted({torch.cuda.get_device_capability(index) for index in range(count)}):
        yield layers_finding(capability, installed())
    yield Finding("CUDA", "ok", f"{torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which(str(Path(home, "bin", "nvcc")))
    yield judged("CUDA compiler", nvcc is not None, nvcc or "no nvcc")
    missing, modules = missing_to_compile(), ", ".join(sorted(COMPILED))
    able = f"torch {'cannot' if missing else 'can'} compile a function in C++"
    yield judged("C++ compiler", not missing, able, missing="; ".join(missing), modules=modules)
    apart = [f"{a} and {b}" for a, b in permutations(range(count), 2) if not torch.cuda.can_device_access_peer(a, b)]
    if count > 1:
        reach = f"none between GPUs {', '.join(apart[:4])}" if apart else f"between all {count} GPUs"
        yield judged("peer access", not apart, reach)


def layers_finding(card: Capability, installed: Installed) -> Finding:
    """Reports the layers that train.layer_spec: auto takes for heads of 128 elements, as most models have."""
    layers = layers_on(card, installed, Attention(key_dim=128, value_dim=128, half=True))
    part, text = f"layers on sm{card[0]}{card[1]}", f"{layers.spec}, attention by {layers.kernel}"
    slow = layers.spec == "local" and installed.transformer_engine
    return Finding(part, "doubtful", text, layers.why) if slow else Finding(part, "ok", text)


CHAPTERS: Mapping[str, Callable[[], Iterable[Finding]]] = {
    "machine": machine_findings,
    "packages": package_findings,
    "do they fit one another": fit_findings,
    "do the optional ones work": working_findings,
    "GPUs": gpu_findings,
}
MARKS = {"ok": "ok", "absent": "-", "doubtful": "?", "wrong": "WRONG"}


def examine(say: Callable[[str], None]) -> bool:
    """Prints each chapter as it is examined. Returns whether nothing is wrong."""
    counts = dict.fromkeys(MARKS, 0)
    for title, look in CHAPTERS.items():
        say(f"{title}:")
        for finding in look():
            counts[finding.state] += 1
            say(f"  {MARKS[finding.state]:<5} {finding.part:<24} {finding.found}")
            if finding.remedy:
                say(f"        {'for' if finding.state == 'absent' else 'fix'}: {finding.remedy}")
    say(f"{counts['wrong']} wrong, {counts['doubtful']} doubtful, {counts['absent']} optional parts not installed")
    return counts["wrong"] == 0
