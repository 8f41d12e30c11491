"""Teachers on the training ranks: what they say of tokens, and what a divergence from them adds to a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.algorithm.distillation import TeacherTopKConfig
from megagrpo.batching.rank_batches import IDLE, RankBatch, TrainSequence
from megagrpo.batching.work import TOKENS
from megagrpo.errors import RankError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.heads import Head, HeadScale, VocabularyShard
from megagrpo.megatron.metrics import reduce_mismatch
from megagrpo.megatron.rank import TrainRank
from megagrpo.megatron.teacher import Teachers, _compared_at
from megagrpo.recipe.schema import Recipe
from megagrpo.trainer.step_metrics import update_metrics
from megagrpo.trainer.taught import batches_of_teachers
from megagrpo.types import KeptSets
from tests.distributed.conftest import CaseOf, Tiny
from tests.distributed.step_case import (
    LR,
    TEMPERATURE,
    VOCAB,
    Case,
    assemble,
    load_reference,
    make_recipe,
    reference_of,
)
from tests.distributed.step_ranks import Parts, compute_gradients, gradients_of, make_batches, of_all_tokens, on_ranks
from tests.distributed.teacher_case import NONE, OBJECTIVES, ON_RANKS, logprobs_of, rank_with, recipe_of, with_teachers


@pytest.fixture(scope="module")
def case(case_of: CaseOf, teacher: Path) -> Case:
    return with_teachers(case_of("qwen3"), teacher)


def beside_rewards(
    rank: TrainRank, batch: RankBatch, advantages: Any, recipes: Mapping[str, tuple[Recipe, bool]], teacher: Path
) -> dict[str, Parts]:
    """Gradients by recipe, with advantages or without."""
    found = {}
    for name, (recipe, rewarded) in recipes.items():
        rank_with(rank, recipe, teacher).load_batch(batch)
        if recipe.algorithm.distillation.objective.in_loss:
            rank.compute_teachers({"on_ranks": None})
        compute_gradients(rank, advantages if rewarded else np.zeros_like(advantages))
        found[name] = gradients_of(rank.policy)
    return found


def narrowed(sequence: TrainSequence) -> TrainSequence:
    """The tokens were drawn among six ids at most."""
    random = np.random.default_rng(sequence.row)
    sets = [np.unique([token, *random.integers(0, VOCAB, 5)]) for token in sequence.tokens[sequence.loss_mask]]
    return replace(sequence, kept=KeptSets.of(sets))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("objective", ["reverse KL", "forward KL", "student's top", "teacher's top"])
def test_beside_rewards_gradients_are_the_sum_of_both(objective, kept, case, teacher):
    """Advantages and an entropy bonus. One product serves all, but for kept sets and an objective's own temperature."""
    layout = ParallelLayout(tensor=2)
    if kept:
        case = replace(case, sequences=list(map(narrowed, case.sequences)))
    recipes = {
        "both": (recipe_of(layout, OBJECTIVES[objective], entropy=0.3), True),
        "rewards": (recipe_of(layout, {"name": "sampled_token"}, entropy=0.3), True),
        "teachers": (recipe_of(layout, OBJECTIVES[objective]), False),
    }
    results = on_ranks(beside_rewards, recipes["both"][0], case, recipes, teacher)
    found = {name: assemble([result[name] for result in results]) for name in recipes}
    for tensor, both in found["both"].items():
        wanted = found["rewards"][tensor] + found["teachers"][tensor]
        assert np.abs(found["rewards"][tensor]).max() > 1e-3 * np.abs(found["teachers"][tensor]).max()
        assert np.abs(both - wanted).max() <= 2e-5 * max(np.abs(wanted).max(), 1e-30), tensor


