"""Models that `megagrpo eval` evaluates: a Hugging Face directory or hub id, any checkpoint, or a running server."""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.checkpoint.store import MANIFEST
from megagrpo.convert.merge_lora import merge_lora
from megagrpo.convert.source import CONFIG, open_source, trainer_state, training_checkpoint
from megagrpo.convert.targets import to_hugging_face
from megagrpo.errors import EngineError, PreflightError, Problem, UnusableCheckpointError
from megagrpo.preflight.model import model_directory, tokenizer_directory
from megagrpo.recipe.defaults import device_here, dtype_name
from megagrpo.recipe.schema import EngineLayoutConfig, Recipe
from megagrpo.rollout.kinds import ENGINES

IDENTIFYING = ("*.safetensors", "*.json", "*.jinja")
OF_SERVER = ("model_path", "weight_version", "load_format")


@dataclass(frozen=True)
class EvaluatedModel(ABC):
    """A model to evaluate. `given`: as the user wrote it."""

    given: str

    @property
    def label(self) -> str:
        """Returns the name of its directory: readable, and different for each place."""
        url = "://" in self.given
        place = self.given.rstrip("/") if url else str(Path(self.given).absolute())
        words = place.partition("://")[2].split("/") if url else Path(place).parts[-2:]
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", "_".join(words)).strip("._-")
        return f"{readable}-{hashlib.blake2b(place.encode(), digest_size=4).hexdigest()}"

    @abstractmethod
    def identity(self, recipe: Recipe) -> Mapping[str, Any]:
        """Returns values that change with the weights or the tokenizer. Raises MegagrpoError if there is no model."""

    @abstractmethod
    def tokenizer_directory(self, recipe: Recipe) -> Path:
        """Returns the tokenizer's directory. Raises MegagrpoError if there is none."""

    @abstractmethod
    def recipe(self, recipe: Recipe, directory: Path) -> Recipe:
        """Returns the recipe with engines that sample from the model. Converts a checkpoint first, into `directory`."""


@dataclass(frozen=True)
class HuggingFaceModel(EvaluatedModel):
    """A directory, or an id of the hub: at model.revision if it is the recipe's model, else the newest."""

    def identity(self, recipe: Recipe) -> Mapping[str, Any]:
        return model_identity(self.given, self._directory(recipe))

    def tokenizer_directory(self, recipe: Recipe) -> Path:
        directory = self._directory(recipe)
        return _tokenizer(_with_model(recipe, str(directory)), directory)

    def recipe(self, recipe: Recipe, directory: Path) -> Recipe:
        return _with_model(recipe, str(self._directory(recipe)))

    def _directory(self, recipe: Recipe) -> Path:
        given = recipe if self.given == recipe.model.path else _with_model(recipe, self.given)
        return model_directory(given, plan_only=False)


@dataclass(frozen=True)
class CheckpointModel(EvaluatedModel):
    """A training checkpoint of megagrpo, or a Megatron-LM one."""

    path: Path
    model: Path
    """The Hugging Face model with its config and tokenizer."""
    adapters: bool
    """True if the checkpoint holds adapters of `model`."""

    def identity(self, recipe: Recipe) -> Mapping[str, Any]:
        manifest = self.path / MANIFEST
        text = manifest.read_bytes() if manifest.is_file() else b""
        digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        return {"digest": digest} | model_identity(str(self.path), self.path)

    def tokenizer_directory(self, recipe: Recipe) -> Path:
        return _tokenizer(recipe, self.model)

    def recipe(self, recipe: Recipe, directory: Path) -> Recipe:
        converted, dtype = directory / "model", dtype_name(recipe, device_here(recipe))
        if not converted.exists():
            if self.adapters:
                merge_lora(self.model, self.path, converted, dtype=dtype)
            else:
                to_hugging_face(self.path, converted, model=self.model, dtype=dtype)
        return _with_model(recipe, str(converted))


