"""One GRPO step worth comparing: a batch, its settings, and what transformers and torch alone make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from megagrpo.batching.rank_batches import RankBatch, TrainSequence, make_rank_batches
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.schema import OptimizerConfig, Recipe
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides import transformers as transformers_side
from megagrpo.weights.views import box_view

RESPONSES = [1, 2, 7, 30, 1, 12, 5, 58, 20, 3, 9, 16]
PROMPTS = [1, 6, 3, 6, 2, 4, 6, 6, 5, 1, 3, 2]
LONGEST = 64
LR = 1e-2


def make_recipe(layout: ParallelLayout, **changes: dict[str, Any]) -> Recipe:
    """Every term of the objective is on. `changes` are merged into sections."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": "unused", "dtype": "float32"},
        "data": {"train": [{"path": "unused"}]},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 3, "temperature": 0.8},
        "reward": {"functions": [{"function": "gsm8k"}]},
        "algorithm": {
            "loss": {"clip_high": 0.3},
            "kl": {"coefficient": 0.1},
            "entropy_coefficient": 0.02,
            "aggregation": "seq_mean_token_mean",
        },
        "train": {
            "layout": vars(layout) | {"expert_tensor": layout.expert_tensor if layout.expert > 1 else layout.tensor},
            "total_steps": 10,
            "tokens_per_microbatch": LONGEST,
            "optimizer": {"lr": LR, "weight_decay": 0.1, "clip_grad": 0.5},
        },
    }
    for name, change in changes.items():
        sections[name] = sections.get(name, {}) | change
    return Recipe.model_validate({"name": "step", **sections})


def make_batches(recipe: Recipe, sequences: Sequence[TrainSequence]) -> list[RankBatch]:
    return make_rank_batches(
        sequences,
        layout=recipe.train.layout.parallel(),
        minibatches=recipe.algorithm.minibatches,
        tokens_per_microbatch=recipe.train.tokens_per_microbatch,
        seed=1,
    )


def reference_of(rollout_logprobs: Any) -> Any:
    """Reference logprobs that make the KL term matter, from the only per-token numbers that a batch carries."""
    return 0.9 * rollout_logprobs - 0.05


@dataclass(frozen=True)
class Case:
    """Sequences whose rollout logprobs, taken as old logprobs, are off by enough to be clipped on both sides."""

    sequences: list[TrainSequence]
    advantages: np.ndarray  # float32 [rows]


def load_reference(directory: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )


def make_case(model: torch.nn.Module, temperature: float) -> Case:
    random = np.random.default_rng(0)
    sequences = []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        tokens = random.integers(0, model.config.vocab_size, prompt + response)
        mask = np.arange(len(tokens)) >= prompt
        with torch.no_grad():
            logprobs = response_logprobs(model, tokens, temperature)[0].numpy()
        noise = random.normal(0, 0.25, len(tokens)).astype(np.float32)
        rollout = np.where(mask, np.concatenate([[0], logprobs]) + noise, 0).astype(np.float32)
        sequences.append(TrainSequence(tokens, mask, rollout, row=row))
    return Case(sequences, random.normal(0, 1, len(sequences)).astype(np.float32))


def response_logprobs(
    model: torch.nn.Module, tokens: np.ndarray, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of each token but the first, and the entropy of its distribution: [tokens - 1] each."""
    ids = torch.from_numpy(tokens)
    log_p = torch.log_softmax(model(ids[None]).logits[0, :-1] / temperature, -1)
    return log_p.gather(1, ids[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@dataclass(frozen=True)
class StepResult:
    """By name of the checkpoint tensor: gradients before clipping, weights before and after the optimizer's step."""

    loss: float
    grad_norm: float
    gradients: dict[str, np.ndarray]
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]

    def change(self) -> np.ndarray:
        return np.concatenate([(self.after[name] - self.before[name]).ravel() for name in sorted(self.after)])


def transformers_step(directory: Path, model: torch.nn.Module, case: Case, recipe: Recipe) -> StepResult:
    """The step in plain torch: one sequence at a time, autograd, AdamW. Written from the formulas, with none of ours.

    `model` is in float64 and is changed.
    """
    algorithm, settings = recipe.algorithm, recipe.train.optimizer
    per_sequence = []
    for sequence in case.sequences:
        logprobs, entropy = response_logprobs(model, sequence.tokens, recipe.rollout.temperature)
        mask = torch.from_numpy(sequence.loss_mask[1:])
        old = torch.from_numpy(sequence.rollout_logprobs[1:]).double()
        advantage = float(case.advantages[sequence.row])
        ratio = (logprobs - old).exp()
        surrogate = torch.min(
            ratio * advantage, ratio.clip(1 - algorithm.loss.clip_low, 1 + algorithm.loss.clip_high) * advantage
        )
        log_ratio = reference_of(old) - logprobs
        kl = log_ratio.exp() - log_ratio - 1
        objective = surrogate - algorithm.kl.coefficient * kl + algorithm.entropy_coefficient * entropy
        per_sequence.append(-objective[mask])
    loss = torch.cat(per_sequence).mean()
    if algorithm.aggregation.name == "seq_mean_token_mean":
        loss = torch.stack([losses.mean() for losses in per_sequence]).mean()
    model.zero_grad()
    loss.backward()
    parameters = dict(model.named_parameters())
    to_checkpoint = in_checkpoint(read_architecture(directory))
    gradients = to_checkpoint({name: p.grad.clone() for name, p in parameters.items()})
    weights = parameters | dict(model.named_buffers())
    before = to_checkpoint({name: weight.detach().clone() for name, weight in weights.items()})
    norm = clip_and_step(list(parameters.values()), settings)
    after = to_checkpoint({name: weight.detach().clone() for name, weight in weights.items()})
    return StepResult(loss.item(), norm, gradients, before, after)


def clip_and_step(parameters: list[torch.nn.Parameter], settings: OptimizerConfig) -> float:
    """The gradient's norm before clipping, and torch's AdamW, which leaves norms and biases without decay."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip_grad)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.epsilon).step()
    return norm.item()


def in_checkpoint(architecture: Architecture) -> Any:
    """Turns tensors by their names in transformers into arrays by their names in the checkpoint."""
    manifest = transformers_side.manifest(architecture, "float64")

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        held = [placement for placement in manifest.placements if placement.storage in tensors]
        return assemble([[(p.box, box_view(tensors[p.storage], p).contiguous().numpy()) for p in held]])

    return convert


def assemble(parts_of_ranks: Sequence[Sequence[tuple[Any, np.ndarray]]]) -> dict[str, np.ndarray]:
    """Whole tensors from boxes. Replicas of a box must be equal to the last bit, and nothing may be missing."""
    boxes: dict[Any, np.ndarray] = {}
    for parts in parts_of_ranks:
        for box, values in parts:
            if box in boxes:
                np.testing.assert_array_equal(boxes[box], values, err_msg=str(box))
            boxes[box] = values
    ends: dict[str, tuple[int, ...]] = {}
    for box in boxes:
        end = tuple(a + n for a, n in zip(box.start, box.shape, strict=True))
        ends[box.tensor] = tuple(map(max, ends.get(box.tensor, end), end))
    whole = {name: np.full(end, np.nan) for name, end in ends.items()}
    for box, values in boxes.items():
        whole[box.tensor][tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] = values
    assert not any(np.isnan(values).any() for values in whole.values())
    return whole
