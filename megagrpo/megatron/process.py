"""One training rank as a process: it joins the others, sets up Megatron's parallel state, is profiled, and leaves.

It needs no environment variables, so it works the same under Ray actors, torchrun and tests.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, random
from torch._C._profiler import _ExperimentalConfig

from megagrpo.errors import Problem, RankError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.processes.store import LOOPBACK, StoreAddress


def start(rank: int, ranks: int, meeting: StoreAddress | str, device: str, timeout_seconds: float) -> None:
    """Joins `ranks` processes through a store, or an `init_method` of torch: file:///path, or env:// under torchrun.

    `device` is cpu (gloo), or cuda (the first visible) or cuda:N (NCCL). `timeout_seconds` is the deadline of this
    call and, until start_parallel, of every collective operation. Raises RankError if the other ranks do not join.
    """
    # Megatron calls collectives by their names of older torch.
    warnings.filterwarnings("ignore", message=".*deprecated. Please use `torch.distributed", category=FutureWarning)
    # Megatron warns about experts with expert_tensor 1 in a model with tensor > 1, for which the setting is right.
    with_experts = "`sequence_parallel` is set to `True`, but tensor model parallel size is 1"
    warnings.filterwarnings("ignore", message=with_experts)
    if device == "cpu":
        # gloo looks up its host name, which may not resolve: a local meeting is on the loopback interface.
        host = urlparse(meeting).hostname if isinstance(meeting, str) else meeting.host
        if host in (None, "localhost", LOOPBACK):
            loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
            if loopback:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    else:
        torch.cuda.set_device(torch.device(device).index or 0)  # it needs an index
    try:
        dist.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            init_method=meeting if isinstance(meeting, str) else None,
            store=None if isinstance(meeting, str) else meeting.connect(timeout_seconds),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout_seconds),
            # No device_id: with it, every later group splits the communicator of all ranks, on all of them.
        )
    except (dist.DistError, OSError, RuntimeError, ValueError) as error:
        given = f"{meeting}: {error}"
        needed = f"all {ranks} ranks within {timeout_seconds:.0f} s"
        raise RankError(Problem(f"training rank {rank} could not join the other {ranks - 1}", given, needed)) from error


def start_parallel(layout: ParallelLayout, seed: int, timeout_seconds: float = 1800.0) -> None:
    """Makes Megatron's process groups for `layout`, in the order of layout.rank_grid, and seeds its generators.

    `timeout_seconds` is the deadline of every collective operation in these groups and, from now on, in the default
    group, where checkpoints are saved and loaded: those may take longer than joining. Raises RankError, naming this
    rank, if the others are later than that.
    """
    if layout.ranks != dist.get_world_size():
        given = f"{dist.get_world_size()} ranks"
        needed = f"{layout.ranks} ranks for {layout}"
        raise RankError(Problem("the layout does not fit the number of training ranks", given, needed))
    _make_groups(layout, timeout_seconds)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds))  # torch has no public name for it
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _make_groups(layout: ParallelLayout, timeout_seconds: float) -> None:
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            order="tp-cp-ep-dp-pp",
            create_gloo_process_groups=False,  # for Megatron's own checkpoints
            distributed_timeout_minutes=timeout_seconds / 60,  # annotated as an integer, used as timedelta(minutes=...)
        )
    except dist.DistError as error:
        where = f"training rank {dist.get_rank()}: other ranks did not answer when it made the groups of the layout"
        needed = f"all {layout.ranks} ranks within {timeout_seconds:g} s"
        raise RankError(Problem(where, str(error), needed, "raise cluster.start_timeout_seconds")) from error


Groups = Mapping[str, Any]
"""Megatron's process groups for a layout, with sizes and ranks: what parallel_state has, by name."""
_FURTHER: dict[ParallelLayout, Groups] = {}
"""Groups that `further_groups` has made: each holds memory of a GPU."""


def further_groups(layout: ParallelLayout, timeout_seconds: float) -> Groups:
    """Makes groups of the same ranks for another layout, for `in_groups`, or returns those that it has made. Raises as
    start_parallel, which is first."""
    if layout in _FURTHER:
        return _FURTHER[layout]
    own = _groups()
    parallel_state.destroy_model_parallel()  # it forgets groups, and ends none
    _make_groups(layout, timeout_seconds)
    _FURTHER[layout] = _groups()
    vars(parallel_state).update(own)
    return _FURTHER[layout]


@contextmanager
def in_groups(groups: Groups) -> Iterator[None]:
    """Puts these groups in the place of Megatron's own inside the block."""
    own = {name: vars(parallel_state)[name] for name in groups}
    vars(parallel_state).update(groups)
    try:
        yield
    finally:
        vars(parallel_state).update(own)


def _groups() -> Groups:
    """Returns what belongs to a layout: Megatron's buffer, which passes of all models can have in turn, does not."""
    names = (name for name in vars(parallel_state) if re.fullmatch(r"_[A-Z_]+", name) and "BUFFER" not in name)
    return {name: getattr(parallel_state, name) for name in names}


def compile_storage_sharing() -> None:
    """Compiles the C++ function by which Megatron recomputes a part of a layer, or loads it once a rank of this node
    has compiled it. Megatron itself does so in the first backward pass. Raises RankError if it cannot be compiled."""
    scripts = str(Path(sys.executable).parent)  # pip's ninja is there
    os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH"), scripts)))
    try:
        random._get_share_storage()
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        needed = "a C++ compiler, ninja, Python's headers and a directory that can be written, on every node"
        fix = "megagrpo doctor names what is missing; TORCH_EXTENSIONS_DIR is the directory; or train.recompute: full"
        where = "train.recompute: a function in C++ that these modules need was not compiled"
        raise RankError(Problem(where, given=str(error), needed=needed, fix=fix)) from error


def stop_parallel() -> None:
    """Forgets all process groups of layouts, if there are any."""
    _FURTHER.clear()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def stop() -> None:
    """Leaves all process groups."""
    stop_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


MEMORY_EVENTS_MAX = 200_000
"""Allocations of a snapshot: the newest. Megatron makes some thousands in a microbatch."""


class Profiler:
    """A recording from construction to `end`: operations of all threads of this process, and CUDA's kernels.
    `end` reports a failure to record; the run continues."""

    def __init__(self, memory: bool) -> None:
        """Starts the profile. memory: records each block of CUDA memory and its allocation; ignored without CUDA."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._memory = memory and torch.cuda.is_available()
        # The ends of a profile are two calls of an actor, which may be in other threads than what runs in between.
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        self._profile = torch.profiler.profile(activities=kinds, experimental_config=every_thread)
        self._problem = ""
        try:
            if self._memory:
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS_MAX)
            self._profile.start()
        except RuntimeError as error:  # of CUPTI, such as under another profiler
            self._problem = str(error)

    def end(self, directory: Path, rank: int) -> str:
        """Writes rank_0.trace.json.gz, and rank_0.memory.pickle if memory was recorded. Returns the failure, or ""."""
        if self._problem:
            return self._problem
        try:
            self._profile.stop()
            directory.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(directory / f"rank_{rank}.trace.json.gz"))
            if self._memory:
                torch.cuda.memory._dump_snapshot(str(directory / f"rank_{rank}.memory.pickle"))
        except (OSError, RuntimeError) as error:
            return str(error)
        finally:
            if self._memory:
                torch.cuda.memory._record_memory_history(enabled=None)
        return ""
