"""Checks of an engine's arguments by the engine itself. Runs in the engine's environment: standard library only.

Standard input is a JSON object: `options`, and `names_only`, to check no values. Prints one line of JSON:
`environment`, what is wrong with the environment itself, and what is `needed`; or the engine's `version`, and
`problems`, each with where (an option), given, needed and fix.
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import importlib.util
import json
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

OLDEST_PYTHON = (3, 11)


class Check(ABC):
    """The check of one engine."""

    engine: str
    """Its name, as people write it."""
    package: str
    """The module that is imported."""
    distributions: tuple[str, ...]
    """Names under which it may be installed."""
    oldest: str
    below: str = ""
    """The first version that is too new: what is imported of the engine lies elsewhere."""
    command: str
    """The program whose arguments these are."""
    sources: tuple[str, ...]
    """Files of the package, as patterns, with classes whose fields are the arguments."""
    classes: tuple[str, ...] = ()
    """Names of these classes; empty: all of the files."""

    def declared_names(self) -> set[str]:
        """Reads the names of arguments from the engine's source, because its import takes seconds. Returns an empty set
        if they are not where they are known to be."""
        spec = importlib.util.find_spec(self.package)
        places = map(Path, spec.submodule_search_locations or ()) if spec else ()
        files = [file for place in places for source in self.sources for file in place.glob(source)]
        return {
            field.target.id
            for file in files
            for node in ast.parse(file.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef) and (not self.classes or node.name in self.classes)
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
        }

    @abstractmethod
    def option_problems(self, options: dict[str, Any]) -> list[dict[str, str]]:
        """Finds problems of names and values."""

    def run(self) -> None:
        settings = json.load(sys.stdin)
        options = settings["options"]
        environment, needed = self.environment_problem()
        problems: list[dict[str, str]] = []
        if options and not environment:
            names = self.declared_names() if settings["names_only"] else set()
            problems = self.name_problems(options, names) if names else self.option_problems(options)
        version = "" if environment else self.installed_version()
        print(json.dumps({"environment": environment, "needed": needed, "version": version, "problems": problems}))

    def environment_problem(self) -> tuple[str, str]:
        """Returns what is given and what is needed; empty strings if all is well."""
        if sys.version_info < OLDEST_PYTHON:
            return f"{sys.executable} is Python {sys.version.split()[0]}", "Python 3.11 or later"
        if importlib.util.find_spec(self.package) is None:
            return f"{sys.executable} has no {self.engine}", f"the package {self.package}"
        from packaging.version import Version

        installed = self.installed_version()
        if Version(installed) < Version(self.oldest):
            return f"{self.engine} {installed} in {sys.prefix}", f"{self.engine} {self.oldest} or later"
        if self.below and Version(installed) >= Version(self.below):
            return f"{self.engine} {installed} in {sys.prefix}", f"{self.engine} {self.oldest}, below {self.below}"
        return "", ""

    def installed_version(self) -> str:
        for name in self.distributions[:-1]:
            with suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(name)
        return importlib.metadata.version(self.distributions[-1])

    def name_problems(self, options: dict[str, Any], known: set[str]) -> list[dict[str, str]]:
        problems = []
        for name in (name for name in options if name not in known):
            nearest = difflib.get_close_matches(name, known, n=1)
            problems.append(
                {
                    "where": name,
                    "given": repr(options[name]),
                    "needed": f"an argument of {self.command}, with underscores",
                    "fix": f"did you mean `{nearest[0]}`?" if nearest else "remove it",
                }
            )
        return problems
