"""The table of all metrics. docs/metrics.md is made from it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache


class UndocumentedMetric(UserWarning):
    """A metric that is not in the table was logged. Tests turn this warning into an error."""


@dataclass(frozen=True)
class Metric:
    """One metric. A {placeholder} in the name stands for any text."""

    name: str
    unit: str
    meaning: str


METRICS = (
    Metric("reward/mean", "score", "Mean of all samples' rewards, penalties included, masked samples left out."),
    Metric("reward/std", "score", "Standard deviation of these rewards."),
    Metric("reward/max", "score", "Largest."),
    Metric("reward/min", "score", "Smallest."),
    Metric("reward/errors", "samples", "Samples whose reward raised or timed out. They are masked, not scored 0."),
    Metric("reward/errors_share", "share of samples", "The same as a share of all that were sampled."),
    Metric("reward/truncated_masked", "samples", "Samples left out by reward.truncated: mask. Not errors."),
    Metric("reward/solved_share", "share of samples", "Samples whose functions' sum is at least reward.solved_at."),
    Metric("reward/greedy", "score", "Mean reward of the greedy responses that are the baselines of remax."),
    Metric("reward/overlong", "score", "Mean penalty for length, if there is one: 0 or less."),
    Metric("reward/{data_source}/mean", "score", "reward/mean over one data source, where a step has several."),
    Metric("reward/{data_source}/solved_share", "share of samples", "reward/solved_share over one data source."),
    Metric("reward/{data_source}/{part}", "score", "reward/{part} over one data source."),
    Metric("reward/{part}", "score", "Mean of one reward function of the recipe, or of a metric that one returns."),
    Metric("judge/{function}/seconds", "s", "Time in which a step waited for this judge."),
    Metric("judge/{function}/requests", "requests", "Sent to it in the step, repeated ones too."),
    Metric("judge/{function}/retries", "requests", "Repeated: they failed, or their answer had no verdict."),
    Metric("judge/{function}/unreadable", "answers", "Answers without a verdict."),
    Metric("judge/{function}/failed", "questions", "Questions without a verdict in the end."),
    Metric("judge/{function}/cached", "questions", "Questions whose answer was known."),
    Metric("judge/{function}/input_tokens", "tokens", "Tokens that it read."),
    Metric("judge/{function}/output_tokens", "tokens", "Tokens that it wrote."),
    Metric("judge/{function}/cost", "", "What these cost, in the currency of the recipe's price."),
    Metric("judge/{function}/scored", "samples", "Responses that a reward model was asked for."),
    Metric("judge/{function}/over_budget", "samples", "Responses beyond the step's budget."),
    Metric("advantages/mean", "", "Mean over samples."),
    Metric("advantages/max", "", "Largest."),
    Metric("advantages/min", "", "Smallest."),
    Metric("groups/with_signal_share", "share", "Sampled groups that teach something: their known rewards differ."),
    Metric("groups/rounds", "rounds", "How often a step with dynamic sampling sampled."),
    Metric("groups/sampled", "groups", "All groups that a step with dynamic sampling sampled."),
    Metric("groups/left_over", "groups", "Groups with signal thrown away: the last round brought more than needed."),
    Metric("groups/missing", "groups", "Groups that the step lacked: the rounds did not bring enough."),
    Metric("staleness/mean", "versions", "Mean age of the tokens' weights: the policy's version less the token's."),
    Metric("staleness/max", "versions", "Age of the oldest token's weights."),
    Metric("staleness/above_1_share", "share of tokens", "Tokens whose weights are more than one version older."),
    Metric("staleness/{versions}_share", "share of tokens", "Tokens whose weights are so many versions older."),
    Metric("staleness/mixed_share", "share of samples", "Samples whose tokens are of several versions."),
    Metric("staleness/carried_over", "groups", "Groups that began before the weights that the step trains."),
    Metric("staleness/continued", "samples", "Times that samples went on after tokens that they had already."),
    Metric("staleness/oldest_seconds", "s", "Since the oldest group began that no step has taken."),
    Metric("cut/samples", "samples", "Thrown away with schedule.oversample: late, or of groups that teach nothing."),
    Metric("cut/tokens_share", "share of tokens", "Tokens of these samples, in all that the step sampled."),
    Metric("cut/trained_tokens_mean", "tokens", "Response tokens of a sample that the step trains on."),
    Metric("cut/trained_tokens_p90", "tokens", "Nine of ten of these samples have at most so many."),
    Metric("cut/begun_tokens_mean", "tokens", "The same of all that began; estimated, and a lower bound."),
    Metric("cut/begun_tokens_p90", "tokens", "Nine of ten of all that began have at most so many; the same."),
    Metric("cut/bias", "share", "By how much what is trained is shorter, in the mean, than what began; at least."),
    Metric("trainer/idle_seconds", "s", "Waiting for samples, scores and, with pause: finish, for responses to end."),
    Metric("trainer/idle_share", "share", "The same as a share of seconds/step."),
    Metric("engines/serving", "engines", "Engines that sample after the step's weight sync."),
    Metric(
        "engines/idle_seconds",
        "s",
        "Since the step before, mean over the slots of serving engines: time without a request, or held by a sync.",
    ),
    Metric("engines/idle_share", "share", "The same as a share of that time, evaluations included."),
    Metric(
        "rollouts/left_out",
        "steps",
        "Steps and evaluations so far whose samples are not in rollouts/, or without their tokens; if there are any.",
    ),
    Metric("prompts/set_aside", "prompts", "Prompts set aside so far because they are solved too often."),
    Metric("alerts", "rules", "Rules of docs/health.md that hold at the step, without those that are off."),
    Metric("loss/total", "", "What was minimised: policy, KL and entropy terms; mean over the step's optimizer steps."),
    Metric("loss/policy", "", "The policy term of loss/total, importance weights included."),
    Metric("loss/tokens", "nats/token", "Supervised fine-tuning: mean -log p of the assistant's tokens."),
    Metric("kl/mean", "nats/token", "Estimated divergence from the reference policy, if there is one."),
    Metric("kl/coefficient", "", "Weight of its penalty in the step."),
    Metric("entropy", "nats/token", "Entropy of the policy at the sampling temperature, unless entropy_metric: false."),
    Metric("ratio/mean", "", "Mean of p / old p over tokens. With rollout_logprobs_as_old the old p is the engine's."),
    Metric("clip/low", "share of tokens", "Tokens whose gradient the lower clip bound cut (cispo: changed)."),
    Metric("clip/high", "share of tokens", "Tokens whose gradient the upper bound or the dual clip cut."),
    Metric("grad_norm", "", "Global gradient norm before clipping, mean over the optimizer steps that were taken."),
    Metric("skipped_steps", "optimizer steps", "Those not taken: the loss or the gradient was NaN or infinite."),
    Metric("lr", "", "Learning rate of the step."),
    Metric("logprob_difference/mean", "nats", "Difference between trainer and engine in a token's logprob. Near 0."),
    Metric("logprob_difference/p99", "nats", "99 % of the tokens that are trained on differ by no more than this."),
    Metric("logprob_difference/max", "nats", "Largest difference."),
    Metric("logprob_difference/k1", "nats/token", "Divergence of the trainer from the engine: mean rollout - train."),
    Metric("logprob_difference/k3", "nats/token", "The same, estimated with low variance and never negative."),
    Metric("logprob_difference/reverse_k3", "nats/token", "Divergence of the engine from the trainer, as k3."),
    Metric("rollout_ratio/mean", "", "Mean of exp(train - rollout logprob): the tokens' importance weights. Near 1."),
    Metric("rollout_ratio/effective_share", "share of tokens", "Effective sample size of these weights. Near 1."),
    Metric("rollout_ratio/chi2_token", "", "Variance of these weights: the mean of their squares, less 1. Near 0."),
    Metric("rollout_ratio/chi2_sequence", "", "The same for the products of the weights over whole responses."),
    Metric("perplexity/train", "", "exp of the mean of -logprob of the trained tokens, as the trainer computes it."),
    Metric("perplexity/rollout", "", "The same, as the engines that sampled them compute it."),
    Metric("correction/weight_mean", "", "Mean weight of the off-policy correction, bounded, not normalised."),
    Metric("correction/outside_share", "share of tokens", "Tokens whose weight was outside the bounds."),
    Metric("correction/rejected_share", "share of tokens", "Tokens that rejections or the veto left out."),
    Metric("correction/vetoed_share", "share of samples", "Responses that the veto left out."),
    Metric("critic/loss", "", "What the critic minimised: half the (clipped) squared error, mean over tokens."),
    Metric("critic/clip", "share of tokens", "Tokens whose value had moved too far to have a gradient."),
    Metric("critic/value_mean", "score", "Mean value before the critic's update."),
    Metric("critic/return_mean", "score", "Mean of the returns that it learns to predict."),
    Metric("critic/explained_variance", "", "1 - variance of return - value over that of the return. At most 1."),
    Metric("critic/grad_norm", "", "The critic's global gradient norm before clipping."),
    Metric("critic/skipped_steps", "optimizer steps", "Those of the critic that were not taken."),
    Metric("critic/lr", "", "The critic's learning rate."),
    Metric("response_tokens/mean", "tokens", "Length of a response, its stop token included."),
    Metric("response_tokens/max", "tokens", "Longest."),
    Metric("response_tokens/truncated_share", "share of samples", "Responses that reached the token limit."),
    Metric("response_tokens/aborted_share", "share of samples", "Responses that the engine gave up."),
    Metric("prompt_tokens/mean", "tokens", "Length of a prompt after the chat template."),
    Metric("agent/turns/mean", "turns", "Answers of the policy in an agent's rollout, also those not trained on."),
    Metric("agent/turns/max", "turns", "Most."),
    Metric("agent/turns_unused", "turns", "Answers not trained on: the agent went on with another to that request."),
    Metric("agent/branches/mean", "sequences", "Sequences that a rollout is trained as."),
    Metric("agent/branches/{reason}", "turns", "Turns that began another sequence, and why: docs/agents.md lists it."),
    Metric("agent/given_tokens/mean", "tokens", "Tokens of a rollout's sequences that the policy did not sample."),
    Metric("agent/given_tokens/share", "share of tokens", "The same, in all tokens of these sequences."),
    Metric("agent/tokens_rerendered", "tokens", "Prompts of turns whose history had to be rendered anew."),
    Metric("agent/prefix_reuse", "share of tokens", "Tokens of all prompts that the rollout's engine had seen there."),
    Metric("agent/tool_calls/mean", "calls", "Tool calls of a rollout that could be read."),
    Metric("agent/tool_failures/share", "share of calls", "Tool calls that failed, of those that agents tell of."),
    Metric("agent/tools/{tool}/calls", "calls", "Calls of one tool in the step. other: the rarest of many tools."),
    Metric("agent/tools/{tool}/failure_share", "share of calls", "Those that failed."),
    Metric("agent/tools/{tool}/seconds_mean", "s", "How long a call took."),
    Metric("agent/tools/{tool}/seconds_max", "s", "The longest."),
    Metric("agent/unreadable_calls", "turns", "Answers with a tool call that cannot be read: given back as text."),
    Metric("agent/retries", "requests", "Repeated by clients: they got the answer of the turn that ran."),
    Metric("agent/given_up", "turns", "Ended because no client waited for them any more."),
    Metric("agent/ignored/{setting}", "requests", "Those with a setting of sampling; the recipe's was used."),
    Metric("agent/refused/{code}", "requests", "Those that got an error, such as context_length_exceeded."),
    Metric("agent/audited", "turns", "Extensions that were compared with a rendering of the whole conversation."),
    Metric("agent/audit_differs", "turns", "Those that the chat template writes otherwise. Should be 0."),
    Metric("agent/late", "rollouts", "Those that took longer than agent.timeout_seconds."),
    Metric(
        "agent/failed",
        "rollouts",
        "Those whose agent, its process or its environment failed. Late ones, and those that an engine gave up on,"
        " do not count.",
    ),
    Metric("agent/processes_restarted", "processes", "Agent processes that ended in the step, and were started again."),
    Metric(
        "agent/seconds/mean",
        "s",
        "From a rollout's begin to the end of its last turn, with the time in which engines stood still for an update"
        " or for new weights. So are the seconds of a turn in traces.",
    ),
    Metric("agent/seconds/max", "s", "The longest."),
    Metric("agent/seconds/outside_mean", "s", "Within agent/seconds/mean: no turn ran. Tools, environment, agent."),
    Metric("epoch", "passes", "Supervised fine-tuning: passes over the examples before the step."),
    Metric("example_tokens/mean", "tokens", "Length of an example of supervised fine-tuning after the chat template."),
    Metric("example_tokens/trained_share", "share of tokens", "Tokens that are the assistant's."),
    Metric("packing/microbatches", "microbatches", "Forward passes of the step, over all data ranks."),
    Metric("packing/efficiency", "share", "Tokens in microbatches over what these could hold."),
    Metric("packing/padding", "share", "Tokens that only fill microbatches up, of all in the update's passes."),
    Metric("packing/imbalance", "", "The busiest data rank's estimated work over the mean of all, less 1. Near 0."),
    Metric("tokens_per_second", "tokens/s", "Prompt and response tokens of the step over seconds/step."),
    Metric("weights/version", "", "Version of the weights that the engines hold after the step."),
    Metric(
        "weights/sync_bytes",
        "bytes",
        "What all engines together receive in a weight sync: each its part, in its own dtype. 0: none had changed.",
    ),
    Metric(
        "memory/allocated_max/update",
        "bytes",
        "Most that tensors took at a time in the update, on the training rank that had most. Torch's cache, CUDA, NCCL"
        " and engines come on top. GPUs only.",
    ),
    Metric("restarts", "times", "So often lost training ranks were started again since this start of the run."),
    Metric("seconds/rollout", "s", "Generating the responses."),
    Metric("seconds/reward", "s", "Scoring the responses."),
    Metric("seconds/save_batch", "s", "Writing the batch, with checkpoint.keep_batches."),
    Metric("seconds/logprobs", "s", "Sending the batch to the ranks; old and reference logprobs where needed."),
    Metric("seconds/update", "s", "Forward and backward passes and optimizer steps."),
    Metric("seconds/weight_sync", "s", "Bringing the new weights to the engines and comparing digests."),
    Metric("seconds/eval", "s", "Evaluation."),
    Metric(
        "seconds/checkpoint",
        "s",
        "What training waited for the checkpoint of the step before, whose line is already written: not for its files.",
    ),
    Metric("seconds/export", "s", "What training waited for checkpoint.export_every_steps after the step before."),
    Metric("seconds/step", "s", "The whole step, evaluation and checkpoint not included."),
    Metric("eval/loss", "nats/token", "Mean -log p of the assistant's tokens in held-out conversations."),
    Metric("eval/perplexity", "", "exp(eval/loss)."),
    Metric("eval/{set}/mean@{k}", "score", "Mean score of the k responses to each prompt of a set, mean over prompts."),
    Metric("eval/{set}/pass@{k}", "share of prompts", "Chance that one of k responses is solved, without bias."),
    Metric("eval/{set}/best@{k}", "score", "Expected best score of k responses, without bias."),
    Metric("eval/{set}/maj@{k}", "share of prompts", "Those whose most frequent answer among k responses is solved."),
    Metric("eval/{set}/{metric}/low", "", "Lower end of the metric's 95 % interval: bootstrap over prompts."),
    Metric("eval/{set}/{metric}/high", "", "Its upper end."),
    Metric("eval/{set}/reward/{part}", "score", "Mean of one reward function, or of a metric that one returns."),
    Metric("eval/{set}/{data_source}/mean@{k}", "score", "This, and each of the others, over one of several sources."),
    Metric("eval/{set}/reward/errors", "samples", "Responses whose reward raised or timed out: left out above."),
    Metric("eval/{set}/masked", "samples", "Those that the recipe leaves out: beyond a judge's budget, for example."),
    Metric(
        "eval/{set}/unscored_share",
        "share of samples",
        "Both, and rollouts whose agent was late or failed, which count 0 above.",
    ),
    Metric("eval/{set}/response_tokens/mean", "tokens", "Length of a response."),
    Metric("eval/{set}/response_tokens/truncated_share", "share of samples", "Those that reached the token limit."),
)  # fmt: skip


def undocumented(names: Iterable[str]) -> list[str]:
    """Returns the names that are not in the table."""
    return [name for name in names if not _pattern().fullmatch(name)]


def metric_of(name: str) -> Metric | None:
    """Returns the table's entry for a name: the one of that name, or else the one with the longest pattern for it."""
    known = [metric for metric, pattern in _patterns() if pattern.fullmatch(name)]
    return max(known, key=lambda metric: (metric.name == name, len(metric.name)), default=None)


