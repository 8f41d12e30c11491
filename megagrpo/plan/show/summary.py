"""What a checked recipe comes to: sizes that follow from it, as pairs of a name and a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megagrpo.layout.parallel import layers_of_stages
from megagrpo.plan.parameters import active_parameters, total_parameters
from megagrpo.recipe.defaults import checkpoint_directory, run_directory, total_steps
from megagrpo.recipe.schema import AnyRecipe, DataFileConfig, Recipe, SftRecipe
from megagrpo.weights.families.architecture import Architecture


def summary(recipe: AnyRecipe, architecture: Architecture, epoch_rows: float | None = None) -> list[tuple[str, str]]:
    """`epoch_rows`: prompts or examples of one epoch, if they are known."""
    return [
        ("run", f"{recipe.name}, seed {recipe.seed}, in {run_directory(recipe)}"),
        ("model", f"{architecture.family} of {_parameters(architecture)}, from {recipe.model.path}"),
        ("ranks", _ranks(recipe, architecture)),
        ("layers", _layers(recipe, architecture)),
        ("vocabulary", _vocabulary(recipe, architecture)),
        *(_of_sft(recipe, epoch_rows) if isinstance(recipe, SftRecipe) else _of_grpo(recipe, epoch_rows)),
        ("checkpoints", f"every {recipe.checkpoint.every_steps} steps, in {checkpoint_directory(recipe)}"),
    ]


def _of_grpo(recipe: Recipe, epoch_rows: float | None) -> list[tuple[str, str]]:
    return [
        ("step", _step(recipe)),
        ("objective", _objective(recipe)),
        ("minibatches", _minibatches(recipe)),
        ("sequence", _sequence(recipe)),
        ("length", _length(recipe, epoch_rows)),
        ("evaluation", _evaluation(recipe)),
    ]


def _of_sft(recipe: SftRecipe, epoch_rows: float | None) -> list[tuple[str, str]]:
    data, train, evaluation = recipe.data, recipe.train, recipe.eval
    share = f", about {data.examples_per_step / train.layout.data:g} on each of {train.layout.data} data ranks"
    capacity = train.tokens_per_microbatch * train.layout.context
    length = f"{train.total_steps} steps" if train.total_steps else _epochs(recipe, epoch_rows, "examples")
    held_out = (
        f"every {evaluation.every_steps} steps on {_paths(evaluation.files)}: loss" if evaluation.files else "none"
    )
    return [
        ("step", f"{data.examples_per_step} examples{share if train.layout.data > 1 else ''}"),
        ("sequence", f"up to {data.tokens_max} tokens, packed into microbatches of {capacity}"),
        ("length", length),
        ("evaluation", held_out),
    ]


def _paths(files: Sequence[DataFileConfig]) -> str:
    return ", ".join(file.path for file in files)


def _parameters(architecture: Architecture) -> str:
    active = f", {_count(active_parameters(architecture))} of them active" if architecture.experts else ""
    return f"{_count(total_parameters(architecture))} parameters{active}"


def _count(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)


def _ranks(recipe: AnyRecipe, architecture: Architecture) -> str:
    layout = recipe.train.layout.parallel()
    shown = layout if architecture.experts else replace(layout, expert_tensor=1)
    ranks = f"{layout.ranks}{f' ({shown})' if layout.ranks > 1 else ''}"
    if isinstance(recipe, SftRecipe):
        return ranks
    engines = f"{recipe.rollout.engines} {recipe.rollout.engine} engine{'s' if recipe.rollout.engines > 1 else ''}"
    return f"{ranks}, {engines}, {recipe.cluster.placement}"


def _layers(recipe: AnyRecipe, architecture: Architecture) -> str:
    layout = recipe.train.layout.parallel()
    counts, chunks = layers_of_stages(architecture.layers, layout), layout.virtual_pipeline
    if len(set(counts)) == 1:
        in_chunks = f" in {chunks} chunks of {counts[0] // chunks}" if chunks > 1 else ""
        return f"{architecture.layers}, {counts[0]} on each pipeline stage{in_chunks}"
    first, *between, last = counts
    middle = f", {between[0]} on each in between" if between else ""
    in_chunks = f", each in {chunks} chunks" if chunks > 1 else ""
    return f"{architecture.layers}, {first} on the first pipeline stage{middle}, {last} on the last{in_chunks}"


def _vocabulary(recipe: AnyRecipe, architecture: Architecture) -> str:
    tensor = recipe.train.layout.tensor
    padded = architecture.padded_vocab(tensor)
    padding = f", padded to {padded}" if padded > architecture.vocab else ""
    return f"{architecture.vocab}{padding}, {padded // tensor} on each tensor rank"


def _step(recipe: Recipe) -> str:
    prompts, samples = recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt
    dynamic = recipe.rollout.dynamic_sampling
    rounds = f", groups without signal replaced in up to {dynamic.rounds_max} rounds" if dynamic else ""
    return f"{prompts} prompts x {samples} samples = {prompts * samples} responses{rounds}"


def _objective(recipe: Recipe) -> str:
    algorithm, kl = recipe.algorithm, recipe.algorithm.kl
    penalty = f"{kl.coefficient:g} x KL ({kl.estimator}) in the {kl.placement}" if kl.coefficient else "no KL penalty"
    return f"{algorithm.advantage.name} advantages, {algorithm.loss.name} loss, {algorithm.aggregation}, {penalty}"


def _minibatches(recipe: Recipe) -> str:
    algorithm, data = recipe.algorithm, recipe.train.layout.data
    responses = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt // algorithm.minibatches
    steps = (
        f"{algorithm.epochs} epochs x {algorithm.minibatches} minibatches"
        if algorithm.epochs > 1
        else f"{algorithm.minibatches}"
    )
    share = f", about {responses / data:g} on each of {data} data ranks" if data > 1 else ""
    return f"{steps} of {responses} responses{share}"


def _sequence(recipe: Recipe) -> str:
    prompt, response, context = (
        recipe.data.prompt_tokens_max,
        recipe.rollout.response_tokens_max,
        recipe.train.layout.context,
    )
    capacity = recipe.train.tokens_per_microbatch * context
    return f"up to {prompt} + {response} tokens, packed into microbatches of {capacity}"


def _length(recipe: Recipe, epoch_rows: float | None) -> str:
    train = recipe.train
    responses = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    if train.total_steps is not None:
        return f"{train.total_steps} steps, {train.total_steps * responses} responses"
    if train.total_episodes is not None:
        return f"{train.total_episodes} responses"
    return _epochs(recipe, epoch_rows, "prompts")


def _epochs(recipe: AnyRecipe, rows: float | None, what: str) -> str:
    epochs = recipe.train.total_epochs
    passes = f"{epochs} pass{'es' if epochs != 1 else ''} over the training {what}"
    if rows is None:
        return passes
    steps = total_steps(recipe, math.ceil(rows))
    return f"{passes}, {rows:.0f} rows: {steps} step{'s' if steps > 1 else ''} at most"


def _evaluation(recipe: Recipe) -> str:
    evaluation = recipe.eval
    if not evaluation.files:
        return "none"
    how = (
        "greedy"
        if evaluation.temperature == 0
        else f"{evaluation.samples_per_prompt} samples at {evaluation.temperature:g}"
    )
    return f"every {evaluation.every_steps} steps on {_paths(evaluation.files)}, {how}"
