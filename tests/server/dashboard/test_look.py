"""Light and dark, contrast, room on a laptop, keyboard and names for screen readers."""

from __future__ import annotations

import pytest
from tests.server.dashboard.conftest import Opener, Screen
from tests.server.dashboard.fake_service import FakeService

PAGES = ("overview", "actions", "timeline", "runs", "sandboxes")

POOR_CONTRAST = """() => {
  const channel = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return [n.slice(0, 3), n[3] ?? 1]; };
  const ground = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const [colour, alpha] = parse(getComputedStyle(one).backgroundColor);
      if (alpha === 1) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest('.unseen, option')) continue;
    const style = getComputedStyle(node);
    const [ink] = parse(node instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(ink), light(ground(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push(`${walker.currentNode.data.trim()}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""

NAMELESS = """() => [...document.querySelectorAll('button, input, select, svg[role], canvas[role], [role=application]')]
  .filter((node) => node.checkVisibility() && !node.classList.contains('segment'))
  .filter((node) => !(node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length))
  .map((node) => node.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_has_enough_contrast(screen: Opener, still: FakeService, theme: str) -> None:
    page = screen(still, color_scheme=theme).go()
    assert page.js("document.documentElement.dataset.theme") == theme
    for name in PAGES:
        page.turn_to(name)
        assert page.page.evaluate(POOR_CONTRAST) == [], name
    page.turn_to("actions")
    page.page.click("tbody .link >> nth=0")
    page.until("document.getElementById('story').dataset.lines !== undefined")
    assert page.page.evaluate(POOR_CONTRAST) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_banner_and_token_dialog_have_enough_contrast(screen: Opener, still: FakeService, theme: str) -> None:
    page = screen(still, color_scheme=theme).go()
    still.error = (500, "internal", "something broke")
    page.until("!document.getElementById('banner').hidden")
    assert page.page.evaluate(POOR_CONTRAST) == []
    still.error, still.token = None, "needed"
    page.page.reload()
    page.until("document.getElementById('token').open")
    assert page.page.evaluate(POOR_CONTRAST) == []


def test_the_theme_is_that_of_the_system_until_it_is_switched_and_then_kept(screen: Opener, still: FakeService) -> None:
    page = screen(still, color_scheme="dark").go()
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.js(ground)
    page.page.click("[data-theme]:is(button)")
    page.until("document.documentElement.dataset.theme === 'light'")
    assert page.js(ground) != dark
    page.page.reload()
    page.until("document.documentElement.dataset.theme === 'light'")


def test_the_theme_follows_the_system_until_it_is_switched(screen: Opener, still: FakeService) -> None:
    page = screen(still, color_scheme="light").go("timeline")
    frame = page.plot("frame")
    page.page.emulate_media(color_scheme="dark")
    page.until("document.documentElement.dataset.theme === 'dark'")
    page.until(f"document.querySelector('canvas.plot').dataset.frame !== '{frame}'")


@pytest.mark.parametrize("size", [(1366, 768), (1920, 1080), (1024, 700)])
def test_nothing_needs_to_be_scrolled_sideways(still_screen: Screen, size: tuple[int, int]) -> None:
    page = still_screen
    page.page.set_viewport_size({"width": size[0], "height": size[1]})
    for name in PAGES:
        page.turn_to(name)
        assert page.js("document.documentElement.scrollWidth") <= size[0], name
        beyond = page.js(
            "[...document.querySelectorAll('main *, header *')].filter((node) => node.checkVisibility()"
            f" && node.getBoundingClientRect().right > {size[0]} + 1).map((node) => node.className)"
        )
        assert beyond == [], name


def test_no_heading_and_nothing_but_a_name_is_cut_in_a_small_window(still_screen: Screen) -> None:
    page = still_screen
    page.page.set_viewport_size({"width": 1280, "height": 800})
    for name in PAGES:
        page.turn_to(name)
        cut = page.js(
            "[...document.querySelectorAll('th, td > .cell:not([title])')].filter((node) => node.checkVisibility()"
            " && node.scrollWidth > node.clientWidth).map((node) => node.textContent)"
        )
        assert cut == [], name


def test_the_timeline_fits_into_the_window_of_a_laptop(still_screen: Screen) -> None:
    page = still_screen
    page.turn_to("timeline")
    assert page.js("document.documentElement.scrollHeight") <= 768


def test_everything_that_can_be_used_has_a_name(still_screen: Screen) -> None:
    page = still_screen
    for name in PAGES:
        page.turn_to(name)
        assert page.page.evaluate(NAMELESS) == [], name


def test_pages_charts_pools_and_runs_are_reached_with_the_tab_key(screen: Opener, still: FakeService) -> None:
    page = screen(still).go()
    page.page.evaluate("() => document.body.focus()")
    reached = set()
    for _ in range(80):
        page.page.keyboard.press("Tab")
        where = "document.activeElement.closest('.chart') ? 'chart' : document.activeElement.dataset.page"
        reached.add(page.js(f"{where} ?? document.activeElement.className"))
    assert {"skip", "actions", "timeline", "filter", "chart", "run", "link quiet"} <= reached


def test_the_focus_is_visible(screen: Opener, still: FakeService) -> None:
    page = screen(still).go()
    page.page.keyboard.press("Tab")
    page.page.keyboard.press("Tab")
    assert page.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_nothing_moves_under_reduced_motion(screen: Opener, still: FakeService) -> None:
    moving = (
        "[...document.querySelectorAll('*')].filter((node) => getComputedStyle(node).transitionDuration !== '0s'"
        " || getComputedStyle(node).animationName !== 'none').length"
    )
    assert screen(still, reduced_motion="reduce").go().js(moving) == 0
    assert screen(still, reduced_motion="no-preference").go().js(moving) > 0
