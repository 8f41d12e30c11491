"""The documentation as a site: no warnings, the same text as on GitHub, and it works in a browser without a server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal

import pytest
from markdown_it import MarkdownIt

from tests.report_browser import chromium, needs_chromium, opened

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
COUNTED = {"li", "table", "tr", "pre", "h1", "h2", "h3", "h4", "blockquote", "strong", "em", "img"}
# What a reader types or looks for, and the page, with its section, that has the answer.
QUESTIONS = {
    "what is my KL estimator": ("faq", "what-is-my-kl-estimator"),
    "why did my run stop": ("faq", "why-did-my-run-stop"),
    "8 to 64 GPUs": ("faq", "how-do-i-go-from-8-to-64-gpus"),
    "add a verifier": ("faq", "how-do-i-add-a-verifier"),
    "move my verl script": ("faq", "how-do-i-move-my-verl-slime-open-instruct-or-trl-script"),
    "out of memory": ("faq", "out-of-memory-where-and-what-now"),
}
SEEN = [("index.html", 390, "light"), ("index.html", 1280, "dark"), ("algorithms.html", 390, "dark"),
        ("reference/recipe.html", 1280, "light")]  # fmt: skip


class Read(HTMLParser):
    """A parser of a page's article: its visible words, and the number of each kind of element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.elements, self._inside = "", Counter[str](), False
        self.feed(page)
        self.words = re.sub(r"[\s¶]+", "", self.text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._inside |= tag == "article"
        self.elements[tag] += self._inside and tag in COUNTED

    def handle_endtag(self, tag: str) -> None:
        self._inside &= tag != "article"

    def handle_data(self, data: str) -> None:
        self.text += data if self._inside else ""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by mkdocs, which ends with 1 for a link, an anchor or a page of the navigation that is not there."""
    to = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(to)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return to


def test_a_page_reads_the_same_on_github_and_in_the_site(site: Path) -> None:
    github = MarkdownIt("commonmark", {"html": True}).enable("table")
    for page in sorted(DOCS.rglob("*.md")):
        name = page.relative_to(DOCS).with_suffix(".html")
        there = Read(f"<article>{github.render(page.read_text(encoding='utf-8'))}</article>")
        here = Read((site / name).read_text(encoding="utf-8"))
        assert (here.elements, here.words) == (there.elements, there.words), name


def test_no_page_loads_anything_from_another_server(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//[^"]*"', text), page.name
        assert not re.findall(r'<link[^>]* rel="(?:stylesheet|preconnect)"[^>]* href="https?:[^"]*"', text), page.name


def test_files_of_the_repository_that_pages_link_to_are_pages(site: Path) -> None:
    recipes = (site / "quickstart.html").read_text(encoding="utf-8")
    assert 'href="files/Dockerfile.html"' in recipes
    assert "nvidia/cuda" in (site / "files" / "Dockerfile.html").read_text(encoding="utf-8")


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@needs_chromium
@pytest.mark.parametrize(("name", "width", "scheme"), SEEN)
def test_a_page_fits_its_screen_in_the_palette_of_the_system(
    site: Path, browser: Any, name: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    with opened(browser, f"{site.as_uri()}/{name}", width, scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        palette = page.locator("body").get_attribute("data-md-color-scheme")
        assert palette == {"light": "default", "dark": "slate"}[scheme]


@needs_chromium
def test_the_search_finds_the_answers_without_a_server(site: Path, browser: Any) -> None:
    with opened(browser, f"{site.as_uri()}/index.html") as page:
        for question, (there, section) in QUESTIONS.items():
            asked = page.locator("input.md-search__input")
            asked.fill("")
            asked.press_sequentially(question)
            answer = f".md-search-result__link[href*='{there}.html'][href$='#{section}']"
            page.locator(answer).first.wait_for(state="visible")  # not among those that are folded away
            found = page.locator(".md-search-result__link").evaluate_all("links => links.map(link => link.href)")
            first = [link for link in found[:5] if f"{there}.html" in link and link.endswith(f"#{section}")]
            assert first, (question, found)


@needs_chromium
def test_copying_a_console_copies_its_commands_alone(site: Path, browser: Any) -> None:
    command = "megagrpo plan yaml_recipes/sums.yaml train.layout.pipeline=2"
    kept = "document.addEventListener('copy', () => (window.copied = document.getSelection().toString()))"
    with opened(browser, f"{site.as_uri()}/recipes.html") as page:
        page.evaluate(kept)
        page.locator(".highlight", has_text=command).first.locator("[data-clipboard-target]").click()
        assert page.evaluate("window.copied").strip() == command
