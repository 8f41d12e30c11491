"""Routing replay: every token passes the experts of its route, in every layout, pass and recomputation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.errors import RankError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.rank import TrainRank
from megagrpo.recipe.schema import Recipe
from megagrpo.routes import Routes, RouteSizes
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from tests.distributed.conftest import CaseOf, Tiny
from tests.distributed.step_case import (
    Case,
    assert_same_step,
    grpo_step,
    load_reference,
    make_recipe,
    response_logprobs,
)
from tests.distributed.step_ranks import gather, load_and_pass, of_all_tokens, on_ranks, step, the_one, update

RECOMPUTE: dict[str, Any] = {
    "none": "none",
    "full": "full",
    "some": {"layers": 1},
    "experts": {"modules": ["layernorm", "moe"]},
}
LAYOUTS = {
    "tensor, virtual": ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2, expert_tensor=2),
    "tensor": ParallelLayout(tensor=2, expert_tensor=2),
    "expert, tensor": ParallelLayout(tensor=2, expert=2),
    "pipeline": ParallelLayout(pipeline=2),
    "unequal": ParallelLayout(pipeline=2, first_stage_layers=1),
    "context": ParallelLayout(context=2),
    "data": ParallelLayout(data=2),
    "expert": ParallelLayout(data=2, expert=2),
    "context, tensor": ParallelLayout(context=2, tensor=2, expert=2),
    "context, pipeline": ParallelLayout(context=2, pipeline=2, expert=2),
    "virtual, data": ParallelLayout(pipeline=2, virtual_pipeline=2, data=2, expert=2),
    "four experts": ParallelLayout(data=4, expert=4),
}
IN_SUITE = (("qwen3_moe", "tensor, virtual"), ("qwen3_moe", "context, tensor"), ("deepseek_v3", "virtual, data"))


def with_routes(case: Case, without: tuple[int, ...] = (3,)) -> Case:
    """The case with random routes; some rows have none."""
    sizes, random = sizes_of(case), np.random.default_rng(5)
    sequences = []
    for sequence in case.sequences:
        tokens = (len(sequence.tokens) - 1) * sizes.layers
        chosen = [random.permutation(sizes.experts)[: sizes.per_token] for _ in range(tokens)]
        experts = np.array(chosen, np.int64).reshape(-1, sizes.layers, sizes.per_token)
        sequences.append(replace(sequence, routes=None if sequence.row in without else Routes.of(experts)))
    return replace(case, sequences=sequences)


def sizes_of(case: Case) -> RouteSizes:
    sizes = read_architecture(case.directory).route_sizes
    assert sizes is not None
    return sizes


def forced_reference(case: Case) -> torch.nn.Module:
    """Transformers' model with the experts of the case's routes, weighted by its own routers."""
    model, arch = load_reference(case.directory), read_architecture(case.directory)
    routes = {tuple(of.tokens.tolist()): of.routes for of in case.sequences}
    state: dict[str, Any] = {}

    def take(_: Any, args: tuple[torch.Tensor]) -> None:
        state["routes"] = routes[tuple(args[0][0].tolist())]

    model.register_forward_pre_hook(take)
    for place, layer in enumerate(arch.expert_layers):
        _force(model.get_submodule(f"model.layers.{layer}.mlp"), arch, place, state)
    return model


def _force(experts: Any, arch: Architecture, place: int, state: dict[str, Any]) -> None:
    part: Any = arch.layers[arch.expert_layers[place]].mlp
    router = getattr(experts, "gate", None) or experts.router

    def keep(_: Any, __: Any, output: Any) -> None:
        state["logits"] = output[0]

    def force(_: Any, args: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Any:
        hidden, own, weights = args
        if (given := state["routes"]) is None:
            return args
        chosen = torch.cat([torch.from_numpy(given.experts[:, place].astype(np.int64)), own[-1:]])
        sigmoid = hasattr(part.router, "scale")
        scores = state["logits"].sigmoid() if sigmoid else state["logits"].softmax(-1)
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) if part.normalize_top_k else weights
        return hidden, chosen, weights * (part.router.scale if sigmoid else 1.0)

    router.register_forward_hook(keep)
    experts.experts.register_forward_pre_hook(force)


def recipe_of(layout: ParallelLayout, recompute: Any = "none") -> Recipe:
    return make_recipe(layout, train={"recompute": recompute, "distributed_optimizer": False})


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_tokens_pass_the_experts_of_their_routes_however_layers_are_recomputed(case_of: CaseOf, family: str) -> None:
    case = with_routes(case_of(family))
    recipe = recipe_of(ParallelLayout())
    wanted = grpo_step(case, recipe, forced_reference(case))
    assert grpo_step(case, recipe, load_reference(case.directory)).loss != pytest.approx(wanted.loss, abs=1e-4)
    for recompute in RECOMPUTE.values():
        assert_same_step(gather(on_ranks(step, recipe_of(ParallelLayout(), recompute), case)), wanted)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=[] if (family, name) in IN_SUITE else pytest.mark.long)
        for family in ("qwen3_moe", "deepseek_v3")
        for name, layout in LAYOUTS.items()
        if not (family == "deepseek_v3" and name == "unequal")
    ],
    ids=str,
)
def test_replay_is_the_same_in_every_layout(case_of: CaseOf, family: str, layout: ParallelLayout) -> None:
    case = with_routes(case_of(family))
    recompute = RECOMPUTE["experts"] if layout.pipeline > 1 else RECOMPUTE["full"]
    recipe = recipe_of(layout, recompute)
    assert_same_step(gather(on_ranks(step, recipe, case)), grpo_step(case, recipe, forced_reference(case)))


@pytest.mark.long
def test_layers_of_transformer_engine_and_adapters_replay_too(case_of: CaseOf) -> None:
    case, layout = with_routes(case_of("qwen3_moe")), LAYOUTS["expert"]
    wanted = grpo_step(case, recipe_of(layout), forced_reference(case))
    for change in ({"layer_spec": "transformer_engine"}, {"lora": {"rank": 2}}):
        recipe = make_recipe(layout, train={"distributed_optimizer": False, **change})
        steps = on_ranks(step, recipe, case)
        if "lora" in change:  # adapters add nothing before their first step
            assert the_one(one.metrics for one in steps).loss == pytest.approx(wanted.loss, abs=1e-6)
        else:
            assert_same_step(gather(steps), wanted)


def own_and_replayed(rank: TrainRank, batch: RankBatch, advantages: Any) -> Any:
    """The metrics of an update, after a comparison with own routes."""
    load_and_pass(rank, batch)
    rank.compare_own_routes()
    return update(rank, advantages)


def test_metrics_have_differing_routes_by_layer_and_the_mismatch_without_replay(case_of: CaseOf) -> None:
    layout = ParallelLayout(pipeline=2, data=2, expert=2)
    case = with_routes(case_of("qwen3_moe"))
    shares = []
    for of in (case, replace(case, sequences=[replace(one, routes=None) for one in case.sequences])):
        metrics = the_one(on_ranks(own_and_replayed, recipe_of(layout), of))
        shares.append(metrics.route_differences)
        equal = metrics.own_routes.mean == pytest.approx(metrics.mismatch.mean, abs=1e-6)
        assert equal == (of is not case)
    assert all(0.5 < share < 1 for share in shares[0])  # one of six pairs of experts is the router's own
    assert shares[1] == (0, 0, 0, 0)


def update_after_a_step_without_one(rank: TrainRank, batch: RankBatch, advantages: Any) -> Any:
    """Passes over a batch, as in a critic's warm-up, then another batch with an update."""
    load_and_pass(rank, batch)
    return own_and_replayed(rank, batch, advantages)


