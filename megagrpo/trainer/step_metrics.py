"""The metrics of a step, with names and meanings as in track/metrics.yaml, and its line of mismatch.jsonl."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from megagrpo.agents.turns import ToolEvent, TurnEvent
from megagrpo.algorithm.mismatch import Mismatch
from megagrpo.batching.rank_batches import (
    RankBatch,
    TrainSequence,
    count_response_tokens,
    imbalance,
    packing_efficiency,
    padding_share,
    sampled_sequences,
)
from megagrpo.errors import Problem
from megagrpo.recipe.defaults import run_directory, same_bits
from megagrpo.recipe.schema import MismatchConfig, Recipe, TrainConfig
from megagrpo.reward.scorer import REACHED_LIMIT
from megagrpo.track.jsonl import MISMATCH_FIGURES, OWN_ROUTES, MismatchRecord, StepProof, WorstToken
from megagrpo.track.tracker import Tracker
from megagrpo.trainer.batches import Sampled, branches_of
from megagrpo.trainer.run import Run, Step, TrainRun
from megagrpo.trainer.step import Trained, baselines_of, has_routes, with_signal
from megagrpo.trainer.taught import given_rows, teacher_metrics
from megagrpo.types import AgentRun, Group, Score

if TYPE_CHECKING:
    from megagrpo.rank_results import StepMetrics

TOKENS_BEFORE = 16
TOKENS_AFTER = 4
TOOLS_MAX = 30
"""Number of tools with metrics of their own: the most called."""
OTHER = "other"
NAME_CHARACTERS = 64
BY_NAME = {"branch": "branches", "ignored": "ignored", "refused": "refused"}
SUMS = (
    "turns_unused", "tokens_rerendered", "unreadable_calls", "retries", "given_up", "audited", "audit_differs", "late",
    "failed",
)  # fmt: skip
"""Counts of rollouts (AgentRun.counts) that are reported under their own names, summed over the step."""


def step_metrics(
    run: TrainRun, sampled: Sampled, trained: Trained, step: int, kl_coefficient: float
) -> dict[str, float]:
    """Returns the metrics of a step's samples and updates. kl_coefficient: that of this step."""
    metrics = rollout_metrics(sampled.all, run.recipe.reward.scores) | agent_metrics(sampled.all)
    metrics |= sampling_metrics(run.recipe, sampled)
    if trained.batches:
        advantages = trained.advantages.of_rows[~given_rows(sampled.groups)]
        for name in ("mean", "max", "min") if len(advantages) else ():
            metrics[f"advantages/{name}"] = float(getattr(advantages, name)())
        metrics |= packing_metrics(run.recipe.train, trained.batches, run.policy.device_type)
    if trained.critic is not None:
        figures = {"lr": trained.critic_lr, **vars(trained.critic)}
        metrics |= {f"critic/{name.removesuffix('_fraction')}": value for name, value in figures.items()}
    metrics |= teacher_metrics(trained.taught, trained.rows, sampled.groups)
    if trained.memory_peak is not None:
        metrics["memory/allocated_max/update"] = float(trained.memory_peak)
    if trained.policy is not None:
        metrics |= {"lr": trained.lr} | update_metrics(trained.policy)
        metrics |= route_metrics(trained.policy, trained.batches, sampled.groups)
        if trained.policy.kl is not None:
            metrics["kl/coefficient"] = kl_coefficient
    return {**metrics, **sampled.metrics, "weights/version": float(step)}


def rollout_metrics(groups: Sequence[Group], scored: bool = True) -> dict[str, float]:
    """Returns metrics of the sampled responses' lengths and, if reward functions have `scored` them, of rewards; {} if
    all are given."""
    if not (groups := [group for group in groups if not group.given]):
        return {}
    scores = [score for group in groups for score in group.scores]
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([len(sample.tokens) for sample in samples])
    errors = sum(bool(score.error) for score in scores)
    known = _known(scores if scored else ())
    spread = {"mean": known.mean(), "std": known.std(), "max": known.max(), "min": known.min()} if len(known) else {}
    metrics = {
        **{f"reward/{name}": float(value) for name, value in spread.items()},
        "reward/errors": float(errors),
        "reward/errors_share": errors / len(samples),
        "reward/truncated_masked": float(sum(score.masked == REACHED_LIMIT for score in scores)),
        **({"reward/solved_share": float(np.mean([score.solved for score in scores]))} if scored else {}),
        "response_tokens/mean": float(lengths.mean()),
        "response_tokens/max": float(lengths.max()),
        "response_tokens/truncated_share": float(np.mean([sample.finish == "length" for sample in samples])),
        "response_tokens/aborted_share": float(np.mean([sample.finish == "abort" for sample in samples])),
        "prompt_tokens/mean": float(np.mean([len(group.prompt.tokens) for group in groups])),
    }
    if kept := [sample.kept.sizes for sample in samples if sample.kept is not None]:
        sizes = np.concatenate(kept)
        narrowed = sizes[sizes > 0]
        metrics |= {
            "kept_sets/share": len(narrowed) / max(int(lengths.sum()), 1),
            "kept_sets/mean": float(narrowed.mean()) if len(narrowed) else nan,
            "kept_sets/max": float(narrowed.max(initial=0)),
        }
    metrics |= {f"reward/{name}": value for name, value in score_parts(scores).items()}
    sources = sorted({group.prompt.data_source for group in groups})
    for source in sources if len(sources) > 1 else ():
        members = [score for group in groups if group.prompt.data_source == source for score in group.scores]
        known = _known(members)
        metrics[f"reward/{source}/mean"] = float(known.mean()) if len(known) else nan
        metrics[f"reward/{source}/solved_share"] = float(np.mean([score.solved for score in members]))
        metrics |= {f"reward/{source}/{name}": value for name, value in score_parts(members).items()}
    return metrics


