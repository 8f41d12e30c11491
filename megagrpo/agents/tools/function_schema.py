"""The schema of a Python function for the policy, and the function's arguments from the policy's call.

Signature and type hints make the JSON schema, by pydantic; the docstring describes the function and its parameters, in
the style of Google, NumPy or reST.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from megagrpo.agents.tools.tool import Arguments, CallError
from megagrpo.errors import Problem, RecipeError, first_line

SECTIONS = re.compile(r"(args|arguments|parameters|params|returns?|raises|yields|examples?|notes?)\s*:?\s*$", re.I)
PARAMETERS = ("args", "arguments", "parameters", "params")


@dataclass(frozen=True)
class FunctionSchema:
    """A function as a tool."""

    description: str
    parameters: Mapping[str, Any]
    model: type[BaseModel]
    names: tuple[str, ...]

    def read(self, given: Arguments) -> dict[str, Any]:
        """Returns the function's keyword arguments, converted to the types of the hints where possible ("3" to 3).

        Raises CallError that says what is wrong with each argument.
        """
        try:
            read = self.model.model_validate(given)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors()]
            raise CallError(f"wrong arguments. {'; '.join(wrong)}") from None
        given_ones = read.model_fields_set
        return {name: getattr(read, f"p{i}") for i, name in enumerate(self.names) if f"p{i}" in given_ones}


def function_schema(function: Callable[..., Any], where: str, hidden: Collection[str] = ()) -> FunctionSchema:
    """Returns the schema of a function's parameters without `hidden` ones. Raises RecipeError for a function that can
    be no tool: parameters without names, or hints that no JSON can be."""
    name = getattr(function, "__name__", type(function).__name__)
    described, texts = read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    names: list[str] = []
    try:
        # The hints of a bound method are at its function.
        hints = get_type_hints(inspect.unwrap(getattr(function, "__func__", function)), include_extras=True)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in hidden:
                continue
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                given = f"{name}{inspect.signature(function)}"
                raise RecipeError(Problem(where, given, "parameters that all have names", f"change {parameter}"))
            default = ... if parameter.default is parameter.empty else parameter.default
            text: dict[str, Any] = {"description": texts[parameter.name]} if texts.get(parameter.name) else {}
            fields[f"p{len(names)}"] = (hints.get(parameter.name, Any), Field(default, alias=parameter.name, **text))
            names.append(parameter.name)
        config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
        model = create_model("Arguments", __config__=config, **fields)
        schema = without_titles(model.model_json_schema(by_alias=True))
    except (NameError, TypeError, PydanticUserError) as error:
        given = f"{name}: {first_line(error)}"
        needed = "hints that JSON can carry: str, int, float, bool, list, dict, Literal, dataclasses, pydantic models"
        raise RecipeError(Problem(where, given, needed, "change the hints")) from None
    schema.pop("additionalProperties", None)
    return FunctionSchema(described, schema, model, tuple(names))


def without_titles(schema: Any, *, named: bool = False) -> Any:
    """Returns a JSON schema without the titles that pydantic makes of names. named: its keys are names of schemas."""
    if isinstance(schema, list):
        return [without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if not named and key in ("default", "const", "enum", "examples")
        else without_titles(value, named=not named and key in ("properties", "$defs"))
        for key, value in schema.items()
        if named or key != "title"
    }


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns a docstring's description of the function (all paragraphs before its sections) and of each parameter.

    >>> read_docstring("Adds.\\n\\nArgs:\\n    a (int): One number.\\n        Any.\\n\\nReturns:\\n    The sum.")
    ('Adds.', {'a': 'One number. Any.'})
    """
    described: list[str] = []
    texts: dict[str, str] = {}
    section, name = "", ""
    indent = 0  # of parameters in Google's style: lines that are indented further continue the last one
    lines = text.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=False):
        stripped = line.strip()
        if parameter := re.match(r":(?:param|parameter|arg)\s+(?:[\w\[\], ]+\s)?(\w+)\s*:\s*(.*)", stripped):
            section, name = "args", parameter[1]
            texts[name] = parameter[2]
        elif stripped.startswith(":") and re.match(r":(return|returns|raises|rtype|type)\b", stripped):
            section = "returns"
        elif SECTIONS.fullmatch(stripped) and (stripped.endswith(":") or re.fullmatch(r"\s*-{3,}\s*", after)):
            section, name, indent = stripped.rstrip(": ").lower(), "", 0
        elif not section:
            described.append(line.rstrip())
        elif section in PARAMETERS and stripped and not re.fullmatch(r"-{3,}", stripped):
            parameter = re.match(r"(\s*)(\w+)\s*(?:\([^)]*\))?\s*:\s+(\S.*)$", line)
            if parameter and parameter[1] and len(parameter[1]) <= (indent or len(line)):
                name, indent = parameter[2], len(parameter[1])
                texts[name] = parameter[3].strip()
            elif not line.startswith(" ") and (parameter := re.match(r"(\w+)\s*(:.*)?$", line)):  # NumPy: text follows
                name = parameter[1]
                texts[name] = ""
            elif name:
                texts[name] = f"{texts[name]} {stripped}".strip()
    return "\n".join(described).strip(), texts
