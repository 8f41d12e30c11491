"""The stages of a step, from prompts to a new weight version (DeepSeekMath, arXiv:2402.03300, algorithm 1).

    sample -> score -> advantages and load_batch -> train -> sync

`grpo_step` (schedule.py) calls the stages; the source of its samples decides when, and what runs beside them. A stage
takes the run and what earlier stages returned. Rows are the samples of a step's groups, group by group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.algorithm.advantage_method import AdvantageInputs, Advantages
from megagrpo.algorithm.advantages import OwnAdvantageConfig
from megagrpo.algorithm.credit import Turns
from megagrpo.algorithm.optimizer import learning_rate
from megagrpo.algorithm.ragged import ragged_zeros
from megagrpo.batching.rank_batches import RankBatch, TrainSequence, make_rank_batches, sampled_sequences
from megagrpo.errors import AgentError, EngineError, Problem, RecipeError
from megagrpo.recipe.defaults import prompts_of_round
from megagrpo.recipe.schema import Recipe
from megagrpo.rollout.requests import with_baseline
from megagrpo.track.rollout_writer import Learned, first_groups
from megagrpo.trainer.batches import Sampled, branches_of, save_batch
from megagrpo.trainer.run import Run, TrainRun
from megagrpo.trainer.taught import Taught, advised, batches_of_teachers, given_rows, taught_of, teachers_of_rows
from megagrpo.types import Group, Prompt, Sample, Score, Turn

if TYPE_CHECKING:
    from megagrpo.rank_results import CriticMetrics, StepMetrics

ATTEMPTS = 3
"""Attempts at a step's responses while engines give up on every one."""

ERRORS_SHOWN = 3

# --- sample and score -------------------------------------------------------------------------------------------------


def sample(run: Run, step: int) -> Sampled:
    """Generates and scores responses to the next prompts, with greedy ones for remax. Dynamic sampling replaces groups
    without signal by those of new prompts, in further rounds (DAPO, arXiv:2503.14476, section 3.2, eq. 11)."""
    wanted, dynamic = run.recipe.rollout.prompts_per_step, run.recipe.rollout.dynamic_sampling
    useful: list[Group] = []
    everything: list[Group] = []
    drawn: Counter[str] = Counter()  # by prompt; the cursor updates it, so that repeated prompts get ids of their own
    rounds = 0
    while len(useful) < wanted and rounds < (dynamic.rounds_max if dynamic else 1):
        prompts = run.cursor.next(prompts_of_round(wanted, len(useful), len(everything)), drawn)
        groups = score(run, generate(run, prompts, step))
        everything += groups
        useful += with_signal(groups, run.recipe) if dynamic else groups
        rounds += 1
    return Sampled(useful[:wanted], everything, rounds, left_over=max(0, len(useful) - wanted))


def generate(run: Run, prompts: Sequence[Prompt], step: int) -> list[Group]:
    """Returns a group of responses per prompt. Raises EngineError if other weights than the policy's sampled a token,
    or if engines give up on every response, or on every greedy one, ATTEMPTS times; AgentError if agents fail in them.
    """
    for _ in range(ATTEMPTS):
        with run.clock.phase("rollout"):
            groups = [with_baseline(group, run.recipe) for group in run.rollouts.generate(prompts, step)]
            require_version(groups, run.weights.version)
        baselines = [group.baseline for group in groups if group.baseline]
        if any_ended(groups) and (not baselines or any(map(ended, baselines))):
            return groups
    raise none_ended(groups, step, run.recipe, ATTEMPTS)


def any_ended(groups: Sequence[Group]) -> bool:
    """Returns whether a sample has ended, or all responses are given."""
    sampled = [group for group in groups if not group.given]
    return not sampled or any(ended(sample) for group in sampled for sample in group.samples)


def ended(sample: Sample) -> bool:
    """Returns whether a response has ended; an agent's rollout counts only if it has a token and did not fail."""
    whole = sample.agent is None or (len(sample.tokens) > 0 and not sample.agent.counts.get("failed"))
    return sample.finish != "abort" and whole


