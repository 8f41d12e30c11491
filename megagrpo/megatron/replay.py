"""Routing replay: tokens pass the experts that an engine chose for them, weighted by the trainer's own router (R3,
arXiv:2510.11370).

A microbatch's routes lie beside its tokens (batch.py). A hook on each layer hands them to the layer's router, also when
a backward pass computes the layer again. Megatron asks the router's `router_replay` in place of its own top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megagrpo.batching.rank_batches import Microbatch
from megagrpo.errors import REPORT, Problem, RankError
from megagrpo.layout.parallel import RankCoordinates
from megagrpo.routes import RouteSizes, token_digests
from megagrpo.weights.families.architecture import Architecture

NO_ROUTE = -1
"""In place of an expert: the trainer's router chooses, for padding, last tokens, and sequences without routes."""

TopK = tuple[Tensor, Tensor]
"""Scores of the chosen experts, and their indices: [tokens, experts per token] each."""


class Replay:
    """The choice of one layer's experts: given ones for tokens that have a route, the router's own for others."""

    def __init__(self, column: int, again: bool, device: torch.device) -> None:
        """Makes the choice of a layer. column: the layer's in the routes of this rank. again: the backward pass
        computes the experts again, apart from the rest of their layer (train.recompute: moe)."""
        self._column, self._again = column, again
        self._given: Tensor | None = None
        self._waiting: list[Tensor | None] = []
        """Routes of passes with gradients whose experts have yet to be computed again, in order."""
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        """Tokens whose experts were given, and those among them for which the router would have chosen others."""
        self.replays = True

    def before_layer(self, layer: torch.nn.Module, args: Any, arguments: dict[str, Any]) -> None:
        """Takes the routes of the microbatch that the layer is about to read. Raises RankError if it has none."""
        routes = arguments["packed_seq_params"].routes
        if self.replays and routes is None:
            where = f"routing replay in layer {self._column} of this rank's with experts"
            raise RankError(Problem(where, "a microbatch without routes", "its routes", REPORT))
        self._given = routes[:, self._column] if self.replays else None
        if self._again and torch.is_grad_enabled():
            self._waiting.append(self._given)

    def get_replay_topk(self, scores: Tensor, topk: int, *groups_and_own: Any) -> TopK:
        """Chooses experts by `scores` [tokens, experts], in Megatron's name for it. The last argument is the router's
        own choice, a function of the others."""
        *groups, own_topk = groups_and_own
        # Recomputed experts are apart from their layer: their first pass has no gradients, their second has.
        given = self._waiting.pop(0) if self._again and torch.is_grad_enabled() else self._given
        top, own = own_topk(scores, topk, *groups)
        if given is None:
            return top, own
        has_route = given[:, :1] != NO_ROUTE
        with torch.no_grad():
            # Both have each expert once: they are the same if each given one is among the router's own.
            same = (given[:, :, None] == own[:, None]).any(-1).all(-1, keepdim=True)
            self.counts += torch.stack([has_route.sum(), (has_route & ~same).sum()])
            chosen = torch.where(has_route, given.long(), own)
        return scores.gather(1, chosen), chosen


