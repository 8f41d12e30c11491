"""A batch whose rows have teachers, recipes for it, and what a teacher says of it by transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.rank import TrainRank
from megagrpo.megatron.teacher import Teachers
from megagrpo.recipe.schema import Recipe
from megagrpo.types import TeacherTokens
from tests.distributed.step_case import VOCAB, Case, load_reference, make_recipe

ON_RANKS, ASKED, NONE = 0, 1, -1
"""Teachers of rows: one on the ranks, one that has been asked, none."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "reverse KL": {"name": "full_vocabulary", "divergence": "reverse_kl"},
    "forward KL": {"name": "full_vocabulary", "divergence": "forward_kl", "temperature": 1.3},
    "Jensen-Shannon": {"name": "full_vocabulary", "divergence": "jsd", "beta": 0.3},
    "student's top": {"name": "student_top_k", "k": 5, "divergence": "forward_kl"},
    "teacher's top": {"name": "teacher_top_k", "k": 7, "divergence": "jsd"},
    "teacher's top, reverse": {"name": "teacher_top_k", "k": 7},
}
WEIGHT = 0.7


def recipe_of(
    layout: ParallelLayout,
    objective: Any,
    *,
    offload: bool = False,
    rewards: bool = False,
    entropy: float = 0.0,
    system: str | None = None,
    own: ParallelLayout | None = None,
) -> Recipe:
    """Rewards with a KL term, or rewards with an entropy bonus, are beside the teachers only if wanted. own: the layout
    of the teacher on the ranks, if it is another than the policy's."""
    functions = [{"function": "gsm8k"}] if rewards or entropy else []
    asked = {"kind": "external", "url": "http://host", "tokenizer": "unused"}
    algorithm = {
        "kl": {"coefficient": 0.1 if rewards else 0.0},
        "entropy_coefficient": entropy,
        "aggregation": "token_mean",
        "distillation": {"objective": objective, "weight": WEIGHT, "column": "teacher", "system": system},
    }
    on_ranks = {"kind": "ranks", "path": "unused", "offload": offload, "layout": own and vars(own)}
    teachers = {"on_ranks": on_ranks, "asked": asked}
    train = {"distributed_optimizer": False}
    return make_recipe(layout, algorithm=algorithm, reward={"functions": functions}, teachers=teachers, train=train)


def with_teachers(case: Case, teacher: Path) -> Case:
    """The rows' teachers in turn; those that were asked answered with their 7 most likely ids."""
    model, sequences = load_reference(teacher), []
    for sequence in case.sequences:
        number = (ON_RANKS, ASKED, NONE)[sequence.row % 3]
        taught = None
        if number == ASKED:
            with torch.no_grad():
                log_q = logprobs_of(model, sequence.tokens, 1.0)[sequence.loss_mask[1:]]
            values, ids = log_q.topk(7)
            of_tokens = np.zeros(len(ids), np.float32)
            taught = TeacherTokens(of_tokens, ids.int().numpy(), values.float().numpy())
        sequences.append(replace(sequence, teacher=number, taught=taught))
    return replace(case, sequences=sequences)


def logprobs_of(model: torch.nn.Module, tokens: np.ndarray, temperature: float) -> torch.Tensor:
    """Logprobs of the policy's ids in the place of each token but the first: float64 [tokens - 1, vocabulary]."""
    logits = model(torch.from_numpy(tokens)[None]).logits[0, :-1, :VOCAB]
    return torch.log_softmax(logits / temperature, -1)


def rank_with(rank: TrainRank, recipe: Recipe, teacher: Path) -> TrainRank:
    """The rank with another objective; it builds the teacher once."""
    models = rank.teachers._models
    rank.recipe = recipe
    rank.teachers = Teachers(recipe, rank)
    rank.teachers._models = models
    if not models:
        rank.add_teacher("on_ranks", str(teacher))
    return rank