def none_ended(groups: Sequence[Group], step: int, recipe: Recipe, attempts: int = 1) -> AgentError | EngineError:
    """Returns the error of a step in which no response has ended: because of its agents, or of the engines."""
    if why := agent_errors(groups):
        given, needed = f"agents failed in all of them: {why}", "one that ends, with tokens of the policy"
        fix = "look at logs/agents_*.log; for context_length_exceeded, raise agent.tokens_max"
        return AgentError(Problem(f"rollouts of step {step}", given, needed, fix))
    limit = f"rollout.timeout_seconds ({recipe.rollout.timeout_seconds:g})"
    given = f"engines gave up on all of them{f', {attempts} times' * (attempts > 1)}"
    fix = "raise it, lower rollout.response_tokens_max, or give the engines more of the machine"
    return EngineError(Problem(f"responses of step {step}", given, f"one that ends within {limit}", fix))


def agent_errors(groups: Sequence[Group]) -> str:
    """Returns why agents failed in rollouts, were late or got no token, with the count of each error: the most frequent
    first. Skips turns that engines gave up on."""
    errors = Counter(agent_error(sample) for group in groups for sample in group.samples)
    del errors[""]
    return "; ".join(f"{error} ({count} times)" for error, count in errors.most_common(ERRORS_SHOWN))


def agent_error(sample: Sample) -> str:
    """Returns the error for which a rollout's agent is to blame, or ""."""
    rollout = sample.agent
    if rollout is None or rollout.counts.get("failed") or rollout.counts.get("late"):
        return rollout.error if rollout else ""
    refused = [name.removeprefix("refused/") for name in sorted(rollout.counts) if name.startswith("refused/")]
    if len(sample.tokens) or "turn_aborted" in refused or (rollout.error and not refused):
        return ""
    why = f"requests were refused, {', '.join(refused)}" if refused else "the agent never asked for one"
    return f"no answer of the policy: {why}"


def score(run: Run, groups: Sequence[Group]) -> list[Group]:
    """Returns the same groups with a score for each sample, and with what teachers say that answer requests."""
    with run.clock.phase("reward"):
        return run.teachers.beside(groups, run.scorer.score)


def require_version(groups: Sequence[Group], newest: int, oldest: int | None = None) -> None:
    """Raises EngineError unless weights of versions `oldest` (by default `newest`) to `newest` sampled every token that
    is not given."""
    for group in (group for group in groups if not group.given):
        for sample in group.responses:
            if ((sample.versions < (newest if oldest is None else oldest)) | (sample.versions > newest)).any():
                given = f"tokens sampled by weight versions {sorted(set(sample.versions.tolist()))}"
                needed = f"version {newest}, the policy's"
                if oldest is not None:
                    needed = f"versions {oldest}, the newest when it began, to {newest}, the policy's"
                raise EngineError(Problem(f"sample {sample.index} of prompt {sample.prompt_id}", given, needed))


def with_signal(groups: Sequence[Group], recipe: Recipe) -> list[Group]:
    """Returns the groups that teach something, as `CreditMethod.teaches` defines it, have a teacher, or are given."""
    inputs, algorithm = advantage_inputs(recipe, groups), recipe.algorithm
    teaches = algorithm.credit.teaches(algorithm.advantage, inputs, turns_of(recipe, groups))
    if recipe.teachers:
        has_teacher = np.array([name is not None for name in teachers_of_rows(recipe, groups)], bool)
        teaches = teaches | (has_teacher & trainable_rows(inputs)) | given_rows(groups)
    return [groups[i] for i in np.unique(inputs.group_ids[teaches])]


def solved_prompts(groups: Sequence[Group], rate: float) -> list[str]:
    """Returns the ids of the prompts with at least the share `rate` of their responses solved."""
    return [
        group.prompt.id for group in groups if sum(score.solved for score in group.scores) / len(group.samples) >= rate
    ]


