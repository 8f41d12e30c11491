"""From a function's name and arguments to a callable. Runs in worker processes too: imports nothing heavy."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from megagrpo.errors import Problem, RewardError
from megagrpo.reward.function import CALL_ARGUMENTS, RewardCallable

BUILT_IN = ("gsm8k", "math", "format")
"""Each is the module of that name in this package, with `make(**arguments) -> RewardCallable`."""


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """One entry of reward.functions. `name` is unique among them and is its key in Score.parts."""

    name: str
    function: str
    weight: float
    arguments: Mapping[str, Any]
    where: str

    @property
    def built_in(self) -> bool:
        return self.function in BUILT_IN


def load(spec: FunctionSpec) -> RewardCallable:
    """The callable of a spec, arguments bound. Raises RewardError. Importing a user's file runs its code."""
    return load_built_in(spec) if spec.built_in else _load_user_function(spec)


def load_built_in(spec: FunctionSpec) -> RewardCallable:
    make = importlib.import_module(f"megagrpo.reward.{spec.function}").make
    refusal = _refusal(make, spec.arguments)
    if refusal:
        raise RewardError(
            Problem(f"{spec.where}.arguments", given=refusal, needed=f"{spec.function}{inspect.signature(make)}")
        )
    try:
        return make(**spec.arguments)
    except ValueError as reason:
        raise RewardError(Problem(f"{spec.where}.arguments", given=str(reason))) from None


def user_file_problem(spec: FunctionSpec) -> Problem | None:
    """What can be known of FILE.py:FUNCTION without running the file."""
    file, colon, function = spec.function.rpartition(":")
    if not colon or not file.endswith(".py") or not function.isidentifier():
        return Problem(
            f"{spec.where}.function",
            given=repr(spec.function),
            needed=f"{', '.join(BUILT_IN)}, or FILE.py:FUNCTION of your own",
        )
    if not Path(file).is_file():
        return Problem(
            f"{spec.where}.function",
            given=f"{file}, which does not exist",
            needed="a Python file",
            fix="check the path; relative paths start at the working directory",
        )
    return None


def _load_user_function(spec: FunctionSpec) -> RewardCallable:
    problem = user_file_problem(spec)
    if problem is not None:
        raise RewardError(problem)
    file, _, name = spec.function.rpartition(":")
    module = _import_file(Path(file).resolve(), spec)
    function = getattr(module, name, None)
    if not callable(function):
        found = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise RewardError(
            Problem(
                f"{spec.where}.function",
                given=f"{file} has no function {name}",
                needed=f"one of its functions: {', '.join(found) or '(it has none)'}",
            )
        )
    refusal = _refusal(function, {**dict.fromkeys(CALL_ARGUMENTS, ""), **spec.arguments})
    if refusal:
        raise RewardError(
            Problem(
                f"{spec.where}.function",
                given=f"{name}{inspect.signature(function)}: {refusal}",
                needed=f"{name}({', '.join([*CALL_ARGUMENTS, *spec.arguments])}), called by these names",
            )
        )
    return partial(function, **spec.arguments)


def _import_file(file: Path, spec: FunctionSpec) -> ModuleType:
    name = f"megagrpo_user_reward:{file}"
    if name in sys.modules:
        return sys.modules[name]
    sys.path.insert(0, str(file.parent))  # the file may import its neighbours
    loader = SourceFileLoader(name, str(file))
    import_spec = ModuleSpec(name, loader, origin=str(file))
    import_spec.has_location = True  # gives the module its __file__
    module = importlib.util.module_from_spec(import_spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as raised:  # noqa: BLE001  (anything can happen in a user's file)
        del sys.modules[name]
        raise RewardError(
            Problem(
                f"{spec.where}.function",
                given=f"{file} cannot be imported: {_with_line(raised, file)}",
                fix="correct the file",
            )
        ) from None
    return module


def _with_line(raised: BaseException, file: Path) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(raised.__traceback__) if frame.filename == str(file)]
    line = raised.lineno if isinstance(raised, SyntaxError) else lines[-1] if lines else None
    text = f"{type(raised).__name__}: {raised.msg if isinstance(raised, SyntaxError) else raised}"
    return f"{text} (line {line})" if line else text


def _refusal(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Why `function` cannot be called with these keyword arguments; empty if it can."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as reason:
        return str(reason)
    except ValueError:  # a callable written in C may have no signature to check
        return ""
    return ""
