"""Seccomp filters with the system calls that a sandboxed program may make, compiled by libseccomp.

Every other call fails with EPERM; where there is no file system, one that looks for a file fails with ENOENT. Nothing
allowed here starts a process, runs a file, opens a socket, sends a signal, traces or reads another process, or changes
a limit.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from functools import lru_cache

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
    try:
        _add_rules(library, context, files=files, threads=threads)
        _checked(library.seccomp_attr_set(context, _OPTIMIZE, _BINARY_TREE))
        with os.fdopen(os.memfd_create("seccomp"), "rb") as file:
            _checked(library.seccomp_export_bpf(context, file.fileno()))
            return os.pread(file.fileno(), 1 << 20, 0)
    finally:
        library.seccomp_release(context)


def _add_rules(library: ctypes.CDLL, context: ctypes.c_void_p, *, files: bool, threads: bool) -> None:
    def rule(action: int, name: str, comparisons: Iterable[tuple[int, int, int, int]] = ()) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # this processor's kernel has no such call
            return
        given = [_Comparison(*comparison) for comparison in comparisons]
        array = (_Comparison * len(given))(*given)
        _checked(library.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, len(given), array))

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


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(-result, f"libseccomp: {os.strerror(-result)}")
