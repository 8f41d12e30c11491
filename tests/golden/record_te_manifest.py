"""Records te_manifest.json: names and shards of the parameters of Megatron's transformer-engine layer spec.

    python tests/golden/record_te_manifest.py

Building transformer-engine needs a GPU, so tests/te_stub stands in for it. All else is megatron-core's own code in a
model as megagrpo builds it: which module is used where, prefixes, sizes per rank, and the sharding, read from
sharded_state_dict(). Ranks are recorded one after another over torch's fake process group.

The file's own cases are recorded again. A new one is a name, a kind and an architecture of tests/weights_oracle.py, and
a layout.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

TARGET = Path(__file__).with_name("te_manifest.json")


def record(case: dict[str, Any]) -> list[dict[str, Any]]:
    """For each rank of a case, its weights by name in the manifest."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megagrpo.layout.parallel import ParallelLayout
    from megagrpo.megatron.config import transformer_config
    from megagrpo.megatron.model import build_chunks
    from megagrpo.recipe.schema import LayoutConfig, TrainConfig
    from tests.weights_oracle import ARCHITECTURES

    arch = ARCHITECTURES[case["kind"]](**case["architecture"])
    layout = ParallelLayout(**case["layout"])
    train = TrainConfig(layout=LayoutConfig(**vars(layout)), layer_spec="transformer_engine")
    ranks = []
    for rank in range(layout.ranks):
        dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)
        (model,) = build_chunks(arch, transformer_config(arch, train, torch.float32, "cuda"), layout)
        ranks.append(record_rank(model))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return ranks


def record_rank(model: Any) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from megagrpo.megatron.model import named_tensors

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = model.sharded_state_dict(metadata={"dp_cp_group": group})
    held = {}
    for name, tensor in named_tensors([model]).items():
        found = sharded[name.removeprefix("chunk0.")]
        parts = found.build() if isinstance(found, ShardedTensorFactory) else found
        tensors = [part for part in (parts if isinstance(parts, list) else [parts]) if isinstance(part, ShardedTensor)]
        before = tensors[0].prepend_axis_num
        # Layers that differ are not stacked: their keys have their number.
        in_key = [int(number) for number in re.findall(r"layers\.(\d+)\.", tensors[0].key)]
        held[name] = {
            "shape": list(tensor.shape),
            # where it lies in the same parameter of an unsharded model: [start, shape]
            "parts": [[list(part.global_offset[before:]), list(part.local_shape)] for part in tensors],
            # its layer, then its expert: indices on the axes that Megatron puts in front
            "index": in_key + list(tensors[0].global_offset[:before]),
        }
    return held


def one_parameter_per_line(content: dict[str, Any]) -> str:
    text = json.dumps(content)
    for begin in ('{"name"', '{"chunk0'):
        text = text.replace(begin, "\n" + begin)
    return text.replace(' "chunk0', '\n"chunk0') + "\n"


def main() -> None:
    repository = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(repository / "tests" / "te_stub"), str(repository)]
    import transformer_engine

    import megagrpo.megatron  # noqa: F401  (its shim must run before Megatron's modules)

    content = json.loads(TARGET.read_text())
    content["megatron_core"] = metadata.version("megatron-core")
    content["transformer_engine"] = f"{transformer_engine.__version__} (tests/te_stub)"
    content["cases"] = [case | {"ranks": record(case)} for case in content["cases"]]
    TARGET.write_text(one_parameter_per_line(content))


if __name__ == "__main__":
    main()
