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

from megagrpo.doctor.packages import (
    Finding,
    fit_findings,
    judged,
    missing_to_compile,
    package_findings,
    working_findings,
)
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
    described = (
        f"{platform.python_version()}, {os.cpu_count()} cores, {byte_text(psutil.virtual_memory().total)} memory"
    )
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
