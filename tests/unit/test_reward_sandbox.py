"""Programs that attack the sandbox which runs them: each costs its own verdict, and finds nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest

from megagrpo.errors import RewardError
from megagrpo.reward.sandbox import programs
from megagrpo.reward.sandbox.harness import IMPORTED_FIRST
from megagrpo.reward.sandbox.programs import CodeTests, Program, Ran, verdicts, working_kind
from megagrpo.reward.sandbox.sandbox import Kind, Limits, Sandbox, installed_packages
from megagrpo.reward.scorer import Scorer
from megagrpo.reward.verifiers.code import make
from tests.unit.test_reward_faults import below
from tests.unit.test_reward_scorer import make_group, reward_of

KINDS = ("bubblewrap", "seccomp")
needs_bubblewrap = pytest.mark.needs("bubblewrap")
EACH_KIND = (pytest.param("bubblewrap", marks=needs_bubblewrap), "seccomp")
MEMORY_MIB = 257 + os.getpid() % 199
"""Nearly a number of this process's own, and not LIMITS', by which it knows its sandboxes."""
LIMITS = Limits(memory_bytes=256 << 20, output_bytes=1 << 20, disk_bytes=4 << 20)
ADDS = "print(sum(map(int, input().split())))"

REFUSED = """
def refused(what, *arguments):
    try:
        what(*arguments)
    except OSError as error:
        return True
    print("escaped", what, arguments)
