"""Latency of the dashboard from an input to the frame that shows its effect, in Chromium.

Owns the list of interactions and the clock. A latency is from the time at which the browser got the input, taken from
the event itself, to the first frame after the page shows the effect: long tasks of the page count wherever they occur.
Each interaction is repeated, and the worst latency counts. The caller provides a service with the actions to show.
Playwright is imported only when used.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from tangram.errors import ManagerError

if TYPE_CHECKING:
    from playwright.async_api import Page

CHROMIUM_ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
WIDTH, HEIGHT = 1366, 768
REPEATS = 5
HOVER_TRIES = 5
TIMEOUT_S = 20.0
POLL_S = 0.05
LONG_TASK_MS = 50.0
"""The browser's definition of a long task; shorter ones are not reported."""

PLOT = "canvas.plot"

WATCH = """() => {
  window.probe = {longest: 0};
  new PerformanceObserver((list) => {
    for (const task of list.getEntries()) window.probe.longest = Math.max(window.probe.longest, task.duration);
  }).observe({type: "longtask"});
}"""

ARM = """([type, selector, attribute]) => {
  const read = () => document.querySelector(selector)?.getAttribute(attribute) ?? "";
  const before = read();
  window.probe.took = new Promise((resolve) => {
    addEventListener(type, (event) => {
      const painted = () => {
        const {port1, port2} = new MessageChannel();
        port1.onmessage = () => resolve(performance.now() - event.timeStamp);
        port2.postMessage(0);
      };
      const look = () => requestAnimationFrame(() => (read() === before ? look() : painted()));
      look();
    }, {capture: true, once: true});
  });
}"""
"""Waits for an input of that type, then for a change of that attribute, then for the frame that shows it: a message
sent while a frame is rendered arrives after it."""


async def measure(url: str, token: str, chromium: str) -> dict[str, float]:
    """Return milliseconds by interaction, the worst of several. `token` may be empty; `chromium` is the path of the
    browser.

    `longest_task` is the longest time for which the page was unresponsive, over all interactions.
    """
    async with _open_page(url, token, chromium) as page:
        probe = _Probe(page)
        await probe.show_everything()
        await probe.zoom_and_pan()
        await probe.point_and_open()
        await probe.filter_and_find()
        await probe.switch_views()
        probe.ms_by_interaction["longest_task"] = max(LONG_TASK_MS, await page.evaluate("() => window.probe.longest"))
        return probe.ms_by_interaction


@contextlib.asynccontextmanager
async def _open_page(url: str, token: str, chromium: str) -> AsyncIterator[Page]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS)
        try:
            page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            if token:
                await page.add_init_script(f"sessionStorage.setItem('tangram.token', {json.dumps(token)})")
            await page.goto(f"{url.rstrip('/')}/#timeline")
            yield page
        finally:
            await browser.close()