@dataclass(frozen=True)
class ServedModel(EvaluatedModel):
    """A running server. Its tokenizer is that of the recipe's model. `info`: its answer about its model."""

    engine: str
    info: Mapping[str, Any]
    api_key_variable: str | None = None

    def identity(self, recipe: Recipe) -> Mapping[str, Any]:
        return {"url": self.given.rstrip("/")} | {key: self.info.get(key) for key in OF_SERVER}

    def tokenizer_directory(self, recipe: Recipe) -> Path:
        return _tokenizer(recipe, model_directory(recipe, plan_only=False))

    def recipe(self, recipe: Recipe, directory: Path) -> Recipe:
        rollout, sections = recipe.rollout, {kind.settings for kind in ENGINES.values() if kind.settings}
        engine = {
            "engine": self.engine,
            "engines": 1,
            "urls": [self.given],
            "api_key_variable": self.api_key_variable,
            "layout": EngineLayoutConfig(),
            "quantization": None,
            **{section: type(rollout).model_fields[section].default for section in sections},
        }
        device = recipe.cluster.device if recipe.reward.models else "cpu"  # no GPU is needed here
        cluster = recipe.cluster.model_copy(update={"device": device, "placement": "colocated"})
        return recipe.model_copy(
            update={"rollout": rollout.model_copy(update=engine), "cluster": cluster, "deterministic": False}
        )


def evaluated_model(given: str, recipe: Recipe, api_key_variable: str | None = None) -> EvaluatedModel:
    """Returns the model at this path, hub id or URL. Raises MegagrpoError if nothing there can be evaluated."""
    if given.startswith(("http://", "https://")):
        variable = api_key_variable or recipe.rollout.api_key_variable
        key = os.environ.get(variable, "") if variable else ""
        name, info = _served_model(given, key)
        return ServedModel(given, name, info, variable)
    if not recipe.rollout.kind.started_by_us:
        loading = [name for name, kind in ENGINES.items() if kind.started_by_us]
        needed = f"{' or '.join(loading)}: engines that load {given}"
        fix = f"add rollout.engine={loading[-1]} to the command"
        raise PreflightError(Problem("rollout.engine", recipe.rollout.engine, needed, fix))
    path = Path(given)
    if not path.is_dir() or (path / CONFIG).is_file():
        return HuggingFaceModel(given)
    saved = path / "checkpoints" if (path / "checkpoints").is_dir() else path  # of a run's directory
    training = training_checkpoint(saved)
    if training is None:
        return CheckpointModel(given, saved, open_source(saved).model_directory, adapters=False)
    of_run = trainer_state(training).recipe
    if (of_run.get("train") or {}).get("lora") is None:
        return CheckpointModel(given, training, open_source(training).model_directory, adapters=False)
    base = Path(str((of_run.get("model") or {}).get("path", "")))
    if not (base / CONFIG).is_file():
        needed = "the model whose adapters it holds, where it was in training"
        raise UnusableCheckpointError(Problem(str(training), f"adapters of {base}, which is not there", needed))
    return CheckpointModel(given, training, base, adapters=True)


def _with_model(recipe: Recipe, path: str) -> Recipe:
    model = recipe.model.model_copy(update={"path": path, "revision": None})
    return recipe.model_copy(update={"model": model})


def _tokenizer(recipe: Recipe, model: Path) -> Path:
    directory = tokenizer_directory(recipe, model)
    if directory is None:
        raise PreflightError(Problem("model.tokenizer", "none", "a tokenizer"))
    return directory


def model_identity(given: str, directory: Path) -> dict[str, Any]:
    """Returns values that change with the model that `given` names. directory: the model's; for a hub id a folder of
    the cache, named after its commit."""
    if not Path(given).is_dir():
        return {"path": given, "revision": directory.name}
    paths = sorted({path for pattern in IDENTIFYING for path in directory.glob(pattern)})
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
    return {"path": str(directory.absolute()), "files": files}


def _served_model(url: str, key: str) -> tuple[str, Mapping[str, Any]]:
    """Returns the name of the engine that answers at a URL, and what it says about its model. Raises EngineError."""
    problems: list[Problem] = []
    for name, kind in ENGINES.items():
        if kind.started_by_us:
            continue
        try:
            return name, kind.served_model(url, key)
        except EngineError as error:
            problems += error.problems
    given, needed = ("; ".join(getattr(problem, part) for problem in problems) for part in ("given", "needed"))
    raise EngineError(Problem(url, given, needed.replace("; ", " or "), problems[0].fix))
