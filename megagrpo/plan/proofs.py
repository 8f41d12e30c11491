"""The proofs that a run of a recipe will have that what is trained is what was sampled, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megagrpo.plan.case import Case
from megagrpo.plan.memory import SERVED, DeviceMemory
from megagrpo.plan.time import StepTime, prompts_of_rounds
from megagrpo.plan.training_time import BatchSize
from megagrpo.plan.units import byte_text, second_text
from megagrpo.recipe.defaults import replayed_routes, same_bits
from megagrpo.recipe.schema.schedule import SyncConfig
from megagrpo.routes import RouteSizes
from megagrpo.types import GATHERED_IDS

PLACES = {
    "token": "a token",
    "host_memory": "a step in the driver's memory",
    "ray_store": "in Ray's store",
    "rank": "on a training rank",
    "loopback": "in servers' answers",
    "checkpoint": "at most in a checkpoint",
    "kept_batches": "in kept batches",
}
"""Places of routes, in words."""


@dataclass(frozen=True)
class Proof:
    """One of the proofs. `holds` is None if nothing is to be proven, False if the recipe does not ask for it.

    `bytes` are by place, of a step but for those of a token and a checkpoint; `seconds` are of a step, None if unknown.
    """

    name: str
    holds: bool | None
    text: str
    bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: float | None = 0.0


def proofs_of(case: Case, held: Sequence[DeviceMemory], time: StepTime | None) -> Iterator[Proof]:
    """Yields the four proofs of a recipe of GRPO. held, time: of its plan."""
    recipe = case.grpo
    digests = [phase.parts.get("digests", 0.0) for phase in time.phases if phase.phase == "weight_sync"] if time else []
    took = f", {second_text(sum(digests))} of each sync" if digests else ""
    text = f"every sync is verified by digest on every engine before it samples{took}"
    yield Proof("weights", True, text, seconds=sum(digests) if digests else None)
    parts = [part for kind in held for phase in kind.phases for part in phase.parts]
    if sizes := replayed_routes(recipe, case.architecture):
        yield _routes(case, sizes, max((part.bytes for part in parts if part.name == "routes"), default=0))
    elif case.architecture.experts:
        yield Proof("routes", False, "not asked for: tokens pass the experts that the trainer's routers choose")
    else:
        yield Proof("routes", None, "none: the model has no experts")
    yield _sets(case)
    engines = f"engines hold {recipe.rollout.quantization or 'the bits of the trainer'}"
    if served := max((part.bytes for part in parts if part.name == SERVED), default=0):
        text = f"{engines}, and logprobs are computed through its values: {byte_text(served)} on a training rank"
        yield Proof("tokens", True, text, {"rank": served})
    elif same_bits(recipe):
        yield Proof("tokens", True, f"{engines}, and every logprob is computed through them")
    else:
        yield Proof("tokens", False, f"not asked for: {engines}, and logprobs are computed through other bits")


def kept_groups(case: Case) -> int:
    """Returns the most groups that a checkpoint has of later steps."""
    recipe = case.grpo
    return recipe.schedule.carry_over if isinstance(recipe.schedule, SyncConfig) else recipe.prompts_at_once


def _sampled(case: Case) -> BatchSize:
    """Returns the size of all that a step samples."""
    return BatchSize.of(sum(prompts_of_rounds(case)) * case.grpo.rollout.samples_per_prompt, case.lengths)


def _routes(case: Case, sizes: RouteSizes, on_rank: int) -> Proof:
    recipe, token, tokens = case.grpo, sizes.token_bytes, _sampled(case).tokens
    of_group = token * BatchSize.of(recipe.rollout.samples_per_prompt, case.lengths).tokens
    places = {
        "token": float(token),
        "host_memory": tokens * token,
        "ray_store": tokens * token,  # batches of the ranks; samples lie in the store already
        "rank": float(on_rank),
        "loopback": tokens * recipe.rollout.kind.route_bytes(case.architecture),
        "checkpoint": kept_groups(case) * of_group,
        "kept_batches": recipe.checkpoint.keep_batches * tokens * token,
    }
    seconds = places["rank"] / case.assumptions.host_bytes_per_second
    named = [f"{byte_text(size)} {PLACES[name]}" for name, size in places.items() if size]
    text = f"replayed: {', '.join(named)}; {second_text(seconds)} to bring them to the ranks"
    return Proof("routes", True, text, {name: round(size) for name, size in places.items()}, seconds)


def _sets(case: Case) -> Proof:
    rollout, vocab, tokens = case.grpo.rollout, case.architecture.vocab, _sampled(case).head_tokens
    if not rollout.narrowing:
        return Proof("sets", None, "none: tokens are drawn from the whole vocabulary")
    ids = rollout.top_k or vocab
    size = round(tokens * (4 * ids + 8))  # int32 ids, and an int64 where they end
    share = ids / vocab if ids <= GATHERED_IDS else 1.0
    text = f"at most {ids:,} of {vocab:,} ids a token, {byte_text(size)} a step; {share:.2%} of the head's products"
    return Proof("sets", True, text, {"host_memory": size, "ray_store": size})
