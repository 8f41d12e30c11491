"""The values of a recipe's open fields: data type, directories, number of steps, devices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megagrpo.algorithm.policy_losses import OwnLossConfig
from megagrpo.errors import Problem
from megagrpo.layout.parallel import padded_length
from megagrpo.recipe.schema import AnyRecipe, ClassifierConfig, Recipe, RewardConfig, SftRecipe, TrainConfig
from megagrpo.recipe.schema.teachers import RanksTeacherConfig
from megagrpo.section import Section, changed, problem

if TYPE_CHECKING:
    from megagrpo.routes import RouteSizes
    from megagrpo.weights.families.architecture import Architecture

CPU_CACHE_TOKENS = 65536
SectionOf = TypeVar("SectionOf", bound=Section)


def dtype_name(recipe: AnyRecipe, device: str) -> str:
    """Returns float32 or bfloat16: the type of weights and activations, in ranks and engines alike."""
    if recipe.model.dtype != "auto":
        return recipe.model.dtype
    return "bfloat16" if device == "cuda" else "float32"


def train_config(recipe: AnyRecipe) -> TrainConfig:
    """Returns recipe.train, with the options of Megatron that `deterministic` sets."""
    train = recipe.train
    if not recipe.deterministic:
        return train
    return train.model_copy(update={"megatron": {**train.megatron, "deterministic_mode": True}})


def recipe_for_teacher(recipe: Recipe, teacher: str) -> Recipe:
    """Returns the recipe as a teacher on the ranks passes over a step: with prompts as long as it reads, in its layout,
    and with the same sequences in a microbatch."""
    train, config, longest = recipe.train, recipe.teachers[teacher], recipe.taught_tokens_max
    layout = config.layout if isinstance(config, RanksTeacherConfig) and config.layout else train.layout
    if not recipe.teachers_read_more and layout.parallel() == train.layout.parallel():
        return recipe
    prompt = recipe.data.prompt_tokens_max + longest - recipe.sequence_tokens_max
    values: dict[str, Any] = {"data.prompt_tokens_max": prompt, "train.layout": layout}
    for key in ("tokens_per_microbatch", "logprob_tokens_per_microbatch"):
        if (tokens := getattr(train, key)) is not None:
            whole = -(-tokens * train.layout.context * longest // recipe.sequence_tokens_max)
            values[f"train.{key}"] = padded_length(whole, layout.context) // layout.context
    return changed(recipe, values)


def frozen_config(train: TrainConfig, arch: Architecture) -> TrainConfig:
    """Returns the settings of a model that is not trained. Experts' sizes are 1 without any."""
    alone = {} if arch.experts else {"expert": 1, "expert_tensor": None}
    changes = {"lora": None, "recompute": "none", "layout": train.layout.model_copy(update=alone)}
    return train.model_copy(update=changes | {"optimizer": train.optimizer.model_copy(update={"kind": "adam"})})


def replayed_routes(recipe: Recipe, arch: Architecture) -> RouteSizes | None:
    """Returns the sizes of the routes that engines send and training ranks replay; None if they do not."""
    return arch.route_sizes if replays_routes(recipe) else None


def replays_routes(recipe: Recipe) -> bool:
    """Returns whether routes are replayed if the model has experts."""
    return recipe.algorithm.routing != "own" and recipe.rollout.kind.returns_routes(recipe.rollout)


def kept_ids(recipe: Recipe, arch: Architecture) -> int:
    """Returns the most ids of a token's kept set; 0 if tokens are drawn from the whole vocabulary."""
    return min(recipe.rollout.top_k or arch.vocab, arch.vocab) if recipe.rollout.narrowing else 0


def same_bits(recipe: Recipe) -> bool:
    """Returns whether the trainer computes logprobs through weights with the bits that engines hold."""
    return recipe.rollout.quantization is None or recipe.train.quantization is not None


def device_here(recipe: AnyRecipe) -> str:
    """Returns cpu or cuda, for a run on this machine alone."""
    if recipe.cluster.device != "auto":
        return recipe.cluster.device
    import torch  # takes a second

    return "cuda" if torch.cuda.is_available() else "cpu"


