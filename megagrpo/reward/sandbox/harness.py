"""The process inside a sandbox: forks one child for each program, limits it, and reports how it ended.

It runs from its source text with no package beside it. So it imports only the standard library and the module that its
user has it preload. It reads neither programs nor their output: those are files whose descriptors it passes to the
child. A child's output is trusted only as the bytes that the program wrote; the expected output is not in the sandbox.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import itertools
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import tokenize  # noqa: F401  traceback imports it when it prints, from Python 3.13 on
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
DESCRIPTORS_MAX = 64
LINE_BYTES_MAX = 16 << 20
"""Longest message of the other side that a program or a test reads."""
MESSAGE_BYTES_MAX = 1 << 17
"""Longest request for a job."""
WORK_DIRECTORY = "/box"

# The most common imports of programs: imported once here, so that each child has them. LiveCodeBench gives function
# tests these names without an import.
COMMON_NAMES = """
from typing import *
from collections import *
from heapq import *
from bisect import *
from itertools import *
from functools import *
from math import *
from string import *
from random import *
from operator import *
from copy import *
import bisect, collections, copy, datetime, decimal, fractions, functools, heapq, io, itertools, json, math, operator
import os, queue, random, re, statistics, string, sys, threading, time, typing
"""

IMPORTED_FIRST = """
abc argparse array ast asyncio base64 bdb binascii calendar cmath cmd code codecs codeop collections.abc colorsys
concurrent.futures configparser contextlib contextvars csv ctypes dataclasses difflib dis doctest email encodings enum
errno faulthandler fileinput fnmatch gc getopt glob graphlib gzip hashlib hmac html html.parser http importlib
importlib.util inspect keyword linecache locale logging lzma marshal mmap multiprocessing numbers opcode optparse
os.path pathlib pdb pickle pickletools pkgutil platform posixpath pprint profile reprlib resource runpy sched secrets
select selectors shelve shlex shutil signal socket ssl stat stringprep struct subprocess symtable sysconfig tempfile
textwrap timeit token tokenize trace traceback tracemalloc types unicodedata unittest unittest.mock urllib
urllib.parse urllib.request uuid warnings weakref xml xml.etree xml.etree.ElementTree zipfile zlib zoneinfo
"""
"""Modules of the standard library whose import only defines names. They are imported outside of the filter, where
others could start a program, as `antigravity` does."""

_system = ctypes.CDLL(None, use_errno=True)


ENDS_A_LOOP = (StopIteration, StopAsyncIteration)
"""Exceptions that a program must not raise in a test: `all(map(...))` would take them for the end."""


class ProgramEndedError(BaseException):
    """The error of a program that died or sent a bad message. Not an Exception, so that a test does not catch it."""


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def main() -> None:
    """Serves the socket whose number is the first argument until its other end is closed."""
    config = json.loads(sys.argv[2])
    control = socket.socket(fileno=int(sys.argv[1]))
    _system.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS_MAX, DESCRIPTORS_MAX))
    sys.path.extend(config["packages"])
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # site defines these, which is not imported here
    common: dict[str, Any] = {}
    exec(compile(COMMON_NAMES, "common.py", "exec"), common)  # the first `compile` of a process takes a millisecond
    for name in dir(builtins):
        common.pop(name, None)  # math's and operator's pow takes no modulus
    if config["preload"]:
        preloaded = _module("preloaded", {})
        exec(compile(config["preload"], "preloaded.py", "exec"), vars(preloaded))
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES_MAX, 8)
        if not message:
            return
        if not descriptors:
            continue  # a program was to be killed that had ended by itself
        request = json.loads(message)
        if request["prepare"]:
            preloaded.prepare(*request["prepare"])
        child = os.fork()
        if child == 0:
            finished = False
            try:
                finished = _finished(functools.partial(_run, request, descriptors, config, common))
            finally:
                os._exit(not finished)
        for descriptor in descriptors:
            os.close(descriptor)
        _answer(control, child, woken)


def _answer(control: socket.socket, child: int, woken: int) -> None:
    ended, status = 0, 0
    poll = select.poll()  # select would refuse descriptors from 1,024 on
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while not ended:
        if woken in dict(poll.poll()):
            os.read(woken, 4096)
            ended, status = os.waitpid(child, os.WNOHANG)
        else:
            message = control.recv(4096)  # to kill the program; empty if the other end is closed
            os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0)
            if not message:
                sys.exit()
    control.send(json.dumps({"status": os.waitstatus_to_exitcode(status), "clean": _clean()}).encode())


def _clean() -> bool:
    """Returns whether programs left no file."""
    try:
        with os.scandir(WORK_DIRECTORY) as files:  # there may be millions
            return next(files, None) is None
    except OSError as error:
        return isinstance(error, FileNotFoundError)


# --- the child: limits, then the program ------------------------------------------------------------------------------


def _finished(run: Callable[[], None]) -> bool:
    """Calls `run`, then ends the program as Python does. Returns whether neither raised an exception."""
    finished = True
    for part in (run, _finish_program):
        try:
            part()
        except SystemExit:
            pass  # graders of programming contests do not look at the exit code
        except BaseException:  # noqa: BLE001  (a program can raise anything)
            traceback.print_exc()
            finished = False
    return finished


def _run(request: Mapping[str, Any], descriptors: list[int], config: Mapping[str, Any], common: dict[str, Any]) -> None:
    """Runs one job. Descriptors: the job, the file of its errors, and one or two sockets."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    job = json.loads(os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0))
    os.dup2(descriptors[1], 1)
    os.dup2(descriptors[1], 2)
    channels = [socket.socket(fileno=descriptor) for descriptor in descriptors[2:]]
    for first, last in itertools.pairwise([2, *sorted(descriptors[2:]), DESCRIPTORS_MAX]):
        os.closerange(first + 1, last)
    limits = {
        resource.RLIMIT_CPU: request["cpu_seconds"],
        resource.RLIMIT_AS: config["memory_bytes"],
        resource.RLIMIT_FSIZE: config["output_bytes"],
    }
    if config["threads"]:
        limits[resource.RLIMIT_NPROC] = config["threads"]
    for kind, value in limits.items():  # before anything reads the program
        resource.setrlimit(kind, (value, value))
    if config["imports_first"]:
        _import_first(job["source"], packages=bool(config["packages"]))
    _confine(config)
    sys.argv[:] = ["program.py"]
    MODES[request["mode"]](job, channels, common)