# --- advantages and batch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A step's training: `load` returns it with its data, `train` adds the results."""

    rows: np.ndarray  # bool [rows], those in the batches
    advantages: Advantages
    batches: Sequence[RankBatch]  # on the training ranks, one for each data rank; empty if no row can be trained on
    kl_coefficient: float  # of this step; `train` puts the next step's in its place
    policy: StepMetrics | None = None  # None: it has not learned in this step
    critic: CriticMetrics | None = None  # None: it has not learned in this step, or there is none
    lr: float = 0.0
    critic_lr: float = 0.0
    memory_peak: int | None = None  # bytes; of the rank that had most at a time
    taught: Taught | None = None  # None: the recipe has no teachers

    @property
    def changed(self) -> bool:
        """Returns whether the policy's optimizer has taken a step; False if all were skipped."""
        return self.policy is not None and not (self.policy.skipped_steps and math.isnan(self.policy.grad_norm))


def trainable_rows(inputs: AdvantageInputs) -> np.ndarray:
    """Returns the rows that have a score, a token and, for remax, a baseline: bool [rows]."""
    rows = ~np.isnan(inputs.scores) & (inputs.tokens > 0)
    return rows if inputs.baselines is None else rows & ~np.isnan(inputs.baselines[inputs.group_ids])


def load(run: TrainRun, sampled: Sampled, step: int, kl_coefficient: float) -> Trained:
    """Computes advantages, and loads the rows that teach something. Loads all rows first where advantages need the KL
    or the values that ranks compute. Saves the samples before that, if the recipe keeps batches.
    """
    recipe, algorithm = run.recipe, run.recipe.algorithm
    if recipe.checkpoint.keep_batches:
        with run.clock.phase("save_batch"):
            save_batch(recipe, step, sampled, run.total_steps, recipe.checkpoint.keep_batches)
    inputs = advantage_inputs(recipe, sampled.groups)
    rows = trainable_rows(inputs) | given_rows(sampled.groups)
    if algorithm.routing == "replay":
        left_out = rows & ~with_routes(sampled.groups, rows)
        rows, inputs = rows & ~left_out, replace(inputs, scores=np.where(left_out, np.nan, inputs.scores))
    taught = taught_of(recipe, sampled.groups)
    if algorithm.reads_batch:  # the recipe's rules then refuse to credit turns
        with run.clock.phase("logprobs"):
            batches, zeros = load_batch(run, sampled.groups, rows, step, taught), ragged_zeros(inputs.tokens)
            if algorithm.kl_in_reward:
                kl = run.policy.by_token("token_kl", inputs.tokens) if batches else zeros
                inputs = replace(inputs, kl=kl, kl_coefficient=kl_coefficient)
            if algorithm.critic is not None:
                if batches:
                    run.policy.call("compute_values")
                values = run.policy.by_token("token_values", inputs.tokens) if batches else zeros
                inputs = replace(inputs, values=values)
            if algorithm.advantage.reads_energy:
                energy = run.policy.by_token("token_energy", inputs.tokens) if batches else zeros
                inputs = replace(inputs, energy=energy)
        advantages = algorithm.advantage.advantages(inputs)
    else:
        advantages = algorithm.credit.advantages(algorithm.advantage, inputs, turns_of(recipe, sampled.groups))
        if advantages.of_tokens is not None and algorithm.loss.name == "gmpo":  # by a function of the user's own
            needed = "one advantage for each response: the geometric mean over it is bounded on the side of its sign"
            raise RecipeError(
                Problem("algorithm.loss.name", "gmpo, with advantages by token", needed, "name: ppo_clip or gspo")
            )
        with run.clock.phase("logprobs"):
            if algorithm.skips_groups:
                teaches = advantages.taught if taught is None else advantages.taught | taught.rows
                rows = rows & np.isin(inputs.group_ids, inputs.group_ids[teaches])
            batches = load_batch(run, sampled.groups, rows, step, taught)
    if taught is not None and algorithm.policy_learns(step):
        advantages, taught = advised(run, advantages, taught, sampled.groups, rows)
    return Trained(rows, advantages, batches, kl_coefficient, taught=taught)


