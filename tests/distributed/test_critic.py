"""The critic's values and its update are those of plain torch, in every layout; its state survives; the policy's own is
left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoConfig, AutoModelForSequenceClassification

from megagrpo.algorithm.ragged import Ragged
from megagrpo.batching.rank_batches import RankBatch, TrainSequence
from megagrpo.checkpoint.store import describe
from megagrpo.errors import RankError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.batch import of_tokens
from megagrpo.megatron.metrics import CriticSums
from megagrpo.megatron.model import named_tensors
from megagrpo.megatron.rank import TrainRank
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import critic_of
from tests.distributed.conftest import CaseOf
from tests.distributed.layouts import ROWS, soak
from tests.distributed.step_case import (
    LONGEST,
    LR,
    Case,
    StepResult,
    assert_same_step,
    by_token,
    load_reference,
    make_recipe,
    torch_step,
)
from tests.distributed.step_ranks import (
    RankStep,
    gather,
    of_all_tokens,
    on_ranks,
    save,
    states_of,
    take_step,
    the_one,
)
from tests.tiny_models import randomize

CLIP = 0.3
TENSOR = ParallelLayout(tensor=2)


def recipe_of(layout: ParallelLayout, dtype: str = "float32", **train: Any) -> Recipe:
    algorithm = {"advantage": {"name": "gae"}, "critic": {"value_clip": CLIP}, "kl": {"coefficient": 0.0}}
    train = {"distributed_optimizer": False} | train
    return make_recipe(layout, algorithm=algorithm, train=train, model={"path": "unused", "dtype": dtype})


def moved(rows: Any, index: Any) -> Any:
    """Moves the old values so that some tokens are clipped on each side."""
    return 0.8 * ((7 * rows + 3 * index) % 11 / 10 - 0.5)


@dataclass(frozen=True)
class Step:
    values: np.ndarray  # [response tokens], before the step
    metrics: dict[str, float]
    result: StepResult


@dataclass(frozen=True)
class Family:
    case: Case  # with returns in place of advantages
    critic: Path
    in_torch: Step


@pytest.fixture(scope="module")
def family_of(case_of: CaseOf, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """A policy's batch, and a critic of its config with a value head that is not zero."""

    @cache
    def made(name: str) -> Family:
        case = replace(case_of(name), advantages=by_token(seed=3, mean=0.3, spread=0.8))
        config = AutoConfig.from_pretrained(case.directory, num_labels=1)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        randomize(model, seed=5)
        critic = tmp_path_factory.mktemp("critic")
        model.save_pretrained(critic)
        return Family(case, critic, in_torch(critic, case))

    return made


@pytest.fixture(scope="module")
def dense(family_of: Callable[[str], Family]) -> Family:
    return family_of("qwen2_tied")


# --- in plain torch ---------------------------------------------------------------------------------------------------


def values_of(model: torch.nn.Module, sequence: TrainSequence) -> torch.Tensor:
    """At every token that precedes one of the response: [response tokens]."""
    hidden = model.model(torch.from_numpy(sequence.tokens)[None]).last_hidden_state[0]
    return (hidden @ model.score.weight[0])[torch.from_numpy(sequence.loss_mask).nonzero()[:, 0] - 1]


def in_torch(directory: Path, case: Case) -> Step:
    """One sequence at a time, in float64, with none of ours."""
    model = load_reference(directory, AutoModelForSequenceClassification)
    values = [values_of(model, sequence) for sequence in case.sequences]
    value = torch.cat(values)
    target = torch.from_numpy(case.advantages.values).double()
    old = value.detach() + torch.cat([moved(row, torch.arange(len(each))) for row, each in enumerate(values)])
    near = value.clamp(old - CLIP, old + CLIP)
    loss = 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2).mean()
    clipped = (near - target) ** 2 > (value - target) ** 2
    result = torch_step(model, loss, critic_of(read_architecture(directory)), recipe_of(TENSOR).train.optimizer)
    metrics = {
        "loss": result.loss,
        "clip_fraction": clipped.double().mean().item(),
        "value_mean": old.mean().item(),
        "return_mean": target.mean().item(),
        "explained_variance": 1 - ((target - old).var(correction=0) / target.var(correction=0)).item(),
        "grad_norm": result.grad_norm,
        "skipped_steps": 0,
    }
    return Step(value.detach().numpy(), metrics, result)


# --- on ranks ---------------------------------------------------------------------------------------------------------


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def step(rank: TrainRank, batch: RankBatch, returns: Ragged, directory: Path) -> tuple[Any, RankStep]:
    """Values, gradients and the update of the critic; then an update of the policy. Neither changes the other."""
    rank.add_critic(directory)
    model = rank.critic
    rank.load_batch(batch)
    rank.compute_values()
    values = rank.token_values()
    pairs = zip(rank.passes.values, rank.batch.responses, strict=True)
    old_values = tuple(values + moved(response.rows, response.index).float() for values, response in pairs)
    rank.passes = replace(rank.passes, values=old_values)
    policy, base = copies(rank.tensors()), copies(named_tensors(rank.policy.chunks))
    found = take_step(
        model,
        lambda: rank.compute_critic_gradients(
            rank.batch.minibatches[0], of_tokens(rank.batch, returns, rank.device), CriticSums(rank.device)
        ),
        lambda: rank.update_critic(returns, LR),
    )
    critic = copies(model.tensors())
    assert same(policy, rank.tensors())
    rank.update(returns, LR, 0.0, step=1)
    assert not same(policy, rank.tensors())
    assert same(critic, model.tensors())
    assert same(base, named_tensors(rank.policy.chunks)) == (rank.recipe.train.lora is not None)
    return values, found


