"""Runs Python programs that no one has read: with a time limit, no network, and no files but their own.

A Sandbox is one process (harness.py) that forks a child for each program. Around it is a bubblewrap container
(namespaces of its own: processes, mounts, network, IPC, host name; only the interpreter and system libraries to read,
and an empty directory in memory to write), or nothing where no namespaces work. In both cases every child has resource
limits and a seccomp filter. The filter allows no new process, so there is no fork bomb and no daemon: a program is one
process, dead when `finish` returns. Without a container the filter allows no file to be opened.

Inputs, programs and outputs are files in memory, which the child gets as descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from megagrpo.errors import Problem, RewardError
from megagrpo.reward.sandbox import harness
from megagrpo.reward.sandbox.harness import WORK_DIRECTORY

Isolation = Literal["auto", "bubblewrap", "seccomp", "none"]
Mode = Literal["scripts", "calls", "tests"]

START_SECONDS = 30.0
END_SECONDS = 10.0
THREADS = 32
"""Threads of a program, where the kernel counts them for the program alone; otherwise it may start none."""
USERS_FROM = 0x70000000
"""First number of the users as whom programs run if this process is root, with an offset from its process id."""
_numbers = itertools.count()
HARNESS = Path(harness.__file__).read_text()
STDERR_BYTES_MAX = 2000
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": WORK_DIRECTORY, "TMPDIR": WORK_DIRECTORY, "LANG": "C.UTF-8",
               "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8", "PYTHONDONTWRITEBYTECODE": "1",
               "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
               "MALLOC_ARENA_MAX": "1"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one program. Wall-clock and CPU seconds are given to each run."""

    memory_bytes: int = 1 << 30
    """Size of its address space."""
    output_bytes: int = 4 << 20
    """Most bytes of standard output, of standard error, and of each file."""
    disk_bytes: int = 64 << 20
    """Most bytes of all its files together."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to isolate a program, as it was found to work here."""

    isolation: Literal["bubblewrap", "seccomp", "none"]
    user_namespace: bool = False
    other_user: bool = False
    threads: bool = False

    def __str__(self) -> str:
        if self.isolation != "bubblewrap":
            return self.isolation
        return "bubblewrap with a user namespace" if self.user_namespace else "bubblewrap as root"


