"""The browser of samples as its user has it, in Chromium."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from megagrpo.report.page import LiveReport, ReportServer, page, write_page
from megagrpo.report.run import read_run
from tests.report_browser import PATIENCE_MS, chromium, needs_chromium
from tests.report_browser import opened as opened_address
from tests.sample_runs import make_samples, sample, write_samples

pytestmark = needs_chromium
PHONE = 375
COLOURS = "select[aria-label=colours]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one")
    write_page(directory / "report.html", page([make_samples(directory / "run")]))
    return directory / "report.html"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    runs = [make_samples(directory / "first"), make_samples(directory / "second", shift=100)]
    write_page(directory / "report.html", page(runs))
    return directory / "report.html"


def opened(browser: Any, path: Path, hash_part: str = "", width: int = 1280) -> Any:
    return opened_address(browser, f"file://{path}{hash_part}", width)


def column(shown: Any, name: str) -> list[str]:
    return list(shown.locator(f".samples-row [data-column={name}]").all_inner_texts())


def count(shown: Any, wanted: int) -> None:
    """Waits until so many are listed, and nothing is searched any more."""
    said = re.compile(rf"^{wanted} of \d+ samples(, mean score [\d.-]+)?$")
    expect(shown.locator("#samples .body > [role=status]")).to_have_text(said, timeout=PATIENCE_MS)


def open_sample(shown: Any, found: str) -> None:
    """Opens the only sample with a text."""
    shown.fill("#samples [type=search]", found)
    count(shown, 1)
    shown.click(".samples-row")
    shown.wait_for_selector(".sample-title")


def test_samples_are_filtered_and_the_address_keeps_it(browser: Any, one: Path) -> None:
    with opened(browser, one) as shown:
        count(shown, 20)
        shown.select_option("select[aria-label=set]", "train")
        shown.fill("label:has-text('step') input", "2..3")
        shown.fill("label:has-text('score') input", "1")
        count(shown, 4)
        assert set(column(shown, "score")) == {"1 ✓"}
        address = shown.evaluate("location.hash")
        shown.fill("label:has-text('score') input", "much")
        count(shown, 8)  # no number: no condition
        assert shown.get_attribute("label:has-text('score') input", "aria-invalid") == "true"
    with opened(browser, one, address) as shown:
        count(shown, 4)
        shown.click("text=clear")
        count(shown, 20)
        shown.select_option("select[aria-label=state]", "failed")
        count(shown, 2)
        shown.select_option("select[aria-label=finish]", "length")
        count(shown, 0)


@pytest.mark.soak
def test_samples_are_sorted_by_a_heading(browser: Any, one: Path) -> None:
    with opened(browser, one, "#samples?set=train") as shown:
        count(shown, 17)
        shown.click("role=columnheader >> text=tokens")
        tokens = [int(text.replace(",", "")) for text in column(shown, "tokens")]
        assert tokens == sorted(tokens, reverse=True)
        assert tokens[0] == 200_001
        shown.click("role=columnheader >> text=tokens")
        tokens = [int(text.replace(",", "")) for text in column(shown, "tokens")]
        assert tokens == sorted(tokens)
        shown.click("role=columnheader >> text=score")
        assert column(shown, "score")[-2:] == ["masked", "error"]  # what has none comes last


@pytest.mark.long
def test_texts_are_found_in_prompts_responses_and_traces(browser: Any, one: Path) -> None:
    with opened(browser, one) as shown:
        for text, wanted in (
            ("NUMBER 7", 0),
            ("that 1 AND 0 make", 3),
            ("what is sums:0?", 6),
            ("odd:3", 1),
            ("/make [12]$/", 8),
            ("/and 0 make [12]/", 4),
            ("calculator", 1),
            ("held out", 0),
        ):
            shown.fill("#samples [type=search]", text)
            count(shown, wanted)
        shown.fill("#samples [type=search]", "/(/")
        count(shown, 20)
        assert shown.get_attribute("#samples [type=search]", "aria-invalid") == "true"


@pytest.mark.long
def test_a_sample_says_its_score_and_why(browser: Any, one: Path) -> None:
    with opened(browser, one) as shown:
        open_sample(shown, "/1 and 1 make 3/")
        text = shown.inner_text(".sample")
        for part in (
            "step 3, response 1",
            "score 1 · solved",
            "length\n0.25",
            "exact.read\nthe last number",
            "391",
            "Add.",
        ):
            assert part in text
        shown.fill("#samples [type=search]", "")
        count(shown, 20)
        before = shown.evaluate("location.hash")
        shown.keyboard.press("Escape")
        shown.click(".samples-row >> nth=0")
        titles = []
        for key in ("j", "j", "k"):
            shown.locator(".sample").press(key)
            titles.append(shown.evaluate("location.hash"))
        assert titles[0] == titles[2] != titles[1]
        shown.keyboard.press("Escape")
        assert not shown.is_visible(".sample")
    with opened(browser, one, before) as shown:
        shown.wait_for_selector("text=score 1 · solved")


@pytest.mark.soak
def test_a_prompt_that_a_step_has_twice_has_all_its_samples(browser: Any, tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [sample(1, response="first"), sample(1, response="second")])
    (tmp_path / "metrics.jsonl").touch()
    write_page(tmp_path / "report.html", page([read_run(tmp_path)]))
    with opened(browser, tmp_path / "report.html") as shown:
        count(shown, 2)
        for row, text in ((0, "first"), (1, "second")):
            shown.click(f".samples-row >> nth={row}")
            expect(shown.locator(".sample pre").last).to_have_text(text, timeout=PATIENCE_MS)


@pytest.mark.soak
def test_an_agents_calls_are_seen(browser: Any, one: Path) -> None:
    with opened(browser, one) as shown:
        open_sample(shown, "calculator")
        text = shown.inner_text(".sample")
        for part in (
            "What the agent did",
            "calls calculator",
            "17 * 23",
            "calculator ran 0.5 s",
            "It is 391.",
            "reward 1",
        ):
            assert part in text


@pytest.mark.long
def test_tokens_have_colours_and_numbers(browser: Any, one: Path) -> None:
    with opened(browser, one) as shown:
        open_sample(shown, "/0 and 1 make 2/")
        shown.select_option(COLOURS, "difference")
        kinds = [shown.get_attribute(f".token[data-index='{n}']", "class") for n in (0, 2, 8)]
        assert [kind.split()[1] for kind in kinds] == ["below", "above", "above"]
        assert "special" in kinds[2]
        levels = [int(shown.get_attribute(f".token[data-index='{n}']", "data-level")) for n in range(9)]
        assert levels[2] == 0 < levels[1] < levels[0]
        assert levels[8] == 8
        shown.hover(".token[data-index='1']")
        told = shown.inner_text(".token-told")
        assert "rollout logprob -0.5" in told
        assert "-0.01" in told
        assert "teacher logprob -0.25" in told
        assert "·" in shown.inner_text(".token[data-index='1']")
        shown.locator(".tokens").press("ArrowRight")
        assert "token 3 of 9" in shown.inner_text(".token-told")
        for name in ("advantage", "entropy", "version", "logprob"):
            shown.select_option(COLOURS, name)
            shown.wait_for_selector(".token-legend")


@pytest.mark.soak
def test_two_responses_are_compared_word_by_word(browser: Any, one: Path) -> None:
    with opened(browser, one) as shown:
        open_sample(shown, "/0 and 0 make 3/")
        shown.click(".others button >> nth=0")
        shown.wait_for_selector(".sides")
        assert shown.locator(".sides del").all_inner_texts() == ["1"]
        assert shown.locator(".sides ins").all_inner_texts() == ["3"]
        assert shown.locator(".side h4").all_inner_texts()[0].startswith("step 1, response 0")


@pytest.mark.soak
def test_a_prompt_is_compared_between_two_runs(browser: Any, two: Path) -> None:
    with opened(browser, two, "#samples?run=second") as shown:
        count(shown, 20)
        open_sample(shown, "/0 and 0 make 102/")
        labels = [line.split("\n")[0] for line in shown.locator(".others").all_inner_texts()]
        assert {"first · step 2", "second · step 2"} <= set(labels)
        shown.locator(".others", has_text="first · step 2").locator("button").first.click()
        shown.wait_for_selector(".sides")
        assert shown.locator(".sides del").all_inner_texts() == ["2"]
        assert shown.locator(".sides ins").all_inner_texts() == ["102"]


@pytest.mark.long
def test_text_of_models_is_only_text(browser: Any, one: Path) -> None:
    with opened(browser, one) as shown:
        open_sample(shown, "right to left")
        text = shown.inner_text(".sample")
        for part in ("</script><script>", "U+202E", "U+0000 ×3", "U+001B", "U+200B"):
            assert part in text
        assert "<b>odd</b>" in text
        assert shown.title() != "owned"
        assert shown.locator(".sample img, .sample script").count() == 0
        shown.select_option(COLOURS, "entropy")
        assert "U+202E" in shown.inner_text(".tokens")
        assert shown.title() != "owned"


@pytest.mark.soak
def test_a_long_response_is_shown_in_part_and_whole(browser: Any, one: Path) -> None:
    with opened(browser, one, "#samples?finish=length") as shown:
        count(shown, 1)
        shown.click(".samples-row")
        shown.click("text=show all 1,000,000 characters")
        assert len(shown.locator(".sample pre").last.inner_text()) > 900_000


@pytest.mark.soak
def test_a_phone_has_the_list_and_then_the_sample(browser: Any, one: Path) -> None:
    with opened(browser, one, "#samples", width=PHONE) as shown:
        count(shown, 20)
        shown.click(".samples-row >> nth=1")
        shown.wait_for_selector(".sample-title")
        assert not shown.is_visible(".samples-list")
        assert shown.evaluate("document.documentElement.scrollWidth") <= 375
        shown.select_option(COLOURS, "entropy") if shown.query_selector(COLOURS) else None
        shown.click("text=← list")
        assert shown.is_visible(".samples-list")
        assert not shown.is_visible(".sample")


@pytest.mark.soak
def test_a_sample_is_printed_alone(browser: Any, one: Path) -> None:
    with opened(browser, one) as shown:
        open_sample(shown, "/0 and 1 make 2/")
        shown.evaluate("window.print = () => {}")
        shown.click("text=print")
        shown.emulate_media(media="print")
        assert shown.is_visible(".sample")
        assert not shown.is_visible(".samples-list")
        assert not shown.is_visible("header")
        assert not shown.is_visible("section:not(#samples)")


@pytest.mark.long
def test_a_page_that_is_served_has_the_samples_of_new_steps(browser: Any, tmp_path: Path) -> None:
    directory = make_samples(tmp_path / "going").directory
    with ReportServer(LiveReport([directory]), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/?token={server.token}#samples?set=train"
        with opened_address(browser, address) as shown:
            count(shown, 17)
            write_samples(directory, 5, [sample(5, response="a new one")])
            count(shown, 18)
            open_sample(shown, "a new one")
            assert "step 5, response 0" in shown.inner_text(".sample-title")
            shown.select_option(COLOURS, "entropy")
            assert shown.locator(".token[data-index]").count() == 4
        server.shutdown()
