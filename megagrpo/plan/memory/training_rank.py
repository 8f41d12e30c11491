"""Memory of one training rank in each phase: its models, the batch, activations, logits, and what torch keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from megagrpo.layout.parallel import ParallelLayout, RankCoordinates, layers_of_chunk
from megagrpo.plan.memory.activations import Pass, forward_bytes, stage_bytes, working_bytes
from megagrpo.plan.memory.engine import GIB, MIB
from megagrpo.plan.memory.logits import end_bytes, logits_bytes
from megagrpo.plan.memory.models import ModelMemory, model_memory
from megagrpo.plan.memory.parts import Part
from megagrpo.plan.parameters import fused_layers
from megagrpo.recipe.defaults import dtype_name
from megagrpo.recipe.passes import computes_old_logprobs
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.weights.families.architecture import Architecture

CONTEXT_BYTES = 512 * MIB
"""Of each process on a GPU: CUDA's context and libraries' workspaces. Assumed: 0.4 to 0.6 GiB on recent GPUs."""
TRAINING_NCCL_BYTES = GIB
"""Buffers of a training rank's process groups. Assumed; NCCL takes some MiB for each peer and channel."""
FRAGMENTATION = 0.05
"""What torch's allocator cannot use, of all that passes allocate: microbatches differ in length. Assumed."""
TOKEN_BYTES = 37
"""A token of the loaded batch (megatron/batch.py): four int64, a float32 and a bool."""
RESPONSE_TOKEN_BYTES = 72
"""A response token on the last stage (megatron/batch.py): six int64 and six float32."""

LOWERED_BY: Mapping[str, tuple[str, ...]] = {
    "parameters": ("train.layout.tensor", "train.layout.pipeline"),
    "gradients": ("train.layout.tensor", "train.layout.pipeline", "train.lora"),
    "optimizer": ("train.layout.data", "train.layout.tensor", "train.layout.pipeline", "train.lora"),
    "reference": ("train.layout.tensor", "train.layout.pipeline", "algorithm.kl.coefficient"),
    "critic": ("train.layout.tensor", "train.layout.pipeline", "train.layout.data"),
}


def bucket_bytes(recipe: AnyRecipe, weights: int) -> int:
    """At each end of a weight sync: two buckets (weights/transport/buckets.py), none larger than the `weights` there.
    Files need none, and external engines get files unless the recipe says otherwise."""
    if not isinstance(recipe, Recipe) or recipe.weights.transfer == "disk":
        return 0
    by_files = recipe.rollout.engine == "external" and recipe.weights.transfer == "auto"
    return 0 if by_files else 2 * min(recipe.weights.bucket_bytes, weights)


