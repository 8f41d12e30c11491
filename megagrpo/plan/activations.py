"""Bytes that passes take on a training rank: what layers keep for backward passes, and what computing takes besides.

Layers are counted part by part (weights/families/parts) after Megatron's modules and megagrpo/megatron/attention.py, as
"Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198, section 4) does it. Its 34 s b h for
a layer with LayerNorm, dropout and a plain MLP is here: 2 norms, no dropout, a gated MLP, attention without scores.
tests/distributed/test_plan_activations.py compares it with what ranks allocate on CPUs: within 15 %.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import compress
from operator import mul

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.parameters import Stage
from megagrpo.weights.families.architecture import Architecture, Layer
from megagrpo.weights.families.parts.part import Pass

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
class RankPass(Pass):
    """The pass of one microbatch through the layers of one rank, with its stage's inputs, outputs and logits."""

    architecture: Architecture = field(kw_only=True)
    layers_again: int = 0  # the first layers of each model chunk that the backward pass recomputes whole
    outputs_freed: bool = False
    """A stage's outputs are freed once they are sent (train.megatron.deallocate_pipeline_outputs)."""

    # --- kept until the backward pass ---------------------------------------------------------------------------------

    def stage_bytes(self, stage: Stage, index: int, microbatches: int) -> int:
        """Returns the peak bytes that the layers of stage `index` keep, with several microbatches in flight.

        The first layer keeps the output of the embedding or of the previous stage. A stage keeps its own output until
        the gradient arrives, unless `outputs_freed`.
        """
        arch, again, held = self.architecture, self.layers_again, 0
        sizes = list(map(self.layer_bytes, arch.kinds))
        for passes, layers in zip(passes_in_flight(self.layout, index, microbatches), stage.chunks, strict=True):
            kept = sum(map(mul, arch.tally(layers[again:]), sizes))
            kept += len(layers[:again]) * self.hidden_bytes  # whole layers are recomputed from their inputs
            ends_model = stage.head and layers is stage.chunks[-1]
            held += passes * (kept if ends_model or self.outputs_freed else kept + self.hidden_bytes)
        if stage.head:  # the last norm: its input is the last layer's output
            held += (3 if self.device == "cpu" else 2) * self.hidden_bytes
        return held

    def layer_bytes(self, layer: Layer) -> int:
        """Returns the bytes that one layer keeps unless it is recomputed whole."""
        return sum(self._halves(layer))

    def _halves(self, layer: Layer) -> tuple[int, int]:
        """Returns the bytes that a layer keeps of attention with its norm, and of its MLP or experts with theirs."""
        again = layer.mlp.recomputed_as in self.modules
        first = self._norms(layer, layer.attention.holds_norm, again=False) + layer.attention.kept_bytes(self)
        return first, self._norms(layer, layer.mlp.holds_norm, again) + (0 if again else layer.mlp.kept_bytes(self))

    def _norms(self, layer: Layer, holder: str | None, again: bool) -> int:
        """Returns the bytes kept of the norms around a part. What comes of the latter is added, and not kept."""
        wide = self.architecture.zero_centred_norms and self.device != "cpu"  # on CPUs, norm_bytes has that copy
        norm = self.norm_bytes(self.hidden) + wide * self.tokens_of_rank * self.hidden * (4 - self.element_bytes)
        after = norm - self.hidden_bytes if layer.norms.outputs else 0
        return after + (self._norm_before(norm, holder, again) if layer.norms.inputs else self.hidden_bytes)

    def _norm_before(self, norm: int, holder: str | None, again: bool) -> int:
        """Returns the bytes kept of the norm before a part. Transformer Engine has it within the part's `holder`, if
        there is one, which keeps the norm's output itself. `again`: the part is recomputed."""
        within = self.transformer_engine and holder is not None
        recomputed = again if within else "layernorm" in self.modules
        return self.hidden_bytes if recomputed else norm

    # --- what computing takes besides ---------------------------------------------------------------------------------

    def working_bytes(self, stage: Stage) -> int:
        """Returns the peak bytes that the backward pass of one of the stage's layers takes besides the kept ones.

        It first recomputes what was not kept. If only some layers are recomputed whole, they are the first ones: their
        backward pass starts when all others are free again. A weight's gradient lies beside the buffer that it is added
        to.
        """
        whole = any(len(chunk) <= self.layers_again for chunk in stage.chunks)
        return max((self._working(kind, whole) for kind in self._kinds(stage)), default=0)

    def forward_bytes(self, stage: Stage) -> int:
        """Returns the peak bytes that a pass without gradients takes in one of the stage's layers."""
        return max((self._forward(kind) for kind in self._kinds(stage)), default=0)

    def _kinds(self, stage: Stage) -> list[Layer]:
        return list(compress(self.architecture.kinds, self.architecture.tally(stage.layers)))

    def _working(self, layer: Layer, whole: bool) -> int:
        rows, width = layer.mlp.widest(self)
        scores, gradients = layer.attention.score_bytes(self), rows * width * self.element_bytes
        # The largest matrix: gate and up.
        weight = 0 if self.adapters else 2 * width * self.hidden * self.element_bytes
        needed = max(2 * gradients + self.hidden_bytes, gradients + weight + self.gathered_bytes, scores)
        if whole:
            return needed + self.layer_bytes(layer) - self.hidden_bytes
        kept, made = self._halves(layer), replace(self, modules=frozenset())._halves(layer)
        again = [all_of_it - part for all_of_it, part in zip(made, kept, strict=True)]
        return max(needed + again[1], scores + again[0])

    def _forward(self, layer: Layer) -> int:
        """Returns the bytes of a layer without gradients: its hidden states, and the larger of its halves.

        Hidden states lie before, between and after the halves, and between stages.
        """
        hidden = (4 if self.layout.pipeline == 1 else 6) * self.hidden_bytes
        gathered = self.gathered_bytes if self.layout.tensor > 1 else 0
        return hidden + gathered + max(layer.mlp.forward_bytes(self), layer.attention.forward_bytes(self))

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
