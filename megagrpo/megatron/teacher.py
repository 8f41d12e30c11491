"""Teachers on the training ranks: models that are not trained, what they say of a batch, and the divergence of the
policy from teachers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from megagrpo.algorithm.distillation import (
    FullVocabularyConfig,
    ObjectiveConfig,
    SampledTokenConfig,
    StudentTopKConfig,
    TeacherTopKConfig,
    divergence_of_top,
)
from megagrpo.batching.rank_batches import RankBatch
from megagrpo.errors import Problem, RankError
from megagrpo.layout.parallel import rank_grid
from megagrpo.megatron.batch import Batch, ResponseTokens, TokenTensors, as_tensors
from megagrpo.megatron.config import transformer_config
from megagrpo.megatron.divergence_head import Compared, top_logprobs, vocabulary_divergence
from megagrpo.megatron.heads import Head, VocabularyShard, head_scale, output_weight, vocabulary_logprobs
from megagrpo.megatron.kept_head import kept_logprobs
from megagrpo.megatron.model import build_chunks, named_tensors, read_tokens, unwrapped
from megagrpo.megatron.offload import HostMemory, bytes_of
from megagrpo.megatron.owners import keys_of, of_tokens_wanted, owners_of, to_owners
from megagrpo.megatron.process import further_groups, in_groups
from megagrpo.megatron.state import parameters_of
from megagrpo.megatron.trained_model import TrainedModel
from megagrpo.recipe.defaults import dtype_name, frozen_config, recipe_for_teacher, train_config
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.boxes import Box, Fill, Manifest, Placement, Storage
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC, TE_SPEC

if TYPE_CHECKING:
    from megagrpo.megatron.rank import TrainRank

NOTHING = -80.0
"""A logprob that counts nothing in float32, with finite differences."""
Figure = Literal["divergence", "agrees", "of_teacher"]
"""A figure of tokens, as in Compared."""


class RanksTeacher:
    """A model that is not trained, on this rank: in the policy's layout, or in its own.

    With `offload` its weights are in host memory but inside of `here`; its output matrix stays on the device, split as
    the policy's.
    """

    def __init__(
        self, directory: str, name: str, recipe: Recipe, policy: TrainedModel, device: str, timeout_seconds: float
    ) -> None:
        """Builds this rank's part and loads it. Collective over all ranks. Raises ModelError or RecipeError.

        timeout_seconds: of collective operations, if it has a layout of its own."""
        self.architecture, self._directory = read_architecture(directory), directory
        its_recipe, of_policy = recipe_for_teacher(recipe, name), policy.layout
        self.layout = its_recipe.train.layout.parallel()
        self.where, apart = rank_grid(self.layout)[policy.where.rank], self.layout != of_policy
        self._groups = further_groups(self.layout, timeout_seconds) if apart else {}
        dtype: torch.dtype = getattr(torch, dtype_name(recipe, device))
        train = frozen_config(train_config(its_recipe), self.architecture)
        config = transformer_config(self.architecture, train, dtype, device)
        side = TE_SPEC if config.transformer_impl == "transformer_engine" else LOCAL_SPEC
        with in_groups(self._groups):
            self.chunks = build_chunks(self.architecture, config, train.layout.parallel())
        of_dtype = str(dtype).removeprefix("torch.")
        manifest = side.manifest(self.architecture, train.layout.parallel(), self.where, of_dtype)
        load_files(directory, manifest, named_tensors(self.chunks), self.architecture)
        for parameter in parameters_of(self.chunks).values():
            parameter.requires_grad_(False)
        self._weight: Tensor | None = None
        if policy.where.pipeline == of_policy.pipeline - 1:
            rows = policy.architecture.padded_vocab(of_policy.tensor) // of_policy.tensor
            fits = of_policy.tensor == 1 or self.architecture.padded_vocab(of_policy.tensor) == rows * of_policy.tensor
            if fits and not apart:
                self._weight = output_weight(unwrapped(self.chunks[-1]))
            else:
                self._weight = self._rows(policy.where.tensor * rows, rows, dtype)
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []
        """Storages that are in host memory but inside of `here`, and their bytes there."""
        if getattr(recipe.teachers[name], "offload", False):
            self._move_to_host()

    def _rows(self, first: int, rows: int, dtype: torch.dtype) -> Tensor:
        """Loads the output matrix's rows from id `first` on: [rows, hidden]. Those beyond its vocabulary are zeros."""
        role = "embedding" if self.architecture.tied_embeddings else "head"
        tensor = next(tensor for tensor in self.architecture.tensors() if tensor.role == role)
        hidden, count = self.architecture.hidden, max(0, min(rows, self.architecture.vocab - first))
        weight = torch.empty(rows, hidden, dtype=dtype, device=torch.cuda.current_device())
        storage = Storage("head", (rows, hidden), str(dtype).removeprefix("torch."))
        placed = Placement("head", (0, 0), (0, 1), Box(tensor.name, (first, 0), (count, hidden)))
        fills = (Fill("head", (count, 0), (rows - count, hidden)),) if count < rows else ()
        held = Manifest("a teacher's output matrix", {"head": storage}, (placed,) if count else (), fills)
        load_files(self._directory, held, {"head": weight}, self.architecture)
        return weight

    def _move_to_host(self) -> None:
        kept = None if self._weight is None else self._weight.untyped_storage()
        found = dict.fromkeys(tensor.untyped_storage() for tensor in parameters_of(self.chunks).values())
        storages = [storage for storage in found if len(storage) and storage != kept]
        if not storages:
            return
        self._memory = HostMemory(sum(map(len, storages)), pinned=storages[0].device.type == "cuda")
        for storage, here in zip(storages, self._memory.bytes.split([*map(len, storages)]), strict=True):
            here.copy_(bytes_of(storage))
            self._away.append((storage, here))
            storage.resize_(0)
        torch.cuda.empty_cache()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Keeps all weights on the device inside the block."""
        for storage, content in self._away:
            storage.resize_(len(content))
            bytes_of(storage).copy_(content, non_blocking=True)
        yield
        if self._away:
            torch.cuda.synchronize()
            for storage, _ in self._away:
                storage.resize_(0)
            torch.cuda.empty_cache()

    def read_tokens(self, batch: Batch, read: Callable[[Tensor, ResponseTokens], Tensor]) -> TokenTensors:
        """Runs a pass over the batch, as model.read_tokens. Raises RankError for an id that its vocabulary lacks."""
        largest = max((int(packed.tokens.max()) for packed, _ in batch.joined), default=0)
        if largest >= self.architecture.vocab:
            needed = f"ids below {self.architecture.vocab}, the teacher's vocabulary"
            where, fix = f"tokens of the step, for the teacher {self._directory}", "a policy that samples no such id"
            raise RankError(Problem(where, f"{largest}", needed, fix))
        with self.here(), in_groups(self._groups):
            return read_tokens(self.chunks, batch, read)

    def head(self, shard: VocabularyShard, temperature: float) -> Head:
        """Returns its output matrix. Raises ValueError on ranks without logits."""
        if self._weight is None:
            raise ValueError("this rank has no logits")
        return Head(self._weight, shard, head_scale(self.architecture, temperature))


class Teachers:
    """All teachers of a rank, by their places among the recipe's; and what they say of the loaded batch."""

    def __init__(self, recipe: Recipe, rank: TrainRank) -> None:
        """Makes it without models."""
        self._recipe, self._rank, self._policy = recipe, rank, rank.policy
        self._temperature = recipe.rollout.temperature
        self._numbers = {name: number for number, name in enumerate(recipe.teachers)}
        self._models: dict[int, RanksTeacher] = {}
        """Models of kind ranks. Other teachers on the ranks are the reference."""
        self.begin_batch()

    def begin_batch(self) -> None:
        """Forgets what was said of the batch before."""
        self.logprobs: TokenTensors | None = None
        """Logprobs of the response tokens, NaN for tokens without a teacher on the ranks; None: not computed."""
        self.end_update()
        self._seen: dict[int, dict[Figure, Tensor]] = {}
        """By microbatch, as the update first saw it."""

    def seen(self, figure: Figure) -> TokenTensors:
        """Returns a figure of the response tokens as the update first saw it, float32, NaN for tokens without."""
        return tuple(self._seen[index][figure] for index in sorted(self._seen))

    def add(self, name: str, teacher: RanksTeacher) -> None:
        self._models[self._numbers[name]] = teacher

    @torch.no_grad()
    def read(
        self, batches: Mapping[str, Sequence[RankBatch] | None], batch: Batch, of_reference: TokenTensors | None
    ) -> None:
        """Runs these teachers' passes over the policy's batch, or over their own. They find logprobs of its tokens, or
        for an objective in the loss the hidden states before them. of_reference: the reference's logprobs of the
        policy's batch, if they are known.

        Raises RankError if a number that a teacher found for its own tokens is not finite."""
        logprobs = [torch.full_like(response.rollout_logprobs, torch.nan) for response in batch.responses]
        for name, apart in batches.items():
            number = self._numbers[name]

            def read(output: Tensor, response: ResponseTokens, number: int = number) -> Tensor:
                if self._objective.in_loss:
                    return output[response.positions]
                head, kept = self._head(number, self._temperature), response.kept
                kept = kept and replace(kept, largest=min(kept.largest, head.shard.vocab - 1))
                return kept_logprobs(output, response.positions, response.labels, kept, head, entropy=False)[0]

            its = [_is_of(response, number) for response in batch.responses]
            if apart is not None:
                own = self._pass_apart(name, apart, batch.responses, its, read)
            else:
                known = None if self._objective.in_loss or number in self._models else of_reference
                found = self._pass(name, batch, read) if known is None else known
                own = tuple(values[of_teacher] for values, of_teacher in zip(found, its, strict=True))
            for response, of_teacher, values in zip(batch.responses, its, own, strict=True):
                _require_finite(name, response, of_teacher, values)
            if self._objective.in_loss:
                self._hidden[number] = own
                continue
            for numbers, of_teacher, values in zip(logprobs, its, own, strict=True):
                numbers[of_teacher] = values
        self.logprobs = None if self._objective.in_loss else tuple(logprobs)

    def end_update(self) -> None:
        """Frees all that losses read."""
        self._hidden: dict[int, TokenTensors] = {}
        """Hidden states before a teacher's response tokens, [its tokens, hidden], by teacher."""
        self._reference_weight: Tensor | None = None
        """The reference's rows of the output matrix, on the device if losses read it."""

    def compare(
        self, output: Tensor, response: ResponseTokens, of_batch: int, *, entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns what ModelRank.logprobs does, and the divergence from the tokens' teachers, float32 [tokens], 0 for
        tokens without; None if the loss has none.

        One product with the output matrix serves all, unless sampling was from kept sets, the objective has another
        temperature, or a teacher fewer ids than the policy. Where teachers alone teach, logprobs have no gradient. A
        microbatch without teachers reaches all weights, too, by zeros.
        of_batch: the microbatch's index in the batch.
        """
        distillation, vocab = self._recipe.algorithm.distillation, self._policy.architecture.vocab
        logprobs = self._rank.logprobs
        if distillation is None or not distillation.objective.in_loss:
            return *logprobs(output, response, entropy=entropy), None
        objective, parts = distillation.objective, list[tuple[Tensor, Compared]]()
        temperature = (isinstance(objective, FullVocabularyConfig) and objective.temperature) or self._temperature
        shared, policy = response.kept is None and temperature == self._temperature, self._head(None, temperature)
        shared = shared and all(self._vocab(number) == vocab for number in self._hidden)
        for number, hidden in self._hidden.items():
            at = _is_of(response, number).nonzero()[:, 0]
            given = response.positions[at], response.labels[at], policy, self._head(number, temperature)
            parts.append((at, compared(objective, output, *given, hidden[of_batch], entropy and shared)))
        if isinstance(objective, TeacherTopKConfig) and len(self._recipe.teachers_on_ranks) < len(self._numbers):
            parts.append(_compared_with_asked(objective, output, response, policy, entropy and shared))
        divergence = output.new_zeros(len(response.rows), dtype=torch.float32)
        seen = {figure: torch.full_like(divergence, torch.nan) for figure in get_args(Figure)}
        others = torch.ones_like(divergence, dtype=torch.bool)
        for at, found in parts:
            divergence, others[at] = divergence.index_put((at,), found.divergence), False
            for figure, values in seen.items():
                values[at] = getattr(found, figure).detach().float()
        self._seen.setdefault(of_batch, seen)
        with torch.set_grad_enabled(not parts or not self._recipe.teachers_alone):
            if not parts or not shared:
                return *logprobs(output, response, entropy=entropy), divergence if parts else None
            rest = others.nonzero()[:, 0]
            values = [(at, found.logprobs, found.entropies) for at, found in parts]
            if len(rest):
                of_rest = replace(response, positions=response.positions[rest], labels=response.labels[rest])
                values.append((rest, *logprobs(output, of_rest, entropy=entropy)))
            places, *of_parts = (torch.cat(each) for each in zip(*values, strict=True))
            of_tokens, entropies = (each[places.argsort()] for each in of_parts)
        return of_tokens, entropies, divergence

    @property
    def _objective(self) -> ObjectiveConfig:
        distillation = self._recipe.algorithm.distillation
        if distillation is None:
            raise ValueError("a recipe without distillation")
        return distillation.objective

    def _pass(self, name: str, batch: Batch, read: Callable[[Tensor, ResponseTokens], Tensor]) -> TokenTensors:
        if (number := self._numbers[name]) in self._models:
            return self._models[number].read_tokens(batch, read)
        with self._policy.reference_here() as reference:
            if batch.responses:
                own = output_weight(unwrapped(self._policy.chunks[-1]))
                weight, goes = reference.of(own), "reference" in self._recipe.train.offload
                self._reference_weight = weight.clone() if goes and weight is not own else weight
            with reference.in_place_of_policy(), self._rank.by_own_routes():
                return self._policy.read_tokens(batch, read)

    def _pass_apart(
        self,
        name: str,
        batches: Sequence[RankBatch],
        responses: Sequence[ResponseTokens],
        its: Sequence[Tensor],
        read: Callable[[Tensor, ResponseTokens], Tensor],
    ) -> TokenTensors:
        """Runs a pass over a teacher's own batches, and brings its hidden states to the ranks that train on the tokens.
        Returns for the tokens that are `its`, of each of the `responses`, hidden states or what `read` makes of them.
        """
        model: RanksTeacher | TrainedModel = self._models.get(self._numbers[name], self._policy)
        layout, where, of_policy = model.layout, model.where, self._policy.layout
        batch, last = batches[where.data], where.pipeline == layout.pipeline - 1
        dtype, device = unwrapped(model.chunks[0]).config.params_dtype, next(model.chunks[0].parameters()).device
        tensors = as_tensors(batch, layout, where.context, device, has_logits=last, at_once=1)
        found, parts = [*self._pass(name, tensors, lambda output, response: output[response.positions])], []
        for index, micro in enumerate(micro for minibatch in batch.minibatches for micro in minibatch):
            tokens = tensors.responses[index : index + 1]
            values = found.pop(0) if found else torch.empty(0, model.architecture.hidden, dtype=dtype, device=device)
            of_values = keys_of(tokens, device), owners_of(micro, tokens, device)
            parts.append(to_owners(values, *of_values, of_policy, range(where.tensor, of_policy.tensor, layout.tensor)))
        values, keys = (torch.cat(each) for each in zip(*parts, strict=True))
        parts.clear()
        wanted = keys_of(responses, device)[torch.cat([keys[:0].bool(), *its])]
        hidden = of_tokens_wanted(values, keys, wanted).split([int(of.sum()) for of in its])
        if self._objective.in_loss:
            return hidden
        made = []
        for response, of_teacher, of_tokens in zip(responses, its, hidden, strict=True):
            positions = (of_teacher.cumsum(0) - 1).where(of_teacher, len(of_tokens))
            padded = torch.nn.functional.pad(of_tokens, (0, 0, 0, 1))
            made.append(read(padded, replace(response, positions=positions))[of_teacher])
        return tuple(made)

    def _vocab(self, number: int | None) -> int:
        """Returns the number of ids that a teacher and the policy both have."""
        vocab, teacher = self._policy.architecture.vocab, None if number is None else self._models.get(number)
        return vocab if teacher is None else min(vocab, teacher.architecture.vocab)

    def _head(self, number: int | None, temperature: float) -> Head:
        """Returns the output matrix of a teacher, of ids that the policy has as well; None: of the policy."""
        if number in self._models:
            return self._models[number].head(self._rank.shard(self._vocab(number)), temperature)
        head, weight = self._rank.head(temperature), self._reference_weight
        return head if number is None or weight is None else replace(head, weight=weight)


def _require_finite(name: str, response: ResponseTokens, of_teacher: Tensor, values: Tensor) -> None:
    """Raises RankError if a value of the teacher's own tokens is not finite: [its tokens] or [its tokens, hidden].
    of_teacher: bool [response tokens]."""
    wrong = ~(values[:, None] if values.dim() == 1 else values).isfinite().all(1)
    if wrong.any():
        at = of_teacher.nonzero()[wrong.nonzero()[0, 0], 0]
        given = f"not finite for {int(wrong.sum())} tokens, such as token {int(response.index[at])}"
        given += f" of response {int(response.rows[at])} of the step"
        fix = "check the teacher's weights, or choose another teacher"
        raise RankError(Problem(f"teacher {name}", given, "numbers", fix))


def _is_of(response: ResponseTokens, number: int) -> Tensor:
    """Returns which response tokens have this teacher: bool [tokens]."""
    if response.teachers is None:
        return torch.zeros_like(response.rows, dtype=torch.bool)
    return response.teachers == number


def compared(
    objective: ObjectiveConfig,
    hidden: Tensor,
    positions: Tensor,
    labels: Tensor,
    policy: Head,
    teacher: Head,
    teacher_hidden: Tensor,
    entropy: bool,
) -> Compared:
    """Compares the policy with a teacher on the ranks. With the top k, agreement is among these ids.

    hidden: [tokens, hidden] of the policy; positions: int64 [n], rows of it; labels: int64 [n]; teacher_hidden:
    [n, the teacher's hidden].
    """
    where, policy = (hidden, positions, labels), replace(policy, shard=teacher.shard)
    match objective:
        case FullVocabularyConfig():
            heads, how = (policy, teacher_hidden, teacher), objective.divergence
            return vocabulary_divergence(*where, *heads, divergence=how, beta=objective.beta, entropy=entropy)
        case StudentTopKConfig():
            top = top_logprobs(hidden[positions], labels, policy, objective.k, entropy=entropy)
            asked = torch.cat([labels[:, None], top.ids], 1)
            everywhere = torch.arange(len(labels), device=labels.device)
            with torch.no_grad():
                of_teacher, _ = vocabulary_logprobs(teacher_hidden, everywhere, asked, teacher, entropy=False)
            known = torch.cat([top.of_labels[:, None], top.logprobs], 1), top.entropies, top.normalizer
            found = _compared_at(objective, *where, policy, top.ids, of_teacher[:, 1:], entropy, known)
            return replace(found, of_teacher=of_teacher[:, 0], agrees=of_teacher[:, 1:].argmax(1) == 0)
        case TeacherTopKConfig():
            top = top_logprobs(teacher_hidden, labels, teacher, objective.k)
            found = _compared_at(objective, *where, policy, top.ids, top.logprobs, entropy)
            return replace(found, of_teacher=top.of_labels)
        case SampledTokenConfig():
            raise ValueError("sampled_token is a part of the advantages, not of the loss")


def _compared_with_asked(
    objective: TeacherTopKConfig,
    hidden: Tensor,
    response: ResponseTokens,
    policy: Head,
    entropy: bool,
) -> tuple[Tensor, Compared]:
    """Returns the places of the response tokens whose teachers were asked, int64 [n], and what `compared` does for
    these."""
    if (taught := response.taught) is None:
        at = response.rows.new_zeros(0)
        ids, logprobs = at.new_zeros(0, objective.k), hidden.new_zeros(0, objective.k, dtype=torch.float32)
    else:
        at = taught.logprobs[:, 0].isfinite().nonzero()[:, 0]
        ids, logprobs = taught.ids[at], taught.logprobs[at]
    where = hidden, response.positions[at], response.labels[at]
    return at, _compared_at(objective, *where, policy, ids, logprobs, entropy)


def _compared_at(
    objective: TeacherTopKConfig | StudentTopKConfig,
    hidden: Tensor,
    positions: Tensor,
    labels: Tensor,
    policy: Head,
    ids: Tensor,
    of_teacher: Tensor,
    entropy: bool,
    known: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Compared:
    """Compares the policy with a teacher's logprobs at ids, int64 and float32 [n, k]. known: of the labels and the ids,
    as in `vocabulary_logprobs`. Ids that the policy does not have are among all others."""
    common = ids < policy.shard.vocab
    asked = torch.cat([labels[:, None], ids.where(common, 0)], 1)
    found, entropies = vocabulary_logprobs(hidden, positions, asked, policy, entropy=entropy, known=known)
    own, of_teacher = (logprobs.where(common, NOTHING) for logprobs in (found[:, 1:], of_teacher))
    divergence = divergence_of_top(own, of_teacher, objective.divergence, objective.beta)
    unknown = torch.full_like(divergence, torch.nan).detach()
    return Compared(found[:, 0], entropies, divergence, unknown, own.argmax(1) == 0)