class _Probe:
    def __init__(self, page: Page) -> None:
        self._page = page
        self.ms_by_interaction: dict[str, float] = {}

    async def show_everything(self) -> None:
        """Wait until all rows are loaded and in view; not timed."""
        await self._wait_until(
            f"document.body.dataset.complete === 'true' && document.querySelector('{PLOT}')?.dataset.frame"
        )
        await self._page.evaluate(WATCH)
        await self._page.click("text=Everything")
        await self._wait_until(f"document.querySelector('{PLOT}').dataset.mode === 'all'")

    async def zoom_and_pan(self) -> None:
        page = self._page
        x, y = await self._plot_center()
        await page.mouse.move(x, y)
        await self._time("zoom_in", "wheel", PLOT, "data-from", lambda: page.mouse.wheel(0, -120))
        await self._time_pan(x, y)
        await self._time("zoom_out", "wheel", PLOT, "data-from", lambda: page.mouse.wheel(0, 120))
        await page.focus(PLOT)
        await self._time("key_zoom_in", "keydown", PLOT, "data-from", lambda: page.keyboard.press("+"))
        await self._time("key_pan", "keydown", PLOT, "data-from", lambda: page.keyboard.press("ArrowLeft"))
        await self._time("show_everything", "keydown", PLOT, "data-from", self._keys("0", "+"), repeats=2 * REPEATS)
        await page.keyboard.press("0")

    async def point_and_open(self) -> None:
        page = self._page
        await self._time("walk", "keydown", PLOT, "data-hovered", lambda: page.keyboard.press("n"))
        await page.keyboard.press("0")
        await self._wait_until(f"document.querySelector('{PLOT}').dataset.mode === 'all'")
        await self._time_hover()
        for _ in range(REPEATS):
            await self._time("open_story", "keydown", "#story", "data-lines", self._open, repeats=1)
            await self._time("close_story", "keydown", "#story", "data-of", self._keys("Escape"), repeats=1)

    async def filter_and_find(self) -> None:
        page = self._page
        run = ".lane-label .run"
        await self._time("filter_run", "click", PLOT, "data-picked", lambda: page.click(run), repeats=2 * REPEATS)
        await page.focus(".search")
        await self._time("find", "keydown", PLOT, "data-matches", lambda: page.keyboard.press("1"))
        await page.fill(".search", "")
        await self._time("lanes", "click", PLOT, "data-lane-total", self._other_lanes, repeats=2)

    async def switch_views(self) -> None:
        page = self._page
        theme = self._page.locator("button[data-theme]")
        await self._time("switch_theme", "click", "html", "data-theme", theme.click)
        for name in ("overview", "actions", "runs", "sandboxes", "timeline"):
            tab = page.locator(f"nav [data-page={name}]")
            await self._time(f"go_to_{name}", "click", "body", "data-page", tab.click, repeats=1)

    # Inputs.

    async def _plot_center(self) -> tuple[float, float]:
        sandbox = await self._page.locator(PLOT).bounding_box()
        assert sandbox is not None
        return sandbox["x"] + sandbox["width"] / 2, sandbox["y"] + sandbox["height"] / 2

    async def _time_pan(self, x: float, y: float) -> None:
        """Drag in both directions, with the button held down."""
        mouse = self._page.mouse
        await mouse.down()
        places = iter([x - 60, x + 60] * REPEATS)
        await self._time("pan", "pointermove", PLOT, "data-from", lambda: mouse.move(next(places), y))
        await mouse.up()

    async def _time_hover(self) -> None:
        """Move from an empty place to an action. The page is live: the action may have moved away in between."""
        mouse = self._page.mouse
        sandbox = await self._page.locator(PLOT).bounding_box()
        assert sandbox is not None
        for _ in range(REPEATS):
            for _ in range(HOVER_TRIES):
                point = await self._find_action()
                await mouse.move(sandbox["x"] + 5, sandbox["y"] + 5)
                await self._wait_until(f"!document.querySelector('{PLOT}').dataset.hovered")
                with contextlib.suppress(ManagerError):
                    act = functools.partial(mouse.move, *point)
                    await self._time("hover", "pointermove", PLOT, "data-hovered", act, repeats=1, timeout_s=1.0)
                    break
            else:
                raise ManagerError(f"expected to hit an action with the pointer within {HOVER_TRIES} tries")

    async def _find_action(self) -> tuple[float, float]:
        """Find an action on the screen. The timeline is live, so recorded actions move to the left."""
        sandbox = await self._page.locator(PLOT).bounding_box()
        assert sandbox is not None
        for row, column in itertools.product((0.5, 0.3, 0.7, 0.2, 0.8), range(1, 100)):
            point = (sandbox["x"] + sandbox["width"] * column / 100, sandbox["y"] + sandbox["height"] * row)
            await self._page.mouse.move(*point)
            if await self._page.evaluate(f"() => Boolean(document.querySelector('{PLOT}').dataset.hovered)"):
                return point
        raise ManagerError("expected actions on the timeline to point at, found none")

    async def _open(self) -> None:
        await self._page.focus(PLOT)
        await self._page.keyboard.press("Enter")

    def _keys(self, *keys: str) -> Callable[[], Awaitable[Any]]:
        """Return an input that presses the keys in turn."""
        turn = iter(keys * 2 * REPEATS)
        return lambda: self._page.keyboard.press(next(turn))

    async def _other_lanes(self) -> None:
        await self._page.click("[data-lanes][aria-pressed=false]")

    # The clock.

    async def _time(
        self,
        name: str,
        event: str,
        selector: str,
        attribute: str,
        act: Callable[[], Awaitable[Any]],
        repeats: int = REPEATS,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        for _ in range(repeats):
            await self._page.evaluate(ARM, [event, selector, attribute])
            await act()
            try:
                took = await asyncio.wait_for(self._page.evaluate("() => window.probe.took"), timeout_s)
            except TimeoutError:
                raise ManagerError(
                    f"expected {name} to change {attribute} of {selector} within {timeout_s:g} s: it did not"
                ) from None
            self.ms_by_interaction[name] = max(self.ms_by_interaction.get(name, 0.0), took)

    async def _wait_until(self, condition: str) -> None:
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        while not await self._page.evaluate(f"() => Boolean({condition})"):
            if asyncio.get_running_loop().time() > deadline:
                raise ManagerError(f"expected within {TIMEOUT_S:g} s that {condition}")
            await asyncio.sleep(POLL_S)
