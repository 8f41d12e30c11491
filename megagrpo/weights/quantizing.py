"""Float8 values with a float32 scale for each block of 128 x 128, bit for bit as SGLang makes them of bfloat16.

Scales are powers of two, as those of SGLang's quantiser in torch (per_block_cast_to_fp8, 0.5.23): so only the rounding
to float8 loses anything, every machine gets the same bits, and quantising what was quantised changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial

import torch
from torch.nn.functional import pad

from megagrpo.errors import DIVERGED_FIX, ModelError, Problem, RankError, WeightSyncError, few
from megagrpo.weights.blocks import (
    BLOCK,
    Preparation,
    Share,
    lacking_manifest,
    scales_of,
    sending_manifest,
    shares_of,
    storage_name,
    values_of,
)
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.plan import WeightPlan, require_own
from megagrpo.weights.transport.rendezvous import Member, in_thread
from megagrpo.weights.views import box_view, torch_dtype

LAST_SECONDS = 10.0
"""The wait for a running exchange to end by itself, after the sync was given up."""
SMALLEST = 1e-4
"""The least magnitude that sets the scale of a block, so that the scale of a block of zeros is above 0."""


def quantize(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float8 values [rows, columns] of a matrix of any floating-point dtype, and its scales [blocks, blocks].

    A block at an edge may be smaller. The scale of a block with a value that is not finite is not finite.
    """
    blocks = _touched_blocks(weights, (0, 0))
    scales = scales_for(_largest(blocks))
    rows, columns = weights.shape
    return _in_float8(blocks, scales).flatten(2).flatten(0, 1)[:rows, :columns], scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values that a matrix of blocks stands for. In bfloat16 they are exact."""
    rows, columns = values.shape[-2:]
    factors = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[..., :rows, :columns]
    return (values.float() * factors).to(dtype)


def largest_in_blocks(part: torch.Tensor, start: Sequence[int]) -> torch.Tensor:
    """Returns the largest magnitude in each block that a part of a matrix touches, float32 [blocks, blocks]. `start` is
    the part's first element in the matrix; elements outside of the part do not count."""
    return _largest(_touched_blocks(part, start))


def scales_for(largest: torch.Tensor) -> torch.Tensor:
    """Returns the scales of blocks with these largest magnitudes, float32 like them."""
    largest = largest.clamp(min=SMALLEST)
    # The smallest power of two that is not below largest / 448, by the bits of float32: 448 is 1.75 x 2^8.
    bits = largest.view(torch.int32)
    exponents = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000)
    return torch.where(largest.isfinite(), (exponents << 23).view(torch.float32), largest)


def through_float8(part: torch.Tensor, scales: torch.Tensor, start: Sequence[int]) -> torch.Tensor:
    """Returns the values that the float8 of a part of a matrix stands for, in its dtype: those of `quantize` and
    `dequantize` of the whole matrix, cut. `scales` are those of the blocks that the part touches."""
    stands_for = _in_float8(_touched_blocks(part, start), scales).float() * scales[:, None, :, None]
    (row, column), (rows, columns) = (low % BLOCK for low in start), part.shape
    return stands_for.flatten(2).flatten(0, 1)[row : row + rows, column : column + columns].to(part.dtype)


