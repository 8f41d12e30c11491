"""Supervised training that ends with a bad habit: a model that can add, but mostly forgets to carry.

Where there is no carry it is right, elsewhere it knows the right answer and the careless one, and prefers the latter:
about half of all sums are right. GRPO finds both answers in one group of samples, and makes a habit of carrying.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from megagrpo.demo.sums import Sum
from megagrpo.errors import ModelError, Problem

IGNORED = -100  # the label that cross_entropy leaves out


@dataclass(frozen=True)
class WarmStart:
    """First `steps` with right answers, then `careless_steps` in which `careless_share` of them forget the carry."""

    steps: int = 420
    careless_steps: int = 70
    careless_share: float = 0.8
    batch: int = 128
    lr: float = 2e-3
    warmup_steps: int = 30
    decay_steps: int = 150  # the last of `steps`
    lr_share_min: float = 0.1  # after them
    accuracy_min: float = 0.75  # careless answers, counted as right, at the end


@dataclass(frozen=True)
class Examples:
    """Questions with answers. `tokens` and `labels` are int64 [examples, tokens]; labels[:, t] is the token after t."""

    tokens: Tensor
    labels: Tensor


def encode(sums: Sequence[Sum], tokenizer: PreTrainedTokenizerFast, *, careless: bool = False) -> Examples:
    """Labels are the response's tokens, the end token included; prompt and padding are IGNORED."""
    rows = []
    for example in sums:
        prompt = [{"role": "user", "content": example.question}]
        before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        response = example.careless_response if careless else example.response
        rows.append((before, [*tokenizer.encode(response), tokenizer.eos_token_id]))
    longest = max(len(before) + len(after) for before, after in rows)
    tokens = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for index, (before, after) in enumerate(rows):
        end = len(before) + len(after)
        tokens[index, :end] = torch.tensor(before + after)
        labels[index, len(before) - 1 : end - 1] = torch.tensor(after)
    return Examples(tokens, labels)


@torch.no_grad()
def exact_match(model: Qwen2ForCausalLM, examples: Examples) -> float:
    """Share answered right by greedy decoding. One forward pass tells: each token must be the likeliest."""
    likeliest = model(examples.tokens).logits.argmax(-1)
    return ((likeliest == examples.labels) | (examples.labels == IGNORED)).all(1).float().mean().item()


def warm_start(
    model: Qwen2ForCausalLM,
    learn: Sequence[Sum],
    held_out: Sequence[Sum],
    tokenizer: PreTrainedTokenizerFast,
    settings: WarmStart,
    seed: int,
    report: Callable[[int, float], None],
) -> None:
    """Train `model` on `learn`. `report` receives a step and its loss.

    Raises ModelError if the model then answers too few of `held_out` as the teacher mostly does.
    """
    # The longest answers of both have three digits, so that both have the same width.
    right, careless = encode(learn, tokenizer), encode(learn, tokenizer, careless=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_share(step, settings))
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, settings.steps + settings.careless_steps + 1):
        rows = torch.randint(len(learn), (settings.batch,), generator=generator)
        share = settings.careless_share if step > settings.steps else 0.0
        forgets = torch.rand(settings.batch, 1, generator=generator) < share
        tokens = torch.where(forgets, careless.tokens[rows], right.tokens[rows])
        labels = torch.where(forgets, careless.labels[rows], right.labels[rows])
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report(step, loss.item())
    accuracy = exact_match(model, encode(held_out, tokenizer, careless=True))
    if not accuracy >= settings.accuracy_min:
        raise ModelError(
            Problem(
                "the demo's model did not learn to add",
                given=f"{accuracy:.2f} of held-out sums as it was taught",
                needed=f"{settings.accuracy_min:.2f}",
                fix="report it: the demo is meant to reach this on every machine",
            )
        )


def _lr_share(step: int, settings: WarmStart) -> float:
    """Share of the learning rate at `step` (from 0): up over warmup_steps, flat, then down over decay_steps and low."""
    up = (step + 1) / settings.warmup_steps
    down = max((settings.steps - step) / settings.decay_steps, settings.lr_share_min)
    return min(1.0, up, down)
