"""Directories of a run's models and tokenizers, checked without loading them (no torch, no transformers)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from megagrpo.data.locations import near_file
from megagrpo.errors import MegagrpoError, ModelError, PreflightError, Problem, brief, first_line, path_problem
from megagrpo.plan.parameters import known_models
from megagrpo.recipe.model_rules import critic_problems
from megagrpo.recipe.problems import nearest
from megagrpo.recipe.schema import AnyRecipe, ClassifierConfig, Recipe
from megagrpo.recipe.schema.reward import GenerativeConfig
from megagrpo.section import problem
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture, critic_of
from megagrpo.weights.families.reading import read_json
from megagrpo.weights.sides.checkpoint import manifests, weight_files

HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "chat_template.json",
)
HEAD = "ForSequenceClassification"
CONFIG_FILES = ("config.json", "generation_config.json", "*.safetensors.index.json")
MADE_BY = {
    ".cache/adder": "adder", "runs/adder_sft_cpu": "demo", "runs/adder_sft_moe": "demo-moe",
    ".cache/agents": "agents", "runs/agents_sft_cpu": "agents", ".cache/puzzles": "puzzles",
    "runs/puzzles_sft_cpu": "puzzles", ".cache/smollm2": "smollm2",
}  # fmt: skip
"""Models of the shipped recipes, and the make target of each."""
PROBLEMS_OF_A_PART = 10
Result = TypeVar("Result")
GIVEN_TO_TEMPLATES = {
    "raise_exception",
    "strftime_now",
    "namespace",
    "range",
    "dict",
    "tools",
    "documents",
    "bos_token",
}
RENDERER_SECONDS = 2
RENDERER = f"""
import datetime, json, resource, sys
from jinja2.sandbox import ImmutableSandboxedEnvironment
given = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, ({RENDERER_SECONDS}, {RENDERER_SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
made.filters["tojson"] = lambda x, ensure_ascii=False, **options: json.dumps(x, ensure_ascii=ensure_ascii, **options)
class Refused(Exception): pass
def refuse(message): raise Refused(message)
made.globals |= {{"raise_exception": refuse, "strftime_now": datetime.datetime.now().strftime}}
values = {{f"{{name}}_token": "" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")}} | given["arguments"]
values |= {{"tools": None, "documents": None, "add_generation_prompt": True}}
question, found = {{"role": "user", "content": "1+1="}}, []
for messages in ([question], [{{"role": "system", "content": "Add."}}, question]):
    try:
        if made.from_string(given["template"]).render(messages=messages, **values).strip():
            sys.exit(0)
        found.append("renders as nothing")
    except Refused:
        sys.exit(0)
    except MemoryError:
        raise
    except Exception as error:
        found.append(f"ends in {{type(error).__name__}}: {{error}}"[:300])
print(json.dumps("a question " + found[0]))
"""
# Tags that transformers adds to Jinja. They have no effect when a prompt is rendered.
GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def model_directory(recipe: AnyRecipe, plan_only: bool) -> Path:
    """Returns the directory of model.path on this machine."""
    return directory_on_ranks(recipe.model.path, "model.path", plan_only, recipe.model.revision)


def tokenizer_directory(recipe: AnyRecipe, model: Path | None) -> Path | None:
    """Returns the directory of model.tokenizer on this machine; by default the model's."""
    if recipe.model.tokenizer is None:
        return model
    return local_directory(recipe.model.tokenizer, None, TOKENIZER_FILES, "model.tokenizer")


def critic_directory(recipe: Recipe, policy: Architecture | None, plan_only: bool) -> Path | None:
    """Returns the directory of the critic's own model on this machine; None if the recipe names none.

    Raises MegagrpoError if it does not fit the layout, or does not know all of the policy's tokens.
    """
    critic = recipe.algorithm.critic
    if critic is None or critic.path is None:
        return None
    directory = directory_on_ranks(critic.path, "algorithm.critic.path", plan_only)
    architecture = critic_of(read_architecture(directory))
    if not plan_only or Path(critic.path).is_dir():
        manifests(directory, architecture)
    problems = [
        replace(fault, given=f"{fault.given} (the critic's)") for fault in critic_problems(recipe, architecture)
    ]
    if policy and architecture.vocab < policy.vocab:
        problems.append(problem("vocabulary_of_the_critic", critic=architecture, policy=policy))
    if problems:
        raise PreflightError(problems)
    return directory


def directory_on_ranks(path: str, where: str, plan_only: bool, revision: str | None = None) -> Path:
    """Returns the directory of a model on the training ranks. A plan skips the safetensors files of the hub, and finds
    published models in the local cache, or in megagrpo's configs."""
    if plan_only and revision is None and not Path(path).is_dir() and (known := known_models().get(path)):
        return cached_directory(path) or known
    patterns = CONFIG_FILES + TOKENIZER_FILES + (() if plan_only else ("*.safetensors",))
    return local_directory(path, revision, patterns, where)


def cached_directory(path: str) -> Path | None:
    """Returns the directory of the hub id `path` in the local cache, if its config.json is there. Asks no server."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if not (Path(HF_HUB_CACHE) / f"models--{path.replace('/', '--')}").is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache  # imports all that downloads: a tenth of a second

    config = try_to_load_from_cache(path, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def local_directory(path: str, revision: str | None, patterns: tuple[str, ...], field: str) -> Path:
    """Returns `path` if it is a directory; else the files of that hub id that match `patterns`, cached or downloaded.

    HF_HUB_OFFLINE is honoured. `field` is the recipe's, for messages. Raises ModelError if there is neither.
    """
    directory = Path(path)
    if not path:
        raise ModelError(problem("no_model", field=field))
    if directory.is_dir():
        if revision is not None:
            raise ModelError(problem("revision_of_a_directory", revision=revision, path=path))
        return directory
    if not HUB_ID.fullmatch(path):
        raise ModelError(problem("no_model_directory", field=field, path=path, near=_near(directory)))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=list(patterns)))
    except (OSError, HFValidationError, IncompleteSnapshotError) as error:
        model, reason = f"{path} at {revision}" if revision else path, f"{type(error).__name__}: {first_line(error)}"
        fix = _near(directory) or "check the name, the network, HF_HUB_OFFLINE and HF_TOKEN"
        raise ModelError(problem("model_not_on_the_hub", field=field, model=model, reason=reason, fix=fix)) from None


def tokenizer_problems(directory: Path, recipe: AnyRecipe, vocabulary: int | None) -> list[Problem]:
    """Returns the problems of the tokenizer in `directory`, or of the template file that replaces its own.

    vocabulary: rows of the model's embedding; None if unknown.
    """
    if not directory.is_dir():
        return []
    files = [path for pattern in TOKENIZER_FILES for path in directory.glob(pattern)]
    if blocking := [path for path in files if path.exists() and not (path.is_file() or path.is_dir())]:
        return [problem("tokenizer_file_that_blocks", path=path) for path in blocking]
    problems: list[Problem] = []
    for path in (directory / "tokenizer_config.json", directory / "special_tokens_map.json"):
        longest = (attempt(problems, read_json, path) or {}).get("model_max_length") if path.is_file() else None
        if not isinstance(longest, int | float | None):
            problems.append(problem("model_max_length", path=path, longest=brief(longest)))
    if problems:
        return problems
    problems += _vocabulary_problems(directory, vocabulary)
    problems += attempt(problems, template_problems, directory, recipe) or []
    generation = directory / "generation_config.json"
    ends = (attempt(problems, read_json, generation) or {}).get("eos_token_id") if generation.exists() else None
    limit = vocabulary or 2**31
    for token in ends if isinstance(ends, list) else () if ends is None else (ends,):
        if type(token) is not int or not 0 <= token < limit:
            return [*problems, problem("eos_token_id", path=generation, token=brief(token), limit=limit)]
    return problems


def attempt(problems: list[Problem], find: Callable[..., Result], *given: Any) -> Result | None:
    """Returns the result of `find(*given)`; or None, and appends the first ten of the problems that it raises, or that
    of a path which this machine cannot have."""
    try:
        return find(*given)
    except MegagrpoError as error:
        problems += error.problems[:PROBLEMS_OF_A_PART]
        if (more := len(error.problems) - PROBLEMS_OF_A_PART) > 0:
            problems.append(Problem(f"and {more} more problems like the last"))
    except OSError as error:
        if (named := path_problem(error)) is None:
            raise
        problems.append(named)
    return None


def _near(directory: Path) -> str:
    near = near_file(directory)
    if near and near.is_dir():
        return f"did you mean {near}?"
    for place, target in MADE_BY.items():
        if directory.absolute().is_relative_to(Path(place).absolute()):
            return f"make {target} makes it"
    return f"train {directory.parent.name}, the run that exports it" if directory.name == "hugging_face" else ""


def has_tokenizer(directory: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    return any((directory / name).is_file() for name in names)


def _vocabulary_problems(directory: Path, vocabulary: int | None) -> list[Problem]:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return [] if has_tokenizer(directory) else [problem("no_tokenizer", directory=directory)]
    from tokenizers import Tokenizer

    try:
        tokens = Tokenizer.from_file(str(path)).get_vocab()
    except Exception as error:  # noqa: BLE001  (what the Rust library raises)
        return [problem("unreadable_tokenizer", path=path, reason=first_line(error))]
    largest = max(tokens.values(), default=-1)
    if vocabulary is not None and largest >= vocabulary:
        token = repr(next(token for token, number in tokens.items() if number == largest))
        return [problem("token_of_no_vocabulary", path=path, token=token, id=largest, vocabulary=vocabulary)]
    return []


def template_file_problems(path: str, recipe: AnyRecipe) -> list[Problem]:
    """Returns the problems of a template file that replaces the tokenizer's own, or of its arguments in the recipe."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            fault, fix = f"{path} is a directory, a device or a pipe", ""
        else:
            return _syntax_problems(Path(path).read_text(encoding="utf-8"), "model.chat_template", recipe)
    except OSError as error:
        fault, fix = f"{path}: {error.strerror}", ""
    except UnicodeDecodeError:
        fault, fix = f"{path} is not UTF-8", "save it as UTF-8"
    return [problem("chat_template", where="model.chat_template", fault=fault, fix=fix)]


def template_problems(directory: Path, recipe: AnyRecipe) -> list[Problem]:
    """Returns the problems of the chat template in use. Raises ModelError."""
    if recipe.model.chat_template is not None:
        return template_file_problems(recipe.model.chat_template, recipe)
    if template := own_template(directory):
        return _syntax_problems(template[1], template[0], recipe)
    fix = "set model.chat_template to a Jinja file, or use the tokenizer of the instruction-tuned model"
    return [problem("no_chat_template", directory=directory, fix=fix)]


def own_template(directory: Path) -> tuple[str, str] | None:
    """Returns (file, template) of a tokenizer's directory: the template named `default`, if a file has several; None if
    it has none. Raises ModelError."""
    for path in (directory / name for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")):
        try:
            text = path.read_text(encoding="utf-8")
            read: Any = {"chat_template": text} if path.suffix == ".jinja" else json.loads(text)
        except OSError:
            continue
        except (ValueError, RecursionError) as error:
            raise ModelError(Problem(str(path), first_line(error), "JSON in UTF-8")) from None
        template = read.get("chat_template") if isinstance(read, dict) else None
        if isinstance(template, list):
            template = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}.get(
                "default"
            )
        if template and isinstance(template, str):
            return str(path), template
    return None


def _syntax_problems(template: str, where: str, recipe: AnyRecipe) -> list[Problem]:
    """Returns the problems of a template's syntax; else of arguments in the recipe that it does not read, or that each
    rendering sets; else of the rendering of a question."""
    from jinja2 import Environment, TemplateSyntaxError, nodes

    plain = GENERATION_TAG.sub("", template)
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateSyntaxError as error:
        return [problem("jinja", where=where, fault=f"line {error.lineno}: {error.message}")]
    except RecursionError:
        return [problem("jinja", where=where, fault="expressions nested too deeply")]
    # jinja2.meta would compute what is constant, such as 9 ** 9 ** 9.
    names = list(parsed.find_all(nodes.Name))
    read = {name.name for name in names if name.ctx == "load"} - {"messages", "add_generation_prompt"}
    of_template = read - GIVEN_TO_TEMPLATES - {name.name for name in names if name.ctx != "load"}
    arguments = sorted(of_template) or ["no argument"]
    given = {"data.chat_template_arguments": recipe.data.chat_template_arguments}
    if isinstance(recipe, Recipe) and recipe.agent:
        given["agent.template_arguments"] = recipe.agent.template_arguments
    if unread := [
        problem("argument_of_no_template", field=field, name=name, value=brief(value), arguments=arguments, fix=fix)
        for field, values in given.items()
        for name, value in values.items()
        if name not in read
        for near in [nearest(name, read)]
        for fix in [f"did you mean `{near}`?" if near else "remove it"]
    ]:
        return unread
    failure = _rendering(json.dumps({"template": plain, "arguments": recipe.data.chat_template_arguments}))
    fix = "correct it, or set model.chat_template to another"
    return [problem("chat_template", where=where, fault=failure, fix=fix)] if failure else []


@lru_cache
def _rendering(question: str) -> str:
    """Returns a template's failure to render a question, alone or after a system message; empty if it renders. It fails
    if it has no end, takes all memory, raises, or renders nothing.

    A template that refuses the question (raise_exception) may take those of the data, which a run renders at its start.
    """
    command, limit = [sys.executable, "-I", "-c", RENDERER], 60 * RENDERER_SECONDS
    try:
        done = subprocess.run(command, input=question.encode(), capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"a question takes more than {limit} s to render"
    if done.returncode:
        return f"a question takes more than {RENDERER_SECONDS} s or 2 GB to render"
    return str(json.loads(done.stdout)) if done.stdout else ""


# --- models on devices of their own ---------------------------------------------------------------------------------


def directories_beside(recipe: Recipe, plan_only: bool) -> dict[str, Path]:
    """Returns the directories of models_beside on this machine, by their paths in the recipe. A plan skips those of the
    hub.

    Raises PreflightError with all their problems, ModelError if the hub does not have one.
    """
    patterns = (*CONFIG_FILES, *TOKENIZER_FILES, "*.safetensors")
    directories = {
        where: local_directory(model.path, None, patterns, f"{where}.path")
        for where, model in recipe.models_beside.items()
        if not plan_only or Path(model.path).is_dir()
    }
    problems: list[Problem] = []
    for where, directory in directories.items():
        try:
            weight_files(directory)
            for fault in _reward_model_problems(recipe, where, directory):
                problems.append(fault)  # also the problems found before an exception
        except ModelError as error:
            problems += error.problems
    if problems:
        raise PreflightError(problems)
    return directories


def _reward_model_problems(recipe: Recipe, where: str, directory: Path) -> Iterator[Problem]:
    """Yields a reward model's problems: its kind, its chat template, and functions that name no label of it, or none of
    several. None of a teacher. Raises ModelError."""
    config = recipe.models_beside[where]
    if not isinstance(config, ClassifierConfig | GenerativeConfig):
        return
    read = read_json(directory / "config.json")
    architectures = [str(architecture) for architecture in read.get("architectures") or ()]
    has_head = any(architecture.endswith(HEAD) for architecture in architectures)
    if architectures and has_head != (config.kind == "classifier"):
        rule = "classifier_as_generative" if has_head else "generative_as_classifier"
        yield problem(rule, where=where, config=config, architectures=architectures)
    if isinstance(config, ClassifierConfig) and config.chat_template is not None:
        if not Path(config.chat_template).is_file():
            fault = f"{config.chat_template}, which is no file"
            yield problem("chat_template", where=f"{where}.chat_template", fault=fault, fix="")
    elif not own_template(directory):
        fix = f"set {where}.chat_template to a Jinja file" if config.kind == "classifier" else "a model that chats"
        yield problem("no_chat_template", directory=directory, fix=fix)
    named = read.get("id2label")
    labels = [str(label) for label in named.values()] if isinstance(named, dict) else ["LABEL_0", "LABEL_1"]
    for field, entries in recipe.reward.lists().items():
        for index, entry in enumerate(entries):
            asked = f"reward.models.{entry.arguments.get('model')}"
            label = entry.arguments.get("label")
            known = (label is None and len(labels) == 1) or label in labels or label in range(len(labels))
            if entry.function == "reward_model" and asked == where and not known:
                place = {"list": field, "index": index, "label": label, "last": labels[-1]}
                yield problem("label_of_a_reward_model", labels=labels, **place)