def teacher_logprobs(
    rank: TrainRank, batch: RankBatch, advantages: Any, recipe: Recipe, teacher: Path, apart: Any
) -> Any:
    """Logprobs by the teacher; and the bytes that its weights take before and inside of its pass."""
    rank_with(rank, recipe, teacher).load_batch(batch)
    (model,) = rank.teachers._models.values()
    weights = [p.untyped_storage() for chunk in model.chunks for p in chunk.parameters()]
    outside = sum(storage.nbytes() for storage in weights)
    rank.compute_teachers(apart)
    with model.here():
        inside = sum(storage.nbytes() for storage in weights)
    return rank.token_teacher() if rank.has_logits else None, outside, inside


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("reads_more", [False, True])
def test_a_teachers_logprobs_are_those_of_its_tokens_alone(offload, reads_more, case, teacher):
    """`reads_more`: the teacher has prompts of its own. Others read its rows alone where it is offloaded."""
    layout = ParallelLayout(context=2) if offload else ParallelLayout(pipeline=2)
    prompts = [np.arange(3 + sequence.row, dtype=np.int64) for sequence in case.sequences]
    if reads_more:
        pairs = zip(case.sequences, prompts, strict=True)
        case = replace(case, sequences=[replace(one, prompt_of_teacher=prompt) for one, prompt in pairs])
    recipe = recipe_of(
        layout, {"name": "sampled_token"}, offload=offload, rewards=True, system="Add." if reads_more else None
    )
    batches = make_batches(recipe, case)
    apart = batches_of_teachers(recipe, batches, TOKENS) if offload or reads_more else {"on_ranks": None}
    numbers, outside, inside = zip(*on_ranks(teacher_logprobs, recipe, case, recipe, teacher, apart), strict=True)
    model, wanted = load_reference(teacher), []
    for sequence, prompt in zip(case.sequences, prompts, strict=True):
        response = sequence.tokens[sequence.loss_mask]
        tokens = np.concatenate([prompt if reads_more else sequence.tokens[~sequence.loss_mask], response])
        with torch.no_grad():
            log_q = logprobs_of(model, tokens, TEMPERATURE)[-len(response) :]
        of_tokens = log_q.gather(1, torch.from_numpy(response)[:, None])[:, 0].numpy()
        wanted.append(of_tokens if sequence.teacher == ON_RANKS else np.full(len(of_tokens), np.nan))
    np.testing.assert_allclose(of_all_tokens(numbers), np.concatenate(wanted), atol=3e-6)
    assert (outside[0] < 0.3 * inside[0]) if offload else outside == inside


def test_a_teacher_with_fewer_ids_is_read_over_the_kept_ids_that_it_has(case, tiny: Tiny):
    vocab, sequences, wanted = VOCAB - 8, [], []
    small = tiny("llama", vocab_size=vocab)
    model = load_reference(small)
    for sequence in case.sequences:
        sequences.append(narrowed(replace(sequence, tokens=sequence.tokens % vocab, teacher=ON_RANKS)))
        kept, mask = sequences[-1].kept, sequence.loss_mask[1:]
        with torch.no_grad():
            log_q = logprobs_of(model, sequences[-1].tokens, TEMPERATURE)[mask]
        sets = np.split(kept.ids, kept.ends[:-1])
        for of_token, label, ids in zip(log_q, sequences[-1].tokens[1:][mask], sets, strict=True):
            wanted.append(float(of_token[label] - of_token[torch.from_numpy(ids[ids < vocab]).long()].logsumexp(0)))
    assert max(one.kept.ids.max() for one in sequences) >= vocab
    case = replace(case, sequences=sequences)
    for own in (None, ParallelLayout(data=2)):
        recipe = recipe_of(ParallelLayout(tensor=2), {"name": "sampled_token"}, rewards=True, own=own)
        apart = batches_of_teachers(recipe, make_batches(recipe, case), TOKENS)
        assert (apart["on_ranks"] is None) == (own is None)
        results = on_ranks(teacher_logprobs, recipe, case, recipe, small, apart)
        np.testing.assert_allclose(of_all_tokens(numbers for numbers, *_ in results), wanted, atol=3e-6)


