"""From what one sees to what is behind it: runs filter everything, ids open stories, the address keeps the place."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from tests.server.dashboard.conftest import Opener
from tests.server.dashboard.fake_service import FakeService


def test_a_click_on_a_run_filters_every_page(screen: Opener, still: FakeService) -> None:
    page = screen(still).go()
    model = still.model
    page.page.click(".run-line[data-name='coding-rl'] .run")
    page.frame()
    mine = [doing for doing in model.running if doing.tenant.name == "coding-rl"]
    assert page.text("[data-tile=running] b") == str(len(mine))
    assert page.js("document.querySelector('.filter').value") == "coding-rl"
    page.turn_to("actions")
    assert set(page.texts("tbody .run")) == {"coding-rl"}
    page.turn_to("sandboxes")
    assert set(page.texts("tbody .run")) == {"coding-rl"}
    page.turn_to("runs")
    assert set(page.texts("table[aria-label=Classes] td:nth-child(1)")) == {
        row.name for row in model.rows if row.run == "coding-rl"
    }
    page.turn_to("timeline")
    page.page.click("text=Everything")
    rows = sum(row.run == "coding-rl" for row in model.rows)
    page.until(f"document.querySelector('canvas.plot').dataset.picked === '{rows}'")
    page.until("document.querySelector('canvas.plot').dataset.mode === 'all'")
    page.page.select_option(".filter", "")
    page.until(f"document.querySelector('canvas.plot').dataset.picked === '{len(model.rows)}'")


def test_a_second_click_on_the_run_shows_all_again(screen: Opener, still: FakeService) -> None:
    page = screen(still).go("runs")
    for chosen in ("deep-search", ""):
        page.page.click(".run-line[data-name='deep-search'] .run")
        page.until(f"document.querySelector('.filter').value === '{chosen}'")


def test_a_click_on_a_waiting_action_opens_its_story(screen: Opener, still: FakeService) -> None:
    page = screen(still).go("actions")
    action = still.model.view().waiting[0]
    story = still.model.story(action.id)
    assert story is not None
    page.page.click("table[aria-label='Waiting actions'] tbody .link >> nth=0")
    page.until("document.getElementById('story').dataset.lines !== undefined")
    assert page.text("#story h2") == action.id
    assert page.text("#story .status") == "queued"
    assert page.text("#story .explanation") == story.explanation
    assert page.texts("#story li > span") == [line.text for line in story.lines]
    assert page.texts("#story li b")[0] == "+0 s"


@pytest.mark.parametrize("table", ["Waiting actions", "Running actions"])
def test_a_click_anywhere_on_the_row_of_an_action_opens_its_story(
    screen: Opener, still: FakeService, table: str
) -> None:
    page = screen(still).go("actions")
    row = page.page.locator(f"table[aria-label='{table}'] tbody tr").nth(0)
    id = row.locator(".link").nth(0).get_attribute("data-action-id")
    row.locator("td").nth(3).click()
    page.until(f"document.getElementById('story').dataset.of === '{id}'")
    page.page.keyboard.press("Escape")
    page.until(f"document.activeElement.dataset.actionId === '{id}'")
    row.locator(".run").click()
    page.until("document.querySelector('.filter').value !== ''")
    assert page.js("document.getElementById('story').hidden"), "a run in the row is still that run"


def test_ids_inside_reasons_open_stories_too(screen: Opener, still: FakeService) -> None:
    while not (behind := [action for action in still.model.view().waiting if " behind " in action.reason]):
        still.model.step()
    blocker = behind[0].reason.split(" behind ")[1].split(",")[0]
    page = screen(still).go("actions")
    page.page.click(f"td.wide [data-action-id='{blocker}'] >> nth=0")
    page.until(f"document.getElementById('story').dataset.of === '{blocker}'")


def test_a_holder_of_a_pool_opens_its_story(screen: Opener, still: FakeService) -> None:
    page = screen(still).go()
    page.page.click("[data-pool=cpu] .pool-held .link")
    page.page.click("[data-pool=cpu] .holder .link >> nth=0")
    holder = still.model.view().pools[0].holders[0].id
    page.until(f"document.getElementById('story').dataset.of === '{holder}'")


def test_the_story_of_a_live_action_goes_on_until_it_has_settled(screen: Opener, busy: FakeService) -> None:
    page = screen(busy).go()
    doing = min(busy.model.running, key=lambda one: abs(one.granted_s + one.needed_s - busy.model.now - 5))
    page.go(f"actions?action={quote(doing.id, safe='')}")
    page.until("['starting', 'running'].includes(document.querySelector('#story .status').textContent)")
    settled = f"document.querySelector('#story .status').textContent === '{doing.status.replace('_', ' ')}'"
    while not page.js(settled) and busy.model.now < doing.granted_s + doing.needed_s + 5:
        page.views()
    page.until(settled)
    page.frame()
    assert page.texts("#story li > span")[-1].startswith(doing.status)
    request_count = sum(1 for path in busy.requests if "/story" in path)
    page.views(3)
    assert sum(1 for path in busy.requests if "/story" in path) == request_count, (
        "what has settled is not asked for again"
    )


def test_ids_are_encoded_in_the_address_of_their_story(screen: Opener, still: FakeService) -> None:
    page = screen(still).go("actions")
    page.page.click("tbody .link >> nth=0")
    page.until("document.getElementById('story').dataset.lines !== undefined")
    addresses = [address for address in page.addresses if address.endswith("/story")]
    assert addresses and "%2F" in addresses[0]


def test_escape_closes_the_story_and_gives_the_focus_back(screen: Opener, still: FakeService) -> None:
    page = screen(still).go("actions")
    first = page.page.locator("tbody .link").first
    first.focus()
    page.page.keyboard.press("Enter")
    page.until("document.activeElement.closest('#story') !== null")
    page.page.keyboard.press("Escape")
    page.until("document.getElementById('story').hidden")
    assert first.evaluate("(node) => node === document.activeElement")


def test_an_unknown_action_is_reported_as_such(screen: Opener, still: FakeService) -> None:
    page = screen(still).go("overview?action=coding-rl%2Funknown")
    page.until("document.querySelector('#story .empty').textContent.includes('does not remember')")


def test_a_reload_keeps_page_run_story_and_search(screen: Opener, still: FakeService) -> None:
    row = next(row for row in still.model.rows if row.run == "coding-rl")
    page = screen(still).go()
    page.turn_to("timeline")
    page.page.select_option(".filter", "coding-rl")
    page.page.fill(".search", row.id)
    page.page.press(".search", "Enter")
    page.page.focus("canvas.plot")
    page.page.keyboard.press("Enter")
    page.until(f"document.getElementById('story').dataset.of === '{row.id}'")
    page.until("location.hash.includes('find=') && location.hash.includes('from=')")
    time_range = (page.plot("from"), page.plot("to"))
    page.page.reload()
    page.until("document.querySelector('canvas.plot')?.dataset.frame && document.body.dataset.complete === 'true'")
    page.until(f"document.getElementById('story').dataset.of === '{row.id}'")
    page.frame()
    assert page.js("document.querySelector('.filter').value") == "coding-rl"
    assert page.js("document.querySelector('.search').value") == row.id
    now = (page.plot("from"), page.plot("to"))
    assert [float(end) for end in now] == pytest.approx([float(end) for end in time_range], abs=0.01)


def test_back_goes_one_step_back(screen: Opener, still: FakeService) -> None:
    page = screen(still).go()
    page.turn_to("runs")
    page.page.click(".run-line .run >> nth=0")
    page.until("location.hash.includes('run=')")
    page.page.go_back()
    page.until("document.querySelector('.filter').value === ''")
    page.page.go_back()
    page.until("document.body.dataset.page === 'overview'")
