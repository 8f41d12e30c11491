"""Linear layers and norms."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from transformer_engine.pytorch.distributed import (
    allreduce,
    gather_along_first_dim,
    get_distributed_world_size,
    reduce_scatter_along_first_dim,
    set_tensor_model_parallel_attributes,
)
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager


def assert_dim_for_fp8_exec(*tensors: Tensor) -> None:
    """QUIRK: fp8 takes token counts that 8 divides and features that 16 divides."""
    for tensor in tensors:
        if math.prod(tensor.shape[:-1]) % 8 != 0 or tensor.shape[-1] % 16 != 0:
            raise ValueError(
                "FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the "
                f"last dimension to be divisible by 16, but got tensor with dims={list(tensor.size())}"
            )


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Returns autograd's gradient of a weight whose real one is in main_grad already."""
    return torch.zeros(shape, dtype=dtype) if zero else torch.full(shape, math.nan, dtype=dtype)


def weight_gradient(weight: Tensor, found: Tensor, fuse: bool, is_first_microbatch: bool | None) -> Tensor | None:
    """QUIRK: with fused accumulation the gradient goes to weight.main_grad. The first microbatch's replaces what is
    there, others are added; autograd gets a tensor of garbage where Megatron's DDP knows of it, else nothing."""
    if not fuse:
        return found
    main_grad: Tensor = weight.main_grad  # type: ignore[attr-defined]
    if is_first_microbatch or getattr(weight, "overwrite_main_grad", False):
        main_grad.copy_(found)
    else:
        main_grad.add_(found)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return get_dummy_wgrad(list(main_grad.shape), weight.dtype, zero=getattr(weight, "zero_out_wgrad", False))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, inp: Tensor, bias: Tensor | None, module: Linear, is_first_microbatch: bool | None
    ) -> Tensor:
        assert inp.shape[-1] == weight.shape[1], "GEMM not possible"
        if FP8GlobalStateManager.is_fp8_enabled():
            assert_dim_for_fp8_exec(inp, weight)
        ctx.save_for_backward(inp)
        ctx.weight, ctx.bias, ctx.module, ctx.is_first_microbatch = weight, bias, module, is_first_microbatch
        gathers = module.parallel_mode == "column" and module.sequence_parallel
        total = gather_along_first_dim(inp, module.tp_group) if gathers else inp
        out = F.linear(total, weight, bias)
        if module.parallel_mode != "row":
            return out
        if module.sequence_parallel:
            return reduce_scatter_along_first_dim(out, module.tp_group)
        return allreduce(out, module.tp_group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (inp,), module, weight = ctx.saved_tensors, ctx.module, ctx.weight
        if module.sequence_parallel and module.parallel_mode == "row":
            grad = gather_along_first_dim(grad, module.tp_group)
        dgrad = None
        if ctx.needs_input_grad[1]:
            dgrad = grad @ weight
            if module.parallel_mode == "column" and module.sequence_parallel:
                dgrad = reduce_scatter_along_first_dim(dgrad, module.tp_group)
            elif module.parallel_mode == "column":
                dgrad = allreduce(dgrad, module.tp_group)
        wgrad = None
        rows = grad.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            gathers = module.parallel_mode == "column" and module.sequence_parallel
            total = gather_along_first_dim(inp, module.tp_group) if gathers else inp
            found = rows.t() @ total.flatten(0, -2)
            wgrad = weight_gradient(weight, found, module.fuse_wgrad_accumulation, ctx.is_first_microbatch)
        return wgrad, dgrad, None if ctx.bias is None else rows.sum(0), None, None


class TransformerEngineBaseModule(torch.nn.Module):
    """Base of layers with a weight: the tensor group, checks of dtypes, values and marks of fresh parameters."""

    parallel_mode: str | None

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.tp_group: dist.ProcessGroup | None = None
        self.tp_size = 1
        self.sequence_parallel = False

    def set_parallel(
        self, group: dist.ProcessGroup | None, size: int, mode: str | None, sequence_parallel: bool
    ) -> None:
        assert mode in ("row", "column", None), f"parallel_mode {mode} not supported"
        self.tp_group, self.parallel_mode = group, mode
        self.tp_size = size if group is None else get_distributed_world_size(group)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        if self.tp_size > 1 and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
            warnings.warn(
                "To guarantee overlapping, set environment variable CUDA_DEVICE_MAX_CONNECTIONS = 1", stacklevel=3
            )

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        self.tp_group = tp_group

    def divided(self, features: int, mode: str) -> int:
        """`features` of this rank, if layers of this mode are cut along them."""
        if self.parallel_mode != mode:
            return features
        assert features % self.tp_size == 0, f"{features} is not divisible by {self.tp_size}"
        return features // self.tp_size

    def initialize(self, parameter: Tensor, init_method: Callable[[Tensor], Any] | None, tracker: Any) -> None:
        name = getattr(self, "rng_tracker_name", None)
        with torch.no_grad(), tracker().fork(*[name] * bool(name)) if tracker else nullcontext():
            (init_method or (lambda tensor: tensor.normal_(0.0, 0.023)))(parameter)

    def mark(self, weight: Parameter, bias: Parameter | None) -> None:
        """QUIRK: a weight is marked as tensor-parallel whatever its mode, also where every tensor rank has it whole."""
        set_tensor_model_parallel_attributes(weight, True, 1 if self.parallel_mode == "row" else 0, 1)
        if bias is not None and self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        elif bias is not None and self.parallel_mode == "column":
            set_tensor_model_parallel_attributes(bias, True, 0, 1)

    def check(self, inp: Tensor) -> Tensor:
        for name, parameter in self.named_parameters():
            if inp.dtype != parameter.dtype:
                raise TypeError(
                    "Data types for parameters must match when outside of autocasted region. "
                    f"Found input dtype: {inp.dtype} and {name!r} dtype: {parameter.dtype}"
                )
        return inp.contiguous()

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def get_extra_state(self) -> Tensor:
        """QUIRK: every layer has an extra state, empty without fp8."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None: ...

    def backward_dw(self) -> None:
        raise NotImplementedError("the stub computes weights' gradients at once")


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: None = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.set_parallel(tp_group, tp_size, parallel_mode, sequence_parallel)
        self.in_features, self.out_features = self.divided(in_features, "row"), self.divided(out_features, "column")
        self.fuse_wgrad_accumulation, self.use_bias, self.return_bias = fuse_wgrad_accumulation, bias, return_bias
        self.rng_tracker_name, self.save_original_input = rng_tracker_name, save_original_input
        self.ub_name = ub_name
        overlaps = {
            "column": (ub_overlap_ag, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad),
            "row": (ub_overlap_rs, ub_overlap_ag),
        }
        if self.sequence_parallel and any(overlaps.get(str(parallel_mode), ())):
            raise AssertionError("initialize_ub() must be called before layer construction.")
        assert not delay_wgrad_compute, "the stub computes weights' gradients at once"
        if device == "cuda":
            device = torch.cuda.current_device()
        own = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        self.weight = Parameter(torch.empty(self.out_features, self.in_features, **own))
        self.initialize(self.weight, init_method, get_rng_state_tracker)
        if bias:
            self.bias = Parameter(torch.zeros(self.out_features, **own))
        else:
            self.bias = torch.empty(0, **own)  # QUIRK: a tensor without elements, which is no parameter
        self.mark(self.weight, self.bias if bias else None)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        inp = self.check(inp)
        applied = self.bias if self.use_bias and not self.return_bias else None
        in_product = applied if self.parallel_mode != "row" else None
        out = _Linear.apply(self.weight, inp, in_product, self, is_first_microbatch)
        if applied is not None and in_product is None:
            out = out + applied
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    """QUIRK: the norm before the layer is inside; its weight is layer_norm_weight."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
        **options: Any,
    ) -> None:
        assert normalization == "RMSNorm" and not return_layernorm_output and not zero_centered_gamma
        super().__init__(in_features, out_features, params_dtype=params_dtype, device=device, **options)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        linear = dict(self._parameters)
        self._parameters.clear()  # the norm's parameter comes first
        self.layer_norm_weight = Parameter(torch.ones_like(linear["weight"][0]))
        self._parameters.update(linear)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_bias = None

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, *args: Any, **kwargs: Any) -> Any:
        normed = F.rms_norm(self.check(inp), (self.in_features,), self.layer_norm_weight, self.eps)
        return super().forward(normed, is_first_microbatch, *args, **kwargs)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        m_splits: list[int],
        module: GroupedLinear,
        is_first_microbatch: bool | None,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(inp)
        ctx.m_splits, ctx.module, ctx.is_first_microbatch, ctx.weights = m_splits, module, is_first_microbatch, weights
        parts = inp.split(m_splits)
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (inp,), module, dgrad = ctx.saved_tensors, ctx.module, None
        grads, inputs = grad.split(ctx.m_splits), inp.split(ctx.m_splits)
        if ctx.needs_input_grad[0]:
            dgrad = torch.cat([part @ weight for part, weight in zip(grads, ctx.weights, strict=True)])
        wgrads: list[Tensor | None] = [None] * len(ctx.weights)
        if ctx.needs_input_grad[4]:
            wgrads = [
                weight_gradient(weight, g.t() @ x, module.fuse_wgrad_accumulation, ctx.is_first_microbatch)
                for weight, g, x in zip(ctx.weights, grads, inputs, strict=True)
            ]
        return dgrad, None, None, None, *wgrads


