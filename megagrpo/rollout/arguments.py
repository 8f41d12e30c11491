"""Arguments of servers in a recipe, of any engine: those that megagrpo sets are refused, others are asked of the engine
in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.errors import Problem, brief
from megagrpo.section import problem, table_beside
from megagrpo.weights.families.reading import read_json
from megagrpo.weights.families.sglang_classes import SglangClass, key_problems

FIND = Path(__file__).with_name("find_megagrpo.py")
CHECK_SECONDS = 300.0  # it imports part of an engine, in an environment that may lie on a slow file system
RUN = "import runpy, sys; runpy.run_path(sys.argv[1]); runpy.run_module(sys.argv[2], run_name='__main__')"
"""A program that runs a module of this megagrpo in an environment that has none, or another one."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of an engine's servers, as far as they are known before a run."""

    engine: str
    """Its name, as people write it."""
    check: str
    """The module that checks them in the engine's environment (checking.py)."""
    owned: Mapping[str, str]
    """Arguments that megagrpo sets: the key of the recipe that decides each, or "nothing" and why."""
    install: str
    """Commands that install the engine."""
    interpreter: Callable[[Any], str]
    """The interpreter that its settings in a recipe choose."""
    classes: Mapping[str, SglangClass]
    """Its classes of models, by family."""
    environment: Callable[[], Mapping[str, str]] = dict
    """Variables that the check needs."""

    def model_problems(self, directory: Path) -> list[Problem]:
        """Returns problems of config.json. Without the name of a model class an engine exits after its start; without
        keys that its class reads it exits, or takes defaults."""
        path = directory / "config.json"
        config = read_json(path)
        architectures, of_class = config.get("architectures") or [], self.classes.get(str(config.get("model_type")))
        problems = []
        if not any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration")) for name in architectures):
            problems.append(problem("class_of_the_model", config=path, architectures=brief(architectures)))
        if of_class is not None:
            problems += key_problems(str(path), config.get("text_config") or config, of_class, self.engine)
        return problems

    def problems(self, settings: Any, section: str, named_by: str, *, plan_only: bool) -> list[Problem]:
        """Finds problems in settings of servers, a section of the recipe. `named_by`: the field that asks for the
        engine. With `plan_only` the engine may be missing, and only names are checked."""
        options: dict[str, Any] = settings.model_extra or {}
        named_by = f"{section}.python" if settings.python else named_by
        problems = [
            Problem(
                f"{section}.{name}",
                given=repr(options[name]),
                needed=owner if owner.startswith("nothing") else "not set here: another key of the recipe decides it",
                fix="remove it" if owner.startswith("nothing") else f"set {owner}",
            )
            for name, owner in self.owned.items()
            if name in options
        ]
        free = {name: value for name, value in options.items() if name not in self.owned}
        answer = asked(self.interpreter(settings), self.check, free, plan_only, self.environment())
        if isinstance(answer, str):
            needed = f"a Python interpreter with {self.engine}"
            return problems + [Problem(named_by, answer, needed, self.install)] * (not plan_only)
        if answer["environment"] and not plan_only:
            fix = f"{self.install}, or set {section}.python"
            problems.append(Problem(named_by, answer["environment"], answer["needed"], fix))
        return problems + [Problem(**{**one, "where": f"{section}.{one['where']}"}) for one in answer["problems"]]


def owned(module: str) -> dict[str, str]:
    """Reads owned.yaml, beside the file of a module, for the arguments that megagrpo sets."""
    table = table_beside(module, "owned.yaml")
    return table["decided_by"] | {name: f"nothing: {row['why']}" for row in table["nothing"] for name in row["names"]}


def asked(
    interpreter: str, module: str, options: Mapping[str, Any], names_only: bool, environment: Mapping[str, str]
) -> dict[str, Any] | str:
    """Asks an interpreter with the engine, once, in a process of its own. Returns the answer of the module, or the
    interpreter's fault."""
    try:
        check = subprocess.run(
            [interpreter, "-c", RUN, str(FIND), module],
            input=json.dumps({"options": dict(options), "names_only": names_only}),
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        fault = error.strerror or error if isinstance(error, OSError) else f"no answer in {CHECK_SECONDS:g} s"
        return f"{interpreter}: {fault}"
    if check.returncode != 0:
        last = (check.stderr.strip().splitlines() or ["no message"])[-1]
        return f"{interpreter} failed: {last}"
    answer: dict[str, Any] = json.loads(check.stdout.splitlines()[-1])
    return answer


def cores_of_ranks(ranks: int, per_rank: int, engine: int) -> str:
    """Returns the cores of each rank of a server, as 0,1|2,3. Other engines get other cores, if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    first = engine * ranks * per_rank
    starts = range(first, first + ranks * per_rank, per_rank)
    blocks = [[cores[core % len(cores)] for core in range(start, start + per_rank)] for start in starts]
    return "|".join(",".join(map(str, block)) for block in blocks)
