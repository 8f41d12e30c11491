"""Rules between the recipe and the model's architecture: sizes that divide others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from megagrpo.errors import Problem, listed
from megagrpo.layout.parallel import ParallelLayout, layers_of_chunk, stage_problems
from megagrpo.recipe.defaults import frozen_config, recipe_for_teacher, replayed_routes
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe, TrainConfig
from megagrpo.recipe.schema.eval import EvalConfig
from megagrpo.recipe.schema.train import ALL_LAYERS
from megagrpo.section import Rules, broken
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.files.adapters import TARGETS, adapted_matrices
from megagrpo.weights.sides.checkpoint import stored

Values = Iterator[Mapping[str, object]]
"""The values of a rule's problems."""


@dataclass(frozen=True)
class Fit:
    """A recipe beside its model."""

    recipe: AnyRecipe
    model: Architecture

    @property
    def train(self) -> TrainConfig:
        return self.recipe.train

    @cached_property
    def layout(self) -> ParallelLayout:
        return self.train.layout.parallel()

    @property
    def positions_max(self) -> int:
        """Returns the length of the longest sequence that may be sampled."""
        return self.model.sampled_max or self.model.max_positions

    @property
    def positions_key(self) -> str:
        """Returns the name of that limit."""
        return f"{'original_' if self.model.sampled_max else ''}max_position_embeddings"

    @property
    def tensor_sizes(self) -> str:
        """Returns the tensor sizes that fit the model, in words."""
        return either(self.model.tensor_sizes())

    @property
    def expert_tensor_differs(self) -> bool:
        return self.train.layout.expert_tensor not in (None, self.layout.tensor)


def model_problems(recipe: AnyRecipe, architecture: Architecture) -> list[Problem]:
    """Returns a problem for every rule that the recipe breaks for this model; `where` is a dotted path.

    Any tensor size fits the vocabulary: its rows are padded up to a multiple of it (Architecture.padded_vocab).
    """
    return [*broken(MODEL_RULES, Fit(recipe, architecture))]


def critic_problems(recipe: AnyRecipe, critic: Architecture) -> list[Problem]:
    """Returns the problems with the model of algorithm.critic.path, which never has adapters, nor routes."""
    changes: dict[str, object] = {"train": recipe.train.model_copy(update={"lora": None})}
    if isinstance(recipe, Recipe):
        changes["algorithm"] = recipe.algorithm.model_copy(update={"routing": "own"})
    return model_problems(recipe.model_copy(update=changes), critic)


def frozen_problems(recipe: Recipe, name: str, teacher: Architecture) -> list[Problem]:
    """Returns the problems with a teacher on the ranks, which has neither adapters, gradients nor routes, and sees no
    evaluations."""
    read = recipe_for_teacher(recipe, name)
    changes = {"train": frozen_config(read.train, teacher), "eval": EvalConfig()}
    return critic_problems(read.model_copy(update=changes), teacher)


def token_problems(recipe: AnyRecipe, architecture: Architecture) -> Iterator[Problem]:
    """Yields problems of examples, or prompts and responses, longer than the model takes, and of stop tokens that it
    lacks."""
    return broken(TOKEN_RULES, Fit(recipe, architecture))


def _stages(fit: Fit) -> Values:
    layout, layers = fit.layout, len(fit.model.layers)
    if layout.problems() or not (problems := stage_problems(layers, layout)):  # the former are rules of LayoutConfig
        return
    chunks = f" x virtual_pipeline {layout.virtual_pipeline}" if layout.virtual_pipeline > 1 else ""
    lengths, uneven = dict(layout.stage_lengths()), _uneven(layers, layout)
    needed = f"the same number of layers in each of the {layout.pipeline * layout.virtual_pipeline} pieces"
    if lengths:
        field, needed = next(iter(lengths)), "; ".join(problems)
        fix = uneven or ("virtual_pipeline: 1" if layout.virtual_pipeline > 1 else "fewer stages")
    elif layers % layout.pipeline:
        field, fix = "pipeline", f"pipeline of {either(divisors(layers))}{f'; or {uneven}' if uneven else ''}"
    else:
        field, fix = "virtual_pipeline", f"virtual_pipeline of {either(divisors(layers // layout.pipeline))}"
    chunks += "".join(f", {name} {length}" for name, length in lengths.items())
    yield {"field": field, "chunks": chunks, "layers": layers, "needed": needed, "fix": fix}


