"""The critic's values and its update are those of plain torch, in every layout; its state survives; the policy's own is
left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megagrpo.algorithm.ragged import Ragged
from megagrpo.batching.rank_batches import RankBatch, TrainSequence
from megagrpo.checkpoint.store import describe
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.critic import CriticSums
from megagrpo.megatron.model import named_tensors
from megagrpo.megatron.state import parameters_of, shards_of
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import critic_of
from tests.distributed.grpo_case import (
    LONGEST,
    LR,
    PROMPTS,
    RESPONSES,
    assemble,
    clip_and_step,
    in_checkpoint,
    make_batches,
    make_recipe,
)
from tests.distributed.grpo_ranks import Parts, boxes, on_ranks
from tests.distributed.layouts import ROWS
from tests.rank_group import RankGroupError
from tests.tiny_models import make_model, randomize

CLIP = 0.3


def recipe_of(layout: ParallelLayout, **train: Any) -> Recipe:
    algorithm = {"advantage": {"name": "gae"}, "critic": {"value_clip": CLIP}, "kl": {"coefficient": 0.0}}
    return make_recipe(layout, algorithm=algorithm, train={"distributed_optimizer": False} | train)


def make_critic(policy: Path, directory: Path) -> Path:
    """A model of the policy's config with a value head that is not zero."""
    config = transformers.AutoConfig.from_pretrained(policy, num_labels=1)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    randomize(model, seed=5)
    model.save_pretrained(directory)
    return directory


def moved(rows: Any, index: Any) -> Any:
    """What is added to the old values, so that some tokens are clipped on each side."""
    return 0.8 * ((7 * rows + 3 * index) % 11 / 10 - 0.5)


@dataclass(frozen=True)
class Step:
    """By name of the checkpoint tensor: gradients before clipping, weights before and after the optimizer's step."""

    values: list[np.ndarray]
    metrics: dict[str, float]
    gradients: dict[str, np.ndarray]
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]

    def change(self) -> np.ndarray:
        return np.concatenate([(self.after[name] - self.before[name]).ravel() for name in sorted(self.after)])


@dataclass(frozen=True)
class Family:
    policy: Path
    critic: Path
    sequences: list[TrainSequence]
    returns: Ragged
    in_torch: Step


def make_family(name: str, parent: Path) -> Family:
    policy = make_model(name, parent / name)
    critic = make_critic(policy, parent / f"{name}_critic")
    random = np.random.default_rng(3)
    sequences = []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        tokens = random.integers(0, 131, prompt + response)
        mask = np.arange(len(tokens)) >= prompt
        sequences.append(TrainSequence(tokens, mask, np.zeros(len(tokens), np.float32), row))
    offsets = np.concatenate([[0], np.cumsum(RESPONSES)])
    returns = Ragged(random.normal(0.3, 0.8, offsets[-1]).astype(np.float32), offsets)
    return Family(policy, critic, sequences, returns, torch_step(critic, sequences, returns))


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Family:
    return make_family("qwen2_tied", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Family:
    return make_family("qwen3_moe", tmp_path_factory.mktemp("experts"))


# --- in plain torch ---------------------------------------------------------------------------------------------------


def load_critic(directory: Path) -> torch.nn.Module:
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )


def values_of(model: torch.nn.Module, sequence: TrainSequence) -> torch.Tensor:
    """At every token that precedes one of the response: [response tokens]."""
    hidden = model.model(torch.from_numpy(sequence.tokens)[None]).last_hidden_state[0]
    return (hidden @ model.score.weight[0])[torch.from_numpy(sequence.loss_mask).nonzero()[:, 0] - 1]


