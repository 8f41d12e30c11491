"""What the tests of adapters run on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megagrpo.recipe.schema.train import LoraConfig
from tests.distributed.grpo_ranks import Parts


def adapter_boxes(rank: Any, tensors: dict[str, torch.Tensor]) -> Parts:
    from megagrpo.weights.views import box_view

    placements = rank.policy.adapters.manifest.placements
    return [(p.box, box_view(tensors[p.storage], p).detach().clone().numpy()) for p in placements]


def export_adapter(rank: Any, directory: Path, lora: LoraConfig, dtype: str) -> None:
    """What trainer/saving.py does, without Ray."""
    import torch.distributed as dist

    from megagrpo.weights.files.adapters import peft_config
    from megagrpo.weights.files.export import begin_adapter_export, finish_export
    from megagrpo.weights.plan import make_plan

    manifests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(manifests, rank.adapter_manifest())
    adapters, begun = rank.policy.adapters, [None]
    if dist.get_rank() == 0:
        config = peft_config(adapters.matrices, lora.rank, lora.alpha, "base")
        begun = [begin_adapter_export(directory, adapters.checkpoint_tensors, config, dtype)]
    dist.broadcast_object_list(begun)
    rank.write_adapter_export(begun[0], make_plan(manifests, begun[0].files), dist.get_rank())
    dist.barrier()
    if dist.get_rank() == 0:
        finish_export(begun[0])
