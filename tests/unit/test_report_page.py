"""The page of a run, in a browser: at a desk and on a phone, light and dark, alone, beside another run, and live."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from megagrpo.cli import main
from megagrpo.errors import EXIT_USER_ERROR
from megagrpo.report.page import LiveReport, ReportServer, page
from megagrpo.report.parts import curve_parts, encode, phases_of, timing_parts
from megagrpo.report.run import read_run
from tests.report_browser import chromium, needs_chromium, opened
from tests.report_runs import RECIPE, make_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

DRAWN = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.some((value) => value > 0);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One of 1,000 steps and 150 metrics, started three times, and a shorter one."""
    within = tmp_path_factory.mktemp("runs")
    return make_run(within / "first", starts=3, others=117), make_run(within / "second", 300, seed=3)


@pytest.fixture(scope="module")
def address(runs: tuple[Path, Path]) -> str:
    assert main(["report", str(runs[0])]) == 0
    return f"file://{runs[0] / 'report.html'}"


def drawn(plots: Locator) -> list[bool]:
    return [plot.evaluate(DRAWN) for plot in plots.all()]


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(375, "dark"), pytest.param(1440, "light", marks=pytest.mark.soak)])
def test_every_curve_is_drawn_and_fits_the_window(browser: Browser, address: str, width: int, scheme: Any) -> None:
    with opened(browser, address, width, scheme) as shown:
        plots = shown.locator("#health canvas")
        plots.nth(4).wait_for()
        assert drawn(plots) == [True] * plots.count()
        assert shown.evaluate("document.documentElement.scrollWidth") == width
        dark = shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
        assert dark == (scheme == "dark")
        shown.locator("#theme").click()
        assert (shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)") != dark
        assert drawn(plots) == [True] * plots.count()


@needs_chromium
@pytest.mark.long
def test_one_cursor_moves_over_all_curves_by_mouse_and_by_key(browser: Browser, address: str) -> None:
    with opened(browser, address) as shown:
        shown.locator("#health canvas").nth(4).wait_for()
        readouts = shown.locator("#health .readout span:first-child")
        assert readouts.first.text_content() == "step 1,000"
        plot = shown.locator("#health .u-over").first
        plot.hover(position={"x": 10, "y": 50})
        told = [re.sub(r"\D", "", text) for text in readouts.all_text_contents() if text.startswith("step")]
        assert all(0 < int(step) < 100 for step in told), told
        shown.locator("#health [role=img]").first.focus()
        shown.keyboard.press("End")
        shown.keyboard.press("ArrowLeft")
        assert readouts.first.text_content() == "step 999"
        assert "lowest" in (shown.locator("#health [role=img]").first.get_attribute("aria-label") or "")


@needs_chromium
@pytest.mark.long
def test_a_metric_is_found_by_its_meaning_and_drawn_on_demand(browser: Browser, address: str) -> None:
    with opened(browser, address) as shown:
        search = shown.locator("#metrics input[type=search]")
        search.fill("Gradient norm clipping")
        names = shown.locator("#metrics .metric summary code")
        assert names.all_text_contents() == ["grad_norm"]
        assert shown.locator("#metrics canvas").count() == 0
        names.first.click()
        shown.locator("#metrics canvas").wait_for()
        assert drawn(shown.locator("#metrics canvas")) == [True]
        search.fill("nothing is called so")
        assert names.count() == 0


@needs_chromium
@pytest.mark.long
def test_where_a_rule_fires_the_page_says_what_to_do(browser: Browser, address: str) -> None:
    with opened(browser, address) as shown:
        firing = shown.locator(".firing", has_text="KL grows without reward")
        firing.locator("summary").click()
        assert "What to do" in firing.inner_text()
        firing.locator("a", has_text="kl/mean").click()
        shown.locator('#metrics .metric[data-name="kl/mean"] canvas').wait_for()


