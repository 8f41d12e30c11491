"""Checks arguments against the ServerArgs of the installed SGLang (checking.py)."""

from __future__ import annotations

from typing import Any

from megagrpo.rollout.checking import Check


class SglangCheck(Check):
    """The check of SGLang's arguments."""

    engine, package, distributions, oldest = "SGLang", "sglang", ("sglang",), "0.5.23"
    command, sources = "sglang.launch_server", ("srt/arg_groups/fields/*.py",)

    def option_problems(self, options: dict[str, Any]) -> list[dict[str, str]]:
        from typing import get_type_hints

        from pydantic import ConfigDict, TypeAdapter, ValidationError
        from sglang.srt.arg_groups.arg_utils import Arg, record_fields
        from sglang.srt.server_args import ServerArgs

        known = {field.name for field in record_fields(ServerArgs) if not field.name.startswith("_")}
        hints, annotated = get_type_hints(ServerArgs), get_type_hints(ServerArgs, include_extras=True)
        problems = self.name_problems(options, known)
        for name in (name for name in options if name in known):
            hint, value = hints[name], options[name]
            problem = {"where": name, "given": repr(value)}
            try:
                TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
            except ValidationError as error:
                reasons = sorted({str(detail["msg"]) for detail in error.errors()})
                written = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
                problems.append({**problem, "needed": f"{written}: {'; '.join(reasons)}", "fix": ""})
                continue
            metadata = [item for item in getattr(annotated[name], "__metadata__", ()) if isinstance(item, Arg)]
            choices = metadata[0].choices if metadata else None
            if choices and value is not None and not isinstance(value, list) and value not in choices:
                problems.append({**problem, "needed": f"one of {', '.join(map(str, choices))}", "fix": ""})
        return problems


if __name__ == "__main__":
    SglangCheck().run()
