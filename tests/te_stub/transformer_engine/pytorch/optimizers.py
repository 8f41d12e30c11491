"""FusedAdam, and operations on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """QUIRK: the step's number is a group's, not a parameter's state, and counts groups without gradients too."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        assert adam_w_mode and bias_correction and not amsgrad and not capturable, "the stub has no other Adam"
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        assert not store_param_remainders and master_weight_dtype == torch.float32, "the stub has no other main weights"
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad

    def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:
        for name, dtype in self.dtypes.items():
            self.state[param][name] = torch.zeros_like(param, dtype=dtype)
        if self.master_weights:
            self.state[param]["master_param"] = param.detach().clone().float()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    self.initialize_state(parameter)
                found = parameter.decoupled_grad if self.use_decoupled_grad else parameter.grad
                if found is None:
                    continue
                grad, main = found.float(), state.get("master_param", parameter)
                mean = state["exp_avg"].float().lerp(grad, 1 - first)
                square = state["exp_avg_sq"].float().mul(second).addcmul(grad, grad, value=1 - second)
                state["exp_avg"].copy_(mean)
                state["exp_avg_sq"].copy_(square)
                scale = (square / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                change = mean / (1 - first ** group["step"]) / scale + group["weight_decay"] * main.float()
                main.add_(change, alpha=-group["lr"])
                parameter.copy_(main)


class FusedSGD(torch.optim.SGD):
    """Megatron names it; megagrpo has no use for it."""


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
) -> Any:
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """QUIRK: tensors of one call must have one dtype."""
    assert not per_tensor and len({tensor.dtype for tensor in tensor_lists[0]}) == 1
    squares = [tensor.float().square().sum() for tensor in tensor_lists[0]]
    return torch.stack(squares).sum().sqrt()[None], torch.empty(0)


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], scale: float
) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: Tensor, tensor_lists: Sequence[Sequence[Tensor]], scale: Tensor
) -> None:
    """QUIRK: because it is there, Megatron's norm of the gradients is a tensor, not a float."""
    assert scale.dtype == torch.float32 and scale.numel() == 1
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)