def load_batch(
    run: TrainRun, groups: Sequence[Group], rows: np.ndarray, step: int, taught: Taught | None = None
) -> list[RankBatch]:
    """Sends the chosen rows (bool [rows]) to the training ranks, which compute the logprobs that the recipe needs.

    Returns the batches sent, one per data rank; [] if no row was chosen.
    """
    recipe, policy = run.recipe, run.policy
    names, of_row = list(recipe.teachers), taught.teacher_of_row if taught else []
    numbers = [-1 if name is None else names.index(name) for name in of_row]
    asked = {number for number, name in enumerate(names) if not recipe.teachers[name].on_ranks}
    sequences = train_sequences(groups, rows, narrowed=bool(recipe.rollout.narrowing), teachers=numbers, asked=asked)
    if not sequences:
        return []
    algorithm = recipe.algorithm
    batches = make_rank_batches(
        sequences,
        layout=recipe.train.layout.parallel(),
        minibatches=algorithm.minibatches,
        tokens_per_microbatch=recipe.train.tokens_per_microbatch,
        seed=recipe.seed + step,
        work=run.work,
    )
    policy.load_batch(batches)
    if not algorithm.policy_learns(step) and not algorithm.kl_in_reward:
        return batches  # the critic alone learns, from values
    if algorithm.rollout_logprobs_as_old:
        policy.call("use_rollout_logprobs_as_old")
    elif algorithm.needs_old_logprobs:
        policy.call("compute_old_logprobs")
    if algorithm.kl.coefficient > 0:
        policy.call("compute_reference_logprobs")
    if recipe.teachers_on_ranks and algorithm.policy_learns(step):
        policy.compute_teachers(batches_of_teachers(recipe, batches, run.work))
    every = recipe.rollout.mismatch.own_routes_every_steps
    if every is not None and step % every == 0:
        policy.call("compare_own_routes")
    return batches


def with_routes(groups: Sequence[Group], rows: np.ndarray) -> np.ndarray:
    """Returns the chosen rows (bool [rows]) that have routes. A server sends none for a response that ends as it is
    taken back. Raises EngineError if no chosen row has them."""
    samples = [(group, sample) for group in groups for sample in group.samples]
    has = np.array([rows[row] and has_routes(sample) for row, (_, sample) in enumerate(samples)], bool)
    sampled = rows & np.array([not sample.given for _, sample in samples], bool)
    if sampled.any() and not has[sampled].any():
        group, sample = samples[int(sampled.argmax())]
        where = f"sample {sample.index} of prompt {group.prompt.id}, and all others of the step"
        fix = "algorithm.routing: auto lets the trainer's routers choose for such samples, and counts them"
        raise EngineError(Problem(where, "no routes", "those of every token, for algorithm.routing: replay", fix))
    return has


def has_routes(sample: Sample) -> bool:
    """Returns whether all trained tokens of a sample have routes. Given responses need none."""
    if sample.agent is None:
        return sample.routes is not None or sample.given or not len(sample.tokens)
    return all(branch.routes is not None or not branch.trained.any() for branch in sample.agent.branches)


def advantage_inputs(recipe: Recipe, groups: Sequence[Group]) -> AdvantageInputs:
    """Returns the inputs of advantages, without those that ranks compute. A method of a user's own gets the tokens."""
    samples = [sample for group in groups for sample in group.samples]
    tokens = np.array([len(sample.tokens) for sample in samples], dtype=np.int64)
    own = isinstance(recipe.algorithm.advantage, OwnAdvantageConfig)
    ids = np.concatenate([np.empty(0, np.int32), *(sample.tokens for sample in samples if own)])
    logprobs = np.concatenate([np.empty(0, np.float32), *(sample.logprobs for sample in samples if own)])
    functions = [] if recipe.reward.by_source else recipe.reward.functions
    masked = (np.nan,) * len(functions)
    by_function = [score.counted or masked for group in groups for score in group.scores]
    return AdvantageInputs(
        scores=flat_scores(groups),
        group_ids=group_of_row(groups),
        tokens=tokens,
        parts=np.array(by_function, np.float64).reshape(len(by_function), len(functions)) if functions else None,
        weights=np.array([function.weight for function in functions]) if functions else None,
        baselines=baselines_of(groups) if any(group.baseline_score for group in groups) else None,
        token_ids=ragged_zeros(tokens).with_values(ids) if own else None,
        logprobs=ragged_zeros(tokens).with_values(logprobs) if own else None,
    )


