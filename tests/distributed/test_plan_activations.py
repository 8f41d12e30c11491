"""Planned activations and logits against what passes of real training ranks allocate: within 15 %, mostly 3 %."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import heads
from megagrpo.plan import activations
from megagrpo.plan.activations import RankPass, passes_in_flight
from megagrpo.plan.parameters import stages
from megagrpo.recipe import schema
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts import DeltaNet, Mlp, Norms
from tests.distributed import activation_ranks
from tests.distributed.layouts import soak
from tests.rank_group import run_ranks
from tests.weights_oracle import architecture, latent_architecture, moe_architecture

TOLERANCE = 0.15

SIZES: dict[str, Any] = {"hidden": 192, "ffn": 480, "heads": 6, "head_dim": 32, "vocab": 64, "max_positions": 4096}
DENSE, HEADS = architecture(**SIZES), architecture(**SIZES | {"head_dim": 128})
WIDE = architecture(2, **SIZES | {"vocab": 32768, "hidden": 96})
EXPERTS = moe_architecture(**SIZES, experts=8, expert_ffn=160)
SHARED = moe_architecture(**SIZES, experts=8, expert_ffn=80, shared_ffn=320)
LATENT = latent_architecture(
    dense=4, **SIZES | {"heads": 8}, query_rank=96, key_value_rank=64, plain_dim=16, rotary_dim=8, value_dim=16
)


def _changed(**attention: Any) -> Architecture:
    mixing: Any = replace(DENSE.layers[0].attention, **attention)
    return replace(DENSE, layers=(replace(DENSE.layers[0], attention=mixing),) * 4)


GATED = _changed(gate=True)
WINDOWS, CAPPED = _changed(window=64), _changed(score_cap=30.0)
OUTPUTS, SQUARED = (
    replace(DENSE, layers=(replace(DENSE.layers[0], **changes),) * 4)
    for changes in ({"norms": Norms(192, outputs=True)}, {"mlp": Mlp(192, 480, activation="relu2")})
)
DELTA = replace(
    GATED, layers=(replace(GATED.layers[0], attention=DeltaNet(192, 4, 8, 16, 24, 4)),) * 3 + GATED.layers[:1]
)


@dataclass(frozen=True)
class Case:
    name: str
    architecture: Architecture
    layout: dict[str, int] = field(default_factory=dict)
    recompute: str | dict[str, Any] = "none"
    dtype: str = "float32"
    lengths: tuple[int, ...] = (384, 384)
    microbatches: int = 1
    lora: bool = False
    freed: bool = False

    @property
    def train(self) -> schema.TrainConfig:
        layout: Any = schema.LayoutConfig(**self.layout)
        again = self.recompute
        recompute: Any = schema.train.RecomputeConfig(**again) if isinstance(again, dict) else again
        lora = schema.LoraConfig(rank=8) if self.lora else None
        megatron = {"deallocate_pipeline_outputs": True} if self.freed else {}
        return schema.TrainConfig(total_steps=1, layout=layout, recompute=recompute, lora=lora, megatron=megatron)


CASES = [
    Case("dense", DENSE),
    Case("dense, full", DENSE, recompute="full"),
    Case("dense, mlp", DENSE, recompute={"modules": ["mlp"]}),
    Case("logits", WIDE, dtype="bfloat16"),
    Case("experts", EXPERTS),
    Case("latent attention", LATENT),
    Case("delta nets", DELTA),
    Case("norms of outputs", OUTPUTS),
    Case("tensor", DENSE, {"tensor": 2}),
    Case("context", DENSE, {"context": 2}, lengths=(768,)),
    Case("virtual pipeline", DENSE, {"pipeline": 2, "virtual_pipeline": 2}, microbatches=4),
]
LONG = [
    Case("dense, norms and mlp", DENSE, {"tensor": 2}, recompute={"modules": ["layernorm", "mlp"]}),
    Case("experts, moe", EXPERTS, recompute={"modules": ["moe"]}),
    Case("shared experts", SHARED, recompute={"modules": ["shared_experts"]}),
    Case("latent attention, up projections", LATENT, recompute={"modules": ["mla_up_proj"]}),
    Case("pipeline, one layer", DENSE, {"pipeline": 2}, recompute={"layers": 1}, microbatches=3),
    Case("heads larger than hidden, bfloat16", HEADS, dtype="bfloat16"),
    Case("experts, adapters", EXPERTS, lora=True),
    Case("latent attention, selective", LATENT, recompute="selective"),
    Case("interleaved, outputs freed", DENSE, {"pipeline": 2, "virtual_pipeline": 2}, microbatches=4, freed=True),
    Case("experts, cut over tensor ranks", EXPERTS, {"tensor": 2, "expert_tensor": 2}),
    Case("tensor and context", DENSE, {"tensor": 2, "context": 2}),
    Case("delta nets, bfloat16", DELTA, dtype="bfloat16"),
    Case("delta nets, tensor and context", DELTA, {"tensor": 2, "context": 2}),
    Case("gates of attention, bfloat16", GATED, dtype="bfloat16"),
    Case("windows", WINDOWS),
    Case("capped scores", CAPPED),
    Case("norms of outputs, bfloat16", OUTPUTS, {"tensor": 2}, dtype="bfloat16"),
    Case("squared ReLU", SQUARED),
]
SOAK = [
    Case("dense, selective", DENSE, recompute="selective"),
    Case("dense, one layer", DENSE, recompute={"layers": 1}),
    Case("dense, three layers", DENSE, recompute={"layers": 3}),
    Case("dense, norms", DENSE, recompute={"modules": ["layernorm"]}),
    Case("dense, mlp, adapters", DENSE, recompute={"modules": ["mlp"]}, lora=True),
    Case("experts, norms", EXPERTS, recompute={"modules": ["layernorm"]}),
    Case("dense, bfloat16", DENSE, dtype="bfloat16"),
    Case("dense, adapters", DENSE, lora=True),
    Case("logits, adapters", WIDE, lora=True),
    Case("dense, adapters, full", DENSE, recompute="full", lora=True),
    Case("logits, float32", WIDE),
    Case("experts, selective", EXPERTS, recompute="selective"),
    Case("experts, full", EXPERTS, recompute="full"),
    Case("experts, bfloat16", EXPERTS, dtype="bfloat16"),
    Case("latent attention, full", LATENT, recompute="full"),
    Case("pipeline", DENSE, {"pipeline": 2}, microbatches=3),
    Case("pipeline, full, outputs freed", DENSE, {"pipeline": 2}, recompute="full", microbatches=3, freed=True),
    Case("pipeline, full", DENSE, {"pipeline": 2}, recompute="full", microbatches=3),
    Case("experts, whole on tensor ranks", EXPERTS, {"tensor": 2, "expert": 2, "expert_tensor": 1}),
    Case("latent attention, tensor", LATENT, {"tensor": 2}),
]


def planned(case: Case, stage: int) -> tuple[int, int]:
    """Bytes of an update and of a pass without gradients."""
    layout, arch = case.train.layout.parallel(), case.architecture
    work = RankPass(
        layout,
        arch.hidden,
        element_bytes=2 if case.dtype == "bfloat16" else 4,
        tokens=sum(case.lengths) // layout.context,
        longest=max(case.lengths),
        device="cpu",
        transformer_engine=False,
        modules=case.train.recomputed.modules,
        adapters=case.lora,
        architecture=arch,
        layers_again=case.train.recomputed.layers,
        outputs_freed=case.freed,
    )
    held = stages(len(arch.layers), layout)[stage]
    kept, forward = work.stage_bytes(held, stage, case.microbatches), work.forward_bytes(held)
    working = work.working_bytes(held)
    if held.head:
        predicting = work.tokens - len(case.lengths) // layout.context
        working = max(working, work.logits_bytes(predicting, gradients=True))
        logits = work.logits_bytes(predicting, gradients=False, entropy=False)
        forward = max(forward, work.hidden_bytes + logits)
    return kept + working, forward


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG), *soak(*SOAK)],
    ids=lambda case: case.name,
)
def test_planned_bytes_are_those_that_ranks_allocate(case: Case) -> None:
    layout = case.train.layout.parallel()
    arguments = case.architecture, case.train, case.dtype, case.lengths, case.microbatches
    measured = run_ranks(layout.ranks, activation_ranks.measure, *arguments)
    per_stage = layout.ranks // layout.pipeline
    for stage in range(layout.pipeline):
        update, forward = planned(case, stage)
        ranks = measured[stage * per_stage : (stage + 1) * per_stage]
        assert update == pytest.approx(min(rank.update for rank in ranks), rel=TOLERANCE), (stage, measured)
        assert forward == pytest.approx(min(rank.logprobs for rank in ranks), rel=TOLERANCE), (stage, measured)


@pytest.mark.parametrize(("pipeline", "chunks"), [(2, 1), (4, 1), (2, 2), (2, 3), (4, 2), (8, 5)])
def test_microbatches_in_flight_are_those_of_megatrons_schedules(pipeline: int, chunks: int) -> None:
    layout = ParallelLayout(pipeline=pipeline, virtual_pipeline=chunks)
    for microbatches in (1, pipeline, pipeline + 1, 3 * pipeline + 2):
        table = get_schedule_table(microbatches, chunks, pipeline)
        for stage in range(pipeline):
            group = SimpleNamespace(size=lambda: pipeline, rank=lambda stage=stage: stage)
            size = chunks if chunks > 1 else None
            schedule = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=size)
            total, _, first, _ = get_pp_rank_microbatches(microbatches, chunks, pipeline, p2p_communicator=schedule)
            passes = Counter(chunk for _, chunk in table[: min(first + 1, total)])
            assert passes_in_flight(layout, stage, microbatches) == tuple(passes[chunk] for chunk in range(chunks))


def test_logits_are_planned_in_the_chunks_that_they_are_made_in() -> None:
    assert activations.LOGIT_CHUNK_ELEMENTS == heads.CHUNK_ELEMENTS
    assert activations.LOGIT_CHUNK_COLUMNS == heads.CHUNK_COLUMNS
