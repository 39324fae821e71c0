"""The timeline page in a browser: it draws, zooms, shows tooltips, and escapes text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser import SharedBrowser
from tests.rl.recordings import HOSTILE, simple, span

from tangram.rl.observe.timeline import build_timeline
from tangram.rl.observe.timeline_page import write_timeline
from tangram.rl.trajectories.trajectory import Stage


class TimelinePage:
    """A page with two hundred trajectories with hostile names, and all that went wrong in it."""

    def __init__(self, browser: SharedBrowser, path: Path, scheme: str) -> None:
        self.context = browser.new_context(color_scheme=scheme, viewport={"width": 1100, "height": 900})
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    @property
    def range(self) -> str:
        return self.page.locator("#lanes-range").text_content()

    def point(self, x: int, y: int) -> str:
        box = self.page.locator("#lanes canvas").bounding_box()
        self.page.mouse.move(box["x"] + x, box["y"] + y)
        return self.page.locator("#tip").text_content()

    def row(self, y: int) -> list[tuple[int, ...]]:
        """The colours of a row of pixels, in one look: a browser warns of more."""
        script = """(y) => {
          const canvas = document.querySelector("#lanes canvas");
          return [...canvas.getContext("2d").getImageData(0, y, canvas.width, 1).data];
        }"""
        colours = self.page.evaluate(script, y)
        return [tuple(colours[at : at + 4]) for at in range(0, len(colours), 4)]


@pytest.fixture(params=["light", "dark"])
def timeline_page(browser: SharedBrowser, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TimelinePage]:
    name = HOSTILE[3]
    trajectories = [
        simple(f"{name}{n}", [span(Stage.STEP, 0, 6, 2.0, HOSTILE[4]), span(Stage.GENERATE, 6, 8)], task=HOSTILE[n % 5])
        for n in range(200)
    ]
    path = tmp_path / "t.html"
    write_timeline(path, build_timeline(trajectories, 10.0), HOSTILE[3], HOSTILE[4])
    one = TimelinePage(browser, path, request.param)
    yield one
    one.context.close()


def test_the_timeline_draws_zooms_shows_details_and_escapes_text(timeline_page: TimelinePage) -> None:
    assert timeline_page.range == "0.00 s to 10.00 s of 10.00 s"
    # The plot begins at x = 200 and ends at the right edge; lanes begin below the five stages.
    wide = int(timeline_page.page.locator("#lanes canvas").bounding_box()["width"])
    at = lambda seconds: 200 + int((wide - 200) * seconds / 10)  # noqa: E731
    assert "waiting for <img src=x" in timeline_page.point(at(1), 140)
    assert "environment: step, 4.000 s" in timeline_page.point(at(4), 140) and "</script>" in timeline_page.point(
        at(4), 140
    )
    assert "generate: idle for 6.000 s" in timeline_page.point(at(3), 43)
    assert "generate: busy" in timeline_page.point(at(7), 43)
    row = timeline_page.row(140)
    assert len({row[at(1)], row[at(4)], row[at(7)], row[at(9)]}) == 4
    timeline_page.page.click("#lanes button[data-zoom='2']")
    assert timeline_page.range == "2.50 s to 7.50 s of 10.00 s"
    timeline_page.page.locator("#lanes").press("ArrowRight")
    assert timeline_page.range == "3.50 s to 8.50 s of 10.00 s"
    timeline_page.page.click("#lanes button[data-zoom='0']")
    timeline_page.point(at(5), 300)
    timeline_page.page.keyboard.down("Shift")
    timeline_page.page.mouse.wheel(0, -100)
    timeline_page.page.keyboard.up("Shift")
    timeline_page.page.wait_for_function(
        "document.getElementById('lanes-range').textContent !== '0.00 s to 10.00 s of 10.00 s'"
    )
    first = timeline_page.point(100, 140)
    timeline_page.page.evaluate("document.getElementById('scroller').scrollTop = 500")
    timeline_page.page.wait_for_function("document.getElementById('scroller').scrollTop === 500")
    assert timeline_page.point(101, 140) != first
    assert timeline_page.page.evaluate("window.owned") is None
    assert timeline_page.wrong == [] and [url for url in timeline_page.requests if not url.startswith("file:")] == []
