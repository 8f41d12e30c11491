"""Directories of reward.models, checked without loading them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megagrpo.errors import ModelError, PreflightError, Problem
from megagrpo.preflight.model import CONFIG_FILES, TOKENIZER_FILES, local_directory, template_in
from megagrpo.recipe.schema import ClassifierConfig, GenerativeConfig, Recipe
from megagrpo.rollout.sglang.arguments import sglang_problems
from megagrpo.weights.families.reading import read_json
from megagrpo.weights.sides.checkpoint import weight_files

HEAD = "ForSequenceClassification"


def reward_model_directories(recipe: Recipe, plan_only: bool) -> dict[str, Path]:
    """Returns the directories of reward.models on this machine, by name. A plan skips those of the hub.

    Raises PreflightError with all their problems, ModelError if the hub does not have one.
    """
    found: dict[str, Path] = {}
    problems: list[Problem] = []
    for name, config in recipe.reward.models.items():
        where = f"reward.models.{name}"
        if plan_only and not Path(config.path).is_dir():
            continue
        directory = local_directory(
            config.path, None, (*CONFIG_FILES, *TOKENIZER_FILES, "*.safetensors"), f"{where}.path"
        )
        found[name] = directory
        try:
            read = read_json(directory / "config.json")
            weight_files(directory)
        except ModelError as error:
            problems += error.problems
            continue
        problems += _kind_problems(config, read, where)
        problems += _template_problems(config, directory, where)
        problems += _label_problems(recipe, name, read)
    if problems:
        raise PreflightError(problems)
    return found


def server_problems(recipe: Recipe, plan_only: bool) -> Iterator[Problem]:
    """Yields the problems of the arguments of generative models' servers, or of SGLang here."""
    for name, config in recipe.reward.models.items():
        if not isinstance(config, GenerativeConfig):
            continue
        for problem in sglang_problems(config.sglang, plan_only=plan_only):
            where = problem.where.replace("rollout.sglang", f"reward.models.{name}.sglang")
            where = where.replace("rollout.engine", f"reward.models.{name}.kind")
            fix = problem.fix.replace("rollout.sglang", f"reward.models.{name}.sglang")
            yield replace(problem, where=where, fix=fix)


def _kind_problems(config: ClassifierConfig | GenerativeConfig, read: Mapping[str, Any], where: str) -> list[Problem]:
    architectures = [str(name) for name in read.get("architectures") or ()]
    is_classifier = any(name.endswith(HEAD) for name in architectures)
    if not architectures or is_classifier == (config.kind == "classifier"):
        return []
    given = f"{config.path}, whose config.json names {', '.join(architectures)}"
    if is_classifier:
        fix = "kind: classifier, asked by the function reward_model"
        return [Problem(f"{where}.kind", given, "a model that writes text", fix)]
    fix = "kind: generative, asked by the function judge; or a reward model that was trained as one"
    return [Problem(f"{where}.kind", given, f"a model with a trained head for classification ({HEAD})", fix)]


def _template_problems(config: ClassifierConfig | GenerativeConfig, directory: Path, where: str) -> list[Problem]:
    needed = "a Jinja template that turns messages into text"
    if isinstance(config, ClassifierConfig) and config.chat_template is not None:
        if Path(config.chat_template).is_file():
            return []
        return [Problem(f"{where}.chat_template", f"{config.chat_template}, which is no file", needed)]
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        try:
            text = (directory / name).read_text(encoding="utf-8")
            if text if name.endswith(".jinja") else template_in(json.loads(text)):
                return []
        except (OSError, ValueError, RecursionError):
            continue
    fix = f"set {where}.chat_template to a Jinja file" if config.kind == "classifier" else "a model that chats"
    return [Problem(str(directory), "a tokenizer without a chat template", needed, fix)]


def _label_problems(recipe: Recipe, name: str, read: Mapping[str, Any]) -> list[Problem]:
    """Returns a problem for each function whose label the model lacks, or that names none of several labels."""
    named = read.get("id2label")
    labels = [str(label) for label in named.values()] if isinstance(named, dict) else ["LABEL_0", "LABEL_1"]
    problems = []
    for field, entries in recipe.reward.lists().items():
        for index, entry in enumerate(entries):
            label = entry.arguments.get("label")
            wanted = entry.function == "reward_model" and entry.arguments.get("model") == name
            known = (label is None and len(labels) == 1) or label in labels or label in range(len(labels))
            if wanted and not known:
                where = f"{field}[{index}].arguments.label"
                needed = f"one of {', '.join(labels)}, or its number"
                problems.append(Problem(where, "null" if label is None else str(label), needed, f"label: {labels[-1]}"))
    return problems
