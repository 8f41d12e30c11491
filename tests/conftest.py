"""What holds for every test: hypothesis draws the same examples each time, and what shares a start stays together."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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

TESTS = Path(__file__).parent
# The longest starts come first, and the files of unit tests fill up the workers' last minute.
FOLDERS = ("loop", "sglang", "slurm", "distributed", "unit")
DEMO = ("test_demo", "test_two_nodes")


@pytest.hookimpl(tryfirst=True)  # before xdist, which reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests by folder, and let those that share a server, a Ray or a file's fixtures run in one worker."""
    items.sort(key=lambda item: FOLDERS.index(folder_of(item)))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))


def folder_of(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def group_of(item: pytest.Item) -> str:
    folder, file = folder_of(item), item.path.stem
    if folder == "loop":
        return "demo" if file in DEMO else "loop"
    return "sglang" if folder == "sglang" else file
