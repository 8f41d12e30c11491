"""Models beside the policy in a plan: on devices of their own, and teachers on the training ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from megagrpo.errors import ModelError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.case import Case
from megagrpo.plan.parameters import known_models, rank_parameters, total_parameters
from megagrpo.plan.units import byte_text, second_text
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.teachers import ExternalTeacherConfig, RanksTeacherConfig, ServedTeacherConfig
from megagrpo.weights.families import read_architecture
from megagrpo.weights.sides.checkpoint import file_tensors


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


def teacher_bytes(case: Case, stage: int) -> dict[str, int]:
    """Returns the weight bytes of teachers of kind ranks on the fullest rank of a pipeline stage of the policy, by
    name. The output matrix is there once more if it is split otherwise than the policy's."""
    found, tensor = {}, case.layout.tensor
    for name, arch in case.teachers.items():
        layout = case.teacher_cases[name].layout
        held = [rank_parameters(arch, layout, its, case.fused_layers) for its in stages_within(case, stage, layout)]
        same = layout == case.layout and arch.padded_vocab(tensor) == case.architecture.padded_vocab(tensor)
        found[name] = max(of.total for of in held) * case.item_bytes + (0 if same else output_bytes(case, name, stage))
    return found


def reads_apart(case: Case, name: str) -> bool:
    """Returns whether a teacher on the ranks has batches of its own, from which its hidden states go to others."""
    recipe, distillation = case.grpo, case.grpo.algorithm.distillation
    some_rows = distillation is not None and bool(distillation.by_source or distillation.column)
    return some_rows or recipe.teachers_read_more or case.teacher_cases[name].layout != case.layout


def stages_within(case: Case, stage: int, layout: ParallelLayout) -> range:
    """Returns the pipeline stages in a layout of the ranks that are a stage of the policy."""
    of_stage, per_stage = case.layout.ranks // case.layout.pipeline, layout.ranks // layout.pipeline
    return range(stage * of_stage // per_stage, -(-(stage + 1) * of_stage // per_stage))


def output_bytes(case: Case, name: str, stage: int) -> int:
    """Returns the bytes of a teacher's output matrix on a rank of a stage, which stay on the device."""
    rows = case.architecture.padded_vocab(case.layout.tensor) // case.layout.tensor
    return rows * case.teachers[name].hidden * case.item_bytes if stage == case.layout.pipeline - 1 else 0


def offloaded_bytes(case: Case, stage: int) -> int:
    """Returns the bytes of teachers that are on a rank of a stage for their passes alone."""
    teachers = case.recipe.teachers if isinstance(case.recipe, Recipe) else {}
    moving = [name for name in case.teachers if getattr(teachers[name], "offload", False)]
    held = teacher_bytes(case, stage)
    return sum(held[name] - output_bytes(case, name, stage) for name in moving)


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
    held = [teacher_bytes(case, stage) for stage in stages]
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
            largest = max((of_stage[name] for of_stage in held if name in of_stage), default=0)
            where, arch = "the training ranks", case.teachers.get(name)
            if teacher.layout is not None:
                layout = teacher.layout.parallel()
                where += f" ({layout if arch and arch.experts else replace(layout, expert_tensor=1)})"
            text = f"{teacher.path} on {where}, {byte_text(largest)} of weights on each, in all phases"
            if teacher.offload:
                seconds = second_text(largest / case.assumptions.host_bytes_per_second)
                text = text.replace("in all phases", f"there in its pass alone: its way takes {seconds} of a step")
            has = recipe.train.lora or recipe.keeps_reference
            if has and _is_start(recipe, teacher):
                text += "; the ranks have these weights already: kind: reference takes no others"
        else:
            shared = ", which the KL penalty has too" if recipe.algorithm.kl.coefficient else ""
            text = f"the reference policy{shared}"
        yield f"teacher {name}", text


def _is_start(recipe: Recipe, teacher: RanksTeacherConfig) -> bool:
    """Returns whether a teacher is the model from which the policy starts, and the reference stays that."""
    fixed = recipe.algorithm.reference.update_every_steps is None
    return fixed and teacher.path == recipe.model.path and recipe.model.revision is None