class GroupedLinear(TransformerEngineBaseModule):
    """weight0, weight1, ...: one weight per expert. It does not communicate: tp_size and parallel_mode give shapes."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if ub_overlap_rs or ub_overlap_ag:
            raise ValueError("GroupedLinear doesn't support Userbuffer overlap.")
        assert not (bias or delay_wgrad_compute or single_grouped_weight or single_grouped_bias), "the stub has none"
        self.set_parallel(tp_group, tp_size, parallel_mode, sequence_parallel)
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.in_features, self.out_features = self.divided(in_features, "row"), self.divided(out_features, "column")
        self.fuse_wgrad_accumulation, self.rng_tracker_name = fuse_wgrad_accumulation, rng_tracker_name
        self.save_original_input = save_original_input
        own = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        for index in range(num_gemms):
            weight = Parameter(torch.empty(self.out_features, self.in_features, **own))
            self.initialize(weight, init_method, get_rng_state_tracker)
            self.mark(weight, None)
            self.register_parameter(f"weight{index}", weight)

    def forward(self, inp: Tensor, m_splits: Tensor | list[int], is_first_microbatch: bool | None = None) -> Tensor:
        m_splits = m_splits.tolist() if isinstance(m_splits, Tensor) else m_splits
        if len(m_splits) != self.num_gemms:
            raise ValueError(f"Shape of splits tensor does not match number of GEMMs ({self.num_gemms}).")
        inp = self.check(inp)
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        if FP8GlobalStateManager.is_fp8_enabled():
            assert_dim_for_fp8_exec(*inp.split(m_splits), *weights)
        return _GroupedLinear.apply(inp, m_splits, self, is_first_microbatch, *weights)


class RMSNorm(torch.nn.Module):
    """QUIRK: it has no mark of tensor parallelism at all, only sequence_parallel."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        assert (normalized_shape is None) != (hidden_size is None) and not zero_centered_gamma
        self.eps = eps
        self.weight = Parameter(torch.ones(normalized_shape or hidden_size, device=device, dtype=params_dtype))
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: Tensor) -> Tensor:
        return F.rms_norm(inp, inp.shape[-1:], self.weight, self.eps)


class LayerNorm(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("no family of megagrpo has it")