"""

ENDED_BY_FORCE = {
    "an endless loop": "while True: pass",
    "an endless sleep": "import time\nwhile True:\n try: time.sleep(1000)\n except BaseException: pass",
    "a regular expression that never ends": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
    "an endless calculation": "9**9**9**9",
    "signals that are ignored": (
        "import signal\n[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15, 24)]\nwhile True: pass"
    ),
    "threads that do not end": (
        "import threading\ndef f():\n while True: pass\nfor _ in range(9):\n try: threading.Thread(target=f).start()\n"
        " except RuntimeError: f()"
    ),
    "a verdict without an end": (
        "import os\nwhile True:\n for n in range(3, 64):\n  try: os.write(n, b'1')\n  except OSError: pass"
    ),
}
"""Attacks on the time."""

FAILS = {
    "memory": "x = bytearray(1 << 40)",
    "memory, bit by bit": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "a flood of output": "import sys\nwhile True: sys.stdout.write('x' * (1 << 20))",
    "a flood of errors": "import sys\nwhile True: sys.stderr.write('x' * (1 << 20))",
    "a flood past Python": "import os\nwhile True: os.write(1, b'x' * (1 << 20))",
    "an output with a hole": "import os\nos.lseek(1, 1 << 40, 0)\nos.write(1, b'x')",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "closed descriptors": "import os\nos.closerange(0, 100)\nraise SystemExit",
    "a module that is a program's trap": "import pickle\npickle.loads(b'cos\\nabort\\n(tR.')",
    "deep brackets": "eval('(' * 100000)",
    "the harness's own functions": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n frame.f_globals.clear()\n frame = frame.f_back"
    ),
}
"""Attacks on other limits, and on the process itself, that end with an error."""

HELD = {
    "a fork bomb": "import os\n[refused(f) for f in (os.fork, os.forkpty) for _ in range(99)]",
    "a child by subprocess": "import subprocess\nrefused(subprocess.Popen, ['/bin/sleep', '9'])",
    "another program in its place": "import os\nrefused(os.execv, '/bin/echo', ['echo', 'escaped'])",
    "the internet": "import socket\n[refused(socket.socket, family) for family in (1, 2, 10, 16, 17)]",
    "a listener": "import socket\nrefused(lambda: socket.socket().connect(('127.0.0.1', PORT)))",
    "datagrams to a path": (
        "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "refused(a.sendto, b'x', '/run/systemd/notify')\nrefused(a.connect, '/dev/log')"
    ),
    "a secret file": "refused(open, SECRET)\nimport os\nrefused(os.listdir, os.path.dirname(SECRET))",
    "a secret file at home": "refused(open, HOME)\nrefused(open, '/etc/shadow')",
    "a link to a secret file": (
        "import os\ntry: os.symlink(SECRET, 'link')\nexcept OSError: pass\n"
        "refused(open, 'link')\nrefused(os.chroot, '/')"
    ),
    "other processes' files": (
        "import os\n[refused(open, f'/proc/{n}/{f}') for n in ('self', '1', os.getppid()) for f in ('environ', 'mem')]"
    ),
    "killing all others": "import os\n[refused(os.kill, n, 9) for n in (os.getppid(), 1, -1, 0)]",
    "tracing": (
        "import ctypes, os\nc, parent = ctypes.CDLL(None), os.getppid()\n"
        "for name, *given in (('ptrace', 16, parent, 0, 0), ('process_vm_readv', parent, 0, 0, 0, 0, 0),\n"
        "  ('unshare', 0x10000000), ('mount', 0, 0, 0, 0, 0), ('memfd_create', b'x', 0), ('shmget', 0, 1, 512)):\n"
        " if getattr(c, name)(*given) != -1: print('escaped', name)"
    ),
    "the harness's sources": "import sys\nif len(sys.argv) > 1: print('escaped', sys.argv)",
    "a device": "import os\nrefused(os.mknod, 'x', 0o60600, 0x0801)\nrefused(open, '/dev/sda')",
    "more of a limit": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 50, 1 << 50))\n"
        "try: x = bytearray(1 << 40)\nexcept MemoryError: pass\nelse: print('escaped')"
    ),
    "its user": "import os\nrefused(os.setuid, 0)\nrefused(os.setgid, 0)\nrefused(os.setresuid, 0, 0, 0)",
}
"""Attempts to get out, each of which must be refused."""


@pytest.fixture(scope="module", params=EACH_KIND)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    found = Sandbox(working_kind(request.param), LIMITS)
    yield found
    found.close()


def run(sandbox: Sandbox, source: str, stdin: str = "", seconds: float = 20.0) -> Ran:
    """A deadline that is long, for what ends by itself whatever the machine."""
    with Program(sandbox, source, deadline=time.monotonic() + seconds) as program:
        return program.run(stdin, seconds)


def harness(sandbox: Sandbox) -> int:
    assert sandbox._process is not None
    return sandbox._process.pid


@pytest.mark.parametrize("name", ENDED_BY_FORCE)
def test_a_program_that_does_not_end_is_killed(sandbox: Sandbox, name: str) -> None:
    assert run(sandbox, ENDED_BY_FORCE[name], seconds=0.4).failure == "took too long"
    assert run(sandbox, ADDS, "1 2") == Ran("", "3\n")


@pytest.mark.parametrize("name", FAILS)
def test_a_program_that_takes_too_much_fails_alone(sandbox: Sandbox, name: str) -> None:
    before = harness(sandbox)
    assert run(sandbox, FAILS[name]).failure not in ("", "took too long")
    assert run(sandbox, ADDS, "1 2") == Ran("", "3\n")
    assert harness(sandbox) == before


@pytest.mark.parametrize("name", HELD)
def test_a_program_does_not_get_out(sandbox: Sandbox, name: str, tmp_path: Path) -> None:
    at_home = Path.home() if os.access(Path.home(), os.W_OK) else Path(__file__).parent
    secret, home = tmp_path / "secret", at_home / f".megagrpo_test_{os.getpid()}"
    try:
        for file in (secret, home):
            file.write_text("secret")
            file.chmod(0o644)
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            names = f"PORT, SECRET, HOME = {server.getsockname()[1]}, {str(secret)!r}, {str(home)!r}\n"
            assert run(sandbox, f"{names}{REFUSED}\n{HELD[name]}\nprint('held')") == Ran("", "held\n")
            with pytest.raises(BlockingIOError):
                server.accept()
    finally:
        home.unlink()


def test_a_program_sees_no_environment_of_others(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hidden in the environment")
    fresh = Sandbox(sandbox.kind, LIMITS)
    found = run(fresh, "import os\nprint(dict(os.environ), os.getcwd() if os.path.isdir('/box') else '')").value
    fresh.close()
    assert "hidden" not in found
    assert "PATH" in found


@needs_bubblewrap
def test_the_disk_is_bounded_and_no_other_program_sees_its_files() -> None:
    sandbox = Sandbox(working_kind("bubblewrap"), LIMITS)
    fills = """
import os
n = 0
try:
    for n in range(1000):
        with open(str(n), "wb") as file: file.write(bytes(1 << 19))
