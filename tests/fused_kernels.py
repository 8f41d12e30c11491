"""Functions compiled as on GPUs, in a process of their own, since tests run without the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys

ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "0", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}


def moved_and_errors(script: str) -> tuple[list[float], list[float]]:
    """Returns what the script prints last, as JSON: bytes that its kernels move by element, and errors."""
    command, environment = [sys.executable, "-c", script], os.environ | ENVIRONMENT
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    moved, errors = json.loads(ran.stdout.splitlines()[-1])
    return moved, errors
