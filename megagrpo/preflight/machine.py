"""Checks of this machine before a run: packages, devices, an address, engines, directories that can be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from megagrpo.doctor.packages import missing_to_compile, package_findings
from megagrpo.errors import MegagrpoError, Problem
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.case import Case, machines_of
from megagrpo.recipe.defaults import (
    allocator_problem,
    checkpoint_directory,
    device_here,
    dtype_name,
    export_directory,
    plan_devices,
    run_directory,
    train_config,
)
from megagrpo.recipe.kernels import LayerSpec, auto_problems
from megagrpo.recipe.model_rules import divisors, either
from megagrpo.recipe.schema import AnyRecipe, EngineLayoutConfig, Recipe
from megagrpo.recipe.schema.run import address_problem
from megagrpo.recipe.schema.train import COMPILED
from megagrpo.track.trackers import trackers_of
from megagrpo.weights.families.architecture import Architecture

MUON = (
    "pip install megagrpo[muon]; on Python 3.11: pip install absl-py, then "
    "pip install --no-deps --ignore-requires-python 'emerging_optimizers>=0.3,<0.4'"
)


def package_problems(recipe: AnyRecipe, architecture: Architecture | None = None) -> Iterator[Problem]:
    """Yields problems of missing packages that the recipe switches on, and of wrong versions of all that the run uses.

    A missing SGLang is reported by sglang_problems: the recipe may name another environment that has it.
    """
    fused, with_port = recipe.train.layer_spec == "transformer_engine", recipe.track.prometheus_port is not None
    moments, muon = recipe.train.optimizer.moment_dtype != "float32", recipe.train.optimizer.kind == "muon"
    rollout, trackers = recipe.rollout if isinstance(recipe, Recipe) else None, trackers_of(recipe)
    switched_on = {
        f"track.{name}": (tracker.package, True, f"pip install megagrpo[{name}]")
        for name, tracker in trackers.items()
        if tracker.package
    } | {
        "track.prometheus_port": ("prometheus_client", with_port, "pip install megagrpo[prometheus]"),
        "train.optimizer.kind": ("emerging_optimizers", muon, MUON),
        "train.optimizer.moment_dtype": ("transformer_engine", moments, "pip install megagrpo[te], or remove it"),
        "train.layer_spec": ("transformer_engine", fused, "pip install megagrpo[te], or layer_spec: auto"),
    }
    for field, (package, needed, fix) in switched_on.items():
        if needed and find_spec(package) is None:
            yield Problem(field, given="switched on", needed=f"the package {package}, which is not installed", fix=fix)
    used = {
        **{name: tracker.package is not None for name, tracker in trackers.items()},
        "prometheus": with_port,
        "muon": muon,
        "te": fused or moments or fused_here(recipe, architecture),
        **dict.fromkeys(rollout.kind.extras(rollout) if rollout else (), True),
    }
    again = recipe.train.recomputed.modules & COMPILED
    if again and device_here(recipe) == "cuda" and (missing := missing_to_compile()):
        given = f"{', '.join(sorted(again))}, and this machine lacks {'; '.join(missing)}"
        compiled = "a C++ compiler, ninja and Python's headers on every node: Megatron compiles a function for them"
        yield Problem("train.recompute.modules", given, compiled, fix="install them, or recompute: full")
    for finding in package_findings(extras=[extra for extra, is_used in used.items() if is_used]):
        if finding.state == "wrong":
            where, working = f"package {finding.part}", "a version that megagrpo works with"
            yield Problem(where, given=finding.found, needed=working, fix=finding.remedy)


def fused_here(recipe: AnyRecipe, architecture: Architecture | None) -> bool:
    """Returns whether training ranks on this machine have Transformer Engine's layers."""
    if find_spec("transformer_engine") is None or (device := device_here(recipe)) == "cpu":
        return False
    if recipe.train.layer_spec != "auto" or architecture is None:
        return recipe.train.layer_spec == "transformer_engine"
    import torch

    from megagrpo.megatron.config import layer_spec  # imports megatron: seconds

    dtype = getattr(torch, dtype_name(recipe, device))
    return layer_spec(architecture, recipe.train, dtype, device) == "transformer_engine"


def _device(recipe: AnyRecipe, plan_only: bool) -> str:
    """Returns cuda or cpu. A plan of device auto gets cuda: it may be for a cluster with GPUs."""
    return "cuda" if plan_only and recipe.cluster.device == "auto" else device_here(recipe)


def megatron_problems(recipe: AnyRecipe, architecture: Architecture | None, plan_only: bool) -> list[Problem]:
    """Returns the problems of options in train.megatron that Megatron does not have.

    With an architecture, it adds combinations of options, model and layout that Megatron refuses. Layers are those of
    this machine, or of the plan's GPUs.
    """
    train = train_config(recipe)
    if not train.megatron:
        return []
    import torch

    from megagrpo.megatron.config import option_problems, transformer_config  # imports megatron: seconds

    problems = option_problems(train.megatron)
    if problems or architecture is None:
        return problems
    device = _device(recipe, plan_only)
    try:
        planned: LayerSpec | None = None
        if plan_only and device == "cuda":
            machines = machines_of(recipe, Assumptions())
            fused = Case(recipe, architecture, machines).fused_layers
            planned = "transformer_engine" if fused else "local"
        else:
            fused = fused_here(recipe, architecture)
        if any(auto_problems(recipe, fused)):
            return []  # that is the reason, and is told where the cards are known
        transformer_config(architecture, train, getattr(torch, dtype_name(recipe, device)), device, planned)
    except MegagrpoError as error:
        return list(error.problems)
    return []


