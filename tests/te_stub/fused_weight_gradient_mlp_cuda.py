"""apex's extension that adds a weight's gradient to its buffer, in plain torch: Megatron's own layers call it."""

from torch import Tensor


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Adds grad_output^T total_input, of [tokens, in] and [tokens, out], to main_grad [out, in]."""
    main_grad.add_((grad_output.t() @ total_input).to(main_grad.dtype))