def score_parts(scores: Sequence[Score]) -> dict[str, float]:
    """Returns the mean of each part of a score over the samples that have it."""
    parts: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.parts.items():
            parts[name].append(value)
    return {name: float(np.mean(values)) for name, values in parts.items()}


def _known(scores: Sequence[Score]) -> np.ndarray:
    """Returns the values of scores that have one: float64."""
    return np.array([score.value for score in scores if score.value is not None], np.float64)


def sampling_metrics(recipe: Recipe, sampled: Sampled) -> dict[str, float]:
    """Returns the share of groups with signal, the greedy reward, and counts of dynamic sampling."""
    metrics = {}
    judged = [group for group in sampled.all if not group.given]
    if recipe.algorithm.critic is None and recipe.reward.scores and judged:  # with a critic every response teaches
        metrics["groups/with_signal_share"] = len(with_signal(judged, recipe)) / len(judged)
    if not np.isnan(baselines := baselines_of(sampled.groups)).all():
        metrics["reward/greedy"] = float(np.nanmean(baselines))
    if recipe.rollout.dynamic_sampling:
        metrics |= {
            "groups/rounds": float(sampled.rounds),
            "groups/sampled": float(len(sampled.all)),
            "groups/left_over": float(sampled.left_over),
            "groups/missing": float(recipe.rollout.prompts_per_step - len(sampled.groups)),
        }
    return metrics


def packing_metrics(train: TrainConfig, batches: Sequence[RankBatch], device: str) -> dict[str, float]:
    """Returns metrics of how evenly microbatches are filled."""
    micros = [micro for batch in batches for minibatch in batch.minibatches for micro in minibatch]
    return {
        "packing/microbatches": float(len(micros)),
        "packing/efficiency": packing_efficiency(batches, train.layout.parallel(), train.tokens_per_microbatch),
        "packing/imbalance": imbalance(batches),
        "packing/padding": padding_share(batches, train.layout.parallel(), device),
    }


def update_metrics(update: StepMetrics) -> dict[str, float]:
    """Returns metrics of the policy's update, as the training ranks report it."""
    metrics = {
        "loss/total": update.loss,
        "loss/policy": update.policy_loss,
        "clip/low": update.clip_low_fraction,
        "clip/high": update.clip_high_fraction,
        "grad_norm": update.grad_norm,
        "skipped_steps": float(update.skipped_steps),
        "logprob_difference/mean": update.mismatch.mean,
        "logprob_difference/p99": update.mismatch.p99,
        "logprob_difference/max": update.mismatch.max,
        "logprob_difference/k1": update.mismatch.k1,
        "logprob_difference/k3": update.mismatch.k3,
        "rollout_ratio/mean": update.mismatch.ratio_mean,
        "rollout_ratio/effective_share": update.mismatch.effective_share,
        "logprob_difference/reverse_k3": update.mismatch.reverse_k3,
        "rollout_ratio/chi2_token": update.mismatch.chi2_token,
        "rollout_ratio/chi2_sequence": update.mismatch.chi2_sequence,
        "perplexity/train": update.mismatch.train_perplexity,
        "perplexity/rollout": update.mismatch.rollout_perplexity,
    }
    optional = {"ratio/mean": update.ratio_mean, "kl/mean": update.kl, "entropy": update.entropy}
    metrics |= {name: value for name, value in optional.items() if value is not None}
    if update.correction is not None:
        metrics |= {f"correction/{name}": value for name, value in update.correction.items()}
    return metrics