def with_batches(
    rank: TrainRank,
    batch: RankBatch,
    advantages: Any,
    runs: Mapping[str, tuple[Recipe, Any, float]],
    teacher: Path,
) -> dict[str, tuple[Parts, Any]]:
    """By run, a recipe, the batches of data ranks and what advantages are multiplied by: gradients and metrics."""
    found = {}
    for name, (recipe, batches, times) in runs.items():
        rank_with(rank, recipe, teacher).load_batch(batches[rank.where.data])
        rank.compute_old_logprobs()
        rank.passes = replace(rank.passes, reference_logprobs=tuple(map(reference_of, rank.passes.old_logprobs)))
        rank.compute_teachers({"on_ranks": None})
        update = compute_gradients(rank, times * advantages)
        mismatch = reduce_mismatch(rank.batch, tuple(update.before_update.values()), 3, rank.device)
        found[name] = gradients_of(rank.policy), update.metrics.reduce([1.0], mismatch)
    return found


def test_given_responses_add_their_divergence_and_reach_no_other_term_correction_or_metric(case, teacher):
    """The gradient is the sum of those of the divergence alone, and of all else on the sampled responses alone."""
    layout = ParallelLayout(context=2)
    base = recipe_of(layout, {"name": "full_vocabulary"}, rewards=True)
    bounds = {"weights": {"name": "token", "low": 0.8, "high": 1.2, "normalize": True}}
    bounds["reject"] = [{"level": "sequence", "over": "max", "statistic": "k2", "high": 0.2}]
    loss = {"name": "clip_cov", "covariance_share": 0.2, "covariance_low": -100.0, "covariance_high": 100.0}
    terms = {"aggregation": "token_sum", "correction": bounds, "loss": loss, "entropy_coefficient": 0.02}
    alone = {"aggregation": "token_sum", "kl": {"coefficient": 0.0}}
    mixed, sampled, given = [], [], []
    for one in case.sequences:
        given.append(replace(one, given=True, rollout_logprobs=np.full(len(one.tokens), np.nan, np.float32)))
        if one.row in (3, 6):
            mixed.append(given[-1])
        else:
            mixed.append(one)
            sampled.append(replace(one, teacher=NONE))

    def changed(algorithm: Mapping[str, Any]) -> Recipe:
        values = base.model_dump(exclude_unset=True)
        return Recipe.model_validate(values | {"algorithm": values["algorithm"] | algorithm})

    runs = {
        name: (recipe, make_batches(recipe, replace(case, sequences=sequences)), times)
        for name, recipe, sequences, times in (
            ("mixed", changed(terms), mixed, 1.0),
            ("teacher", changed(alone), case.sequences, 0.0),
            ("sampled", changed(terms), sampled, 1.0),
            ("given", changed(terms), given, 1.0),
        )
    }
    results = on_ranks(with_batches, base, case, runs, teacher)
    gradients = {name: assemble([result[name][0] for result in results]) for name in runs}
    for tensor, found in gradients["mixed"].items():
        wanted = gradients["teacher"][tensor] + gradients["sampled"][tensor]
        assert np.abs(found - wanted).max() <= 1e-5 * max(np.abs(wanted).max(), 1e-30), tensor
    found, wanted = (results[0][name][1] for name in ("mixed", "sampled"))
    assert found.mismatch.tokens == wanted.mismatch.tokens == sum(int(one.loss_mask.sum()) for one in sampled)
    for figure in ("kl", "entropy", "ratio_mean", "policy_loss", "clip_low_fraction", "clip_high_fraction"):
        assert getattr(found, figure) == pytest.approx(getattr(wanted, figure), rel=1e-5), figure
    assert found.correction == pytest.approx(wanted.correction)
    assert 0 < found.correction["rejected_share"] < 1
    for figure in ("mean", "max", "chi2_sequence", "train_perplexity"):
        assert getattr(found.mismatch, figure) == pytest.approx(getattr(wanted.mismatch, figure), rel=1e-5), figure
    figures = update_metrics(results[0]["given"][1])
    assert not {"kl/mean", "entropy", "ratio/mean"} & figures.keys(), "there is no token to take a mean over"
    assert all(map(math.isfinite, figures.values()))


