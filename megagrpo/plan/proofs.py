"""The proofs that a run of a recipe will have that what is trained is what was sampled, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megagrpo.plan.case import Case
from megagrpo.plan.memory import SERVED, DeviceMemory, times_packed
from megagrpo.plan.parameters import stages
from megagrpo.plan.time import StepTime, prompts_of_rounds
from megagrpo.plan.training_time import BatchSize
from megagrpo.plan.units import byte_text, second_text
from megagrpo.recipe.defaults import kept_ids, replayed_routes, same_bits
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.schedule import SyncConfig
from megagrpo.routes import RouteSizes
from megagrpo.types import GATHERED_IDS
from megagrpo.weights.families.architecture import Architecture

PLACES = {
    "token": "a token",
    "host_memory": "a step in the driver's memory",
    "ray_store": "in Ray's store",
    "rank": "on a training rank",
    "engine_host": "in the host memory of a node's engines",
    "loopback": "in servers' answers",
    "checkpoint": "at most in a checkpoint",
    "kept_batches": "in kept batches",
}
"""Places of routes and kept sets, in words."""


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
    on_rank = {part.name: part.bytes for part in sorted(parts, key=lambda part: part.bytes)}  # the most of each
    if sizes := replayed_routes(recipe, case.architecture):
        yield _routes(case, sizes, on_rank.get("routes", 0))
    elif case.architecture.experts:
        yield Proof("routes", False, "not asked for: tokens pass the experts that the trainer's routers choose")
    else:
        yield Proof("routes", None, "none: the model has no experts")
    yield _sets(case, on_rank.get("kept sets", 0))
    engines = f"engines hold {recipe.rollout.quantization or 'the bits of the trainer'}"
    if served := on_rank.get(SERVED):
        text = f"{engines}, and logprobs are computed through its values: {byte_text(served)} on a training rank"
        yield Proof("tokens", True, text, {"rank": served}, seconds=None)
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


def _places(
    case: Case, token: int, answer: float, on_rank: int, tokens_of: Callable[[BatchSize], float]
) -> dict[str, int]:
    """Returns the bytes by place of what goes with some of the tokens: `token` bytes with each, `answer` in servers'
    answers. tokens_of: counts these tokens."""
    recipe, of_step = case.grpo, tokens_of(_sampled(case))
    of_group = tokens_of(BatchSize.of(recipe.rollout.samples_per_prompt, case.lengths))
    places = {
        "token": float(token),
        "host_memory": of_step * token,
        "ray_store": of_step * token,  # batches of the ranks; samples lie in the store already
        "rank": float(on_rank),
        "loopback": of_step * answer,
        "checkpoint": kept_groups(case) * of_group * token,
        "kept_batches": recipe.checkpoint.keep_batches * of_step * token,
    }
    return {name: round(size) for name, size in places.items()}


def _named(places: Mapping[str, int]) -> str:
    return ", ".join(f"{byte_text(size)} {PLACES[name]}" for name, size in places.items() if size)


def _routes(case: Case, sizes: RouteSizes, on_rank: int) -> Proof:
    rollout, arch, assumed = case.grpo.rollout, case.architecture, case.assumptions
    answer = rollout.kind.route_bytes(arch)
    places = _places(case, sizes.token_bytes, answer, on_rank, lambda size: size.tokens)
    places["engine_host"] = rollout.kind.route_buffer_bytes(case)
    chosen, digests = _sampled(case).tokens * sizes.per_token, assumed.route_digest_experts_per_second  # in each layer
    of_engine = len(arch.layers) / assumed.route_read_experts_per_second if answer else sizes.layers / digests
    reading = chosen / rollout.engines * of_engine
    layers = max(len({*stage.layers} & {*arch.expert_layers}) for stage in stages(len(arch.layers), case.layout))
    packing = chosen / case.layout.data * layers * times_packed(case.grpo.train) / digests
    took = f"{second_text(reading)} of an engine's process and {second_text(packing)} of a rank's, on one core"
    return Proof("routes", True, f"replayed: {_named(places)}; {took}", places, reading + packing)


def set_bytes(recipe: Recipe, arch: Architecture) -> int:
    """Returns the most bytes of a token's kept set: int32 ids, and an int64 where they end; 0 without sets."""
    ids = kept_ids(recipe, arch)
    return 4 * ids + 8 if ids else 0


def _sets(case: Case, on_rank: int) -> Proof:
    recipe, arch = case.grpo, case.architecture
    if not (ids := kept_ids(recipe, arch)):
        return Proof("sets", None, "none: tokens are drawn from the whole vocabulary")
    answer = recipe.rollout.kind.set_bytes(ids, arch)
    places = _places(case, set_bytes(recipe, arch), answer, on_rank, lambda size: size.head_tokens)
    share = ids / arch.vocab if ids <= GATHERED_IDS else 1.0
    text = f"at most {ids:,} of {arch.vocab:,} ids a token: {_named(places)}; {share:.2%} of the head's products"
    return Proof("sets", True, text, places, seconds=None)
