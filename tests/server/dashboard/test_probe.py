"""The probe of interaction times: every interaction shows an effect. How long it takes, the benchmark judges."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.server.dashboard.fake_model import Model
from tests.server.dashboard.fake_service import FakeService

from tangram.bench.dashboard_probe import measure

INTERACTIONS = {
    "zoom_in", "zoom_out", "pan", "key_zoom_in", "key_pan", "show_everything", "walk", "hover", "open_story",
    "close_story", "filter_run", "find", "lanes", "switch_theme", "go_to_overview", "go_to_actions", "go_to_runs",
    "go_to_sandboxes", "go_to_timeline", "longest_task",
}  # fmt: skip


@pytest.mark.slow
def test_every_interaction_with_ten_thousand_actions_shows_a_frame(chromium: str) -> None:
    model = Model()
    model.settle(10_000)
    with FakeService(model, token='with "quotes" and \\') as service, ThreadPoolExecutor(1) as thread:
        # In a thread of its own: the fixtures of other tests keep a loop running in this one.
        took = thread.submit(lambda: asyncio.run(measure(service.url, service.token, chromium))).result()
        rows = [path for path in service.requests if path.startswith("/v1/timeline?after=0")]
    assert set(took) == INTERACTIONS
    assert all(milliseconds > 0 for milliseconds in took.values())
    assert len(rows) == 1
    assert any("/story" in path for path in service.requests)