@cache
def described(name: str) -> str:
    """Returns meaning and unit of a metric; empty if it is not in the table."""
    if (metric := metric_of(name)) is None:
        return ""
    return f"{metric.meaning} [{metric.unit}]" if metric.unit else metric.meaning


@cache
def _pattern() -> re.Pattern[str]:
    return re.compile("|".join(pattern.pattern for _, pattern in _patterns()))


@cache
def _patterns() -> list[tuple[Metric, re.Pattern[str]]]:
    return [(metric, re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(metric.name)))) for metric in METRICS]


def as_markdown() -> str:
    """Returns the table as docs/metrics.md has it."""
    lines = [
        "# Metrics",
        "",
        "What each step logs, to every tracker. Step 0 is the evaluation before training.",
        "",
        "| name | unit | meaning |",
        "|---|---|---|",
        *(f"| `{m.name}` | {m.unit} | {m.meaning.replace('|', chr(92) + '|')} |" for m in METRICS),
        "",
        "MLflow allows no `@` in a name: there `eval/gsm8k/mean@1` is `eval/gsm8k/mean_at_1`.",
        "In `metrics.jsonl` a value that is not a finite number is `null`.",
        "",
        "Written by `python -m megagrpo.track.metrics` from `megagrpo/track/metrics.py`.",
    ]
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", "\n".join(lines)) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
