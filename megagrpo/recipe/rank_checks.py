"""Rules between the fields that say how training ranks lie and step: for every kind of recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megagrpo.recipe.lora_checks import lora_problems
from megagrpo.recipe.rule_problem import RuleProblem, broken
from megagrpo.recipe.schema import AnyRecipe, TrainConfig


def longest_fits(
    train: TrainConfig, longest: int, *, described: str, what: str, limits: tuple[str, ...]
) -> Iterator[RuleProblem]:
    """Whether a microbatch holds sequences of `longest` tokens, which the fields `limits` allow."""
    context = train.layout.context
    multiple = 1 if context == 1 else 2 * context  # context ranks each take two equal pieces of a sequence
    padded = -(-longest // multiple) * multiple
    if train.tokens_per_microbatch * context < padded:
        yield broken(
            "train.tokens_per_microbatch",
            reads=("train.layout.context", *limits),
            given=f"{train.tokens_per_microbatch} tokens x {context} context ranks, and {described}"
            + (f", padded to {padded} for context ranks" if padded > longest else ""),
            needed=f"at least {-(-padded // context)}, to hold the longest {what}",
            fix=f"raise it, or lower {' or '.join(limits)}",
        )


def _layout(recipe: AnyRecipe) -> Iterator[RuleProblem]:
    layout = recipe.train.layout.parallel()
    for text in layout.problems():
        field = text.split()[0]
        read: tuple[str, ...] = ("expert_tensor", "tensor", "context", "data")
        default = "" if recipe.train.layout.expert_tensor else " (the default: as tensor)"
        given = f"expert {layout.expert} x expert_tensor {layout.expert_tensor}{default}"
        fix = "lower expert or expert_tensor, or raise data"
        if field != "expert":  # of the pipeline: virtual_pipeline, or how long a stage is
            read, given = ("pipeline",), f"{field} {getattr(layout, field)} with pipeline {layout.pipeline}"
            fix = "virtual_pipeline: 1" if field == "virtual_pipeline" else "remove it"
        yield broken(
            f"train.layout.{field}",
            reads=tuple(f"train.layout.{name}" for name in read),
            given=given,
            needed=text,
            fix=fix,
        )
    sizes = tuple(f"train.layout.{name}" for name in ("tensor", "pipeline", "context", "data"))
    devices = recipe.cluster.trainer_devices
    if devices is not None and devices != layout.ranks:
        yield broken(
            "cluster.trainer_devices",
            reads=sizes,
            given=f"{devices} devices",
            needed=f"tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} "
            f"x data {layout.data} = {layout.ranks} ranks, one device each",
            fix=_devices_fix(devices, layout.ranks, layout.data),
        )


def _devices_fix(devices: int, ranks: int, data: int) -> str:
    replica = ranks // data
    if devices % replica == 0:
        return f"trainer_devices: {ranks}, or train.layout.data: {devices // replica}"
    return f"trainer_devices: {ranks}, or sizes whose product is {devices}"


def _optimizer(recipe: AnyRecipe) -> Iterator[RuleProblem]:
    optimizer = recipe.train.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield broken(
            "train.optimizer.min_lr",
            reads=("train.optimizer.lr",),
            given=f"min_lr {optimizer.min_lr} above lr {optimizer.lr}",
            needed="at most lr, the peak",
            fix="lower min_lr or raise lr",
        )
    elif optimizer.min_lr > 0 and optimizer.schedule == "constant":
        yield broken(
            "train.optimizer.min_lr",
            reads=("train.optimizer.schedule", "train.optimizer.lr"),
            given=f"{optimizer.min_lr} with schedule: constant",
            needed="0: a constant schedule stays at lr",
            fix="schedule: linear or cosine, or remove min_lr",
        )
    steps = recipe.train.total_steps
    if steps is not None and optimizer.warmup_steps > steps:
        yield broken(
            "train.optimizer.warmup_steps",
            reads=("train.total_steps",),
            given=f"{optimizer.warmup_steps} of {steps} steps in all",
            needed="at most train.total_steps",
            fix="lower it",
        )


def _device(recipe: AnyRecipe) -> Iterator[RuleProblem]:
    if recipe.cluster.device == "cpu" and recipe.train.layer_spec == "transformer_engine":
        yield broken(
            "train.layer_spec",
            reads=("cluster.device",),
            given="transformer_engine with cluster.device: cpu",
            needed="local or auto: Transformer Engine runs on CUDA only",
            fix="layer_spec: auto",
        )


RANK_RULES: tuple[Callable[[AnyRecipe], Iterator[RuleProblem]], ...] = (_layout, _optimizer, _device, lora_problems)
