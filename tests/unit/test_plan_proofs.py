"""The proofs of a plan: which hold for a recipe, and their bytes, held against real arrays."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from megagrpo.batching.rank_batches import Microbatch, TrainSequence
from megagrpo.layout.parallel import rank_grid
from megagrpo.megatron.batch import pack
from megagrpo.megatron.replay import RoutesOnRank
from megagrpo.plan.case import Case
from megagrpo.plan.memory import memory
from megagrpo.plan.parameters import stages
from megagrpo.plan.plan import Plan, plan_of
from megagrpo.plan.proofs import Proof
from megagrpo.plan.show.as_json import plan_json
from megagrpo.plan.show.terminal import draw
from megagrpo.rollout.kinds import ENGINES
from megagrpo.routes import Routes
from megagrpo.types import KeptSets
from tests.plans import DEEPSEEK, H100, LLAMA_8B, QWEN_30B, known_model, merged, planned, recipe, sft_recipe

SMALL = {"prompts_per_step": 4, "samples_per_prompt": 2, "response_tokens_max": 96}
EXPERTS = {
    "model.path": QWEN_30B, "train.layout": {"tensor": 4, "data": 4, "expert": 8, "expert_tensor": 1},
    "rollout.layout": {"tensor": 4}, "rollout.engines": 4,
}  # fmt: skip


def proofs(of: Plan) -> dict[str, Proof]:
    return {proof.name: proof for proof in of.proofs}


def drawn(of: Plan) -> str:
    stream = io.StringIO()
    draw(of, None, Console(file=stream, width=120, highlight=False))
    return stream.getvalue()


def stub(layers: list[int], with_experts: tuple[int, ...]) -> Any:
    """A model chunk of these layers, as far as routes ask for it."""

    def layer(number: int) -> Any:
        mlp = SimpleNamespace(moe_layer_recompute=False)
        if number in with_experts:
            mlp.router = SimpleNamespace()
        hook = lambda *_, **__: None  # noqa: E731
        return SimpleNamespace(mlp=mlp, layer_number=number + 1, register_forward_pre_hook=hook)

    return SimpleNamespace(decoder=SimpleNamespace(layers=[layer(number) for number in layers]))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (QWEN_30B, {"tensor": 2, "context": 2, "data": 2}),
        (DEEPSEEK, {"pipeline": 4, "last_stage_layers": 4, "tensor": 2, "expert": 2, "expert_tensor": 1}),
    ],
)
def test_routes_on_a_rank_are_as_many_bytes_as_those_it_packs(model: str, layout: dict[str, Any], joined: bool) -> None:
    """Sequences are as long as allowed. DeepSeek's first stage has three layers without experts."""
    arch, more = known_model(model), {"logprob_tokens_per_microbatch": 2048} if joined else {}
    data = {"prompt_tokens_max": 32}
    of = merged(layout, data=data, rollout=SMALL, train={"tokens_per_microbatch": 1024, **more})
    case = Case(of, arch, H100)
    sizes = arch.route_sizes
    assert sizes is not None
    held = [
        next(k for k in memory(case) if f"stage {s} of" in k.name or case.layout.pipeline == 1)
        for s in range(case.layout.pipeline)
    ]
    for number, (stage, kind) in enumerate(zip(stages(len(arch.layers), case.layout), held, strict=True)):
        where = next(rank for rank in rank_grid(case.layout) if rank.pipeline == number)
        chunk = stub(stage.layers, arch.expert_layers)
        on_rank = RoutesOnRank([chunk], arch, sizes, case.layout.tensor, where, torch.device("cpu"))
        sequences = []
        for row in range(8 // case.layout.data):
            shape = (127, sizes.layers, sizes.per_token)
            routes = Routes(np.zeros(shape, np.uint8), 0)
            sequences.append(
                TrainSequence(np.zeros(128, np.int64), np.ones(128, bool), np.zeros(128, np.float32), row, 0, routes)
            )
        packed = pack(Microbatch(tuple(sequences)), layout=case.layout, context_rank=0, device="cpu", routes=on_rank)
        real = packed.sequences.routes
        assert real is not None
        for phase in kind.phases:
            (part,) = [part.bytes for part in phase.parts if part.name == "routes"] or [0]
            expected = 0 if phase.phase == "rollout" else real.nbytes * (2 if joined else 1)
            assert part == expected, (number, phase.phase)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("top_k", [8, 600])
def test_kept_sets_on_a_rank_are_as_many_bytes_as_those_it_packs(top_k: int, context: int, joined: bool) -> None:
    """Prompts are so short that a context rank has nearly as many response tokens as tokens."""
    arch, more = known_model(LLAMA_8B), {"logprob_tokens_per_microbatch": 2048} if joined else {}
    rollout, train = SMALL | {"top_k": top_k}, {"tokens_per_microbatch": 1024, **more}
    layout = {"tensor": 2, "pipeline": 2, "context": context, "data": 2}
    case = Case(merged(layout, data={"prompt_tokens_max": 32}, rollout=rollout, train=train), arch, H100)
    first, last = (next(kind for kind in memory(case) if f"stage {s} of 2" in kind.name) for s in range(2))
    assert not [part for phase in first.phases for part in phase.parts if part.name == "kept sets"]
    ids = np.arange(arch.vocab - top_k, arch.vocab, dtype=np.int32)
    sets = KeptSets(np.tile(ids, 96), np.arange(1, 97) * top_k)
    mask = np.arange(128) >= 32
    row = TrainSequence(np.full(128, arch.vocab - 1), mask, np.zeros(128, np.float32), 0, 0, kept=sets)
    sizes = []
    for rank in range(context):
        batch = Microbatch(tuple(replace(row, row=at) for at in range(4)))
        (responses,) = pack(batch, layout=case.layout, context_rank=rank, device="cpu", has_logits=True).responses
        assert responses.kept is not None
        sizes.append(sum(held.nbytes for held in vars(responses.kept).values() if isinstance(held, torch.Tensor)))
    for phase in last.phases:
        (part,) = [part.bytes for part in phase.parts if part.name == "kept sets"] or [0]
        expected = 0 if phase.phase == "rollout" else max(sizes) * (2 if joined else 1)
        assert part == expected, phase.phase


def test_a_steps_routes_and_servers_answers_are_as_many_bytes_as_their_arrays() -> None:
    lengths = ["prompt_tokens=100", "response_tokens=400"]
    values = {**EXPERTS, "rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4, "checkpoint.keep_batches": 3}
    of = planned(
        recipe(
            values,
            schedule={"kind": "async", "max_staleness": 1},
            cluster__placement="disaggregated",
            train__offload=[],
        ),
        lengths,
    )
    found, arch = proofs(of)["routes"].bytes, of.architecture
    whole = np.zeros((500, len(arch.expert_layers), arch.experts_per_token), np.int64)
    packed = Routes.of(whole).experts.nbytes
    assert found["token"] == packed / 500
    assert (found["host_memory"], found["ray_store"], found["kept_batches"]) == (16 * packed, 16 * packed, 48 * packed)
    assert found["checkpoint"] == of.grpo.prompts_at_once * 4 * packed
    answer = base64.b64encode(np.zeros((500, len(arch.layers), arch.experts_per_token), np.int32).tobytes())
    assert found["loopback"] == pytest.approx(16 * len(answer), rel=1e-5)
    assert ENGINES["transformers"].route_bytes(arch) == 0
    assert found["rank"] == max(
        part.bytes for kind in of.memory for phase in kind.phases for part in phase.parts if part.name == "routes"
    )
    assert known_model(DEEPSEEK).route_sizes.token_bytes == Routes.of(np.full((1, 58, 8), 255)).experts.nbytes  # type: ignore[union-attr]


def test_kept_sets_are_as_many_bytes_as_their_arrays_and_a_share_of_the_head() -> None:
    of = planned(recipe({"rollout.prompts_per_step": 4}), ["response_tokens=400"])
    changed = planned(recipe({"rollout.prompts_per_step": 4, "rollout.top_k": 8}), ["response_tokens=400"])
    found = proofs(changed)["sets"]
    kept = KeptSets(np.zeros(400 * 8, np.int32), np.arange(400, dtype=np.int64))
    assert found.bytes["host_memory"] == 4 * 8 * (kept.ids.nbytes + kept.ends.nbytes)
    assert f"at most 8 of {of.architecture.vocab:,} ids a token" in found.text
    assert f"{8 / of.architecture.vocab:.2%} of the head's products" in found.text
    wide = planned(recipe({"rollout.top_k": 513}))
    assert "100.00% of the head's products" in proofs(wide)["sets"].text, "a set of so many ids masks the vocabulary"
    assert proofs(of)["sets"].holds is None
    ids = [of.architecture.vocab - at for at in range(1, 9)]
    answer = len(json.dumps([ids] * 400, separators=(",", ":")))
    assert found.bytes["loopback"] == pytest.approx(4 * 8 * answer, rel=0.05)
    parts = [part for kind in changed.memory for phase in kind.phases for part in phase.parts]
    assert found.bytes["rank"] == max(part.bytes for part in parts if part.name == "kept sets")
    assert (found.seconds, proofs(of)["sets"].seconds) == (None, 0)


def test_routes_take_time_by_the_tokens_of_an_engine_and_of_a_rank_and_host_memory_by_the_cache() -> None:
    """A thousand tokens have 384,000 experts in 48 layers."""

    def cost(**values: Any) -> Proof:
        given = {"rollout.prompts_per_step": 16, "rollout.samples_per_prompt": 8}
        rates = ["route_read_experts_per_second=3.84e6", "route_digest_experts_per_second=3.84e8"]
        of = planned(recipe(EXPERTS | given | values), ["prompt_tokens=100", "response_tokens=900", *rates])
        return proofs(of)["routes"]

    assert cost().seconds == pytest.approx(128 / 4 * 0.1 + 128 / 4 * 0.001)
    halved = cost(**{"train.layout": {"tensor": 4, "data": 8, "expert": 8, "expert_tensor": 1}, "rollout.engines": 8})
    assert halved.seconds == pytest.approx(128 / 8 * 0.1 + 128 / 8 * 0.001)
    assert "1.60 s of an engine's process and 16.0 ms of a rank's" in halved.text
    served = planned(recipe(EXPERTS | {"rollout.sglang": {"max_total_tokens": 1000}}))
    buffers = 8 * np.zeros((1000, 48, 8), np.int32).nbytes  # of two engines of four ranks on a node
    assert proofs(served)["routes"].bytes["engine_host"] == buffers


def test_the_plan_says_which_proofs_hold() -> None:
    def holds(**values: Any) -> dict[str, bool | None]:
        return {name: proof.holds for name, proof in proofs(planned(recipe(EXPERTS | values))).items()}

    assert holds() == {"weights": True, "routes": True, "sets": None, "tokens": True}
    assert holds(**{"algorithm.routing": "own"})["routes"] is False
    assert holds(**{"rollout.quantization": "fp8"})["tokens"] is False
    served = proofs(planned(recipe(EXPERTS | {"rollout.quantization": "fp8", "train.quantization": "same_as_rollout"})))
    assert served["tokens"].holds
    assert served["tokens"].bytes["rank"] > 2**30, (
        "a copy of a quarter of the dense weights, and an eighth of the experts"
    )
    assert served["tokens"].seconds is None
    dense = planned(recipe(EXPERTS | {"model.path": LLAMA_8B, "train.layout": {"tensor": 4, "data": 4}}))
    assert proofs(dense)["routes"].holds is None
    assert dense.time is not None
    (sync,) = [phase.parts for phase in dense.time.phases if phase.phase == "weight_sync"]
    assert proofs(dense)["weights"].seconds == sync["digests"]
    unknown = planned(recipe(EXPERTS, cluster__gpu=None))
    assert proofs(unknown)["weights"].seconds is None


def test_text_and_json_have_the_proofs_and_fine_tuning_has_none() -> None:
    of = planned(recipe(EXPERTS))
    block = drawn(of).partition("\nwhat is trained is what was sampled\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in block] == ["weights", "routes", "sets", "tokens"]
    assert "384 B a token" in block[1]
    told = json.loads(plan_json(of))["proofs"]
    assert [proof["name"] for proof in told] == ["weights", "routes", "sets", "tokens"]
    assert told[1]["bytes"]["token"] == 384
    tuned = plan_of(sft_recipe(), known_model(LLAMA_8B))
    assert tuned.proofs == ()
    assert "what is trained" not in drawn(tuned)
