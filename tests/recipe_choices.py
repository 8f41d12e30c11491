"""Recipes that differ in one choice, taken from the schema: fields left out, given, and each name of an enumeration.

A field or a choice that is added to the schema is taken without a word here, unless it is text, whose values nobody can
guess: `VALUES` has some, or `NOT_HERE` a reason.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megagrpo.recipe.schema import Recipe
from megagrpo.section import FILE_AND_FUNCTION, broken_rules
from tests.loop import small_run

HERE = Path(__file__).parent / "loop"
Values = dict[str, Any]
ABSENT: Any = object()
SECONDS = 500.0

ON_RANKS: dict[str, Values] = {"ranks": {"path": "{inputs}/model"}, "reference": {}}
"""Kinds of teachers without a server, and their fields."""
VALUES: dict[str, list[Any]] = {
    "AgentConfig.tools": [["python"], [{"name": "python"}]],
    "AgentConfig.function": [f"{HERE / 'digits_agent.py'}:rollout"],
    "AgentConfig.arguments": [{"slow": 0.0}],
    "AgentConfig.python": [sys.executable],
    "AgentConfig.environment": [["LANG"]],
    "AgentConfig.parser": ["hermes", "llama3"],
    "AgentConfig.template_arguments": [{"enable_thinking": False}],
    "AgentConfig.turns_max": [3],
    "CheckpointConfig.keep_best": ["sums/mean@1"],
    "CheckpointConfig.directory": ["{output}/elsewhere"],
    "CheckpointConfig.after_export": [["true", "{{directory}}"]],
    "ClassifierConfig.path": ["{inputs}/classifier"],
    "ClassifierConfig.tokens_max": [64],
    "ClassifierConfig.chat_template": ["{inputs}/template.jinja"],
    "ClusterConfig.gpu": ["H100"],
    "ColumnsConfig.prompt": ["prompt"],
    "ColumnsConfig.ground_truth": ["reward_model.ground_truth", {"value": "1"}, ["ability"]],
    "ColumnsConfig.data_source": ["data_source", {"value": "sums"}],
    "ColumnsConfig.ability": ["ability", {"value": "math"}],
    "ColumnsConfig.extra_info": [[], ["ability"]],
    "CriticConfig.path": ["{inputs}/model"],
    "DataConfig.system_prompt": ["1"],
    "DataConfig.chat_template_arguments": [{"enable_thinking": False}],
    "DataConfig.prompt_tokens_max": [12],
    "DataConfig.cache": ["{output}/cache"],
    "DataFileConfig.path": ["{inputs}/train.parquet"],
    "DataFileConfig.reasoning_gym": ["basic_arithmetic"],
    "DataFileConfig.arguments": [{"max_terms": 2}],
    "DistillationConfig.by_source": [{"su*": "one"}],
    "DistillationConfig.system": ["1"],
    "GivenConfig.column": ["ground_truth"],
    "EarlyStoppingConfig.metric": ["sums/mean@1"],
    "EarlyStoppingConfig.target": [3.0],
    "MLflowConfig.uri": ["sqlite:///{output}/other.db"],
    "MLflowConfig.experiment": ["another"],
    "MLflowConfig.registered_model": ["small"],
    "ModelConfig.tokenizer": ["{inputs}/model"],
    "ModelConfig.chat_template": ["{inputs}/template.jinja"],
    "OwnAdvantageConfig.arguments": [{"scale": 2.0}],
    "OwnAdvantageConfig.name": ["{inputs}/own.py:advantage"],
    "OwnLossConfig.arguments": [{"width": 0.2}],
    "OwnLossConfig.name": ["{inputs}/own.py:loss"],
    "Recipe.name": ["other"],
    "Recipe.teachers": [{"one": {"kind": kind, **path}} for kind, path in ON_RANKS.items()],
    "ReasoningGymConfig.wrong": ["no"],
    "RewardConfig.by_source": [{"su*": [{"function": "gsm8k"}]}, {"others": [{"function": "gsm8k"}]}],
    "RewardConfig.environment": [["LANG"]],
    "RewardFunctionConfig.function": ["gsm8k"],
    "RewardFunctionConfig.name": ["digits"],
    "RewardFunctionConfig.arguments": [{"pattern": "1"}],
    "ToolConfig.name": ["python"],
    "ToolConfig.call_name": ["run"],
    "ToolConfig.arguments": [{"memory_mib": 512}],
    "TrackConfig.directory": ["{output}"],
    "TrainConfig.megatron": [{"bias_activation_fusion": False}],
    "WeightsConfig.directory": ["{output}/weights"],
}
"""Values of fields `Section.field` that hold text or anything."""

NOT_HERE = {
    "AgentConfig.verifiers": "a package in an environment of its own",
    "AgentConfig.openenv": "a server of its own",
    "ClassifierConfig.dtype=bfloat16": "stands still in without_ray.py",
    "ClusterConfig.address": "a cluster of its own",
    "ClusterConfig.device=cuda": "a plan may be for another machine",
    "DistillationConfig.column": "a column of its own in the data",
    "ModelConfig.path": "required",
    "ModelConfig.revision": "only of a hub id",
    "RolloutConfig.api_key_variable": "only of external servers",
    "RolloutConfig.engine=external": "a server that runs already: test_sglang.py",
    "RolloutConfig.engine=vllm": "an environment of its own: tests/vllm",
    "RolloutConfig.engine=external_vllm": "a server that runs already: tests/vllm",
    "RolloutConfig.vllm": "only of vLLM",
    "RolloutConfig.sglang": "has a cover of its own",
    "RolloutConfig.urls": "only of external servers",
    "GenerativeConfig": "a server of its own",
    "ToolConfig.mcp": "a server of its own",
    "WandBConfig.entity": "an account",
    "WandBConfig.project": "an account",
    "TrackConfig.wandb": "an account",
}
"""Reason why a field, or a choice `Section.field=choice`, is skipped."""

STARTS: dict[str, Values] = {
    "AgentConfig": {"function": f"{HERE / 'digits_agent.py'}:rollout"},
    "DataFileConfig": {"path": "{inputs}/test.parquet"},
    "EarlyStoppingConfig": {"target": 2.0},
    "RecomputeConfig": {"layers": 1},
}
"""Fields of a section of optional fields where it is given."""

AGENT = STARTS["AgentConfig"]
GSM8K = {"reward.functions": [{"function": "gsm8k"}]}
WITH: dict[str, Values] = {
    ".agent=AgentConfig": {"reward.functions": [{"function": "agent"}], "agent.tokens_max": 60},
    ".agent=AgentConfig.tools": {"agent.function": ABSENT, **GSM8K},
    ".agent=AgentConfig.parser": {"agent.function": ABSENT, "agent.tools": ["python"], **GSM8K},
    ".agent=AgentConfig.reasoning_gym": {
        "agent.function": ABSENT,
        "data.train": [{"reasoning_gym": "basic_arithmetic", "size": 20}],
        "eval": ABSENT,
    },
    ".algorithm.advantage=GaeConfig": {"algorithm.critic": {}},
    '.algorithm.advantage="gae"': {"algorithm.critic": {}},
    ".algorithm.credit": {"agent": AGENT, "agent.tokens_max": 60, "reward.functions": [{"function": "agent"}]},
    ".algorithm.critic": {"algorithm.advantage": "gae"},
    ".algorithm.distillation": {"teachers": {"one": {"kind": "reference"}}},
    ".algorithm.distillation=DistillationConfig.given": {
        "algorithm.distillation.objective": "full_vocabulary",
        "data.train": [{"path": "{inputs}/train.parquet", "columns": {"extra_info": ["reward_model.ground_truth"]}}],
    },
    ".algorithm.kl.horizon": {"algorithm.kl.target": 0.1, "algorithm.kl.placement": "reward"},
    ".algorithm.kl.target": {"algorithm.kl.placement": "reward"},
    ".cluster.engine_devices": {"cluster.placement": "disaggregated"},
    ".data.decontaminate=DecontaminateConfig.against": {"eval": ABSENT},
    ".data.train[0].arguments": {"data.train": [{"reasoning_gym": "basic_arithmetic", "arguments": {"max_terms": 2}}]},
    ".data.train[0].reasoning_gym": {"data.train": [{"reasoning_gym": "basic_arithmetic"}]},
    ".data.train[0].seed": {"data.train": [{"reasoning_gym": "basic_arithmetic", "seed": 1}]},
    ".data.train[0].size": {"data.train": [{"reasoning_gym": "basic_arithmetic", "size": 9}]},
    ".eval.samples_per_prompt": {"eval.temperature": 1.0},
    ".eval.sets.sums.samples_per_prompt": {"eval.temperature": 1.0},
    ".eval.sets.sums.top": {"eval.temperature": 1.0},
    ".eval.top": {"eval.temperature": 1.0},
    ".reward.functions[0].function": GSM8K,
    ".train.optimizer.muon": {"train.optimizer.kind": "muon"},
    ".reward.models": {"reward.functions": [{"function": "reward_model", "arguments": {"model": "one"}}]},
    ".schedule=SyncConfig.carry_over": {"schedule.max_staleness": 1},
    ".schedule=AsyncConfig": {"cluster.placement": "disaggregated"},
    ".schedule=AsyncConfig.prompts_at_once": {"schedule.prompts_at_once": 4},
    '.schedule="async"': {"cluster.placement": "disaggregated"},
    '.schedule="one_step_off"': {"cluster.placement": "disaggregated"},
    ".teachers": {"algorithm.distillation": {}},
    ".train.total_ep": {"train.total_steps": ABSENT},
    ".weights=WeightsConfig.directory": {"weights.transfer": "disk"},
}
"""Other fields that a recipe needs when a field with this name is varied; without them it would be refused."""


def base() -> Values:
    """A small recipe of one rank and two steps, with a reward that takes no process. {inputs} and {output} stand for
    directories."""
    values = small_run.recipe(Path("{inputs}"), Path("{output}"))
    values["data"]["prompt_tokens_max"] = 48
    values["reward"] = {"functions": [{"function": "format", "arguments": {"pattern": "[0-4]"}}]}
    values["train"] |= {"layout": {}, "total_steps": 2}
    return values


class Choices:
    """The variations of a recipe."""

    def __init__(self) -> None:
        self.schema = Recipe.model_json_schema()
        self.taken: set[str] = set()
        """Sections whose fields were varied: once is enough for those that are at several places."""
        self.unknown: set[str] = set()
        """Fields of which no value is known."""

    def of(self, base: Values) -> dict[str, Values]:
        """Recipes that differ from `base` in one choice and mean something else, by what differs."""
        found, seen = {}, {canonical(base)}
        for name, recipe in self.sections(self.schema, base):
            changes = [change for begin, change in WITH.items() if name.startswith(begin)]
            whole = changed(recipe, {path: value for change in changes for path, value in change.items()})
            if canonical(whole) not in seen:
                seen.add(canonical(whole))
                found[name] = whole
        return found

    def variants(self, node: Values, value: Any, field: str) -> Iterator[tuple[str, Any]]:
        """Other values of a field, by what differs. value: the one that it has, or ABSENT."""
        node = self.resolved(node)
        if field in VALUES:
            yield from ((f"={json.dumps(one)}", one) for one in VALUES[field])
        elif "anyOf" in node:
            for member in node["anyOf"]:
                yield from self.variants(member, value if self.fits(member, value) else ABSENT, field)
        elif "properties" in node:
            yield from self.section(node, value)
        elif node.get("type") == "array":
            first = value[0] if value not in (ABSENT, None, []) else ABSENT
            rest = [] if first is ABSENT else value[1:]
            yield from ((f"[0]{name}", [one, *rest]) for name, one in self.variants(node["items"], first, field))
        elif isinstance(node.get("additionalProperties"), dict):
            yield from self.entries(node, value, field)
        else:
            yield from (
                (f"={json.dumps(one)}", one)
                for one in self.scalars(node, field, node.get("default") if value is ABSENT else value)
            )

    def section(self, node: Values, value: Any) -> Iterator[tuple[str, Values]]:
        if node["title"] in NOT_HERE:
            return
        given = ""
        if value is ABSENT:
            given, value = f"={node['title']}", self.start(node)
            yield given, value
        if node["title"] not in self.taken:
            yield from ((given + suffix, one) for suffix, one in self.sections(node, value))
        self.taken.add(node["title"])

    def sections(self, node: Values, section: Values) -> Iterator[tuple[str, Values]]:
        """A section with one of its fields left out, or with another value."""
        for name, of_field in node["properties"].items():
            field = f"{node['title']}.{name}"
            if name in section and name not in node.get("required", ()):
                yield f".{name} left out", {key: one for key, one in section.items() if key != name}
            if field in NOT_HERE:
                continue
            for suffix, value in self.variants(of_field, section.get(name, ABSENT), field):
                if f"{field}{suffix}".replace('"', "") not in NOT_HERE:
                    yield f".{name}{suffix}", {**section, name: value}

    def entries(self, node: Values, value: Any, field: str) -> Iterator[tuple[str, Any]]:
        """A mapping whose first entry is another, or that has one entry."""
        key, first = next(iter(value.items())) if value not in (ABSENT, {}) else ("one", ABSENT)
        names = [key] if first is not ABSENT else node.get("propertyNames", {}).get("enum", [key])
        for index, name in enumerate(names):
            of_entry = list(self.variants(node["additionalProperties"], first, field))
            for suffix, one in of_entry[-1:] if index else of_entry:
                yield f".{name}{suffix}", {**(value if first is not ABSENT else {}), name: one}

    def sections_by_title(self) -> Iterator[tuple[str, Values]]:
        nodes = [self.schema, *self.schema["$defs"].values()]
        return ((node["title"], node) for node in nodes if "properties" in node)

    def scalars(self, node: Values, field: str, value: Any) -> list[Any]:
        if "const" in node or "enum" in node:
            return node.get("enum") or [node["const"]]
        kind = node.get("type")
        if kind == "boolean":
            return [False, True]
        if kind == "null":
            return [None]
        if kind in ("integer", "number"):
            if field.endswith("seconds"):
                return [SECONDS]
            if kind == "number":
                least = max(0.5, node.get("minimum", 0.5))
                return [least / 2 if least == value else least]
            least = node.get("minimum", 0)
            return [least + (least == value)]
        if node.get("pattern") != FILE_AND_FUNCTION:  # the section with this name is another of its choices
            self.unknown.add(field)
        return []

    def start(self, node: Values) -> Values:
        """Fills a section that is given: its required fields, and the name that chooses it."""
        chosen = {name: one["const"] for name, one in node["properties"].items() if "const" in one}
        needed = [name for name in node.get("required", ()) if name not in chosen]
        given = {n: self.first(node["properties"][n], f"{node['title']}.{n}") for n in needed}
        return {**chosen, **given, **STARTS.get(node["title"], {})}

    def first(self, node: Values, field: str) -> Any:
        return next((one for _, one in self.variants(node, ABSENT, field)), None)

    def fits(self, node: Values, value: Any) -> bool:
        node = self.resolved(node)
        if "properties" not in node or not isinstance(value, dict):
            return isinstance(value, {"array": list, "object": dict}.get(node.get("type", ""), ()))
        return all(value.get(n) == one["const"] for n, one in node["properties"].items() if "const" in one)

    def resolved(self, node: Values) -> Values:
        return self.schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def changed(recipe: Values, changes: Mapping[str, Any]) -> Values:
    """The recipe with other values at dotted paths, or without those that become ABSENT."""
    whole = deepcopy(recipe)
    for path, value in changes.items():
        *above, last = path.split(".")
        section = whole
        for key in above:
            own = {"name": section[key]} if isinstance(section.get(key), str) else section.get(key) or {}
            section[key] = section = own
        section[last] = value
        if value is ABSENT:
            del section[last]
    return whole


def canonical(recipe: Values) -> str:
    """The same for recipes that mean the same."""
    try:
        return Recipe.model_validate(recipe).model_dump_json()
    except ValidationError:
        return json.dumps(recipe, sort_keys=True)


def difference(base: Values, other: Values, path: str = "") -> Values:
    """Returns the changes that make `other` of `base`."""
    found: Values = {path + key: ABSENT for key in base if key not in other}
    for key, value in other.items():
        before = base.get(key, ABSENT)
        if isinstance(value, dict) and isinstance(before, dict) and value:
            found |= difference(before, value, f"{path}{key}.")
        elif value != before:
            found[path + key] = value
    return found


def cover(base: Values, choices: Mapping[str, Values], rows: int) -> list[tuple[list[str], Values]]:
    """So many recipes, with the names of their choices, in which as many pairs of choices meet as can be. They break no
    rule of the schema."""
    alone = {name: difference(base, recipe) for name, recipe in choices.items()}
    met: set[frozenset[str]] = set()
    taken: Counter[str] = Counter()
    found = []
    for _ in range(rows):
        recipe, names, paths = base, list[str](), dict[str, Any]()
        left = set(choices)
        while left:
            news = {one: sum(frozenset((one, name)) not in met for name in names) for one in left}
            name = max(left, key=lambda one: (news[one], -taken[one], one))
            left.remove(name)
            whole = changed(recipe, alone[name])
            if fit(paths, alone[name]) and is_valid(whole):
                recipe, names, paths = whole, [*names, name], paths | alone[name]
        met.update(map(frozenset, combinations(names, 2)))
        taken.update(names)
        found.append((names, recipe))
    return found


def fit(some: Values, others: Values) -> bool:
    """Returns True if changes at these paths do not undo each other."""
    return all(
        some[one] == others[other]
        for one in some
        for other in others
        if f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
    )


def is_valid(recipe: Values) -> bool:
    try:
        return not broken_rules(Recipe.model_validate(recipe))
    except ValidationError:
        return False
