"""Every section shows what the view says, with units."""

from __future__ import annotations

import msgspec
import pytest
from tests.server.dashboard.conftest import Opener, Screen
from tests.server.dashboard.fake_service import FakeService

from tangram.runtime.views import PoolHolder, PoolPart, View


def test_the_header_shows_state_version_policy_uptime_and_what_was_recovered(
    screen: Opener, still: FakeService
) -> None:
    still.model.recovered = "2 actions were queued again."
    page = screen(still).go()
    facts = dict(text.split("\n", 1) for text in page.texts(".fact"))
    minutes = int(still.model.now // 60)
    assert facts["Service"] == "up"
    assert facts["Version"] == "0.1.0"
    assert facts["Policy"] == "adaptive"
    assert facts["Durability"] == "process"
    assert facts["Recovered"] == "2 actions were queued again."
    assert f"{minutes} min" in facts["Up for"] or minutes < 2
    assert page.text(".live").startswith("Live")


def test_a_draining_service_shows_it(screen: Opener, still: FakeService) -> None:
    still.model.state = "draining"
    page = screen(still).go()
    assert page.text("[data-fact=service] b") == "draining"


def test_pools_show_the_units_of_each_run_and_the_number_of_waiting_actions(still_screen: Screen) -> None:
    page = still_screen
    page.turn_to("overview")
    view = page.service.model.view()
    assert page.texts(".pool-name strong") == [pool.name for pool in view.pools]
    cpu, memory, gpu, api = view.pools
    amounts = page.texts(".pool-held .amount")
    assert amounts[0] == f"{cpu.held / 1000:g} of 32 cores"
    assert amounts[1] == f"{memory.held / 1024:g} of 96 GiB"
    assert amounts[2] == f"{gpu.held} of 8 devices"
    assert amounts[3] == f"{api.held + api.spent} of 300 requests"
    waiting = [f"{pool.waiting} waiting" if pool.waiting else "none waiting" for pool in view.pools]
    assert page.texts(".waiting-count") == waiting
    assert page.texts("[data-pool=cpu] .strip-label") == ["NUMA 0", "NUMA 1"]
    assert "per 60 s" in page.text("[data-pool=search-api] .pool-name small")
    runs_on_cpu = {holder.run for holder in cpu.holders}
    shown = page.js("[...document.querySelectorAll('[data-pool=cpu] .segment')].map((one) => one.dataset.run)")
    assert set(shown) == runs_on_cpu


def test_pools_that_exist_during_calls_only_do_not_move_the_rest(screen: Opener, still: FakeService) -> None:
    view = still.model.view
    names = [pool.name for pool in view().pools]

    def calling() -> View:
        pools = [msgspec.structs.replace(view().pools[1], name=name, kind=name) for name in OF_CALLS]
        return msgspec.structs.replace(view(), pools=(*pools, *view().pools))

    still.model.view = calling  # type: ignore[method-assign]
    page = screen(still).go()
    assert page.texts(".pool-name strong") == names


OF_CALLS = ("instances/math", "function/math/grade", "endpoint/math/judge")
"""Pools that the service has during calls of functions."""


def test_segments_of_a_numa_node_are_as_long_as_what_is_held(still_screen: Screen) -> None:
    page = still_screen
    page.turn_to("overview")
    cpu = page.service.model.view().pools[0]
    lengths = page.js(
        "[...document.querySelectorAll('[data-pool=cpu] .track')].map((track) =>"
        " [...track.children].reduce((sum, one) => sum + parseFloat(one.style.width), 0))"
    )
    assert lengths == pytest.approx([100 * part.held / part.total for part in cpu.parts], abs=0.1)


def test_a_holder_on_two_numa_nodes_and_unlisted_ones_fill_exactly_what_is_held(
    screen: Opener, still: FakeService
) -> None:
    holders = (
        PoolHolder(id="a/wide", run="a", units=12_000, parts=(0, 1)),
        PoolHolder(id="b/one", run="b", units=4_000, parts=(0,)),
    )
    parts = (PoolPart(index=0, total=16_000, held=9_000), PoolPart(index=1, total=16_000, held=14_000))

    def changed(view: View) -> View:
        cpu = msgspec.structs.replace(view.pools[0], held=23_000, holders=holders, parts=parts)
        return msgspec.structs.replace(view, pools=(cpu, *view.pools[1:]))

    still.changed = changed
    page = screen(still).go()
    segments = page.js(
        "[...document.querySelectorAll('[data-pool=cpu] .track')].map((track) =>"
        " [...track.children].map((one) => [one.dataset.kind, one.dataset.run ?? '', parseFloat(one.style.width)]))"
    )
    assert [[(kind, run) for kind, run, _ in track] for track in segments] == [
        [("run", "a"), ("run", "b")],
        [("run", "a"), ("others", "")],
    ]
    widths = [width for track in segments for _, _, width in track]
    assert widths == pytest.approx([33.75, 22.5, 37.5, 50.0], abs=0.1), "more than is held is scaled, less is of others"


def test_devices_show_their_models_in_chunks(still_screen: Screen) -> None:
    page = still_screen
    page.turn_to("overview")
    gpu = page.service.model.view().pools[2]
    chunks = page.texts("[data-pool=gpu] .chunk")
    assert {part.service or "no model" for part in gpu.parts} == {text.split("\n")[1] for text in chunks}
    held = {holder.run for holder in gpu.holders}
    assert held <= {text.split("\n")[2] for text in chunks}


def test_the_holders_of_a_pool_are_listed_on_request(still_screen: Screen) -> None:
    page = still_screen
    page.turn_to("overview")
    page.page.click("[data-pool=cpu] .pool-held .link")
    holders = page.service.model.view().pools[0].holders
    page.until(f"document.querySelectorAll('[data-pool=cpu] .holder .link').length === {len(holders)}")
    assert page.texts("[data-pool=cpu] .holder .link") == [holder.id for holder in holders]
    page.page.click("[data-pool=cpu] .pool-held .link")
    page.until("document.querySelectorAll('[data-pool=cpu] .holder').length === 0")


def test_queue_shows_each_action_with_its_reason(still_screen: Screen) -> None:
    page = still_screen
    page.turn_to("actions")
    view = page.service.model.view()
    table = "table[aria-label='Waiting actions'] tbody tr"
    assert page.texts(f"{table} td:nth-child(1)") == [action.id for action in view.waiting]
    reasons = [action.reason.removeprefix(f"{action.id} ") for action in view.waiting]
    assert page.texts(f"{table} td:nth-child(5)") == reasons
    assert page.text(".panel-head .note") == str(view.waiting_total)


def test_running_actions_show_what_they_hold(still_screen: Screen) -> None:
    page = still_screen
    page.turn_to("actions")
    view = page.service.model.view()
    table = "table[aria-label='Running actions'] tbody tr"
    assert page.texts(f"{table} td:nth-child(1)") == [action.id for action in view.running]
    cpu = next(k for k, action in enumerate(view.running) if "cpu" in action.units)
    cores = view.running[cpu].units["cpu"] / 1000
    assert page.texts(f"{table} td:nth-child(9)")[cpu] == f"{cores:g} core{'' if cores == 1 else 's'} of cpu"


def test_numbers_at_the_top_are_those_of_the_view(still_screen: Screen) -> None:
    page = still_screen
    page.turn_to("overview")
    model = page.service.model
    assert page.text("[data-tile=running] b") == str(len(model.running))
    assert page.text("[data-tile=waiting] b") == str(len(model.waiting))
    minute = [row for row in model.rows if row.ended_s >= model.now - 60]
    assert page.text("[data-tile=ended] small") == f"{len(minute)} in the last minute"
    others = sum(1 for row in model.rows if row.status != "succeeded")
    assert page.text("[data-tile=failed] b") == str(others)


def test_charts_have_a_line_for_each_percentile_part_and_pool(still_screen: Screen) -> None:
    page = still_screen
    page.turn_to("overview")
    assert page.texts(".chart h2") == ["Action completion time", "Where it goes", "Use of pools"]
    drawn = page.js(
        "[...document.querySelectorAll('.chart')].map((chart) =>"
        " [...chart.querySelectorAll('path')].map((path) => path.getAttribute('d').length > 20))"
    )
    assert drawn == [[True] * 3, [True] * 3, [True] * 4]
    assert page.texts(".chart:nth-child(1) .series") == ["p50", "p95", "p99"]
    assert page.texts(".chart:nth-child(2) .series") == ["waiting", "overhead", "execution"]
    last = page.service.model.history[-1]
    assert page.texts(".chart:nth-child(3) .legend b")[0] == f"{round(last.busy['cpu'] * 100)} %"


def test_a_chart_shows_its_values_to_pointer_and_keyboard(still_screen: Screen) -> None:
    page = still_screen
    page.turn_to("overview")
    chart = page.page.locator(".chart svg").first
    chart.hover(position={"x": 300, "y": 60})
    page.until("!document.getElementById('tooltip').hidden")
    assert "p95" in page.text("#tooltip")
    page.page.mouse.move(5, 400)
    page.until("document.getElementById('tooltip').hidden")
    chart.focus()
    page.page.keyboard.press("ArrowLeft")
    page.until("!document.getElementById('tooltip').hidden")
    before = page.text("#tooltip strong")
    page.page.keyboard.press("ArrowLeft")
    page.until(f"document.querySelector('#tooltip strong').textContent !== '{before}'")


def test_runs_show_share_weight_and_where_the_time_goes(still_screen: Screen) -> None:
    page = still_screen
    page.turn_to("runs")
    for run in page.service.model.view().runs:
        line = f".run-line[data-name='{run.name}']"
        assert page.text(f"{line} .run") == run.name
        assert f"weight {run.weight:g}" in page.text(f"{line} small")
        share = page.text(f"{line} .share .amount")
        assert float(share.strip("< %")) == pytest.approx(run.share * 100, abs=0.6)
        parts = dict(text.rsplit("\n", 1) for text in page.texts(f"{line} .time-parts > span"))
        total = run.time_breakdown.total_s
        assert float(parts["execution"].strip("< %")) == pytest.approx(
            100 * run.time_breakdown.execution_s / total, abs=0.6
        )
        waits = {f"waiting for {kind}" for kind, seconds in run.time_breakdown.waiting_s.items() if seconds > 0}
        assert waits == {label for label in parts if label.startswith("waiting")}
        assert sum(float(part.strip("< %")) for part in parts.values()) == pytest.approx(100, abs=len(parts))


def test_classes_show_counts_and_times(still_screen: Screen) -> None:
    page = still_screen
    page.turn_to("runs")
    classes = page.service.model.view().classes
    table = "table[aria-label=Classes] tbody tr"
    assert page.texts(f"{table} td:nth-child(1)") == [one.name for one in classes]
    assert page.texts(f"{table} td:nth-child(2)") == [f"{one.act.count:,}" for one in classes]


def test_sandboxes_are_frozen_or_active_with_memory(still_screen: Screen) -> None:
    page = still_screen
    page.turn_to("sandboxes")
    boxes = page.service.model.view().sandboxes
    page.page.mouse.wheel(0, 20_000)  # rows far below are made when they are near
    page.until(f"document.querySelectorAll('tbody tr').length === {len(boxes)}")
    states = ["active, 1 action" if box.active else "frozen" if box.node else "being opened" for box in boxes]
    assert page.texts("tbody tr td:nth-child(1)") == [box.name for box in boxes]
    assert page.texts("tbody tr td:nth-child(4)") == states
    assert set(page.texts("tbody tr td:nth-child(5)")) == {"1.5 GiB", "512 MiB", "2 GiB"}


def test_an_instance_of_a_function_is_shown_with_it(screen: Opener, still: FakeService) -> None:
    def with_instance(view: View) -> View:
        box = msgspec.structs.replace(view.sandboxes[0], name="function-1f", function="rewards.score")
        return msgspec.structs.replace(view, sandboxes=(box,), sandboxes_total=1)

    still.changed = with_instance
    page = screen(still).go("sandboxes")
    page.until("document.querySelectorAll('tbody tr').length === 1")
    assert page.texts("tbody tr td:nth-child(1)") == ["rewards.score (function-1f)"]


def test_a_sandbox_without_a_node_is_being_opened_and_not_frozen(screen: Opener, still: FakeService) -> None:
    view = still.model.view
    first, *others = view().sandboxes
    opening = msgspec.structs.replace(first, node="", active=0, actions=0)
    still.model.view = lambda: msgspec.structs.replace(view(), sandboxes=(opening, *others))  # type: ignore[method-assign]
    page = screen(still).go("sandboxes")
    assert page.texts("tbody tr:first-child td:nth-child(4)") == ["being opened"]
    assert "being opened" in page.text(".panel .note")


def test_an_empty_service_shows_what_would_be_here(screen: Opener, idle: FakeService) -> None:
    page = screen(idle).go()
    pages = {"overview": 5, "actions": 2, "timeline": 1, "runs": 3, "sandboxes": 1}
    for name, least in pages.items():
        page.turn_to(name)
        page.views()
        empty = [text for text in page.texts("main .empty") if text]
        assert len(empty) >= least, name
        assert all(len(text) > 20 for text in empty)
