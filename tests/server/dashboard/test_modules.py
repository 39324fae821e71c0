"""The modules that compute, called inside the browser without the page around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.browser import SharedBrowser
from tests.server.dashboard.conftest import Screen, without_faults
from tests.server.dashboard.fake_model import Model
from tests.server.dashboard.fake_service import FakeService


@pytest.fixture(scope="module")
def blank(browser: SharedBrowser) -> Iterator[Screen]:
    """A document of the service that loads no module by itself."""
    with FakeService(Model(tenants=())) as service:
        context = browser.new_context()
        screen = Screen(context, service)
        screen.page.goto(f"{service.url}dashboard/icon.svg")
        yield screen
        context.close()


@pytest.fixture
def page(blank: Screen) -> Iterator[Screen]:
    with without_faults(blank):
        yield blank


def call(page: Screen, module: str, expression: str) -> Any:
    return page.page.evaluate(f"async () => {{ const it = await import('/dashboard/{module}'); return {expression}; }}")


def test_lengths_of_time_have_a_unit_and_as_many_digits_as_are_worth_reading(page: Screen) -> None:
    seconds = [0, 0.0000004, 0.0042, 0.34, 0.9996, 3.44, 42.4, 99.4, 125, 3600, 11_530, 187_200, -2]
    shown = ["0 s", "1 µs", "4.2 ms", "340 ms", "1.0 s", "3.4 s", "42 s", "99 s", "2 min 5 s", "1 h", "3 h 12 min"]
    assert call(page, "format.js", f"{seconds}.map(it.duration)") == [*shown, "2 d 4 h", "−2 s"]


def test_units_are_named_and_scaled(page: Screen) -> None:
    pairs = [
        (1000, "milli-cores"),
        (1500, "milli-cores"),
        (512, "MiB"),
        (2560, "MiB"),
        (1, "devices"),
        (12, "requests"),
    ]
    shown = call(page, "format.js", f"{[list(pair) for pair in pairs]}.map((pair) => it.units(...pair))")
    assert shown == ["1 core", "1.5 cores", "512 MiB", "2.5 GiB", "1 device", "12 requests"]


def test_parts_of_a_whole_are_never_rounded_to_nothing(page: Screen) -> None:
    assert call(page, "format.js", "[0, 0.0001, 0.004, 0.374, 1].map(it.percent)") == [
        "0 %", "< 0.1 %", "0.4 %", "37 %", "100 %",
    ]  # fmt: skip


def test_a_name_is_not_cut_in_the_middle_of_a_character(page: Screen) -> None:
    assert call(page, "dom.js", "it.cut('ab😀cd', 4)") == "ab…"


ROWS = """(() => { const rows = new it.Rows();
  const row = (seq, from, to, run = 'a') =>
    [seq, `${run}/${seq}`, run, 't', 'c', 'succeeded', from, from, to, 0, to - from, 0, 0, ''];
  const seen = (from, to) => { const found = []; const [first, end] = rows.between(from, to);
    for (let k = first; k < end; k += 1) if (rows.touches(k, from, to)) found.push(rows.record(k).id); return found; };
  BODY })()"""


def test_rows_that_touch_a_stretch_of_time_are_selected_at_any_length(page: Screen) -> None:
    body = (
        "rows.add([row(1, 0, 1), row(2, 3, 4), row(3, 0, 9), row(4, 8, 10)], 0); return [seen(5, 6), seen(3.5, 8.5)];"
    )
    assert call(page, "rows.js", ROWS.replace("BODY", body)) == [["a/3"], ["a/2", "a/3", "a/4"]]


def test_rows_that_come_out_of_order_are_put_in_order(page: Screen) -> None:
    body = (
        "rows.add([row(1, 0, 5), row(2, 1, 3)], 0); rows.add([row(3, 2, 4)], 0);"
        "return [...rows.ended.slice(0, rows.length)];"
    )
    assert call(page, "rows.js", ROWS.replace("BODY", body)) == [3, 4, 5]


def test_rows_in_one_lane_never_overlap(page: Screen) -> None:
    body = (
        "rows.add([row(1, 0, 2), row(2, 1, 3), row(3, 2, 4), row(4, 2.5, 5), row(5, 0, 6, 'b')], 0);"
        "return [...rows.lane.slice(0, rows.length)];"
    )
    assert call(page, "rows.js", ROWS.replace("BODY", body)) == [0, 1, 0, 2, 0]


def test_the_oldest_rows_make_room_for_new_ones(page: Screen) -> None:
    body = (
        "rows.add(Array.from({length: 19_999}, (_, k) => row(k + 1, k, k + 1)), 0);"
        "rows.add([row(20_000, 19_999, 20_000), row(20_001, 20_000, 20_001)], 0);"
        "return [rows.length, rows.id(0), rows.start(), rows.id(19_999), rows.find('a/1'), rows.find('a/20001')];"
    )
    assert call(page, "rows.js", ROWS.replace("BODY", body)) == [20_000, "a/2", 1, "a/20001", -1, 19_999]


def test_history_is_thinned_by_what_ended(page: Screen) -> None:
    bucket = (
        "(from_s, ended, p50_s, part) => ({from_s, ended, p50_s, p95_s: 0, p99_s: 0, waiting_s: ended, execution_s: 0,"
    )
    code = (
        f"(() => {{ const bucket = {bucket} overhead_s: 0, busy: {{cpu: part}}}});"
        "const {points} = it.thinned([bucket(0, 3, 1, 0.2), bucket(5, 1, 5, 0.6), bucket(10, 0, 0, 1)], 20, 20, 2);"
        "return points.map((one) => [one.from_s, one.p50_s, one.waiting_s, one.busy.cpu]); })()"
    )
    assert call(page, "past.js", code) == [[0, 2, 1, pytest.approx(0.4)], [10, None, None, 1]]