@needs_chromium
@pytest.mark.soak
def test_two_runs_are_laid_over_and_what_differs_is_shown(
    browser: Browser, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    output = tmp_path / "both.html"
    assert main(["report", *map(str, runs), "--output", str(output)]) == 0
    with opened(browser, f"file://{output}") as shown:
        shown.locator("#health canvas").nth(4).wait_for()
        rows = shown.locator("#recipe tr.differs td:first-child")
        assert rows.all_text_contents() == ["name", "train.optimizer.lr"]
        assert "second" in shown.locator("#health .readout").nth(2).inner_text()
        shown.locator("#health .controls button", has_text="second").click()
        assert "second" not in shown.locator("#health .readout").nth(2).inner_text()
        assert "300" in shown.locator("#final").inner_text()
        assert "2.13.0" in shown.locator("#starts").inner_text()


@needs_chromium
@pytest.mark.soak
def test_a_printed_page_has_all_charts_and_no_controls(browser: Browser, address: str) -> None:
    with opened(browser, address) as shown:
        shown.locator("#health canvas").nth(4).wait_for()
        shown.evaluate("dispatchEvent(new Event('beforeprint'))")
        shown.emulate_media(media="print")
        assert shown.locator("#metrics canvas").count() > 140
        assert not shown.locator(".controls").first.is_visible()
        assert drawn(shown.locator("#metrics canvas").first) == [True]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    live = LiveReport([make_run(tmp_path / "going", 30, others=2)])
    with ReportServer(live, 0) as started:
        threading.Thread(target=started.serve_forever, daemon=True).start()
        yield started
        started.shutdown()


@needs_chromium
@pytest.mark.long
def test_a_page_that_is_served_follows_the_run_and_keeps_what_is_open(
    browser: Browser, server: ReportServer, tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    with opened(browser, f"http://127.0.0.1:{server.server_port}/?token={server.token}") as shown:
        steps = shown.locator("#health .chip b").first
        expect(steps).to_have_text("30 of 1,000")
        shown.locator("#metrics input").fill("tokens_per_second")
        with (tmp_path / "going" / "metrics.jsonl").open("a") as lines:
            lines.write(
                json.dumps({"step": 31, "time": 1.9e9, "reward/mean": 0.5, "tokens_per_second": 123456.0}) + "\n"
            )
        expect(steps).to_have_text("31 of 1,000", timeout=120_000)
        assert shown.locator("#metrics input").input_value() == "tokens_per_second"
        expect(shown.locator("#metrics .metric .last")).to_have_text("123,456")


def test_the_server_answers_those_who_know_the_token_and_its_own_address(server: ReportServer) -> None:
    def status(path: str, host: str = "localhost") -> int:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request("GET", path, headers={"Host": host})
        return connection.getresponse().status

    known = f"?token={server.token}"
    assert [status(f"/{known}"), status(f"/changes{known}"), status(f"/data/metrics{known}")] == [200, 200, 200]
    assert [status(f"/{known}", host=host) for host in ("localhost:8080", "127.0.0.1", "LOCALHOST:1")] == [200] * 3
    assert [status("http://[x"), status(f"/{known}", host="[x")] == [400, 400]
    assert [status("/"), status("/changes?token=x"), status("/data/metrics?token=%ff")] == [403, 403, 403]
    assert [status(f"/{known}", host=host) for host in ("elsewhere.example", "localhost.elsewhere:1", "")] == [421] * 3
    assert [status(f"/data/nothing{known}"), status(f"/../setup.py{known}")] == [404, 404]


# --- runs that have little to show ------------------------------------------------------------------------------------


def write_run(directory: Path, *lines: object, **recipe: object) -> Path:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "recipe.yaml").write_text(json.dumps({**RECIPE, "name": "</script><b>little", **recipe}))
    return directory


@needs_chromium
@pytest.mark.soak
@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ((), "grpo"),
        (({"step": 0, "time": 1.8e9, "eval/held_out/mean@1": 0.25},), "grpo"),
        (
            ({"step": 1, "time": None, "reward/mean": None, "grad_norm": 0.0, "kl/mean": None, "seconds/step": 1},),
            "grpo",
        ),
        (({"step": 1, "time": 1.8e9, "loss/tokens": 2.5, "eval/loss": 2.4, "grad_norm": 1e300, "lr": 1e-5},), "sft"),
    ],
)
def test_a_run_with_little_to_show_has_a_page(
    browser: Browser, tmp_path: Path, lines: tuple[object, ...], kind: str
) -> None:
    directory = write_run(tmp_path / "run", *lines, kind=kind)
    assert main(["report", str(directory)]) == 0
    with opened(browser, f"file://{directory / 'report.html'}", 375) as shown:
        shown.locator("#recipe .group").first.wait_for()
        assert shown.locator("[role=alert]").count() == 0
        assert shown.locator("h1").text_content() == "</script><b>little"
        assert shown.evaluate("document.documentElement.scrollWidth") == 375


