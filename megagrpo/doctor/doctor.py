"""`megagrpo doctor`: looks at this machine, its packages and its GPUs, and prints what it finds, part by part."""

from __future__ import annotations

import ipaddress
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path

import psutil

from megagrpo.doctor.packages import Finding, fit_findings, missing_to_compile, package_findings, working_findings
from megagrpo.plan.units import byte_text
from megagrpo.recipe.kernels import Attention, Capability, Installed, installed, layers_on
from megagrpo.recipe.schema.train import COMPILED
from megagrpo.reward.sandbox.programs import search
from megagrpo.reward.sandbox.sandbox import Kind

PYTHON = (3, 11)
OPEN_FILES = 65536  # what Ray's own documentation asks for on larger clusters
SHARED_MEMORY_BYTES = 8 << 30  # room for a few buckets of a weight sync, and Ray's objects
DISK_BYTES = 50 << 30
INFINIBAND = Path("/sys/class/infiniband")
SHARED_MEMORY = Path("/dev/shm")


def machine_findings() -> Iterator[Finding]:
    yield _python()
    yield _shared_memory()
    yield _open_files()
    yield _locked_memory()
    remedy = "megagrpo plan RECIPE says what its checkpoints take; checkpoint.directory moves them"
    yield _space(f"disk at {Path.cwd()}", Path.cwd(), DISK_BYTES, remedy)
    yield _hostname()
    yield from _interfaces()
    yield _launchers()
    yield sandbox_finding(*search("auto"))


def _python() -> Finding:
    version, needed = platform.python_version(), ".".join(map(str, PYTHON))
    if sys.version_info < PYTHON:
        return Finding("Python", "wrong", version, f"Python {needed} or later")
    memory = byte_text(psutil.virtual_memory().total)
    return Finding("Python", "ok", f"{version}, {os.cpu_count()} cores, {memory} memory")


def _shared_memory() -> Finding:
    if not SHARED_MEMORY.is_dir():
        return Finding("/dev/shm", "doubtful", "not there", "a tmpfs: weights travel to engines of a node through it")
    remedy = f"at least {byte_text(SHARED_MEMORY_BYTES)} (docker run --shm-size, or remount it), or smaller buckets"
    return _space("/dev/shm", SHARED_MEMORY, SHARED_MEMORY_BYTES, f"{remedy}: weights.bucket_bytes")


