"""Seconds that a teacher on the training ranks adds to a step, by objective, beside its own forward pass.

    python benchmarks/teachers.py [--rounds N] [--threads N]

One rank on a CPU; policy and teacher are random models of one size, 1,024 wide: narrower ones spend their time on what
is done with each logit, which does not depend on the width. The ratio is that of the added seconds to the
teacher's forward pass with its head; the last column counts the head twice, as objectives in the loss use it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training import (
    CPU_MODEL,
    CPU_TOKENS_PER_MICROBATCH,
    LR,
    batches_of,
    long_tailed,
    make_model,
    make_recipe,
    seconds_of,
)

from megagrpo.megatron.rank import TrainRank
from megagrpo.megatron.teacher import Teachers
from megagrpo.recipe.schema import Recipe

MODEL = CPU_MODEL | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sampled_token": {"name": "sampled_token"},
    "teacher_top_k, k 32": {"name": "teacher_top_k"},
    "student_top_k, k 32": {"name": "student_top_k"},
    "full_vocabulary, reverse_kl": {"name": "full_vocabulary"},
    "full_vocabulary, forward_kl": {"name": "full_vocabulary", "divergence": "forward_kl"},
    "full_vocabulary, jsd": {"name": "full_vocabulary", "divergence": "jsd"},
}


def with_teacher(recipe: Recipe, objective: dict[str, Any]) -> Recipe:
    """Returns the recipe with a teacher on the ranks, beside its rewards."""
    tree = recipe.model_dump(exclude_defaults=True)
    tree["algorithm"] = tree.get("algorithm", {}) | {"distillation": {"objective": objective}}
    return Recipe.model_validate(tree | {"teachers": {"teacher": {"kind": "ranks", "path": "unused"}}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    sequences = [replace(one, teacher=0) for one in long_tailed(8, MODEL["vocab_size"], 1024)]
    advantages = np.random.default_rng(1).normal(size=len(sequences)).astype(np.float32)
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / "model"
        make_model(directory, MODEL, torch.float32)
        plain = make_recipe("float32", CPU_TOKENS_PER_MICROBATCH, "none")
        recipes = {name: with_teacher(plain, objective) for name, objective in OBJECTIVES.items()}
        rank = TrainRank(recipes["sampled_token"], 0, f"file://{parent}/store", str(directory), "cpu")
        rank.add_teacher("teacher", str(directory))
        torch.set_num_threads(given.threads)
        model, (batch,) = rank.teachers._models[0], batches_of(plain, directory, sequences)

        def begin(recipe: Recipe) -> None:
            rank.recipe, rank.teachers = recipe, Teachers(recipe, rank)
            if recipe.teachers:
                rank.teachers.add("teacher", model)
            rank.load_batch(batch)

        def forward() -> None:
            begin(recipes["sampled_token"])
            rank.compute_teachers({"teacher": None})

        def step_of(recipe: Recipe) -> Callable[[], None]:
            def step() -> None:
                begin(recipe)
                if recipe.teachers:
                    rank.compute_teachers({"teacher": None})
                rank.update(advantages, LR, 0.0, 1)

            return step

        def body() -> None:
            begin(recipes["teacher_top_k, k 32"])
            rank.compute_teachers({"teacher": None})

        steps = {"without a teacher": step_of(plain), "forward pass": forward, "forward pass without its head": body}
        seconds = seconds_of(steps | {name: step_of(recipe) for name, recipe in recipes.items()}, given.rounds)
        rank.close()
    alone, without, bodies = (seconds[name] for name in ("forward pass", "without a teacher", [*steps][-1]))
    twice = [2 * whole - body_alone for whole, body_alone in zip(alone, bodies, strict=True)]
    print(f"{given.threads} threads, load average {os.getloadavg()[0]:.1f}; medians of {given.rounds}; s/step\n")
    print("| | seconds | added | of the forward pass | of the pass with its head twice |")
    print("|---|---|---|---|---|")
    for name in [*steps][:2]:
        print(f"| {name} | {statistics.median(seconds[name]):.2f} | | | |")
    for name in recipes:
        added = [one - base for one, base in zip(seconds[name], without, strict=True)]
        ratios = [statistics.median(a / b for a, b in zip(added, of, strict=True)) for of in (alone, twice)]
        cells = f"{statistics.median(seconds[name]):.2f} | {statistics.median(added):.2f}"
        print(f"| `{name}` | {cells} | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
