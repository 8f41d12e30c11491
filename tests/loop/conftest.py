"""What the tests of whole runs share: one set of inputs, and one run to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loop import small_run


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    small_run.make_inputs(directory)
    return directory


@pytest.fixture(scope="session")
def finished(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Directory of a run that was not interrupted, tracked by MLflow, and what it printed."""
    output = tmp_path_factory.mktemp("finished")
    values = small_run.recipe(inputs, output)
    values["track"]["mlflow"] = {}
    printed = small_run.train(small_run.write(values, output))
    return output / values["name"], printed
