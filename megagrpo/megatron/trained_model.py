"""A model that this rank trains, with its gradient buffers, optimizer and reference: the policy, or a critic."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer, tag_params_for_buffer_routing
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagrpo.errors import DIVERGED_FIX, Problem, RankError
from megagrpo.layout.parallel import RankCoordinates
from megagrpo.megatron import model, state
from megagrpo.megatron.batch import Batch, Packed, ResponseTokens, TokenTensors
from megagrpo.megatron.config import transformer_config
from megagrpo.megatron.lora import Adapters
from megagrpo.megatron.offload import Offload
from megagrpo.megatron.snapshot import Snapshot
from megagrpo.megatron.state import TrainingState, parameters_of
from megagrpo.recipe.schema import LoraConfig, TrainConfig
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC, TE_SPEC
from megagrpo.weights.views import box_view

LARGEST = 2.0**42
"""The product of three larger numbers, as in an MLP, overflows float32: such a weight counts as infinite."""


class TrainedModel:
    def __init__(
        self,
        architecture: Architecture,
        train: TrainConfig,
        where: RankCoordinates,
        directory: str | Path,
        dtype: torch.dtype,
        device: str,
        adapters: LoraConfig | None = None,
        seed: int = 0,
    ) -> None:
        """Builds this rank's part and loads its weights from a Hugging Face directory. Collective over all ranks.

        With `adapters`, which begin from `seed`, only these are trained and the weights stay as they are.
        Raises ModelError or RecipeError.
        """
        self.architecture = architecture
        self.layout = train.layout.parallel()
        self.where = where
        self._dtype_name = str(dtype).removeprefix("torch.")
        self._settings, self._overlap, self._offloaded = train.optimizer, train.overlap, train.offload
        config = transformer_config(architecture, train, dtype, device)
        self._side = TE_SPEC if config.transformer_impl == "transformer_engine" else LOCAL_SPEC
        models = model.build_chunks(architecture, config, self.layout)
        load_files(directory, self.manifest(), model.named_tensors(models), architecture)
        self.adapters = Adapters(models, architecture, self.manifest(), adapters, seed) if adapters else None
        model.sum_gradients(config)
        self.chunks = wrap_chunks(models, config, train)
        self.optimizer = make_optimizer(self.chunks, train, dtype)
        self._skipped_in_a_row = 0
        self.reference: Reference | None = None
        self.offload = Offload(self.chunks, self.optimizer)
        trained, held = tensors_of(architecture), self.manifest()
        if self.adapters:
            trained, held = self.adapters.checkpoint_tensors, self.adapters.manifest
        self._state = TrainingState(self.chunks, self.optimizer, trained, self.layout, held, kind=train.optimizer.kind)
        self.snapshot = Snapshot()

    def manifest(self) -> Manifest:
        """Returns this rank's part of the model, in coordinates of the Hugging Face checkpoint."""
        return self._side.manifest(self.architecture, self.layout, self.where, self._dtype_name)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the storages of `manifest`: the weights themselves; merged copies where there are adapters."""
        self.offload.require(["parameters"])
        weights = model.named_tensors(self.chunks)
        return self.adapters.merged(weights) if self.adapters else weights

    def broken(self) -> dict[str, str]:
        """Returns a description of each weight or adapter that is not finite, by its name in checkpoints."""
        self.offload.require(["parameters"])
        broken = broken_weights(self.manifest, model.named_tensors(self.chunks))
        if adapters := self.adapters:
            broken |= broken_weights(lambda: adapters.manifest, adapters.tensors())
        return broken

    @property
    def trained_adapters(self) -> Adapters:
        """Returns the adapters. Raises RankError if the weights themselves are trained."""
        if self.adapters is None:
            raise RankError(Problem("adapters", "none", "a recipe with train.lora"))
        return self.adapters

    def read_tokens(self, batch: Batch, read: Callable[[Tensor, ResponseTokens], Tensor]) -> TokenTensors:
        """Runs a pass over the batch without gradients, as model.read_tokens."""
        self.offload.require(["parameters"])
        return model.read_tokens(self.chunks, batch, read)

    def zero_gradients(self) -> None:
        self.offload.require(["parameters", "gradients", "optimizer"])
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def compute_gradients(self, microbatches: Sequence[Packed], loss: model.Loss) -> None:
        """Computes gradients of the sum of the microbatches' losses in the chunks' buffers, over all ranks, unclipped.

        A loss that is not finite makes all of them NaN, also where its own gradient is a number.
        """

        def finite_or_nan(index: int, output: Tensor) -> Tensor:
            value = loss(index, output)
            return value * (value.detach() * 0 + 1)  # exactly 1 for every number: no wait for the device

        self.zero_gradients()
        model.forward_backward(self.chunks, microbatches, finite_or_nan)

    def optimizer_step(self, lr: float, *, more: bool = False) -> float:
        """Clips the gradients in the chunks' buffers, steps, and returns their global norm before clipping.

        If the norm is not finite, all ranks leave weights and moments as they are. If `more` steps follow, the next
        forward pass brings the new weights (train.overlap); otherwise they are in place when this returns. Raises
        RankError after more skipped steps in a row than the recipe allows.
        """
        set_learning_rate(self.optimizer, lr, self._settings.weight_decay)
        stepped, grad_norm, _ = self.optimizer.step()
        self._skipped_in_a_row = 0 if stepped else self._skipped_in_a_row + 1
        if self._skipped_in_a_row > self._settings.skipped_steps_max:
            where = f"update: the loss or the gradient is not finite, {self._skipped_in_a_row} optimizer steps in a row"
            needed = f"at most {self._settings.skipped_steps_max} (train.optimizer.skipped_steps_max)"
            raise RankError(Problem(where, f"gradient norm {grad_norm}", needed, DIVERGED_FIX))
        if not more and "parameters" in self._overlap:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        return float(grad_norm)

    def keep_reference(self, share: float | None) -> None:
        """Makes a copy of the current weights the reference. A reference that follows the policy is in checkpoints."""
        self.reference = Reference(self.chunks, share)
        self.offload = Offload(self.chunks, self.optimizer, self.reference.tensors)
        if self.reference.follows:
            self._state = replace(self._state, reference=self.reference.named())

    @contextmanager
    def reference_here(self) -> Iterator[Reference]:
        """Yields the reference, on the device. Elsewhere it may be offloaded, even in updates (train.offload).
        Raises RankError if there is none, or while its memory or the model's is released."""
        if self.reference is None:
            raise RankError(Problem("the reference", "algorithm.kl.coefficient: 0", "a KL coefficient above 0"))
        if "reference" in self._offloaded:
            self.offload.restore(["reference"])
        self.offload.require(["parameters", "reference"])
        yield self.reference
        if "reference" in self._offloaded:
            self.offload.release(["reference"])

    def take_snapshot(self) -> None:
        """Copies this rank's part of the training state to host memory. Raises CheckpointError."""
        self.offload.require(["parameters", "optimizer"])
        with self.reference_here() if self._saves_reference else nullcontext():
            self.snapshot.take(self._state)

    def load(self, directory: Path) -> None:
        """Replaces the training state by a saved one, of any layout. Raises CheckpointError."""
        self.offload.require(["parameters", "optimizer"])
        with self.reference_here() if self._saves_reference else nullcontext() as reference:
            state.load(self._state, directory)
            if reference:
                reference.restored()

    @property
    def _saves_reference(self) -> bool:
        return self.reference is not None and self.reference.follows