def route_metrics(update: StepMetrics, batches: Sequence[RankBatch], groups: Sequence[Group]) -> dict[str, float]:
    """Returns metrics of routing replay; {} without it."""
    if (differences := update.route_differences) is None:
        return {}
    sequences = sampled_sequences(batches)
    ended = [sample for group in groups for sample in group.samples if sample.finish != "abort"]
    metrics = {
        "routes/missing": float(sum(not has_routes(sample) for sample in ended)),
        "routes/replayed_share": _routed(sequences) / max(count_response_tokens(sequences), 1),
        "routes/differ_share/mean": float(np.mean(differences)),
        "routes/differ_share/max": max(differences),
    }
    if (own := update.own_routes) is not None:
        metrics |= {f"own_routes/{name}": getattr(own, name) for name in OWN_ROUTES}
    return metrics


def _routed(sequences: Sequence[TrainSequence]) -> int:
    """Counts the response tokens of sequences with routes: each token before one of them has a row."""
    return count_response_tokens([sequence for sequence in sequences if sequence.routes is not None])


# --- mismatch between trainer and engines -----------------------------------------------------------------------------


def step_proof(run: TrainRun, sampled: Sampled, trained: Trained) -> StepProof | None:
    """Counts what proves that the step trained what was sampled; None if the policy was not trained.

    A version counts as verified if a sync has found its digests on an engine (cluster/weight_sync.py). Samples of
    another run prove nothing about this one's weights.
    """
    if (update := trained.policy) is None:
        return None
    recipe, sequences = run.recipe, sampled_sequences(trained.batches)
    samples = [sample for group in sampled.groups for sample in group.samples]
    rows = {sequence.row for sequence in sequences}
    by_token = np.concatenate([np.empty(0, np.int32), *(samples[row].versions for row in rows)])
    versions, counts = np.unique(by_token, return_counts=True)
    sets = [sequence.kept.sizes for sequence in sequences if sequence.kept is not None]
    own, verified = update.own_routes, run.weights.verified_versions if isinstance(run, Run) else ()
    return StepProof(
        tokens=count_response_tokens(sequences),
        versions=tuple(zip(versions.tolist(), counts.tolist(), strict=True)),
        verified=int(counts[np.isin(versions, list(verified))].sum()),
        routed=None if update.route_differences is None else _routed(sequences),
        kept=sum(int((sizes > 0).sum()) for sizes in sets) if recipe.rollout.narrowing else None,
        quantization=recipe.rollout.quantization,
        same_bits=same_bits(recipe),
        route_differences=update.route_differences,
        own_routes=None if own is None else {name: getattr(own, name) for name in OWN_ROUTES},
    )


def report_mismatch(
    recipe: Recipe, step: int, done: Step, tracker: Tracker, decode: Callable[[Sequence[int]], str]
) -> Problem | None:
    """Writes the step's mismatch and proof to mismatch.jsonl, and warns if it is above the recipe's threshold.

    decode: turns token ids into text. Returns a problem if the run is to end.
    """
    if done.mismatch is None:
        return None
    record = replace(mismatch_record(step, done.mismatch, done.sampled.groups, decode), proof=done.proof)
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
    """Returns the step's line of mismatch.jsonl, with the worst tokens as text."""
    samples = [(group.prompt, sample) for group in groups for sample in group.samples]
    worst = []
    for token in mismatch.worst:
        prompt, sample = samples[token.row]
        branches = branches_of(np.array(prompt.tokens, np.int64), sample)
        branch, at = [(branch, int(at)) for branch in branches for at in np.flatnonzero(branch.trained)][token.index]
        tokens = branch.tokens.tolist()
        worst.append(
            WorstToken(
                prompt_id=prompt.id,
                sample=sample.index,
                position=token.index,
                token=tokens[at],
                before=decode(tokens[max(0, at - TOKENS_BEFORE) : at]),
                text=decode([tokens[at]]),
                after=decode(tokens[at + 1 : at + 1 + TOKENS_AFTER]),
                train_logprob=token.train_logprob,
                rollout_logprob=token.rollout_logprob,
                weight_version=int(sample.versions[token.index]),
            )
        )
    figures = {name: getattr(mismatch, name) for name in MISMATCH_FIGURES}
    return MismatchRecord(step=step, tokens=mismatch.tokens, worst=tuple(worst), **figures)


def excess_mismatch(record: MismatchRecord, settings: MismatchConfig, directory: Path) -> Problem | None:
    """Returns a problem if the recipe's figure is above its threshold or not a number. directory: the run's."""
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
        fix=f"`megagrpo report {directory} --mismatch` shows whether it grew slowly or at once, and in which tokens. "
        "All tokens: the engine's weights, temperature or dtype differ from the trainer's. Few: its kernels or its "
        "cache. To go on with the same command, raise rollout.mismatch.above or set rollout.mismatch.then to warn",
    )