def test_what_is_no_run_is_refused_and_no_file_but_a_report_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", {"step": 1, "time": 1.8e9})
    other = tmp_path / "notes.html"
    other.write_text("mine")
    (tmp_path / "file").touch()
    for arguments in (
        [tmp_path / "absent"],
        [tmp_path],
        [tmp_path / "file"],
        [run, "--output", other],
        [run, "--output", tmp_path / "absent" / "page.html"],
        [run, run, "--mismatch"],
        [run, tmp_path / "absent", "--serve"],
    ):
        assert main(["report", *map(str, arguments)]) == EXIT_USER_ERROR
        assert "given: " in capsys.readouterr().err
    assert other.read_text() == "mine"
    assert main(["report", str(run)]) == 0
    assert main(["report", str(run)]) == 0  # an earlier page makes room


def test_a_page_of_several_runs_leaves_the_page_of_each_run_as_it_is(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, {"step": 1, "time": 1}, name=name) for name in ("first", "second")]
    assert main(["report", str(runs[0])]) == 0
    own = (runs[0] / "report.html").read_text()
    assert main(["report", *map(str, runs)]) == 0
    assert (runs[0] / "report.html").read_text() == own
    assert len(list(tmp_path.rglob("*.html"))) == 2


# --- what the page is made of -----------------------------------------------------------------------------------------


def test_a_page_carries_no_address_to_load_from(runs: tuple[Path, Path]) -> None:
    text = page([read_run(runs[0])])
    assert not re.search(r"<(?:link|img|iframe)\b|<script[^>]* src|@import|url\(", text)


def test_phases_add_up_to_the_step_and_what_none_of_them_tells_is_other(tmp_path: Path) -> None:
    steps = (
        {"step": 0, "time": 1, "seconds/eval": 9},
        {"step": 1, "time": 2, "seconds/step": 10, "seconds/update": 4, "seconds/rollout": 5, "seconds/eval": 3},
        {"step": 2, "time": 3, "seconds/step": 2, "seconds/update": 4},
    )
    phases = phases_of(read_run(write_run(tmp_path / "run", *steps)))
    assert list(phases["steps"]) == [1, 2]
    expected = {"rollout": [5, 0], "update": [4, 4], "other": [1, 0], "eval, after the step": [3, 0]}
    assert {name: list(values) for name, values in phases["seconds"].items()} == expected


def test_memory_stands_beside_what_the_plan_says_of_the_same_tensors(tmp_path: Path) -> None:
    steps = [{"step": n, "time": n, "memory/allocated_max/update": n * 2**30, "restarts": n // 3} for n in range(1, 5)]
    directory = write_run(tmp_path / "run", *steps)
    tensors, other = ({"name": "part", "bytes": size << 30, "of_rank": mine} for size, mine in ((3, True), (9, False)))
    update = {"phase": "update", "bytes": 12 << 30, "parts": [tensors, other]}
    (directory / "plan.json").write_text(json.dumps({"memory": [{"phases": [update]}]}))
    run = read_run(directory)
    cells = re.findall("<td[^>]*>([^<]*)</td>", timing_parts([run])[1].html)
    assert cells == ["update", "–", "–", "4.00 GiB", "3.00 GiB"]
    assert curve_parts([run])[0].data["runs"]["runs"][0]["starts"] == [3]


def test_a_number_that_is_not_finite_is_refused_outside_of_arrays() -> None:
    encode({"values": np.array([np.nan, np.inf])})
    with pytest.raises(ValueError):
        encode({"values": [float("nan")]})
