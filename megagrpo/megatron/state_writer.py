"""Write sharded tensors and objects in the format of Megatron's dist_checkpointing, within the training process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)


def write(sharded: Mapping[str, ShardedTensor | ShardedObject], common: Mapping[str, Any], directory: Path) -> None:
    """Write this rank's `sharded` into `directory`, and rank 0's `common`; dist_checkpointing.load reads both.
    Collective.

    Raises torch's CheckpointException on every rank if any of them fails, and if the tensors do not tile their global
    shapes. dist_checkpointing.save is not used: it forks workers and starts a manager process that runs __main__
    again, and when one rank fails, on a full disk for instance, the others wait for ever.
    """
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(dict(sharded))
    torch_checkpoint.save(
        mcore_to_pyt_state_dict(by_key),
        storage_writer=_Writer(directory, common),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )


class _Writer(torch_checkpoint.FileSystemWriter):
    """Adds Megatron's two files where torch writes its own last one: on rank 0, with errors told to all."""

    def __init__(self, directory: Path, common: Mapping[str, Any]) -> None:
        super().__init__(directory, sync_files=True)
        self._directory = directory
        self._common = dict(common)

    def finish(self, metadata: torch_checkpoint.Metadata, results: Any) -> None:
        with (self._directory / COMMON_STATE_FNAME).open("wb") as stream:
            torch.save(self._common, stream)
            stream.flush()
            os.fsync(stream.fileno())
        save_config(CheckpointingConfig("torch_dist", 1), str(self._directory))
        super().finish(metadata, results)
