"""Records te_manifest.json: names and shards of the parameters of Megatron's transformer-engine layer spec.

    python tests/golden/record_te_manifest.py

Building transformer-engine needs a GPU, so classes that only allocate parameters stand in for its modules, with the
names and shapes of transformer_engine.pytorch 2.8 (weight, bias, layer_norm_weight, weight{i}). All else is
megatron-core's own code in a model as megagrpo builds it: which module is used where, prefixes, sizes per rank, and the
sharding, read from sharded_state_dict(). Ranks are recorded one after another over torch's fake process group.

The file's own cases are recorded again. A new one is a name, a kind and an architecture of tests/weights_oracle.py, and
a layout.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

TE_VERSION = "2.8.0"
TARGET = Path(__file__).with_name("te_manifest.json")


class Linear(torch.nn.Module):
    """transformer_engine.pytorch.Linear: weight [out, in], divided by tp_size as parallel_mode says; bias [out]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        bias: bool = True,
        **_: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.parallel_mode, self.use_bias = parallel_mode, bias
        if parallel_mode == "column":
            self.out_features //= tp_size
        elif parallel_mode == "row":
            self.in_features //= tp_size
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(self.out_features))


class LayerNormLinear(Linear):
    """transformer_engine.pytorch.LayerNormLinear: a Linear and the weight of the norm before it."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(in_features))


class GroupedLinear(torch.nn.Module):
    """transformer_engine.pytorch.GroupedLinear: weight0, weight1, … each [out, in], and its extra state."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, False
        self.fp8_meta, self.fp8, self.fp8_calibration = {"fp8_checkpoint": False}, False, False
        shape = (
            out_features // (tp_size if parallel_mode == "column" else 1),
            in_features // (tp_size if parallel_mode == "row" else 1),
        )
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", torch.nn.Parameter(torch.empty(shape)))

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0)

    def set_extra_state(self, state: Any) -> None:
        pass


class RMSNorm(torch.nn.Module):
    """transformer_engine.pytorch.RMSNorm: weight [hidden]."""

    def __init__(self, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size))


class DotProductAttention(torch.nn.Module):
    """transformer_engine.pytorch.DotProductAttention has no parameters."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


STAND_INS: dict[str, Any] = {
    "Linear": Linear,
    "LayerNormLinear": LayerNormLinear,
    "GroupedLinear": GroupedLinear,
    "RMSNorm": RMSNorm,
    "DotProductAttention": DotProductAttention,
    "get_cpu_offload_context": lambda *_, **__: (None, None),  # called whether or not activations are offloaded
}


class StandIn(ModuleType):
    """A module of transformer_engine. What Megatron only mentions is an empty class, or another such module."""

    __path__: tuple[str, ...] = ()
    __version__ = TE_VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return STAND_INS.get(name) or (type(name, (), {}) if name[0].isupper() else StandIn(name))


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "transformer_engine" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


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
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.meta_path.insert(0, Finder())
    import megatron.core

    import megagrpo.megatron  # noqa: F401  (its shim must run before Megatron's modules)

    content = json.loads(TARGET.read_text())
    content |= {"megatron_core": megatron.core.__version__, "transformer_engine": f"{TE_VERSION} (stood in for)"}
    content["cases"] = [case | {"ranks": record(case)} for case in content["cases"]]
    TARGET.write_text(one_parameter_per_line(content))


if __name__ == "__main__":
    main()
