"""The process group that SGLang's servers join by /init_weights_update_group, made without SGLang at our end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megagrpo.errors import Problem, WeightSyncError
from megagrpo.weights.executors.meeting import Meeting, Member, Sync


def group_name(meeting: Meeting, sync: Sync) -> str:
    return f"megagrpo-{meeting.run}-{sync.generation}"


def connect(sync: Sync, member: Member, device: torch.device) -> Any:
    """Rank 0 of the group that sglang.srt.utils.init_custom_process_group makes on the servers: they meet in our store,
    under the prefixes that it and torch's _new_process_group_helper give (torch 2.13)."""
    name = group_name(member.meeting, sync)
    kind = "cuda" if device.type == "cuda" else "cpu"
    store = dist.PrefixStore(f"{kind}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, member.store)))
    ranks, timeout = 1 + len(sync.destinations), timedelta(seconds=member.meeting.timeout_seconds)
    if kind == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, 0, ranks, options)
    return dist.ProcessGroupGloo(store, 0, ranks, timeout)


class Broadcast:
    """One under way, of a bucket with this label, from us to everybody else in the group."""

    def __init__(self, group: Any, flat: torch.Tensor, label: str) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._label = f"broadcast of {label}"
        with naming_group(self._label):
            self._work = group.broadcast([flat], options)

    def finish(self, member: Member) -> None:
        overdue = Problem(
            self._label,
            f"not taken by every engine within {member.meeting.timeout_seconds:g} s",
            fix="look for the engine whose server stopped",
        )
        member.wait(lambda: True if self._work.is_completed() else None, lambda: overdue)
        with naming_group(self._label):
            self._work.wait()


@contextmanager
def naming_group(where: str) -> Iterator[None]:
    """torch's transports raise RuntimeError for a peer that died and for a timeout."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise WeightSyncError(Problem(where, reason, "every engine's server alive and connected")) from error
