"""The page stays live: it goes on, notices that the service is gone, says so, and comes back by itself."""

from __future__ import annotations

import itertools

from tests.server.dashboard.conftest import Opener, Screen
from tests.server.dashboard.fake_model import Model
from tests.server.dashboard.fake_service import FakeService

HIDE = "Object.defineProperty(document, 'hidden', {configurable: true, get: () => window.hiddenNow === true})"
COUNT_TRIES = """window.tries = []; window.ended = 0; const real = window.fetch;
window.fetch = (...request) => { window.tries.push(Date.now());
  return real(...request).finally(() => (window.ended += 1)); };"""


def test_all_pages_load_without_complaint_and_from_the_service_alone(screen: Opener, busy: FakeService) -> None:
    page = screen(busy).go()
    for name in ("actions", "timeline", "runs", "sandboxes", "overview"):
        page.turn_to(name)
        page.views()
    assert all(address.startswith(busy.url) for address in page.addresses)
    assert page.faults == []


def test_what_is_shown_goes_on_by_itself(screen: Opener, busy: FakeService) -> None:
    page = screen(busy).go()
    before = page.text("[data-fact=up-for] b")
    rows = int(page.js("document.body.dataset.rows"))
    page.until(f"document.querySelector('[data-fact=up-for] b').textContent !== '{before}'")
    page.until(f"Number(document.body.dataset.rows) > {rows}")


def test_elements_that_did_not_change_are_kept(screen: Opener, still: FakeService) -> None:
    page = screen(still).go("sandboxes")
    page.views()
    page.page.evaluate(
        "() => { window.changes = 0; new MutationObserver((list) => (window.changes += list.length)).observe("
        "document.querySelector('main'), {subtree: true, childList: true, characterData: true, attributes: true}); }"
    )
    views = int(page.js("document.body.dataset.views"))
    page.until(f"Number(document.body.dataset.views) >= {views + 2}")  # a second apart: times that go on would show
    page.frame()
    assert page.js("window.changes") == 0


def test_rows_are_requested_once(screen: Opener, busy: FakeService) -> None:
    page = screen(busy).go()
    page.views(3)
    requests = [path for path in busy.requests if path.startswith("/v1/timeline")]
    after = [int(path.split("after=")[1].split("&")[0]) for path in requests]
    assert after[0] == 0
    assert after[1] >= 400
    assert after == sorted(after)
    kept = int(page.js("document.body.dataset.rows"))
    assert after[-1] <= kept <= len(busy.model.rows), "none is missing, none is there twice"


def test_at_most_twenty_thousand_rows_are_kept(screen: Opener) -> None:
    model = Model()
    model.settle(20_300)
    with FakeService(model) as service:
        page = screen(service).go("timeline?range=all")
        page.views(2)
        assert int(page.js("document.body.dataset.rows")) == 20_000
        assert "earlier ones are not remembered" in page.text(".toolbar .grow")
        assert int(page.plot("picked")) == 20_000


def test_a_restarted_service_is_noticed_and_its_old_rows_are_dropped(screen: Opener, busy: FakeService) -> None:
    page = screen(busy).go("timeline?range=all")
    old = busy.model.rows[0].id
    assert int(page.plot("picked")) >= 400
    busy.stop()
    page.until("document.body.dataset.phase === 'gone'")
    page.until("!document.getElementById('banner').hidden")
    assert page.text("#banner").startswith("No answer from the service since")
    assert page.text(".live").startswith("Disconnected")
    assert (page.text("[data-fact=service] b"), page.js("document.getElementById('facts').dataset.state")) == (
        "not known", "not known",
    )  # fmt: skip
    page.until("document.querySelector('.live').textContent.includes(' old')")
    busy.model = Model(2)
    busy.model.recovered = "nothing was lost."
    busy.start()
    retry_now(page)
    page.until("document.body.dataset.phase === 'live'")
    page.until("document.body.dataset.instance === 'instance-2' && document.getElementById('banner').hidden")
    assert page.text("[data-fact=recovered] b") == "nothing was lost."
    assert page.text("[data-fact=service] b") == "up"
    page.until("Number(document.body.dataset.rows) > 0")
    page.frame()
    assert int(page.js("document.body.dataset.rows")) <= len(busy.model.rows) < 400
    page.page.fill(".search", old)
    page.until("document.querySelector('.toolbar .note').textContent !== ''")
    assert page.text(".toolbar .note") == "no match"