class Reference:
    """A copy of the trained weights of `chunks` at its construction. Costs their bytes in the model's dtype.

    With adapters it copies the adapters alone, which add nothing to the model before the first step. An average then
    averages the A's and the B's apart, not their products.

    The policy's modules evaluate it, with other storages behind their parameters: it needs no modules of its own.
    share: None if the reference stays as it is; 1 if it copies the policy at times; less if it averages. An average is
    kept in float32 as well, because bfloat16 would lose small steps.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], share: float | None = None) -> None:
        named = parameters_of(chunks).items()  # the policy and the reference share what is not trained
        self._parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.weights: list[Tensor] = [parameter.detach().clone() for parameter in self._parameters.values()]
        self._share = share
        self._exact = self.weights
        if share is not None and share < 1:
            self._exact = [weight.float() for weight in self.weights]  # the same tensors if they are float32

    @property
    def tensors(self) -> list[Tensor]:
        """Returns all tensors that the reference holds, some twice."""
        return [*self.weights, *self._exact]

    @property
    def follows(self) -> bool:
        """Returns whether the reference follows the policy, and so is part of checkpoints."""
        return self._share is not None

    def in_place_of_policy(self) -> AbstractContextManager[None]:
        """Puts the reference's weights into the policy's chunks inside the block."""
        return model.other_weights(self._parameters.values(), self.weights)

    def of(self, parameter: Tensor) -> Tensor:
        """Returns the reference's weight in the place of a parameter of the policy, which is itself if not trained."""
        pairs = zip(self._parameters.values(), self.weights, strict=True)
        return next((weight for own, weight in pairs if own is parameter), parameter)

    def follow(self) -> None:
        """Moves `share` of the way to the policy."""
        if self._share is None:
            raise ValueError("this reference stays as it is")
        for exact, parameter in zip(self._exact, self._parameters.values(), strict=True):
            exact.lerp_(parameter.detach().to(exact.dtype), self._share)
        self.restored()

    def named(self) -> Mapping[str, Tensor]:
        """Returns the reference's tensors for a checkpoint, by the parameters' names in the rank's manifest."""
        return dict(zip(self._parameters, self._exact, strict=True))

    def restored(self) -> None:
        """Updates the weights in the model's dtype after `follow` or a checkpoint changed the tensors of `named`."""
        for exact, weight in zip(self._exact, self.weights, strict=True):
            if exact is not weight:
                weight.copy_(exact)


