"""Each objective's value and gradients by layout, beside torch on full logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.batching.work import TOKENS
from megagrpo.layout.parallel import ParallelLayout, stage_problems
from megagrpo.megatron.rank import TrainRank
from megagrpo.recipe.schema import Recipe
from megagrpo.trainer.taught import batches_of_teachers
from megagrpo.weights.families import read_architecture
from tests.distributed.conftest import CaseOf
from tests.distributed.layouts import soak
from tests.distributed.step_case import (
    TEMPERATURE,
    Case,
    assemble,
    in_checkpoint,
    load_reference,
)
from tests.distributed.step_ranks import compute_gradients, gradients_of, make_batches, of_all_tokens, on_ranks
from tests.distributed.teacher_case import (
    ASKED,
    NONE,
    OBJECTIVES,
    ON_RANKS,
    WEIGHT,
    logprobs_of,
    rank_with,
    recipe_of,
    with_teachers,
)


@pytest.fixture(scope="module")
def case(case_of: CaseOf, teacher: Path) -> Case:
    return with_teachers(case_of("qwen3"), teacher)


def with_objectives(
    rank: TrainRank, batch: RankBatch, advantages: Any, recipes: Mapping[str, Recipe], teacher: Path, apart: Any
) -> dict[str, Any]:
    """By objective: this rank's part of the loss, its gradients, its divergences and teachers' logprobs by token; of
    sampled_token these logprobs alone."""
    found = dict[str, Any]()
    for name, recipe in recipes.items():
        rank_with(rank, recipe, teacher).load_batch(batch)
        rank.compute_teachers(apart)
        if name == "sampled_token":  # adds these to the advantages
            found[name] = rank.token_teacher() if rank.has_logits else None
            continue
        update = compute_gradients(rank, np.zeros_like(advantages))
        loss = update.metrics._loss.item() if rank.where.tensor == 0 else 0.0
        seen = rank.token_divergence() if rank.has_logits else None
        of_teacher = rank.token_teacher() if rank.has_logits else None
        found[name] = loss, gradients_of(rank.policy), seen, of_teacher
    return found


def torch_objective(settings: Mapping[str, Any], log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """By token, from the formulas: [tokens]."""
    if settings["name"] != "full_vocabulary":
        of = log_p if settings["name"] == "student_top_k" else log_q
        ids = of.topk(settings["k"]).indices
        log_p, log_q = (
            torch.cat([kept, (1 - kept.exp().sum(-1, keepdim=True)).log()], -1)
            for kept in (log_p.gather(1, ids), log_q.gather(1, ids))
        )
    p, q = log_p.exp(), log_q.exp()
    kind, beta = settings.get("divergence", "reverse_kl"), settings.get("beta", 0.5)
    if kind == "jsd":
        log_m = (beta * q + (1 - beta) * p).log()
        return (beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)).sum(-1)
    return (p * (log_p - log_q)).sum(-1) if kind == "reverse_kl" else (q * (log_q - log_p)).sum(-1)


def by_torch(case: Case, teacher: Path, settings: Mapping[str, Any]) -> tuple[float, dict[str, np.ndarray], np.ndarray]:
    """Loss, gradients by checkpoint tensor, and divergences by token, NaN without a teacher."""
    model, of_teacher, by_token = load_reference(case.directory), load_reference(teacher), []
    temperature = settings.get("temperature", TEMPERATURE)
    for sequence in case.sequences:
        mask = torch.from_numpy(sequence.loss_mask[1:])
        asks = settings["name"] == "teacher_top_k"
        if sequence.teacher == NONE or (sequence.teacher == ASKED and not asks):
            by_token.append(torch.full((int(mask.sum()),), torch.nan, dtype=torch.float64))
            continue
        with torch.no_grad():
            own = temperature if sequence.teacher == ON_RANKS else 1.0
            log_q = logprobs_of(of_teacher, sequence.tokens, own)[mask]
        by_token.append(torch_objective(settings, logprobs_of(model, sequence.tokens, temperature)[mask], log_q))
    found = torch.cat(by_token)
    loss = WEIGHT * found.nan_to_num(0.0).sum() / case.tokens
    loss.backward()
    to_checkpoint = in_checkpoint(read_architecture(case.directory))
    gradients = to_checkpoint({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return loss.item(), gradients, found.detach().numpy()


def of_labels(case: Case, teacher: Path, temperature: float) -> np.ndarray:
    """The logprobs of response tokens by the teacher on the ranks, NaN for tokens without it."""
    model, by_token = load_reference(teacher), []
    for sequence in case.sequences:
        mask = torch.from_numpy(sequence.loss_mask[1:])
        with torch.no_grad():
            log_q = logprobs_of(model, sequence.tokens, temperature)
        labels = torch.from_numpy(sequence.tokens[1:])[:, None]
        found = log_q.gather(1, labels)[mask, 0]
        by_token.append(found if sequence.teacher == ON_RANKS else torch.full_like(found, torch.nan))
    return torch.cat(by_token).numpy()


def layouts(ranks: int, expert: Sequence[int] = (1,)) -> list[ParallelLayout]:
    """All layouts of a model with four layers. expert: the sizes of that axis, 1 without experts."""
    found = []
    sizes = [one for one in product((1, 2, 4), repeat=4) if math.prod(one) == ranks]
    stages: list[dict[str, int]] = [{}, {"virtual_pipeline": 2}, {"first_stage_layers": 3}]
    for (tensor, pipeline, context, data), more, split in product(sizes, stages, expert):
        dense = ParallelLayout(tensor, pipeline, context=context, data=data, **more)
        for layout in [replace(dense, expert=split, expert_tensor=one) for one in (1, 2, 4) if one <= tensor]:
            if not layout.problems() and not stage_problems(4, layout) and (split > 1 or layout == dense):
                found.append(layout)
    return found


def with_own(layouts: Sequence[ParallelLayout]) -> list[tuple[ParallelLayout, ParallelLayout]]:
    """Each layout of a policy with another one of its teacher."""
    half = len(layouts) // 2
    return list(zip(layouts, [*layouts[half:], *layouts[:half]], strict=True))


COVER: list[tuple[ParallelLayout, ParallelLayout | None]] = [
    (ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2), None),
    (ParallelLayout(tensor=2, context=2), ParallelLayout(pipeline=2, data=2, first_stage_layers=3)),
    (ParallelLayout(tensor=2, data=2), ParallelLayout(pipeline=2, context=2)),
    (ParallelLayout(pipeline=2, context=2, expert=2, first_stage_layers=3), None),
    (ParallelLayout(pipeline=2, virtual_pipeline=2, data=2), None),
    (ParallelLayout(context=2, data=2), None),
]
"""Every two of tensor, pipeline, context and data above 1."""
ALL = [
    *((layout, None) for ranks in (2, 4) for layout in layouts(ranks) + layouts(ranks, expert=(2, 4))),
    *(pair for ranks in (2, 4) for pair in with_own(layouts(ranks))),
]
"""Every layout of two and of four ranks, of a policy and of a teacher."""


@pytest.mark.parametrize(("layout", "own"), [*COVER, *soak(*(pair for pair in ALL if pair not in COVER))], ids=str)
def test_every_objective_has_torchs_value_and_gradients(layout, own, case, teacher, case_of: CaseOf):
    """With a dense teacher, of a policy with experts where the layout splits them. own: the teacher's own layout."""
    if layout.expert > 1:
        case = with_teachers(case_of("qwen3_moe"), teacher)
    recipes = {objective: recipe_of(layout, settings, own=own) for objective, settings in OBJECTIVES.items()}
    recipe = recipes["sampled_token"] = recipe_of(layout, "sampled_token", own=own)
    apart = batches_of_teachers(recipe, make_batches(recipe, case), TOKENS) if own else {"on_ranks": None}
    results = on_ranks(with_objectives, recipe, case, recipes, teacher, apart)
    labels = of_labels(case, teacher, TEMPERATURE)
    np.testing.assert_allclose(of_all_tokens(result["sampled_token"] for result in results), labels, atol=3e-6)
    for objective, settings in OBJECTIVES.items():
        losses, parts, seen, of_teacher = zip(*(result[objective] for result in results), strict=True)
        loss, gradients, by_token = by_torch(case, teacher, settings)
        assert sum(losses) == pytest.approx(loss, abs=1e-6), objective
        np.testing.assert_allclose(of_all_tokens(seen), by_token, atol=2e-6, err_msg=objective)
        temperature = settings.get("temperature", TEMPERATURE)
        np.testing.assert_allclose(of_all_tokens(of_teacher), of_labels(case, teacher, temperature), atol=3e-6)
        found = assemble(parts)
        for tensor, gradient in gradients.items():
            largest = max(np.abs(gradient).max(), 1e-30)
            assert np.abs(found[tensor] - gradient).max() <= 1e-5 * largest, (objective, tensor)
