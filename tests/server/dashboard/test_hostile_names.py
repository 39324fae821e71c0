"""Names that tenants choose are text: they run nothing, load nothing, turn nothing round and break no layout."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from tests.browser import SharedBrowser
from tests.server.dashboard.conftest import LAPTOP, Opener, Screen, without_faults
from tests.server.dashboard.fake_model import Kind, Model, Tenant
from tests.server.dashboard.fake_service import FakeService

from tangram.runtime.views import HIDDEN_NAME, View

SCRIPT = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
TURNED = "run\u202egnp.exe\u2066 \u200f"
LONG = "long-" + "x" * 3000
ODD = "__proto__"


@pytest.fixture(scope="module")
def hostile() -> Iterator[FakeService]:
    kinds = (Kind(f"{SCRIPT}/exec", "cpu", (1000,), 3.0), Kind("constructor/exec", "cpu", (2000,), 3.0))
    tenants = tuple(Tenant(name, 1.0, 14, 2.0, kinds, 512) for name in (SCRIPT, TURNED, LONG, ODD))
    model = Model(tenants=tenants)
    model.settle(300)
    while len(model.waiting) < 3:
        model.step()
    with FakeService(model, step_s=0.0) as service:
        yield service


@pytest.fixture(scope="module")
def loaded_hostile(browser: SharedBrowser, hostile: FakeService) -> Iterator[Screen]:
    context = browser.new_context(viewport=LAPTOP)
    yield Screen(context, hostile).go()
    context.close()


@pytest.fixture
def hostile_screen(loaded_hostile: Screen) -> Iterator[Screen]:
    """One page, for tests that read it and change nothing but which part is shown."""
    with without_faults(loaded_hostile):
        yield loaded_hostile


def test_every_page_shows_them_as_text(hostile_screen: Screen) -> None:
    page = hostile_screen
    for name in ("overview", "actions", "timeline", "runs", "sandboxes"):
        page.turn_to(name)
        page.views()
        assert page.js("document.querySelectorAll('main script, main img, main iframe').length") == 0
        assert SCRIPT in page.js("document.querySelector('main').textContent")
        assert page.js("document.documentElement.scrollWidth") <= 1366, name
    assert page.js("document.title").startswith("Tangram")
    assert not any(address.endswith("/x") for address in page.addresses)


def test_long_names_are_cut_and_whole_in_the_title(hostile_screen: Screen) -> None:
    page = hostile_screen
    page.turn_to("runs")
    shown = page.page.locator(".run-line .run[title^='long-']")
    assert shown.get_attribute("title") == LONG
    assert len(shown.inner_text()) < 130
    box = shown.bounding_box()
    assert box is not None and box["width"] < 300
    assert shown.evaluate("(node) => getComputedStyle(node).textOverflow + getComputedStyle(node).display") == (
        "ellipsisinline-block"
    )


def test_direction_marks_stay_inside_their_name(hostile_screen: Screen) -> None:
    page = hostile_screen
    page.turn_to("actions")
    isolated = page.js(
        "[...document.querySelectorAll('td .run, td .link, td .cell')]"
        ".every((one) => getComputedStyle(one).unicodeBidi === 'isolate')"
    )
    assert isolated


def test_a_sentence_is_not_turned_round_by_a_name_in_it(screen: Opener, hostile: FakeService) -> None:
    """The words after the name stand right of the words before it, on the same line."""
    page = screen(hostile)

    def reason(view: View) -> View:
        waiting = tuple(
            msgspec.structs.replace(one, reason=f"waits behind {TURNED} for {LONG}") for one in view.waiting
        )
        return msgspec.structs.replace(view, waiting=waiting)

    hostile.changed = reason
    try:
        page.go("actions")
        cell = page.page.locator("table[aria-label='Waiting actions'] td.wide .cell").first
        order = cell.evaluate(
            """(node) => { const range = document.createRange();
            return ['waits', 'for'].map((word) => { const text = [...node.childNodes].find((one) => one.data === word);
              range.selectNode(text); return range.getBoundingClientRect().left; }); }"""
        )
        assert order == sorted(order)
        assert len(cell.inner_text()) < 250, "a long word is cut"
        assert cell.locator("[title^='long-']").get_attribute("title") == LONG
    finally:
        hostile.changed = lambda view: view


def test_their_stories_and_filters_work(screen: Opener, hostile: FakeService) -> None:
    page = screen(hostile).go("actions")
    for run in (SCRIPT, TURNED, LONG, ODD):
        action = next(one for one in hostile.model.running if one.tenant.name == run)
        page.page.select_option(".filter", run)
        page.frame()
        assert page.js("[...new Set([...document.querySelectorAll('tbody .run')].map((one) => one.dataset.run))]") == [
            run
        ]
        page.page.locator("table[aria-label='Running actions'] tbody .link").first.click()
        page.until("document.getElementById('story').dataset.lines !== undefined")
        assert page.js("document.getElementById('story').dataset.of") == action.id
        assert page.js("document.querySelector('#story').scrollWidth <= document.querySelector('#story').clientWidth")
        page.page.keyboard.press("Escape")
        page.until("document.getElementById('story').hidden")


def test_the_tooltip_of_the_timeline_shows_them_as_text(screen: Opener, hostile: FakeService) -> None:
    page = screen(hostile).go("timeline")
    page.page.select_option(".filter", SCRIPT)
    page.page.focus("canvas.plot")
    page.page.keyboard.press("n")
    page.until("!document.getElementById('tooltip').hidden")
    assert "<script>" in page.text("#tooltip")
    assert page.js("document.querySelectorAll('#tooltip script, #tooltip img').length") == 0


def test_what_has_no_name_cannot_be_clicked(screen: Opener, still: FakeService) -> None:
    """A caller without access to a run gets `another run` in place of every name, many times over."""

    def hide(view: View) -> View:
        def hidden(action):
            return msgspec.structs.replace(
                action, id=HIDDEN_NAME, run=HIDDEN_NAME, trajectory=HIDDEN_NAME, name=HIDDEN_NAME
            )

        boxes = tuple(msgspec.structs.replace(box, name=HIDDEN_NAME, run=HIDDEN_NAME) for box in view.sandboxes)
        return msgspec.structs.replace(
            view,
            waiting=tuple(map(hidden, view.waiting)),
            running=tuple(map(hidden, view.running)),
            sandboxes=boxes,
            runs=(),
        )

    still.changed = hide
    page = screen(still).go("actions")
    page.views()
    waiting = still.model.view().waiting
    assert page.texts("table[aria-label='Waiting actions'] tbody .link:disabled") == [HIDDEN_NAME] * len(waiting)
    assert page.page.locator("tbody [data-run]").count() == 0
    page.turn_to("sandboxes")
    assert set(page.texts("tbody tr td:nth-child(1)")) == {HIDDEN_NAME}
