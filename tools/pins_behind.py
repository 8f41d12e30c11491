"""Pins of requirements/*.txt that are behind the newest version that the index has for their Python.

    python -m tools.pins_behind [requirements/gpu.txt ...]

Asks the index that pip is configured with, once for each pin. requirements/tested.yaml says which Python a file is for.
A pin that is behind is no fault: newer versions may not go together, and tests/unit/test_pins.py shows it for GPUs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import Version

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


def read_pins(path: Path) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in PIN.findall(path.read_text(encoding="utf-8"))}


def environment_of(path: Path) -> dict[str, Any]:
    """Returns what requirements/tested.yaml says of the environment that a file belongs to."""
    environments = yaml.safe_load((REQUIREMENTS / "tested.yaml").read_text(encoding="utf-8"))
    return environments.get(path.stem, environments["cpu"])


def newest(name: str, version: str, python: str) -> str | None:
    """The index's newest version for a Python. A pre-release only where the pin is one."""
    command = [sys.executable, "-m", "pip", "index", "versions", name, f"--python-version={python}"]
    if Version(version).is_prerelease:
        command.append("--pre")
    # Its first line is `NAME (VERSION)`. Not --json: the pip that Python 3.11 brings does not know it.
    match = re.match(r"\S+ \((\S+)\)", subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    return match[1] if match else None


def report(path: Path) -> str:
    """A line about the file, and one for each pin that is behind or that pip does not find."""
    pins, python = read_pins(path), str(environment_of(path)["versions"]["python"])
    if path.stem == "megatron_core":
        python = "3.12"  # they declare it; on 3.11 they are installed all the same
    with ThreadPoolExecutor(4) as pool:
        known = dict(zip(pins, pool.map(newest, pins, pins.values(), repeat(python)), strict=True))
    rows = [
        f"  {name:40} {version:20} {known[name] or 'pip finds none'}"
        for name, version in sorted(pins.items())
        if known[name] is None or Version(known[name] or "") > Version(version)
    ]
    return "\n".join([f"{path.name}, Python {python}: {len(rows)} of {len(pins)} pins", *rows])


if __name__ == "__main__":
    for path in [Path(argument) for argument in sys.argv[1:]] or sorted(REQUIREMENTS.glob("*.txt")):
        print(report(path), flush=True)
