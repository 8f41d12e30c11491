"""Models beside the policy in a plan: on devices of their own, and teachers on the training ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from megagrpo.errors import ModelError
from megagrpo.plan.case import Case
from megagrpo.plan.parameters import RankParameters, known_models, rank_parameters, total_parameters
from megagrpo.plan.units import byte_text, second_text
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.teachers import ExternalTeacherConfig, RanksTeacherConfig, ServedTeacherConfig
from megagrpo.section import changed
from megagrpo.weights.families import read_architecture
from megagrpo.weights.sides.checkpoint import file_tensors

MICROBATCHES = ("tokens_per_microbatch", "logprob_tokens_per_microbatch")


def bytes_beside(recipe: Recipe, where: str, device: str) -> int | None:
    """Returns the weight bytes of one of models_beside on each of its devices; None if they are not known here."""
    config = recipe.models_beside[where]
    parameters = stored_parameters(config.path)
    if parameters is None:
        return None
    item = 4 if config.dtype == "float32" or (config.dtype == "auto" and device == "cpu") else 2
    return parameters * item // max(1, config.devices)


@lru_cache
def stored_parameters(path: str) -> int | None:
    """Returns the elements of all tensors in a model's directory, or of a published model; None if neither is known."""
    if not Path(path).is_dir() and (known := known_models().get(path)):
        return total_parameters(read_architecture(known))
    try:
        return sum(math.prod(entry.shape) for _, entry in file_tensors(Path(path)).values()) or None
    except ModelError:
        return None


# --- teachers on the ranks --------------------------------------------------------------------------------------------


def teacher_cases(case: Case) -> dict[str, Case]:
    """Returns the case as each teacher on the ranks passes over it: its model in the policy's place, with prompts as
    long as teachers read them and the same sequences in a microbatch. Only the reference has adapters."""
    recipe = case.recipe
    if not isinstance(recipe, Recipe) or not recipe.teachers_on_ranks:
        return {}
    read, before, now = recipe.as_teachers_read, recipe.sequence_tokens_max, recipe.taught_tokens_max
    limits = {f"train.{key}": getattr(recipe.train, key) for key in MICROBATCHES}
    read = changed(read, {key: limit and -(-limit * now // before) for key, limit in limits.items()})
    prompt = case.lengths.prompt + case.assumptions.prompt_share * (now - before)
    own = replace(case, recipe=read, assumptions=replace(case.assumptions, prompt_tokens=prompt))
    others = replace(own, recipe=changed(read, {"train.lora": None}))
    models = {name: case.teachers.get(name) for name in recipe.teachers_on_ranks}
    return {name: replace(others, architecture=arch) if arch else own for name, arch in models.items()}


def teacher_parameters(case: Case, stage: int) -> dict[str, RankParameters]:
    """Returns the elements of teachers of kind ranks on every rank of a pipeline stage, by their names."""
    models = case.teachers.items()
    return {name: rank_parameters(arch, case.layout, stage, case.fused_layers) for name, arch in models}


def output_bytes(case: Case, name: str, stage: int) -> int:
    """Returns the bytes of a teacher's output matrix on a rank of a stage, which stay on the device."""
    held = teacher_parameters(case, stage)[name]
    return (held.head or held.embedding) * case.item_bytes if stage == case.layout.pipeline - 1 else 0


def offloaded_bytes(case: Case, stage: int) -> int:
    """Returns the bytes of teachers that are on a rank of a stage for their passes alone."""
    teachers = case.recipe.teachers if isinstance(case.recipe, Recipe) else {}
    moving = [name for name in case.teachers if getattr(teachers[name], "offload", False)]
    held = teacher_parameters(case, stage)
    return sum(held[name].total * case.item_bytes - output_bytes(case, name, stage) for name in moving)


def heads_again(case: Case) -> dict[str, Case]:
    """Returns the cases of teachers on the ranks whose output layers an update passes through: a loss with a divergence
    makes their logits from the hidden states that their passes keep."""
    recipe = case.recipe
    if not isinstance(recipe, Recipe) or recipe.algorithm.teachers_advise:
        return {}
    models = {name: case.teachers.get(name, case.architecture) for name in recipe.teachers_on_ranks}
    return {name: replace(case, architecture=arch) for name, arch in models.items()}


# --- lines of the summary ---------------------------------------------------------------------------------------------


def lines_of_teachers(case: Case) -> Iterator[tuple[str, str]]:
    """Yields a line about each teacher: where it is, in which phases, its bytes, and what moving it costs."""
    recipe, stages = case.grpo, range(case.layout.pipeline)
    held = [teacher_parameters(case, stage) for stage in stages]
    noun = "GPU" if case.device == "cuda" else "process"
    for name, teacher in recipe.teachers.items():
        if isinstance(teacher, ExternalTeacherConfig):
            text = f"a server that runs already ({teacher.engine}), {teacher.url}"
        elif isinstance(teacher, ServedTeacherConfig):
            size = bytes_beside(recipe, f"teachers.{name}", case.device)
            weights = f", {byte_text(size)} of weights on each" if size else ""
            devices = f"{teacher.devices} {noun}{'s' if teacher.devices > 1 and noun == 'GPU' else ''} of its own"
            text = f"{teacher.path} ({teacher.engine}) on {devices}{weights}, in all phases"
        elif isinstance(teacher, RanksTeacherConfig):
            largest = max((of_stage[name].total * case.item_bytes for of_stage in held if name in of_stage), default=0)
            text = f"{teacher.path} on the training ranks, {byte_text(largest)} of weights on each, in all phases"
            if teacher.offload:
                seconds = second_text(largest / case.assumptions.host_bytes_per_second)
                text = text.replace("in all phases", f"there in its pass alone: its way takes {seconds} of a step")
        else:
            shared = ", which the KL penalty has too" if recipe.algorithm.kl.coefficient else ""
            text = f"the reference policy{shared}"
        yield f"teacher {name}", text