def with_absolute_directories(recipe: Recipe) -> Recipe:
    """Returns the same recipe for processes with another working directory."""

    def absolute(section: SectionOf, field: str) -> SectionOf:
        path = getattr(section, field)
        return section if path is None else section.model_copy(update={field: str(Path(path).absolute())})

    algorithm, reward = recipe.algorithm, recipe.reward
    if isinstance(algorithm.loss, OwnLossConfig):
        algorithm = algorithm.model_copy(update={"loss": absolute(algorithm.loss, "name")})
    classifiers = {
        name: absolute(model, "chat_template")
        for name, model in reward.models.items()
        if isinstance(model, ClassifierConfig)
    }
    reward = reward.model_copy(update={"models": {**reward.models, **classifiers}})
    track, weights = absolute(recipe.track, "directory"), absolute(recipe.weights, "directory")
    return recipe.model_copy(update={"algorithm": algorithm, "reward": reward, "track": track, "weights": weights})


def run_directory(recipe: AnyRecipe) -> Path:
    return Path(recipe.track.directory) / recipe.name


def checkpoint_directory(recipe: AnyRecipe) -> Path:
    return Path(recipe.checkpoint.directory) if recipe.checkpoint.directory else run_directory(recipe) / "checkpoints"


def export_directory(recipe: AnyRecipe) -> Path:
    """Returns the directory of the final Hugging Face model."""
    return run_directory(recipe) / "hugging_face"


def adapter_directory(recipe: AnyRecipe) -> Path:
    """Returns the directory of the final adapter of a run with train.lora, as PEFT's files."""
    return run_directory(recipe) / "adapter"


def sync_directory(recipe: Recipe) -> Path:
    """Returns the directory through which weights reach engines with weights.transfer: disk."""
    return (
        Path(recipe.weights.directory) / recipe.name if recipe.weights.directory else run_directory(recipe) / "weights"
    )


def own_rewards(recipe: Recipe) -> dict[str, RewardConfig]:
    """Returns the rewards of the evaluation sets with functions of their own, by set."""
    return {
        name: recipe.reward.model_copy(
            update={"functions": held_out.functions, "by_source": {}, "solved_at": held_out.solved_at}
        )
        for name, held_out in recipe.eval.sets.items()
        if held_out.functions
    }


def total_steps(recipe: AnyRecipe, rows: int) -> int:
    """Returns the number of steps of the run, rounded up; `rows` counts the prompts, or examples, of one epoch."""
    train = recipe.train
    if train.total_steps is not None:
        return train.total_steps
    if train.total_epochs is not None:
        return math.ceil(train.total_epochs * rows / _rows_per_step(recipe))
    if not isinstance(recipe, SftRecipe) and train.total_episodes is not None:
        return math.ceil(train.total_episodes / (_rows_per_step(recipe) * recipe.rollout.samples_per_prompt))
    raise ValueError("total_steps, total_epochs or total_episodes is given: the rules of recipe/ check that")


def _rows_per_step(recipe: AnyRecipe) -> int:
    return recipe.data.examples_per_step if isinstance(recipe, SftRecipe) else recipe.rollout.prompts_per_step


def prompts_of_round(wanted: int, useful: float, sampled: int) -> int:
    """Returns the number of prompts that dynamic sampling takes next, at most `wanted`: enough for the missing groups
    with signal, if these stay as frequent as so far.

    wanted: groups of a step; useful: groups with signal so far, among `sampled` groups.
    """
    return wanted if useful == 0 else min(wanted, math.ceil((wanted - useful) * sampled / useful))


def cpu_cache_tokens(requests: int, longest: int) -> int:
    """Returns the tokens that an SGLang server on CPUs caches for `requests` requests of `longest` tokens. The server's
    default is all memory."""
    return max(min(requests * longest, CPU_CACHE_TOKENS), 2 * longest)


@dataclass(frozen=True)
class DevicePlan:
    """The bundle of every training rank, and the bundles of every engine. Colocated ones share bundles and take turns.

    An engine has one bundle for each of its ranks, side by side; none if the run does not start it. They are on
    `engine_nodes` nodes, equally many on each, with a server process for each node.
    """

    resource: str  # "GPU" or "CPU": what one device is to Ray
    bundles: int
    bundle_of_rank: tuple[int, ...]
    bundles_of_engine: tuple[tuple[int, ...], ...]
    rank_share: float  # of a device
    engine_share: float  # of its first device on each node, where its actor runs
    engine_nodes: int = 1
    bundles_of_model: tuple[tuple[int, ...], ...] = ()
    """Bundles of each of models_beside, side by side on one node; none for one without devices of its own."""

    def node_bundles(self, engine: int) -> tuple[tuple[int, ...], ...]:
        """Returns the bundles of an engine by node; none for an external engine."""
        bundles = self.bundles_of_engine[engine]
        per_node = len(bundles) // self.engine_nodes
        return tuple(bundles[first : first + per_node] for first in range(0, len(bundles), per_node)) if bundles else ()


