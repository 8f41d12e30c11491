"""Rules between fields of a recipe for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megagrpo.recipe.rank_checks import RANK_RULES, longest_fits
from megagrpo.recipe.rule_problem import RuleProblem, broken
from megagrpo.recipe.schema import SftRecipe

RUN_LENGTHS = ("total_steps", "total_epochs")
NO_ENGINES = "nothing: supervised fine-tuning has no engines"


def _run_length(recipe: SftRecipe) -> Iterator[RuleProblem]:
    train = recipe.train
    if train.total_episodes is not None:
        yield broken(
            "train.total_episodes",
            reads=tuple(f"train.{name}" for name in RUN_LENGTHS),
            given=f"{train.total_episodes}",
            needed="nothing: no responses are generated",
            fix="give total_steps or total_epochs",
        )
        return
    given = [name for name in RUN_LENGTHS if getattr(train, name) is not None]
    if len(given) != 1:
        yield broken(
            f"train.{(given or RUN_LENGTHS)[0]}",
            reads=tuple(f"train.{name}" for name in (*RUN_LENGTHS, "total_episodes")),
            given=" and ".join(given) or "no length of the run",
            needed="exactly one of total_steps, total_epochs",
            fix="keep one of them" if given else "add total_epochs: N",
        )


def _batch(recipe: SftRecipe) -> Iterator[RuleProblem]:
    examples, data = recipe.data.examples_per_step, recipe.train.layout.data
    if examples < data:
        yield broken(
            "data.examples_per_step",
            reads=("train.layout.data",),
            given=f"{examples}, and {data} data ranks",
            needed="at least one example of every step for each data rank",
            fix=f"examples_per_step: {data}, or a smaller train.layout.data",
        )


def _lengths(recipe: SftRecipe) -> Iterator[RuleProblem]:
    longest = recipe.data.tokens_max
    yield from longest_fits(
        recipe.train, longest, described=f"examples of up to {longest}", what="example", limits=("data.tokens_max",)
    )


def _no_logprobs(recipe: SftRecipe) -> Iterator[RuleProblem]:
    tokens = recipe.train.logprob_tokens_per_microbatch
    if tokens is not None:
        yield broken(
            "train.logprob_tokens_per_microbatch",
            given=f"{tokens}",
            needed="nothing: no logprobs are computed before an update",
            fix="remove it",
        )


def _engines(recipe: SftRecipe) -> Iterator[RuleProblem]:
    """Fields of shared sections that say how training and engines share devices."""
    if recipe.train.offload:
        yield broken("train.offload", given=", ".join(recipe.train.offload), needed=NO_ENGINES, fix="remove it")
    if recipe.cluster.placement != "colocated":
        yield broken("cluster.placement", given=recipe.cluster.placement, needed=NO_ENGINES, fix="remove it")
    if recipe.cluster.engine_devices is not None:
        yield broken(
            "cluster.engine_devices", given=f"{recipe.cluster.engine_devices}", needed=NO_ENGINES, fix="remove it"
        )


def _best(recipe: SftRecipe) -> Iterator[RuleProblem]:
    if recipe.checkpoint.keep_best is not None:
        yield broken(
            "checkpoint.keep_best",
            given=recipe.checkpoint.keep_best,
            needed="nothing: it keeps the checkpoint with the largest metric, and a held-out loss should be small",
            fix="remove it, and set checkpoint.keep_last to as many as you want to choose from",
        )


SFT_RULES: tuple[Callable[[SftRecipe], Iterator[RuleProblem]], ...] = (
    _run_length, _batch, _lengths, _no_logprobs, *RANK_RULES, _engines, _best,
)  # fmt: skip
