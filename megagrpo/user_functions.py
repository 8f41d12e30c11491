"""FILE.py:FUNCTION of a user's own: from a recipe's text to a callable. Imports nothing heavy."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from megagrpo.errors import MegagrpoError, Problem, RecipeError

IMPORTED = "a file that can be imported"


@dataclass(frozen=True)
class UserFunction:
    """A function of a user's file, and how a recipe calls it: with `inputs`, then the recipe's arguments by name."""

    where: str  # the field of the recipe that names it
    text: str  # FILE.py:FUNCTION
    arguments: Mapping[str, Any]

    def load(self) -> Callable[..., Any]:
        """Imports the file, unless this process has. Raises RecipeError."""
        function = load_function(self.text, self.where, RecipeError)
        if refusal := refused_call(function, None, **self.arguments):
            name = self.text.rpartition(":")[2]
            given = f"{name}{inspect.signature(function)}: {refusal}"
            needed = f"{name}({', '.join(['inputs', *self.arguments])})"
            raise RecipeError(Problem(self.where, given, needed, "change the function, or the arguments in the recipe"))
        return function

    def __call__(self, inputs: object) -> Any:
        """Returns the function's result. Raises RecipeError if it cannot be loaded, or raises anything itself."""
        function = self.load()
        try:
            return function(inputs, **self.arguments)
        except Exception as raised:  # (anything can happen in a user's function)
            file = Path(self.text.rpartition(":")[0]).resolve()
            given = f"{self.text} failed: {_with_line(raised, file)}"
            raise RecipeError(Problem(self.where, given, "a function that returns", "correct the file")) from raised


def file_problem(text: str, where: str, otherwise: str = "") -> Problem | None:
    """Returns the problem of FILE.py:FUNCTION that can be found without running the file, if there is one."""
    file, colon, function = text.rpartition(":")
    if not colon or not file.endswith(".py") or not function.isidentifier():
        return Problem(where, given=repr(text), needed=f"{otherwise}FILE.py:FUNCTION of your own")
    if not Path(file).is_file():
        given = f"{file}, which does not exist"
        return Problem(where, given, "a Python file", "check the path; relative paths start at the working directory")
    return None


def load_function(text: str, where: str, error: type[MegagrpoError], source: bytes | None = None) -> Callable[..., Any]:
    """Loads FILE.py:FUNCTION. Runs the file (`source` in its place), once in a process. Raises `error`."""
    if source is None and (problem := file_problem(text, where)):
        raise error(problem)
    file, _, name = text.rpartition(":")
    module = _imported(Path(file).resolve(), where, error, source)
    function = getattr(module, name, None)
    if not callable(function):
        names = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        needed = f"one of its functions: {', '.join(names) or '(it has none)'}"
        raise error(Problem(where, f"{file} has no function {name}", needed, "check the name"))
    return function  # type: ignore[no-any-return]


def refused_call(function: Callable[..., Any], /, *positional: object, **named: object) -> str:
    """Returns the reason why `function` cannot be called in this way; empty if it can."""
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError as reason:
        return str(reason)
    except ValueError:  # a callable written in C may have no signature to check
        return ""
    return ""


def _imported(file: Path, where: str, error: type[MegagrpoError], source: bytes | None) -> ModuleType:
    name = f"megagrpo_user_file:{file}"
    if name in sys.modules:
        return sys.modules[name]
    sys.path.insert(0, str(file.parent))  # the file may import its neighbours
    loader = SourceFileLoader(name, str(file))
    spec = ModuleSpec(name, loader, origin=str(file))
    spec.has_location = True  # gives the module its __file__
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # nothing is written beside a user's files
    try:
        if source is None:
            loader.exec_module(module)
        else:
            exec(loader.source_to_code(source, str(file)), vars(module))
    except KeyboardInterrupt:  # of the user's own, mostly
        raise
    except BaseException as raised:  # noqa: BLE001  (anything can happen in a user's file)
        del sys.modules[name]
        given = f"{file} cannot be imported: {_with_line(raised, file)}"
        raise error(Problem(where, given, IMPORTED, "correct the file")) from None
    finally:
        sys.dont_write_bytecode = writes
    return module


def _with_line(raised: BaseException, file: Path) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(raised.__traceback__) if frame.filename == str(file)]
    line = raised.lineno if isinstance(raised, SyntaxError) else lines[-1] if lines else None
    text = f"{type(raised).__name__}: {raised.msg if isinstance(raised, SyntaxError) else raised}"
    return f"{text} (line {line})" if line else text
