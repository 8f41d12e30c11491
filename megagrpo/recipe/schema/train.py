"""train: the training ranks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class LayoutConfig(Section):
    """How the policy is split over ranks: tensor x pipeline x context x data ranks in all."""

    tensor: PositiveInt = 1
    """Ranks that share each matrix. Sequence parallelism comes with it."""

    pipeline: PositiveInt = 1
    """Stages of consecutive layers."""

    virtual_pipeline: PositiveInt = 1
    """Model chunks per stage; more than 1 interleaves them and shrinks the pipeline bubble."""

    first_stage_layers: PositiveInt | None = None
    """Layers of the first stage, where it should have more or fewer than the others."""

    last_stage_layers: PositiveInt | None = None
    """Layers of the last stage, which also has the output layer. 61 layers over 16 stages: 1, and 4 on each other."""

    context: PositiveInt = 1
    """Ranks that share each sequence."""

    expert: PositiveInt = 1
    """Ranks that share the experts of a layer."""

    expert_tensor: PositiveInt | None = None
    """Ranks that share each expert's matrices; the default is the same as tensor."""

    data: PositiveInt = 1
    """Replicas that each train on their part of the batch."""

    def parallel(self) -> ParallelLayout:
        sizes = self.model_dump()
        sizes["expert_tensor"] = self.expert_tensor or self.tensor
        return ParallelLayout(**sizes)


class OptimizerConfig(Section):
    """Adam with decoupled weight decay."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""

    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of a linear or cosine schedule."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, over the whole run."""

    warmup_steps: NonNegativeInt = 0
    """Steps of linear increase from 0."""

    weight_decay: NonNegativeFloat = 0.0
    """Decay of the matrices; norms and biases have none."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""

    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 does not clip."""


class LoraConfig(Section):
    """Low-rank adapters (arXiv:2106.09685) in place of all weights. Engines get the weights with them added."""

    rank: PositiveInt = 16
    """Inner size r of every adapter."""

    alpha: PositiveFloat = 32.0
    """An adapter adds alpha / rank x B A."""

    targets: Annotated[
        list[Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]], Field(min_length=1)
    ] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Matrices that have one, by their names in Hugging Face models; of every expert, too."""


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

    tokens_per_microbatch: PositiveInt = 8192
    """Tokens packed into one forward pass, per context rank. Must hold the longest prompt plus response."""

    logprob_tokens_per_microbatch: PositiveInt | None = None
    """The same in passes without gradients: old and reference logprobs, a critic's values. They keep no activations, so
    more fit. A multiple of tokens_per_microbatch; the same unless given. Numbers change by rounding only."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Adam and its schedule."""

    lora: LoraConfig | None = None
    """Train low-rank adapters only. Off unless given."""

    distributed_optimizer: bool = True
    """Split optimizer states over the data ranks."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass: none, the attention core, or whole layers."""

    layer_spec: Literal["auto", "local", "transformer_engine"] = "auto"
    """Megatron's layers: transformer_engine's fused ones, or its local ones. auto: the former where they can run."""

    offload: list[Literal["parameters", "gradients", "optimizer", "reference", "critic"]] = []
    """Parts moved to host memory while they are not needed. Numbers do not change. Colocated placement only."""

    megatron: dict[str, Any] = {}
    """Any other field of Megatron's TransformerConfig, checked against the installed version."""