# --- agent rollouts: turns, tools, branches, failures -----------------------------------------------------------------


def agent_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns means and sums over the rollouts that agents made in these groups; {} without any."""
    runs = [sample.agent for group in groups for sample in group.samples if sample.agent is not None]
    if not runs:
        return {}
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(run.counts)
    turns = np.array([run.counts.get("turns", len(run.turns)) for run in runs])
    trained = np.array([sum(int(branch.trained.sum()) for branch in run.branches) for run in runs])
    given = np.array([sum(len(branch.trained) for branch in run.branches) for run in runs]) - trained
    metrics = {
        "agent/turns/mean": float(turns.mean()),
        "agent/turns/max": float(turns.max()),
        "agent/branches/mean": float(np.mean([len(run.branches) for run in runs])),
        "agent/given_tokens/mean": float(given.mean()),
        **{f"agent/{name}": float(counts[name]) for name in SUMS},
    }
    if whole := given.sum() + trained.sum():
        metrics["agent/given_tokens/share"] = float(given.sum() / whole)
    for name, value in sorted(counts.items()):
        kind, _, detail = name.partition("/")
        if kind in BY_NAME:
            metrics[f"agent/{BY_NAME[kind]}/{detail}"] = float(value)
    return metrics | _of_events(runs)


def _of_events(runs: Sequence[AgentRun]) -> dict[str, float]:
    """Returns metrics of tool calls, prefix reuse and seconds."""
    turns = [[cast(TurnEvent, event) for event in run.events if event["kind"] == "turn"] for run in runs]
    tools = [cast(ToolEvent, event) for run in runs for event in run.events if event["kind"] == "tool"]
    answers = [event["said"].get("tool_calls") or [] for run in turns for event in run]
    calls = Counter(call["function"]["name"] for answer in answers for call in answer)
    metrics = {"agent/tool_calls/mean": sum(calls.values()) / len(runs)}
    if tools:
        metrics["agent/tool_failures/share"] = float(np.mean([bool(event.get("error")) for event in tools]))
    metrics |= _by_tool(calls, tools)
    if read := sum(event["prompt_tokens"] for run in turns for event in run):
        metrics["agent/prefix_reuse"] = 1 - sum(event["given_tokens"] for run in turns for event in run) / read
    if spans := [_spans(run) for run in turns if run]:
        whole, outside = (np.array(values) for values in zip(*spans, strict=True))
        metrics["agent/seconds/mean"] = float(whole.mean())
        metrics["agent/seconds/max"] = float(whole.max())
        metrics["agent/seconds/outside_mean"] = float(outside.mean())
    return metrics


def _by_tool(calls: Counter[str], events: Sequence[ToolEvent]) -> dict[str, float]:
    """Returns metrics of the TOOLS_MAX most called tools; the others count as OTHER: agents may invent any name."""
    times: dict[str, list[ToolEvent]] = defaultdict(list)
    for event in events:
        times[event["name"]].append(event)
    made = Counter({name: max(calls[name], len(times[name])) for name in sorted({*calls, *times})})
    names = {name: name[:NAME_CHARACTERS] or OTHER for name, _ in made.most_common(TOOLS_MAX)}
    metrics: dict[str, float] = {}
    for tool in sorted({names.get(name, OTHER) for name in made}):
        members = [name for name in made if names.get(name, OTHER) == tool]
        metrics[f"agent/tools/{tool}/calls"] = float(sum(made[name] for name in members))
        if of_tool := [event for name in members for event in times[name]]:
            seconds = [event["seconds"] for event in of_tool]
            metrics[f"agent/tools/{tool}/failure_share"] = float(np.mean([bool(e.get("error")) for e in of_tool]))
            metrics[f"agent/tools/{tool}/seconds_mean"] = float(np.mean(seconds))
            metrics[f"agent/tools/{tool}/seconds_max"] = float(np.max(seconds))
    return metrics


def _spans(turns: Sequence[TurnEvent]) -> tuple[float, float]:
    """Returns seconds from a rollout's start to the end of its last turn, and the part of them in which no turn ran."""
    end, busy, until = 0.0, 0.0, 0.0
    for event in sorted(turns, key=lambda event: event["at"]):
        begin, end = event["at"], max(end, event["at"] + event["seconds"])
        busy += max(0.0, begin + event["seconds"] - max(begin, until))
        until = max(until, begin + event["seconds"])
    return end, end - busy
