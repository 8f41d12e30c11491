"""The subject of a plan: a recipe and its model on machines, whose GPUs are known by their makers' data sheets, with a
map of the devices: each one's rank coordinates and engines, and the groups of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property

from megagrpo.errors import Problem, RecipeError
from megagrpo.layout.parallel import ParallelLayout, RankCoordinates, rank_grid
from megagrpo.plan.assumptions import Assumptions, Lengths, lengths_of, longest_sequence, minibatch_sequences
from megagrpo.recipe.defaults import DevicePlan, dtype_name, plan_devices, recipe_for_teacher, train_config
from megagrpo.recipe.kernels import Attention, Capability, Installed, Layers, attention_of, layers_on
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.section import changed, table_beside
from megagrpo.weights.boxes import ITEM_BYTES
from megagrpo.weights.families.architecture import Architecture


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. `flops` are dense bfloat16 matrix products a second, at the data sheet's best.

    `memory_bytes` is what its driver reports as total. `node_bytes_per_second` is to the other GPUs of a node, in each
    direction: NVLink, or PCIe where there is none.
    """

    name: str
    memory_bytes: int
    flops: float
    memory_bytes_per_second: float
    node_bytes_per_second: float
    capability: Capability
    source: str


@dataclass(frozen=True)
class Machines:
    """Nodes that are all alike. `network_bytes_per_second` is of each GPU's share of its node's links, each way."""

    gpu: Gpu
    gpus_per_node: int
    network_bytes_per_second: float


def _gpu(name: str, gib: float, teraflops: float, memory_gb: float, node_gb: float, sm: int, source: str) -> Gpu:
    """Returns a GPU. `memory_gb` and `node_gb` are 10^9 bytes a second, `sm` is 90 for compute capability 9.0."""
    memory, sheet = int(gib * 2**30), f"NVIDIA {source}"
    return Gpu(name, memory, teraflops * 1e12, memory_gb * 1e9, node_gb * 1e9, divmod(sm, 10), sheet)


GPUS: Mapping[str, Gpu] = {name: _gpu(name, *row) for name, row in table_beside(__file__, "gpus.yaml").items()}
A_CPU = Machines(
    Gpu("CPU", 16 * 2**30, 1e11, 2e10, 5e9, (0, 0), "placeholders, for calibration by a run to scale"), 8, 1e9
)
"""CPUs: seconds on them mean nothing until a run has calibrated them."""


def gpu(name: str) -> Gpu:
    """Returns the kind of GPU of that name. Raises RecipeError with the nearest known name if it is unknown."""
    if name in GPUS:
        return GPUS[name]
    by_lower = {known.lower(): known for known in GPUS}
    written = name.lower().replace(" ", "-")
    longer = sorted((known for known in by_lower if written in known), key=len)  # A100, 4090
    near = longer or get_close_matches(written, by_lower, n=1, cutoff=0.8)
    fix = f"did you mean {by_lower[near[0]]}?" if near else ""
    raise RecipeError(Problem("cluster.gpu", name, f"one of {', '.join(GPUS)}", fix))


def machines_of(recipe: AnyRecipe, assumptions: Assumptions) -> Machines | None:
    """Returns the cluster's machines: A_CPU on CPUs, None without cluster.gpu. Raises RecipeError like `gpu`."""
    cluster = recipe.cluster
    known = gpu(cluster.gpu) if cluster.gpu is not None else None
    if cluster.device == "cpu":
        return A_CPU
    return Machines(known, cluster.gpus_per_node, assumptions.network_bytes_per_second) if known else None


@dataclass(frozen=True)
class MappedDevice:
    """One device. `gpu` counts within its node. `rank` is None on a device of engines alone."""

    device: int
    node: int
    gpu: int
    rank: RankCoordinates | None
    engines: tuple[int, ...]
    engine_rank: int | None  # rank in these engines; None without engines
    model: str | None = None  # its path in the recipe, such as reward.models.NAME; None on other devices

    @property
    def stage(self) -> int:
        """Returns the pipeline stage of its rank; -1 without a rank."""
        return -1 if self.rank is None else self.rank.pipeline


@dataclass(frozen=True)
class Axis:
    """A dimension of the layout. Its groups have `size` ranks, `stride` apart; `example` is the group of rank 0, and
    `nodes` counts the nodes of the widest group."""

    name: str
    size: int
    stride: int
    example: tuple[int, ...]
    nodes: int


