"""train: the training ranks; and the rules about them that every kind of recipe has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from megagrpo.algorithm.optimizer import OptimizerConfig
from megagrpo.errors import Problem
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.schema.run import ClusterConfig
from megagrpo.section import Count, NonNegativeInt, PositiveFloat, PositiveInt, Section, Tokens

RANKS_MAX = 2**17
ALL_LAYERS = 2**31

RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
COMPILED: frozenset[RecomputeModule] = frozenset({"layernorm", "mla_up_proj", "moe_act"})
"""Modules for which Megatron compiles a function in C++ on CUDA."""


class LayoutConfig(Section):
    """The split of the policy over ranks: tensor x pipeline x context x data ranks in all."""

    tensor: Count = 1
    """Ranks that share each matrix. Sequence parallelism comes with it."""

    pipeline: Count = 1
    """Stages of consecutive layers."""

    virtual_pipeline: Count = 1
    """Model chunks per stage; more than 1 interleaves them and shrinks the pipeline bubble."""

    first_stage_layers: PositiveInt | None = None
    """Layers of the first stage, where it should have more or fewer than the others."""

    last_stage_layers: PositiveInt | None = None
    """Layers of the last stage, which also has the output layer. 61 layers over 16 stages: 1, and 4 on each other."""

    context: Count = 1
    """Ranks that share each sequence."""

    expert: Count = 1
    """Ranks that share the experts of a layer."""

    expert_tensor: Count | None = None
    """Ranks that share each expert's matrices; the default is the same as tensor."""

    data: Count = 1
    """Replicas that each train on their part of the batch."""

    def parallel(self) -> ParallelLayout:
        return ParallelLayout(**{**vars(self), "expert_tensor": self.expert_tensor or self.tensor})

    def rules(self) -> Iterator[Problem]:
        layout = self.parallel()
        if layout.ranks > RANKS_MAX:
            yield Problem("tensor", f"{layout.ranks:,} ranks in all", f"at most {RANKS_MAX:,}", "lower one of the axes")
            return
        for text in layout.problems():
            field = text.split()[0]
            default = "" if self.expert_tensor else " (the default: as tensor)"
            given = f"expert {layout.expert} x expert_tensor {layout.expert_tensor}{default}"
            fix = "lower expert or expert_tensor, or raise data"
            if field != "expert":  # virtual_pipeline, or the length of a stage
                given = f"{field} {getattr(layout, field)} with pipeline {layout.pipeline}"
                fix = "virtual_pipeline: 1" if field == "virtual_pipeline" else "remove it"
            yield Problem(field, given=given, needed=text, fix=fix)