class Sandbox:
    """A harness and the container around it. Not for several threads. Raises RewardError if it does not start."""

    def __init__(self, kind: Kind, limits: Limits, packages: Sequence[str] = (), preload: str = "") -> None:
        """Starts the harness. packages: directories that programs may import from. preload: the source of a module
        `preloaded`, run once; every program finds the work of its function `prepare` done."""
        self.kind = kind
        self.limits = limits
        self.packages = tuple(packages)
        self.preload = preload
        self._clean = True
        self._process: subprocess.Popen[bytes] | None = None
        # Two sandboxes of one process are not the same user either: one may run the tests of the other's program.
        self._user = USERS_FROM + 8 * os.getpid() + next(_numbers) % 8 if kind.other_user else 0
        self._start()

    def renew(self) -> None:
        """Restarts the harness if it ended or programs left files: a program of another response must not see them."""
        if not self._clean:
            self.close()
        if self._process is None:
            self._start()

    def start(
        self,
        mode: Mode,
        job: Mapping[str, Any],
        channels: Sequence[socket.socket],
        cpu_seconds: int,
        prepare: Sequence[str] = (),
    ) -> None:
        """Starts a job with these sockets, which its function in harness.MODES uses. One job at a time.

        prepare: arguments of the preloaded module's function of that name, which is called before the job and outside
        of it.
        """
        if self._process is None:
            self._start()
        self._errors, source = memory_file(b""), memory_file(json.dumps(job).encode())
        request = {"mode": mode, "cpu_seconds": cpu_seconds, "prepare": prepare}
        with contextlib.suppress(OSError):  # it ended just now: `finish` will say so
            sent = [source, self._errors, *(channel.fileno() for channel in channels)]
            socket.send_fds(self._control, [json.dumps(request).encode()], sent)
        os.close(source)

    def finish(self, seconds: float = 0.0) -> tuple[int, bytes]:
        """Returns the status of the running job: 0, 1 after an exception, or minus the signal that killed it; and the
        errors that it wrote.

        Kills the job after `seconds`; it is dead on return. Raises RewardError if the harness is gone, which no program
        can cause: nothing is known of the program then.
        """
        answer = self._answer(seconds)
        if answer is None:
            with contextlib.suppress(OSError):
                self._control.send(b"kill")
            answer = self._answer(END_SECONDS)
        errors = read_and_close(self._errors, self.limits.output_bytes)
        if answer is None:
            self.close()
            given = f"{self.kind}: its process ended, or does not answer"
            raise RewardError(Problem("the sandbox of programs", given, "a process that is left alone"))
        self._clean = self._clean and answer["clean"]
        return answer["status"], errors

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        self._control.settimeout(max(0.0001, seconds))
        try:
            return json.loads(self._control.recv(4096) or "null")
        except OSError:
            return None

    def close(self) -> None:
        """Ends the sandbox with everything in it."""
        if self._process is None:
            return
        self._control.close()  # the harness ends, and with it, as the first of its namespace, all others
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors = memory_file(b"")
        try:
            with theirs:
                self._process = subprocess.Popen(
                    self._command(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,
                )
            self._control.settimeout(START_SECONDS)
            ready = self._control.recv(4096) == b"ready"
        except OSError as error:
            os.write(errors, str(error).encode())
            ready = False
        finally:
            reason = read_and_close(errors, STDERR_BYTES_MAX).decode(errors="replace").strip()
        self._clean = True
        if not ready:
            self.close()
            raise refusal(f"{self.kind}: {reason or 'it did not start'}")

    def _command(self, control: int) -> list[str]:
        kind, limits = self.kind, self.limits
        contained = kind.isolation == "bubblewrap"
        threads = kind.threads
        instructions = b"" if kind.isolation == "none" else filter_bytes(files=contained, threads=threads)
        config = {
            "memory_bytes": limits.memory_bytes,
            "output_bytes": limits.output_bytes,
            "threads": THREADS if threads else 0,
            "user": self._user,
            "filter": instructions.hex(),
            "imports_first": kind.isolation == "seccomp",
            "packages": self.packages,
            "preload": self.preload,
        }
        interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        inside = [interpreter, "-s", "-S", "-P", "-c", HARNESS, str(control), json.dumps(config)]
        return [*self._container(), *inside] if contained else inside

    def _container(self) -> list[str]:
        prefixes = [] if Path(sys.base_prefix).is_relative_to("/usr") else [sys.base_prefix]
        shared = (*SYSTEM, *prefixes, *self.packages)
        # bwrap makes those that it needs itself, but for its own user only.
        parents = sorted({parent for path in (*shared, *DEVICES) for parent in Path(path).parents} - {Path("/")})
        directories = [part for path in parents for part in ("--perms", "755", "--dir", str(path))]
        binds = [part for path in shared for part in ("--ro-bind-try", path, path)]
        devices = [part for path in DEVICES for part in ("--dev-bind", path, path)]
        # As root, no user namespace: in one all would be the same user, whose processes the kernel does not count.
        # The harness may then become other users and kill their processes, and nothing else that root may.
        capabilities = [part for name in ("SETUID", "SETGID", "KILL") for part in ("--cap-add", f"CAP_{name}")]
        return [
            shutil.which("bwrap") or "bwrap",
            *("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"),
            *(["--unshare-user"] if self.kind.user_namespace else capabilities),
            *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
            *directories,
            *binds,
            *devices,
            *("--perms", "1777", "--size", str(self.limits.disk_bytes), "--tmpfs", WORK_DIRECTORY),
            *("--chdir", WORK_DIRECTORY, "--remount-ro", "/"),
        ]


def memory_file(content: bytes) -> int:
    """Returns the descriptor of a file with this content that is in memory only."""
    file = os.memfd_create("sandbox")
    written = 0
    while written < len(content):
        written += os.pwrite(file, content[written:], written)
    return file


def read_and_close(file: int, most: int) -> bytes:
    """Returns the first `most` bytes of a file, and closes it."""
    try:
        return os.pread(file, most, 0)
    finally:
        os.close(file)


def installed_packages() -> list[str]:
    """Returns the directories of the packages that are installed here, for programs that may import them."""
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def refusal(given: str) -> RewardError:
    """Makes the error that says why there is no sandbox here, and what to do."""
    needed = "bubblewrap 0.7 or later that can make namespaces, or seccomp, with libseccomp.so.2"
    fix = "apt-get install bubblewrap libseccomp2, or isolation: none where a container that you trust holds all"
    return RewardError(Problem("the sandbox of programs", given, needed, fix))


# --- the filter of system calls, compiled by libseccomp ---------------------------------------------------------------
# Every other call fails with EPERM; where there is no file system, one that looks for a file fails with ENOENT. Nothing
# allowed here starts a process, runs a file, opens a socket, sends a signal, traces or reads another process, or
# changes a limit.

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # seccomp.h
_NOT_EQUAL, _EQUAL, _MASKED_EQUAL = 1, 4, 7
_OPTIMIZE, _BINARY_TREE = 8, 2

CLONE_THREAD = 0x10000
AT_EMPTY_PATH = 0x1000

ALWAYS = (
    "brk", "mmap", "munmap", "mremap", "mprotect", "madvise", "futex", "rseq", "set_robust_list", "get_robust_list",
    "set_tid_address", "arch_prctl", "membarrier", "sched_yield", "sched_getaffinity", "gettid", "getcpu", "getpid",
    "getppid", "getuid", "geteuid", "getgid", "getegid", "getresuid", "getresgid", "getgroups", "getpgrp",
    "getpgid", "getsid", "getrlimit", "getrusage", "times", "sysinfo", "uname", "getrandom", "read", "write",
    "readv", "writev", "pread64", "pwrite64", "preadv", "pwritev", "lseek", "close", "close_range", "dup", "dup2",
    "dup3", "fcntl", "fstat", "ftruncate", "poll", "ppoll", "select", "pselect6", "epoll_create1", "epoll_ctl",
    "epoll_wait", "epoll_pwait", "eventfd2", "pipe", "pipe2", "socketpair", "recvfrom", "recvmsg", "shutdown",
    "clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday", "time", "alarm", "getitimer",
    "setitimer", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "rt_sigtimedwait", "rt_sigpending",
    "sigaltstack", "pause", "restart_syscall", "exit", "exit_group",
)  # fmt: skip
FILES = (
    "open", "openat", "creat", "stat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2",
    "readlink", "readlinkat", "getdents", "getdents64", "getcwd", "chdir", "fchdir", "mkdir", "mkdirat", "rmdir",
    "unlink", "unlinkat", "rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat", "truncate",
    "fallocate", "fsync", "fdatasync", "flock", "utimensat", "chmod", "fchmod", "fchmodat", "umask", "statfs",
    "fstatfs", "sendfile", "copy_file_range",
)  # fmt: skip
"""Calls that are allowed if the sandbox has a file system of its own."""
LOOKS = (
    "stat", "lstat", "statx", "access", "faccessat", "faccessat2", "readlink", "readlinkat", "chdir", "rmdir", "unlink",
    "unlinkat", "rename", "renameat", "renameat2", "truncate", "utimensat", "chmod", "fchmodat", "statfs",
)  # fmt: skip
"""Calls that fail with ENOENT if there is no file system. With one, they are among FILES."""
TERMINAL_QUESTIONS = (0x5401, 0x5413, 0x5421, 0x541B, 0x5451, 0x5450)
"""ioctl requests that Python's files make: TCGETS, TIOCGWINSZ, FIONBIO, FIONREAD, FIOCLEX, FIONCLEX."""


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


@lru_cache
def filter_bytes(*, files: bool, threads: bool) -> bytes:
    """Returns the filter as an array of struct sock_filter.

    With `files`, calls that name files are allowed; otherwise they find no file and can make none. Raises OSError if
    libseccomp is not installed or refuses.
    """
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ERRNO | errno.EPERM)))
    if not context:
        raise OSError("seccomp_init failed")

    def rule(action: int, name: str, comparisons: Iterable[tuple[int, int, int, int]] = ()) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # this processor's kernel has no such call
            return
        given = [_Comparison(*comparison) for comparison in comparisons]
        array = (_Comparison * len(given))(*given)
        _checked(library.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, len(given), array))

    try:
        for name in (*ALWAYS, *(FILES if files else ())):
            rule(_ALLOW, name)
        if not files:
            rule(_ALLOW, "newfstatat", [(3, _MASKED_EQUAL, AT_EMPTY_PATH, AT_EMPTY_PATH)])  # how glibc does fstat
            rule(_ALLOW, "getcwd")
            for name in LOOKS:
                rule(_ERRNO | errno.ENOENT, name)
            rule(_ERRNO | errno.ENOENT, "newfstatat", [(3, _MASKED_EQUAL, AT_EMPTY_PATH, 0)])
            for name, flags in {"open": 1, "openat": 2}.items():
                rule(_ERRNO | errno.ENOENT, name, [(flags, _MASKED_EQUAL, os.O_CREAT, 0)])
        if threads:
            rule(_ALLOW, "clone", [(0, _MASKED_EQUAL, CLONE_THREAD, CLONE_THREAD)])
        rule(_ERRNO | errno.ENOSYS, "clone3")  # its flags are in memory: glibc takes clone instead
        rule(_ALLOW, "sendto", [(4, _EQUAL, 0, 0)])  # to the other end of a socketpair, to no address
        for request in TERMINAL_QUESTIONS:
            rule(_ALLOW, "ioctl", [(1, _EQUAL, request, 0)])
        # Programs raise their own limits and would end if they could not: they are told that it was done.
        rule(_ALLOW, "prlimit64", [(2, _EQUAL, 0, 0)])
        rule(_ERRNO, "prlimit64", [(2, _NOT_EQUAL, 0, 0)])
        rule(_ERRNO, "setrlimit")
        _checked(library.seccomp_attr_set(context, _OPTIMIZE, _BINARY_TREE))
        with os.fdopen(os.memfd_create("seccomp"), "rb") as file:
            _checked(library.seccomp_export_bpf(context, file.fileno()))
            return os.pread(file.fileno(), 1 << 20, 0)
    finally:
        library.seccomp_release(context)


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(-result, f"libseccomp: {os.strerror(-result)}")
