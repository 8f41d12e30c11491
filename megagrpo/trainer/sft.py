"""Runs of supervised fine-tuning: training ranks alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from megagrpo.algorithm.optimizer import learning_rate
from megagrpo.batching.rank_batches import RankBatch, TrainSequence, make_rank_batches
from megagrpo.batching.work import Work, work_of
from megagrpo.checkpoint.store import Checkpoint
from megagrpo.cluster.runtime import Runtime, check_files
from megagrpo.cluster.train_ranks import TrainRanks
from megagrpo.data.messages import Example, load_examples
from megagrpo.preflight.preflight import Preflight
from megagrpo.progress import progress
from megagrpo.rank_results import SftUpdate, TokenLoss
from megagrpo.recipe.schema import SftRecipe
from megagrpo.recipe.schema.sft import HELD_OUT
from megagrpo.trainer.run import Step
from megagrpo.trainer.run_loop import Training, run_to_end
from megagrpo.trainer.setup import Setup
from megagrpo.trainer.step_metrics import packing_metrics


def sft(checked: Preflight[SftRecipe]) -> int:
    """Runs the recipe to its end, as `run_to_end` says."""
    recipe = checked.recipe
    return run_to_end(
        checked,
        lambda files, tokenizer, _: load_examples(files, tokenizer, recipe.data, recipe.seed),
        start_fine_tuning,
    )


def start_fine_tuning(setup: Setup[SftRecipe, Example], ray: Runtime, closing: ExitStack) -> FineTuning:
    """Starts the training ranks."""
    model = setup.checked.model_directory.absolute()
    check_files(ray, setup.recipe, read=(model,))
    setup.tracker.say(f"starting {setup.recipe.train.layout.parallel().ranks} training ranks with {model}")

    def start_ranks(saved: Checkpoint | None) -> TrainRanks:
        ranks = TrainRanks(ray, setup.recipe, model)
        closing.callback(ranks.close)
        ranks.begin(model, saved.rank_directory if saved else None)
        return ranks

    return FineTuning(setup, start_ranks(setup.resumed), work_of(setup.checked.architecture), start_ranks)


@dataclass(frozen=True)
class FineTuning(Training):
    """Supervised fine-tuning."""

    setup: Setup[SftRecipe, Example]
    sft_ranks: TrainRanks
    work: Work  # the model's; data ranks get equal parts of it
    start_ranks: Callable[[Checkpoint | None], TrainRanks]

    @property
    def ranks(self) -> TrainRanks:
        return self.sft_ranks

    def step(self, step: int, kl_coefficient: float | None) -> Step:
        """Takes one optimizer step on the next examples."""
        recipe, cursor, clock = self.setup.recipe, self.setup.cursor, self.setup.clock
        with clock.phase("step"):
            epoch = cursor.epoch + cursor.position / len(cursor)
            examples = cursor.next(recipe.data.examples_per_step)
            batches = self._pack(examples)
            lr = learning_rate(step, self.setup.total_steps, recipe.train.optimizer)
            with clock.phase("update"), self.ranks.updating(step):
                self.ranks.load_batch(batches)
                update: SftUpdate = self.ranks.answer("update", lr)
                memory = self.ranks.memory_peak()
            tokens = sum(len(example.tokens) for example in examples)
            metrics = {
                "loss/tokens": update.loss.mean,
                "grad_norm": update.grad_norm,
                "skipped_steps": float(not math.isfinite(update.grad_norm)),
                "lr": lr,
                "epoch": epoch,
                "example_tokens/mean": tokens / len(examples),
                "example_tokens/trained_share": update.loss.tokens / tokens,
                **packing_metrics(recipe.train, batches, self.ranks.device_type),
            }
            if memory is not None:
                metrics["memory/allocated_max/update"] = float(memory)
        return Step(metrics, tokens)

    def evaluate(self, step: int, sets: Sequence[str]) -> dict[str, float]:
        """Returns mean loss and perplexity of held-out assistant tokens, with a step's number of examples at a time."""
        held_out, at_once = self.setup.held_out[HELD_OUT], self.setup.recipe.data.examples_per_step
        losses: list[TokenLoss] = []
        with progress("held-out examples", len(held_out)) as work:
            for first in range(0, len(held_out), at_once):
                self.ranks.load_batch(self._pack(held_out[first : first + at_once]))
                losses.append(self.ranks.answer("evaluate"))
                work.advance(at_once)
        loss = sum(losses[1:], losses[0])
        return {"loss": loss.mean, "perplexity": loss.perplexity}

    def with_new_ranks(self, saved: Checkpoint | None) -> FineTuning:
        return replace(self, sft_ranks=self.start_ranks(saved))

    def _pack(self, examples: Sequence[Example]) -> list[RankBatch]:
        sequences = [
            TrainSequence(
                tokens=example.tokens.astype(np.int64),
                loss_mask=example.loss_mask,
                rollout_logprobs=np.zeros(len(example.tokens), np.float32),  # no engine sampled these
                row=row,
            )
            for row, example in enumerate(examples)
        ]
        recipe = self.setup.recipe
        return make_rank_batches(
            sequences,
            layout=recipe.train.layout.parallel(),
            minibatches=1,
            tokens_per_microbatch=recipe.train.tokens_per_microbatch,
            seed=recipe.seed,
            work=self.work,
        )
