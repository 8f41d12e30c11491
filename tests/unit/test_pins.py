"""The pins of requirements/: those for GPUs fit what each of them declares, and tested.yaml names what is pinned."""

import ast
import os
import re
import subprocess
import sys
import tarfile
import threading
from email.message import Message
from email.parser import HeaderParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from megagrpo.rollout.vllm.arguments import TRIED
from tools.pins_behind import REQUIREMENTS, environment_of, read_pins

ROOT = REQUIREMENTS.parent
PINS = read_pins(REQUIREMENTS / "gpu.txt")
# What the image has: every extra but those of other trackers, pages and tests.
EXTRAS = ("sglang", "te", "muon", "reasoning-gym", "prometheus", "ifeval", "language", "search", "mcp")
# Pins that nothing asks for. Without isolation, what compiles a package is not installed for it by pip.
BUILD_NEEDS = {
    "wheel": "Transformer Engine and apex are built to wheels",
    "pybind11": "Transformer Engine's setup.py imports it",
}
UBUNTU_PYTHON = {"24.04": "3.12.3"}
IMAGE = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "sys_platform": "linux",
    "python_version": "3.12",
    "python_full_version": UBUNTU_PYTHON["24.04"],
    "implementation_version": UBUNTU_PYTHON["24.04"],
}


@pytest.fixture(scope="module")
def declared() -> dict[str, Message]:
    """Reads the metadata that each pinned distribution declares, by its name (tests/golden/record_gpu_metadata.py)."""
    with tarfile.open(ROOT / "tests/golden/gpu_metadata.tar.xz") as archive:
        texts = [archive.extractfile(each).read().decode() for each in archive]
    return {canonicalize_name(each["Name"]): each for each in map(HeaderParser().parsestr, texts)}


def asked_by_setup_py() -> list[Requirement]:
    calls = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.Call)]
    (setup,) = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "setup"]
    values = {each.arg: each.value for each in setup.keywords}
    extras = ast.literal_eval(values["extras_require"])
    texts = ast.literal_eval(values["install_requires"]) + [text for name in EXTRAS for text in extras[name]]
    return [Requirement(text) for text in texts]


def problems(pins: dict[str, str], declared: dict[str, Message]) -> list[str]:
    """Follows what is asked for, extras too, as a resolver does: says what does not fit the pins."""
    found, seen = set(), set()
    waiting = [("megagrpo", "", each) for each in asked_by_setup_py()]
    while waiting:
        asker, extra, asked = waiting.pop()
        name = canonicalize_name(asked.name)
        if asked.marker and not asked.marker.evaluate(IMAGE | {"extra": extra}):
            continue
        if name not in pins:
            found.add(f"{asker} asks for {asked}, which is not pinned")
        elif not asked.specifier.contains(pins[name], prereleases=True):
            found.add(f"{asker} asks for {asked}, and {pins[name]} is pinned")
        for pair in {(name, ""), *((name, each) for each in asked.extras)} - seen:
            seen.add(pair)
            texts = declared[name].get_all("Requires-Dist", []) if name in declared else []
            waiting += [(name, pair[1], Requirement(text)) for text in texts]
    for name, version in pins.items():
        own = declared.get(name, Message())
        if own["Version"] != version:
            found.add(f"{name} {version} is pinned, and the METADATA is of {own['Version']}: record it again")
        if not SpecifierSet(own["Requires-Python"] or "").contains(IMAGE["python_full_version"]):
            found.add(f"{name} {version} asks for Python {own['Requires-Python']}")
        if (name in BUILD_NEEDS) == ((name, "") in seen):
            found.add(f"{name} {version}: nothing asks for it, or it is wrongly among the build needs")
    return sorted(found)


def test_all_that_the_pins_for_gpus_declare_is_pinned_and_fits(declared: dict[str, Message]) -> None:
    assert problems(PINS, declared) == []
    assert declared.keys() == PINS.keys()


