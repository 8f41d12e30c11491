"""JSON answers: whether the response's JSON keeps to a schema, and equals the ground truth if that is wanted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jsonschema
import referencing

from megagrpo.reward.answer_text import after_thinking, blocks
from megagrpo.reward.functions import RewardCallable, RewardReturn

_START = re.compile(r"[\[{]")
_NONE = object()


def make(
    schema: Mapping[str, Any] | None = None, key: str = "schema", equal: bool = False, whole: bool = False
) -> RewardCallable:
    """Makes a reward function: 1.0 if the JSON fits the schema and, with `equal`, equals the ground truth; else 0.0.

    The JSON is the last block in ``` fences that is JSON, else the value from the first `{` or `[` on, after the
    reasoning; with `whole` all of that text must be JSON. The schema is the recipe's, else the row's extra_info under
    `key` (a mapping or JSON text), else without `equal` the ground truth. The schema's $schema names the draft, 2020-12
    by default. Formats are checked; nothing is fetched. Raises ValueError for an unusable ground truth or schema.

    >>> verify = make(schema={"type": "object", "required": ["age"], "properties": {"age": {"type": "integer"}}})
    >>> verify(response='Here: {"age": 3}', ground_truth="", extra_info={})
    {'score': 1.0, 'answer': '{"age":3}'}
    >>> verify(response='{"age": "3"}', ground_truth="", extra_info={})["score"]
    0.0
    >>> make(equal=True)(response='{"b": [1.0], "a": 2}', ground_truth='{"a": 2, "b": [1]}', extra_info={})["score"]
    1.0
    """
    if schema is not None:
        _validator(json.dumps(schema))

    def json_schema(
        response: str, ground_truth: str, extra_info: Mapping[str, Any], prompt_text: str = ""
    ) -> RewardReturn:
        of_row = schema if schema is not None else extra_info.get(key, None if equal else ground_truth)
        validator = None if of_row is None else _validator(of_row if isinstance(of_row, str) else json.dumps(of_row))
        truth = _truth(ground_truth) if equal else None
        text = after_thinking(response, prompt_text)
        value = _parsed(text) if whole else _last_value(text)
        if value is _NONE:
            return {"score": 0.0}
        try:
            right = (validator is None or validator.is_valid(value)) and (not equal or same(value, truth))
            return {"score": float(right), "answer": json.dumps(value, sort_keys=True, separators=(",", ":"))}
        except RecursionError:  # nested deeper than it can be compared
            return {"score": 0.0}
        except referencing.exceptions.Unresolvable as reason:
            raise ValueError(f"the schema has a reference without a target: {reason}") from None

    return json_schema


def solution(ground_truth: str, equal: bool = False, whole: bool = False) -> str | None:
    """Returns the right response with `equal`, else None. Raises ValueError for a ground truth that is not JSON."""
    if not equal:
        return None
    _truth(ground_truth)
    return ground_truth if whole else f"```json\n{ground_truth}\n```"


def same(one: Any, other: Any) -> bool:
    """Returns whether two JSON values are equal: 1 is 1.0 but not true, and the order of keys does not count."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _last_value(text: str) -> Any:
    for _, block in reversed(blocks(text)):
        value = _parsed(block)
        if value is not _NONE:
            return value
    bracket = _START.search(text)
    return _NONE if bracket is None else _parsed(text[bracket.start() :], all_of_it=False)


def _parsed(text: str, all_of_it: bool = True) -> Any:
    try:
        return _DECODER.decode(text) if all_of_it else _DECODER.raw_decode(text)[0]
    except (ValueError, RecursionError):
        return _NONE


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


@lru_cache(maxsize=4096)
def _validator(text: str) -> Any:
    schema = _parsed(text)
    if not isinstance(schema, dict | bool):
        raise ValueError(f"the schema {text[:200]!r} is no JSON object")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as reason:
        raise ValueError(f"the schema is not valid: {reason.message[:200]}") from None
    return kind(schema, registry=referencing.Registry(), format_checker=kind.FORMAT_CHECKER)


@lru_cache(maxsize=4096)
def _truth(ground_truth: str) -> Any:
    value = _parsed(ground_truth)
    if value is _NONE:
        raise ValueError(f"the ground truth {ground_truth[:200]!r} is not JSON")
    return value
