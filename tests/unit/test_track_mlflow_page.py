"""A run of ours in MLflow's own pages: a real `mlflow server`, and headless Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from mlflow.tracking import MlflowClient

from megagrpo.track.tracker import Tracker
from tests.agent_runs import calculator_run, group_of
from tests.mlflow_server import MlflowServer
from tests.report_browser import PATIENCE_MS, chromium, needs_chromium
from tests.tiny_run import tracked_recipe
from tests.tracker_thread import trackers_in_thread
from tests.unit.test_track_rollouts import TOKENIZER, group

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.long, needs_chromium]


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a run with metrics of two steps and their traces."""
    directory = tmp_path_factory.mktemp("pages")
    with MlflowServer(directory) as server:
        recipe = tracked_recipe(directory, mlflow={"uri": server.uri, "system_metrics": False})
        with pytest.MonkeyPatch.context() as patched, ExitStack() as ended:
            trackers_in_thread(patched)
            tracker = ended.enter_context(Tracker(recipe, 2, tokenizer=TOKENIZER))
            for step in (1, 2):
                groups = [group("82", "1+1", name=f"p{step}"), group_of(calculator_run())]
                tracker.rollouts(step, {"train": groups}, step)
                tracker.log(step, {"reward/mean": step / 4, "seconds/step": 1.0})
        run_id = tracker.run_ids["mlflow"]
        experiment_id = MlflowClient(server.uri).get_run(run_id).info.experiment_id
        yield f"{server.uri}/#/experiments/{experiment_id}/runs/{run_id}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def visited(browser: Browser, address: str, texts: list[str]) -> None:
    """Fails if one of the texts does not come, or if the page throws. What MLflow writes to its console is its own."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    # Nothing outside of this machine is asked: MLflow's pages count visits elsewhere.
    own = "/".join(address.split("/")[:3])
    context.route(lambda url: not url.startswith((own, "data:", "blob:")), lambda route: route.abort())
    errors, page = list[str](), context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    for text in texts:
        page.get_by_text(re.compile(text)).first.wait_for(state="visible")
    context.close()
    assert errors == []


def test_mlflows_pages_show_a_runs_params_metrics_and_traces(run_page: str, browser: Browser) -> None:
    visited(browser, run_page, [r"^reward/mean$", r"^rollout\.prompts_per_step$"])
    visited(browser, f"{run_page}/model-metrics", [r"adder \(reward/mean\)", r"^seconds"])
    visited(browser, f"{run_page}/traces", [r"What is 17 \* 23\?", '"answer": "82"', "It is 391"])
