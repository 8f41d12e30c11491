"""Checks of this machine before a run: packages, devices, an address, engines, directories that can be written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from megagrpo.doctor import missing_to_compile, package_findings
from megagrpo.errors import MegagrpoError, Problem, brief
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
from megagrpo.recipe.schema.reward import ServedModelConfig
from megagrpo.recipe.schema.rollout import RolloutConfig
from megagrpo.recipe.schema.train import COMPILED
from megagrpo.section import Rules, broken, problem
from megagrpo.track.trackers import trackers_of
from megagrpo.weights.blocks import family_problems
from megagrpo.weights.families.architecture import Architecture

TE: LayerSpec = "transformer_engine"
"""The layers, and the name of their package."""
MUON = (
    "pip install megagrpo[muon]; on Python 3.11: pip install absl-py, then "
    "pip install --no-deps --ignore-requires-python 'emerging_optimizers>=0.3,<0.4'"
)

WITHOUT_GPUS: Rules[RolloutConfig] = {
    "float8_without_gpus": lambda rollout: rollout.multiplies_in_float8,
    "experts_without_gpus": lambda rollout: rollout.kind.experts_need_gpus and rollout.layout.expert > 1,
}


def package_problems(recipe: AnyRecipe, architecture: Architecture | None = None) -> Iterator[Problem]:
    """Yields problems of missing packages that the recipe switches on, and of wrong versions of all that the run uses.

    A missing SGLang is reported by `engine_problems`: the recipe may name another environment that has it.
    """
    train, pip = recipe.train, "pip install megagrpo[{}]"
    rows: list[tuple[object, str, str, str, str]] = [
        *((True, f"track.{name}", one.package, name, pip) for name, one in trackers_of(recipe).items() if one.package),
        (recipe.track.prometheus_port, "track.prometheus_port", "prometheus_client", "prometheus", pip),
        (train.optimizer.kind == "muon", "train.optimizer.kind", "emerging_optimizers", "muon", MUON),
        (train.optimizer.moment_dtype != "float32", "train.optimizer.moment_dtype", TE, "te", f"{pip}, or remove it"),
        (train.layer_spec == TE, "train.layer_spec", TE, "te", f"{pip}, or layer_spec: auto"),
    ]
    extras = {"te"} if fused_here(recipe, architecture) else set()
    extras |= {*recipe.rollout.kind.extras(recipe.rollout)} if isinstance(recipe, Recipe) else set()
    for switched_on, field, package, extra, fix in rows:
        if switched_on:
            extras.add(extra)
            if find_spec(package) is None:
                yield problem("package_of_a_setting", field=field, package=package, fix=fix.format(extra))
    modules = recipe.train.recomputed.modules & COMPILED
    if modules and device_here(recipe) == "cuda" and (missing := missing_to_compile()):
        yield problem("modules_to_compile", modules=sorted(modules), missing="; ".join(missing))
    for finding in package_findings(extras=sorted(extras)):
        if finding.state == "wrong":
            yield problem("version_of_a_package", **vars(finding))


def fused_here(recipe: AnyRecipe, architecture: Architecture | None) -> bool:
    """Returns whether training ranks on this machine have Transformer Engine's layers."""
    if find_spec(TE) is None or (device := device_here(recipe)) == "cpu":
        return False
    if recipe.train.layer_spec != "auto" or architecture is None:
        return recipe.train.layer_spec == TE
    import torch

    from megagrpo.megatron.config import layer_spec  # imports megatron: seconds

    dtype = getattr(torch, dtype_name(recipe, device))
    return layer_spec(architecture, recipe.train, dtype, device) == TE


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
    planned: LayerSpec | None = None
    try:
        if plan_only and device == "cuda":
            fused = Case(recipe, architecture, machines_of(recipe, Assumptions())).fused_layers
            planned = TE if fused else "local"
        else:
            fused = fused_here(recipe, architecture)
        if any(auto_problems(recipe, fused)):
            return []  # that is the reason, and is told where the cards are known
        transformer_config(architecture, train, getattr(torch, dtype_name(recipe, device)), device, planned)
    except MegagrpoError as error:
        return list(error.problems)
    return []


