"""Supervised fine-tuning, whole: start or continue, step by step, evaluate, save, and leave a model behind."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from megagrpo.algorithm.learning_rate import learning_rate
from megagrpo.batching.rank_batches import RankBatch, TrainSequence, imbalance, make_rank_batches, packing_efficiency
from megagrpo.batching.work import Work, work_of
from megagrpo.checkpoint.store import CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.cluster import runtime
from megagrpo.cluster.shared_files import check_files
from megagrpo.cluster.train_ranks import SftRanks
from megagrpo.data.cursor import Cursor
from megagrpo.data.messages import Example, Examples, load_examples
from megagrpo.preflight.preflight import Preflight
from megagrpo.recipe.defaults import checkpoint_directory, dtype_name, run_directory, total_steps
from megagrpo.recipe.schema import DataFileConfig, SftRecipe
from megagrpo.track.tracker import Tracker
from megagrpo.trainer.clock import PhaseClock
from megagrpo.trainer.prompts import describe_files, read_tokenizer
from megagrpo.trainer.run_lock import only_process_of
from megagrpo.trainer.saving import checkpoint_to_resume, export, exported_step, open_store, recipe_values, save
from megagrpo.trainer.stopping import Stopping, StopRequested, until_stopped


@dataclass(frozen=True)
class Run:
    """Everything a step works with."""

    recipe: SftRecipe
    total_steps: int
    cursor: Cursor[Example]
    held_out: Sequence[Example]
    ranks: SftRanks
    clock: PhaseClock
    work: Work
    """Of the model, by which data ranks are balanced."""
    stopping: Stopping


def sft(checked: Preflight[SftRecipe]) -> int:
    """Runs the recipe to its end, from its newest checkpoint if it has one; 0.

    Raises MegagrpoError; RunStopped, once everything is saved, if the process was sent SIGTERM or SIGUSR1.
    """
    store = open_store(checked.recipe)
    return until_stopped(lambda stopping: _sft(checked, store, stopping), store.newest)


def _sft(checked: Preflight[SftRecipe], store: CheckpointStore, stopping: Stopping) -> int:
    recipe = checked.recipe
    with ExitStack() as closing:
        closing.enter_context(only_process_of(run_directory(recipe)))
        resumed = checkpoint_to_resume(store, recipe)
        done = resumed.state.step if resumed else 0
        unlogged = dict(resumed.state.unlogged) if resumed and resumed.state.unlogged else None
        tokenizer = read_tokenizer(recipe, checked.tokenizer_directory)
        examples = read_examples(recipe, recipe.data.train, tokenizer)
        held_out = read_examples(recipe, recipe.eval.files, tokenizer) if recipe.eval.files else Examples((), ())
        cursor = Cursor(examples.examples, seed=recipe.seed, shuffle=recipe.data.shuffle)
        if resumed:
            cursor.restore(resumed.state.data_cursor)
        steps = total_steps(recipe, len(cursor))

        tracker = closing.enter_context(Tracker(recipe, steps))
        tracker.start(done, resumed.state.tracker_runs if resumed else None, unlogged=unlogged is not None)
        for line in describe_files((*examples.files, *held_out.files), "examples"):
            tracker.say(line)
        if resumed:
            for line in (f"continuing after step {done} from {resumed.path}", *resumed.warnings):
                tracker.say(line)
            exported = not recipe.checkpoint.export_hugging_face or exported_step(recipe) == done
            if exported and done >= steps and unlogged is None:
                tracker.say("the run is complete: nothing to do")
                return 0

        with stopping.giving_up():
            with stopping.while_ray_starts():
                ray = runtime.start(recipe, stopping.check)
            closing.callback(runtime.stop, ray)
            model, written = checked.model_directory.absolute(), (run_directory(recipe), checkpoint_directory(recipe))
            check_files(ray, written, (model,), recipe.cluster.start_timeout_seconds)
            ranks = SftRanks(ray, recipe, model)
            closing.callback(ranks.close)
            if resumed:
                ranks.load(resumed.rank_directory)
        clock, work = PhaseClock(), work_of(checked.architecture)
        run = Run(recipe, steps, cursor, held_out.examples, ranks, clock, work, stopping)
        _run_steps(run, done, unlogged, store, tracker)
        if recipe.checkpoint.export_hugging_face:
            with stopping.giving_up():
                directory = export(ranks, checked, tokenizer, max(done, steps), dtype_name(recipe, ray.device))
            tracker.say(f"Hugging Face model: {directory}")
    return 0


def read_examples(recipe: SftRecipe, files: Sequence[DataFileConfig], tokenizer: PreTrainedTokenizerBase) -> Examples:
    """Rendered conversations of data.train or eval.files. Raises DataError."""
    return load_examples(
        files,
        tokenizer,
        tokens_max=recipe.data.tokens_max,
        overlong=recipe.data.overlong_examples,
        template_arguments=recipe.data.chat_template_arguments,
        seed=recipe.seed,
    )


def _run_steps(
    run: Run, done: int, unlogged: dict[str, float] | None, store: CheckpointStore, tracker: Tracker
) -> None:
    """Steps until the run's length; evaluates and saves when due. `unlogged`: metrics of the step that is done, if it
    still waits for its evaluation.

    A step is logged before it is saved: a run killed in between repeats the step, and its line is written again.
    Raises StopRequested once all steps that are done are saved.
    """
    recipe, saved = run.recipe, done
    try:
        if done == 0 and run.held_out and recipe.eval.before_training:
            tracker.log(0, _evaluate(run) | run.clock.take())
        while unlogged is not None or done < run.total_steps:
            if unlogged is None:
                run.stopping.stop_here()
                unlogged = _timed_step(run, done + 1)
                done += 1
            last = done == run.total_steps
            evaluation = _evaluate(run) if run.held_out and (last or done % recipe.eval.every_steps == 0) else {}
            tracker.log(done, unlogged | evaluation | run.clock.take())
            unlogged = None
            if last or done % recipe.checkpoint.every_steps == 0:
                _save(run, done, unlogged, store, tracker)
                saved = done
    except StopRequested:
        if done > saved:
            _save(run, done, unlogged, store, tracker)
        raise


def _timed_step(run: Run, step: int) -> dict[str, float]:
    with run.clock.phase("step"):
        metrics, tokens = sft_step(run, step)
    seconds = run.clock.take()
    return metrics | {"tokens_per_second": tokens / seconds["seconds/step"]} | seconds


def _save(run: Run, step: int, unlogged: dict[str, float] | None, store: CheckpointStore, tracker: Tracker) -> None:
    state = TrainerState(
        step=step,
        weight_version=step,
        data_cursor=run.cursor.state(),
        recipe=recipe_values(run.recipe),
        unlogged=unlogged,
        tracker_runs=tracker.run_ids,
    )
    with run.clock.phase("checkpoint"):
        save(run.ranks, store, state)


def sft_step(run: Run, step: int) -> tuple[dict[str, float], int]:
    """One optimizer step on the next examples. Returns what it was, and how many tokens it had."""
    recipe, clock = run.recipe, run.clock
    epoch = run.cursor.epoch + run.cursor.position / len(run.cursor)
    examples = run.cursor.next(recipe.data.examples_per_step)
    batches = _pack(run, examples)
    lr = learning_rate(step, run.total_steps, recipe.train.optimizer)
    with clock.phase("update"):
        update = run.ranks.update(batches, lr)
    tokens = sum(len(example.tokens) for example in examples)
    layout = recipe.train.layout.parallel()
    metrics = {
        "loss/tokens": update.loss.mean,
        "grad_norm": update.grad_norm,
        "lr": lr,
        "epoch": epoch,
        "example_tokens/mean": tokens / len(examples),
        "example_tokens/trained_share": update.loss.tokens / tokens,
        "packing/microbatches": float(sum(len(batch.minibatches[0]) for batch in batches)),
        "packing/efficiency": packing_efficiency(batches, layout, recipe.train.tokens_per_microbatch),
        "packing/imbalance": imbalance(batches),
    }
    return metrics, tokens


def _evaluate(run: Run) -> dict[str, float]:
    """Mean loss of all held-out tokens of the assistant's. As many examples at a time as a step has."""
    at_once = run.recipe.data.examples_per_step
    with run.stopping.giving_up(), run.clock.phase("eval"):
        losses = [
            run.ranks.evaluate(_pack(run, run.held_out[first : first + at_once]))
            for first in range(0, len(run.held_out), at_once)
        ]
    loss = sum(losses[1:], losses[0])
    return {"eval/loss": loss.mean, "eval/perplexity": loss.perplexity}


def _pack(run: Run, examples: Sequence[Example]) -> list[RankBatch]:
    sequences = [
        TrainSequence(
            tokens=example.tokens.astype(np.int64),
            loss_mask=example.loss_mask,
            rollout_logprobs=np.zeros(len(example.tokens), np.float32),  # nobody sampled these
            row=row,
        )
        for row, example in enumerate(examples)
    ]
    return make_rank_batches(
        sequences,
        layout=run.recipe.train.layout.parallel(),
        minibatches=1,
        tokens_per_microbatch=run.recipe.train.tokens_per_microbatch,
        seed=run.recipe.seed,
        work=run.work,
    )
