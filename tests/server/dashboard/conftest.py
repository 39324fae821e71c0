"""A real Chromium, and pages that must not complain: whatever a page logs as an error or violates fails its test."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.browser import SHARED_BROWSER, SharedBrowser, chromium_path, close_after
from tests.server.dashboard.fake_model import Model
from tests.server.dashboard.fake_service import FakeService

LAPTOP = {"width": 1366, "height": 768}
PATIENCE_S = 120.0
NOT_OF_THE_PAGE = "Failed to load resource"
"""What the browser itself logs for a refused or unanswered request; the tests that stop the service look for it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    try:
        return (yield)
    finally:
        close_after(item, nextitem)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the browser."""
    return chromium_path()


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[SharedBrowser]:
    yield SHARED_BROWSER
    SHARED_BROWSER.close()  # of a run that was stopped before the last test of this folder


class Screen:
    """A page of the dashboard in a window of a laptop."""

    def __init__(self, context: Any, service: FakeService) -> None:
        self.context = context
        self.service = service
        self.page = context.new_page()
        self.faults: list[str] = []
        self.addresses: list[str] = []
        self.page.on("console", self._logged)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.addresses.append(request.url))

    def _logged(self, message: Any) -> None:
        if message.type in ("error", "warning") and NOT_OF_THE_PAGE not in message.text:
            self.faults.append(f"{message.type}: {message.text}")

    def go(self, place: str = "", *, wait: bool = True) -> Screen:
        self.page.goto(f"{self.service.url}{'#' + place if place else ''}")
        if wait:
            self.until("document.body.dataset.complete === 'true' && document.querySelector('main > *') !== null")
            self.frame()
        return self

    def turn_to(self, name: str) -> None:
        self.page.click(f"nav [data-page={name}]")
        self.until(f"document.body.dataset.page === '{name}' && document.querySelector('main > *') !== null")
        self.frame()

    def js(self, expression: str) -> Any:
        return self.page.evaluate(f"() => ({expression})")

    def until(self, condition: str) -> Any:
        """Waits until it is true. The browser's own waiting would evaluate strings inside the page, which its policy
        forbids."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.js(condition)):
            assert time.monotonic() < deadline, f"expected within {PATIENCE_S:g} s: {condition}; {self.faults}"
            self.page.wait_for_timeout(20)
        return value

    def views(self, more: int = 1) -> None:
        """Waits for that many further views. A page that is online again fetches one without waiting its second."""
        for _ in range(more):
            before = int(self.js("document.body.dataset.views"))
            self.page.evaluate("() => { dispatchEvent(new Event('online')); }")
            self.until(f"Number(document.body.dataset.views) > {before}")
        self.frame()

    def frame(self) -> None:
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def texts(self, selector: str) -> list[str]:
        return list(self.page.locator(selector).all_inner_texts())

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())

    def plot(self, name: str) -> str:
        """Of the canvas of the timeline: what it says about itself."""
        return str(self.js(f"document.querySelector('canvas.plot').dataset.{name}"))


Opener = Callable[..., Screen]


@pytest.fixture
def screen(browser: SharedBrowser) -> Iterator[Opener]:
    """Opens screens on a service; at the end none of them may have complained."""
    opened: list[Screen] = []

    def open_one(service: FakeService, **context: Any) -> Screen:
        one = Screen(browser.new_context(**{"viewport": LAPTOP, **context}), service)
        opened.append(one)
        return one

    yield open_one
    faults = [fault for one in opened for fault in one.faults]
    for one in opened:
        one.context.close()
    assert faults == []


@contextmanager
def without_faults(screen: Screen) -> Iterator[Screen]:
    """A screen that several tests share: what it complains about fails the test that it happens in."""
    yield screen
    faults, screen.faults[:] = list(screen.faults), []
    assert faults == []


@pytest.fixture(scope="module")
def loaded_still(browser: SharedBrowser) -> Iterator[Screen]:
    with FakeService(model_with_waiting_and_running(), step_s=0.0) as service:
        context = browser.new_context(viewport=LAPTOP)
        yield Screen(context, service).go()
        context.close()


@pytest.fixture
def still_screen(loaded_still: Screen) -> Iterator[Screen]:
    """One page, for tests that read it and change nothing but which part is shown and the size of the window."""
    loaded_still.page.set_viewport_size(LAPTOP)
    with without_faults(loaded_still):
        yield loaded_still


def model_with_waiting_and_running() -> Model:
    model = Model()
    model.settle(400)
    while not (model.waiting and model.running):
        model.step()
    return model


@pytest.fixture
def busy() -> Iterator[FakeService]:
    """A service that goes on by a second with each view."""
    model = Model()
    model.settle(400)
    with FakeService(model) as service:
        yield service


@pytest.fixture
def still() -> Iterator[FakeService]:
    """A service that stands still, so that what is shown can be compared with what it says."""
    with FakeService(model_with_waiting_and_running(), step_s=0.0) as service:
        yield service


@pytest.fixture
def idle() -> Iterator[FakeService]:
    """A service without any actions yet."""
    with FakeService(Model(tenants=())) as service:
        yield service
