"""The Chromium that pages are tested in: one for all tests that a worker runs one after the other in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("TANGRAM_CHROMIUM", "/usr/bin/chromium")
ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def chromium_path() -> str:
    """Skips the test where the browser is missing; in CI the test fails."""
    reason = _missing()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return CHROMIUM


def _missing() -> str:
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    return "" if Path(CHROMIUM).exists() else f"there is no Chromium at {CHROMIUM}; apt-get install chromium"


class SharedBrowser:
    """Starts the browser with the first context. While it runs, no other event loop can run in this thread."""

    def __init__(self) -> None:
        self._playwright: Any = None
        self._browser: Any = None

    def new_context(self, **options: Any) -> Any:
        if self._browser is None:
            from playwright.sync_api import sync_playwright

            path = chromium_path()
            self._playwright = sync_playwright().start()
            self._browser = self._playwright.chromium.launch(executable_path=path, args=ARGS)
        return self._browser.new_context(**options)

    def close(self) -> None:
        browser, playwright = self._browser, self._playwright
        self._browser = self._playwright = None
        if browser is not None:
            browser.close()
        if playwright is not None:
            playwright.stop()


SHARED_BROWSER = SharedBrowser()


def close_after(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """For the hook `pytest_runtest_teardown` of a folder: closes the browser before the tests of another folder."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        SHARED_BROWSER.close()
