"""Actions over time as a Chrome trace: what a recorded trace and rows of a server become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chrome_trace import check, named

from tangram.core.action import Action, Outcome, Status
from tangram.core.demand import Demand, cores
from tangram.core.limits import Limits
from tangram.core.messages import (
    Effect,
    Event,
    Finished,
    Grant,
    Pool,
    Refuse,
    Reserve,
    Resize,
    Settle,
    Share,
    Start,
    Submit,
    cpu_node,
)
from tangram.runtime.action_timeline import NO_TRAJECTORY, UNSETTLED, trace_of_recording, trace_of_rows
from tangram.runtime.trace_recorder import record_trace
from tangram.runtime.views import TimelineRow

POOLS = (*cpu_node("n", 8, 4.0), Pool(kind="gpu", node="n", total=4))


def action(id: str, trajectory: str = "t") -> Action:
    return Action(id=id, demand=Demand({"cpu": cores(1, 8)}), run="r", trajectory=trajectory, key="tests")


def start(it: Action, *shares: Share, batch: str = "", attempt: int = 1) -> Start:
    return Start(action=it, grant=Grant(it.id, "n", shares, 1, attempt, batch))


def settled(it: Action, *times: float) -> Settle:
    waiting_s, overhead_s, execution_s = times
    return Settle(
        outcome=Outcome(
            action=it.id,
            status=Status.SUCCEEDED,
            waiting_s=waiting_s,
            overhead_s=overhead_s,
            execution_s=execution_s,
        )
    )


def events_of(folder: Path, *steps: tuple[float, Event, list[Effect]]) -> list[dict[str, Any]]:
    path = folder / "trace.jsonl"
    with record_trace(path, policy="fcfs", pools=POOLS, limits=Limits()) as log:
        for now, event, effects in steps:
            log(now, event, effects)
    events = trace_of_recording(path).events()
    check(events)
    return events


def bars(events: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    return [(event["name"], event["ts"] / 1e6, event["dur"] / 1e6) for event in events if event["ph"] == "X"]


def held(events: list[dict[str, Any]], pool: str) -> list[tuple[float, float]]:
    return [
        (event["ts"] / 1e6, *event["args"].values())
        for event in events
        if event["ph"] == "C" and event["name"].startswith(pool)
    ]


def test_an_action_is_divided_and_its_cores_are_counted_from_grant_to_end(tmp_path: Path) -> None:
    one = action("t.0.0")
    events = events_of(
        tmp_path,
        (1.0, Submit(action=one), []),
        (2.0, Finished(action="none"), [start(one, Share("cpu@n", 1000, 8000), Share("memory@n", 64, 64))]),
        (4.0, Finished(action="none"), [Resize(action=one.id, pool="cpu@n", reserved=4000, limit=8000)]),
        (6.0, Finished(action=one.id), [settled(one, 1.0, 0.5, 3.5)]),
    )
    assert bars(events) == [
        ("exec tests", 1.0, 5.0),
        ("waiting", 1.0, 1.0),
        ("overhead", 2.0, 0.5),
        ("executing", 2.5, 3.5),
    ]
    assert list(named(events, "thread_name").values()) == ["t"]
    assert held(events, "cpu@n") == [(2.0, 1.0), (4.0, 4.0), (6.0, 0.0)]
    assert held(events, "memory@n") == []


def test_a_lost_attempt_gives_its_units_back_and_the_action_stays_one_event(tmp_path: Path) -> None:
    one = action("t.0.0")
    share = Share("cpu@n", 2000, 2000)
    events = events_of(
        tmp_path,
        (0.0, Submit(action=one), [start(one, share)]),
        (1.0, Finished(action=one.id, lost="the node died"), []),
        (3.0, Finished(action="none"), [start(one, share, attempt=2)]),
        (5.0, Finished(action=one.id), [settled(one, 3.0, 0.0, 2.0)]),
    )
    assert [name for name, _, _ in bars(events)].count("exec tests") == 1
    assert held(events, "cpu@n") == [(0.0, 2.0), (1.0, 0.0), (3.0, 2.0), (5.0, 0.0)]


def test_the_devices_of_a_batch_count_once_until_its_last_action_ends(tmp_path: Path) -> None:
    first, second = action("a", ""), action("b", "")
    share = Share("gpu@n", 2, 2, (0, 1))
    events = events_of(
        tmp_path,
        (0.0, Submit(action=first), [start(first, share)]),
        (1.0, Submit(action=second), [start(second, share, batch="a")]),
        (2.0, Finished(action="a"), [settled(first, 0.0, 0.0, 2.0)]),
        (4.0, Finished(action="b"), [settled(second, 0.0, 0.0, 3.0)]),
    )
    values = held(events, "gpu@n")
    assert {value for at_s, value in values if at_s < 4.0} == {2.0} and values[-1] == (4.0, 0.0)
    assert list(named(events, "thread_name").values()) == [NO_TRAJECTORY, NO_TRAJECTORY]  # they overlap


def test_refused_and_unsettled_actions_are_shown_as_such(tmp_path: Path) -> None:
    refused, waiting, running = action("refused"), action("waiting", "w"), action("running", "x")
    events = events_of(
        tmp_path,
        (1.0, Submit(action=refused), [Refuse(action="refused", limit="queue", reason="the queue is full")]),
        (1.0, Reserve(sandbox="box", memory=1), [Refuse(action="box", limit="sandboxes", reason="too many")]),
        (2.0, Submit(action=waiting), []),
        (3.0, Submit(action=running), [start(running, Share("cpu@n", 1000, 1000))]),
        (9.0, Finished(action="none"), []),
    )
    status = {event["args"]["id"]: event["args"]["status"] for event in events if "id" in event["args"]}
    assert status == {"refused": "refused", "waiting": UNSETTLED, "running": UNSETTLED}
    assert ("waiting", 2.0, 7.0) in bars(events) and ("executing", 3.0, 6.0) in bars(events)


def test_rows_of_a_server_are_divided_by_run_and_trajectory() -> None:
    def row(seq: int, run: str, trajectory: str, since_s: float, until_s: float) -> TimelineRow:
        times = (since_s, since_s + 1.0, until_s, 1.0, until_s - since_s - 1.5, 0.5)
        return TimelineRow(seq, f"{run}/{seq}", run, trajectory, "exec tests", "succeeded", *times, 1500, "n")

    rows = [row(1, "b", "t", 5.0, 9.0), row(2, "a", "t", 0.0, 4.0), row(3, "a", "t", 2.0, 6.0)]
    events = trace_of_rows(rows).events()
    check(events)
    assert list(named(events, "process_name").values()) == ["a", "b"]
    assert list(named(events, "thread_name").values()) == ["t", "t", "t"]
    (first, *_) = (event for event in events if event["ph"] == "X")
    assert first["args"] == {"id": "a/2", "status": "succeeded", "node": "n", "cores": 1.5}
    assert bars(events)[:4] == [
        ("exec tests", 0.0, 4.0),
        ("waiting", 0.0, 1.0),
        ("overhead", 1.0, 0.5),
        ("executing", 1.5, 2.5),
    ]
