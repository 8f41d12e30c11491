"""train: the training ranks; and the rules about them that every kind of recipe has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from megagrpo.algorithm.optimizer import OptimizerConfig
from megagrpo.layout.parallel import ParallelLayout, padded_length
from megagrpo.section import Count, NonNegativeInt, PositiveFloat, PositiveInt, Rules, Section, Tokens, each_once

if TYPE_CHECKING:
    from megagrpo.recipe.schema import AnyRecipe

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

    @property
    def ranks(self) -> int:
        """Returns the number of all training ranks."""
        return self.parallel().ranks

    def _impossible(self, *, of_experts: bool) -> Iterator[dict[str, object]]:
        """Yields the problems of ranks of experts, or those of stages of layers."""
        layout = self.parallel()
        for reason in layout.problems() if self.ranks <= RANKS_MAX else ():
            field, *_ = reason.split()
            if (field == "expert") == of_experts:
                default = "" if self.expert_tensor else " (the default: as tensor)"
                fix = "virtual_pipeline: 1" if field == "virtual_pipeline" else "remove it"
                values = {"field": field, "value": getattr(layout, field), "ranks": layout.expert_tensor}
                yield {**values, "reason": reason, "default": default, "fix": fix}

    RULES: ClassVar[Rules[LayoutConfig]] = {
        "too_many_ranks": lambda layout: layout.ranks > RANKS_MAX,
        "ranks_of_experts": lambda layout: layout._impossible(of_experts=True),
        "stages_of_layers": lambda layout: layout._impossible(of_experts=False),
    }


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

    RULES: ClassVar[Rules[LoraConfig]] = {"named_twice": each_once("targets")}


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
    """Number of layers that are recomputed whole: the first of each pipeline stage, or with virtual_pipeline of each of
    its chunks."""

    RULES: ClassVar[Rules[RecomputeConfig]] = {
        "named_twice": each_once("modules"),
        "recompute_of_nothing": lambda again: not again.modules and again.layers is None,
        "recompute_modules_and_layers": lambda again: again.modules and again.layers is not None,
        "recompute_within_moe": lambda again: (
            "moe" in again.modules
            and (within := sorted({"moe_act", "shared_experts"} & {*again.modules}))
            and {"within": " and ".join(within)}
        ),
    }


class ProfileConfig(Section):
    """Steps that are profiled: a timeline of the whole step, and the computations of chosen training ranks."""

    steps: Annotated[list[PositiveInt], Field(min_length=1, max_length=100)]
    """Steps to profile; the first is 1."""

    ranks: list[NonNegativeInt] = [0]
    """Training ranks that record with torch's profiler."""

    memory: bool = False
    """Also a snapshot of the CUDA memory of these ranks, with where each block was allocated."""

    RULES: ClassVar[Rules[ProfileConfig]] = {"named_twice": each_once("steps", "ranks")}


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

    quantization: Literal["same_as_rollout"] | None = None
    """same_as_rollout: passes of the policy compute, in the model's dtype, with the values of the blocks that quantised
    engines hold (rollout.quantization), bit for bit. Gradients go to the weights themselves, as if nothing had been
    rounded. The reference and a critic stay as they are. Takes a copy of the weights during these passes."""

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
    def lengths(self) -> list[str]:
        """Returns the fields that give the length of the run."""
        names = ("total_steps", "total_epochs", "total_episodes")
        return [name for name in names if getattr(self, name) is not None]

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

    RULES: ClassVar[Rules[TrainConfig]] = {
        "named_twice": each_once("offload", "overlap"),
        "profile_of_other_ranks": lambda t: (
            t.profile
            and (beyond := [rank for rank in t.profile.ranks if rank >= t.layout.ranks])
            and {"beyond": beyond}
        ),
        "warmup_longer_than_the_run": lambda t: t.total_steps is not None and t.optimizer.warmup_steps > t.total_steps,
        "logprob_tokens_of_whole_microbatches": lambda t: (
            (tokens := t.logprob_tokens_per_microbatch) is not None
            and (tokens % t.tokens_per_microbatch or tokens == t.tokens_per_microbatch)
            and {"multiple": max(2, tokens // t.tokens_per_microbatch) * t.tokens_per_microbatch}
        ),
        "bfloat16_moments_without_distributed_optimizer": lambda t: (
            t.optimizer.moment_dtype == "bfloat16" and not t.distributed_optimizer
        ),
        "overlap_of_parameters_alone": lambda t: "parameters" in t.overlap and "gradients" not in t.overlap,
        "overlap_without_distributed_optimizer": lambda t: "parameters" in t.overlap and not t.distributed_optimizer,
        "muon_on_adapters": lambda t: t.lora is not None and t.optimizer.kind == "muon",
        "adapters_on_fused_layers": lambda t: t.lora is not None and t.layer_spec == "transformer_engine",
        "quantization_with_adapters": lambda t: t.quantization is not None and t.lora is not None,
        "quantization_of_overlapped_parameters": lambda t: t.quantization is not None and "parameters" in t.overlap,
        "moe_act_with_adapters": lambda t: t.lora is not None and "moe_act" in t.recomputed.modules,
        "moe_act_of_local_layers": lambda t: (
            t.lora is None and t.layer_spec == "local" and "moe_act" in t.recomputed.modules
        ),
    }


def too_long(train: TrainConfig, longest: int) -> Iterator[dict[str, object]]:
    """Yields a problem's values unless a microbatch holds sequences of `longest` tokens."""
    context = train.layout.context
    padded = padded_length(longest, context)
    if train.tokens_per_microbatch * context < padded:
        padding = f", padded to {padded} for context ranks" if padded > longest else ""
        yield {"padding": padding, "least": -(-padded // context)}


TRAINING_RULES: Rules[AnyRecipe] = {
    "fused_layers_on_cpus": lambda r: r.cluster.device == "cpu" and r.train.layer_spec == "transformer_engine",
    "moments_on_cpus": lambda r: r.cluster.device == "cpu" and r.train.optimizer.moment_dtype == "bfloat16",
    "moe_act_on_cpus": lambda r: r.cluster.device == "cpu" and "moe_act" in r.train.recomputed.modules,
    "gradients_beside_float32": lambda r: r.train.gradient_dtype == "bfloat16" and r.model.dtype == "float32",
    "moments_beside_float32": lambda r: r.train.optimizer.moment_dtype == "bfloat16" and r.model.dtype == "float32",
    "deterministic_mode_off": lambda r: r.deterministic and r.train.megatron.get("deterministic_mode") is False,
}
"""Rules of every kind of recipe about its training ranks."""