def _finish_program() -> None:
    """Joins threads, runs exit functions and flushes the output, as Python does at the end of a program."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _import_first(source: str, *, packages: bool) -> None:
    """Imports the modules of IMPORTED_FIRST and of packages that the source names: later no file can be opened.

    A package's `__main__` would run a program of its own.
    """
    allowed = set(IMPORTED_FIRST.split())
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            of_package = packages and parts[0] not in sys.stdlib_module_names and "__main__" not in parts
            if name in allowed or of_package:
                with contextlib.suppress(Exception):  # the program meets it again
                    __import__(name)


def _confine(config: Mapping[str, Any]) -> None:
    """Switches to another user if possible, arranges to die with the harness, and installs the system call filter."""
    if config["user"]:
        os.setgroups([])
        os.setresgid(config["user"], config["user"], config["user"])
        os.setresuid(config["user"], config["user"], config["user"])
    parent = os.getppid()
    _system.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    instructions = bytes.fromhex(config["filter"])
    if instructions:
        program = _Filter(len(instructions) // 8, instructions)
        if _system.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or _system.prctl(
            PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
        ):
            raise OSError(ctypes.get_errno(), "prctl")


def _module(name: str, names: Mapping[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names)
    vars(module).update({"__name__": name, "__builtins__": builtins})
    sys.modules[name] = module
    return module


def _run_scripts(job: Mapping[str, Any], channels: list[socket.socket], common: Mapping[str, Any]) -> None:
    """Runs the program as a script each time that the channel brings its standard input, output and error.

    Answers a line: 1, or 0 after an exception. One process for all runs saves most of the time of a short program.
    """
    code = compile(job["source"], "program.py", "exec")
    recursion = sys.getrecursionlimit()
    while True:
        _, files, _, _ = socket.recv_fds(channels[0], 1, 3)
        if len(files) < 3:
            return
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        opened: list[Any] = [
            open(number, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            for number, mode in enumerate("rww")
        ]
        sys.stdin, sys.stdout, sys.stderr = opened
        sys.setrecursionlimit(recursion)
        names = vars(_module("__main__", {}))
        finished = _finished(functools.partial(exec, code, names))
        opened[1].flush()  # the program may have put another object in its place
        channels[0].send(b"1\n" if finished else b"0\n")


def _serve_calls(job: Mapping[str, Any], channels: list[socket.socket], common: Mapping[str, Any]) -> None:
    """Runs the program as a module, and calls its functions by messages on a socket: one line of JSON each way."""
    module = _module("program", common)
    exec(compile(job["source"], "program.py", "exec"), vars(module))
    objects: list[object] = []
    with channels[0].makefile("rb") as requests:
        while line := requests.readline(LINE_BYTES_MAX):
            request = json.loads(line)
            try:
                answer = {"value": encode(_result(request, module, objects), objects)}
            except Exception as raised:  # noqa: BLE001
                answer = {"raised": type(raised).__name__, "text": str(raised)[:200]}
            _send(channels[0], answer)


def _result(request: Mapping[str, Any], module: types.ModuleType, objects: list[object]) -> object:
    name, target_of = request["object"], objects.__getitem__
    if not isinstance(name, str):
        target: Any = target_of(name)
    elif "Solution" in vars(module) and name not in vars(module):  # as on LeetCode
        target = getattr(module.Solution(), name)
    else:
        target = getattr(module, name)
    match request["do"]:
        case "call":
            return target(*decode(request["arguments"], target_of), **decode(request["named"], target_of))
        case "attribute":
            return getattr(target, request["name"])
        case "set":
            setattr(target, request["name"], decode(request["value"], target_of))
            return None
        case "item":
            return target[decode(request["key"], target_of)]
        case "length":
            return len(target)
        case _:
            return list(target)


# --- tests that are code: in another sandbox than the program's -------------------------------------------------------


def _run_tests(job: Mapping[str, Any], channels: list[socket.socket], common: Mapping[str, Any]) -> None:
    """Runs each test, with the program's functions at the other end of a socket. Answers 1 or 0 for each,
    and e for one in which the program ended.

    The program returns only data, or a reference to an object that stays there: equal to nothing but itself.
    """
    verdicts, program = channels
    connection = Connection(program)
    names: dict[str, Any] = {name: Remote(connection, name) for name in job["names"]}
    exec(compile(job["source"], "setup.py", "exec"), names)
    for test in job["tests"]:
        verdict = b"1"
        try:
            exec(compile(test, "test.py", "exec"), dict(names))
        except ProgramEndedError:
            verdict = b"e"
        except (Exception, SystemExit):  # noqa: BLE001
            traceback.print_exc()
            verdict = b"0"
        verdicts.send(verdict)
        if verdict == b"e":
            return


class Connection:
    """A connection to the program, in lines of JSON. Raises ProgramEndedError, or what the program's code raised."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.answers = channel.makefile("rb")

    def ask(self, request: Mapping[str, Any]) -> object:
        try:
            _send(self.channel, request)
            line = self.answers.readline(LINE_BYTES_MAX)
            answer = json.loads(line) if line.endswith(b"\n") else None
            if isinstance(answer, dict) and "value" in answer:
                return decode(answer["value"], lambda number: Remote(self, number))
        except (OSError, ValueError, RecursionError) as error:
            raise ProgramEndedError from error
        if not isinstance(answer, dict):
            raise ProgramEndedError
        kind = getattr(builtins, str(answer.get("raised")), None)
        if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, ENDS_A_LOOP):
            kind = RuntimeError
        raise kind(str(answer.get("text")))


