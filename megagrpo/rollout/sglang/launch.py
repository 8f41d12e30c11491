"""Runs one SGLang server. Started by server.py, with an interpreter that may be of another environment.

    python launch.py < settings         settings: JSON, {"owner": pid, "directory": ..., "arguments": {...}, ...}

The arguments, the API key among them, come on standard input so that `ps` does not show them. On GPUs SGLang spawns its
processes, and each runs this module's top level again: code that every process needs is called there. On CPUs they are
forked from this process, and inherit its state.

Functions below, and listen_on_loopback of ../launching.py, change SGLang 0.5.23, each for a reason of its own;
fork_processes and those of the last section are for CPUs alone. None changes how a model computes.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

DEVICE_VARIABLE = "MEGAGRPO_SGLANG_DEVICE"
MEETING_VARIABLE = "MEGAGRPO_SGLANG_MEETING"
"""The store in which the ranks of a server on several nodes meet: a StoreAddress as JSON. Not set on one node."""
MEETING_SCHEME = "megagrpo"


def on_cpus() -> bool:
    return os.environ.get(DEVICE_VARIABLE) == "cpu"


def prepare_server_process(*, spawned: bool) -> None:
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "find_megagrpo.py"))
    from megagrpo.rollout.launching import listen_on_loopback, prepare_process

    prepare_process(__file__, CHANGES, spawned=spawned)
    if meeting := os.environ.get(MEETING_VARIABLE):
        meet_in_store(meeting)
    else:
        listen_on_loopback()
    if on_cpus():
        fill_gaps_on_cpus()


def meet_in_store(meeting: str) -> None:
    """Makes the ranks of a server on several nodes find each other in a store behind a gate. It replaces one of torch's
    that lets every machine in. gloo and NCCL use the interface that this process was started with."""
    import torch.distributed

    from megagrpo.processes.store import StoreAddress

    def join(url: str, timeout: timedelta, **options: Any) -> Iterator[tuple[Any, int, int]]:
        store = StoreAddress(**json.loads(meeting)).connect(timeout.total_seconds())
        query = dict(parse_qsl(urlsplit(url).query))
        yield store, int(query["rank"]), int(query["world_size"])

    torch.distributed.register_rendezvous_handler(MEETING_SCHEME, join)


def fork_processes() -> None:
    """Forks this process where SGLang would spawn one, which imports SGLang for ten seconds. For CPUs only: CUDA does
    not survive a fork."""
    multiprocessing.set_start_method("fork")
    vars(multiprocessing)["set_start_method"] = lambda *arguments, **options: None  # SGLang asks for "spawn"
    from megagrpo.processes.lifetime import end_with_parent

    os.register_at_fork(after_in_child=end_with_parent)


def rest_while_paused(module: Any) -> None:
    """Lets a paused scheduler sleep, as an idle one does: training ranks need its core to send weights."""
    scheduler_class = module.Scheduler
    record = scheduler_class._record_scheduler_state_for_paused_engine

    def record_and_rest(scheduler: Any) -> None:
        record(scheduler)
        scheduler.maybe_sleep_on_idle()

    scheduler_class._record_scheduler_state_for_paused_engine = record_and_rest


def tell_versions(output_streamer: Any) -> None:
    """Adds the weight version of each token to all parts of a stream: SGLang tells them in the last one only."""
    output = output_streamer._GenerationStreamAccumulator
    accept = output.accept

    def accept_and_tell(self: Any, *, req: Any) -> None:
        accept(self, req=req)
        if req.stream and self.output_reqs and self.output_reqs[-1] is req and self.weight_versions[-1] is None:
            self.weight_versions[-1] = output_streamer.compute_weight_version_spans(
                req.weight_version_events,
                current_version=self.current_weight_version,
                num_output_tokens=len(req.output_ids_through_stop),
            )

    output.accept = accept_and_tell


def keep_loads_with_sockets(load_snapshot: Any) -> None:
    """Moves the file with a server's load from /dev/shm into the server's own directory, which goes however it ends."""
    path_for = load_snapshot.shm_path_for
    load_snapshot.shm_path_for = lambda name: os.path.join(tempfile.gettempdir(), os.path.basename(path_for(name)))


CHANGES: dict[str, Callable[[Any], None]] = {
    "sglang.srt.managers.scheduler": rest_while_paused,
    "sglang.srt.managers.scheduler_components.output_streamer": tell_versions,
    "sglang.srt.managers.load_snapshot": keep_loads_with_sockets,
}
"""Changes of modules, on every machine."""


def main() -> None:
    from megagrpo.rollout.launching import end_with_owner

    settings = json.load(sys.stdin)
    end_with_owner(settings["owner"], settings["directory"], settings["shared_memory"])

    import sglang
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    skip_other_models(Path(settings["arguments"]["model_path"]), Path(sglang.__path__[0], "srt", "models"))
    if on_cpus():
        fork_processes()
        exchange_between_groups()
    gc.enable()
    run_server(ServerArgs(**settings["arguments"]))


def skip_other_models(directory: Path, models: Path) -> None:
    """Lets SGLang import the module of this model, and not those of 200 others: about a second of a core."""
    architectures = json.loads((directory / "config.json").read_text(encoding="utf-8"))["architectures"]
    defines = re.compile(rf"^class ({'|'.join(map(re.escape, architectures))})\b", re.MULTILINE)
    texts = {file.stem: file.read_text(encoding="utf-8") for file in models.glob("*.py")}
    used = [name for name, text in texts.items() if defines.search(text)]
    if used and not any("ModelRegistry" in texts[name] for name in used):  # such a model has another one inside
        others = [name for name in texts if name not in used and not name.startswith("transformers")]
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))


# --- what SGLang lacks on CPUs ----------------------------------------------------------------------------------------


def fill_gaps_on_cpus() -> None:
    """Fills SGLang's gaps on CPUs. Every process of the server calls it before SGLang is imported."""
    # SGLang takes its rotary embedding from vllm where it knows no platform, and then computes it natively. Its package
    # is left out, so that vllm still counts as not installed.
    _stand_in("vllm._custom_ops", "rotary_embedding")
    if importlib.util.find_spec("torchvision") is None:
        _import_without_torchvision()
    os.environ["SGLANG_NCCL_SO_PATH"] = "none on CPUs"  # torch for CUDA brings NCCL, which SGLang would then open
    _sample_by_seed()
    CHANGES["sglang.srt.mem_cache.pool_host.common"] = keep_unpinned