def plan_engines(recipe: AnyRecipe, device: str) -> DevicePlan:
    """Plans engines and reward models without ranks, each on as many devices as beside ranks; at least one device."""
    whole = plan_devices(recipe, device)
    used = sorted({*chain(*whole.bundles_of_engine, *whole.bundles_of_model)})
    of_engine, of_model = (
        tuple(tuple(map(used.index, bundles)) for bundles in of_all)
        for of_all in (whole.bundles_of_engine, whole.bundles_of_model)
    )
    share = whole.engine_share * (2 if recipe.cluster.placement == "colocated" else 1)
    return DevicePlan(whole.resource, len(used) or 1, (), of_engine, 1.0, share, whole.engine_nodes, of_model)


def plan_devices(recipe: AnyRecipe, device: str, *, engines_too: bool = True) -> DevicePlan:
    """Plans ranks on the first devices in rank order. Engines, if `engines_too`, share them (colocated) or follow on
    devices of their own; devices of models_beside are the last."""
    ranks = recipe.train.layout.parallel().ranks
    resource, of_rank = "GPU" if device == "cuda" else "CPU", tuple(range(ranks))
    if isinstance(recipe, SftRecipe) or not engines_too:
        return DevicePlan(resource, ranks, of_rank, (), 1.0, 0.0)
    engines, per_engine = recipe.rollout.engines, recipe.rollout.devices_of_engine
    bundles, rank_share, engine_share = ranks, 1.0, 0.0
    of_engine: tuple[tuple[int, ...], ...] = ((),) * engines
    if per_engine:
        first, devices = ranks, recipe.cluster.engine_devices or engines * per_engine
        if recipe.cluster.placement == "colocated":
            first, devices, rank_share = 0, ranks, 0.5
        bundles, blocks = max(ranks, first + devices), max(1, devices // per_engine)
        of_engine = _blocks(engines, blocks, per_engine, first)
        engine_share = rank_share / -(-engines // blocks)
    ends = list(accumulate((model.devices for model in recipe.models_beside.values()), initial=bundles))
    of_models = tuple(tuple(range(*pair)) for pair in pairwise(ends))
    nodes = recipe.nodes_of_engine if per_engine else 1
    return DevicePlan(resource, ends[-1], of_rank, of_engine, rank_share, engine_share, nodes, of_models)


def maps_gpu_memory(recipe: AnyRecipe) -> bool:
    """Returns whether engines map memory of training ranks by CUDA IPC, or may do so with transfer: auto."""
    if not isinstance(recipe, Recipe):
        return False
    if recipe.transfer != "auto":
        return recipe.transfer in ("shared_memory", "two_hops")
    on_one_node = plan_devices(recipe, "cuda").bundles <= recipe.cluster.gpus_per_node
    return on_one_node or recipe.cluster.placement == "colocated"


def allocator_problem(recipe: AnyRecipe, environment: Mapping[str, str]) -> Problem | None:
    """Returns a problem if torch's allocator has expandable segments where engines map the memory of training ranks.

    An engine can open such memory only by pidfd_getfd, which containers and hosts with Yama refuse between processes
    that are not each other's children. SGLang's memory saver refuses it, too.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if re.search(r"expandable_segments\s*:\s*True", given := environment.get(name, "")) and maps_gpu_memory(recipe):
            return problem("expandable_segments", name=name, given=given)
    return None


@lru_cache(maxsize=256)
def _blocks(engines: int, blocks: int, each: int, first: int) -> tuple[tuple[int, ...], ...]:
    """Deals engines out evenly over `blocks` runs of `each` devices, at most ceil(engines / blocks) on each."""
    starts = [first + i * blocks // engines * each for i in range(engines)]
    return tuple(tuple(range(start, start + each)) for start in starts)