@dataclass(frozen=True)
class TrainingRank:
    """A training rank of one pipeline stage, and the parts of its memory in each phase."""

    recipe: AnyRecipe
    architecture: Architecture
    device: str
    stage: int
    critic: Architecture | None
    expert_imbalance: float

    @cached_property
    def layout(self) -> ParallelLayout:
        return self.recipe.train.layout.parallel()

    @cached_property
    def models(self) -> ModelMemory:
        rank = self.stage * (self.layout.ranks // self.layout.pipeline)
        where = RankCoordinates(rank, 0, self.stage, 0, 0, 0, 0, 0)
        return model_memory(self.architecture, self.recipe, where, self.device, self.critic)

    @cached_property
    def is_last(self) -> bool:
        return self.stage == self.recipe.train.layout.pipeline - 1

    @cached_property
    def layers(self) -> list[int]:
        layers, chunks = self.architecture.layers, range(self.layout.virtual_pipeline)
        return [layer for chunk in chunks for layer in layers_of_chunk(layers, self.layout, self.stage, chunk)]

    @cached_property
    def longest(self) -> int:
        if isinstance(self.recipe, Recipe):
            return self.recipe.data.prompt_tokens_max + self.recipe.rollout.response_tokens_max
        return self.recipe.data.tokens_max

    @cached_property
    def sequences(self) -> int:
        """Of a data rank in one minibatch."""
        recipe = self.recipe
        if isinstance(recipe, Recipe):
            samples = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
            return -(-samples // (recipe.algorithm.minibatches * recipe.train.layout.data))
        return -(-recipe.data.examples_per_step // recipe.train.layout.data)

    @cached_property
    def microbatches(self) -> int:
        """Of a minibatch whose sequences are all as long as can be."""
        train = self.recipe.train
        each = max(1, train.tokens_per_microbatch * train.layout.context // self.longest)
        return -(-self.sequences // each)

    def of_tokens(self, capacity: int) -> Pass:
        train = self.recipe.train
        whole = -(-self.sequences * self.longest // train.layout.context)
        return Pass(
            self.architecture,
            self.layout,
            2 if dtype_name(self.recipe, self.device) == "bfloat16" else 4,
            min(capacity, whole),
            self.longest,
            self.device,
            fused_layers(train, self.device),
            train.recompute,
            train.lora is not None,
            self.expert_imbalance,
        )

    @property
    def passes_before_update(self) -> bool:
        if not isinstance(self.recipe, Recipe):
            return False
        algorithm = self.recipe.algorithm
        return computes_old_logprobs(algorithm) or algorithm.kl.coefficient > 0 or algorithm.critic is not None

    # --- phases -------------------------------------------------------------------------------------------------------

    def rollout(self, in_turns: bool) -> Iterator[Part]:
        offload = self.recipe.train.offload
        can_move = "train.offload" if in_turns else None
        yield from self._models(offload, can_move)
        if not offload:  # moving anything empties torch's cache as well
            yield from self._cached(0, can_move)
        yield from self._overhead()

    def logprobs(self) -> Iterator[Part]:
        yield from self._models()
        yield from self._batch()
        yield from self.pass_without_gradients
        yield from self._overhead()

    def update(self) -> Iterator[Part]:
        yield from self._models()
        yield from self._batch()
        yield from self.pass_with_gradients
        yield from self._overhead()

    def weight_sync(self, in_turns: bool) -> Iterator[Part]:
        away = [part for part in self.recipe.train.offload if part != "parameters"]  # as cluster/weight_sync.py
        can_move = "train.offload" if in_turns else None
        yield from self._models(away, can_move, stay="parameters")
        yield from self._batch()
        used = bucket_bytes(self.recipe, self.models.policy.parameters)
        if used:
            yield Part("sync buckets", used, ("weights.bucket_bytes",))
        if self.recipe.train.lora:
            # Copies of the matrices that adapters are added to: at most all that is not vocabulary.
            merged = self.models.policy.parameters - self._vocabulary_bytes()
            used += merged
            yield Part("merged weights", merged, ("train.layout.tensor", "train.layout.pipeline"))
        if not away:
            yield from self._cached(used, can_move)
        yield from self._overhead()

    @cached_property
    def pass_with_gradients(self) -> tuple[Part, ...]:
        """Activations of all microbatches on the way, and the larger of logits and a layer's backward pass."""
        train = self.recipe.train
        work = self.of_tokens(train.tokens_per_microbatch)
        kept = stage_bytes(work, self.stage, self.microbatches)
        layer = working_bytes(work, self.layers)
        logits = 0
        if self.is_last:
            kept += end_bytes(work)
            entropy = isinstance(self.recipe, Recipe)
            logits = logits_bytes(work, work.tokens, gradients=True, entropy=entropy)
        lowered = () if train.recompute == "full" else ("train.recompute",)
        microbatch = ("train.tokens_per_microbatch",) if self._can_shrink else ()
        split = (*microbatch, "train.layout.context", "train.layout.tensor")
        largest = Part("logits", logits, split) if logits > layer else Part("one layer's backward pass", layer, split)
        return Part("activations", kept, lowered + split), largest

    @cached_property
    def pass_without_gradients(self) -> tuple[Part, ...]:
        train = self.recipe.train
        work = self.of_tokens(train.logprob_tokens_per_microbatch or train.tokens_per_microbatch)
        layer = forward_bytes(work, self.layers)
        logits = 0
        if self.is_last:
            logits = logits_bytes(work, work.tokens, gradients=False, entropy=False)
            logits += work.hidden_bytes
        given = "train.logprob_tokens_per_microbatch" if train.logprob_tokens_per_microbatch else None
        lowered = (given or "train.tokens_per_microbatch", "train.layout.context", "train.layout.tensor")
        return (Part("logits", logits, lowered) if logits > layer else Part("one layer", layer, lowered),)

    @property
    def _can_shrink(self) -> bool:
        train = self.recipe.train
        return train.tokens_per_microbatch * train.layout.context > self.longest

    @cached_property
    def _passing(self) -> int:
        """The most that passes of a step allocate at once."""
        return max(sum(part.bytes for part in self.pass_with_gradients), self._without_gradients)

    @property
    def _without_gradients(self) -> int:
        return sum(part.bytes for part in self.pass_without_gradients) if self.passes_before_update else 0

    def _models(self, released: Collection[str] = (), can_move: str | None = None, stay: str = "") -> Iterator[Part]:
        first = (can_move,) if can_move else ()
        for name, size in self.models.parts(released).items():
            movable = first if name in LOWERED_BY and name != stay else ()
            yield Part(name, size, movable + self._that_lower(name))

    def _that_lower(self, name: str) -> tuple[str, ...]:
        train = self.recipe.train
        fields = list(LOWERED_BY.get(name, ()))
        if fields and self.architecture.experts is not None:
            fields.insert(0, "train.layout.expert")
        if name == "optimizer" and not train.distributed_optimizer:
            fields[fields.index("train.layout.data")] = "train.distributed_optimizer"
        return tuple(field for field in fields if field != "train.lora" or train.lora is None)

    def _batch(self) -> Iterator[Part]:
        recipe = self.recipe
        steps = recipe.algorithm.minibatches if isinstance(recipe, Recipe) else 1
        tokens = self.sequences * steps * self.longest // recipe.train.layout.context
        each = TOKEN_BYTES + (RESPONSE_TOKEN_BYTES if self.is_last else 0)
        train = recipe.train
        if (train.logprob_tokens_per_microbatch or 0) > train.tokens_per_microbatch:
            each *= 2  # the batch again, in larger microbatches
        per_step = "rollout.prompts_per_step" if isinstance(recipe, Recipe) else "data.examples_per_step"
        yield Part("batch", tokens * each, ("train.layout.data", per_step))

    def _cached(self, used: int, lowered: str | None) -> Iterator[Part]:
        """On GPUs torch keeps the memory of passes that are over; an engine on the same device does not get it."""
        left = self._passing - used
        if self.device == "cuda" and left > 0:
            yield Part("kept by torch's allocator", left, (lowered,) if lowered else ())

    def _overhead(self) -> Iterator[Part]:
        if self.device == "cuda":
            nccl = TRAINING_NCCL_BYTES if self.layout.ranks > 1 else 0
            lost = int(FRAGMENTATION * self._passing)
            yield Part("context, NCCL, fragmentation", CONTEXT_BYTES + nccl + lost)

    def _vocabulary_bytes(self) -> int:
        arch, tensor = self.architecture, self.recipe.train.layout.tensor
        matrices = (self.stage == 0) + (self.is_last and (not arch.tied_embeddings or self.stage > 0))
        element = 2 if dtype_name(self.recipe, self.device) == "bfloat16" else 4
        return matrices * arch.padded_vocab(tensor) // tensor * arch.hidden * element