def test_a_step_in_which_the_policy_waits_leaves_no_counts(case_of: CaseOf) -> None:
    case = with_routes(case_of("qwen3_moe"))
    two = [
        the_one(on_ranks(function, recipe_of(ParallelLayout()), case)).route_differences
        for function in (own_and_replayed, update_after_a_step_without_one)
    ]
    assert two[0] == two[1]


def with_teachers(rank: TrainRank, batch: RankBatch, advantages: Any, other: Path) -> Any:
    """The policy's logprobs, and those by its teachers."""
    rank.add_teacher("other", str(other))
    rank.load_batch(batch)
    rank.compute_old_logprobs()
    rank.compute_teachers({"other": None, "start": None})
    return (rank.token_numbers(rank.passes.old_logprobs), rank.token_teacher()) if rank.has_logits else (None, None)


@pytest.mark.parametrize("layout", ["expert", pytest.param("context, pipeline", marks=pytest.mark.long)])
def test_teachers_choose_their_own_experts_for_the_tokens_whose_routes_the_policy_replays(
    case_of: CaseOf, tiny: Tiny, layout: str
) -> None:
    """A row has two branches; its teacher is another mixture or the policy's start."""
    case, other, sequences = with_routes(case_of("qwen3_moe")), tiny("qwen3_moe", hidden_size=64), []
    for number, sequence in enumerate(case.sequences):
        first = int(case.sequences[number - 1].loss_mask.sum()) if number % 2 else 0
        sequences.append(replace(sequence, row=number // 2, first=first, teacher=number // 2 % 2))
    teachers = {"other": {"kind": "ranks", "path": "unused"}, "start": {"kind": "reference"}}
    algorithm = {"distillation": {"objective": "sampled_token", "column": "teacher"}}
    recipe = make_recipe(LAYOUTS[layout], algorithm=algorithm, teachers=teachers)
    results = on_ranks(with_teachers, recipe, replace(case, sequences=sequences), other)
    replaying, models = forced_reference(case), [load_reference(other), load_reference(case.directory)]
    wanted: list[list[np.ndarray]] = [[], []]
    for sequence in sequences:
        for model, of_all in zip((replaying, models[sequence.teacher]), wanted, strict=True):
            with torch.no_grad():
                of_all.append(response_logprobs(model, sequence.tokens)[0].numpy()[sequence.loss_mask[1:]])
    for found, of_model in zip(zip(*results, strict=True), wanted, strict=True):
        np.testing.assert_allclose(of_all_tokens(found), np.concatenate(of_model), atol=1e-5)


def refusal(rank: TrainRank, batch: RankBatch, advantages: Any) -> str:
    try:
        rank.load_batch(batch)
    except RankError as error:
        return str(error)
    return ""


def test_routes_that_are_not_those_sent_are_refused(case_of: CaseOf) -> None:
    case = with_routes(case_of("qwen3_moe"))
    changed = {
        "a shift": lambda routes: replace(routes, experts=np.roll(routes.experts, 1, 0)),
        "one missing": lambda routes: replace(routes, experts=routes.experts[1:]),
        "another expert": lambda routes: replace(routes, experts=routes.experts ^ np.eye(1, 1, dtype=np.uint8)),
    }
    row = max(case.sequences, key=lambda sequence: len(sequence.tokens)).row
    for change in changed.values():
        sequences = [
            replace(one, routes=change(one.routes), name=f"sample {row}") if one.row == row else one
            for one in case.sequences
        ]
        found = on_ranks(refusal, recipe_of(LAYOUTS["expert, tensor"]), replace(case, sequences=sequences))
        assert all(f"sample {row}" in said for said in found)
