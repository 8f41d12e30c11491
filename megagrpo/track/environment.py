"""What a run was started with: code, libraries, command, host. Saved as environment.json in its directory."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = (
    "megagrpo", "torch", "megatron-core", "ray", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow",
    "pydantic", "mlflow", "math-verify", "sglang", "transformer-engine", "apex", "flash-attn",
)  # fmt: skip
GIT_TIMEOUT_SECONDS = 10.0


def describe() -> dict[str, Any]:
    """JSON values only. Missing libraries are null; `git` is null outside a checkout."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
        "directory": os.getcwd(),
        "git": _git(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "host": {
            "name": socket.gethostname(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
        },
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(checkout: Path) -> dict[str, Any] | None:
    if not (checkout / ".git").exists():
        return None
    commit = _git_output(checkout, "rev-parse", "HEAD")
    changes = _git_output(checkout, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "modified": changes != ""}


def _git_output(checkout: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
