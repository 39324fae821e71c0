"""The timeline: what is in sight, how one moves in it, and that it can be pointed at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chrome_trace import check, named
from tests.server.dashboard.conftest import Opener, Screen
from tests.server.dashboard.fake_model import Model
from tests.server.dashboard.fake_service import FakeService


@pytest.fixture(scope="module")
def many() -> Iterator[FakeService]:
    """Three thousand settled actions, standing still."""
    model = Model()
    model.settle(3000)
    with FakeService(model, step_s=0.0) as service:
        yield service


@pytest.fixture
def page(screen: Opener, many: FakeService) -> Screen:
    shown = screen(many).go("timeline?range=all")
    shown.until("document.querySelector('canvas.plot').dataset.picked >= 3000")
    return shown


def ends(page: Screen) -> tuple[float, float]:
    return float(page.plot("from")), float(page.plot("to"))


def moved(page: Screen, before: tuple[float, float]) -> tuple[float, float]:
    page.until(f"document.querySelector('canvas.plot').dataset.from !== '{before[0]:.4f}'")
    return ends(page)


def corner(page: Screen) -> dict[str, float]:
    box = page.page.locator("canvas.plot").bounding_box()
    assert box is not None
    return dict(box)


def test_all_rows_are_in_sight_and_thin_ones_are_drawn_together(page: Screen, many: FakeService) -> None:
    assert int(page.plot("picked")) == len(many.model.rows)
    assert int(page.plot("live")) == len(many.model.running) + len(many.model.waiting)
    assert int(page.plot("merged")) > 0
    names = sorted({row.run for row in many.model.rows})
    assert page.texts(".lane-label .run") == names


def test_something_is_painted_in_the_colours_of_the_runs(page: Screen) -> None:
    colours = page.page.evaluate(
        """() => { const plot = document.querySelector('canvas.plot');
        const {data} = plot.getContext('2d').getImageData(0, 0, plot.width, plot.height);
        const found = {};
        for (let k = 0; k < data.length; k += 4) {
          const key = '#' + [data[k], data[k + 1], data[k + 2]].map((n) => n.toString(16).padStart(2, '0')).join('');
          found[key] = (found[key] ?? 0) + 1; }
        const style = getComputedStyle(document.documentElement);
        const names = ['--r0', '--r1', '--r2', '--r3', '--r0-light'];
        return names.map((name) => found[style.getPropertyValue(name).trim()] ?? 0); }"""
    )
    assert all(count > 500 for count in colours), colours


def test_the_wheel_zooms_at_the_pointer(page: Screen) -> None:
    box = corner(page)
    part = 0.3
    page.page.mouse.move(box["x"] + box["width"] * part, box["y"] + 200)
    before = ends(page)
    at = before[0] + (before[1] - before[0]) * part
    page.page.mouse.wheel(0, -200)
    after = moved(page, before)
    assert after[1] - after[0] < before[1] - before[0]
    assert after[0] + (after[1] - after[0]) * part == pytest.approx(at, abs=(after[1] - after[0]) / 100)
    page.page.mouse.wheel(0, 200)
    back = moved(page, after)
    assert back[1] - back[0] > after[1] - after[0]


def test_dragging_moves_the_stretch_and_keeps_its_length(page: Screen) -> None:
    box = corner(page)
    page.page.keyboard.press("Tab")
    page.page.focus("canvas.plot")
    before = ends(page)
    page.page.keyboard.press("+")
    zoomed = moved(page, before)
    x, y = box["x"] + 600, box["y"] + 200
    page.page.mouse.move(x, y)
    page.page.mouse.down()
    page.page.mouse.move(x + 50, y)
    page.page.mouse.move(x + 100, y)
    page.page.mouse.up()
    after = moved(page, zoomed)
    page.frame()
    after = ends(page)
    assert after[1] - after[0] == pytest.approx(zoomed[1] - zoomed[0], rel=1e-6)
    assert zoomed[0] - after[0] == pytest.approx((zoomed[1] - zoomed[0]) * 100 / box["width"], rel=0.02)
    assert page.js("document.getElementById('story').hidden"), "a drag is not a click"


def test_keys_move_zoom_and_reset(page: Screen) -> None:
    page.page.focus("canvas.plot")
    whole = ends(page)
    page.page.keyboard.press("+")
    closer = moved(page, whole)
    page.page.keyboard.press("ArrowLeft")
    left = moved(page, closer)
    assert left[0] < closer[0]
    page.page.keyboard.press("ArrowRight")
    right = moved(page, left)
    assert right[0] > left[0]
    page.page.keyboard.press("-")
    moved(page, right)
    page.page.keyboard.press("0")
    page.until("document.querySelector('canvas.plot').dataset.mode === 'all'")
    assert ends(page) == whole
    page.page.keyboard.press("l")
    page.until("document.querySelector('canvas.plot').dataset.mode === 'recent'")
    assert ends(page)[1] - ends(page)[0] == pytest.approx(300)


def test_a_brush_on_the_strip_below_picks_a_stretch_and_a_double_click_resets_it(
    page: Screen, many: FakeService
) -> None:
    strip = page.page.locator("canvas.minimap").bounding_box()
    assert strip is not None
    y = strip["y"] + 20
    before = ends(page)
    page.page.mouse.move(strip["x"] + strip["width"] * 0.25, y)
    page.page.mouse.down()
    page.page.mouse.move(strip["x"] + strip["width"] * 0.4, y)
    page.page.mouse.move(strip["x"] + strip["width"] * 0.5, y)
    page.page.mouse.up()
    moved(page, before)
    page.frame()
    start = min(row.submitted_s for row in many.model.rows)
    length = many.model.now - start
    assert ends(page) == pytest.approx((start + length * 0.25, start + length * 0.5), abs=length / 100)
    page.page.mouse.dblclick(strip["x"] + strip["width"] * 0.35, y)
    page.until("document.querySelector('canvas.plot').dataset.mode === 'all'")


def test_hovering_over_an_action_shows_its_details_and_a_click_opens_its_story(page: Screen, many: FakeService) -> None:
    row = many.model.rows[len(many.model.rows) // 2]
    page.page.fill(".search", row.id)
    page.page.press(".search", "Enter")
    page.until(f"document.querySelector('canvas.plot').dataset.hovered === '{row.id}'")
    box = corner(page)
    x, y = box["x"] + float(page.plot("focusX")), box["y"] + float(page.plot("focusY"))
    page.page.mouse.move(box["x"] + 3, box["y"] + 3)
    page.until("document.getElementById('tooltip').hidden")
    page.page.mouse.move(x, y)
    page.until("!document.getElementById('tooltip').hidden")
    tooltip = page.text("#tooltip")
    for words in (row.id, row.name, row.trajectory, "waiting", "overhead", "execution", "node-a"):
        assert words in tooltip
    page.page.mouse.click(x, y)
    page.until(f"document.getElementById('story').dataset.of === '{row.id}'")
    page.until("document.getElementById('story').dataset.lines === '4'")
    assert page.texts("#story .time-parts > span")[0].startswith("waiting")


def test_actions_can_be_walked_through_with_the_keyboard(page: Screen) -> None:
    page.page.focus("canvas.plot")
    page.page.keyboard.press("n")
    first = page.until("document.querySelector('canvas.plot').dataset.hovered")
    page.page.keyboard.press("n")
    page.until(f"document.querySelector('canvas.plot').dataset.hovered !== '{first}'")
    second = page.plot("hovered")
    page.until(f"document.getElementById('announcement').textContent.startsWith('{second}')")
    page.page.keyboard.press("Enter")
    page.until(f"document.getElementById('story').dataset.of === '{second}'")


def test_keys_work_wherever_the_focus_is_except_where_one_writes(page: Screen) -> None:
    page.page.click("text=Everything")
    page.page.keyboard.press("n")
    first = page.until("document.querySelector('canvas.plot').dataset.hovered")
    page.page.keyboard.press("Enter")
    page.until(f"document.getElementById('story').dataset.of === '{first}'")
    page.page.keyboard.press("n")
    page.until(f"document.querySelector('canvas.plot').dataset.hovered !== '{first}'")
    second = page.plot("hovered")
    page.page.focus(".search")
    page.page.keyboard.type("0n")
    page.until("document.querySelector('.search').value === '0n'")
    assert page.plot("hovered") == second
    page.page.focus("[data-lanes=trajectories]")
    page.page.keyboard.press("Enter")
    page.until("document.querySelector('[data-lanes=trajectories]').getAttribute('aria-pressed') === 'true'")


def test_a_search_counts_what_matches(page: Screen, many: FakeService) -> None:
    page.page.fill(".search", "coding-0000")
    model = many.model
    live = [*model.running, *model.waiting]
    matches = sum("coding-0000" in row.id for row in model.rows) + sum("coding-0000" in one.id for one in live)
    page.until(f"document.querySelector('.toolbar .note').textContent === '{matches} matches'")


def test_all_remembered_actions_are_exported_as_a_chrome_trace(page: Screen, many: FakeService) -> None:
    with page.page.expect_download() as download:
        page.page.click("text=Export")
    assert download.value.suggested_filename == "timeline.json"
    events = json.loads(Path(download.value.path()).read_text())["traceEvents"]
    check(events)
    ids = {event["args"]["id"] for event in events if event["ph"] == "X" and "id" in event["args"]}
    assert ids == {row.id for row in many.model.rows}
    assert set(named(events, "process_name").values()) == {row.run for row in many.model.rows}


def test_an_export_that_fails_says_why_and_can_be_repeated(page: Screen, many: FakeService) -> None:
    many.error = (503, "draining", "the service is stopping")
    try:
        page.page.click("text=Export")
        page.until("document.body.innerText.includes('Export failed')")
        assert "the service is stopping" in page.page.locator("text=Export failed").get_attribute("title")
    finally:
        many.error = None
    with page.page.expect_download():
        page.page.click("text=Export failed")
    page.until("!document.body.innerText.includes('Export failed')")


def test_lanes_are_packed_or_one_per_trajectory(page: Screen, many: FakeService) -> None:
    packed = int(page.plot("laneTotal"))
    page.page.click("text=Trajectories")
    page.until(f"document.querySelector('canvas.plot').dataset.laneTotal !== '{packed}'")
    model = many.model
    live = {(one.tenant.name, one.trajectory.name) for one in [*model.running, *model.waiting]}
    assert int(page.plot("laneTotal")) == len({(row.run, row.trajectory) for row in model.rows} | live)
    page.until("location.hash.includes('lanes=trajectories')")
    page.page.mouse.move(600, 400)
    first = page.texts(".lane-label .run")[0]
    page.page.keyboard.down("Shift")
    for _ in range(40):
        page.page.mouse.wheel(0, 2000)
    page.page.keyboard.up("Shift")
    page.until(f"document.querySelector('.lane-label .run').textContent !== '{first}'")


def test_the_stretch_follows_the_present_until_it_is_moved(screen: Opener, busy: FakeService) -> None:
    page = screen(busy).go("timeline")
    before = ends(page)
    assert page.plot("mode") == "recent"
    page.until(f"Number(document.querySelector('canvas.plot').dataset.from) > {before[0]}")
    page.page.focus("canvas.plot")
    page.page.keyboard.press("+")
    page.page.keyboard.press("ArrowLeft")
    page.until("document.querySelector('canvas.plot').dataset.mode === 'fixed'")
    page.frame()  # the second key may be drawn later than the first
    kept = ends(page)
    page.views(2)
    assert ends(page) == kept