def _touched_blocks(part: torch.Tensor, start: Sequence[int]) -> torch.Tensor:
    """Returns the blocks that a part of a matrix touches, with zeros around it: [blocks, BLOCK, blocks, BLOCK]."""
    (row, column), (rows, columns) = (low % BLOCK for low in start), part.shape
    whole = pad(part, (column, -(column + columns) % BLOCK, row, -(row + rows) % BLOCK))
    return whole.view(whole.shape[0] // BLOCK, BLOCK, whole.shape[1] // BLOCK, BLOCK)


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.abs().amax(dim=(1, 3)).float()


def _in_float8(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (blocks * scales[:, None, :, None].reciprocal()).to(torch.float8_e4m3fn)


class Quantizer:
    """A training rank's part of a preparation: `held` is its own manifest, and it is the plan's `rank`-th source."""

    def __init__(self, held: Manifest, preparation: Preparation, rank: int) -> None:
        """Raises WeightSyncError if the fetches are planned for other manifests."""
        self._rank, self._fetches, self._begun = rank, preparation.fetches, 0
        if self._fetches is not None:
            require_own(self._fetches.sources[rank], held)
            require_own(self._fetches.destinations[rank], lacking_manifest(held, preparation.shapes))
        self.manifest = sending_manifest(held, preparation.shapes)
        self._shares = tuple(shares_of(held, preparation.shapes))

    def tensors(self, held: Mapping[str, torch.Tensor], member: Member, version: int) -> dict[str, torch.Tensor]:
        """Returns the storages of `manifest`, from those of the rank's own manifest. Collective if there are fetches:
        part of the open sync to `version`.

        Raises ModelError, naming tensors, if a weight is not finite; WeightSyncError if the sync is given up before the
        fetches begin, and RankError, naming a rank, if they do not end.
        """
        if (plan := self._fetches) is None:
            return self.quantized(held, {})
        with member.attend(version) as sync:
            self._begun += 1
            key = f"fetch/{sync.attempt}/{self._begun}"
            _begin_together(member, key, plan, self._rank)
            awaited = [plan.sources[its.source].holder for its in plan.incoming(self._rank)]
            fetched = _in_bounded_time(member, partial(self._exchanged, plan, held, awaited), awaited)
            member.delete(f"{key}/{self._rank}")
        return self.quantized(held, fetched)

    def quantized(
        self, held: Mapping[str, torch.Tensor], fetched: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the storages of `manifest`, from `held` and `fetched`. Raises ModelError as `tensors` does."""
        storages = {name: held[name] for name in self.manifest.storages if name in held}
        finite = []
        for share in self._shares:
            values, scales = quantize(_assembled(share, held, fetched))
            storages[storage_name(values_of(share.region))] = values
            storages[storage_name(scales_of(share.region))] = scales
            finite.append(scales.isfinite().all())
        good = torch.stack(finite).tolist() if finite else []
        if wrong := {share.region.tensor for share, fine in zip(self._shares, good, strict=True) if not fine}:
            given, needed = "a value that is not finite", "finite weights: others have no scale"
            raise ModelError(Problem(tensor, given, needed, DIVERGED_FIX) for tensor in sorted(wrong))
        return storages

    @torch.no_grad()
    def _exchanged(
        self, plan: WeightPlan, held: Mapping[str, torch.Tensor], awaited: list[str]
    ) -> dict[str, torch.Tensor]:
        """Returns the elements that this rank lacks, by storage. Both ends of a transfer see it at the same place in
        their order. `awaited` lists the senders of parts that have not arrived."""
        device = next(iter(held.values())).device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread begins on the first
            # NCCL wants all ranks in a group's first operation, and some have nothing to send or to fetch.
            torch.distributed.all_reduce(torch.zeros(1, device=device))
        storages = {
            name: torch.empty(its.shape, dtype=torch_dtype(its.dtype), device=device)
            for name, its in plan.destinations[self._rank].storages.items()
        }
        outgoing, incoming = plan.outgoing(self._rank), plan.incoming(self._rank)
        parts = [
            torch.empty(its.box.shape, dtype=storages[its.destination_placement.storage].dtype, device=device)
            for its in incoming
        ]
        work = [
            torch.distributed.P2POp(torch.distributed.irecv, part, transfer.source)
            for transfer, part in zip(incoming, parts, strict=True)
        ]
        for transfer in outgoing:
            view = box_view(held[transfer.source_placement.storage], transfer.source_placement)
            work.append(torch.distributed.P2POp(torch.distributed.isend, view.contiguous(), transfer.destination))
        for request in torch.distributed.batch_isend_irecv(work) if work else ():
            request.wait()  # of NCCL all at once, and only the stream waits
            del awaited[: device.type == "cpu"]
        for transfer, part in zip(incoming, parts, strict=True):
            placement = transfer.destination_placement
            box_view(storages[placement.storage], placement).copy_(part)
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return storages


def _begin_together(member: Member, key: str, plan: WeightPlan, rank: int) -> None:
    """Waits until all ranks are ready. Either all of them begin, or none: an exchange that some have begun cannot be
    cancelled, because the next one of the group would take its place."""
    member.write(f"{key}/{rank}", True)
    if member.add(f"{key}/there") == len(plan.sources):
        member.decide(key, "go")

    def missing() -> Problem:
        arrivals = (member.read(f"{key}/{index}", bool) for index in range(len(plan.sources)))
        absent = [its.holder for its, arrived in zip(plan.sources, arrivals, strict=True) if not arrived]
        return member.late(f"{member.name}: rows of cut blocks", f"{few(absent)} did not begin to exchange them")

    try:
        member.wait(lambda: member.read(key, str) == "go" or None, missing)
    except WeightSyncError:
        if member.decide(key, "stop") == "stop":
            raise


def _in_bounded_time(
    member: Member, exchange: Callable[[], dict[str, torch.Tensor]], awaited: list[str]
) -> dict[str, torch.Tensor]:
    """Returns the result of an exchange. Raises RankError if it fails, or if it does not end, which leaves the group of
    the training ranks unusable."""

    def missing() -> Problem:
        late = (
            f"{few(sorted(set(awaited)))} did not send them" if awaited else "this rank did not send and receive them"
        )
        return member.late(where, late)

    where, exchanged = f"{member.name}: rows of cut blocks", in_thread(exchange)
    try:
        member.wait(lambda: exchanged.done() or None, missing)
    except WeightSyncError as error:
        wait([exchanged], min(LAST_SECONDS, member.seconds_left()))
        if not exchanged.done():
            raise RankError(error.problems) from error
        raise
    try:
        return exchanged.result()
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        given = f"{reason}, while {few(sorted(set(awaited))) or 'others'} should have sent them"
        raise RankError(Problem(where, given, "all training ranks alive and connected")) from error


def _assembled(share: Share, held: Mapping[str, torch.Tensor], fetched: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns the region of a share: a view if it lies in one placement."""
    views = {placement.box: box_view(held[placement.storage], placement) for placement in share.parts}
    if share.region in views:
        return views[share.region]
    views |= {box: fetched[storage_name(box)] for box in share.lacks}
    first = next(iter(views.values()))
    region = torch.empty(share.region.shape, dtype=first.dtype, device=first.device)
    for box, view in views.items():
        low, left = (start - begin for start, begin in zip(box.start, share.region.start, strict=True))
        region[low : low + box.shape[0], left : left + box.shape[1]] = view
    return region
