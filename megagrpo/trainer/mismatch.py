"""From rows and positions of mismatched tokens to what a person can read, and whether it is too much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from megagrpo.algorithm.mismatch import Mismatch, TokenMismatch
from megagrpo.errors import Problem
from megagrpo.recipe import schema
from megagrpo.recipe.defaults import run_directory
from megagrpo.track.mismatch import MismatchRecord, WorstToken
from megagrpo.track.tracker import Tracker
from megagrpo.types import Group, Prompt, Sample

TOKENS_BEFORE = 16
TOKENS_AFTER = 4


def report_mismatch(
    recipe: schema.Recipe,
    step: int,
    mismatch: Mismatch | None,
    groups: Sequence[Group],
    tracker: Tracker,
    decode: Callable[[Sequence[int]], str],
) -> Problem | None:
    """Writes down the step's mismatch, if it trained on anything, and warns of one that is past the threshold.

    Returns what is to end the run, if the recipe says that it does. `decode` turns token ids into text.
    """
    if mismatch is None:
        return None
    record = mismatch_record(step, mismatch, groups, decode)
    tracker.mismatch(record)
    settings = recipe.rollout.mismatch
    excess = excess_mismatch(record, settings, run_directory(recipe))
    if excess is None:
        return None
    if settings.then == "warn":
        tracker.say(f"warning: {excess}")
        return None
    tracker.say(f"{excess.where}: saving this step, then stopping")
    return excess


def mismatch_record(
    step: int, mismatch: Mismatch, groups: Sequence[Group], decode: Callable[[Sequence[int]], str]
) -> MismatchRecord:
    """The step's line of mismatch.jsonl."""
    samples = list(chain.from_iterable(((group.prompt, sample) for sample in group.samples) for group in groups))
    return MismatchRecord(
        step=step,
        tokens=mismatch.tokens,
        mean=mismatch.mean,
        p99=mismatch.p99,
        max=mismatch.max,
        k1=mismatch.k1,
        k3=mismatch.k3,
        ratio_mean=mismatch.ratio_mean,
        effective_share=mismatch.effective_share,
        worst=tuple(_worst_token(token, *samples[token.row], decode) for token in mismatch.worst),
    )


def excess_mismatch(record: MismatchRecord, settings: schema.MismatchConfig, directory: Path) -> Problem | None:
    """What is wrong, if the recipe's figure is above its threshold or is not a number. directory: of the run."""
    value = getattr(record, settings.metric)
    if settings.above is None or value <= settings.above:
        return None
    worst = record.worst[0]
    return Problem(
        where=f"step {record.step}: logprob_difference/{settings.metric} is {value:.4g}",
        given=f"{record.tokens} response tokens; the worst is {worst.text!r} after {worst.before!r}, "
        f"position {worst.position} of sample {worst.sample} of prompt {worst.prompt_id}: "
        f"train logprob {worst.train_logprob:.4g}, rollout logprob {worst.rollout_logprob:.4g}, "
        f"sampled by weight version {worst.weight_version}",
        needed=f"at most {settings.above:g} (rollout.mismatch.above)",
        fix=f"`megagrpo report {directory}` shows whether it grew or came at once, and in which tokens. All tokens: "
        "the engine's weights, temperature or dtype differ from the trainer's. Few: its kernels or its cache. "
        "To go on with the same command, raise rollout.mismatch.above or set rollout.mismatch.then to warn",
    )


def _worst_token(
    found: TokenMismatch, prompt: Prompt, sample: Sample, decode: Callable[[Sequence[int]], str]
) -> WorstToken:
    tokens = [*map(int, prompt.tokens), *map(int, sample.tokens)]
    at, position = found.position, found.position - len(prompt.tokens)
    return WorstToken(
        prompt_id=prompt.id,
        sample=sample.index,
        position=position,
        token=tokens[at],
        before=decode(tokens[max(0, at - TOKENS_BEFORE) : at]),
        text=decode([tokens[at]]),
        after=decode(tokens[at + 1 : at + 1 + TOKENS_AFTER]),
        train_logprob=found.train_logprob,
        rollout_logprob=found.rollout_logprob,
        weight_version=int(sample.versions[position]),
    )
