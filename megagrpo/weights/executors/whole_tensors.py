"""Plans whose destination is whole checkpoint tensors, for the ways through which SGLang loads them by their own names.

What the engines then hold is checked by the plan between training ranks and engine ranks, as for exact shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megagrpo.weights.boxes import ITEM_BYTES, Box, Manifest, Placement, Storage
from megagrpo.weights.plan import WeightPlan, make_plan
from megagrpo.weights.topology import Place, Topology

FUSED_WHEN_LOADED = ("q_a_proj", "kv_a_proj_with_mqa")
"""SGLang fuses these two of a layer if it gets them in one call, and loses the first otherwise
(sglang/srt/models/deepseek_common/deepseek_weight_loader.py)."""


def plan_for_engines(
    sources: Sequence[Manifest], destinations: Sequence[Manifest], ranks_per_engine: int
) -> WeightPlan:
    """From training ranks to one set of whole tensors for each engine. `destinations` are all engine ranks, engine by
    engine."""
    wholes = [
        whole_tensors(destinations[first : first + ranks_per_engine], f"engine {first // ranks_per_engine}")
        for first in range(0, len(destinations), ranks_per_engine)
    ]
    return make_plan(sources, wholes)


def plan_for_source(sources: Sequence[Manifest], destinations: Sequence[Manifest], gatherer: int) -> WeightPlan:
    """From all training ranks to one set of whole tensors beside one of them, which sends nothing that it holds."""
    places = [Place(f"source {index}") for index in range(len(sources))]
    whole = whole_tensors(destinations, f"{sources[gatherer].holder}'s whole tensors")
    return make_plan(sources, [whole], Topology(tuple(places), (places[gatherer],)))


def whole_tensors(destinations: Iterable[Manifest], holder: str) -> Manifest:
    """Every checkpoint tensor of which these destinations hold a part, whole, in a storage of its name and their dtype.

    Those with larger elements come first, otherwise in their order: each then begins at a multiple of its element's
    size also where they follow one another without a gap.
    """
    ends: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for manifest in destinations:
        for placement in manifest.placements:
            box = placement.box
            end = tuple(start + size for start, size in zip(box.start, box.shape, strict=True))
            ends[box.tensor] = tuple(map(max, ends.get(box.tensor, end), end))
            dtypes.setdefault(box.tensor, manifest.storages[placement.storage].dtype)
    names = sorted(ends, key=lambda name: -ITEM_BYTES[dtypes[name]])
    return Manifest(
        holder,
        {name: Storage(name, ends[name], dtypes[name]) for name in names},
        tuple(
            Placement(
                name,
                (0,) * len(ends[name]),
                tuple(range(len(ends[name]))),
                Box(name, (0,) * len(ends[name]), ends[name]),
            )
            for name in names
        ),
    )


def loaded_together(name: str) -> str:
    """The same text for tensors that must be in one bucket."""
    for part in FUSED_WHEN_LOADED:
        if f".{part}." in name:
            return name.replace(f".{part}.", ".fused.")
    return name
