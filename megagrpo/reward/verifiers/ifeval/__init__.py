"""Instruction following: constraints that a program can check, of IFEval, IFTrain and open-instruct."""

from __future__ import annotations

import ast
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

from megagrpo.errors import brief
from megagrpo.reward.answer_text import after_thinking
from megagrpo.reward.functions import RewardCallable
from megagrpo.reward.verifiers.ifeval import text
from megagrpo.reward.verifiers.ifeval.constraints import ARGUMENTS, BY_ID, BY_NAME, Check

IDS = ("instruction_id_list", "instruction_id")
"""The field with the ids: IFEval's, and that of open-instruct's IF-multi-constraints."""

CONSTRAINTS_MAX = 100


def make(mode: Literal["strict", "loose"] = "strict", score: Literal["share", "all"] = "share") -> RewardCallable:
    r"""Makes a reward function: the share of the row's constraints that are kept, or 1.0 if all are, else 0.0.

    strict: the response as it is. loose: a constraint is kept if any of eight variants of the response keeps it:
    without its first line, last line or both, and each of these without asterisks (arXiv:2311.07911, section 2.2).

    The constraints are JSON in the ground truth, or fields of extra_info: `instruction_id_list` and `kwargs` as IFEval
    has them, `instruction_id` and `kwargs` (open-instruct's IF-multi-constraints), or `func_name` with arguments
    (RLVR-IFeval). If a response reasons, what follows the last `</think>` counts. An empty one keeps nothing.

    Metrics: `all`, `share`, and the outcome of each constraint under its id with `_` in place of `:`, the mean where
    one is given twice. Raises ValueError if nltk or langdetect is not installed; the
    function raises it for constraints that are unknown or lack an argument.

    >>> function = make()
    >>> truth = '{"instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],'
    >>> truth += ' "kwargs": [{}, {"num_words": 3, "relation": "at least", "keyword": null}]}'
    >>> function("<think>Well, three.</think>No comma here.", truth, {})["score"]
    1.0
    >>> function("Yes, two", truth, {}) == {
    ...     "score": 0.0, "share": 0.0, "all": 0.0, "punctuation_no_comma": 0.0, "length_constraints_number_words": 0.0
    ... }
    True
    >>> make("loose")("Sure, here it is:\nNo comma here.", truth, {})["score"]
    1.0
    """
    text.load()

    def ifeval(
        response: str, ground_truth: str, extra_info: Mapping[str, Any], prompt_text: str = ""
    ) -> Mapping[str, float]:
        constraints_of_row, strip = instructions_of(ground_truth, extra_info)
        answer = answer_of(response, strip, prompt_text)
        texts = [variant for variant in (variants(answer) if mode == "loose" else [answer]) if variant.strip()]
        outcomes: dict[str, list[bool]] = {}
        for name, holds in constraints_of_row:
            outcomes.setdefault(name, []).append(any(map(holds, texts)))
        flat = [kept for several in outcomes.values() for kept in several]
        parts = {"share": sum(flat) / len(flat), "all": float(all(flat))}
        return {"score": parts[score], **parts, **{name: sum(kept) / len(kept) for name, kept in outcomes.items()}}

    return ifeval


def answer_of(response: str, strip: bool, prompt_text: str = "") -> str:
    """Returns the part of a response that counts: all, or the text after its reasoning, without `<answer>` tags."""
    answer = after_thinking(response, prompt_text)
    if not strip and answer == response:
        return response
    return answer.replace("<answer>", "").replace("</answer>", "").strip()


def variants(response: str) -> list[str]:
    r"""Returns the eight texts of the loose mode, each once.

    >>> variants("Sure:\n*b*\nBye")
    ['Sure:\n*b*\nBye', '*b*\nBye', 'Sure:\n*b*', '*b*', 'Sure:\nb\nBye', 'b\nBye', 'Sure:\nb', 'b']
    """
    lines = response.split("\n")
    cut = [response, *("\n".join(lines[part]).strip() for part in (slice(1, None), slice(-1), slice(1, -1)))]
    return list(dict.fromkeys([*cut, *(text.replace("*", "") for text in cut)]))


# --- the constraints of a row -----------------------------------------------------------------------------------------


Constraint = tuple[str, Callable[[str], bool]]
"""A name, which several constraints of a row may share, and the function that checks a response."""
Instructions = tuple[list[Constraint], bool]
"""All constraints of a row, and whether spaces around a response do not count, as in open-instruct."""


