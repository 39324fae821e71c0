"""The contract of the Chrome trace event format, as far as it is used here, for every timeline that is written."""

from __future__ import annotations

from typing import Any


def named(events: list[dict[str, Any]], kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == kind}


def check(events: list[dict[str, Any]]) -> None:
    """Events are in the order of time, lanes are named, and an event of a lane contains another or ends before it."""
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    processes = {pid for pid, _ in named(events, "process_name")}
    lanes = named(events, "thread_name")
    open_: dict[tuple[int, int], list[float]] = {}
    for event in timed:
        assert event["ph"] in ("X", "C", "i") and event["pid"] in processes and event["ts"] >= 0.0
        if event["ph"] != "X":
            continue
        place = (event["pid"], event["tid"])
        assert place in lanes and event["dur"] >= 0.0
        stack = open_.setdefault(place, [])
        while stack and stack[-1] <= event["ts"] + 1e-6:
            stack.pop()
        end = event["ts"] + event["dur"]
        assert not stack or end <= stack[-1] + 1e-6, "an event overlaps another one partially"
        stack.append(end)
