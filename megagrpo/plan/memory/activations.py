"""Bytes of activations that a training rank holds: what layers keep for their backward pass, and what computing takes.

Counted layer by layer, tensor by tensor, after Megatron's modules and megagrpo/megatron/attention.py, as
"Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198, section 4) does it. Its 34 s b h for
a layer with LayerNorm, dropout and a plain MLP is here: 2 norms, no dropout, a gated MLP, attention without scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megagrpo.layout.parallel import ParallelLayout, layers_of_chunk
from megagrpo.weights.families.architecture import Architecture, Experts, LatentAttention

ROUTER_BYTES = 10
"""Of each token and expert: float32 scores and probabilities, and two maps of bool."""
DISPATCH_BYTES = 24
"""Of each token that goes to an expert: indices (int64) there and back, and its probability in float32."""


@dataclass(frozen=True)
class Pass:
    """How one microbatch goes through the layers of one rank."""

    architecture: Architecture
    layout: ParallelLayout
    element_bytes: int
    """Of weights and activations: 2 or 4."""

    tokens: int
    """Of the microbatch, on this context rank, padding included."""

    longest: int
    """Tokens of its longest sequence, on all context ranks together."""

    device: str
    """cpu or cuda. On CPUs, norms and gates are made of several operations, which keep their intermediate results."""

    transformer_engine: bool
    """Its layers, with flash attention and fused norms; else Megatron's local ones with PackedAttention."""

    recompute: str = "none"
    """train.recompute."""

    adapters: bool = False
    """Weights are frozen, and have low-rank adapters (train.lora)."""

    expert_imbalance: float = 1.0
    """Tokens of the busiest rank's experts over the mean."""

    @property
    def tokens_of_rank(self) -> int:
        """Tokens between the parallel parts of a layer, where sequence parallelism splits them."""
        return -(-self.tokens // self.layout.tensor)

    @property
    def hidden_bytes(self) -> int:
        """One tensor of hidden states [tokens_of_rank, hidden]."""
        return self.tokens_of_rank * self.architecture.hidden * self.element_bytes


def stage_bytes(work: Pass, stage: int, microbatches: int) -> int:
    """All that the layers of a stage keep at the fullest moment, with several microbatches on the way.

    The first layer keeps what the embedding or the stage before gave. What a stage hands on stays too, until its
    gradient comes (Megatron's deallocate_pipeline_outputs is off).
    """
    layout = work.layout
    of_kind = {experts: kept_bytes(work, experts) for experts in (False, True)}
    held = 0
    for chunk, passes in enumerate(passes_in_flight(layout, stage, microbatches)):
        layers = layers_of_chunk(work.architecture.layers, layout, stage, chunk)
        kept = sum(of_kind[has_experts(work.architecture, layer)] for layer in layers)
        if not is_last(layout, stage, chunk):
            kept += work.hidden_bytes
        held += passes * kept
    return held


def is_last(layout: ParallelLayout, stage: int, chunk: int) -> bool:
    """Whether this chunk ends the model."""
    return stage == layout.pipeline - 1 and chunk == layout.virtual_pipeline - 1


def passes_in_flight(layout: ParallelLayout, stage: int, microbatches: int) -> tuple[int, ...]:
    """For each model chunk, the most microbatches whose backward pass is still to come, as the last one goes forward.

    1F1B keeps `pipeline - stage` of them; interleaved, a stage first runs (pipeline - stage - 1) * 2 +
    (virtual_pipeline - 1) * pipeline passes of chunks, in turns of `pipeline` microbatches for each chunk
    (megatron.core.pipeline_parallel.schedules, get_pp_rank_microbatches; arXiv:2104.04473, section 2.2).
    """
    pipeline, chunks = layout.pipeline, layout.virtual_pipeline
    if pipeline == 1:
        return (1,)
    if chunks == 1:
        return (min(pipeline - stage, microbatches),)
    first = (pipeline - stage - 1) * 2 + (chunks - 1) * pipeline
    passes = [0] * chunks
    for index in range(min(first + 1, microbatches * chunks)):
        passes[_chunk_of_pass(index, microbatches, layout)] += 1
    return tuple(passes)


def _chunk_of_pass(index: int, microbatches: int, layout: ParallelLayout) -> int:
    """Which chunk the index-th forward pass is of: groups of `pipeline` microbatches, the last one may be smaller."""
    group, within = divmod(index, layout.pipeline * layout.virtual_pipeline)
    size = min(layout.pipeline, microbatches - group * layout.pipeline)
    return within // size


def kept_bytes(work: Pass, experts: bool) -> int:
    """What a layer keeps of one microbatch until its backward pass, under the recipe's recomputation."""
    if work.recompute == "full":
        return work.hidden_bytes
    return layer_bytes(work, experts, cores=work.recompute == "none")


def has_experts(arch: Architecture, layer: int) -> bool:
    return arch.experts is not None and layer >= arch.experts.dense_layers


def layer_bytes(work: Pass, experts: bool, cores: bool = True) -> int:
    """All that one layer keeps; `cores`: also within its attention core, which selective recomputation leaves out."""
    arch = work.architecture
    norms = 2 * _norm(work, arch.hidden, work.tokens_of_rank)
    attention = _grouped_attention(work, cores) if arch.latent is None else _latent_attention(work, arch.latent, cores)
    mlp = _experts(work, arch.experts) if experts and arch.experts else _mlp(work, arch.ffn)
    return norms + attention + mlp


def _norm(work: Pass, width: int, rows: int) -> int:
    """Input, output, and the reciprocal root (float32); on CPUs also what lies between."""
    each = 2 * work.element_bytes + (_between_bytes(work) if work.device == "cpu" else 0)
    return rows * (width * each + 4)


def _between_bytes(work: Pass) -> int:
    """Of an element in a norm made of several operations: the scaled input, if the norm's weight has a gradient, and
    the input in float32 if it is not."""
    return (0 if work.adapters else work.element_bytes) + (4 if work.element_bytes < 4 else 0)


def _grouped_attention(work: Pass, cores: bool) -> int:
    arch, tensor, element = work.architecture, work.layout.tensor, work.element_bytes
    heads = arch.heads / tensor
    groups = max(1.0, arch.query_groups / tensor)
    queries, keys = heads * arch.head_dim, groups * arch.head_dim
    held = work.tokens * queries * element  # the output, which the projection after it keeps
    if work.transformer_engine:
        held += work.tokens * (queries + 2 * keys) * element  # what the core keeps, or what it is recomputed from
    elif cores:
        held += _packed_core(work, heads, queries, keys)
    else:
        held += work.tokens * (2 * queries + 2 * keys) * element  # the product, and queries in an order of their own
    if arch.qk_norm:
        held += _query_key_norms(work, queries, keys, cores)
    if cores:
        held += 4 * work.tokens * heads  # logarithms of the softmax's sums, float32
    return int(held)


def _query_key_norms(work: Pass, queries: float, keys: float, cores: bool) -> float:
    """Inputs of both norms and what lies between. Keys are normed where they lie in the product, queries as a copy;
    outputs are kept only if the core is recomputed from them: rotating them keeps nothing."""
    element = work.element_bytes
    if work.transformer_engine:
        return work.tokens * (queries + keys) * element
    between = work.tokens * (queries + keys) * (_between_bytes(work) if work.device == "cpu" else 0)
    return between + work.tokens * (queries + (0 if cores else keys)) * element


def _packed_core(work: Pass, heads: float, queries: float, keys: float) -> float:
    """PackedAttention: rotated queries and keys, values within the product of all three, and masks between ranks."""
    element, context = work.element_bytes, work.layout.context
    if context == 1:
        return work.tokens * (2 * queries + 3 * keys) * element
    # Keys and values of all context ranks, in the order of their sequences; a mask [queries, keys] as numbers.
    return work.tokens * (queries + 2 * keys * context + work.longest) * element


def _latent_attention(work: Pass, latent: LatentAttention, cores: bool) -> int:
    """Down projections with their norms, then queries, keys, values and the output by head.

    PackedLatentAttention has heads of unequal size for values: torch then keeps the scores of whole sequences.
    """
    arch, element = work.architecture, work.element_bytes
    heads = arch.heads / work.layout.tensor
    held = float(_norm(work, latent.key_value_rank, work.tokens_of_rank))
    held += 5 * work.tokens_of_rank * latent.rotary_dim * element
    if latent.query_rank is not None:
        held += _norm(work, latent.query_rank, work.tokens_of_rank)
    held += work.tokens * heads * 2 * (arch.head_dim + latent.value_dim) * element
    if cores:
        held += 4 * work.tokens * heads if work.transformer_engine else scores_bytes(work)
    return int(held)


def scores_bytes(work: Pass) -> int:
    """Float32 scores of all heads here, of every token with every token of its sequence; 0 where nothing keeps them."""
    if work.architecture.latent is None or work.transformer_engine:
        return 0
    return int(4 * work.tokens * work.architecture.heads / work.layout.tensor * work.longest)


def _mlp(work: Pass, ffn: int) -> int:
    """The first product (gate and up), and what the second one takes; on CPUs three intermediate results more."""
    tensors = 5 if work.device == "cpu" else 3
    return int(work.tokens * ffn / work.layout.tensor * tensors * work.element_bytes)


def _experts(work: Pass, experts: Experts) -> int:
    """Router and dispatch of this rank's tokens, and as many of them in the experts here, but for imbalance."""
    layout = work.layout
    held = work.tokens_of_rank * experts.count * ROUTER_BYTES
    held += work.tokens_of_rank * experts.per_token * DISPATCH_BYTES
    held += (
        _expert_tokens(work, experts)
        * (work.architecture.hidden + _expert_tensors(work) * experts.ffn // layout.expert_tensor)
        * work.element_bytes
    )
    return held + _mlp(work, experts.shared_ffn)


def _expert_tokens(work: Pass, experts: Experts) -> int:
    """Tokens that pass the experts of one rank; those who share an expert's matrices see each other's too."""
    return int(work.tokens_of_rank * experts.per_token * work.layout.expert_tensor * work.expert_imbalance)


def _expert_tensors(work: Pass) -> int:
    return 6 if work.device == "cpu" else 3


# --- what computing takes besides ------------------------------------------------------------------------------------


def working_bytes(work: Pass, layers: Sequence[int]) -> int:
    """The most that the backward pass of one of these layers holds besides what was kept.

    With full recomputation all of a layer is made again first. A weight's gradient lies beside the buffer that it is
    added to.
    """
    kinds = {has_experts(work.architecture, layer) for layer in layers}
    return max((_working(work, experts) for experts in kinds), default=0)


def _working(work: Pass, experts: bool) -> int:
    arch, element = work.architecture, work.element_bytes
    matrix, rows, width = _largest_product(work, experts)
    gathered = work.tokens * arch.hidden * element
    gradients = rows * width * element
    weight = 0 if work.adapters else matrix * element
    needed = max(2 * gradients + work.hidden_bytes, gradients + weight + gathered, scores_bytes(work))
    if work.recompute == "full":
        return needed + layer_bytes(work, experts) - work.hidden_bytes
    return max(needed, 2 * scores_bytes(work)) if work.recompute == "selective" else needed


def _largest_product(work: Pass, experts: bool) -> tuple[int, int, int]:
    """Of gate and up: elements of the matrix here, tokens, and columns of the gate."""
    arch, layout = work.architecture, work.layout
    if experts and arch.experts is not None:
        width = arch.experts.ffn // layout.expert_tensor
        return 2 * width * arch.hidden, _expert_tokens(work, arch.experts), width
    width = arch.ffn // layout.tensor
    return 2 * width * arch.hidden, work.tokens, width


def forward_bytes(work: Pass, layers: Sequence[int]) -> int:
    """The most that a pass without gradients holds in one of these layers."""
    kinds = {has_experts(work.architecture, layer) for layer in layers}
    return max((_forward(work, experts) for experts in kinds), default=0)


def _forward(work: Pass, experts: bool) -> int:
    """Hidden states before, between and after, and between stages; the product of gate and up, and what follows."""
    arch, element = work.architecture, work.element_bytes
    hidden = (4 if work.layout.pipeline == 1 else 6) * work.hidden_bytes
    gathered = work.tokens * arch.hidden * element if work.layout.tensor > 1 else 0
    if experts and arch.experts is not None:
        # Tokens on their way to the experts and back, in the order of either side.
        mlp = gathered + 4 * _expert_tokens(work, arch.experts) * arch.hidden * element
    elif work.adapters:
        # The product, that of its adapter, and their sum.
        mlp = 6 * work.tokens * arch.ffn // work.layout.tensor * element
    else:
        mlp = _mlp(work, arch.ffn)
    return hidden + gathered + max(mlp, 5 * scores_bytes(work) // 2)
