"""The trace: what was written is read back, what is broken is named by file and line."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.core.action import Action, Outcome, Status, Usage
from tangram.core.demand import Demand, cores, fixed
from tangram.core.limits import Limits
from tangram.core.messages import (
    Cancel,
    Concluded,
    Effect,
    Event,
    Evicted,
    Finished,
    Grant,
    NodeChanged,
    NodeState,
    Pool,
    PoolChanged,
    Refuse,
    Release,
    Reserve,
    Resident,
    Resize,
    Resized,
    Restore,
    RunChanged,
    Settle,
    Share,
    Start,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tick,
    Used,
    WakeAt,
    cpu_node,
)
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.core.trace import TRACE_FORMAT, Header, Line, Recorder, describe, mentions, read
from tangram.errors import InvalidTrace

ACTION = Action(id="a", demand=Demand({"cpu": cores(1, 4), "search": fixed(1)}), key="tests", run="r1")
HEADER = Header(policy="fcfs", pools=cpu_node("n0", 4), limits=Limits(attempts_max=5), note="a note")

DESCRIPTIONS: list[tuple[Event | Effect, str]] = [
    (Submit(action=ACTION), "exec tests of run r1 requests cpu 1000 to 4000, search 1"),
    (Cancel(action="a"), "reason cancelled by the caller"),
    (Started(action="a", attempt=2), "attempt 2"),
    (StartFailed(action="a", reason="no image"), "reason no image, retry True, attempt 0"),
    (Finished(action="a", usage=Usage(cpu_s=1.5)), "used 1.500 CPU seconds"),
    (Finished(action="a", lost="node went away"), "node went away"),
    (
        Concluded(action=ACTION, outcome=Outcome(action="a", status=Status.LOST, reason="its sandbox is gone")),
        "exec of run r1 lost: its sandbox is gone",
    ),
    (Resized(action="a", limit=2000), "limit 2000, attempt 0"),
    (Used(action="a", cpu_s=1.5), "cpu_s 1.5, attempt 0"),
    (Reserve(sandbox="s", memory=64), "sandbox s, memory 64, run default, node "),
    (Release(sandbox="s"), "sandbox s"),
    (Resident(service="judge", node="g0", devices=(0, 1)), "service judge, node g0, devices (0, 1)"),
    (Evicted(service="judge", node="g0", devices=(0,)), "service judge, node g0, devices (0,)"),
    (PoolChanged(pool=Pool(kind="search", total=3)), "kind='search', total=3"),
    (NodeChanged(node="n0", state=NodeState.DOWN), "node n0, state NodeState.DOWN"),
    (RunChanged(run="r1", weight=2.0), "run r1, weight 2.0"),
    (Tick(), ""),
    (
        Start(action=ACTION, grant=Grant("a", "n0", (Share("cpu@n0", 1000, 2000),), 2000, 3)),
        "attempt 3 with 1000 (limit 2000) of cpu@n0, width 2000",
    ),
    (Resize(action="a", pool="cpu@n0", reserved=1000, limit=3000), "1000 (limit 3000) of cpu@n0"),
    (Stop(action="a", reason="cancelled by the caller"), "reason cancelled by the caller"),
    (Restore(service="judge", node="g0", devices=(0,)), "service judge, node g0, devices (0,)"),
    (WakeAt(at=7.5), "at 7.5"),
    (
        Settle(outcome=Outcome(action="a", status=Status.LOST, reason="starved", waiting_s=1.0, execution_s=2.0)),
        "lost: starved; waited 1.000 s, ran 2.000 s, overhead 0.000 s",
    ),
    (Refuse(action="a", limit="queue_max", reason="full"), "limit queue_max, reason full"),
]


def a_recording() -> tuple[bytes, list[tuple[float, Event, list[Effect]]]]:
    """A scheduler driven by hand: its trace, and what went in and came out."""
    scheduler, recorder = Scheduler(policy("fcfs"), HEADER.pools), Recorder()
    one = Action(id="one", demand=Demand({"cpu": cores(4)}))
    two = Action(id="two", demand=Demand({"cpu": cores(4)}), deadline_s=9.0)
    written, handled = recorder.header(HEADER), []
    for now, event in [
        (0.0, Submit(action=one)),
        (0.25, Submit(action=two)),
        (0.5, Started(action="one")),
        (2.0, Finished(action="one", usage=Usage(cpu_s=6.0))),
        (2.5, Started(action="two")),
        (9.25, Tick()),
        (9.5, Finished(action="two")),
    ]:
        effects = scheduler.handle(event, now)
        handled.append((now, event, list(effects)))
        written += recorder.lines(now, event, effects)
    return written, handled


# ---- writing and reading ----------------------------------------------------------------------------------------


def test_what_was_recorded_is_read_back_with_causes() -> None:
    written, handled = a_recording()
    header, lines = read(written.splitlines(keepends=True))
    assert header == HEADER
    expected, seq = [], 0
    for now, event, effects in handled:
        cause = seq + 1
        for message in (event, *effects):
            seq += 1
            expected.append(Line(t=now, seq=seq, cause=cause, message=message))
    assert list(lines) == expected


def test_a_trace_is_read_from_a_file_line_by_line(tmp_path: Path) -> None:
    written, handled = a_recording()
    path = tmp_path / "run.trace"
    path.write_bytes(written)
    with path.open("rb") as file:
        _, lines = read(file, path.name)
        events = [line.message for line in lines if line.seq == line.cause]
    assert events == [event for _, event, _ in handled]


def test_blank_lines_and_a_missing_last_newline_are_accepted() -> None:
    written, _ = a_recording()
    count = len(list(read(written.splitlines())[1]))
    spaced = written.replace(b"\n", b"\n\n  \n").rstrip()
    assert len(list(read(spaced.splitlines(keepends=True))[1])) == count


def test_replaying_the_events_gives_the_same_effects() -> None:
    written, _ = a_recording()
    header, lines = read(written.splitlines())
    scheduler, recorder = Scheduler(policy(header.policy), header.pools), Recorder()
    again = recorder.header(header)
    for line in lines:
        if line.seq == line.cause:
            event = typing.cast(Event, line.message)
            again += recorder.lines(line.t, event, scheduler.handle(event, line.t))
    assert again == written


# ---- what is broken ---------------------------------------------------------------------------------------------


def header_error(first: bytes | None) -> InvalidTrace:
    with pytest.raises(InvalidTrace) as caught:
        read([] if first is None else [first], "run.trace")
    return caught.value


@pytest.mark.parametrize(
    "first",
    [
        None,
        b"",
        b"not json",
        b"[1, 2]",
        b'{"format": 1}',
        b'{"format": 2, "policy": 3}',
        b'{"format": 2, "policy": "f\xff\xfe"}',
        b"\xff\xfe\x00",
        b'{"format": 2, "policy": "fcfs", "pools": [{"kind": "cpu", "total": -1}]}',
    ],
    ids=["empty", "blank", "words", "list", "lacking", "wrong-type", "utf-8-inside", "utf-8", "wrong-pool"],
)
def test_a_malformed_header_is_named_by_file_and_line(first: bytes | None) -> None:
    error = header_error(first)
    assert error.field == "run.trace:1"
    assert "a trace header as `tangram sim --record` writes it" in error.expected


def test_a_trace_of_another_format_is_refused_with_both_numbers() -> None:
    error = header_error(msgspec.json.encode({"format": 99, "policy": "fcfs"}))
    assert str(error) == f"run.trace:1 format: expected trace format {TRACE_FORMAT}, got 99"


@pytest.mark.parametrize(
    "broken",
    [
        b"{",
        b"words",
        b'{"t": 1, "seq": 1, "cause": 1}',
        b'{"t": "soon", "seq": 1, "cause": 1, "message": {"type": "Tick"}}',
        b'{"t": 1, "seq": 1, "cause": 1, "message": {"type": "Explode"}}',
        b'{"t": 1, "seq": 1, "cause": 1, "message": {"type": "Cancel", "action": "a\xff"}}',
        b"\xff\xfe\x00",
        b'{"t": 1, "seq": 1, "cause": 1, "message": {"type": "RunChanged", "run": "r", "weight": -1}}',
        b'{"t": 1, "seq": 1, "cause": 1, "message": {"type": "Submit", "action": {"id": "", "demand": {"pools": {}}}}}',
    ],
    ids=["cut", "words", "lacking", "wrong-type", "unknown", "utf-8-inside", "utf-8", "wrong-value", "wrong-action"],
)
def test_a_malformed_line_is_named_by_file_and_line_after_the_good_ones(broken: bytes) -> None:
    recorder = Recorder()
    good = recorder.header(HEADER) + recorder.lines(0.0, Tick(), []) + b"\n" + recorder.lines(1.0, Tick(), [])
    _, lines = read([*good.splitlines(keepends=True), broken], "run.trace")
    assert [next(lines).t, next(lines).t] == [0.0, 1.0]
    with pytest.raises(InvalidTrace) as caught:
        next(lines)
    assert caught.value.field == "run.trace:5"
    assert caught.value.expected.startswith("a trace line (")


@given(st.binary(max_size=40))
def test_whatever_the_bytes_the_error_is_ours_and_can_be_printed(junk: bytes) -> None:
    _, lines = read([Recorder().header(HEADER), junk])
    if not junk.strip():
        assert list(lines) == []
        return
    with pytest.raises(InvalidTrace) as caught:
        list(lines)
    assert caught.value.field == "trace:2"
    assert str(caught.value).encode()


def test_an_error_shows_the_start_of_a_long_line_only() -> None:
    error = header_error(b"x" * 100_000)
    assert len(str(error)) < 300


# ---- stories ----------------------------------------------------------------------------------------------------


def test_the_descriptions_below_cover_every_message() -> None:
    messages = {*typing.get_args(Event), *typing.get_args(Effect)}
    assert {type(message) for message, _ in DESCRIPTIONS} == messages


@pytest.mark.parametrize(("message", "details"), DESCRIPTIONS, ids=lambda value: type(value).__name__)
def test_every_message_is_one_readable_line(message: Event | Effect, details: str) -> None:
    line = describe(1234.5, message)
    assert line.startswith(f"    1234.500 s  {type(message).__name__:<12} ")
    assert details in line
    assert "\n" not in line


def story(lines: Iterable[Line], action_id: str) -> list[str]:
    return [describe(line.t, line.message) for line in lines if mentions(line.message, action_id)]


def test_a_story_lists_all_that_happened_to_one_action_and_nothing_else() -> None:
    written, _ = a_recording()
    written_story = story(read(written.splitlines())[1], "two")
    assert [line.split()[2] for line in written_story] == ["Submit", "Start", "Started", "Stop", "Finished", "Settle"]
    assert "deadline of 9 s passed while it ran" in written_story[3]
    assert "timed_out" in written_story[5]


def test_the_scheduler_itself_returns_the_same_story() -> None:
    written, handled = a_recording()
    scheduler = Scheduler(policy("fcfs"), HEADER.pools)
    for now, event, _ in handled:
        scheduler.handle(event, now)
    for action_id in ("one", "two", "unknown"):
        assert scheduler.story(action_id) == story(read(written.splitlines())[1], action_id)


def test_messages_about_no_action_belong_to_no_story() -> None:
    for message, _ in DESCRIPTIONS:
        about = not isinstance(
            message,
            Reserve | Release | Resident | Evicted | PoolChanged | NodeChanged | RunChanged | Tick | Restore | WakeAt,
        )
        assert mentions(message, "a") is about
        assert not mentions(message, "b")