class LoraConfig(Section):
    """Low-rank adapters (arXiv:2106.09685) in place of all weights. Engines get the weights with them added."""

    rank: Count = 16
    """Inner size r of every adapter."""

    alpha: PositiveFloat = 32.0
    """An adapter adds alpha / rank x B A."""

    targets: Annotated[
        list[Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]], Field(min_length=1)
    ] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Matrices that have one, by their names in Hugging Face models; of every expert, too."""

    def rules(self) -> Iterator[Problem]:
        yield from once_each("targets", self.targets)


@dataclass(frozen=True)
class Recomputed:
    """The parts that a backward pass recomputes: modules of every layer, or the first `layers` of a model chunk."""

    modules: frozenset[RecomputeModule] = frozenset()
    layers: int = 0


NOTHING_AGAIN = Recomputed()


class RecomputeConfig(Section):
    """Parts to recompute in the backward pass, to save memory. Megatron-Core takes modules or layers, not both."""

    modules: list[RecomputeModule] = []
    """Parts of every layer: core_attn (attention's core), layernorm (norms that are not fused with a product),
    mla_up_proj (latent attention's up projections), mlp (of layers without experts), moe (all of a layer's experts),
    moe_act (only their activation function; transformer_engine), shared_experts."""

    layers: PositiveInt | None = None
    """Whole layers: the first so many of each pipeline stage, or of each of its chunks with virtual_pipeline."""

    def rules(self) -> Iterator[Problem]:
        yield from once_each("modules", self.modules)
        if bool(self.modules) == (self.layers is not None):
            given = f"modules {', '.join(self.modules) or 'none'} and layers {self.layers or 'none'}"
            needed = "modules or layers: Megatron-Core computes parts of all layers again, or some layers whole"
            yield Problem("modules", given, needed, "keep one of them, or recompute: none")
        if "moe" in self.modules and (within := sorted({"moe_act", "shared_experts"} & set(self.modules))):
            needed = "moe alone: it computes all of the experts again"
            yield Problem("modules", f"moe and {', '.join(within)}", needed, f"remove {' and '.join(within)}")


class ProfileConfig(Section):
    """Steps that are profiled: a timeline of the whole step, and the computations of chosen training ranks."""

    steps: Annotated[list[PositiveInt], Field(min_length=1, max_length=100)]
    """Steps to profile; the first is 1."""

    ranks: list[NonNegativeInt] = [0]
    """Training ranks that record with torch's profiler."""

    memory: bool = False
    """Also a snapshot of the CUDA memory of these ranks, with where each block was allocated."""

    def rules(self) -> Iterator[Problem]:
        yield from once_each("steps", [str(step) for step in self.steps])
        yield from once_each("ranks", [str(rank) for rank in self.ranks])


class TrainConfig(Section):
    """The training ranks."""

    layout: LayoutConfig = LayoutConfig()
    """Parallel sizes."""

    total_steps: PositiveInt | None = None
    """Length of the run in steps. Give exactly one of total_steps, total_epochs, total_episodes."""

    total_epochs: PositiveInt | None = None
    """Length of the run in passes over the data."""

    total_episodes: PositiveInt | None = None
    """Length of the run in responses, prompts_per_step x samples_per_prompt of them in each step. What dynamic sampling
    samples besides is not counted."""

    tokens_per_microbatch: Tokens = 8192
    """Tokens packed into one forward pass, per context rank. Must hold the longest prompt plus response."""

    logprob_tokens_per_microbatch: Tokens | None = None
    """The same in passes without gradients: old and reference logprobs, a critic's values. They keep no activations, so
    more fit. A multiple of tokens_per_microbatch; the same unless given. Numbers change by rounding only."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Adam or Muon, and the learning rate's schedule."""

    lora: LoraConfig | None = None
    """Train low-rank adapters only. Off unless given."""

    distributed_optimizer: bool = True
    """Split optimizer states over the data ranks."""

    overlap: list[Literal["gradients", "parameters"]] = []
    """Exchanges among data ranks that go on beside passes: gradients are summed bucket by bucket while the last
    microbatch's backward pass goes on; parameters of an optimizer step are gathered in the next minibatch's forward
    pass. Numbers do not change."""

    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the buffers of gradients, in which microbatches and data ranks are summed. bfloat16 takes half of the
    memory and of the exchange, and rounds each sum; it needs bfloat16 weights."""

    recompute: Literal["none", "selective", "full"] | RecomputeConfig = "none"
    """Activations recomputed in the backward pass: none, selective (the attention core), full (all layers), or some."""

    layer_spec: Literal["auto", "local", "transformer_engine"] = "auto"
    """Megatron's layers: transformer_engine's fused ones, or its local ones. auto: the former where Transformer Engine
    is installed and has fused attention on the card (docs/gpu.md), without adapters."""

    offload: list[Literal["parameters", "gradients", "optimizer", "reference", "critic"]] = []
    """Parts moved to host memory while they are not needed. Numbers do not change. Colocated placement only, but for
    the reference, which is away during updates as well."""

    profile: ProfileConfig | None = None
    """Steps to look at in a profiler (docs/profiling.md). Off unless given."""

    megatron: dict[str, Any] = {}
    """Any other field of Megatron's TransformerConfig, checked against the installed version."""

    @property
    def recomputed(self) -> Recomputed:
        """Returns the parts that `recompute` stands for."""
        match self.recompute:
            case "none":
                return NOTHING_AGAIN
            case "selective":
                return Recomputed(frozenset({"core_attn"}))
            case "full":
                return Recomputed(layers=ALL_LAYERS)
        return Recomputed(frozenset(self.recompute.modules), self.recompute.layers or 0)

    def rules(self) -> Iterator[Problem]:
        yield from once_each("offload", self.offload)
        beyond = [rank for rank in self.profile.ranks if rank >= self.layout.parallel().ranks] if self.profile else []
        if beyond:
            needed = f"training ranks, of which the layout has {self.layout.parallel().ranks}, from 0"
            yield Problem("profile.ranks", ", ".join(map(str, beyond)), needed, "profile: {steps: [5], ranks: [0]}")
        steps, trained, tokens = self.total_steps, self.tokens_per_microbatch, self.logprob_tokens_per_microbatch
        if steps is not None and self.optimizer.warmup_steps > steps:
            given = f"{self.optimizer.warmup_steps} of {steps} steps in all"
            yield Problem("optimizer.warmup_steps", given, "at most train.total_steps", "lower it")
        if tokens is not None and (tokens % trained or tokens == trained):
            needed = f"a multiple of {trained}: whole microbatches pass together"
            fix = f"{max(2, tokens // trained) * trained}, or remove it"
            yield Problem("logprob_tokens_per_microbatch", f"{tokens}, and {trained} with gradients", needed, fix)
        yield from once_each("overlap", self.overlap)
        if self.optimizer.moment_dtype == "bfloat16" and not self.distributed_optimizer:
            needed = "the distributed optimizer: Megatron's other ones have float32 moments"
            given = "bfloat16 with distributed_optimizer: false"
            yield Problem("optimizer.moment_dtype", given, needed, "distributed_optimizer: true")
        if "parameters" in self.overlap and not (self.distributed_optimizer and "gradients" in self.overlap):
            given = "parameters" + ("" if self.distributed_optimizer else " with distributed_optimizer: false")
            needed = "the distributed optimizer, which gathers them, and gradients in the list"
            yield Problem("overlap", given, needed, "overlap: [gradients, parameters], distributed_optimizer: true")
        if self.lora is not None and self.optimizer.kind == "muon":
            needed = "adam: Muon is for whole matrices, not for the two thin factors of an adapter"
            yield Problem("optimizer.kind", "muon with train.lora", needed, "kind: adam, or remove lora")
        if self.lora is not None and self.layer_spec == "transformer_engine":
            needed = "Megatron's local layers: adapters are on their linear layers"
            yield Problem("layer_spec", "transformer_engine with train.lora", needed, "layer_spec: auto")
        if "moe_act" in self.recomputed.modules and (self.layer_spec == "local" or self.lora is not None):
            given = "moe_act with " + ("train.lora" if self.lora is not None else "layer_spec: local")
            needed = "transformer_engine's grouped experts, or another module"
            yield Problem("recompute.modules", given, needed, "moe in its place")


def once_each(field: str, names: Sequence[str]) -> Iterator[Problem]:
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        yield Problem(field, f"{', '.join(repeated)} more than once", "each name once", fix="remove the others")


def length_rules(train: TrainConfig, names: tuple[str, ...], example: str) -> Iterator[Problem]:
    """Yields a problem unless exactly one of the fields `names` gives the length of the run."""
    given = [name for name in names if getattr(train, name) is not None]
    if len(given) != 1:
        needed = f"exactly one of {', '.join(names)}"
        fix = "keep one of them" if given else example
        yield Problem(f"train.{(given or names)[0]}", " and ".join(given) or "no length of the run", needed, fix)


def longest_rules(
    train: TrainConfig, longest: int, *, described: str, what: str, limits: tuple[str, ...]
) -> Iterator[Problem]:
    """Yields a problem unless a microbatch holds sequences of `longest` tokens, which the fields `limits` allow."""
    context = train.layout.context
    multiple = 1 if context == 1 else 2 * context  # context ranks each take two equal pieces of a sequence
    padded = -(-longest // multiple) * multiple
    if train.tokens_per_microbatch * context < padded:
        given = f"{train.tokens_per_microbatch} tokens x {context} context ranks, and {described}"
        given += f", padded to {padded} for context ranks" if padded > longest else ""
        needed = f"at least {-(-padded // context)}, to hold the longest {what}"
        yield Problem("train.tokens_per_microbatch", given, needed, f"raise it, or lower {' or '.join(limits)}")


def deterministic_rules(train: TrainConfig) -> Iterator[Problem]:
    """Yields the problems of a deterministic recipe."""
    if train.megatron.get("deterministic_mode") is False:
        given, needed = "false in a recipe that is deterministic", "nothing: deterministic at the top sets it"
        yield Problem("train.megatron.deterministic_mode", given, needed, "remove one of them")


def dtype_rules(train: TrainConfig, dtype: str) -> Iterator[Problem]:
    """Yields problems of bfloat16 gradients or moments beside float32 weights. `dtype` is model.dtype."""
    if train.gradient_dtype == "bfloat16" and dtype == "float32":
        needed = "float32, as the weights: Megatron's buffers are in one or the other"
        yield Problem("train.gradient_dtype", "bfloat16 with model.dtype: float32", needed, "remove it")
    if train.optimizer.moment_dtype == "bfloat16" and dtype == "float32":
        needed = "bfloat16 weights, of which the optimizer keeps float32 ones"
        yield Problem("train.optimizer.moment_dtype", "bfloat16 with model.dtype: float32", needed, "remove it")


def device_rules(train: TrainConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.device == "cpu" and train.layer_spec == "transformer_engine":
        needed = "local or auto: Transformer Engine runs on CUDA only"
        yield Problem("train.layer_spec", "transformer_engine with cluster.device: cpu", needed, "layer_spec: auto")
    if cluster.device == "cpu" and train.optimizer.moment_dtype == "bfloat16":
        needed = "float32: transformer_engine's Adam runs on CUDA only"
        yield Problem("train.optimizer.moment_dtype", "bfloat16 with cluster.device: cpu", needed, "remove it")
    if cluster.device == "cpu" and "moe_act" in train.recomputed.modules:
        needed = "transformer_engine's grouped experts, which run on CUDA only"
        yield Problem("train.recompute.modules", "moe_act with cluster.device: cpu", needed, "moe in its place")
