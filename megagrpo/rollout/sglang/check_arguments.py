"""Says which of the arguments on standard input (a JSON object) the installed SGLang's ServerArgs does not take.

Run by the interpreter that has SGLang, which need not have megagrpo. Prints one line of JSON: `environment`, what is
wrong with the environment itself, and what is `needed`; or `problems`, each with where, given, needed and fix.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import json
import sys
from typing import Any

OLDEST_SGLANG = "0.5.23"
OLDEST_PYTHON = (3, 11)


def main() -> None:
    options = json.load(sys.stdin)
    environment, needed = environment_problem()
    problems = [] if environment or not options else option_problems(options)
    print(json.dumps({"environment": environment, "needed": needed, "problems": problems}))


def environment_problem() -> tuple[str, str]:
    """What is given and what is needed; empty if all is well."""
    if sys.version_info < OLDEST_PYTHON:
        return f"{sys.executable} is Python {sys.version.split()[0]}", "Python 3.11 or later"
    if importlib.util.find_spec("sglang") is None:
        return f"{sys.executable} has no SGLang", "the package sglang"
    from packaging.version import Version

    found = importlib.metadata.version("sglang")
    if Version(found) < Version(OLDEST_SGLANG):
        return f"SGLang {found} in {sys.prefix}", f"SGLang {OLDEST_SGLANG} or later"
    return "", ""


def option_problems(options: dict[str, Any]) -> list[dict[str, str]]:
    from typing import get_type_hints

    from pydantic import ConfigDict, TypeAdapter, ValidationError
    from sglang.srt.arg_groups.arg_utils import Arg, record_fields
    from sglang.srt.server_args import ServerArgs

    known = [field.name for field in record_fields(ServerArgs) if not field.name.startswith("_")]
    hints, annotated = get_type_hints(ServerArgs), get_type_hints(ServerArgs, include_extras=True)
    found = []
    for name, value in options.items():
        problem = {"where": f"rollout.sglang.{name}", "given": repr(value)}
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            problem["needed"] = "an argument of sglang.launch_server, with underscores"
            problem["fix"] = f"did you mean `{nearest[0]}`?" if nearest else "remove it"
            found.append(problem)
            continue
        hint = hints[name]
        try:
            TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
        except ValidationError as error:
            reasons = sorted({str(detail["msg"]) for detail in error.errors()})
            written = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            found.append({**problem, "needed": f"{written}: {'; '.join(reasons)}", "fix": ""})
            continue
        metadata = [item for item in getattr(annotated[name], "__metadata__", ()) if isinstance(item, Arg)]
        choices = metadata[0].choices if metadata else None
        if choices and value is not None and not isinstance(value, list) and value not in choices:
            found.append({**problem, "needed": f"one of {', '.join(map(str, choices))}", "fix": ""})
    return found


if __name__ == "__main__":
    main()
