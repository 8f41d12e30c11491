"""The scorers in the sandbox: reasoning-gym, imported by the process that forks a child for each answer.

Several of the package's scorers evaluate the answer as Python, or by sympy's parser, which does the same. Here they
evaluate values and arithmetic only, so that an answer neither runs code nor reads the entry that it is compared with.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class NoDrawing(ModuleType):
    """A module in which every name exists."""

    def __getattr__(self, name: str) -> type:
        return object


if __name__ == "preloaded":  # cellpylib imports these to draw, which takes seconds, and they write files
    for _name in ("matplotlib", "matplotlib.pyplot", "matplotlib.animation", "matplotlib.collections"):
        sys.modules[_name] = NoDrawing(_name)
    for _name in ("mpl_toolkits", "mpl_toolkits.mplot3d"):
        sys.modules[_name] = NoDrawing(_name)

import reasoning_gym  # noqa: E402
import sympy  # noqa: E402
from reasoning_gym.factory import DATASETS  # noqa: E402

if __name__ == "preloaded":  # sympy imports much of itself at its first sums; later no file may be opened
    sympy.simplify(sympy.parse_expr("x**2 + 3*x").diff(sympy.Symbol("x")))

DATA_SETS_MAX = 256
_data_sets: dict[tuple[str, str], Any] = {}
_NUMBER = re.compile(r"[0-9.]+(?:[eE][-+]?[0-9]+)?")
_VALUES = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.expr_context),
    *(ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.unaryop, ast.operator, ast.boolop, ast.cmpop),
)
_FUNCTIONS = ("abs", "max", "min", "pow", "round", "sum", "sqrt", "cbrt", "root")
_evaluate = eval


def prepare(task: str, arguments: str) -> None:
    """Makes the package's data set of a task, which scores its answers; arguments are JSON. In the forking process."""
    key = (task, arguments)
    if key in _data_sets:
        return
    if len(_data_sets) == DATA_SETS_MAX:
        _data_sets.clear()
    try:
        if task not in DATASETS or task == "composite":
            _data_sets[key] = f"{task!r} is no task of the installed reasoning-gym"
        else:
            _data_sets[key] = reasoning_gym.create_dataset(task, **json.loads(arguments))
    except Exception as error:  # noqa: BLE001  (the row is to blame, whatever the package raises)
        _data_sets[key] = f"{task} with {arguments[:200]}: {type(error).__name__}: {error}"
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "reasoning_gym" or name == "sympy.parsing.sympy_parser":
            vars(module)["eval"] = evaluated


def refusal(task: str, arguments: str) -> str:
    """Returns why there is no such task; empty if there is."""
    made = _data_sets[task, arguments]
    return made if isinstance(made, str) else ""


def score(task: str, arguments: str, answer: str, entry: Mapping[str, Any]) -> float:
    """Returns the score by the task's scorer. Raises what the scorer raises."""
    return float(_data_sets[task, arguments].score_answer(answer, entry))


def evaluated(source: str, names: dict[str, Any] | None = None, local: Mapping[str, object] | None = None) -> Any:
    """Evaluates values and arithmetic; with `names`, as sympy's parser calls it, sympy's functions too.

    Raises ValueError for anything else.

    >>> evaluated("[1, 2 * 3]"), evaluated("Integer(2) * Symbol('x')", vars(sympy))
    ([1, 6], 2*x)
    >>> evaluated("entry")
    Traceback (most recent call last):
    ValueError: no value: entry
    """
    tree = ast.parse(source.strip(), mode="eval")
    for node in ast.walk(tree):
        if not (isinstance(node, _VALUES) if names is None else _is_sympys(node, local or {})):
            raise ValueError(f"no value: {ast.unparse(node)[:200]}")
    return _evaluate(compile(tree, "answer", "eval"), names if names is not None else {"__builtins__": {}}, local)


def _is_sympys(node: ast.AST, local: Mapping[str, object]) -> bool:
    """Returns whether sympy's parser needs a node. Texts may be names and numbers only: sympy parses others."""
    match node:
        case ast.Constant(value=str(text)):
            return text.isidentifier() or bool(_NUMBER.fullmatch(text))
        case ast.Name(id=name):
            known = getattr(sympy, name, None)
            of_sympy = isinstance(known, sympy.Basic) or (isinstance(known, type) and issubclass(known, sympy.Basic))
            return of_sympy or name in _FUNCTIONS or name in local
        case ast.Call(func=called):
            return isinstance(called, ast.Name)
    return isinstance(node, (*_VALUES, ast.keyword))