def _uneven(layers: int, layout: ParallelLayout) -> str | None:
    """Returns a fix: the last stage's length that makes the longest of as many stages shortest; None if none exists."""
    chunks, others = layout.virtual_pipeline, layout.pipeline - 1
    pieces = layers // chunks
    if layers % chunks or pieces < layout.pipeline:
        return None
    if pieces % layout.pipeline == 0:
        return "neither first_stage_layers nor last_stage_layers"
    length = min(-(-pieces // layout.pipeline), (pieces - 1) // others)
    last = (pieces - length * others) * chunks
    return f"last_stage_layers: {last} only, which leaves {length * chunks} on each other stage"


def _undivided(fit: Fit) -> Values:
    for axis, name, size in fit.model.divided():
        ranks = getattr(fit.layout, axis)
        if size % ranks:
            fix = f"tensor of {fit.tensor_sizes}" if axis == "tensor" else "expert_tensor: 1, with expert above 1"
            if axis == "expert":
                fix = f"expert of {either(divisors(size))}"
            yield {"axis": axis, "ranks": ranks, "name": name, "size": size, "fix": fix}


def _undivided_over_context(fit: Fit) -> Values:
    ranks = fit.layout.tensor * fit.layout.context
    for heads in {kind.attention.groups for kind in fit.model.kinds if kind.attention.exchanges_heads}:
        if fit.layout.context > 1 and heads % ranks:
            yield {"ranks": ranks, "heads": heads}


MODULES = {
    "mla_up_proj": "latent attention",
    "mlp": "a layer without experts",
    "moe": "experts",
    "moe_act": "experts",
    "shared_experts": "shared experts",
}
"""Modules of train.recompute that not every model has, and the parts that have them."""


def _modules_of_other_models(fit: Fit) -> Values:
    for module in sorted(fit.train.recomputed.modules - fit.model.recomputes):
        if module in MODULES:
            yield {"module": module, "missing": MODULES[module]}


def _longest_side(model: Architecture) -> int:
    """Returns the longest side of the matrices that may have adapters."""
    return max(size for matrix in adapted_matrices(model.sample(), TARGETS.values()) for size in matrix.shape)


def _fused_targets(model: Architecture, targets: Collection[str]) -> list[str]:
    """Returns the targets of adapters whose matrices the model's files fuse with others: PEFT has no name for them."""
    files = stored(model.sample(), "float32")
    alone = {its.box.tensor for its in files.placements if files.storages[its.storage].shape == its.box.shape}
    matrices = adapted_matrices(model.sample(), targets)
    return sorted({TARGETS[matrix.role] for matrix in matrices if matrix.name not in alone})


def _recomputed_layers(fit: Fit) -> Values:
    layout, layers = fit.layout, fit.train.recomputed.layers
    if 0 < layers < ALL_LAYERS and not layout.problems() and not stage_problems(len(fit.model.layers), layout):
        chunks = product(range(layout.pipeline), range(layout.virtual_pipeline))
        longest = max(len(layers_of_chunk(len(fit.model.layers), layout, *chunk)) for chunk in chunks)
        if layers > longest:
            yield {"piece": "chunk of a stage" if layout.virtual_pipeline > 1 else "stage", "longest": longest}


def _long_responses(fit: Fit) -> Values:
    recipe = fit.recipe
    if isinstance(recipe, SftRecipe):
        return
    lengths = {"rollout": recipe.rollout.response_tokens_max}
    for name, held_out in recipe.eval.of_sets().items():
        if held_out.response_tokens_max is not None:
            of_set = recipe.eval.sets[name].response_tokens_max is not None
            lengths[f"eval.sets.{name}" if of_set else "eval"] = held_out.response_tokens_max
    prompt = recipe.data.prompt_tokens_max
    for section, response in lengths.items():
        if prompt + response > fit.positions_max:
            yield {"section": section, "prompt": prompt, "response": response, "sum": prompt + response}


TOKEN_RULES: Rules[Fit] = {
    "example_beyond_positions": lambda f: (
        isinstance(f.recipe, SftRecipe) and f.recipe.data.tokens_max > f.model.max_positions
    ),
    "response_beyond_positions": _long_responses,
    "conversation_beyond_positions": lambda f: (
        isinstance(f.recipe, Recipe) and f.recipe.agent and f.recipe.sequence_tokens_max > f.positions_max
    ),
    "stop_tokens_of_no_vocabulary": lambda f: (
        isinstance(f.recipe, Recipe)
        and (tokens := [token for token in f.recipe.rollout.stop_token_ids if token >= f.model.vocab])
        and {"tokens": tokens}
    ),
}
MODEL_RULES: Rules[Fit] = {
    "stages_of_a_model": _stages,
    "undivided_size": _undivided,
    "undivided_over_context": _undivided_over_context,
    "layers_without_a_part": lambda f: (
        f.train.layer_spec == "transformer_engine" and (part := f.model.only_local) and {"part": part}
    ),
    "undivided_query_groups": lambda f: (
        f.model.query_groups % f.layout.tensor and f.layout.tensor % f.model.query_groups
    ),
    "expert_of_a_dense_model": lambda f: f.model.experts == 0 and f.layout.expert > 1,
    "expert_tensor_of_a_dense_model": lambda f: f.model.experts == 0 and f.expert_tensor_differs,
    # Megatron sums the experts' gradients over the ranks that share dense weights, silently (tensor_parallel/
    # layers.py: allreduce). Adapters are marked by lora.py.
    "expert_tensor_of_one_expert_rank": lambda f: (
        f.model.experts and f.layout.expert == 1 and f.expert_tensor_differs and f.train.lora is None
    ),
    # Megatron's experts have all of a bias on each of the ranks that share an expert.
    "expert_tensor_of_biases": lambda f: f.layout.expert_tensor > 1 and any(kind.mlp.bias for kind in f.model.kinds),
    "adapters_of_latent_attention": lambda f: f.train.lora and not f.model.adapts,
    "rank_of_adapters": lambda f: (
        f.train.lora and f.model.adapts and f.train.lora.rank > (most := _longest_side(f.model)) and {"most": most}
    ),
    "adapters_of_fused_matrices": lambda f: (
        f.train.lora and (fused := _fused_targets(f.model, f.train.lora.targets)) and {"fused": listed(fused)}
    ),
    "adapters_of_split_experts": lambda f: (
        f.train.lora
        and f.model.adapts
        and f.model.experts
        and f.layout.expert_tensor > 1
        and {"default": "" if f.train.layout.expert_tensor else " (the default: as tensor)"}
    ),
    # Megatron-Core separates q, k and v by whole query groups.
    "muon_on_parts_of_query_groups": lambda f: (
        f.train.optimizer.kind == "muon"
        and f.layout.tensor > f.model.query_groups
        and {"sizes": either(divisors(f.model.query_groups))}
    ),
    "muon_on_one_data_rank": lambda f: (
        f.train.optimizer.kind == "muon"
        and f.train.distributed_optimizer
        and f.model.experts
        and f.layout.data * f.layout.context == 1 < f.layout.expert_data
    ),
    # An assertion of Megatron-Core's: only matrices of such experts may be dealt out.
    "muon_on_biases_of_experts": lambda f: (
        f.train.optimizer.kind == "muon"
        and f.train.distributed_optimizer
        and f.layout.expert > 1
        and any(kind.mlp.bias for kind in f.model.kinds)
    ),
    "replay_of_a_dense_model": lambda f: (
        isinstance(f.recipe, Recipe) and f.recipe.algorithm.routing == "replay" and f.model.experts == 0
    ),
    "own_routes_of_a_dense_model": lambda f: (
        isinstance(f.recipe, Recipe)
        and f.recipe.algorithm.routing != "own"
        and f.recipe.rollout.mismatch.own_routes_every_steps
        and f.model.experts == 0
    ),
    # Transformer Engine's fused routing chooses by itself.
    "replay_by_a_fused_router": lambda f: (
        isinstance(f.recipe, Recipe)
        and f.train.megatron.get("moe_router_fusion")
        and replayed_routes(f.recipe, f.model) is not None
    ),
    "recomputed_module_of_another_model": _modules_of_other_models,
    "recomputed_layers_of_no_stage": _recomputed_layers,
    **TOKEN_RULES,
}
"""Rules between a recipe and its policy, or its critic."""


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def either(sizes: list[int]) -> str:
    """Returns `1, 2 or 4`, without the larger ones of a long list."""
    return listed(sizes[:6], "or")
