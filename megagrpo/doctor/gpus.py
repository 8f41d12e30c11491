"""GPUs, as torch sees them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from megagrpo.doctor.finding import Finding

BFLOAT16_SINCE = (8, 0)
"""Compute capability of the first GPUs with bfloat16 matrix products: Ampere."""


def gpu_findings() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None:
        yield Finding(
            "GPUs",
            "absent",
            f"torch {torch.__version__} is built without CUDA",
            "training and rollouts on GPUs: install torch's CUDA build; recipes run here with cluster.device: cpu",
        )
        return
    count = torch.cuda.device_count()
    if count == 0:
        remedy = "check nvidia-smi, CUDA_VISIBLE_DEVICES, and that the driver is new enough for this CUDA"
        yield Finding("GPUs", "doubtful", f"torch is built for CUDA {torch.version.cuda} and finds none", remedy)
        return
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        capability = (found.major, found.minor)
        text = f"{found.name}, {found.total_memory / 2**30:.1f} GiB, compute capability {found.major}.{found.minor}"
        if capability < BFLOAT16_SINCE:
            yield Finding(f"GPU {index}", "doubtful", text, "model.dtype: float32: it has no bfloat16")
        else:
            yield Finding(f"GPU {index}", "ok", text)
    yield Finding("CUDA", "ok", f"{torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    apart = [f"{a} and {b}" for a, b in permutations(range(count), 2) if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        remedy = "weights.transfer: process_group; and expect slow tensor parallelism"
        yield Finding("peer access", "doubtful", f"none between GPUs {', '.join(apart[:4])}", remedy)
    elif count > 1:
        yield Finding("peer access", "ok", f"between all {count} GPUs")