def beside_the_start(
    rank: TrainRank, batch: RankBatch, advantages: Any, recipes: Mapping[str, Recipe], directory: Path
) -> tuple[dict[str, tuple[Any, Any]], float]:
    """Divergences and agreements of a policy that has moved, from its start: by the reference, and by the same model on
    the ranks. And the reference's share of the policy's weights."""
    rank.load_batch(batch)
    rank.compute_old_logprobs()
    rank.update(advantages, LR, 0.0, step=1)
    found = {}
    for name, recipe in recipes.items():
        rank.recipe, rank.teachers = recipe, Teachers(recipe, rank)
        if name == "on the ranks":
            rank.add_teacher("start", str(directory))
        rank.load_batch(batch)
        rank.compute_teachers({"start": None})
        rank.release(["reference"] if "reference" in recipe.train.offload else [])
        compute_gradients(rank, np.zeros_like(advantages))
        found[name] = rank.token_divergence(), rank.token_agreement()
    weights = [weight for chunk in rank.policy.chunks for weight in chunk.parameters()]
    return found, sum(one.numel() for one in rank.policy.reference.weights) / sum(one.numel() for one in weights)


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}])
def test_a_reference_teaches_as_the_model_that_it_was(lora, case_of: CaseOf):
    case = case_of("qwen2_tied")
    case = replace(case, sequences=[replace(one, teacher=0) for one in case.sequences])
    algorithm = {"kl": {"coefficient": 0.0}, "distillation": {"objective": {"name": "full_vocabulary"}}}
    train = {"distributed_optimizer": False, "lora": lora, "offload": [] if lora else ["reference"]}
    kinds = {"on the ranks": {"kind": "ranks", "path": "unused"}, "the reference": {"kind": "reference"}}
    recipes = {
        name: make_recipe(ParallelLayout(tensor=2), algorithm=algorithm, teachers={"start": kind}, train=train)
        for name, kind in kinds.items()
    }
    answers = on_ranks(beside_the_start, recipes["the reference"], case, recipes, case.directory)
    results, shares = zip(*answers, strict=True)
    assert max(shares) < 0.1 if lora else shares == (1, 1)
    figures = {
        name: [of_all_tokens(parts) for parts in zip(*(result[name] for result in results), strict=True)]
        for name in kinds
    }
    (wanted, wanted_agreement), (found, agreement) = figures.values()
    assert wanted.mean() > 1e-4
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    np.testing.assert_array_equal(agreement, wanted_agreement)


def without_numbers(
    rank: TrainRank, batch: RankBatch, advantages: Any, recipes: list[Recipe], teacher: Path
) -> list[str]:
    """The errors of passes of a teacher with a broken weight."""
    errors = []
    for recipe in recipes:
        rank_with(rank, recipe, teacher).load_batch(batch)
        (model,) = rank.teachers._models.values()
        next(model.chunks[0].parameters()).data.fill_(torch.nan)
        try:
            rank.compute_teachers({"on_ranks": None})
        except RankError as error:
            errors.append(error.problems[0].where)
    return errors


def test_a_teacher_on_the_ranks_that_gives_no_numbers_is_an_error(case, teacher):
    recipes = [recipe_of(ParallelLayout(), {"name": name}) for name in ("sampled_token", "full_vocabulary")]
    ((*where,),) = on_ranks(without_numbers, recipes[0], case, recipes, teacher)
    assert where == ["teacher on_ranks"] * 2


def twice(rank: TrainRank, batch: RankBatch, advantages: Any, recipe: Recipe) -> list[Any]:
    """The reference's logprobs by the pass of the KL penalty and by a pass of its own, after the policy has moved."""
    rank.load_batch(batch)
    rank.compute_old_logprobs()
    rank.compute_reference_logprobs()
    rank.update(advantages, LR, 0.1, step=1)
    found = []
    for penalised in (True, False):
        rank.load_batch(batch)
        if penalised:
            rank.compute_reference_logprobs()
        rank.compute_teachers({"start": None})
        found.append(rank.token_teacher())
    return found