# Megatron looks for a gradient on the views that the distributed optimizer updates.
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf", module="megatron")


def wrap_chunks(chunks: list[GPTModel], config: TransformerConfig, train: TrainConfig) -> list[DistributedDataParallel]:
    """Gives each model chunk gradient buffers, summed over data and context ranks.

    Sums, not means: calculate_per_token_loss makes Megatron scale neither dense nor expert gradients, because the loss
    has global denominators already. The weights move into the wrapper's buffers: tensors taken from parameters before
    are no longer the weights.
    """
    overlaps = "gradients" in train.overlap
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=train.gradient_dtype == "float32",
        use_distributed_optimizer=train.distributed_optimizer,
        overlap_grad_reduce=overlaps,
        overlap_param_gather="parameters" in train.overlap,
        check_for_nan_in_grad=False,
    )
    whole = train.distributed_optimizer and train.optimizer.kind == "muon"
    wrapped = []
    for index, chunk in enumerate(chunks):
        layout = _layer_wise_layout(chunk, ddp_config, index) if whole else None
        wrapped.append(
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0, full_param_layout=layout)
        )
    for chunk in wrapped:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            if buffer.gradient_scaling_factor != 1.0:
                raise ValueError(f"gradients would be scaled by {buffer.gradient_scaling_factor}; the loss needs sums")
    if overlaps:  # schedules sum the gradients of the last microbatch's backward pass, and those before it with them
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def _layer_wise_layout(chunk: GPTModel, ddp_config: DistributedDataParallelConfig, index: int) -> FullParamLayout:
    """Lays parameters out in the buffers so that each of Muon's matrices belongs to one data rank as a whole.

    Buckets are as large as the wrapper's own: a layout that is given decides, not the wrapper.
    """
    tag_params_for_buffer_routing([chunk])
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    several = ddp_config.overlap_grad_reduce and index == 0 and parallel_state.get_pipeline_model_parallel_rank() == 0
    return LayerWiseDistributedOptimizer.compute_full_param_layout(
        [parameter for parameter in chunk.parameters() if parameter.requires_grad],
        max(40_000_000, 1_000_000 * ranks) if several else None,
        ranks,
        ddp_config,
        parallel_state.get_expert_data_parallel_world_size(),
    )


