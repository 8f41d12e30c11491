"""Whether the packages that a recipe needs are installed, in versions that megagrpo can work with."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megagrpo.doctor.packages import package_findings
from megagrpo.errors import Problem
from megagrpo.recipe.schema import AnyRecipe, Recipe


def package_problems(recipe: AnyRecipe) -> Iterator[Problem]:
    """What is missing of what the recipe switches on, and wrong versions of it and of what megagrpo always needs.

    That SGLang is missing is said elsewhere: it may be of another environment.
    """
    tracked, fused = recipe.track, recipe.train.layer_spec == "transformer_engine"
    switched_on = {
        "track.wandb": ("wandb", tracked.wandb is not None, "pip install megagrpo[wandb]"),
        "track.tensorboard": ("tensorboard", tracked.tensorboard, "pip install megagrpo[tensorboard]"),
        "train.layer_spec": ("transformer_engine", fused, "pip install megagrpo[te], or layer_spec: auto"),
    }
    for field, (package, needed, fix) in switched_on.items():
        if needed and find_spec(package) is None:
            yield Problem(field, given="switched on", needed=f"the package {package}, which is not installed", fix=fix)
    used = {
        "wandb": tracked.wandb is not None,
        "tensorboard": tracked.tensorboard,
        "te": fused,
        "sglang": isinstance(recipe, Recipe)
        and recipe.rollout.engine == "sglang"
        and recipe.rollout.sglang.python is None,
    }
    for finding in package_findings(extras=[extra for extra, is_used in used.items() if is_used]):
        if finding.state == "wrong":
            where, working = f"package {finding.part}", "a version that megagrpo works with"
            yield Problem(where, given=finding.found, needed=working, fix=finding.remedy)