except OSError: pass
os.mkdir("a"); os.chmod("a", 0); os.symlink("/", "b")
print(n)
for path in ("/", "/dev", "/usr", "/tmp", "/dev/shm"):
    try: open(path + "/x", "w")
    except OSError: continue
    print("escaped", path)
"""
    assert run(sandbox, fills) == Ran("", "8\n")
    assert run(sandbox, "import os\nprint(os.listdir('.'))") == Ran("", "[]\n")
    sandbox.close()


@needs_bubblewrap
def test_one_program_uses_its_own_files_over_several_runs() -> None:
    sandbox = Sandbox(working_kind("bubblewrap"), LIMITS)
    with Program(
        sandbox, "open('x', 'a').write('y')\nprint(open('x').read())", deadline=time.monotonic() + 20
    ) as program:
        assert [program.run("", 20.0).value for _ in range(2)] == ["y\n", "yy\n"]
    sandbox.close()


def test_threads_run_up_to_a_number_that_does_not_hurt(sandbox: Sandbox) -> None:
    source = """
import threading
threading.stack_size(1 << 16)
wait, n = threading.Event(), 0
try:
    for n in range(10_000): threading.Thread(target=wait.wait, daemon=True).start()
except RuntimeError: pass
print(n)
"""
    assert int(run(sandbox, source).value) <= 32


def test_the_kinds_for_users_who_are_not_root_hold_too() -> None:
    for kind in (Kind("bubblewrap", user_namespace=True), Kind("seccomp")):
        try:
            fresh = Sandbox(kind, LIMITS)
        except RewardError:
            continue
        names = f"PORT, SECRET, HOME = 1, {__file__!r}, {__file__!r}\n"
        for name, attack in HELD.items():
            ran = run(fresh, f"{names}{REFUSED}\n{attack}\nprint('held')")
            assert ran == Ran("", "held\n") or ran.failure.startswith("PermissionError"), (kind, name)
        fresh.close()


def test_nothing_is_left_of_a_sandbox_that_was_closed(sandbox: Sandbox) -> None:
    other = Sandbox(sandbox.kind, Limits(memory_bytes=MEMORY_MIB << 20))
    with patch("megagrpo.reward.sandbox.sandbox.memory_file", side_effect=MemoryError), pytest.raises(MemoryError):
        run(other, ADDS)  # starts no job, so that there is none to end, and no file of its errors to close
    idle = own_processes()
    _, theirs = socket.socketpair()
    with theirs:
        other.start("calls", {"source": "while True: pass"}, [theirs], 100)
    while own_processes() == idle:
        time.sleep(0.01)
    other.close()
    assert own_processes() == 0


def test_of_a_sandbox_that_was_killed_nothing_is_known_and_another_one_starts(sandbox: Sandbox) -> None:
    other = Sandbox(sandbox.kind, LIMITS)
    with Program(other, ADDS, deadline=time.monotonic() + 60) as program:
        program.run("1 2", 20.0)
        os.kill(harness(other), signal.SIGKILL)
        with pytest.raises(RewardError):
            deque(program.run("1 2", 20.0) for _ in count())  # the kernel may take a moment
    assert run(other, ADDS, "1 2") == Ran("", "3\n")
    other.close()


def own_processes() -> int:
    """Processes of sandboxes with MEMORY_MIB, dead ones left out."""

    def is_own(path: Path) -> bool:
        try:
            return f'"memory_bytes": {MEMORY_MIB << 20},'.encode() in path.read_bytes()
        except OSError:
            return False

    return sum(map(is_own, Path("/proc").glob("[0-9]*/cmdline")))


def test_modules_that_are_imported_outside_of_the_filter_do_nothing_but_define() -> None:
    """Python tells of what a module does while it is imported."""
    watch = (
        "import sys\n"
        "def heard(event, given):\n"
        "    if event.startswith(('os.', 'subprocess.', 'socket.', 'shutil.', 'webbrowser.')):\n"
        "        if event not in ('os.listdir', 'os.scandir', 'os.putenv'): print(event, given)\n"
        "    if event == 'open' and given[2] & 3: print(event, given)\n"
        "sys.addaudithook(heard)\n"
        f"for name in {IMPORTED_FIRST.split()}: __import__(name)\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", watch], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_a_file_system_no_file_is_there_and_none_is_made() -> None:
    sandbox = Sandbox(working_kind("seccomp"), LIMITS, packages=installed_packages())
    absent = "open('x'), os.stat('/etc/passwd'), os.listdir('/'), os.remove('x'), os.chdir('/tmp')"
    for call in absent.split("), "):
        source = f"import os\ntry: {call.rstrip(')')})\nexcept FileNotFoundError: print('absent')"
        assert run(sandbox, source) == Ran("", "absent\n"), call
    for call in ("open('x', 'w')", "os.mkdir('x')", "os.symlink('/', 'x')"):
        assert run(sandbox, f"import os\ntry: {call}\nexcept PermissionError: print('refused')").value == "refused\n"
    assert run(sandbox, "import os\nprint(os.path.exists('/'), os.path.isfile('/etc/passwd'))").value == "False False\n"
    assert run(sandbox, "from numpy import linalg, arange\nprint(linalg.norm(arange(2)))").value == "1.0\n"
    assert run(sandbox, "import pip.__main__\nprint('ran')").value == ""
    sandbox.close()


def test_no_other_module_is_imported_outside_of_the_filter(tmp_path: Path) -> None:
    sandbox = Sandbox(working_kind("seccomp"), LIMITS)
    for name in ("idlelib.idle", "antigravity", "this"):
        assert run(sandbox, f"import {name}").failure.startswith(("ModuleNotFoundError", "PermissionError"))
    assert run(sandbox, "from concurrent import futures\nimport dataclasses\nprint(1)").value == "1\n"
    sandbox.close()


# --- verdicts that a program makes up ---------------------------------------------------------------------------------

EXPECTED = "94571"

CHEATS = {
    "says that it passed": (
        "import os\nfor n in range(3, 64):\n try: os.write(n, b'1\\n')\n except OSError: pass\nos._exit(0)"
    ),
    "ends at once": "import os\nos._exit(0)",
    "prints a verdict": "print('{\"status\": 0}', '{\"score\": 1.0}', 'passed', True)",
    "looks through objects": (
        "import gc\nobjects = [o for o in gc.get_objects() if isinstance(o, (list, dict, tuple))]\n"
        "print(EXPECTED if any(EXPECTED in map(str, o) for o in objects) else 0)"
    ),
    "looks through frames": (
        "import sys\nframe, found = sys._getframe(1), 0\nwhile frame:\n"
        " found += any(EXPECTED in repr(v) for v in list(frame.f_locals.values()))\n frame = frame.f_back\n"
        "print(EXPECTED if found else 0)"
    ),
    "reads all descriptors": (
        "import os\nfor n in range(64):\n try: data = os.pread(n, 1000, 0)\n except OSError: continue\n"
        " if EXPECTED.encode() in data: print(EXPECTED)"
    ),
    "changes what compares": (
        "import builtins, json\nclass Same(str):\n def __eq__(self, other): return True\n"
        " def __hash__(self): return 0\n"
        "builtins.str = Same\njson.loads = json.dumps = lambda *a, **k: {'score': 1.0}\nprint(Same('x'))"
    ),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_cannot_know_or_forge_what_is_expected(code_of: dict[str, object], name: str) -> None:
    source = CHEATS[name].replace("EXPECTED", "str(int('94570') + 1)")
    truth = json.dumps({"inputs": ["7"], "outputs": [EXPECTED]})
    for code in code_of.values():
        assert code(response=f"```python\n{source}\n```", ground_truth=truth)["score"] == 0.0
        assert code(response=f"```python\nprint({EXPECTED})\n```", ground_truth=truth)["score"] == 1.0


EQUAL_TO_ALL = """
class Equal:
    def __eq__(self, other): return True
    def __lt__(self, other): return True
    def __sub__(self, other): return 0
    def __abs__(self): return 0
    def __hash__(self): return 0