def engine_problems(recipe: Recipe, architecture: Architecture | None, plan_only: bool) -> Iterator[Problem]:
    """Yields problems of the engine's settings, of its servers' API key, and of splits that cannot hold the model."""
    rollout, kind = recipe.rollout, recipe.rollout.kind
    yield from kind.problems(rollout, plan_only=plan_only)
    variable = rollout.api_key_variable
    if variable is not None and not plan_only and not os.environ.get(variable):
        given, needed = f"{variable}, which is not set", "the API key of the servers in it"
        yield Problem("rollout.api_key_variable", given, needed, fix=f"export {variable}=...")
    if not kind.splits:
        return  # without torch, which takes a second to import
    device = _device(recipe, plan_only)  # SGLang supports more splits on GPUs
    if architecture:
        layouts = (EngineLayoutConfig(tensor=size) for size in divisors(architecture.heads))
        on = device, rollout.quantization
        sizes = [layout.tensor for layout in layouts if not kind.split_problems(architecture, layout, *on)]
        otherwise = "rollout.quantization: null" if rollout.quantization else "rollout.engine: transformers"
        for problem in kind.split_problems(architecture, rollout.layout, *on):
            fix = f"rollout.layout.tensor of {either(sizes)}, with expert: 1" if sizes else otherwise
            yield replace(problem, where=f"rollout.layout: {problem.where}", fix=fix)
    if device == "cpu" and recipe.cluster.device == "auto" and rollout.quantization:
        needed = "null: SGLang's kernels for float8 need GPUs"
        yield Problem("rollout.quantization", f"{rollout.quantization} on CPUs", needed, fix="quantization: null")
    if device == "cpu" and recipe.cluster.device == "auto" and rollout.layout.expert > 1:
        needed = "1: SGLang's expert parallelism needs GPUs"
        yield Problem("rollout.layout.expert", f"{rollout.layout.expert} on CPUs", needed, fix="expert: 1")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def device_problems(
    recipe: AnyRecipe, architecture: Architecture | None = None, *, engines_too: bool = True
) -> Iterator[Problem]:
    """Yields problems of allocator settings that forbid how weights travel, and of layers that this machine's cards
    cannot run. Yields a problem for too few GPUs here if the run joins no cluster."""
    joins = bool(recipe.cluster.address or os.environ.get("RAY_ADDRESS"))
    if architecture and (not joins or _has_gpu()):  # else the cluster's cards are not known here
        yield from auto_problems(recipe, fused_here(recipe, architecture))
    if (problem := allocator_problem(recipe, os.environ)) and device_here(recipe) == "cuda":
        yield problem
    if recipe.cluster.device != "cuda" or joins:
        return
    import torch  # takes a second; most other checks do without it

    devices, needed = torch.cuda.device_count(), plan_devices(recipe, "cuda", engines_too=engines_too).bundles
    if devices < needed:
        smaller = "a smaller train.layout" if devices else "cluster.device: cpu"
        engines = ""
        if isinstance(recipe, Recipe) and engines_too:
            engines = f" and rollout.engines with placement: {recipe.cluster.placement}"
        given = f"cuda, on a machine with {devices or 'no'} CUDA device{'' if devices == 1 else 's'}"
        fix = f"{smaller}, or a Ray cluster that has them: cluster.address or RAY_ADDRESS"
        yield Problem("cluster.device", given, f"{needed} for train.layout{engines}", fix)


def address_problems(recipe: AnyRecipe, plan_only: bool) -> Iterator[Problem]:
    """Yields a problem if the cluster address cannot drive a run. A plan does not read RAY_ADDRESS."""
    if recipe.cluster.address is not None:
        found = address_problem(recipe.cluster.address, "cluster.address")
    else:
        found = None if plan_only else address_problem(os.environ.get("RAY_ADDRESS", ""), "RAY_ADDRESS")
    if found:
        yield found


def directory_problems(recipe: AnyRecipe) -> Iterator[Problem]:
    """Yields problems of directories that the run cannot make or write, of an address that is no database of MLflow,
    and of passwords in it."""
    of_checkpoints = "checkpoint.directory" if recipe.checkpoint.directory else "track.directory"
    directories = {
        checkpoint_directory(recipe): of_checkpoints,
        export_directory(recipe): "track.directory",
        run_directory(recipe): "track.directory",
    }
    if isinstance(recipe, Recipe) and recipe.weights.directory:
        directories[Path(recipe.weights.directory)] = "weights.directory"
    if recipe.data.cache:
        directories[Path(recipe.data.cache)] = "data.cache"
    found: dict[Path, tuple[Path, str]] = {}
    for directory, field in directories.items():
        existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        found[existing] = directory, field
    for existing, (directory, field) in found.items():
        above = "" if existing == directory else f", and {existing}"
        if not existing.is_dir():
            needed = "a directory, or a place to make one"
            fix = "name another directory, or move that file away"
            yield Problem(field, given=f"{directory}{above} is a file", needed=needed, fix=fix)
        elif not os.access(existing, os.W_OK | os.X_OK):
            needed = "a directory that can be written"
            fix = "name another directory, or let this user write there"
            yield Problem(field, given=f"{directory}{above} is not writable", needed=needed, fix=fix)
    for tracker in trackers_of(recipe).values():
        yield from tracker.problems(recipe)
