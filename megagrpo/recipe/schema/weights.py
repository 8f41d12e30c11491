"""weights: how new weights travel to the engines."""

from __future__ import annotations

from typing import Literal

from megagrpo.section import PositiveFloat, PositiveInt, Section


class WeightsConfig(Section):
    """How new weights travel from the training ranks to the engines after every step."""

    transfer: Literal["auto", "shared_memory", "process_group", "disk"] = "auto"
    """How the bytes travel. shared_memory: exact shards within one node (CUDA IPC on GPUs). process_group: exact shards
    between any nodes (gloo; NCCL on GPUs). disk: safetensors files in `directory`. auto: disk for external engines,
    shared_memory if everything is on one node, otherwise process_group."""

    bucket_bytes: PositiveInt = 256 * 1024 * 1024
    """Largest bucket. Two buckets at once are on the way between a training rank and an engine."""

    directory: str | None = None
    """For transfer: disk. A directory that training ranks and engines both reach; the default is weights/ in the run's
    directory."""

    pause: Literal["retract", "in_place"] = "retract"
    """What an engine does with requests that still run when an update begins: retract computes their keys and values
    again with the new weights, in_place goes on with those of the old weights."""

    timeout_seconds: PositiveFloat = 600.0
    """Longest wait for one sync, and of any process in it."""

    attempts: PositiveInt = 2
    """How often an engine may be restarted and brought up to date in one sync before the run stops."""

    def transfer_to(self, *, external: bool) -> str:
        """`transfer`; where it is auto, files for engines that are external servers."""
        return "disk" if external and self.transfer == "auto" else self.transfer
