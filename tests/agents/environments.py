"""Virtual environments of packages that do not go with megagrpo's own: one for each file of requirements/agents.

They are made by pip when a test first wants them, and kept in .cache/agent_environments/NAME until the file changes.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIREMENTS = REPOSITORY / "requirements" / "agents"
CACHE = REPOSITORY / ".cache" / "agent_environments"
SECONDS_MAX = 600
CANNOT_BE_HAD = ("No matching distribution", "Could not find a version", "Temporary failure in name resolution")
"""Errors of pip where the packages cannot be installed."""


@pytest.fixture(scope="session")
def agent_python() -> Callable[[str], Path]:
    """NAME of a file in requirements/agents -> the interpreter that has its packages."""
    return interpreter


def interpreter(name: str) -> Path:
    """Skips the test if pip cannot find the packages. Workers of pytest-xdist wait for the one that makes it."""
    requirements, environment = REQUIREMENTS / f"{name}.txt", CACHE / name
    python, installed = environment / "bin" / "python", environment / "installed"
    key = hashlib.sha256(f"{sys.version}\n{requirements.read_text()}".encode()).hexdigest()
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not installed.exists() or installed.read_text() != key:
            make(requirements, environment)
            installed.write_text(key)
    return python


def make(requirements: Path, environment: Path) -> None:
    """The files name every package, so that none is looked for and what is large and unused can be left out."""
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "--disable-pip-version-check"]
    settings = ["--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:", "--retries", "1"]
    done = subprocess.run(
        [*pip, "install", *settings, "-r", requirements], capture_output=True, text=True, timeout=SECONDS_MAX
    )
    if done.returncode == 0:
        return
    last = "\n".join(done.stderr.splitlines()[-5:])
    if any(said in done.stderr for said in CANNOT_BE_HAD):
        pytest.skip(f"pip does not find the packages of {requirements.relative_to(REPOSITORY)}: {last}")
    pytest.fail(f"pip could not install {requirements.relative_to(REPOSITORY)}: {last}")