def f(x): return Equal()
abs = sorted = set = lambda *_: 0
"""


@pytest.mark.parametrize(
    "truth",
    [
        '["assert f(2) == 94571"]',
        '["assert abs(f(2) - 94571) < 1e-6"]',
        '["assert all(map(lambda x: f(x) == 94571, [2, 3]))"]',
        '["assert set(f(2)) == set([94571])"]',
        '{"inputs": [[2]], "outputs": [94571], "fn_name": "f"}',
        '{"entry_point": "f", "prompt": "", "test": "def check(candidate):\\n    assert candidate(2) == 94571"}',
    ],
)
@pytest.mark.parametrize(
    "source",
    [
        EQUAL_TO_ALL,
        "import os\ndef f(x): os._exit(0)",
        "def f(x): raise SystemExit",
        "def f(x): raise StopIteration",
        "import gc\ndef f(x):\n e = int('94570') + 1\n"
        " return e if any(str(e) in map(str, o) for o in gc.get_objects() if isinstance(o, (list, tuple))) else 0",
        "class int2(int):\n def __eq__(self, other): return True\ndef f(x): return int2(3)",
        "import sys\ndef f(x):\n sys.stdout.write('{\"value\": 94571}')\n raise AssertionError",
    ],
    ids=["equal", "exit", "system-exit", "stop-iteration", "search", "number", "assertion"],
)
def test_a_function_cannot_know_or_forge_what_is_expected(code_of: dict[str, object], source: str, truth: str) -> None:
    for code in code_of.values():
        assert code(response=f"```python\n{source}\n```", ground_truth=truth)["score"] == 0.0


@pytest.fixture(scope="module")
def code_of() -> dict[str, object]:
    """The verifier, for each isolation that works here."""
    return {kind: make(isolation=kind) for kind in KINDS if programs.search(kind)[0]}


# --- tests that are code ----------------------------------------------------------------------------------------------


def test_tests_go_on_after_one_that_ends_the_program_or_takes_too_long(sandbox: Sandbox) -> None:
    source = "import os\ndef f(x): return [x]\ndef ends(): os._exit(0)\ndef hangs():\n while True: pass\n"
    source += "class P:\n def __init__(self, v): self.v = v\n def get(self): return self.v"
    tests = ("assert f(2) == [2]", "assert f(2) == 2", "ends()", "hangs()")
    tests += ("assert P(3).get() == 3", "assert f(1)[0] == 1")
    other = Sandbox(sandbox.kind, LIMITS)
    given = CodeTests("", ("f", "ends", "hangs", "P"), tests)
    failures = verdicts(sandbox, other, source, given, seconds=1.0, deadline=time.monotonic() + 60)
    assert list(failures) == ["", "failed", "failed", "took too long", "", ""]
    other.close()


# --- in the processes of a run ----------------------------------------------------------------------------------------

RIGHT = f"```python\n{ADDS}\n```"
TRUTH = '{"inputs": ["1 2"], "outputs": ["3"]}'


@pytest.mark.parametrize("isolation", EACH_KIND)
def test_in_reward_workers_attacks_leave_other_samples_and_no_process(isolation: str) -> None:
    arguments = {"isolation": isolation, "test_seconds": 3.0, "seconds": 3.0, "memory_mib": MEMORY_MIB}
    scorer = Scorer(
        reward_of({"function": "code", "arguments": arguments}, workers=2, timeout_seconds=300.0, memory_gib=4),
        response_tokens_max=8,
        say=print,
    )
    attacks = [ENDED_BY_FORCE["signals that are ignored"], *FAILS.values()][::2]
    responses = [text for attack in attacks for text in (f"```python\n{attack}\n```", RIGHT)]
    try:
        (group,) = scorer.score([make_group(*responses, ground_truth=TRUTH)])
        assert [score.value for score in group.scores] == [0.0, 1.0] * len(attacks)
    finally:
        scorer.close()
    assert own_processes() == 0


@pytest.mark.parametrize("isolation", EACH_KIND)
def test_a_worker_that_is_killed_takes_its_sandbox_with_it(isolation: str) -> None:
    arguments = {"isolation": isolation, "test_seconds": 300.0, "seconds": 300.0, "memory_mib": MEMORY_MIB}
    reward = reward_of({"function": "code", "arguments": arguments}, workers=1, timeout_seconds=301.0, memory_gib=4)
    killed: list[int] = []

    def kill_worker_that_runs_a_program() -> None:
        (worker,) = scorer._executors["workers"]._workers
        if worker.in_flight and own_processes() and not killed:
            first = below(worker.process.pid)[0]
            killed.append(first.pid)
            first.kill()

    scorer = Scorer(reward, response_tokens_max=8, check=kill_worker_that_runs_a_program, say=print)
    try:
        (group,) = scorer.score([make_group("```python\nwhile True: pass\n```", ground_truth=TRUTH)])
        assert [score.value for score in group.scores] == [None]
        assert killed
    finally:
        scorer.close()
    assert own_processes() == 0