class FiniteSteps(ChainedOptimizer):
    """Megatron's optimizer, which skips steps with gradients that are not finite: their norm is that of all ranks.

    Megatron itself looks for them only with a loss scale, as float16 has: in bfloat16 and float32 one NaN would reach
    every weight and every moment.
    """

    def get_grad_norm(self) -> float:
        self.grad_norm = float(super().get_grad_norm())
        return self.grad_norm

    def step_with_ready_grads(self) -> bool:
        return math.isfinite(self.grad_norm) and super().step_with_ready_grads()


def make_optimizer(wrapped: list[DistributedDataParallel], train: TrainConfig, dtype: torch.dtype) -> MegatronOptimizer:
    """Makes Adam, with kernels of transformer-engine or apex if Megatron finds them, or Muon; decoupled weight decay.

    bfloat16 weights get float32 main weights. Call `set_learning_rate` before every step.
    """
    settings, moments = train.optimizer, getattr(torch, train.optimizer.moment_dtype)
    layer_wise = train.distributed_optimizer and settings.kind == "muon"
    if settings.kind == "muon":
        for parameter in (parameter for chunk in wrapped for parameter in chunk.parameters()):
            # Transformer Engine marks weights that tensor ranks have whole as cut: Muon would gather copies of them.
            if hasattr(parameter, "partition_dim") and not getattr(parameter, "tensor_model_parallel", False):
                parameter.partition_dim = -1
    config = OptimizerConfig(
        optimizer=settings.kind,
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.epsilon,
        clip_grad=settings.clip_grad or math.inf,  # with 0 Megatron does not even compute the norm
        # Megatron wraps layer-wise optimizers for bfloat16 only; the wrapper takes float32 weights too, as they are.
        bf16=dtype == torch.bfloat16 or layer_wise,
        params_dtype=dtype,
        use_distributed_optimizer=train.distributed_optimizer,
        use_precision_aware_optimizer=moments != torch.float32,
        store_param_remainders=False,  # main weights as they are in checkpoints
        main_grads_dtype=getattr(torch, train.gradient_dtype) if moments != torch.float32 else torch.float32,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
        use_layer_wise_distributed_optimizer=layer_wise,
        overlap_param_gather=layer_wise and "parameters" in train.overlap,
        muon_momentum=settings.muon.momentum,
        muon_nesterov=settings.muon.nesterov,
        muon_num_ns_steps=settings.muon.newton_schulz_steps,
        muon_scale_mode="spectral",  # times sqrt(max(rows, columns))
        muon_extra_scale_factor=settings.muon.update_scale,
        muon_tp_mode="duplicated",  # whole matrices on every tensor rank: the numbers of one rank
        muon_fp32_matmul_prec="medium" if dtype == torch.bfloat16 else "highest",
    )
    return FiniteSteps(get_megatron_optimizer(config, wrapped, use_gloo_process_groups=False).chained_optimizers)


def set_learning_rate(optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> None:
    """Sets rate and decay of the next step. Megatron marks norms and biases with wd_mult = 0 but does not apply it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
        group["weight_decay"] = weight_decay * group["wd_mult"]


def broken_weights(manifest: Callable[[], Manifest], tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Describes weights with a value that is NaN, infinite or beyond LARGEST, by name in the Hugging Face checkpoint.

    One pass over each tensor, without a copy; one number of each goes to the host, all of them together. The manifest
    is made only if a tensor is broken.
    """
    named = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    if not named:
        return {}
    extremes = torch.stack([torch.stack(torch.aminmax(tensor.detach())).float() for tensor in named.values()])
    ranges = zip(named, extremes.tolist(), strict=True)
    storages = [name for name, (low, high) in ranges if not -LARGEST <= low <= high <= LARGEST]
    broken = {}
    for placement in manifest().placements if storages else ():
        if placement.storage in storages:
            view = box_view(tensors[placement.storage], placement).float()
            wrong = view[~(view.abs() <= LARGEST)]
            if wrong.numel():
                broken[placement.box.tensor] = f"{wrong[0].item():g} in {wrong.numel():,} of {view.numel():,} elements"
    return broken or dict.fromkeys(storages, "a value that is not finite, outside of every box")
