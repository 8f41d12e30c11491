"""Bytes that passes take on a training rank: what layers keep for backward passes, and what computing takes besides.

Counted layer by layer after Megatron's modules and megagrpo/megatron/attention.py, as "Reducing Activation
Recomputation in Large Transformer Models" (arXiv:2205.05198, section 4) does it. Its 34 s b h for a layer with
LayerNorm, dropout and a plain MLP is here: 2 norms, no dropout, a gated MLP, attention without scores.
tests/distributed/test_plan_activations.py compares it with what ranks allocate on CPUs: within 15 %.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.parameters import Stage, layer_counts
from megagrpo.recipe.schema.train import NOTHING_AGAIN, Recomputed
from megagrpo.weights.families.architecture import Architecture, Experts, LatentAttention

ROUTER_BYTES = 10
"""For each token and expert: float32 scores and probabilities, and two maps of bool."""
DISPATCH_BYTES = 24
"""For each token that goes to an expert: indices (int64) there and back, and its probability in float32."""
LOGIT_CHUNK_ELEMENTS, LOGIT_CHUNK_COLUMNS = 2**22, {"cpu": 2048, "cuda": 8192}
"""Sizes of the chunks in which logits are made, as in megagrpo/megatron/heads.py."""


def passes_in_flight(layout: ParallelLayout, stage: int, microbatches: int) -> tuple[int, ...]:
    """Returns, for each model chunk, the most microbatches that await their backward pass, with the one going forward.

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
        group, within = divmod(index, pipeline * chunks)
        passes[within // min(pipeline, microbatches - group * pipeline)] += 1  # the last group may be smaller
    return tuple(passes)


@dataclass(frozen=True)
class Pass:
    """The pass of one microbatch through the layers of one rank."""

    architecture: Architecture
    layout: ParallelLayout
    element_bytes: int
    """Bytes of a weight or an activation: 2 or 4."""

    tokens: int
    """Tokens of the microbatch on this context rank, padding included."""

    longest: int
    """Tokens of its longest sequence, on all context ranks together."""

    device: str
    """cpu or cuda. On CPUs, norms and gates are made of several operations, which keep their intermediate results."""

    transformer_engine: bool
    """True: its layers, with flash attention and fused norms. False: Megatron's local ones with PackedAttention."""

    recompute: Recomputed = NOTHING_AGAIN
    """The layers and modules that train.recompute recomputes."""

    adapters: bool = False
    """Weights are frozen, and have low-rank adapters (train.lora)."""

    outputs_freed: bool = False
    """A stage's outputs are freed once they are sent (train.megatron.deallocate_pipeline_outputs)."""

    expert_imbalance: float = 1.0
    """Tokens of the busiest rank's experts over the mean."""

    @property
    def tokens_of_rank(self) -> int:
        """Returns the tokens of one rank between a layer's parallel parts, where sequence parallelism splits them."""
        return -(-self.tokens // self.layout.tensor)

    @property
    def hidden_bytes(self) -> int:
        """Returns the bytes of hidden states [tokens_of_rank, hidden]."""
        return self.tokens_of_rank * self.architecture.hidden * self.element_bytes

    @property
    def gathered_bytes(self) -> int:
        """Returns the bytes of hidden states [tokens, hidden]."""
        return self.tokens * self.architecture.hidden * self.element_bytes

    @property
    def expert_tokens(self) -> int:
        """Returns the tokens that pass one rank's experts. Ranks that share an expert's matrices pool their tokens."""
        experts = self.architecture.experts
        copies = experts.per_token if experts else 0
        return int(self.tokens_of_rank * copies * self.layout.expert_tensor * self.expert_imbalance)

    @property
    def score_bytes(self) -> int:
        """Returns the bytes of float32 scores of all heads here, of every token with its sequence; 0 if none are kept.

        PackedLatentAttention has heads of unequal size for values: torch then keeps the scores of whole sequences.
        """
        if self.architecture.latent is None or self.transformer_engine:
            return 0
        return int(4 * self.tokens * self.architecture.heads / self.layout.tensor * self.longest)

    # --- kept until the backward pass ---------------------------------------------------------------------------------

    def stage_bytes(self, stage: Stage, index: int, microbatches: int) -> int:
        """Returns the peak bytes that the layers of stage `index` keep, with several microbatches in flight.

        The first layer keeps the output of the embedding or of the previous stage. A stage keeps its own output until
        the gradient arrives, unless `outputs_freed`.
        """
        again = self.recompute.layers
        kinds = [self.layer_bytes(experts) for experts in (False, True)]
        held = 0
        for passes, layers in zip(passes_in_flight(self.layout, index, microbatches), stage.chunks, strict=True):
            counts = layer_counts(self.architecture, layers[again:])
            kept = sum(count * kind for count, kind in zip(counts, kinds, strict=True))
            kept += len(layers[:again]) * self.hidden_bytes  # whole layers are recomputed from their inputs
            ends_model = stage.head and layers is stage.chunks[-1]
            held += passes * (kept if ends_model or self.outputs_freed else kept + self.hidden_bytes)
        if stage.head:  # the last norm: its input is the last layer's output
            held += (3 if self.device == "cpu" else 2) * self.hidden_bytes
        return held

    def layer_bytes(self, experts: bool) -> int:
        """Returns the bytes that one layer keeps unless it is recomputed whole."""
        return sum(self._halves(experts))

    def _halves(self, experts: bool) -> tuple[int, int]:
        """Returns the bytes that a layer keeps of attention with its norm, and of its MLP or experts with theirs."""
        arch, modules = self.architecture, self.recompute.modules
        attention = self._grouped_attention() if arch.latent is None else self._latent_attention(arch.latent)
        mlp = self._experts(arch.experts) if experts and arch.experts else self._mlp(arch.ffn)
        first = second = self._norm(arch.hidden)
        # Transformer Engine has norms within the products that follow, which keep the norms' outputs themselves.
        fused = self.transformer_engine
        if "layernorm" in modules and not (fused and arch.latent is None):
            first = self.hidden_bytes
        if "layernorm" in modules and not (fused and not experts):
            second = self.hidden_bytes
        if experts and "moe" in modules:
            mlp = 0
        elif not experts and "mlp" in modules:
            mlp, second = 0, self.hidden_bytes if fused else second
        return first + attention, second + mlp

    def _norm(self, width: int) -> int:
        """Returns the bytes of input, output and reciprocal root (float32), plus the intermediate results on CPUs."""
        return self.tokens_of_rank * (width * (2 * self.element_bytes + self._between_bytes()) + 4)

    def _between_bytes(self) -> int:
        """Returns the intermediate bytes for each element of a norm on CPUs; 0 elsewhere. They are the scaled input, if
        the norm's weight has a gradient, and a float32 copy of a narrower input."""
        if self.device != "cpu":
            return 0
        return (0 if self.adapters else self.element_bytes) + (4 if self.element_bytes < 4 else 0)

    def _grouped_attention(self) -> int:
        cores = "core_attn" not in self.recompute.modules
        arch, tensor, context = self.architecture, self.layout.tensor, self.layout.context
        heads = arch.heads / tensor
        queries, keys = heads * arch.head_dim, max(1.0, arch.query_groups / tensor) * arch.head_dim
        columns = queries  # the output, which the projection after it keeps
        if self.transformer_engine:
            columns += queries + 2 * keys  # what the core keeps, or what it is recomputed from
        elif not cores:
            columns += 2 * queries + 2 * keys  # the product, and queries in an order of their own
        elif context == 1:
            columns += 2 * queries + 3 * keys  # rotated queries and keys, values within the product of all three
        else:
            # Keys and values of all context ranks, in the order of their sequences; a mask [queries, keys] as numbers.
            columns += queries + 2 * keys * context + self.longest
        if arch.qk_norm and self.transformer_engine:
            columns += queries + keys
        elif arch.qk_norm:
            # Keys are normed where they lie in the product, queries as a copy; outputs are kept only if the core is
            # recomputed from them: rotating them keeps nothing.
            columns += queries + (0 if cores else keys) + (queries + keys) * self._between_bytes() / self.element_bytes
        sums = 4 * heads if cores else 0  # logarithms of the softmax's sums, float32
        return int(self.tokens * (columns * self.element_bytes + sums))

    def _latent_attention(self, latent: LatentAttention) -> int:
        """Returns the bytes of down projections with their norms, then queries, keys, values and output by head."""
        arch, element = self.architecture, self.element_bytes
        heads = arch.heads / self.layout.tensor
        held = float(self._norm(latent.key_value_rank))
        held += 5 * self.tokens_of_rank * latent.rotary_dim * element
        if latent.query_rank is not None:
            held += self._norm(latent.query_rank)
        # Queries, keys and values; the local layers' core keeps others, which are made of them.
        kept = not self.transformer_engine or "mla_up_proj" not in self.recompute.modules
        held += self.tokens * heads * (kept * (2 * arch.head_dim + latent.value_dim) + latent.value_dim) * element
        if "core_attn" not in self.recompute.modules:
            held += 4 * self.tokens * heads if self.transformer_engine else self.score_bytes
        return int(held)

    def _mlp(self, ffn: int) -> int:
        """Returns the bytes of the first product (gate and up) and the second's input; CPUs keep two tensors more."""
        tensors = 5 if self.device == "cpu" else 3
        return int(self.tokens * ffn / self.layout.tensor * tensors * self.element_bytes)

    def _experts(self, experts: Experts) -> int:
        """Returns the bytes of router and dispatch for this rank's tokens, of experts here, and of shared experts."""
        held = self.tokens_of_rank * (experts.count * ROUTER_BYTES + experts.per_token * DISPATCH_BYTES)
        tensors = (6 if self.device == "cpu" else 3) - ("moe_act" in self.recompute.modules)
        columns = self.architecture.hidden + tensors * experts.ffn // self.layout.expert_tensor
        shared = 0 if "shared_experts" in self.recompute.modules else self._mlp(experts.shared_ffn)
        return held + self.expert_tokens * columns * self.element_bytes + shared

    # --- what computing takes besides ---------------------------------------------------------------------------------

    def working_bytes(self, stage: Stage) -> int:
        """Returns the peak bytes that the backward pass of one of the stage's layers takes besides the kept ones.

        It first recomputes what was not kept. If only some layers are recomputed whole, they are the first ones: their
        backward pass starts when all others are free again. A weight's gradient lies beside the buffer that it is added
        to.
        """
        whole = any(len(chunk) <= self.recompute.layers for chunk in stage.chunks)
        return max((self._working(experts, whole) for experts in self._kinds(stage)), default=0)

    def forward_bytes(self, stage: Stage) -> int:
        """Returns the peak bytes that a pass without gradients takes in one of the stage's layers."""
        return max((self._forward(experts) for experts in self._kinds(stage)), default=0)

    def _kinds(self, stage: Stage) -> list[bool]:
        """Returns the kinds of layers in the stage: False for an MLP, True for experts."""
        return [bool(kind) for kind, count in enumerate(layer_counts(self.architecture, stage.layers)) if count]

    def _working(self, experts: bool, whole: bool) -> int:
        arch, layout, element = self.architecture, self.layout, self.element_bytes
        rows, width = self.tokens, arch.ffn // layout.tensor
        if experts and arch.experts is not None:
            rows, width = self.expert_tokens, arch.experts.ffn // layout.expert_tensor
        gradients = rows * width * element
        weight = 0 if self.adapters else 2 * width * arch.hidden * element  # the largest matrix: gate and up
        needed = max(2 * gradients + self.hidden_bytes, gradients + weight + self.gathered_bytes, self.score_bytes)
        if whole:
            return needed + self.layer_bytes(experts) - self.hidden_bytes
        kept, made = self._halves(experts), replace(self, recompute=NOTHING_AGAIN)._halves(experts)
        again = [all_of_it - part for all_of_it, part in zip(made, kept, strict=True)]
        return max(needed + again[1], self.score_bytes + again[0])

    def _forward(self, experts: bool) -> int:
        """Returns the bytes of a layer without gradients: its hidden states, and the largest of MLP or experts, scores
        and rotation. Hidden states lie before, between and after the halves, and between stages."""
        arch, element = self.architecture, self.element_bytes
        hidden = (4 if self.layout.pipeline == 1 else 6) * self.hidden_bytes
        gathered = self.gathered_bytes if self.layout.tensor > 1 else 0
        if experts and arch.experts is not None:
            # Tokens on their way to the experts and back, in the order of either side.
            mlp = gathered + 4 * self.expert_tokens * arch.hidden * element
        elif self.adapters:
            # The product, that of its adapter, and their sum.
            mlp = 6 * self.tokens * arch.ffn // self.layout.tensor * element
        else:
            mlp = self._mlp(arch.ffn)
        return hidden + gathered + max(mlp, 5 * self.score_bytes // 2, self._rotation())

    def _rotation(self) -> int:
        """Returns the bytes of the query-key-value product, its normed part, and the rotated queries in float32
        (megagrpo/megatron/attention.py). Fused kernels keep nothing between; latent attention counts as 0."""
        arch, tensor, element = self.architecture, self.layout.tensor, self.element_bytes
        if self.transformer_engine or arch.latent is not None:
            return 0
        queries, keys = arch.heads * arch.head_dim / tensor, max(1.0, arch.query_groups / tensor) * arch.head_dim
        columns = queries + 2 * keys + (queries + keys if arch.qk_norm else 0)
        copies = 3 if element == 4 else 4  # queries wide, times the cosine, in halves swapped, and those times the sine
        return int(self.tokens * (columns * element + 4 * copies * queries + 8 * arch.head_dim))

    def logits_bytes(self, positions: int, *, gradients: bool, entropy: bool = True) -> int:
        """Returns the peak bytes for the logprobs of `positions` tokens; with `gradients`, backward pass included.

        Logits are made some columns at a time (megagrpo/megatron/heads.py; benchmarks/logits_memory.py measures it).
        `entropy`: the entropy is computed too. The output matrix has a gradient of its own size, unless it is frozen.
        """
        arch, tensor, element = self.architecture, self.layout.tensor, self.element_bytes
        rows = arch.padded_vocab(tensor) // tensor
        chunks = -(-rows // max(LOGIT_CHUNK_COLUMNS[self.device], LOGIT_CHUNK_ELEMENTS // max(positions, 1)))
        columns, fused = -(-rows // chunks), self.device == "cuda"
        chunk, hidden = 4 * positions * columns, positions * arch.hidden
        held = hidden * element + (self.gathered_bytes if tensor > 1 else 0)
        # On CPUs, float32 copies of what products take in bfloat16.
        narrow = element < 4
        copies = 4 * (hidden + columns * arch.hidden) if narrow and not fused else 0
        forward = 1.0 if fused or not entropy else 2.0  # float32 chunks that live at once
        if not gradients:
            return int(held + max(copies + chunk, forward * chunk))
        # The gradient in bfloat16, and what it multiplies; op by op, the factor of an entropy's gradient.
        backward = (1.0 if fused or not entropy else 2.0) + (0.5 if narrow else 0.0)
        again = chunk * (1.5 if copies else 0.5 if narrow else 1.0) + (4 * columns * arch.hidden if copies else 0)
        matrix = 0 if self.adapters else rows * arch.hidden * element
        return int(held + max(forward * chunk, max(backward * chunk, again) + matrix + hidden * (4 + element)))