def test_a_reference_that_has_read_the_batch_is_not_asked_again(case_of: CaseOf):
    case = case_of("qwen2_tied")
    case = replace(case, sequences=[replace(one, teacher=0) for one in case.sequences])
    algorithm = {"kl": {"coefficient": 0.1}, "distillation": {"objective": {"name": "sampled_token"}}}
    recipe = make_recipe(ParallelLayout(), algorithm=algorithm, teachers={"start": {"kind": "reference"}})
    ((with_penalty, alone),) = on_ranks(twice, recipe, case, recipe)
    np.testing.assert_array_equal(with_penalty.values, alone.values)
    assert np.isfinite(alone.values).all()


def test_ids_that_the_policy_lacks_are_among_all_others():
    """A server's teacher has more ids: their share is that of the rest."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 8, generator=random).requires_grad_(), torch.randn(13, 8, generator=random)
    log_q = torch.log_softmax(torch.randn(5, 16, generator=random), -1)
    policy = Head(weight, VocabularyShard(13, 0, None), HeadScale())
    ids = torch.tensor([[3, 14, 7, 15]] * 5)
    labels, positions = torch.arange(5), torch.arange(5)
    for divergence in ("reverse_kl", "forward_kl", "jsd"):
        objective = TeacherTopKConfig(k=4, divergence=divergence)
        gradients = []
        for asked in (ids, ids[:, [0, 2]]):
            given = hidden, positions, labels, policy, asked, log_q.gather(1, asked)
            found = _compared_at(objective, *given, entropy=False)
            gradients.append(torch.autograd.grad(found.divergence.sum(), hidden)[0])
            assert found.divergence.isfinite().all()
        assert torch.allclose(*gradients, atol=1e-6)


def of_idle_ranks(
    rank: TrainRank, batch: RankBatch, advantages: Any, recipes: list[Recipe], teacher: Path, apart: Any
) -> list[int]:
    """The response tokens with a divergence or a teacher's logprob, by recipe; the first data rank has no sequences,
    but where one row alone has the teacher."""
    counts = []
    for recipe in recipes:
        idle = rank.where.data == 0 and apart["on_ranks"] is None
        rank_with(rank, recipe, teacher).load_batch(without_sequences(batch) if idle else batch)
        rank.compute_teachers(apart)
        compute_gradients(rank, np.zeros_like(advantages))
        found = rank.token_teacher()
        counts.append(0 if found is None else int(np.isfinite(found.values).sum()))
    return counts


def without_sequences(batch: RankBatch) -> RankBatch:
    return replace(batch, minibatches=tuple(tuple(IDLE for _ in minibatch) for minibatch in batch.minibatches))


def test_a_rank_without_response_tokens_goes_through_all_passes(case, teacher):
    recipes = [recipe_of(ParallelLayout(data=2), {"name": name}) for name in ("sampled_token", "full_vocabulary")]
    first, second = on_ranks(of_idle_ranks, recipes[0], case, recipes, teacher, {"on_ranks": None})
    assert first == [0, 0]
    assert min(second) > 0


@pytest.mark.parametrize("own", [None, ParallelLayout(tensor=2, pipeline=2)], ids=str)
def test_a_teacher_of_one_row_has_microbatches_without_tokens(own, case, teacher):
    layout = ParallelLayout(tensor=2, data=2)
    recipes = [recipe_of(layout, {"name": name}, own=own) for name in ("sampled_token", "full_vocabulary")]
    sequences = [replace(one, teacher=ON_RANKS if one.row == 3 else NONE, taught=None) for one in case.sequences]
    case = replace(case, sequences=sequences)
    apart = batches_of_teachers(recipes[0], make_batches(recipes[0], case), TOKENS)
    counts = on_ranks(of_idle_ranks, recipes[0], case, recipes, teacher, apart)
    tokens = sum(int(one.loss_mask.sum()) for one in sequences if one.teacher == ON_RANKS)
    assert np.sum(counts, axis=0).tolist() == [tokens, tokens]