class RoutesOnRank:
    """The routes that one rank replays: those of its layers, for its part of each sequence's tokens."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        arch: Architecture,
        sizes: RouteSizes,
        ranks: int,
        where: RankCoordinates,
        device: torch.device,
    ) -> None:
        """Gives a Replay to each router of these model chunks. ranks: tensor ranks, which share each microbatch."""
        self.sizes, self._tensor, self._ranks, self._device = sizes, where.tensor, ranks, device
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
        place = {number: place for place, number in enumerate(arch.expert_layers)}
        self.layers = np.array([place[layer.layer_number - 1] for layer in layers], np.int64)
        self.replays = []
        for column, layer in enumerate(layers):
            router = layer.mlp.router
            router.router_replay = Replay(column, layer.mlp.moe_layer_recompute, device)
            layer.register_forward_pre_hook(router.router_replay.before_layer, with_kwargs=True)
            self.replays.append(router.router_replay)

    def of(self, microbatch: Microbatch, at: np.ndarray) -> np.ndarray:
        """Returns routes of tokens, int16 [tokens on this rank, its layers with experts, experts per token].

        at: int64 [tokens on its context rank], places in the sequences end to end; from their end on it is padding.
        Raises RankError for routes that do not fit the model or their sequence.
        """
        total = sum(len(sequence.tokens) for sequence in microbatch.sequences)
        whole = np.full((total + 1, len(self.layers), self.sizes.per_token), NO_ROUTE, np.int16)
        start = 0
        for sequence in microbatch.sequences:
            if (routes := sequence.routes) is not None:
                needed = len(sequence.tokens) - 1, self.sizes.layers, self.sizes.per_token
                if routes.experts.shape != needed:
                    raise RankError(Problem(f"routes of {sequence.name}", f"{routes.experts.shape}", f"{needed}"))
                whole[start : start + routes.tokens] = routes.experts[:, self.layers]
            start += len(sequence.tokens)
        own = len(at) // self._ranks
        return whole[np.minimum(at, total)[self._tensor * own : (self._tensor + 1) * own]]

    def digests(self, routes: np.ndarray, count: int, sequence: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Returns this rank's parts in the digests of `count` sequences: uint64 [count].

        routes: as `of` returns them; sequence, place: int64 [tokens on its context rank], each token's sequence and its
        place in that.
        """
        mine = slice(self._tensor * len(routes), (self._tensor + 1) * len(routes))
        has_route = (routes != NO_ROUTE).all((1, 2)) if len(self.layers) else np.zeros(len(routes), bool)
        parts = np.zeros(count, np.uint64)
        of_tokens = token_digests(routes[has_route], place[mine][has_route], self.layers)
        np.add.at(parts, sequence[mine][has_route], of_tokens)
        return parts

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Lets routers choose by themselves inside the block."""
        for replay in self.replays:
            replay.replays = False
        try:
            yield
        finally:
            for replay in self.replays:
                replay.replays = True

    def begin_batch(self) -> None:
        """Forgets the passes over the batch before, which no update may have followed."""
        for replay in self.replays:
            replay.counts.zero_()

    def differences(self, given: int) -> tuple[float, ...]:
        """Returns the share of tokens for which the trainer's router would have chosen other experts, by layer, in the
        passes over the batch. Collective over all ranks.

        given: tokens of this rank's batch that have routes. Raises RankError if a router was not given those of all of
        them in every pass.
        """
        counts = torch.zeros(self.sizes.layers, 2, dtype=torch.int64)
        for layer, replay in zip(self.layers.tolist(), self.replays, strict=True):
            counts[layer] = replay.counts
            if given and (not counts[layer, 0] or counts[layer, 0] % given):
                where, tokens = f"routing replay in layer {layer} of those with experts", int(counts[layer, 0])
                raise RankError(Problem(where, f"{tokens} tokens", f"all {given} of each pass", REPORT))
        counts = counts.to(self._device)
        dist.all_reduce(counts)
        tokens, differ = counts.T.tolist()
        return tuple(count / max(of, 1) for count, of in zip(differ, tokens, strict=True))


def require_digests(microbatches: Sequence[Microbatch], parts: Sequence[np.ndarray], device: torch.device) -> None:
    """Raises RankError unless the routes on the ranks that share these microbatches are those that the engines sent.

    parts: of each microbatch, this rank's parts in the digests of its sequences. Collective over these ranks.
    """
    sequences = [sequence for microbatch in microbatches for sequence in microbatch.sequences]
    sums = torch.from_numpy(np.concatenate([np.zeros(0, np.uint64), *parts]).view(np.int64)).to(device)
    for group in (parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()):
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
    found = sums.cpu().numpy().view(np.uint64).tolist()
    for sequence, digest in zip(sequences, found, strict=True):
        if digest != (sent := sequence.routes.digest if sequence.routes else 0):
            where = f"routes of {sequence.name}, from token {sequence.first} of its response on"
            raise RankError(Problem(where, f"digest {digest:x} on the ranks", f"the engine's, {sent:x}", REPORT))
