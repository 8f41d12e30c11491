"""Where ranks and engines stand does not change what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.loop import small_run
from tests.loop.conftest import Finished

ELSEWHERE = ["cluster.placement=disaggregated", "rollout.engines=2", "track.mlflow=null"]


@pytest.mark.long
def test_two_engines_on_devices_of_their_own_give_the_same_run(
    inputs: Path, finished: Finished, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    small_run.train(small_run.write(small_run.recipe(inputs, tmp_path), tmp_path), *ELSEWHERE, environment=ray)
    ours, theirs = small_run.metrics(tmp_path / "small"), small_run.metrics(finished.directory)
    for step in theirs:
        for name in {"reward/mean", "eval/mean@1"} & set(theirs[step]):
            assert ours[step][name] == pytest.approx(theirs[step][name], abs=1e-6), (step, name)