def turns_of(recipe: Recipe, groups: Sequence[Group]) -> Turns | None:
    """Returns the turns of all rows, if the recipe credits turns. A response without an agent is one turn."""
    if not recipe.algorithm.credit.by_turn:
        return None
    table: list[tuple[float, ...]] = []
    for row, sample in enumerate(sample for group in groups for sample in group.samples):
        turns = sample.agent.turns if sample.agent else [Turn(0, 0, len(sample.tokens))]
        in_time = np.argsort(np.argsort([turn.number for turn in turns])).tolist()  # each turn's place, from 0
        table += [(row, at, turn.tokens, turn.reward or 0.0) for at, turn in zip(in_time, turns, strict=True)]
    rows, order, tokens, rewards = np.array(table, np.float64).reshape(-1, 4).T
    return Turns(rows.astype(np.int64), order.astype(np.int64), tokens.astype(np.int64), rewards)


def flat_scores(groups: Sequence[Group]) -> np.ndarray:
    """Returns the scores of all rows: float64 [rows], NaN where a sample is masked."""
    return _values(score for group in groups for score in group.scores)


def baselines_of(groups: Sequence[Group]) -> np.ndarray:
    """Returns the scores of the groups' baselines: float64 [groups], NaN where one is masked or lacking."""
    return _values(group.baseline_score for group in groups)


def _values(scores: Iterable[Score | None]) -> np.ndarray:
    return np.array([np.nan if score is None or score.value is None else score.value for score in scores], np.float64)


def group_of_row(groups: Sequence[Group]) -> np.ndarray:
    """Returns the index of each row's group: int64 [rows]."""
    return np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])


def train_sequences(
    groups: Sequence[Group],
    rows: np.ndarray,
    *,
    narrowed: bool = False,
    teachers: Sequence[int] = (),
    asked: Collection[int] = (),
) -> list[TrainSequence]:
    """Returns the chosen rows (bool [rows]) as sequences, each with a response token. An agent's rollout is one
    sequence for each branch that is trained on. teachers: of each row, its place among the recipe's or -1; asked: the
    places of those whose answers the samples have. Raises EngineError for routes and kept sets that are not those of
    their tokens, and with `narrowed`, by rollout.top_p and others, for samples without."""
    prompts = [(np.array(one.prompt.tokens, np.int64), np.array(one.prompt.taught, np.int64)) for one in groups]
    samples = [(*pair, sample) for pair, group in zip(prompts, groups, strict=True) for sample in group.samples]
    sequences: list[TrainSequence] = []
    for row, (prompt, before, sample) in enumerate(samples):
        first, kept, where = 0, None, f"sample {sample.index} of prompt {sample.prompt_id}"
        if sample.kept is not None:
            sample.kept.require(sample.tokens, where)
        elif narrowed and rows[row] and not sample.given:
            given, needed = "no kept sets", "those of its tokens, for rollout.top_p, top_k or min_p"
            raise EngineError(Problem(where, given, needed, "sample it with this recipe, not with another"))
        for branch in branches_of(prompt, sample) if rows[row] else ():
            trained = np.flatnonzero(branch.trained)
            if not len(trained):
                continue
            if branch.routes is not None:
                branch.routes.require_rows(where, len(branch.tokens) - 1)
            length = int(trained[-1]) + 1  # no trained token depends on later tokens
            rollout_logprobs = np.zeros(length, np.float32)
            rollout_logprobs[trained] = sample.logprobs[first : first + len(trained)]
            tokens, loss_mask = branch.tokens[:length].astype(np.int64), branch.trained[:length]
            routes = branch.routes and branch.routes.before(length, where)
            if sample.kept is not None:
                kept = sample.kept.part(first, first + len(trained))
            number, taught = teachers[row] if teachers else -1, None
            if sample.teacher is not None and number in asked:
                taught = sample.teacher.part(first, first + len(trained))
            of_tokens = tokens, loss_mask, rollout_logprobs
            of_teacher = number, taught, before if len(before) else None
            sequences.append(TrainSequence(*of_tokens, row, first, routes, kept, where, *of_teacher, sample.given))
            first += len(trained)
    return sequences


