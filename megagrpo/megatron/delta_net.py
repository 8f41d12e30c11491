"""Gated delta net (arXiv:2412.06464) over packed sequences: the linear attention of Qwen3-Next, Qwen3.5 and Qwen3.6.

A value head keeps a state S [key_dim, value_dim]. Token t decays it and corrects what it answers to the token's key:
    S = exp(decay_t) S;  S = S + k_t beta_t (v_t - S^T k_t)^T;  output_t = S^T q_t
Convolution and state start anew with every sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from megagrpo.megatron.attention import AttentionPlan, Collect, PackedSequences, Spread
from megagrpo.weights.families import parts
from megagrpo.weights.families.parts.delta_net import CHUNK

HAS_KERNELS = find_spec("fla") is not None


class DeltaNet(MegatronModule):
    """self_attention of Megatron's layer. Tensor ranks have a share of the heads, context ranks a share of that share.

    The rows of in_proj are those of this tensor rank's heads of q, k, v, z (the output's gate), b (beta) and a (decay);
    `conv` has those of q, k and v.
    """

    def __init__(
        self, config: TransformerConfig, sizes: parts.DeltaNet, pg_collection: ProcessGroupCollection, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.sizes, self.context_group, tensor = sizes, pg_collection.cp, pg_collection.tp.size()
        keys, values = sizes.key_heads * sizes.key_dim // tensor, sizes.value_heads * sizes.value_dim // tensor
        heads = sizes.value_heads // tensor
        self.widths = [keys, keys, values, values, heads, heads]
        linear: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = ColumnParallelLinear(
            sizes.hidden,
            sum(self.widths) * tensor,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.out_proj = RowParallelLinear(
            values * tensor,
            sizes.hidden,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )
        self.conv = _split_parameter(config, 2 * keys + values, 1, sizes.kernel)
        self.A_log, self.dt_bias = _split_parameter(config, heads), _split_parameter(config, heads)
        self.out_norm = GatedNorm(config, sizes.value_dim)

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Mixes tokens within each sequence. hidden: [tokens / tensor, 1, hidden] of this context rank, and so the
        result."""
        packed = packed_seq_params
        projected = self.in_proj(hidden)[0][:, 0]  # [tokens, rows of in_proj]
        *mixed, gate, beta, decay = projected.split(self.widths, dim=-1)  # each [tokens, width]
        tokens = self._tokens_of_all_ranks([*mixed, beta, decay], packed)  # [context * tokens, widths / context]
        heads = self.widths[-1] // packed.context
        mixing, beta, decay = tokens.split([tokens.shape[-1] - 2 * heads, heads, heads], dim=-1)
        conv = torch.cat([self._share(part) for part in self.conv[:, 0].split(self.widths[:3])])
        beta = beta.float().sigmoid()  # [context * tokens, heads]
        decay = -self._share(self.A_log).float().exp() * F.softplus(decay.float() + self._share(self.dt_bias).float())
        if mixing.is_cuda and HAS_KERNELS and not self.config.deterministic_mode:  # they are not deterministic
            output = mix_by_kernels(mixing, beta, decay, conv, self.sizes, packed.cu_seqlens_q_padded)
        else:
            output = mix(mixing, beta, decay, conv, self.sizes, packed.whole_plan)
        output = self._tokens_of_this_rank(output, packed)  # [tokens, heads of the tensor rank, value_dim]
        # The norm's float32 tensors would be most of what the kernels' layer keeps: the norm is computed again. A copy
        # of the gate lets the rest of `projected` go.
        inputs = output, gate.contiguous().view_as(output)
        output = checkpoint(self.out_norm, *inputs, use_reentrant=False, preserve_rng_state=False)
        return self.out_proj(output.flatten(1)[:, None])

    def _share(self, of_heads: torch.Tensor) -> torch.Tensor:
        """Returns this context rank's part of a tensor of all the tensor rank's heads, which are its first axis."""
        return of_heads.chunk(self.context_group.size())[self.context_group.rank()]

    def _tokens_of_all_ranks(self, features: Sequence[torch.Tensor], packed: PackedSequences) -> torch.Tensor:
        """Exchanges [tokens, width] each for [context * tokens, widths / context]: whole sequences, fewer heads."""
        shares = torch.cat([part.unflatten(-1, (packed.context, -1)) for part in features], dim=-1)
        tokens = all_to_all(self.context_group, shares.transpose(0, 1)).flatten(0, 1)  # rank after rank
        return tokens if packed.order is None else Spread.apply(tokens, packed.order, len(tokens))

    def _tokens_of_this_rank(self, output: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """Reverses that: [context * tokens, heads / context, value_dim] becomes [tokens, heads, value_dim]."""
        if packed.order is not None:
            output = Collect.apply(output, packed.order)
        shares = all_to_all(self.context_group, output.unflatten(0, (packed.context, -1)))
        return shares.transpose(0, 1).flatten(1, 2)


def _split_parameter(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Makes a parameter of this tensor rank's heads, which are its first axis."""
    zeros = torch.zeros(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
    parameter = torch.nn.Parameter(zeros)
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return parameter


class GatedNorm(torch.nn.Module):
    """RMSNorm of each value head, times SiLU of its gate, in float32."""

    def __init__(self, config: TransformerConfig, value_dim: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        ones = torch.ones(value_dim, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = torch.nn.Parameter(ones)
        # Each tensor rank sees its own heads; finalize_model_grads sums the gradients of what is so marked.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, heads: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(heads.float(), heads.shape[-1:], self.weight.float(), self.eps)
        return (normed * F.silu(gate.float())).to(heads.dtype)


def mix_by_kernels(
    mixing: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    conv: torch.Tensor,
    sizes: parts.DeltaNet,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Computes `mix` by the kernels of flash-linear-attention, for sequences at `offsets`: int32 [sequences + 1]."""
    from fla.modules.convolution import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    mixing, _ = causal_conv1d(mixing[None], conv, activation="silu", cu_seqlens=offsets)
    query, key, value = _heads(mixing, beta.shape[-1], sizes)
    # Kernels before 0.5 read past the end of fewer key heads.
    query, key = (x.repeat_interleave(sizes.value_heads // sizes.key_heads, dim=2) for x in (query, key))
    output, _ = chunk_gated_delta_rule(
        query, key, value, decay[None], beta[None], use_qk_l2norm_in_kernel=True, cu_seqlens=offsets
    )
    return output[0]


def mix(
    mixing: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    conv: torch.Tensor,
    sizes: parts.DeltaNet,
    plan: AttentionPlan,
) -> torch.Tensor:
    """Convolves and mixes sequences end to end, in float32; the result is [tokens, heads, value_dim], like `mixing`.

    mixing: [tokens, queries + keys + values]; beta, decay: float32 [tokens, heads], of fewer heads than `sizes` has on
    ranks with a share; conv: [queries + keys + values, kernel].
    """
    if (slots := plan.key_slots) is not None:
        mixing, beta, decay = (Spread.apply(tensor, slots, plan.keys) for tensor in (mixing, beta, decay))
    tokens = [bucket.sequences * bucket.keys for bucket in plan.buckets]
    outputs = []
    for bucket, *batches in zip(plan.buckets, *(x.split(tokens) for x in (mixing, beta, decay)), strict=True):
        of_bucket = (batch.unflatten(0, (bucket.sequences, -1)) for batch in batches)
        outputs.append(_mix_batch(sizes, conv.float(), *of_bucket).flatten(0, 1).to(mixing.dtype))
    padded = torch.cat(outputs)
    return padded if slots is None else Collect.apply(padded, slots)


def _mix_batch(
    sizes: parts.DeltaNet, conv: torch.Tensor, mixing: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """Mixes tensors like those of `mix`, [sequences, tokens, ...]; the result is [sequences, tokens, heads, value_dim].
    Padding at the end changes no token before it."""
    (_, length, heads), kernel = beta.shape, conv.shape[-1]
    chunk = min(CHUNK, length)
    end = -length % chunk
    mixing = F.pad(mixing.float(), (0, 0, kernel - 1, end))
    taps = [mixing[:, tap : tap + length + end] * conv[:, tap] for tap in range(kernel)]
    query, key, value = _heads(F.silu(sum(taps[1:], taps[0])), heads, sizes)
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key = (x.repeat_interleave(sizes.value_heads // sizes.key_heads, dim=2) for x in (query, key))
    beta, decay = (F.pad(x, (0, 0, 0, end))[..., None] for x in (beta, decay))
    chunks = (  # [sequences, heads, chunks, chunk, dim]
        x.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4)
        for x in (query * sizes.key_dim**-0.5, key, value, beta, decay)
    )
    return delta_rule(*chunks).permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length]


def _heads(mixing: torch.Tensor, heads: int, sizes: parts.DeltaNet) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cuts [sequences, tokens, width] into queries and keys [sequences, tokens, key heads, key_dim] and values
    [sequences, tokens, heads, value_dim]."""
    keys = heads * sizes.key_heads // sizes.value_heads * sizes.key_dim
    query, key, value = mixing.split([keys, keys, heads * sizes.value_dim], dim=-1)
    query, key = (x.unflatten(-1, (-1, sizes.key_dim)) for x in (query, key))
    return query, key, value.unflatten(-1, (heads, -1))


def delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """Computes the outputs of the gated delta rule: float32 [batch, heads, chunks, chunk, value_dim].

    query, key: [batch, heads, chunks, chunk, key_dim]; value: the same with value_dim; beta, decay: with 1.
    Within a chunk the corrections to the state solve a triangular system (arXiv:2412.06464, section 3.3).
    """
    total = decay.cumsum(-2)  # log of the decay since the chunk's begin; its differences are that from token to token
    later = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=total.device).triu(1)
    between = (total - total.mT).masked_fill(later, -torch.inf).exp()  # [batch, heads, chunks, chunk, chunk]
    since_begin, until_end = total.exp(), (total[..., -1:, :] - total).exp()
    system = (beta * key) @ key.mT * between  # the solver takes ones for its diagonal
    given = torch.cat([beta * value, beta * since_begin * key], dim=-1)
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    corrections, answers = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = query @ key.mT * between
    state = query.new_zeros(*query.shape[:2], query.shape[-1], value.shape[-1])
    outputs = []
    # unbind's gradient is one stack, where each index's would be a tensor of full size.
    of_chunks = (corrections, answers, query * since_begin, scores, key * until_end, since_begin[..., -1:, :])
    for correction, answer, read, score, write, kept in zip(*(x.unbind(2) for x in of_chunks), strict=True):
        correction = correction - answer @ state
        outputs.append(read @ state + score @ correction)
        state = kept * state + write.mT @ correction
    return torch.stack(outputs, dim=2)
