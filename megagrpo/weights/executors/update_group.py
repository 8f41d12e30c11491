"""The process group of one training rank and one engine that SGLang's /init_weights_update_group joins, made without
SGLang at our end.

A torch transport cannot call a broadcast off: whoever waits in one waits until its partner comes, dies, or the group's
timeout, which SGLang leaves at half an hour. So each engine has a group of its own, and a server is asked to take part
in a broadcast only when everybody else already does: then the fault of one engine leaves the others' servers usable.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from megagrpo.errors import Problem
from megagrpo.weights.executors.meeting import Meeting, Member
from megagrpo.weights.executors.torch_groups import Connecting, transport_errors


class UpdateGroup:
    """Our end, rank 0, of the group called `name` with the `ranks` tensor ranks of one engine.

    Constructed at once; `wait_until_joined` before use. The servers meet us in the meeting's store.
    """

    def __init__(self, name: str, engine: str, ranks: int, meeting: Meeting, device: torch.device) -> None:
        self.name, self._engine, self._meeting = name, engine, meeting
        self._group: Any = None
        self._work: Any = None
        self._label = ""
        # As sglang.srt.utils.init_custom_process_group makes it on the servers: under the prefixes that it and torch's
        # _new_process_group_helper give (torch 2.13).
        prefixes = [name, f"{name}/", "cuda/" if device.type == "cuda" else "cpu/"]
        self._connecting = Connecting(f"{engine}: update group", meeting, prefixes, 0, 1 + ranks, device)

    def wait_until_joined(self, member: Member) -> None:
        """Raises WeightSyncError if the engine's server does not come."""
        timeout = self._meeting.timeout_seconds
        missing = Problem(f"{self._engine}: update group", f"its server did not join within {timeout:g} s")
        if self._group is None:
            self._group = self._connecting.wait(member, lambda: missing)

    def broadcast(self, flat: torch.Tensor, label: str) -> None:
        """Begins to send the tensor to every rank of the engine, after whatever is under way has been `finish`ed."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._label = f"broadcast to {self._engine}: {label}"
        with transport_errors(self._label):
            self._work = self._group.broadcast([flat], options)

    def finish(self, member: Member) -> None:
        """Waits until what was begun is there. Raises WeightSyncError naming the engine and the bucket."""
        if self._work is None:
            return
        overdue = Problem(
            self._label,
            f"not taken within {self._meeting.timeout_seconds:g} s",
            fix="look for what stopped that engine's server",
        )
        member.wait(lambda: self._work.is_completed() or None, lambda: overdue)
        with transport_errors(self._label):
            self._work.wait()
        self._work = None

    def leave(self) -> None:
        """Lets go of the group, without waiting for what may still be under way in it."""
        if self._work is not None:
            # Its end would have to wait: torch joins the broadcast's thread.
            threading.Thread(target=_outlast, args=(self._group, self._work), daemon=True).start()
        self._group = self._work = None

    @property
    def usable(self) -> bool:
        """Whether nothing is under way in it, and nothing has failed."""
        return self._group is not None and self._work is None


def _outlast(group: Any, work: Any) -> None:
    """Holds the group until its last broadcast is over, or past its timeout."""
    with suppress(RuntimeError):
        work.wait()