# --- train and sync ---------------------------------------------------------------------------------------------------


def train(run: TrainRun, trained: Trained, step: int) -> Trained:
    """Updates critic and policy on the loaded batch, if there is one, and the reference where it is due. Returns
    `trained` with the results."""
    recipe, policy, advantages, algorithm = run.recipe, run.policy, trained.advantages, run.recipe.algorithm
    kl_coefficient = trained.kl_coefficient
    with policy.updating(step):
        if trained.batches:
            with run.clock.phase("update"):
                if advantages.returns is not None:
                    lr = critic_learning_rate(recipe, step, run.total_steps)
                    trained = replace(trained, critic=policy.update_critic(advantages.returns, lr), critic_lr=lr)
                if algorithm.policy_learns(step):
                    lr = policy_learning_rate(recipe, step, run.total_steps)
                    in_loss = 0.0 if algorithm.kl_in_reward else kl_coefficient
                    updated = policy.update(advantages.of_tokens or advantages.of_rows, lr, in_loss, step)
                    if updated.kl is not None:
                        rows = {sequence.row for sequence in sampled_sequences(trained.batches)}
                        kl_coefficient = algorithm.kl.next_coefficient(kl_coefficient, updated.kl, len(rows))
                    trained = replace(trained, kl_coefficient=kl_coefficient, policy=updated, lr=lr)
            trained = replace(trained, memory_peak=policy.memory_peak())
            if trained.taught and trained.policy:
                trained = replace(trained, taught=trained.taught.after_update(run))
        every = algorithm.reference.update_every_steps
        if every is not None and step % every == 0:
            with run.clock.phase("update"):
                policy.call("update_reference")
    return trained


def learned_of(run: TrainRun, sampled: Sampled, trained: Trained) -> Learned:
    """Returns the step's rows and advantages for the trackers, and the ranks' figures of the tokens that are kept."""
    settings, learned = run.recipe.track.rollouts, Learned(trained.rows, trained.advantages)
    if (taught := trained.taught) is not None:
        seen = None if taught.agreement is None else taught.divergence
        learned = replace(learned, teachers=taught.teacher_of_row, teacher_logprobs=taught.logprobs, divergences=seen)
    if trained.policy is None or settings is None or settings.token_samples_per_step == 0:
        return learned
    kept = first_groups(first_groups(sampled.groups, settings.samples_per_step), settings.token_samples_per_step)
    lengths = np.array([len(sample.tokens) for group in kept for sample in group.samples], np.int64)
    with run.policy.alone():  # a lost node without ranks must not keep a finished step from being saved
        logprobs, entropies = run.policy.token_figures(lengths)
    return replace(learned, logprobs=logprobs, entropies=entropies)


def sync(run: Run, version: int, *, changed: bool = True) -> None:
    """Brings the policy's weights, if they have changed, to all engines, which hold `version` afterwards."""
    if run.recipe.pause == "finish":
        with run.clock.phase("rollout"):
            run.rollouts.drain()
    with run.clock.phase("weight_sync"):
        run.weights.sync(version, changed=changed)


def policy_learning_rate(recipe: Recipe, step: int, total_steps: int) -> float:
    """Returns the rate by train.optimizer's schedule, over the steps after the critic's warm-up."""
    critic = recipe.algorithm.critic
    waited = critic.warmup_steps if critic else 0
    return learning_rate(step - waited, total_steps - waited, recipe.train.optimizer)


def critic_learning_rate(recipe: Recipe, step: int, total_steps: int) -> float:
    """Returns the rate by train.optimizer's schedule, its warm-up included, with the critic's peak."""
    if recipe.algorithm.critic is None:
        raise ValueError("no critic")
    optimizer = recipe.train.optimizer
    return learning_rate(step, total_steps, optimizer) * recipe.algorithm.critic.lr / optimizer.lr
