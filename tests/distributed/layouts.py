"""The layouts in which the tests of training ranks run.

They are chosen by pairwise covering: every two values of two factors that may occur together do so in one row at least
(tests/unit/test_layouts_table.py), so that a fault that needs two of them shows. The factors: tensor, pipeline,
virtual_pipeline, stages of unequal length, context, expert, expert_tensor and data (1, or more), the distributed
optimizer, the dtype, tied embeddings, and the kind of layers (dense, experts, latent attention with experts).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from megagrpo.layout.parallel import ParallelLayout
from tests.tiny_models import MIXTURES

KINDS = {
    "qwen2_tied": "dense",
    "qwen2": "dense",
    "qwen3": "dense",
    "llama": "dense",
    "mistral": "dense",
    "qwen3_moe": "experts",
    "mixtral": "experts",
    "deepseek_v3": "latent",
}


@dataclass(frozen=True)
class Row:
    """A layout, with the tiny family, the layers, the dtype and the optimizer that complete its pairs."""

    layout: ParallelLayout
    family: str
    dtype: str = "float32"
    distributed_optimizer: bool = False
    layers: int = 4

    @property
    def kind(self) -> str:
        return KINDS[self.family]

    def of(self, family: str) -> ParallelLayout:
        """The layout for a family of any kind: dense ones have no experts to split, other experts go as tensor does, or
        are dealt out if they have biases."""
        if family not in MIXTURES:
            return replace(self.layout, expert=1, expert_tensor=1)
        if family == "gpt_oss":
            return replace(self.layout, expert=max(self.layout.expert, self.layout.tensor), expert_tensor=1)
        return self.layout if self.layout.expert > 1 else replace(self.layout, expert_tensor=self.layout.tensor)

    @property
    def changes(self) -> dict[str, int]:
        """Returns the fields in which its tiny model differs."""
        return {} if self.layers == 4 else {"num_hidden_layers": self.layers}


ROWS = {
    "one rank": Row(ParallelLayout(), "qwen2_tied"),
    # The pairs of tensor, pipeline, virtual pipeline, context, expert and expert_tensor, all above 1.
    "all": Row(
        ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2, context=2, expert=2, expert_tensor=2),
        "qwen3_moe",
        distributed_optimizer=True,
    ),
    # Virtual with unequal stages, data and tied embeddings, and without the distributed optimizer.
    "virtual, unequal": Row(
        ParallelLayout(pipeline=2, virtual_pipeline=2, data=2, first_stage_layers=4), "qwen2_tied", layers=6
    ),
    # Expert with data and the distributed optimizer; experts in one piece with float32.
    "expert, data": Row(ParallelLayout(data=2, expert=2), "qwen3_moe", distributed_optimizer=True),
    # Tensor with tied embeddings, bfloat16 and the distributed optimizer.
    "tensor": Row(ParallelLayout(tensor=2), "qwen2_tied", "bfloat16", True),
    # Unequal stages with context and with expert; latent attention with context.
    "unequal, context, expert": Row(
        ParallelLayout(pipeline=2, context=2, expert=2, first_stage_layers=3), "deepseek_v3", "bfloat16"
    ),
    # Tensor and expert_tensor with data; latent attention with these and float32.
    "tensor, data": Row(ParallelLayout(tensor=2, data=2, expert_tensor=2), "deepseek_v3"),
    # Context with data; both with tied embeddings, float32 and the distributed optimizer.
    "context, data": Row(ParallelLayout(context=2, data=2), "qwen2_tied", distributed_optimizer=True),
    # Virtual with bfloat16, and latent attention with both; context with experts that are not shared out.
    "virtual, context": Row(ParallelLayout(pipeline=2, virtual_pipeline=2, context=2), "deepseek_v3", "bfloat16", True),
    # Unequal stages with tensor and with expert_tensor; experts with unequal stages.
    "tensor, unequal": Row(
        ParallelLayout(tensor=2, pipeline=2, expert_tensor=2, last_stage_layers=1), "qwen3_moe", "bfloat16"
    ),
    # Unequal stages with data and with the distributed optimizer; a dense model whose embeddings are not tied.
    "unequal, data": Row(ParallelLayout(pipeline=2, data=2, first_stage_layers=3), "qwen3", "bfloat16", True),
    # Expert with tensor while expert_tensor is 1, without the distributed optimizer.
    "expert over tensor": Row(ParallelLayout(tensor=2, expert=2), "qwen3_moe", "bfloat16"),
    # Beyond pairs: more tensor ranks than query groups; a stage between the first and the last; more context ranks.
    "four tensor ranks": Row(ParallelLayout(tensor=4), "qwen2_tied"),
    "three stages": Row(ParallelLayout(pipeline=3, last_stage_layers=2), "qwen2_tied"),
    "four context ranks": Row(ParallelLayout(context=4), "qwen2_tied"),
}


def soak(*cases: Any) -> list[ParameterSet]:
    """Marks cases for `make test-soak`: another test has their layout, or another case what would be wrong."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]