def torch_step(directory: Path, sequences: Sequence[TrainSequence], returns: Ragged) -> Step:
    """One sequence at a time, autograd, AdamW; in float64, with none of ours."""
    model = load_critic(directory)
    values = [values_of(model, sequence) for sequence in sequences]
    losses, clipped, squares = [], [], []
    for row, value in enumerate(values):
        target = torch.from_numpy(returns.row(row)).double()
        old = value.detach() + moved(row, torch.arange(len(value)))
        near = value.clamp(old - CLIP, old + CLIP)
        losses.append(0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2))
        clipped.append(((near - target) ** 2 > (value - target) ** 2).double())
        squares.append(torch.stack([old, target, target - old]))
    loss = torch.cat(losses).mean()
    loss.backward()
    parameters = dict(model.named_parameters())
    to_checkpoint = in_checkpoint(critic_of(read_architecture(directory)))
    gradients = to_checkpoint({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
    before = to_checkpoint({name: p.detach().clone() for name, p in parameters.items()})
    norm = clip_and_step(list(parameters.values()), recipe_of(ParallelLayout()).train.optimizer)
    old, target, residual = torch.cat(squares, dim=1)
    metrics = {
        "loss": loss.item(),
        "clip_fraction": torch.cat(clipped).mean().item(),
        "value_mean": old.mean().item(),
        "return_mean": target.mean().item(),
        "explained_variance": 1 - (residual.var(correction=0) / target.var(correction=0)).item(),
        "grad_norm": norm,
    }
    after = to_checkpoint({name: p.detach().clone() for name, p in parameters.items()})
    return Step([value.detach().numpy() for value in values], metrics, gradients, before, after)


# --- on ranks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankStep:
    values: Any
    metrics: Any
    gradients: Parts
    before: Parts
    after: Parts
    policy_untouched: bool
    critic_untouched: bool
    base_untouched: bool


def move_old_values(rank: Any) -> None:
    pairs = zip(rank.passes.values, rank.batch.responses, strict=True)
    values = tuple(values + moved(response.rows, response.index).float() for values, response in pairs)
    rank.passes = replace(rank.passes, values=values)


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(some[name], others[name]) for name in some)


def step(rank: Any, directory: str, batches: Sequence[RankBatch], returns: Ragged) -> RankStep:
    """Values, gradients and the update of the critic; then an update of the policy."""
    rank.add_critic(directory)
    model = rank.critic.model
    rank.load_batch(batches[rank.where.data])
    rank.compute_values()
    values = rank.token_values()
    move_old_values(rank)
    before, policy = boxes(model, model.tensors()), copies(rank.tensors())
    base = copies(named_tensors(rank.policy.chunks))
    targets, sums = rank.of_tokens(returns), CriticSums(rank.device)
    rank.critic.compute_gradients(rank.batch.minibatches[0], rank.passes.values, targets, sums)
    gradients = boxes(model, {name: p.main_grad for name, p in parameters_of(model.chunks).items()})
    metrics = rank.update_critic(returns, LR)
    after, critic = boxes(model, model.tensors()), copies(model.tensors())
    policy_untouched = same(policy, rank.tensors())
    rank.update(returns, LR, 0.0, step=1)
    assert not same(policy, rank.tensors())
    critic_untouched, base_untouched = same(critic, model.tensors()), same(base, named_tensors(rank.policy.chunks))
    return RankStep(values, metrics, gradients, before, after, policy_untouched, critic_untouched, base_untouched)


def run(family: Family, layout: ParallelLayout, **train: Any) -> Step:
    recipe = recipe_of(layout, **train)
    batches = make_batches(recipe, family.sequences)
    steps = on_ranks(step, recipe, family.policy, str(family.critic), batches, family.returns)
    assert all(one.policy_untouched and one.critic_untouched for one in steps)
    assert all(one.base_untouched == (recipe.train.lora is not None) for one in steps)
    (metrics,) = [one.metrics for one in steps if one.metrics is not None]
    return Step(
        values=values_by_row([one.values for one in steps]),
        metrics=asdict(metrics),
        gradients=assemble([one.gradients for one in steps]),
        before=assemble([one.before for one in steps]),
        after=assemble([one.after for one in steps]),
    )


def values_by_row(found: Sequence[Any]) -> list[np.ndarray]:
    """Every token comes from exactly one rank."""
    values = [np.full(tokens, np.nan) for tokens in RESPONSES]
    parts = [part for part in found if part is not None]
    assert sum(len(part.values) for part in parts) == sum(RESPONSES)
    for part in parts:
        for row, index, value in zip(part.rows, part.index, part.values, strict=True):
            values[row][index] = value
    return values


def assert_same_step(got: Step, wanted: Step) -> None:
    for found, value in zip(got.values, wanted.values, strict=True):
        np.testing.assert_allclose(found, value, atol=2e-6)
    assert got.metrics == pytest.approx(wanted.metrics, rel=1e-5, abs=1e-6)
    assert wanted.gradients.keys() <= got.gradients.keys()
    for name, gradient in got.gradients.items():
        expected = wanted.gradients.get(name, np.zeros_like(gradient))
        np.testing.assert_allclose(gradient, expected, atol=2e-5 * max(np.abs(expected).max(), 1e-3), err_msg=name)
    assert np.linalg.norm(got.change() - wanted.change()) <= 1e-3 * np.linalg.norm(wanted.change())


def test_the_case_clips_on_both_sides(dense):
    assert 0.1 < dense.in_torch.metrics["clip_fraction"] < 0.6
    assert dense.in_torch.metrics["explained_variance"] < 0.5
    assert dense.in_torch.metrics["grad_norm"] > 0.5  # and the gradient is clipped


@pytest.mark.parametrize("name", ["one rank", "tensor", "context, data", "three stages"])
def test_every_layout_takes_the_step_of_transformers_and_autograd(name, dense):
    assert_same_step(run(dense, ROWS[name].layout), dense.in_torch)


def test_so_does_a_layout_of_every_cut_of_experts(experts):
    assert_same_step(run(experts, ROWS["all"].layout), experts.in_torch)


def test_values_do_not_depend_on_how_many_microbatches_pass_at_once(dense):
    assert_same_step(run(dense, ParallelLayout(tensor=2), logprob_tokens_per_microbatch=4 * LONGEST), dense.in_torch)


def test_beside_a_policy_with_adapters_all_weights_of_the_critic_are_trained(dense):
    assert_same_step(run(dense, ParallelLayout(tensor=2), lora={"rank": 2, "alpha": 4}), dense.in_torch)


# --- a new head, several steps, memory --------------------------------------------------------------------------------


def several_steps(rank: Any, directory: str, batches: Sequence[RankBatch], returns: Ragged) -> Any:
    """Steps of several optimizer steps each; the critic is in host memory between them."""
    rank.add_critic(directory)
    found = []
    for _ in range(6):
        rank.release(["critic", "optimizer"])
        held = sum(tensor.untyped_storage().nbytes() for tensor in rank.critic.model.tensors().values())
        rank.restore(["critic", "optimizer"])
        rank.load_batch(batches[rank.where.data])
        rank.compute_values()
        found.append((held, rank.token_values(), rank.update_critic(returns, LR / 3)))
    return found


def test_a_new_head_starts_from_zeros_and_learns_the_returns(dense):
    recipe = make_recipe(
        ParallelLayout(tensor=2),
        algorithm={"critic": {}, "advantage": {"name": "gae"}, "minibatches": 2, "epochs": 2, "kl": {"coefficient": 0}},
    )
    batches = make_batches(recipe, dense.sequences)
    (steps, _) = on_ranks(several_steps, recipe, dense.policy, str(dense.policy), batches, dense.returns)
    assert all(held == 0 for held, _, _ in steps)
    assert not np.concatenate(values_by_row([steps[0][1]])).any()
    metrics = [metrics for _, _, metrics in steps]
    assert metrics[0].value_mean == metrics[0].explained_variance == 0.0
    assert metrics[-1].loss < 0.7 * metrics[0].loss
    assert metrics[-1].explained_variance > 0.3


def update_while_released(rank: Any, directory: str, batches: Sequence[RankBatch], returns: Ragged) -> None:
    rank.add_critic(directory)
    rank.load_batch(batches[0])
    rank.release(["critic"])
    rank.compute_values()


def test_use_while_released_is_refused(dense):
    recipe = recipe_of(ParallelLayout())
    batches = make_batches(recipe, dense.sequences)
    with pytest.raises(RankGroupError, match="parameters released"):
        on_ranks(update_while_released, recipe, dense.policy, str(dense.critic), batches, dense.returns)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_and_continue(
    rank: Any, directory: str, batches: Sequence[RankBatch], returns: Ragged, saved: Path, load: bool
) -> Any:
    """A step, a save and a step; or a load and a step. What was saved, and metrics and state after the last step."""
    rank.add_critic(directory)
    files = ()

    def one_step() -> Any:
        rank.load_batch(batches[rank.where.data])
        rank.compute_values()
        metrics = rank.update_critic(returns, LR / 3)
        rank.update(returns, LR / 10, 0.0, step=1)
        return metrics

    if load:
        rank.load(saved)
    else:
        one_step()
        files = rank.save(saved)
    metrics = one_step()
    state = {}
    for whose, model in (("policy", rank.policy), ("critic", rank.critic.model)):
        shards = shards_of(model.optimizer)
        for name, parameter in parameters_of(model.chunks).items():
            state[f"{whose} {name}"] = parameter.detach().clone()
            if parameter in shards:
                state |= {f"{whose} {kind} {name}": t.clone() for kind, t in shards[parameter].tensors.items()}
    return files, metrics, state


def test_a_critic_continues_from_a_checkpoint_in_the_same_layout_and_in_another(dense, tmp_path):
    def train(layout: ParallelLayout, load: bool, **train: Any) -> list[Any]:
        recipe = recipe_of(layout, **train)
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})})
        batches = make_batches(recipe, dense.sequences)
        start = str(dense.policy if load else dense.critic)  # other weights, which the checkpoint replaces
        return on_ranks(save_and_continue, recipe, dense.policy, start, batches, dense.returns, tmp_path, load)

    layout = ParallelLayout(tensor=2, data=2)
    whole = train(layout, False, distributed_optimizer=True)
    continued = train(layout, True, distributed_optimizer=True)
    for (_, metrics, state), (_, wanted_metrics, wanted) in zip(continued, whole, strict=True):
        assert metrics == wanted_metrics
        assert state.keys() == wanted.keys()
        assert same(state, wanted)
    elsewhere = train(ParallelLayout(pipeline=2), True)
    (wanted_metrics,) = [metrics for _, metrics, _ in whole if metrics]
    (metrics,) = [metrics for _, metrics, _ in elsewhere if metrics]
    assert asdict(metrics) == pytest.approx(asdict(wanted_metrics), rel=0.05, abs=0.01)

    files = [file for saved, _, _ in whole for file in saved]
    assert sorted(file.path for file in files) == sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    )
    assert all(describe(tmp_path, tmp_path / file.path) == file for file in files)
    assert readable(tmp_path / "critic", dense, tmp_path / "critic.pt") == pytest.approx(
        wanted_metrics.value_mean, abs=0.01
    )


def readable(saved: Path, family: Family, file: Path) -> float:
    """The mean value that plain transformers computes with the saved weights."""
    dcp_to_torch_save(saved, file)
    weights = torch.load(file, weights_only=False)
    model = load_critic(family.critic)
    model.load_state_dict({name: weights[f"param.{name}"].double() for name in model.state_dict()})
    return torch.cat([values_of(model, sequence).detach() for sequence in family.sequences]).mean().item()
