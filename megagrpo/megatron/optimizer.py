"""Gradient buffers and Adam: Megatron's data-parallel wrapper and its plain or distributed optimizer."""

from __future__ import annotations

import warnings

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from megagrpo.recipe import schema

# Megatron looks for a gradient on the views that the distributed optimizer updates.
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf", module="megatron")


def wrap_chunks(
    chunks: list[GPTModel], config: TransformerConfig, distributed_optimizer: bool
) -> list[DistributedDataParallel]:
    """Each model chunk with gradient buffers: float32 whatever the weights' type, summed over data and context ranks.

    Sums, not means: calculate_per_token_loss makes Megatron scale neither dense nor expert gradients, and the loss has
    its global denominators already. Weights move into the wrapper's buffers: tensors taken from parameters earlier are
    no longer the weights.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, check_for_nan_in_grad=False
    )
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            if buffer.gradient_scaling_factor != 1.0:
                raise ValueError(f"gradients would be scaled by {buffer.gradient_scaling_factor}; the loss needs sums")
    return wrapped


def make_optimizer(
    wrapped: list[DistributedDataParallel],
    settings: schema.OptimizerConfig,
    distributed_optimizer: bool,
    dtype: torch.dtype,
) -> MegatronOptimizer:
    """Adam with decoupled weight decay, with transformer-engine's or apex's fused kernels where Megatron finds them.

    bfloat16 weights get float32 main weights. `set_learning_rate` before every step.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.epsilon,
        clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed_optimizer,
    )
    return get_megatron_optimizer(config, wrapped)


def set_learning_rate(optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> None:
    """Rate and decay of the next step. Megatron marks norms and biases with wd_mult = 0; the caller has to obey it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
        group["weight_decay"] = weight_decay * group["wd_mult"]
