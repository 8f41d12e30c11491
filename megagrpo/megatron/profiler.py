"""Profiles of one training rank: its computations over time, by torch's profiler, and its CUDA memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig

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
