"""Chromium, driven by Playwright, for tests of pages. What a page's console says is an error of the test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.needs("chromium")

PATIENCE_MS = 120_000
"""Only what never comes takes so long."""


@contextmanager
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, address: str, width: int = 1440, scheme: Literal["light", "dark"] = "light"
) -> Iterator[Page]:
    """A page in a window of this width. Fails if its console has warnings or errors, or if it asks another server."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE_MS)
    said: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    own = address.split("/")[2]
    page.on(
        "request", lambda asked: said.append(asked.url) if asked.url.split("/")[2:3] not in ([own], ["blob:"]) else None
    )
    page.goto(address)
    yield page
    context.close()
    assert said == []
