"""One step worth comparing: recipes, a batch, and what transformers and torch alone make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from megagrpo.algorithm.optimizer import OptimizerConfig
from megagrpo.algorithm.ragged import Ragged
from megagrpo.batching.rank_batches import TrainSequence
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.schema import Recipe, SftRecipe
from megagrpo.weights.boxes import Box
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.checkpoint import transformers_manifest
from megagrpo.weights.views import box_view
from tests.tiny_models import DIMENSIONS, reference_model

RESPONSES = [1, 2, 7, 30, 1, 12, 5, 58, 20, 3, 9, 16]
PROMPTS = [1, 6, 3, 6, 2, 4, 6, 6, 5, 1, 3, 2]
LONGEST = 64
LR = 1e-2
TEMPERATURE = 0.8
VOCAB = DIMENSIONS["vocab_size"]


def make_recipe(layout: ParallelLayout, **changes: dict[str, Any]) -> Recipe:
    """Every term of the objective is on. `changes` are merged into sections."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": "unused", "dtype": "float32"},
        "data": {"train": [{"path": "unused"}]},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 3, "temperature": TEMPERATURE},
        "reward": {"functions": [{"function": "gsm8k"}]},
        "algorithm": {
            "loss": {"clip_high": 0.3},
            "kl": {"coefficient": 0.1},
            "entropy_coefficient": 0.02,
            "aggregation": "seq_mean_token_mean",
        },
        "train": _train(layout) | {"optimizer": {"lr": LR, "weight_decay": 0.1, "clip_grad": 0.5}},
    }
    for name, change in changes.items():
        sections[name] = sections.get(name, {}) | change
    return Recipe.model_validate({"name": "step", **sections})


def make_sft_recipe(layout: ParallelLayout, dtype: str = "float32", **train: Any) -> SftRecipe:
    """`train` replaces fields of that section."""
    return SftRecipe.model_validate(
        {
            "kind": "sft",
            "name": "step",
            "model": {"path": "unused", "dtype": dtype},
            "data": {"train": [{"path": "unused"}], "examples_per_step": 4},
            "train": _train(layout) | {"optimizer": {"lr": LR, "clip_grad": 0.5}} | train,
        }
    )


def _train(layout: ParallelLayout) -> dict[str, Any]:
    sizes = vars(layout) | {"expert_tensor": layout.expert_tensor if layout.expert > 1 else layout.tensor}
    return {"layout": sizes, "total_steps": 10, "tokens_per_microbatch": LONGEST}


@dataclass(frozen=True)
class Case:
    """A model and a step's sequences. Advantages, or a critic's returns, are by row or by response token."""

    directory: Path
    sequences: Sequence[TrainSequence]
    advantages: np.ndarray | Ragged | None = None  # float32 [rows] or [response tokens]

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return sum(int(sequence.loss_mask.sum()) for sequence in self.sequences)


def load_reference(directory: Path, kind: Any = transformers.AutoModelForCausalLM) -> torch.nn.Module:
    return reference_model(directory, torch.float64, kind)


def make_case(directory: Path) -> Case:
    """Sequences whose rollout logprobs, taken as old logprobs, are off by enough to be clipped on both sides."""
    model, random = load_reference(directory), np.random.default_rng(0)
    sequences = []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        tokens = random.integers(0, VOCAB, prompt + response)
        mask = np.arange(len(tokens)) >= prompt
        with torch.no_grad():
            logprobs = response_logprobs(model, tokens)[0].numpy()
        noise = random.normal(0, 0.25, len(tokens)).astype(np.float32)
        rollout = np.where(mask, np.concatenate([[0], logprobs]) + noise, 0).astype(np.float32)
        sequences.append(TrainSequence(tokens, mask, rollout, row=row))
    return Case(directory, sequences, random.normal(0, 1, len(sequences)).astype(np.float32))


