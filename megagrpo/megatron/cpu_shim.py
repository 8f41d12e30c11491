"""Lets megatron-core 0.19 run without CUDA (on CPUs, over gloo), without transformer-engine, and with Python 3.11.

`enable()` must run before anything else imports megatron.core; the package's __init__ calls it. It changes nothing
where torch sees CUDA and transformer-engine is installed, on Python 3.12: a rank that runs on the CPU of a machine with
GPUs needs CUDA_VISIBLE_DEVICES="" before it imports torch. Every patch stands beside its reason. CPU runs cannot show
what the patches replace: CUDA streams, the CUDA generator, NCCL.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")


def enable() -> None:
    """Patches torch, then megatron.core, if torch sees no CUDA device. Call it once."""
    without_cuda = not torch.cuda.is_available()
    if without_cuda:
        # Megatron's jit_fuser is torch.compile: minutes of C++ compilation without a gain.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        _patch_torch()
    if sys.version_info < (3, 12):
        # emerging_optimizers (Muon), which megatron.core.optimizer imports where it is installed, takes it from typing.
        typing.override = typing_extensions.override  # type: ignore[attr-defined,unused-ignore]
    if find_spec("triton") is None:
        # Megatron imports these kernels of Triton unasked. A recipe cannot choose them (moe_paged_stash).
        kernels: Any = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.GLOBAL_BLOCK_SIZE, kernels.paged_stash_copy_kernel, kernels.paged_stash_pop_kernel = 1024, None, None
        sys.modules[kernels.__name__] = kernels
    load_from_bytes = torch.storage._load_from_bytes
    with warnings.catch_warnings(), _absent("wandb", "torch.utils.tensorboard"):
        # Warned about many times at import: Apex has kernels for CUDA only.
        warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    # Tensors are pickled with this function's name. Megatron's own, in its place, is refused by SGLang's servers.
    torch.storage._load_from_bytes = load_from_bytes  # type: ignore[assignment]
    # Every model says that GPTModel gets no new features any more, and every wrapper that it computes its own layout.
    for name in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)
    _patch_random(without_cuda)
    if without_cuda:
        _patch_expert_dispatch()


@contextlib.contextmanager
def _absent(*modules: str) -> Iterator[None]:
    """Skips the import of trackers that Megatron's timers never use: it takes seconds of every rank's start."""
    missing = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(missing))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


# --- torch ------------------------------------------------------------------------------------------------------------


def _patch_torch() -> None:
    cuda: Any = torch.cuda
    # device=torch.cuda.current_device() is how Megatron places parameters, buffers and what it receives.
    cuda.current_device = lambda: _CPU
    # Pipeline communication, timers and checkpoints synchronize without asking whether there is a device.
    cuda.synchronize = lambda *_: None
    # The expert dispatcher copies split sizes on a side stream; the asynchronous save waits for the current one.
    cuda.Stream = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    # The "CUDA" generator is the CPU's: seeds, the states of tensor-parallel regions, recomputation.
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))

    # `with torch.device("meta")` looks factories up in a set made at its first use: it must be of the originals.
    _device_constructors()
    # Literal device="cuda": token counts in the schedules, found_inf and norms in the optimizer, checkpoint exchange.
    for name in ("tensor", "zeros", "ones", "empty", "empty_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor_class: Any = torch.Tensor
    # Tied embeddings over pipeline stages, expert token counts, and loading a checkpoint move tensors to the device.
    tensor_class.cuda = lambda self, *_, **__: self
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Answers 'torch.cuda.FloatTensor' to Megatron's optimizers, which refuse any other type."""
        answer = original(self, *args, **kwargs)
        asked_for_name = not args and not kwargs
        if asked_for_name and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core.optimizer"):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    tensor_class.type = type_


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # rotary embeddings over context ranks ask for it
        return factory(*args, **kwargs)

    return create


class _Stream:
    """A stream that is never waited for: a CPU runs all operations in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return self  # serves as the event, which is only waited for

    def synchronize(self) -> None: ...


# --- megatron.core ----------------------------------------------------------------------------------------------------


def _patch_random(without_cuda: bool) -> None:
    """Patches the module of random states and of recomputation."""
    from megatron.core.tensor_parallel import random

    if find_spec("transformer_engine") is None:
        # Names that only transformer-engine defines: without it they are an error. CheckpointWithoutOutput (selective
        # recomputation of norms and activations) asks whether fp8 is on.
        off = {"is_fp8_enabled": staticmethod(lambda: False)}
        random.FP8GlobalStateManager = type("FP8GlobalStateManager", (), off)
        random.activation_recompute_forward = random.fp8_autocast = lambda **_: contextlib.nullcontext()
    if without_cuda:
        # These two call torch's CUDA generators by their full names.
        random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

        def copy_storage(to: torch.Tensor, source: torch.Tensor) -> None:
            to.untyped_storage().resize_(source.untyped_storage().nbytes())
            to.untyped_storage().copy_(source.untyped_storage())

        # A module that is recomputed shares its storage by a function in C++, which Megatron compiles. CPUs copy.
        random._get_share_storage = lambda: copy_storage


def _patch_expert_dispatch() -> None:
    """Patches the all-to-all dispatcher: split sizes as numbers, and collectives of unequal parts, which gloo lacks."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    # Megatron converts split sizes to numpy only if they are CUDA tensors.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    equal_gather, equal_reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(
        part: torch.Tensor, group: dist.ProcessGroup, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if group.size() == 1 or output_split_sizes is None:
            return equal_gather(part, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        whole = part.new_empty((sum(sizes), *part.shape[1:]))
        copies = part.contiguous().repeat(group.size(), *[1] * (part.dim() - 1))
        dist.all_to_all_single(whole, copies, sizes, [len(part)] * group.size(), group=group)
        return whole

    def reduce_scatter(
        whole: torch.Tensor, group: dist.ProcessGroup, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if group.size() == 1 or input_split_sizes is None:
            return equal_reduce_scatter(whole, group, input_split_sizes, use_global_buffer)
        total = whole.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].contiguous()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = reduce_scatter
