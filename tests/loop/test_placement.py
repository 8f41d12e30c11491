"""Where ranks and engines stand does not change what they compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loop import small_run

ELSEWHERE = ["cluster.placement=disaggregated", "rollout.engines=2", "track.mlflow=null"]
REWARD_KL = ["algorithm.kl.placement=reward", "train.offload=[optimizer,gradients,reference]", "track.mlflow=null"]


@pytest.mark.long
def test_two_engines_on_devices_of_their_own_give_the_same_run(
    inputs: Path, finished: tuple[Path, str], tmp_path: Path
) -> None:
    small_run.train(small_run.write(small_run.recipe(inputs, tmp_path), tmp_path), *ELSEWHERE)
    ours, theirs = small_run.metrics(tmp_path / "small"), small_run.metrics(finished[0])
    for step in theirs:
        for name in {"reward/mean", "eval/mean@1"} & set(theirs[step]):
            assert ours[step][name] == pytest.approx(theirs[step][name], abs=1e-6), (step, name)


@pytest.mark.long
def test_kl_in_the_reward_and_released_memory_run_together(inputs: Path, tmp_path: Path) -> None:
    small_run.train(small_run.write(small_run.recipe(inputs, tmp_path), tmp_path), *REWARD_KL)
    assert sorted(small_run.metrics(tmp_path / "small")) == list(range(small_run.STEPS + 1))
