"""Candidates of a search: layouts, ways to save memory, and engines, each a set of values of recipe fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any, TypeVar

from megagrpo.plan.advice import CONTEXT_TOKENS_MIN
from megagrpo.plan.assumptions import Assumptions, longest_sequence
from megagrpo.plan.case import Case, machines_of
from megagrpo.plan.parameters import total_parameters
from megagrpo.recipe.model_rules import divisors
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe
from megagrpo.recipe.schema.train import RecomputeConfig, RecomputeModule
from megagrpo.section import Section, tree_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.sglang import CUTS_ATTENTION_IN_GROUPS

CHUNKS = (1, 2, 4)
ENGINE_SHARES = tuple((part, 8) for part in range(1, 8))  # of all GPUs, for engines on GPUs of their own
# Engines over nodes, if more than so many bytes of weights on each GPU: for 30B-A3B on 64 H100 and 70B on 128 they are
# never among the fastest, and searching them takes 8 and 22 % more candidates. A pipeline makes no token faster.
ENGINE_NODES, NODE_ENGINE_BYTES = (2, 4), 40e9
MEMORY_SHARES = (0.5, 0.65, 0.8)
SGLANG = "rollout.sglang"

Kind = TypeVar("Kind", bound=Section)
Values = Mapping[str, Any]
"""Values of recipe fields by their paths, such as train.layout.tensor."""


def layouts(recipe: AnyRecipe, architecture: Architecture, ranks: int) -> Iterator[Values]:
    """Yields the layouts over `ranks` ranks, some of them illegal: the rules of recipe/ decide.

    Tensor groups stay within a node, context groups have some thousand tokens for each rank.
    """
    nodes, longest = recipe.cluster.gpus_per_node, longest_sequence(recipe)
    experts = architecture.experts.count if architecture.experts else 1
    for tensor in divisors(gcd(ranks, nodes)):
        for pipeline in divisors(ranks // tensor):
            for context in divisors(ranks // tensor // pipeline):
                if pipeline > architecture.layers or context > max(1, longest // CONTEXT_TOKENS_MIN):
                    continue
                data = ranks // tensor // pipeline // context
                sizes = [
                    (expert, cut)
                    for cut in sorted({1, tensor})
                    for expert in divisors(experts)
                    if tensor * context * data % (expert * cut) == 0
                ]
                # The default of expert_tensor equals tensor: a model without experts has it.
                for expert, expert_tensor in sizes if experts > 1 else [(1, None)]:
                    for chunks in CHUNKS if pipeline > 1 else (1,):
                        yield {
                            "train.layout.tensor": tensor,
                            "train.layout.pipeline": pipeline,
                            "train.layout.virtual_pipeline": chunks,
                            "train.layout.first_stage_layers": None,
                            "train.layout.last_stage_layers": _last_stage(architecture.layers, pipeline, chunks),
                            "train.layout.context": context,
                            "train.layout.expert": expert,
                            "train.layout.expert_tensor": expert_tensor,
                            "train.layout.data": data,
                        }


def _last_stage(layers: int, pipeline: int, chunks: int) -> int | None:
    """Returns the last stage's layers where stages cannot be equal and it can be the shortest; otherwise None."""
    pieces = layers // chunks
    if pipeline == 1 or layers % chunks or pieces % pipeline == 0:
        return None
    last = pieces - -(-pieces // pipeline) * (pipeline - 1)
    return last * chunks if last > 0 else None


def savings(recipe: AnyRecipe, architecture: Architecture, layout: Values) -> list[Values]:
    """Returns ways to trade time for memory in a layout, the most sparing first."""
    context, pieces = layout["train.layout.context"], layout["train.layout.pipeline"]
    pieces *= layout["train.layout.virtual_pipeline"]
    ways = recomputes(recipe, architecture, architecture.layers // pieces)
    longest = longest_sequence(recipe)
    multiple = 1 if context == 1 else 2 * context
    least = -(-longest // multiple) * multiple // context
    given = recipe.train.tokens_per_microbatch
    lengths = sorted({least, 2 * least, 4 * least} | ({given} if given >= least else set()))
    return [
        {
            "train.tokens_per_microbatch": tokens,
            "train.logprob_tokens_per_microbatch": None,
            "train.recompute": recompute,
            "train.offload": parts,
        }
        for parts in offloads(recipe)
        for tokens in lengths
        for recompute in reversed(ways)
    ]


def recomputes(recipe: AnyRecipe, architecture: Architecture, layers: int) -> list[str | RecomputeConfig]:
    """Returns choices from nothing to all layers: modules that take little time for what they save, and half of a model
    chunk's `layers`. Attention's core is not among them: fused attention keeps next to nothing of it."""
    found: list[str | RecomputeConfig] = ["none"]
    cheap: list[RecomputeModule] = []
    if architecture.latent is not None:
        cheap += ["mla_up_proj"]
    case = Case(recipe, architecture, machines_of(recipe, Assumptions()))
    if architecture.experts is not None and case.fused_layers:
        cheap += ["moe_act"]
    if architecture.has_dense_layers:
        cheap += ["mlp"]
    if cheap:
        found.append(RecomputeConfig(modules=cheap))
    if layers > 1:
        found.append(RecomputeConfig(layers=layers // 2))
    return [*found, "full"]


def offloads(recipe: AnyRecipe) -> list[list[str]]:
    """Returns all parts of the recipe that can leave the devices while engines use them, and an empty choice."""
    if not isinstance(recipe, Recipe) or not recipe.rollout.kind.started_by_us:
        return [[]]
    algorithm, parts = recipe.algorithm, ["parameters", "gradients", "optimizer"]
    parts += ["reference"] if algorithm.kl.coefficient > 0 else []
    parts += ["critic"] if algorithm.critic is not None else []
    return [parts, []]


def engines(recipe: AnyRecipe, architecture: Architecture, gpus: int, *, colocated: bool) -> list[Values]:
    """Returns engines on all of the devices that they can have, for each size of an engine; the smallest first.

    Beside ranks they give their memory back in turns, and take a part of it only.
    """
    if isinstance(recipe, SftRecipe) or not recipe.rollout.kind.started_by_us:
        return [{}]
    if not recipe.rollout.kind.splits:
        return [{"rollout.engines": gpus}]
    shares: list[Values] = [{}]
    if colocated:
        shares = [
            {f"{SGLANG}.enable_memory_saver": True, f"{SGLANG}.mem_fraction_static": share} for share in MEMORY_SHARES
        ]
    per_node, layout = recipe.cluster.gpus_per_node, "rollout.layout"
    sizes = [
        {f"{layout}.tensor": tensor, f"{layout}.expert": expert, f"{layout}.attention_data": 1, f"{layout}.pipeline": 1}
        for tensor in divisors(per_node)
        for expert in (sorted({1, tensor}) if architecture.experts else (1,))
    ]
    if 2 * total_parameters(architecture) / per_node > NODE_ENGINE_BYTES:
        # Ranks of a node share the attention; experts are dealt out over all nodes, other models' layers.
        for nodes in ENGINE_NODES:
            tensor = per_node * nodes if architecture.experts else per_node
            groups = nodes if tensor > per_node and architecture.family in CUTS_ATTENTION_IN_GROUPS else 1
            own = {"expert": tensor if architecture.experts else 1, "attention_data": groups}
            own |= {"tensor": tensor, "pipeline": per_node * nodes // tensor}
            sizes.append({f"{layout}.{name}": size for name, size in own.items()})
    return [
        {**own, "rollout.engines": gpus // ranks, **share}
        for own in sizes
        if gpus % (ranks := own[f"{layout}.tensor"] * own[f"{layout}.pipeline"]) == 0
        for share in shares
    ]


def engine_gpus(recipe: AnyRecipe, gpus: int) -> list[int]:
    """Returns the numbers of GPUs, out of `gpus`, that engines of their own may have: in whole nodes, if several."""
    if not isinstance(recipe, Recipe) or not recipe.rollout.kind.started_by_us:
        return []
    per_node = recipe.cluster.gpus_per_node if gpus > recipe.cluster.gpus_per_node else 1
    sizes = {gpus * part // whole // per_node * per_node for part, whole in ENGINE_SHARES}
    return sorted(size for size in sizes if 0 < size < gpus)


def placed(values: Values, *, colocated: bool) -> Values:
    """Returns the values with the placement, and without those that only the other placement has."""
    placement = {"cluster.placement": "colocated" if colocated else "disaggregated", "cluster.engine_devices": None}
    if colocated:
        return {**values, **placement}
    kept = {path: value for path, value in values.items() if not path.startswith(SGLANG)}
    return {**kept, **placement, "train.offload": []}


# --- values of recipe fields -----------------------------------------------------------------------------------------


def changed(recipe: AnyRecipe, values: Values) -> AnyRecipe:
    """Returns the recipe with other values in some fields. Each is legal by itself; rules are not checked."""
    return _updated(recipe, tree_of(values))


def _updated(section: Kind, tree: Mapping[str, Any]) -> Kind:
    """Returns the section with these values: the section itself if it has them already."""
    update = {}
    for key, value in tree.items():
        old: Any = getattr(section, key, None)
        new = _updated(old, value) if isinstance(value, dict) else value
        if new is not old and new != old:
            update[key] = new
    return section.model_copy(update=update) if update else section


def value_at(recipe: AnyRecipe, path: str) -> Any:
    """Returns the recipe's own value of a field; None for an argument of SGLang that is not given."""
    value: Any = recipe
    for key in path.split("."):
        value = getattr(value, key, None)
    return value


def value_text(value: Any) -> str:
    if isinstance(value, RecomputeConfig):
        given = value.model_dump(exclude_defaults=True).items()
        return f"{{{', '.join(f'{key}: {value_text(each)}' for key, each in given)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)