def check(family: Family, layout: ParallelLayout, **train: Any) -> None:
    values, steps = zip(*on_ranks(step, recipe_of(layout, **train), family.case, family.critic), strict=True)
    wanted = family.in_torch
    np.testing.assert_allclose(of_all_tokens(values), wanted.values, atol=2e-6)
    assert asdict(the_one(one.metrics for one in steps)) == pytest.approx(wanted.metrics, rel=1e-5, abs=1e-6)
    assert_same_step(gather(steps), wanted.result)


def test_the_case_clips_on_both_sides(dense):
    assert 0.1 < dense.in_torch.metrics["clip_fraction"] < 0.6
    assert dense.in_torch.metrics["explained_variance"] < 0.5
    assert dense.in_torch.metrics["grad_norm"] > 0.5  # and the gradient is clipped


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2_tied", "one rank"),
        ("qwen2_tied", "tensor"),
        ("qwen2_tied", "context, data"),
        ("qwen2_tied", "three stages"),
        *soak(("qwen3_moe", "all")),
    ],
)
def test_every_layout_takes_the_step_of_transformers_and_autograd(family, name, family_of):
    check(family_of(family), ROWS[name].layout)


def test_several_microbatches_may_pass_at_once_beside_a_policy_with_adapters(dense):
    """All weights of the critic are trained."""
    check(dense, TENSOR, logprob_tokens_per_microbatch=4 * LONGEST, lora={"rank": 2, "alpha": 4})


@pytest.mark.long
def test_with_transformer_engines_layers_it_is_the_same_step(family_of):
    check(family_of("qwen3_moe"), ROWS["expert over tensor"].layout, layer_spec="transformer_engine")


# --- a new head, several steps, memory --------------------------------------------------------------------------------


def several_steps(rank: TrainRank, batch: RankBatch, returns: Ragged, directory: Path) -> Any:
    """Steps of several optimizer steps each; the critic is in host memory between them."""
    rank.add_critic(directory)
    found = []
    for _ in range(6):
        rank.load_batch(batch)
        rank.release(["critic", "optimizer"])
        weights = named_tensors(rank.critic.chunks).values()
        assert not any(tensor.untyped_storage().nbytes() for tensor in weights)
        with pytest.raises(RankError, match="parameters released"):
            rank.compute_values()
        rank.restore(["critic", "optimizer"])
        rank.compute_values()
        found.append((rank.token_values(), rank.update_critic(returns, LR / 3)))
    return found


def test_a_new_head_starts_from_zeros_and_learns_the_returns(dense):
    algorithm = {"critic": {}, "advantage": {"name": "gae"}, "kl": {"coefficient": 0}, "minibatches": 2, "epochs": 2}
    results = on_ranks(several_steps, make_recipe(TENSOR, algorithm=algorithm), dense.case, dense.case.directory)
    values, metrics = zip(*results[0], strict=True)
    assert not of_all_tokens([values[0]]).any()
    assert metrics[0].value_mean == metrics[0].explained_variance == 0.0
    assert metrics[-1].loss < 0.7 * metrics[0].loss
    assert metrics[-1].explained_variance > 0.3


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_and_continue(
    rank: TrainRank, batch: RankBatch, returns: Ragged, directory: Path, saved: Path, load: bool
) -> Any:
    """A step, a save and a step; or a load and a step. What was saved, and metrics and state after the last step."""
    rank.add_critic(directory)

    def one_step() -> Any:
        rank.load_batch(batch)
        rank.compute_values()
        metrics = rank.update_critic(returns, LR / 3)
        rank.update(returns, LR / 10, 0.0, step=1)
        return metrics

    if load:
        rank.load(saved)
        files = ()
    else:
        one_step()
        files = save(rank, saved)
    return files, one_step(), states_of(rank.policy), states_of(rank.critic)


def test_a_critic_continues_from_a_checkpoint_in_the_same_layout_and_in_another(dense, tmp_path):
    def train(layout: ParallelLayout, load: bool, **train: Any) -> tuple[Any, ...]:
        start = dense.case.directory if load else dense.critic  # other weights, which the checkpoint replaces
        recipe = recipe_of(layout, "bfloat16", **train)
        return tuple(zip(*on_ranks(save_and_continue, recipe, dense.case, start, tmp_path, load), strict=True))

    layout = ParallelLayout(tensor=2, data=2)
    written, wanted, *wanted_states = train(layout, False, distributed_optimizer=True)
    _, metrics, *found_states = train(layout, True, distributed_optimizer=True)
    assert metrics == wanted
    for of_model, wanted_of_model in zip(found_states, wanted_states, strict=True):
        assert all(map(same, of_model, wanted_of_model))
    _, elsewhere, *_ = train(ParallelLayout(pipeline=2), True)
    assert asdict(the_one(elsewhere)) == pytest.approx(asdict(the_one(wanted)), rel=0.05, abs=0.01)

    files = [file for of_rank in written for file in of_rank]
    assert sorted(file.path for file in files) == sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    )
    assert all(describe(tmp_path, tmp_path / file.path) == file for file in files)
    dcp_to_torch_save(tmp_path / "critic", tmp_path / "critic.pt")
    weights = torch.load(tmp_path / "critic.pt", weights_only=False)
    model = load_reference(dense.critic, AutoModelForSequenceClassification)
    model.load_state_dict({name: weights[f"param.{name}"].double() for name in model.state_dict()})
    values = torch.cat([values_of(model, sequence).detach() for sequence in dense.case.sequences])
    assert values.mean().item() == pytest.approx(the_one(wanted).value_mean, abs=0.01)