def conversations(directory: Path, lengths: Sequence[int] = (9, 17, 5, 12)) -> Case:
    """For fine-tuning: of one or two turns, so that the assistant's tokens are in one or two runs."""
    random = np.random.default_rng(0)
    sequences = []
    for row, length in enumerate(lengths):
        mask = np.zeros(length, bool)
        mask[1 : 1 + length // 4] = row % 2
        mask[length // 2 :] = True
        no_engine = np.zeros(length, np.float32)
        sequences.append(TrainSequence(random.integers(0, VOCAB, length), mask, no_engine, row=row))
    return Case(directory, sequences)


def by_token(seed: int, mean: float = 0.0, spread: float = 1.0) -> Ragged:
    """A number for each response token."""
    offsets = np.concatenate([[0], np.cumsum(RESPONSES)])
    return Ragged(np.random.default_rng(seed).normal(mean, spread, offsets[-1]).astype(np.float32), offsets)


def response_logprobs(
    model: torch.nn.Module, tokens: np.ndarray, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of each token but the first, and the entropy of its distribution: [tokens - 1] each. `kept`: the ids that
    the distribution is over, bool [tokens - 1, vocab]."""
    ids, logits = torch.from_numpy(tokens), model(torch.from_numpy(tokens)[None]).logits[0, :-1] / TEMPERATURE
    kept = torch.ones_like(logits, dtype=torch.bool) if kept is None else kept
    log_p = torch.log_softmax(logits.masked_fill(~kept, -torch.inf), -1)
    return log_p.gather(1, ids[1:, None])[:, 0], -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(-1)


def kept_ids(sequence: TrainSequence) -> torch.Tensor:
    """bool [tokens - 1, vocab], all of the vocabulary for tokens that are given."""
    kept = torch.ones(len(sequence.tokens), VOCAB, dtype=torch.bool)
    if sequence.kept is not None:
        sets = np.split(sequence.kept.ids, sequence.kept.ends[:-1])
        for place, ids in zip(np.flatnonzero(sequence.loss_mask), sets, strict=True):
            kept[place] = torch.isin(torch.arange(VOCAB), torch.from_numpy(ids))
    return kept[1:]


def reference_of(rollout_logprobs: Any) -> Any:
    """Reference logprobs that make the KL term matter, from the only per-token numbers that a batch carries."""
    return 0.9 * rollout_logprobs - 0.05


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


# Between a rank and plain torch, or two layouts.
LIMITS = {"loss": 1e-6, "gradient": 1e-5, "grad norm": 1e-5, "change": 1e-3}


def differences(got: StepResult, wanted: StepResult) -> dict[str, float]:
    """The largest gradient difference is relative to its tensor's maximum; norm and change are relative too."""
    assert got.gradients.keys() == wanted.gradients.keys()
    return {
        "loss": abs(got.loss - wanted.loss),
        "gradient": max(
            (relative(got.gradients[name], value) for name, value in wanted.gradients.items()), default=0.0
        ),
        "grad norm": abs(got.grad_norm / wanted.grad_norm - 1),
        "change": np.linalg.norm(got.change() - wanted.change()) / np.linalg.norm(wanted.change()),
    }


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference relative to the largest wanted, which is 0 for experts that no token chooses."""
    return float(np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-30))


def assert_same_step(got: StepResult, wanted: StepResult, slack: float = 1.0) -> None:
    found = differences(got, wanted)
    assert all(found[name] <= slack * limit for name, limit in LIMITS.items()), found


def grpo_step(case: Case, recipe: Recipe, model: torch.nn.Module) -> StepResult:
    """The step in plain torch: one sequence at a time, autograd, AdamW. Written from the formulas, with none of ours.

    `model` is in float64 and is changed.
    """
    algorithm = recipe.algorithm
    of_row: dict[int, list[torch.Tensor]] = {}
    for sequence in case.sequences:
        logprobs, entropy = response_logprobs(model, sequence.tokens, kept_ids(sequence))
        mask = torch.from_numpy(sequence.loss_mask[1:])
        old = torch.from_numpy(sequence.rollout_logprobs[1:]).double()
        advantage = advantage_of(case, sequence)
        ratio = (logprobs - old).exp()
        surrogate = torch.min(
            ratio * advantage, ratio.clip(1 - algorithm.loss.clip_low, 1 + algorithm.loss.clip_high) * advantage
        )
        log_ratio = reference_of(old) - logprobs
        kl = log_ratio.exp() - log_ratio - 1
        objective = surrogate - algorithm.kl.coefficient * kl + algorithm.entropy_coefficient * entropy
        of_row.setdefault(sequence.row, []).append(-objective[mask])
    responses = [torch.cat(losses) for losses in of_row.values()]
    loss = torch.cat(responses).mean()
    if algorithm.aggregation.name == "seq_mean_token_mean":
        loss = torch.stack([losses.mean() for losses in responses]).mean()
    return torch_step(model, loss, read_architecture(case.directory), recipe.train.optimizer)


def advantage_of(case: Case, sequence: TrainSequence) -> float | torch.Tensor:
    """The row's, or for each token but the first that of the row's response tokens which it is; elsewhere 0."""
    if not isinstance(case.advantages, Ragged):
        return float(case.advantages[sequence.row])
    values, of_row = torch.zeros(len(sequence.tokens) - 1), iter(case.advantages.row(sequence.row)[sequence.first :])
    for place in range(1, len(sequence.tokens)):
        if sequence.loss_mask[place]:
            values[place - 1] = float(next(of_row))
    return values


def torch_step(
    model: torch.nn.Module, loss: torch.Tensor, architecture: Architecture, settings: OptimizerConfig
) -> StepResult:
    """The loss's gradients by autograd and torch's own optimizer. `model` is changed."""
    to_checkpoint, parameters = in_checkpoint(architecture), dict(model.named_parameters())

    def weights() -> dict[str, np.ndarray]:
        return to_checkpoint({name: w.detach().clone() for name, w in (*parameters.items(), *model.named_buffers())})

    model.zero_grad()
    loss.backward()
    gradients = to_checkpoint({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
    before = weights()
    norm = clip_and_step(parameters, settings)
    return StepResult(loss.item(), norm, gradients, before, weights())


def clip_and_step(parameters: Mapping[str, torch.Tensor], settings: OptimizerConfig) -> float:
    """The gradient's norm before clipping, and torch's AdamW, which leaves norms and biases without decay."""
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), settings.clip_grad)
    plain = {name for name, p in parameters.items() if p.dim() == 1 or name.endswith("bias")}
    groups = [
        {"params": [p for name, p in parameters.items() if name not in plain], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in parameters.items() if name in plain], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.epsilon).step()
    return norm.item()


def in_checkpoint(architecture: Architecture) -> Callable[[dict[str, torch.Tensor]], dict[str, np.ndarray]]:
    """Turns tensors by their names in transformers into arrays by their names in the checkpoint."""
    manifest = transformers_manifest(architecture, "float64")

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        held = [p for p in manifest.placements if p.storage in tensors]
        shaped = {
            its.name: tensors[its.name].view(its.shape) for its in manifest.storages.values() if its.name in tensors
        }
        return assemble([[(p.box, box_view(shaped[p.storage], p).contiguous().numpy()) for p in held]])

    return convert


def assemble(parts_of_ranks: Sequence[Sequence[tuple[Box, np.ndarray]]]) -> dict[str, np.ndarray]:
    """Whole tensors from boxes. Replicas of a box must be equal to the last bit, and nothing may be missing."""
    boxes: dict[Box, np.ndarray] = {}
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