def axes_of(layout: ParallelLayout) -> dict[str, tuple[int, int]]:
    """Returns the ranks of one group along each axis, and the distance from one to the next (layout/parallel.py)."""
    return {
        "tensor": (layout.tensor, 1),
        "context": (layout.context, layout.tensor),
        "data": (layout.data, layout.tensor * layout.context),
        "pipeline": (layout.pipeline, layout.ranks // layout.pipeline),
        "expert_tensor": (layout.expert_tensor, 1),
        "expert": (layout.expert, layout.expert_tensor),
        "expert_data": (layout.expert_data, layout.expert_tensor * layout.expert),
    }


@dataclass(frozen=True)
class Case:
    """A recipe whose rules hold, with all other inputs of an estimate.

    `machines` are A_CPU on CPUs, and None for GPUs of an unknown kind. `critic` is the model of algorithm.critic.path,
    if it is another than the policy's. `teachers` are those of kind ranks, by their names.
    """

    recipe: AnyRecipe
    architecture: Architecture
    machines: Machines | None
    assumptions: Assumptions = field(default_factory=Assumptions)
    critic: Architecture | None = None
    teachers: Mapping[str, Architecture] = field(default_factory=dict)

    @cached_property
    def device(self) -> str:
        """Returns cuda or cpu."""
        return "cpu" if self.machines == A_CPU else "cuda"

    @property
    def grpo(self) -> Recipe:
        """Returns the recipe, if it is one of GRPO. Raises TypeError otherwise."""
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"{self.recipe.name} is of kind {self.recipe.kind}")
        return self.recipe

    @property
    def models_beside(self) -> tuple[str, ...]:
        """Returns the paths of models with devices of their own in the recipe: reward.models.NAME, teachers.NAME."""
        return tuple(self.recipe.models_beside) if isinstance(self.recipe, Recipe) else ()

    @property
    def speeds(self) -> Machines:
        """Returns the machines, or placeholders if they are unknown."""
        return self.machines or A_CPU

    @property
    def gpus(self) -> Machines | None:
        """Returns the machines if they have GPUs of a known kind, else None."""
        return self.machines if self.device == "cuda" else None

    @property
    def card_bytes(self) -> int | None:
        """Returns a GPU's memory in bytes if its kind is known, else None."""
        return self.gpus.gpu.memory_bytes if self.gpus else None

    @cached_property
    def fused_layers(self) -> bool:
        """Returns whether ranks have transformer-engine's layers. On GPUs, `layer_spec: auto` assumes
        transformer-engine without flash-attn, whatever is installed here; GPUs of an unknown kind count as H100s."""
        train = self.recipe.train
        if self.device != "cuda" or train.layer_spec != "auto" or train.lora is not None:
            return train.layer_spec == "transformer_engine"
        return self.auto_is_fused

    @property
    def auto_is_fused(self) -> bool:
        """Returns whether transformer-engine's layers have a fused attention on these GPUs."""
        return self.auto_layers.spec == "transformer_engine"

    @property
    def card(self) -> Capability:
        return self.gpus.gpu.capability if self.gpus else GPUS["H100"].capability

    @cached_property
    def demands(self) -> Attention:
        """Returns the demands of the model's attention and the recipe's options on kernels."""
        return attention_of(self.architecture, train_config(self.recipe), half=self.item_bytes == 2)

    @cached_property
    def auto_layers(self) -> Layers:
        """Returns the layers that `layer_spec: auto` takes, adapters aside."""
        return layers_on(self.card, Installed(transformer_engine=True), self.demands)

    @property
    def item_bytes(self) -> int:
        """Returns the bytes of a weight or an activation: 2 or 4."""
        return ITEM_BYTES[dtype_name(self.recipe, self.device)]

    @cached_property
    def layout(self) -> ParallelLayout:
        return self.recipe.train.layout.parallel()

    @property
    def rank_sequences(self) -> int:
        """Returns the sequences of a data rank in a minibatch."""
        return -(-minibatch_sequences(self.recipe) // self.layout.data)

    @property
    def rank_tokens(self) -> int:
        """Returns the tokens of a rank in a minibatch."""
        return -(-self.rank_sequences * longest_sequence(self.recipe) // self.layout.context)

    @cached_property
    def device_plan(self) -> DevicePlan:
        return plan_devices(self.recipe, self.device)

    @cached_property
    def lengths(self) -> Lengths:
        return lengths_of(self.recipe, self.assumptions)

    @cached_property
    def teacher_cases(self) -> Mapping[str, Case]:
        """Returns the case as each teacher on the ranks passes over it, by `recipe_for_teacher`: with its model in the
        policy's place. Only the reference has adapters."""
        cases = dict[str, Case]()
        for name in self.recipe.teachers_on_ranks if isinstance(self.recipe, Recipe) else ():
            read, added = recipe_for_teacher(self.grpo, name), self.grpo.taught_tokens_max - longest_sequence(self.grpo)
            prompt = self.lengths.prompt + self.assumptions.prompt_share * added
            own = replace(self, recipe=read, assumptions=replace(self.assumptions, prompt_tokens=prompt))
            if (arch := self.teachers.get(name)) is not None:
                own = replace(own, recipe=changed(read, {"train.lora": None}), architecture=arch)
            cases[name] = own
        return cases

    @cached_property
    def device_map(self) -> tuple[MappedDevice, ...]:
        """Returns every device of the device plan, in order."""
        plan, per_node = self.device_plan, self.recipe.cluster.gpus_per_node
        ranks = dict(zip(plan.bundle_of_rank, rank_grid(self.layout), strict=True))
        engines: dict[int, list[int]] = {}
        engine_rank: dict[int, int] = {}
        for engine, bundles in enumerate(plan.bundles_of_engine):
            for position, bundle in enumerate(bundles):
                engines.setdefault(bundle, []).append(engine)
                engine_rank[bundle] = position
        of_models = zip(self.models_beside, plan.bundles_of_model, strict=True)
        models = {at: where for where, bundles in of_models for at in bundles}
        devices = []
        for at in range(plan.bundles):
            of_engines = tuple(engines.get(at, ())), engine_rank.get(at)
            devices.append(MappedDevice(at, *divmod(at, per_node), ranks.get(at), *of_engines, models.get(at)))
        return tuple(devices)

    @cached_property
    def axes(self) -> list[Axis]:
        """Returns every axis of more than one rank; expert axes only for models with experts."""
        ranks, per_node, shared = self.layout.ranks, self.recipe.cluster.gpus_per_node, []
        for name, (size, stride) in axes_of(self.layout).items():
            if size > 1 and (self.architecture.experts or not name.startswith("expert")):
                # Groups that begin at the same place of a node touch as many nodes.
                blocks = range(0, ranks, size * stride)
                starts = {(first + offset) % per_node for first in blocks for offset in range(stride)}
                nodes = max(len({(start + rank * stride) // per_node for rank in range(size)}) for start in starts)
                shared.append(Axis(name, size, stride, tuple(range(0, size * stride, stride)), nodes))
        return shared
