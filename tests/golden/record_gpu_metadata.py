"""Records gpu_metadata.tar.xz: what every pin of requirements/gpu.txt declares, in a file NAME-VERSION.METADATA each.

    python -m tests.golden.record_gpu_metadata

Takes the pins' own Python and platform (requirements/tested.yaml) and a network. pip, 25 or newer, asks the index that
it is configured with; of a wheel on a server it reads only the directory and METADATA.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from tools.pins_behind import REQUIREMENTS, read_pins

TARGET = Path(__file__).with_name("gpu_metadata.tar.xz")
HEADERS = ("Name", "Version", "Requires-Python", "Requires-Dist", "Provides-Extra")
# Their setup.py asks for CUDA, so that pip cannot prepare them: the sdist's PKG-INFO says the same.
NEEDS_CUDA = ("transformer-engine-torch",)


def prepared(pins: list[str]) -> list[str]:
    """Returns the packages that pip would install for these pins."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        arguments = ["--dry-run", "--ignore-installed", "--no-deps", "--use-feature=fast-deps", "--report", report.name]
        subprocess.run([sys.executable, "-m", "pip", "install", *arguments, *pins], check=True)
        return [as_headers(each["metadata"]) for each in json.load(report)["install"]]


def as_headers(metadata: dict[str, Any]) -> str:
    lines = []
    for header in HEADERS:
        values = metadata.get(header.lower().replace("-", "_"), [])
        lines += [f"{header}: {value}\n" for value in ([values] if isinstance(values, str) else values)]
    return "".join(lines)


def unpacked(pin: str) -> str:
    """Reads the PKG-INFO of an sdist that pip leaves behind where it fails to prepare it."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--no-deps", "--no-clean", "--no-build-isolation", "--no-cache-dir", "-d", folder, pin]
        command = [sys.executable, "-m", "pip", "download", *arguments]
        subprocess.run(command, env=os.environ | {"TMPDIR": folder}, stderr=subprocess.DEVNULL, check=False)
        (path,) = Path(folder).glob("pip-download-*/*/PKG-INFO")
        message: Message = HeaderParser().parsestr(path.read_text(encoding="utf-8"))
        return "".join(f"{header}: {value}\n" for header in HEADERS for value in message.get_all(header, []))


def main() -> None:
    pins = read_pins(REQUIREMENTS / "gpu.txt")
    texts = prepared([f"{name}=={version}" for name, version in pins.items() if name not in NEEDS_CUDA])
    texts += [unpacked(f"{name}=={pins[name]}") for name in NEEDS_CUDA]
    named = {}
    for text in texts:
        message = HeaderParser().parsestr(text)
        named[f"{message['Name']}-{message['Version']}.METADATA"] = text.encode()
    with tarfile.open(TARGET, "w:xz") as archive:
        for name in sorted(named):
            info = tarfile.TarInfo(name)
            info.size = len(named[name])
            archive.addfile(info, io.BytesIO(named[name]))


if __name__ == "__main__":
    main()
