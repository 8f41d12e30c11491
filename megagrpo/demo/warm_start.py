"""Supervised training that stops half-way, so that GRPO has both right and wrong answers to learn from."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from megagrpo.demo.sums import Sum
from megagrpo.errors import ModelError, Problem

IGNORED = -100  # the label that cross_entropy leaves out


@dataclass(frozen=True)
class WarmStart:
    """How to train, and where to stop."""

    accuracy: float = 0.5
    batch: int = 128
    lr: float = 2e-3
    warmup_steps: int = 30
    steps_between_evaluations: int = 5
    steps_max: int = 2000


@dataclass(frozen=True)
class Examples:
    """Questions with answers. `tokens` and `labels` are int64 [examples, tokens]; labels[:, t] is the token after t."""

    tokens: Tensor
    labels: Tensor


def encode(sums: Sequence[Sum], tokenizer: PreTrainedTokenizerFast) -> Examples:
    """Labels are the response's tokens, the end token included; prompt and padding are IGNORED."""
    rows = []
    for example in sums:
        prompt = [{"role": "user", "content": example.question}]
        before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        rows.append((before, [*tokenizer.encode(example.response), tokenizer.eos_token_id]))
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
    examples: Examples,
    held_out: Examples,
    settings: WarmStart,
    seed: int,
    report: Callable[[int, float], None],
) -> float:
    """Train `model` until it answers `settings.accuracy` of `held_out`, and return what it answers.

    Accuracy rises by leaps, so of the last two evaluations the one nearer to the goal is kept. `report` receives each
    evaluation's step and accuracy. Raises ModelError if the goal is not reached in `steps_max` steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / settings.warmup_steps))
    generator = torch.Generator().manual_seed(seed)
    before, accuracy_before = copy.deepcopy(model.state_dict()), 0.0
    for step in count(1):
        rows = torch.randint(len(examples.tokens), (settings.batch,), generator=generator)
        logits = model(examples.tokens[rows]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), examples.labels[rows].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % settings.steps_between_evaluations:
            continue
        accuracy = exact_match(model, held_out)
        report(step, accuracy)
        if accuracy >= settings.accuracy:
            break
        if step >= settings.steps_max or math.isnan(loss.item()):
            raise ModelError(
                Problem(
                    "the demo's model did not learn to add",
                    given=f"{accuracy:.2f} of held-out sums right after {step} steps",
                    needed=f"{settings.accuracy:.2f}",
                    fix="report it: the demo is meant to reach this on every machine",
                )
            )
        before, accuracy_before = copy.deepcopy(model.state_dict()), accuracy
    if settings.accuracy - accuracy_before < accuracy - settings.accuracy:
        model.load_state_dict(before)
        return accuracy_before
    return accuracy
