"""Rules between the recipe and the model's architecture: sizes that divide others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from megagrpo.errors import Problem, listed
from megagrpo.layout.parallel import ParallelLayout, layers_of_chunk, stage_problems
from megagrpo.recipe.schema import AnyRecipe, SftRecipe
from megagrpo.recipe.schema.train import ALL_LAYERS
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.megatron_rank import divided_sizes

POSITIONS = "at most {}, the model's max_position_embeddings"


def model_problems(recipe: AnyRecipe, architecture: Architecture) -> list[Problem]:
    """Returns a problem for every rule that the recipe breaks for this model; `where` is a dotted path.

    Any tensor size fits the vocabulary: its rows are padded up to a multiple of it (Architecture.padded_vocab).
    """
    return [
        *_pipeline(recipe, architecture),
        *_divided(recipe, architecture),
        *_experts(recipe, architecture),
        *_adapters(recipe, architecture),
        *_muon(recipe, architecture),
        *_recomputed(recipe, architecture),
        *token_problems(recipe, architecture),
    ]


def critic_problems(recipe: AnyRecipe, critic: Architecture) -> list[Problem]:
    """Returns the problems with the model of algorithm.critic.path, which never has adapters."""
    whole = recipe.train.model_copy(update={"lora": None})
    return model_problems(recipe.model_copy(update={"train": whole}), critic)


def _pipeline(recipe: AnyRecipe, architecture: Architecture) -> Iterator[Problem]:
    layout, layers = recipe.train.layout.parallel(), architecture.layers
    if layout.problems() or not (problems := stage_problems(layers, layout)):  # the former are rules of LayoutConfig
        return
    chunks = f" x virtual_pipeline {layout.virtual_pipeline}" if layout.virtual_pipeline > 1 else ""
    lengths = dict(layout.stage_lengths())
    given = f"pipeline {layout.pipeline}{chunks}{''.join(f', {name} {length}' for name, length in lengths.items())}"
    needed = f"the same number of layers in each of the {layout.pipeline * layout.virtual_pipeline} pieces"
    if lengths:
        field, needed = next(iter(lengths)), "; ".join(problems)
        fix = _uneven(layers, layout) or ("virtual_pipeline: 1" if layout.virtual_pipeline > 1 else "fewer stages")
    elif layers % layout.pipeline:
        uneven = _uneven(layers, layout)
        field, fix = "pipeline", f"pipeline of {either(divisors(layers))}{f'; or {uneven}' if uneven else ''}"
    else:
        field, fix = "virtual_pipeline", f"virtual_pipeline of {either(divisors(layers // layout.pipeline))}"
    yield Problem(f"train.layout.{field}", f"{given}, and the model has {layers} layers", needed, fix)


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


def _divided(recipe: AnyRecipe, architecture: Architecture) -> Iterator[Problem]:
    layout, groups = recipe.train.layout.parallel(), architecture.query_groups
    ranks = {"tensor": layout.tensor, "expert": layout.expert, "expert_tensor": layout.expert_tensor}
    divided = divided_sizes(architecture)
    broken = [(axis, name, size) for axis, name, size in divided if size % ranks[axis]]
    repeated = groups % layout.tensor and layout.tensor % groups
    if not broken and not repeated:
        return
    fitting = [
        tensor
        for tensor in divisors(architecture.heads)
        if all(size % tensor == 0 for axis, _, size in divided if axis == "tensor")
        and (groups % tensor == 0 or tensor % groups == 0)
    ]
    fixes = {"tensor": f"tensor of {either(fitting)}", "expert_tensor": "expert_tensor: 1, with expert above 1"}
    if architecture.experts is not None:
        fixes["expert"] = f"expert of {either(divisors(architecture.experts.count))}"
    for axis, name, size in broken:
        given = f"{ranks[axis]}, and the model has {size} {name}"
        yield Problem(f"train.layout.{axis}", given, f"a size that divides {size}", fixes[axis])
    if repeated:
        given = f"{layout.tensor}, and the model has {groups} query groups (num_key_value_heads)"
        needed = f"a size that divides {groups}, or a multiple of it (the groups are then held more than once)"
        yield Problem("train.layout.tensor", given, needed, fixes["tensor"])


def _experts(recipe: AnyRecipe, architecture: Architecture) -> Iterator[Problem]:
    layout = recipe.train.layout
    if architecture.experts is None:
        if layout.expert > 1:
            given = f"{layout.expert}, and the model ({architecture.family}) has no experts"
            yield Problem("train.layout.expert", given, "1", "expert: 1, and train.layout.data to use more ranks")
        if layout.expert_tensor not in (None, layout.tensor):
            given = f"{layout.expert_tensor}, and the model ({architecture.family}) has no experts"
            yield Problem("train.layout.expert_tensor", given, "nothing", "remove it")
    elif layout.expert == 1 and layout.expert_tensor not in (None, layout.tensor) and recipe.train.lora is None:
        # Megatron then sums the experts' gradients over the ranks that share dense weights, silently (tensor_parallel/
        # layers.py: allreduce). Adapters are marked by lora.py.
        given = f"{layout.expert_tensor} with expert 1 and tensor {layout.tensor}"
        needed = "the same as tensor where expert is 1: Megatron sums the experts' gradients over the wrong ranks"
        yield Problem("train.layout.expert_tensor", given, needed, "remove it, or raise expert")


def _adapters(recipe: AnyRecipe, architecture: Architecture) -> Iterator[Problem]:
    if recipe.train.lora is None:
        return
    if architecture.latent is not None:
        given = f"adapters on {architecture.family}, which has latent attention"
        needed = "a model with q_proj, k_proj and v_proj"
        yield Problem("train.lora", given, needed, "remove train.lora, or choose another model")
        return
    most = max(architecture.hidden, architecture.ffn, architecture.heads * architecture.head_dim)
    if recipe.train.lora.rank > most:
        given, needed = str(recipe.train.lora.rank), f"at most {most}, the longest side of the model's matrices"
        yield Problem("train.lora.rank", given, needed, "a rank of 8 to 64 is usual")
    layout = recipe.train.layout.parallel()
    if architecture.experts is not None and layout.expert_tensor > 1:
        default = "" if recipe.train.layout.expert_tensor else " (the default: as tensor)"
        given = f"{layout.expert_tensor}{default} with train.lora"
        fix = "expert_tensor: 1, and train.layout.expert to share the experts"
        yield Problem("train.layout.expert_tensor", given, "1: adapters are on whole experts", fix)


def _muon(recipe: AnyRecipe, architecture: Architecture) -> Iterator[Problem]:
    """Yields Muon's problems: tensor ranks without whole query groups, which Megatron-Core needs to separate q, k and
    v; and no data ranks to deal matrices out to."""
    if recipe.train.optimizer.kind != "muon":
        return
    layout, groups = recipe.train.layout.parallel(), architecture.query_groups
    if architecture.latent is None and layout.tensor > groups:
        given = f"{layout.tensor} with train.optimizer.kind: muon, and the model has {groups} query groups"
        fix = f"tensor of {either(divisors(groups))}, or train.optimizer.kind: adam"
        yield Problem("train.layout.tensor", given, f"at most {groups}: q, k and v are orthogonalised apart", fix)
    shared = layout.data * layout.context == 1 and architecture.experts is not None and layout.expert_data > 1
    if recipe.train.distributed_optimizer and shared:
        given = f"1 data rank, and {layout.expert_data} ranks with the same experts, with train.optimizer.kind: muon"
        needed = "as many of both: Megatron-Core deals no matrices out to these ranks, and each would train its own"
        yield Problem("train.layout", given, needed, "distributed_optimizer: false, or expert_tensor as tensor")


def _recomputed(recipe: AnyRecipe, architecture: Architecture) -> Iterator[Problem]:
    """Yields problems of recomputed modules that the model lacks, and of more layers than a stage has."""
    recomputed, layout, experts = recipe.train.recomputed, recipe.train.layout.parallel(), architecture.experts
    sparse = 0 if experts is None else architecture.layers - experts.dense_layers
    missing = {
        "mla_up_proj": "latent attention" if architecture.latent is None else "",
        "mlp": "" if architecture.has_dense_layers else "a layer without experts",
        "moe": "" if sparse else "experts",
        "moe_act": "" if sparse else "experts",
        "shared_experts": "" if experts and experts.shared_ffn else "shared experts",
    }
    for module in sorted(recomputed.modules):
        if what := missing.get(module):
            given = f"{module}, and the model ({architecture.family}) does not have {what}"
            yield Problem("train.recompute.modules", given, "modules of this model", f"remove {module}")
    if not 0 < recomputed.layers < ALL_LAYERS or layout.problems() or stage_problems(architecture.layers, layout):
        return
    chunks = product(range(layout.pipeline), range(layout.virtual_pipeline))
    longest = max(len(layers_of_chunk(architecture.layers, layout, *chunk)) for chunk in chunks)
    if recomputed.layers > longest:
        where = "chunk of a stage" if layout.virtual_pipeline > 1 else "stage"
        given = f"{recomputed.layers}, and the longest {where} has {longest} layers"
        yield Problem("train.recompute.layers", given, f"at most {longest}", "recompute: full")


def token_problems(recipe: AnyRecipe, architecture: Architecture) -> Iterator[Problem]:
    """Yields problems of examples, or prompts and responses, longer than the model takes, and of stop tokens that it
    lacks."""
    most = architecture.max_positions
    if isinstance(recipe, SftRecipe):
        if recipe.data.tokens_max > most:
            yield Problem("data.tokens_max", f"{recipe.data.tokens_max}", POSITIONS.format(most), "lower it")
        return
    prompt = recipe.data.prompt_tokens_max
    lengths = {"rollout": recipe.rollout.response_tokens_max}
    for name, held_out in recipe.eval.of_sets().items():
        if held_out.response_tokens_max is not None:
            of_set = recipe.eval.sets[name].response_tokens_max is not None
            lengths[f"eval.sets.{name}" if of_set else "eval"] = held_out.response_tokens_max
    for section, response in lengths.items():
        if prompt + response > most:
            given = f"prompt + response of up to {prompt} + {response} = {prompt + response} tokens"
            fix = f"lower {section}.response_tokens_max or data.prompt_tokens_max"
            yield Problem(f"{section}.response_tokens_max", given, POSITIONS.format(most), fix)
    if recipe.agent and recipe.sequence_tokens_max > most:
        yield Problem("agent.tokens_max", f"{recipe.sequence_tokens_max}", POSITIONS.format(most), "lower it")
    if outside := [token for token in recipe.rollout.stop_token_ids if token >= architecture.vocab]:
        needed = f"token ids below {architecture.vocab}, the size of the vocabulary"
        yield Problem("rollout.stop_token_ids", ", ".join(map(str, outside)), needed, "remove them")


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def either(sizes: list[int]) -> str:
    """Returns `1, 2 or 4`, without the larger ones of a long list."""
    return listed(sizes[:6], "or")
