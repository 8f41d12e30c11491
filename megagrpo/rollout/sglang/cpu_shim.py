"""What SGLang 0.5 lacks on a machine without GPUs and without its own CPU kernels, replaced in plain PyTorch.

Two modules that it imports there and never uses; sampling by seed, which it has for GPU attention only and which needs
a hash; and rest while it is paused. Nothing here changes how a model computes.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch

BITS = 0xFFFFFFFF


def install() -> None:
    """To be called in every process of the server, before SGLang is imported."""
    # SGLang takes its rotary embedding from vllm where it knows no platform, and then computes it natively. Its package
    # is left out, so that vllm still counts as not installed.
    _stand_in("vllm._custom_ops", "rotary_embedding")
    if importlib.util.find_spec("torchvision") is None:
        _import_without_torchvision()
    _sample_by_seed()


def _import_without_torchvision() -> None:
    """SGLang's configurations of image models import torchvision, which does not load beside a CPU build of torch."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # transformers remembers the answer, no, and never meets the stand-ins
    package = _stand_in("torchvision")
    transforms = _stand_in("torchvision.transforms", "InterpolationMode")
    functional = _stand_in("torchvision.transforms.functional", "InterpolationMode")
    package.__dict__["transforms"], transforms.__dict__["functional"] = transforms, functional
    importlib.import_module("sglang.srt.configs")

    del sys.modules["torchvision"]


def _stand_in(name: str, *members: str) -> ModuleType:
    """A module whose members cannot be used."""
    module = ModuleType(name)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError(f"{name} is not installed: this server runs on CPUs, without images")

    module.__dict__.update(dict.fromkeys(members, refuse))
    return sys.modules.setdefault(name, module)


def _sample_by_seed() -> None:
    """Lets `enable_deterministic_inference` run with torch's own attention, for the sake of its seeds."""
    import sglang.kernels.ops.sampling.murmur_hash as sampling_hash
    import sglang.srt.arg_groups.choices as choices
    import sglang.srt.batch_invariant_ops as batch_invariant_ops

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda *arguments, **options: None  # Triton kernels
    sampling_hash.murmur_hash32 = murmur_hash32


def rest_while_paused() -> None:
    """Lets a paused scheduler sleep until it is asked for something, as an idle one does: it would take a core, which
    training ranks need to send weights. To be called once the scheduler may be imported."""
    from sglang.srt.managers.scheduler import Scheduler

    record = Scheduler._record_scheduler_state_for_paused_engine

    def record_and_rest(scheduler: Any) -> None:
        record(scheduler)
        scheduler.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_and_rest


def murmur_hash32(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 x86_32 (Appleby) of (64-bit seed, position, column): int64 [seeds, columns], values below 2**32.

    The same function as SGLang's GPU kernel of this name, in integer arithmetic that does not overflow int64.
    """
    seed = seeds.view(torch.int64).view(-1, 1)
    words = (
        seed & BITS,
        (seed >> 32) & BITS,
        positions.to(torch.int64).view(-1, 1) & BITS,
        columns.to(torch.int64).view(1, -1) & BITS,
    )
    state = torch.zeros_like(seed)
    for word in words:
        mixed = _multiply(_rotate(_multiply(word, 0xCC9E2D51), 15), 0x1B873593)
        state = (_multiply(_rotate(state ^ mixed, 13), 5) + 0xE6546B64) & BITS
    state = state ^ 16  # the length in bytes
    state = _multiply(state ^ (state >> 16), 0x85EBCA6B)
    state = _multiply(state ^ (state >> 13), 0xC2B2AE35)
    return state ^ (state >> 16)


def _rotate(word: torch.Tensor, left: int) -> torch.Tensor:
    return ((word << left) | (word >> (32 - left))) & BITS


def _multiply(word: torch.Tensor, factor: int) -> torch.Tensor:
    """word × factor mod 2**32, in two halves."""
    low, high = word & 0xFFFF, word >> 16
    return (low * factor + (((high * factor) & 0xFFFF) << 16)) & BITS