def instructions_of(ground_truth: str, extra_info: Mapping[str, Any]) -> Instructions:
    """Returns the constraints of a row: of its ground truth if that is a list or mapping, else of extra_info.

    Raises ValueError if neither has any, or for one that is unknown or lacks an argument.
    """
    if ground_truth.lstrip().startswith(("{", "[")):
        return of_ground_truth(ground_truth)
    if "instruction_id_list" in extra_info:
        return of_mapping(extra_info)
    raise ValueError("neither the ground truth nor extra_info has instruction_id_list")


@lru_cache(maxsize=4096)
def of_ground_truth(text: str) -> Instructions:
    """Returns the constraints of a text: JSON, or a Python literal, which open-instruct has too."""
    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"the ground truth {brief(text)} is neither JSON nor a Python literal") from None
    except RecursionError:
        raise ValueError("the ground truth has too many brackets within each other") from None
    if isinstance(value, list) and len(value) == 1:  # open-instruct: a list of one mapping, or of one text of JSON
        value = json.loads(value[0]) if isinstance(value[0], str) else value[0]
    if not isinstance(value, dict):
        raise ValueError(f"the ground truth {brief(text)} is not a mapping")
    return of_mapping(value)


def of_mapping(value: Mapping[str, Any]) -> Instructions:
    """Returns the constraints of a mapping in any of the three formats.

    >>> row = {"func_name": "validate_word_constraint", "N": 3, "quantifier": "at most", "word": None}
    >>> [holds("just three words") for _, holds in of_mapping(row)[0]]
    [True]
    """
    if "func_name" in value:
        arguments = {name: argument for name, argument in value.items() if name != "func_name"}
        return [constraint(BY_NAME, value["func_name"], arguments)], True
    field = next((field for field in IDS if value.get(field) is not None), "")
    if not field:
        raise ValueError(f"the constraints have none of the fields func_name, {', '.join(IDS)}: {brief(dict(value))}")
    ids, arguments_of_all = _list(value[field]), _list(value.get("kwargs"))
    if not 1 <= len(ids) <= CONSTRAINTS_MAX or len(ids) != len(arguments_of_all):
        needed = f"1 to {CONSTRAINTS_MAX}, and kwargs for each"
        raise ValueError(f"there are {len(ids)} constraints with kwargs for {len(arguments_of_all)}, not {needed}")
    pairs = zip(ids, arguments_of_all, strict=True)
    return [constraint(BY_ID, name, arguments) for name, arguments in pairs], field == "instruction_id"


def _list(value: object) -> Sequence[Any]:
    """Returns a list, given as it is or as JSON text. Raises ValueError for other values."""
    value = json.loads(value) if isinstance(value, str) else value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(f"{brief(value)} is not a list")
    return value


def constraint(functions: Mapping[str, Check], name: object, arguments: object) -> Constraint:
    """Returns the constraint with its non-null arguments. Raises ValueError if it is unknown or they do not fit."""
    function = functions.get(name) if isinstance(name, str) else None
    if function is None:
        raise ValueError(f"the constraint {brief(name)} is unknown")
    if not isinstance(arguments, Mapping | None):
        raise ValueError(f"the arguments of {name} are {brief(arguments)}, not a mapping")
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    hints = {argument: ARGUMENTS.get(argument, int) for argument in list(inspect.signature(function).parameters)[1:]}
    if given.keys() != hints.keys():
        raise ValueError(f"{name} has the arguments {', '.join(given) or 'none'}, not {', '.join(hints) or 'none'}")
    checked = {key: _argument(f"{key} of {name}", given[key], hint) for key, hint in hints.items()}
    holds = partial(function, **checked)
    holds("a")  # a function may have further rules for its arguments, which do not wait for a response
    return str(name).replace(":", "_"), holds


def _argument(what: str, value: object, hint: Any) -> object:
    """Returns the value as a function takes it: an int from 0 up, a text, a list of texts, or one of a few words.

    Reads a list of one text as a text if the function takes one, as open-instruct does. Raises ValueError otherwise.
    """
    if hint is int:
        # A column in which some rows lack a number holds floats.
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        fits, needed = type(value) is int and value >= 0, "an integer from 0 up"
    elif typing.get_origin(hint) is Literal:
        fits, needed = value in typing.get_args(hint), " or ".join(typing.get_args(hint))
    else:
        value = value[0] if hint is str and isinstance(value, list) and len(value) == 1 else value
        of_kind = hint != list[str] if isinstance(value, str) else isinstance(value, list) and hint is not str
        texts: Any = [value] if isinstance(value, str) else value
        fits = of_kind and bool(texts) and all(isinstance(text, str) and text.strip() for text in texts)
        needed = "a list of texts" if hint == list[str] else "a text"
    if not fits:
        raise ValueError(f"{what} is {brief(value)}, not {needed}")
    return value