def test_pins_that_do_not_fit_are_named(declared: dict[str, Message]) -> None:
    wrong = PINS | {"torch": "2.13.0", "left-over": "1.0"}
    del wrong["nvdlfw-inspect"]
    found = "\n".join(problems(wrong, declared))
    for part in (
        "sglang asks for torch==2.14.1, and 2.13.0 is pinned",
        "torch 2.13.0 is pinned, and the METADATA is of 2.14.1",
        "transformer-engine-torch asks for nvdlfw-inspect, which is not pinned",
        "left-over 1.0: nothing asks for it",
    ):
        assert part in found
    old = HeaderParser().parsestr("Version: 1.15.0\nRequires-Python: <3.12\n")
    assert f"six {PINS['six']} asks for Python <3.12" in problems(PINS, declared | {"six": old})


def test_the_image_has_the_cuda_and_python_of_the_pins() -> None:
    text = (ROOT / "Dockerfile").read_text()
    [(cuda, ubuntu)] = re.findall(r"^FROM nvidia/cuda:(\d+\.\d+)\S*-ubuntu(\S+)$", text, re.MULTILINE)
    assert PINS["cuda-toolkit"].startswith(f"{cuda}.")
    assert UBUNTU_PYTHON[ubuntu].startswith(f"{environment_of(REQUIREMENTS / 'gpu.txt')['versions']['python']}.")
    for name, version in re.findall(r"\b([\w.-]+)==(\d[\w.]*)", text):
        assert PINS[canonicalize_name(name)] == version


def test_tested_yaml_names_the_versions_that_are_pinned() -> None:
    pinned: dict[str, set[tuple[str, str]]] = {"cpu": set(), "gpu": set(), "vllm_cpu": set(), "vllm_gpu": set()}
    for path in REQUIREMENTS.glob("*.txt"):
        pinned[path.stem if path.stem in pinned else "cpu"] |= set(read_pins(path).items())
    cornerstones = {"vllm", "vllm-cpu", *environment_of(REQUIREMENTS / "gpu.txt")["versions"]} - {"python"}
    for kind, pins in pinned.items():
        versions = environment_of(REQUIREMENTS / f"{kind}.txt")["versions"].items()
        assert {pin for pin in pins if pin[0] in cornerstones} == {pair for pair in versions if pair[0] != "python"}


def test_vllm_on_gpus_is_the_version_that_was_tried_with_the_training_ranks_nccl() -> None:
    pins = read_pins(REQUIREMENTS / "vllm_gpu.txt")
    assert pins["vllm"] == TRIED == read_pins(REQUIREMENTS / "vllm_cpu.txt")["vllm-cpu"]
    assert pins["nvidia-nccl-cu13"] == PINS["nvidia-nccl-cu13"]
    assert {"numpy", "torch", "pydantic"} <= pins.keys()


# Versions and their Pythons. The newest of `demo` are for another Python, and a pre-release.
OFFERED = {"demo": (("1.0", ""), ("1.10", "&gt;=3.8"), ("9.0", "&gt;=3.99"), ("2.0rc1", "")), "kept": (("3.0", ""),)}


class Index(BaseHTTPRequestHandler):
    """The pages of packages on an index, as pip reads them."""

    def do_GET(self) -> None:
        name = self.path.strip("/").split("/")[-1]
        self.send_response(200 if name in OFFERED else 404)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        for version, python in OFFERED.get(name, ()):
            self.wfile.write(f'<a href="{name}-{version}.tar.gz" data-requires-python="{python}">x</a>\n'.encode())


def test_pins_behind_prints_what_the_index_has_for_their_python(tmp_path: Path) -> None:
    (tmp_path / "gpu.txt").write_text("# Pins.\ndemo==1.9\nkept==3.0\ngone==1.0\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment |= {"PIP_INDEX_URL": f"http://127.0.0.1:{server.server_port}", "PIP_CONFIG_FILE": os.devnull}
        command = [sys.executable, "-m", "tools.pins_behind", str(tmp_path / "gpu.txt")]
        printed = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
        server.shutdown()
    assert [line.split() for line in printed.splitlines()] == [
        ["gpu.txt,", "Python", "3.12:", "2", "of", "3", "pins"],
        ["demo", "1.9", "1.10"],
        ["gone", "1.0", "pip", "finds", "none"],
    ]
