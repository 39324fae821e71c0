"""Chrome traces: structure, order and lanes are those that Perfetto reads, whatever times and names come in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.chrome_trace import check, named

from tangram.errors import InvalidConfig
from tangram.reports.trace_events import Phase, TraceEvents

Times = st.floats(min_value=0.0, max_value=1e5, allow_nan=False)


@given(st.lists(st.tuples(st.sampled_from("ab"), Times, Times, st.lists(Times, max_size=3)), max_size=30))
def test_events_are_sorted_and_nested_at_any_times(found: list[tuple[str, float, float, list[float]]]) -> None:
    trace = TraceEvents()
    for name, since_s, until_s, cuts in found:
        phases = [Phase("part", cut, cut + 1.0) for cut in cuts]
        trace.complete(trace.lane("p", name), name, since_s=since_s, until_s=until_s, phases=phases)
    events = trace.events()
    check(events)
    assert sum(event["ph"] == "X" and event["name"] in "ab" for event in events) == len(found)


def test_the_file_names_processes_lanes_counters_and_times_in_microseconds(tmp_path: Path) -> None:
    trace = TraceEvents()
    lane = trace.lane("trajectories", "chain/3/0.0")
    phases = (Phase("waiting", 1.0, 1.25), Phase("executing", 1.25, 2.5))
    trace.complete(lane, "exec", since_s=1.0, until_s=2.5, category="exec", args={"cpu_s": 0.5}, phases=phases)
    trace.counter("pools", "cores", at_s=0.5, values={"used": 2.0, "unknown": float("nan")})
    trace.instant("pools", "engine died", at_s=3.0)
    trace.write(tmp_path / "out" / "t.json")
    content = json.loads((tmp_path / "out" / "t.json").read_text())
    events = content["traceEvents"]
    check(events)
    assert content["displayTimeUnit"] == "ms"
    assert list(named(events, "process_name").values()) == ["trajectories", "pools"]
    assert list(named(events, "thread_name").values()) == ["chain/3/0.0"]
    complete = [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert complete == [("exec", 1e6, 1.5e6), ("waiting", 1e6, 0.25e6), ("executing", 1.25e6, 1.25e6)]
    (counter,) = (event for event in events if event["ph"] == "C")
    assert (counter["name"], counter["ts"], counter["args"]) == ("cores", 0.5e6, {"used": 2.0})
    (instant,) = (event for event in events if event["ph"] == "i")
    assert (instant["s"], instant["ts"]) == ("p", 3e6)


def test_events_of_one_lane_that_overlap_get_further_lanes_of_its_name() -> None:
    trace = TraceEvents()
    for since_s in (0.0, 1.0, 2.0):
        trace.complete(trace.lane("p", "turn"), "exec", since_s=since_s, until_s=since_s + 1.5)
    events = trace.events()
    check(events)
    assert list(named(events, "thread_name").values()) == ["turn", "turn"]


def test_a_file_that_cannot_be_written_is_refused_by_the_name_of_its_option(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="perfetto"):
        TraceEvents().write(tmp_path)
