"""A real browser, and pages for it to open."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = (
    "a browser is missing: apt-get install chromium (or have Playwright fetch one: "
    ".venv/bin/playwright install chromium), then make test-browser"
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, from the system's packages or Playwright's own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is missing: make test-browser")
    with playwright.sync_playwright() as driver:
        path = next(filter(None, map(shutil.which, NAMES)), None)
        try:
            opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error:
            if path is not None:
                raise
            pytest.skip(HOW)
        yield opened
        opened.close()