def _space(part: str, directory: Path, wanted_bytes: int, remedy: str) -> Finding:
    free = shutil.disk_usage(directory).free
    if free < wanted_bytes:
        return Finding(part, "doubtful", f"{byte_text(free)} free", remedy)
    return Finding(part, "ok", f"{byte_text(free)} free")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        raised = "" if hard == resource.RLIM_INFINITY or hard >= OPEN_FILES else f" (its hard limit is {hard})"
        remedy = f"ulimit -n {OPEN_FILES}{raised} before Ray starts: large clusters need it"
        return Finding("open files", "doubtful", f"at most {soft}", remedy)
    return Finding("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "no limit")
    limit = f"at most {byte_text(soft)}"
    if not _infiniband():
        return Finding("locked memory", "ok", f"{limit}; only InfiniBand and pinned memory need more")
    return Finding("locked memory", "doubtful", limit, "ulimit -l unlimited: InfiniBand needs it")


def _hostname() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        remedy = "an entry in /etc/hosts or DNS: other nodes ask for this name"
        return Finding(f"host name {name}", "doubtful", f"has no address: {error}", remedy)
    if ipaddress.ip_address(address).is_loopback:
        remedy = "an address that other nodes reach, or ray start --node-ip-address; enough for one machine"
        return Finding(f"host name {name}", "doubtful", f"is {address}", remedy)
    return Finding(f"host name {name}", "ok", address)


def _interfaces() -> Iterator[Finding]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    addresses = [
        f"{name} {entry.address}"
        for name, entries in sorted(psutil.net_if_addrs().items())
        for entry in entries
        if name in up and entry.family is socket.AF_INET and not ipaddress.ip_address(entry.address).is_loopback
    ]
    text = ", ".join([*addresses, *(f"InfiniBand {name}" for name in _infiniband())])
    if not text:
        yield Finding("network", "doubtful", "loopback only", "an interface that other nodes reach, for several nodes")
    else:
        yield Finding("network", "ok", text)
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        chosen = os.environ.get(variable, "")
        if chosen.startswith("^"):  # NCCL's way to say which not to use
            continue
        if chosen and not any(name.startswith(one) for name in up for one in chosen.lstrip("=").split(",")):
            given = f"{os.environ[variable]}, which is no interface that is up"
            yield Finding(variable, "wrong", given, f"unset it, or one of {', '.join(sorted(up))}")


def _infiniband() -> list[str]:
    return sorted(entry.name for entry in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []


def _launchers() -> Finding:
    slurm = "Slurm's sbatch" if shutil.which("sbatch") else ""
    address = os.environ.get("RAY_ADDRESS")
    ray = f"RAY_ADDRESS {address}" if address else "no RAY_ADDRESS: runs start Ray on this machine"
    return Finding("jobs", "ok", ", ".join(filter(None, (slurm, ray))))


def sandbox_finding(kind: Kind | None, refused: Sequence[str]) -> Finding:
    """Reports the sandbox in which the reward `code` runs programs."""
    part = "sandbox"
    remedy = "apt-get install bubblewrap libseccomp2, where namespaces may be made; for the reward code"
    if kind is None:
        return Finding(part, "doubtful", "; ".join(refused), remedy)
    if kind.isolation == "bubblewrap":
        return Finding(part, "ok", str(kind))
    return Finding(part, "doubtful", f"a seccomp filter only, without files ({'; '.join(refused)})", remedy)


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
        if capability < BFLOAT16_SINCE:
            yield Finding(f"GPU {index}", "doubtful", text, "set model.dtype: float32, because it has no bfloat16")
        else:
            yield Finding(f"GPU {index}", "ok", text)
    for capability in sorted({torch.cuda.get_device_capability(index) for index in range(count)}):
        yield layers_finding(capability, installed())
    yield Finding("CUDA", "ok", f"{torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    yield _compiler()
    if missing := missing_to_compile():
        remedy = f"{'; '.join(missing)}; for train.recompute of {', '.join(sorted(COMPILED))}"
        yield Finding("C++ compiler", "doubtful", "torch cannot compile a function in C++", remedy)
    else:
        yield Finding("C++ compiler", "ok", "torch can compile a function in C++")
    apart = [f"{a} and {b}" for a, b in permutations(range(count), 2) if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        remedy = "weights.transfer: process_group; and expect slow tensor parallelism"
        yield Finding("peer access", "doubtful", f"none between GPUs {', '.join(apart[:4])}", remedy)
    elif count > 1:
        yield Finding("peer access", "ok", f"between all {count} GPUs")


def layers_finding(card: Capability, here: Installed) -> Finding:
    """Reports the layers that train.layer_spec: auto takes for heads of 128 elements, as most models have."""
    layers = layers_on(card, here, Attention(key_dim=128, value_dim=128, half=True))
    part, text = f"layers on sm{card[0]}{card[1]}", f"{layers.spec}, attention by {layers.kernel}"
    wanting = here.transformer_engine and layers.spec == "local"
    return Finding(part, "doubtful" if wanting else "ok", text, layers.why if wanting else "")


def _compiler() -> Finding:
    """Looks for nvcc: SGLang compiles kernels when it first starts."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if nvcc := shutil.which("nvcc") or shutil.which(str(Path(home, "bin", "nvcc"))):
        return Finding("CUDA compiler", "ok", nvcc)
    remedy = "the CUDA toolkit of torch's version, with CUDA_HOME: some of SGLang's kernels are compiled"
    return Finding("CUDA compiler", "doubtful", "no nvcc", remedy)


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
