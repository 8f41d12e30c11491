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
from importlib import metadata
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from megagrpo.plan.units import byte_text
from megagrpo.recipe.kernels import Attention, Capability, Installed, installed, layers_on
from megagrpo.recipe.schema import SglangConfig
from megagrpo.recipe.schema.train import COMPILED
from megagrpo.reward.sandbox.programs import search
from megagrpo.reward.sandbox.sandbox import Kind
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
"""Optional requirements that megagrpo needs: a package, and the requirement of its extra."""
APEX = "pip uninstall apex, then build NVIDIA's from https://github.com/NVIDIA/apex, with its C++ and CUDA extensions"
WITHOUT_APEX = (
    "fused Adam and accumulation of gradients on GPUs, built from https://github.com/NVIDIA/apex; without it both are "
    "slower, and Transformer Engine's Adam is used where it is installed"
)
PYTHON = (3, 11)
OPEN_FILES = 65536  # what Ray's own documentation asks for on larger clusters
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


def judged(part: str, good: bool, found: str, remedy: str, otherwise: State = "doubtful") -> Finding:
    """Returns the finding of a part that is as it should be, or needs the remedy."""
    return Finding(part, "ok", found) if good else Finding(part, otherwise, found, remedy)


# --- the machine -----------------------------------------------------------------------------------------------------


def machine_findings() -> Iterator[Finding]:
    memory = byte_text(psutil.virtual_memory().total)
    described = f"{platform.python_version()}, {os.cpu_count()} cores, {memory} memory"
    remedy = f"Python {'.'.join(map(str, PYTHON))} or later"
    yield judged("Python", sys.version_info >= PYTHON, described, remedy, "wrong")
    if SHARED_MEMORY.is_dir():
        remedy = f"at least {byte_text(SHARED_MEMORY_BYTES)} (docker run --shm-size, or remount it), or smaller buckets"
        yield _space("/dev/shm", SHARED_MEMORY, SHARED_MEMORY_BYTES, f"{remedy}: weights.bucket_bytes")
    else:
        remedy = "a tmpfs: weights travel to engines of a node through it"
        yield Finding("/dev/shm", "doubtful", "not there", remedy)
    yield from _limits()
    remedy = "megagrpo plan RECIPE says what its checkpoints take; checkpoint.directory moves them"
    yield _space(f"disk at {Path.cwd()}", Path.cwd(), DISK_BYTES, remedy)
    yield _hostname()
    yield from _interfaces()
    slurm, address = shutil.which("sbatch") and "Slurm's sbatch", os.environ.get("RAY_ADDRESS")
    ray = f"RAY_ADDRESS {address}" if address else "no RAY_ADDRESS: runs start Ray on this machine"
    yield Finding("jobs", "ok", ", ".join(filter(None, (slurm, ray))))
    yield sandbox_finding(*search("auto"))


def _space(part: str, directory: Path, wanted_bytes: int, remedy: str) -> Finding:
    free = shutil.disk_usage(directory).free
    return judged(part, free >= wanted_bytes, f"{byte_text(free)} free", remedy)