def engine_problems(recipe: Recipe, architecture: Architecture | None, plan_only: bool) -> Iterator[Problem]:
    """Yields problems of settings of engines, and of models on servers beside them.

    Also those of the API key of servers, and of splits that cannot hold the model.
    """
    rollout, kind = recipe.rollout, recipe.rollout.kind
    yield from kind.problems(rollout, "rollout", "engine", plan_only=plan_only)
    for where, model in recipe.models_beside.items():
        if isinstance(model, ServedModelConfig):
            yield from model.settings.engine_kind.problems(model, where, "engine", plan_only=plan_only)
    variable = rollout.api_key_variable
    if variable is not None and not plan_only and not os.environ.get(variable):
        yield problem("key_of_servers", variable=variable)
    if not kind.splits:  # without torch, which takes a second to import
        yield from family_problems(architecture) if architecture and rollout.quantization else ()
        return
    device, side = _device(recipe, plan_only), kind.side  # on GPUs, more splits may be supported
    if architecture:
        yield from kind.context_problems(architecture, rollout)
        heads = next(size for axis, _, size in architecture.divided() if axis == "tensor")
        layouts = (EngineLayoutConfig(tensor=size) for size in divisors(heads))
        on = device, rollout.quantization if kind.quantizes else None  # a rule of recipes refuses it
        sizes = [layout.tensor for layout in layouts if not side.split_problems(architecture, layout, *on)]
        otherwise = "rollout.quantization: null" if rollout.quantization else "rollout.engine: transformers"
        for fault in side.split_problems(architecture, rollout.layout, *on):
            fix = f"rollout.layout.tensor of {either(sizes)}, with expert: 1" if sizes else otherwise
            yield replace(fault, where=f"rollout.layout: {fault.where}", fix=fault.fix or fix)
    if device == "cpu" and recipe.cluster.device == "auto":
        yield from broken(WITHOUT_GPUS, rollout)


def device_problems(
    recipe: AnyRecipe, architecture: Architecture | None = None, *, engines_too: bool = True
) -> Iterator[Problem]:
    """Yields problems of allocator settings that forbid how weights travel, and of layers that this machine's cards
    cannot run. Yields a problem for too few GPUs here if the run joins no cluster."""
    if architecture and (not joins_cluster(recipe) or _gpus()):  # else the cluster's cards are not known here
        yield from auto_problems(recipe, fused_here(recipe, architecture))
    if (of_allocator := allocator_problem(recipe, os.environ)) and device_here(recipe) == "cuda":
        yield of_allocator
    if recipe.cluster.device == "cuda" and not joins_cluster(recipe):
        needed, purpose = plan_devices(recipe, "cuda", engines_too=engines_too).bundles, "train.layout"
        if isinstance(recipe, Recipe) and engines_too:
            purpose += f" and rollout.engines with placement: {recipe.cluster.placement}"
        yield from gpu_problems(needed, purpose, "a smaller train.layout")


def joins_cluster(recipe: AnyRecipe) -> bool:
    return (recipe.cluster.address or os.environ.get("RAY_ADDRESS") or "local") != "local"


def gpu_problems(needed: int, purpose: str, smaller: str) -> Iterator[Problem]:
    """Yields a problem if this machine has too few GPUs; `smaller` is the fix where it has some."""
    if (devices := _gpus()) < needed:
        given = f"{devices or 'no'} CUDA device{'' if devices == 1 else 's'}"
        way = smaller if devices else "cluster.device: cpu"
        yield problem("too_few_gpus", devices=given, needed=needed, purpose=purpose, way=way)


def _gpus() -> int:
    import torch  # takes a second; most other checks do without it

    return torch.cuda.device_count()


def address_problems(recipe: AnyRecipe, plan_only: bool) -> Iterator[Problem]:
    """Yields a problem if the cluster address cannot drive a run. A plan does not read RAY_ADDRESS."""
    address, where = recipe.cluster.address, "cluster.address"
    if address is None:
        address, where = "" if plan_only else os.environ.get("RAY_ADDRESS", ""), "RAY_ADDRESS"
    if wrong := address_problem(address, where):
        yield wrong


def address_problem(address: str, where: str) -> Problem | None:
    """Returns the problem of an address that is no node's, or that has a scheme of Ray's client or job servers."""
    scheme, of_server, rest = address.partition("://")
    if not of_server:
        port = re.fullmatch(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", address, re.ASCII)
        if address in ("", "auto", "local") or (port and 0 < int(port[1]) < 2**16):
            return None
        return problem("address_of_no_node", field=where, address=brief(address))
    host = rest.partition("/")[0].rpartition(":")[0] or "HOST"
    return problem("address_of_a_ray_server", field=where, scheme=scheme, host=host)


def directory_problems(recipe: AnyRecipe) -> Iterator[Problem]:
    """Yields problems of directories that the run cannot make or write, and of the trackers' settings."""
    directories = {
        checkpoint_directory(recipe): "checkpoint.directory" if recipe.checkpoint.directory else "track.directory",
        export_directory(recipe): "track.directory",
        run_directory(recipe): "track.directory",
    }
    if isinstance(recipe, Recipe) and recipe.weights.directory:
        directories[Path(recipe.weights.directory)] = "weights.directory"
    if recipe.data.cache:
        directories[Path(recipe.data.cache)] = "data.cache"
    by_existing = {
        next(path for path in (directory, *directory.absolute().parents) if path.exists()): (directory, field)
        for directory, field in directories.items()
    }
    for existing, (directory, field) in by_existing.items():
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            continue
        above = "" if existing == directory else f", and {existing}"
        rule = "directory_not_writable" if existing.is_dir() else "directory_below_a_file"
        yield problem(rule, field=field, directory=directory, above=above)
    for name, tracker in trackers_of(recipe).items():
        yield from tracker.problems(getattr(recipe.track, name), recipe)
