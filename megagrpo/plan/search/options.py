"""What a search chooses from: parallel sizes, ways to save memory, and engines, as values of recipe fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from megagrpo.recipe.model_checks import divisors
from megagrpo.recipe.schema import AnyRecipe, Recipe, Section, SftRecipe
from megagrpo.weights.families.architecture import Architecture

Kind = TypeVar("Kind", bound=Section)
Values = Mapping[str, Any]
"""Values of recipe fields by their paths, such as train.layout.tensor."""

CHUNKS = (1, 2, 4)
CONTEXT_TOKENS_MIN = 4096
ENGINE_SHARES = ((1, 4), (1, 2), (3, 4))
OFFLOAD = ("parameters", "gradients", "optimizer", "reference", "critic")
SGLANG = "rollout.sglang"
SHARES = (0.5, 0.65, 0.8)
RECOMPUTE = ("none", "selective", "full")


def layouts(recipe: AnyRecipe, architecture: Architecture, ranks: int) -> Iterator[Values]:
    """Ways to split the model over `ranks` ranks, some of them illegal: the rules of recipe/ say which.

    Tensor groups stay within a node, context groups have some thousand tokens for each rank.
    """
    nodes, longest = recipe.cluster.gpus_per_node, longest_sequence(recipe)
    experts = architecture.experts.count if architecture.experts else 1
    for tensor in _dividing(ranks, min(nodes, architecture.heads)):
        if nodes % tensor:
            continue
        for pipeline in _dividing(ranks // tensor, architecture.layers):
            for context in _dividing(ranks // tensor // pipeline, max(1, longest // CONTEXT_TOKENS_MIN)):
                data = ranks // tensor // pipeline // context
                for expert, expert_tensor in _expert_sizes(experts, tensor, tensor * context * data):
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
                            "cluster.trainer_devices": None,
                        }


def _dividing(number: int, most: int) -> list[int]:
    return [size for size in divisors(number) if size <= most]


def _expert_sizes(experts: int, tensor: int, group: int) -> Iterator[tuple[int, int | None]]:
    """Sizes of expert and expert_tensor; None is the default, as tensor, which a model without experts has."""
    if experts == 1:
        yield 1, None
        return
    for expert_tensor in sorted({1, tensor}):
        for expert in divisors(experts):
            if group % (expert * expert_tensor) == 0:
                yield expert, expert_tensor


def _last_stage(layers: int, pipeline: int, chunks: int) -> int | None:
    """The length of the last stage where stages cannot be equal and it can be the shortest; otherwise None."""
    pieces = layers // chunks
    if pipeline == 1 or layers % chunks or pieces % pipeline == 0:
        return None
    last = pieces - -(-pieces // pipeline) * (pipeline - 1)
    return last * chunks if last > 0 else None


def savings(recipe: AnyRecipe, context: int) -> list[Values]:
    """Ways to trade time for memory, the most sparing first."""
    longest = longest_sequence(recipe)
    multiple = 1 if context == 1 else 2 * context
    least = -(-longest // multiple) * multiple // context
    given = recipe.train.tokens_per_microbatch
    lengths = sorted({least, 2 * least, 4 * least} | ({given} if given >= least else set()))
    offload = [list(_offload(recipe)), []] if _shares_devices(recipe) else [[]]
    return [
        {
            "train.tokens_per_microbatch": tokens,
            "train.logprob_tokens_per_microbatch": None,
            "train.recompute": recompute,
            "train.offload": parts,
        }
        for parts in offload
        for tokens in lengths
        for recompute in reversed(RECOMPUTE)
    ]


def _offload(recipe: AnyRecipe) -> Iterator[str]:
    """Every part that the recipe has and that can be away."""
    for part in OFFLOAD:
        if part == "reference" and (isinstance(recipe, SftRecipe) or recipe.algorithm.kl.coefficient == 0):
            continue
        if part == "critic" and (isinstance(recipe, SftRecipe) or recipe.algorithm.critic is None):
            continue
        yield part


def _shares_devices(recipe: AnyRecipe) -> bool:
    return isinstance(recipe, Recipe) and recipe.rollout.engine != "external"


def engines(recipe: AnyRecipe, architecture: Architecture, gpus: int, *, colocated: bool) -> list[Values]:
    """Engines on all of the devices that they can have, for each size of an engine; the smallest first.

    Beside ranks they give their memory back in turns, and take a part of it only.
    """
    if isinstance(recipe, SftRecipe) or recipe.rollout.engine == "external":
        return [{}]
    if recipe.rollout.engine == "transformers":
        return [{"rollout.engines": gpus}]
    sizes = [size for size in divisors(recipe.cluster.gpus_per_node) if gpus % size == 0]
    shares: list[Values] = [{}]
    if colocated:
        shares = [{f"{SGLANG}.enable_memory_saver": True, f"{SGLANG}.mem_fraction_static": share} for share in SHARES]
    return [
        {"rollout.layout.tensor": tensor, "rollout.layout.expert": expert, "rollout.engines": gpus // tensor, **share}
        for tensor in sizes
        for expert in (sorted({1, tensor}) if architecture.experts else (1,))
        for share in shares
    ]


def engine_gpus(recipe: AnyRecipe, gpus: int) -> list[int]:
    """Numbers of GPUs that engines of their own may have, out of `gpus`: whole nodes where there are several."""
    if not _shares_devices(recipe):
        return []
    per_node = recipe.cluster.gpus_per_node if gpus > recipe.cluster.gpus_per_node else 1
    sizes = {gpus * part // whole // per_node * per_node for part, whole in ENGINE_SHARES}
    return sorted(size for size in sizes if 0 < size < gpus)


def placed(values: Values, *, colocated: bool) -> Values:
    """With the placement, and without what only the other one has."""
    placement = {"cluster.placement": "colocated" if colocated else "disaggregated", "cluster.engine_devices": None}
    if colocated:
        return {**values, **placement}
    kept = {path: value for path, value in values.items() if not path.startswith(SGLANG)}
    return {**kept, **placement, "train.offload": []}


def longest_sequence(recipe: AnyRecipe) -> int:
    if isinstance(recipe, SftRecipe):
        return recipe.data.tokens_max
    return recipe.data.prompt_tokens_max + recipe.rollout.response_tokens_max


def changed(recipe: AnyRecipe, values: Values) -> AnyRecipe:
    """The recipe with other values in some of its fields. They are legal by themselves; rules are not checked."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, _, field = path.rpartition(".")
        sections.setdefault(section, {})[field] = value
    for section in sorted(sections, key=lambda path: path.count("."), reverse=True):
        recipe = _replaced(recipe, section.split("."), sections[section])
    return recipe


def _replaced(section: Kind, path: list[str], update: dict[str, Any]) -> Kind:
    if not path:
        return section.model_copy(update=update)
    inner = _replaced(getattr(section, path[0]), path[1:], update)
    return section.model_copy(update={path[0]: inner})


def overrides(recipe: AnyRecipe, values: Values) -> tuple[str, ...]:
    """The values that are not the recipe's own, ready for a command line."""
    return tuple(f"{path}={_text(value)}" for path, value in values.items() if value != value_at(recipe, path))


def value_at(recipe: AnyRecipe, path: str) -> Any:
    """The recipe's own value of a field; None for an argument of SGLang that is not given."""
    value: Any = recipe
    for key in path.split("."):
        value = getattr(value, key, None)
    return value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)