def retry_now(page: Screen) -> None:
    """Presses the button of the banner, which a retry of the page itself may have hidden meanwhile."""
    page.page.evaluate("() => document.querySelector('#banner button').click()")


def test_it_reconnects_by_itself(screen: Opener, busy: FakeService) -> None:
    page = screen(busy).go()
    busy.stop()
    page.until("document.body.dataset.phase === 'gone'")
    busy.start()
    page.until("document.body.dataset.phase === 'live'")


def test_it_polls_less_often_while_the_service_is_down(screen: Opener, busy: FakeService) -> None:
    one = screen(busy)
    one.page.add_init_script(COUNT_TRIES)
    one.page.clock.install()
    page = one.go(wait=False)
    page.until("document.body.dataset.phase === 'live'")
    busy.stop()
    before = int(page.js("window.tries.length"))
    for _ in range(30):
        page.page.clock.run_for(1_000)
        page.until("window.ended === window.tries.length")
    tries = page.js("window.tries")[before:]
    pauses = [later - sooner for sooner, later in itertools.pairwise(tries)]
    assert len(pauses) >= 3 and pauses[-1] > pauses[0], "milliseconds between two tries"
    assert page.js("document.body.dataset.phase") == "gone"


def test_a_hidden_page_does_not_poll(screen: Opener, busy: FakeService) -> None:
    one = screen(busy)
    one.page.add_init_script(HIDE)
    one.page.clock.install()
    page = one.go(wait=False)
    page.until("document.body.dataset.phase === 'live'")
    page.page.evaluate("() => { window.hiddenNow = true; document.dispatchEvent(new Event('visibilitychange')); }")
    page.until("document.body.dataset.phase === 'paused'")
    polls = views(page)
    page.page.clock.run_for(30_000)
    assert views(page) == polls
    page.page.evaluate("() => { window.hiddenNow = false; document.dispatchEvent(new Event('visibilitychange')); }")
    page.until("document.body.dataset.phase === 'live'")
    assert views(page) > polls


def views(page: Screen) -> int:
    return sum("/v1/view" in address for address in page.addresses)


def test_an_error_is_shown_in_its_own_words_and_goes_away(screen: Opener, busy: FakeService) -> None:
    page = screen(busy).go()
    busy.error = (503, "draining", "the service is shutting down")
    page.until("!document.getElementById('banner').hidden")
    assert "the service is shutting down (draining)" in page.text("#banner")
    assert page.texts(".pool-name strong") != [], "what was known stays in sight"
    busy.error = None
    retry_now(page)
    page.until("document.getElementById('banner').hidden")


def test_a_token_is_prompted_for_kept_for_the_tab_and_sent_as_a_header(screen: Opener, busy: FakeService) -> None:
    busy.token = "secret-of-a-run"
    page = screen(busy).go(wait=False)
    page.until("document.getElementById('token').open")
    page.page.fill("#token-input", "wrong")
    page.page.keyboard.press("Enter")
    page.until("document.querySelector('#token .bad').textContent !== ''")
    assert "this service does not know it" in page.text("#token .bad")
    page.page.fill("#token-input", "secret-of-a-run")
    page.page.keyboard.press("Enter")
    page.until("document.body.dataset.phase === 'live' && !document.getElementById('token').open")
    page.page.reload()
    page.until("document.body.dataset.phase === 'live'")
    assert not page.js("document.getElementById('token').open")
    assert page.js("JSON.stringify(localStorage)") == "{}"
    assert not any("secret" in path for path in busy.requests)
    page.page.click("text=Forget token")
    page.until("document.getElementById('token').open")
    assert page.js("sessionStorage.length") == 0