def _limits() -> Iterator[Finding]:
    """Reports the limits on open files and locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    raised = "" if hard == resource.RLIM_INFINITY or hard >= OPEN_FILES else f" (its hard limit is {hard})"
    remedy = f"ulimit -n {OPEN_FILES}{raised} before Ray starts: large clusters need it"
    described = "no limit" if unlimited else f"at most {soft}"
    yield judged("open files", unlimited or soft >= OPEN_FILES, described, remedy)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited, needed = soft == resource.RLIM_INFINITY, bool(_infiniband())
    described = "no limit" if unlimited else f"at most {byte_text(soft)}"
    if not unlimited and not needed:
        described += "; only InfiniBand and pinned memory need more"
    yield judged("locked memory", unlimited or not needed, described, "ulimit -l unlimited: InfiniBand needs it")


def _hostname() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        remedy = "an entry in /etc/hosts or DNS: other nodes ask for this name"
        return Finding(f"host name {name}", "doubtful", f"has no address: {error}", remedy)
    loopback = ipaddress.ip_address(address).is_loopback
    remedy = "an address that other nodes reach, or ray start --node-ip-address; enough for one machine"
    return judged(f"host name {name}", not loopback, f"is {address}" if loopback else address, remedy)


def _interfaces() -> Iterator[Finding]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    addresses = [
        f"{name} {entry.address}"
        for name, entries in sorted(psutil.net_if_addrs().items())
        for entry in entries
        if name in up and entry.family is socket.AF_INET and not ipaddress.ip_address(entry.address).is_loopback
    ]
    text = ", ".join([*addresses, *(f"InfiniBand {name}" for name in _infiniband())])
    remedy = "an interface that other nodes reach, for several nodes"
    yield judged("network", bool(text), text or "loopback only", remedy)
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        chosen = os.environ.get(variable, "")
        if chosen.startswith("^"):  # NCCL's way to say which not to use
            continue
        if chosen and not any(name.startswith(one) for name in up for one in chosen.lstrip("=").split(",")):
            given = f"{chosen}, which is no interface that is up"
            yield Finding(variable, "wrong", given, f"unset it, or one of {', '.join(sorted(up))}")


def _infiniband() -> list[str]:
    return sorted(entry.name for entry in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []


def sandbox_finding(kind: Kind | None, refused: Sequence[str]) -> Finding:
    """Reports the sandbox in which the reward `code` runs programs."""
    remedy = "apt-get install bubblewrap libseccomp2, where namespaces may be made; for the reward code"
    whole, described = kind is not None and kind.isolation == "bubblewrap", "; ".join(refused)
    if kind is not None:
        described = str(kind) if whole else f"a seccomp filter only, without files ({described})"
    return judged("sandbox", whole, described, remedy)


# --- the packages that setup.py asks for ------------------------------------------------------------------------------


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
            present = version_of(requirement.name)
            marker = requirement.marker
            applies = marker is None or marker.evaluate({"extra": ""}) or requirement.name == IN_EXTRAS.get(name)
            if applies and present is not None and not requirement.specifier.contains(present, prereleases=True):
                wrong.append(f"{requirement.name}{requirement.specifier}, and {present} is here")
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
        problems = sglang_problems(SglangConfig())
        wrong = [Finding("SGLang", "wrong", problem.given, problem.fix or problem.needed) for problem in problems]
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
    required = f"{requirement.name}{requirement.specifier}"
    if version is None and extra is not None:
        return Finding(requirement.name, "absent", "not installed", WITHOUT[extra])
    older = requirement.marker is not None and not requirement.marker.evaluate({"extra": extra or ""})
    command = f"pip install {'--no-deps --ignore-requires-python ' if older else ''}'{required}'"
    if version is None:
        return Finding(requirement.name, "wrong", "not installed", command)
    fits = requirement.specifier.contains(version, prereleases=True)
    return judged(requirement.name, fits, version if fits else f"{version}, and {required} is needed", command, "wrong")


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


# --- the GPUs ---------------------------------------------------------------------------------------------------------

BFLOAT16_SINCE = (8, 0)
"""Compute capability of the first GPUs that multiply matrices in bfloat16: Ampere."""


def gpu_findings() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None:
        remedy = "training and rollouts on GPUs: install torch's CUDA build; cluster.device: cpu does without"
        yield Finding("GPUs", "absent", f"torch {torch.__version__} is built without CUDA", remedy)
        return
    count = torch.cuda.device_count()
    if count == 0:
        remedy = "check nvidia-smi, CUDA_VISIBLE_DEVICES, and that the driver is new enough for this CUDA"
        yield Finding("GPUs", "doubtful", f"torch is built for CUDA {torch.version.cuda} and finds none", remedy)
        return
    for index in range(count):
        card = torch.cuda.get_device_properties(index)
        capability = (card.major, card.minor)
        text = f"{card.name}, {card.total_memory / 2**30:.1f} GiB, compute capability {card.major}.{card.minor}"
        remedy = "set model.dtype: float32, because it has no bfloat16"
        yield judged(f"GPU {index}", capability >= BFLOAT16_SINCE, text, remedy)
    for capability in sorted({torch.cuda.get_device_capability(index) for index in range(count)}):
        yield layers_finding(capability, installed())
    yield Finding("CUDA", "ok", f"{torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which(str(Path(home, "bin", "nvcc")))
    remedy = "the CUDA toolkit of torch's version, with CUDA_HOME: some of SGLang's kernels are compiled"
    yield judged("CUDA compiler", nvcc is not None, nvcc or "no nvcc", remedy)
    missing = missing_to_compile()
    remedy = f"{'; '.join(missing)}; for train.recompute of {', '.join(sorted(COMPILED))}"
    able = f"torch {'cannot' if missing else 'can'} compile a function in C++"
    yield judged("C++ compiler", not missing, able, remedy)
    apart = [f"{a} and {b}" for a, b in permutations(range(count), 2) if not torch.cuda.can_device_access_peer(a, b)]
    if count > 1:
        remedy = "weights.transfer: process_group; and expect slow tensor parallelism"
        reach = f"none between GPUs {', '.join(apart[:4])}" if apart else f"between all {count} GPUs"
        yield judged("peer access", not apart, reach, remedy)


def layers_finding(card: Capability, here: Installed) -> Finding:
    """Reports the layers that train.layer_spec: auto takes for heads of 128 elements, as most models have."""
    layers = layers_on(card, here, Attention(key_dim=128, value_dim=128, half=True))
    part, text = f"layers on sm{card[0]}{card[1]}", f"{layers.spec}, attention by {layers.kernel}"
    return judged(part, layers.spec != "local" or not here.transformer_engine, text, layers.why)


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