class Remote:
    """A function or object in the program, by its name there or by its number among the returned objects."""

    def __init__(self, connection: Connection, number: str | int) -> None:
        self._connection = connection
        self._number = number

    def _ask(self, do: str, **more: object) -> Any:
        return self._connection.ask({"do": do, "object": self._number, **more})

    def __call__(self, *arguments: object, **named: object) -> object:
        return self._ask("call", arguments=encode(list(arguments)), named=encode(named))

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("attribute", name=name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("_connection", "_number"):
            super().__setattr__(name, value)
        else:
            self._ask("set", name=name, value=encode(value))

    def __getitem__(self, key: object) -> object:
        return self._ask("item", key=encode(key))

    def __len__(self) -> int:
        return int(self._ask("length"))

    def __iter__(self) -> Any:
        return iter(self._ask("list"))


# --- values as JSON ---------------------------------------------------------------------------------------------------


def encode(value: Any, objects: list[object] | None = None) -> object:
    """Returns a value as JSON: lists and plain values unchanged, others as {kind: content}.

    Appends an object that is no data to `objects`, and encodes its index there. Raises TypeError without `objects`.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Remote):
        return {"object": value._number}
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, list):
        return [encode(item, objects) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, objects), encode(item, objects)] for key, item in value.items()]}
    for name, kind in KINDS.items():
        if isinstance(value, kind):
            return {name: [encode(item, objects) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "tolist"):  # numpy
        return encode(value.tolist(), objects)
    if objects is None:
        raise TypeError(f"a {type(value).__name__} cannot be sent to the program")
    objects.append(value)
    return {"object": len(objects) - 1}


KINDS: Mapping[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}


def decode(value: Any, object_of: Callable[[Any], object]) -> Any:
    """Returns the value that `encode` made JSON of. Raises ValueError for any other JSON."""
    if isinstance(value, list):
        return [decode(item, object_of) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("no value")
    ((name, content),) = value.items()
    try:
        if name in KINDS:
            return KINDS[name](decode(item, object_of) for item in content)
        if name == "bytes":
            return bytes.fromhex(content)
        return complex(*content) if name == "complex" else object_of(content)
    except (TypeError, IndexError) as error:
        raise ValueError(str(error)) from error


def _send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


MODES: Mapping[str, Callable[[Mapping[str, Any], list[socket.socket], Mapping[str, Any]], None]] = {
    "scripts": _run_scripts,
    "calls": _serve_calls,
    "tests": _run_tests,
}

if __name__ == "__main__":
    main()