def _import_without_torchvision() -> None:
    """Imports SGLang's image configurations without torchvision, which does not load beside a CPU build of torch."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # transformers remembers the answer, no, and never meets the stand-ins
    package = _stand_in("torchvision")
    transforms = _stand_in("torchvision.transforms", "InterpolationMode")
    functional = _stand_in("torchvision.transforms.functional", "InterpolationMode")
    package.__dict__["transforms"], transforms.__dict__["functional"] = transforms, functional
    importlib.import_module("sglang.srt.configs")

    del sys.modules["torchvision"]


def _stand_in(name: str, *members: str) -> ModuleType:
    """Registers and returns a module whose members cannot be used."""
    module = ModuleType(name)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError(f"{name} is not installed: this server runs on CPUs, without images")

    module.__dict__.update(dict.fromkeys(members, refuse))
    return sys.modules.setdefault(name, module)


def _sample_by_seed() -> None:
    """Lets `enable_deterministic_inference` run with torch's own attention, for the sake of its seeds. The hash is in
    numpy: SGLang's is a kernel for GPUs."""
    import sglang.kernels.ops.sampling.murmur_hash as sampling_hash
    import sglang.srt.arg_groups.choices as choices
    import sglang.srt.batch_invariant_ops as batch_invariant_ops

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda *arguments, **options: None  # Triton kernels
    sampling_hash.murmur_hash32 = murmur_hash32


def keep_unpinned(pools: Any) -> None:
    """Lets SGLang keep the routes of tokens (return_routed_experts) in memory that is not registered with CUDA."""
    import torch

    def allocate(dims: Sequence[int], dtype: torch.dtype, device: str, **pinned: Any) -> torch.Tensor:
        return torch.zeros(tuple(dims), dtype=dtype, device=device)

    pools.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def exchange_between_groups() -> None:
    """Lets groups of attention data parallelism run without pinned memory, Triton and SGLang's operators."""
    import sglang.srt.layers.dp_attention as dp_attention
    import sglang.srt.model_executor.forward_batch_info as forward_batch_info
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    forward_batch_info._is_cpu = True
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda backend: 1  # of a request that is padding


def murmur_hash32(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Computes MurmurHash3 x86_32 (Appleby) of (64-bit seed, position, column): uint32 [seeds, columns].

    The same function as SGLang's GPU kernel of this name. It runs for every token that is sampled: row by row, so that
    a row stays in the core's cache, and in numpy, whose uint32 wraps.
    """
    import numpy as np
    import torch

    seed = seeds.view(torch.int64).numpy()
    state = np.zeros((len(seed), 1), np.uint32)
    for word in (seed, seed >> 32, positions.numpy()):
        state = _stir(state, _scramble(word.astype(np.uint32)[:, None]))
    column = _scramble(columns.numpy().astype(np.uint32))
    hashed = np.empty((len(seed), len(column)), np.uint32)
    for row, begun in zip(hashed, state, strict=True):
        mixed = _stir(begun, column) ^ 16  # the length in bytes
        mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
        mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
        row[:] = mixed ^ (mixed >> 16)
    return torch.from_numpy(hashed)


def _scramble(word: NDArray[Any]) -> NDArray[Any]:
    return _rotate(word * 0xCC9E2D51, 15) * 0x1B873593


def _stir(state: NDArray[Any], word: NDArray[Any]) -> NDArray[Any]:
    return _rotate(state ^ word, 13) * 5 + 0xE6546B64


def _rotate(word: NDArray[Any], left: int) -> NDArray[Any]:
    return (word << left) | (word >> (32 - left))


if __name__ == "__main__":
    gc.disable()  # as in megagrpo/processes/__init__.py, until SGLang is imported
if __name__ in ("__main__", "__mp_main__"):
    prepare_server_process(spawned=__name__ == "__mp_main__")
if __name__ == "__main__":
    main()
