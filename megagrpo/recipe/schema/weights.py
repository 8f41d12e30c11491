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
    """Largest size of a bucket. A process sends at most two buckets at once."""

    directory: str | None = None
    """Only for transfer: disk. A directory that all training ranks and engines reach. The default is weights/ in the
    run's directory."""

    pause: Literal["retract", "in_place"] = "retract"
    """What an engine does with requests that still run when an update begins. retract: it computes their keys and
    values again with the new weights. in_place: it goes on with those of the old weights. Under today's schedule no
    request of the run is left then: this is for asynchronous schedules and for servers that are shared with others."""

    timeout_seconds: PositiveFloat = 600.0
    """Longest time of one attempt at a sync, and of any wait in it."""

    attempts: PositiveInt = 2
    """How often an engine may be restarted and brought up to date in one sync before the run stops."""

    def transfer_to(self, *, external: bool) -> str:
        """`transfer`; where it is auto, files for engines that are external servers."""
        return "disk" if external and self.transfer == "auto" else self.transfer
