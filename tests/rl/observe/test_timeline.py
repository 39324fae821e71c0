"""Timelines: all time is accounted for, exactly once, and each idle gap has its cause."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rl import recordings
from tests.rl.recordings import simple, span

from tangram.errors import InvalidTrace
from tangram.rl.observe.timeline import (
    BETWEEN,
    END,
    NOTHING,
    SECOND,
    START,
    Activity,
    ActivityKind,
    RolloutTimeline,
    build_timeline,
    divide_proportionally,
    trajectory_lane,
    with_buffer_wait,
)
from tangram.rl.observe.timeline_page import headline, timeline_page, write_timeline
from tangram.rl.observe.timeline_trace import trace_of_timeline
from tangram.rl.trajectories.trajectory import Span, Stage

RESETTING, STEPPING = Activity(ActivityKind.WORKING, Stage.RESET), Activity(ActivityKind.WORKING, Stage.STEP)
WRITING, REWARDING = Activity(ActivityKind.WORKING, Stage.GENERATE), Activity(ActivityKind.WORKING, Stage.REWARD)
IN_BUFFER = Activity(ActivityKind.WORKING, Stage.BUFFER)

many = st.lists(recordings.trajectories(bare=True), max_size=6)


def idle(timeline: RolloutTimeline, stage: Stage = Stage.GENERATE) -> dict[Activity, float]:
    return {cause: length / SECOND for cause, length in timeline.stages[stage].idle.items()}


# ---- sums -------------------------------------------------------------------------------------------------------


@given(members=many, more=st.floats(0.0, 30.0))
def test_gaps_and_busy_time_are_all_the_time_of_every_stage(members, more: float) -> None:
    whole = build_timeline(members, more)
    for stage in whole.stages.values():
        assert stage.busy + sum(gap.length for gap in stage.gaps) == stage.total == whole.total
        assert sum(stage.idle.values()) == sum(gap.length for gap in stage.gaps)
        assert all(sum(gap.causes.values()) == gap.length > 0 for gap in stage.gaps)
        assert all(before.ended < after.began for before, after in pairwise(stage.gaps))
        assert sum(until - since for since, until, _ in stage.main_causes) == sum(stage.idle.values())
        lanes = [piece for each in whole.lanes for piece in each.segments if piece.activity.stage is stage.stage]
        assert stage.working + stage.waiting == sum(piece.length for piece in lanes)


@given(members=many)
def test_the_parts_of_a_task_are_the_time_of_its_trajectories(members) -> None:
    whole = build_timeline(members)
    assert sum(task.trajectories for task in whole.tasks) == len(members)
    for task in whole.tasks:
        own = [each for each in whole.lanes if each.trajectory.task == task.task]
        assert task.total == sum(each.ended - each.began for each in own) == sum(task.parts.values())
        assert not task.total or sum(task.shares().values()) == pytest.approx(1.0)


@given(played=recordings.trajectories(bare=True))
def test_the_pieces_of_a_trajectory_follow_each_other_without_a_gap(played) -> None:
    pieces = trajectory_lane(played).segments
    assert all(before.ended == after.began for before, after in pairwise(pieces))
    assert all(piece.length > 0 for piece in pieces)
    for piece in pieces:
        middle = (piece.began + piece.ended) // 2
        covering = [each for each in played.spans if each.began_s * SECOND <= middle < each.ended_s * SECOND - 1]
        if covering:
            assert piece.activity.stage in {each.stage for each in covering} or piece.length <= 2
        assert covering or piece.activity == BETWEEN or piece.length <= 2


@given(members=many, more=st.floats(0.0, 30.0))
def test_causes_are_those_that_a_naive_count_finds(members, more: float) -> None:
    """Each instant by itself, in fractions; whole nanoseconds differ by less than one per instant and cause."""
    whole = build_timeline(members, more)
    cuts = sorted({0, whole.total, *(cut for each in whole.lanes for p in each.segments for cut in (p.began, p.ended))})
    for stage in Stage:
        expected: dict[Activity, Fraction] = {}
        for since, until in pairwise(cuts if any(each.segments for each in whole.lanes) else ()):
            now = [p.activity for each in whole.lanes for p in each.segments if p.began <= since < p.ended]
            own = [each for each in now if each.stage is stage]
            if any(each.kind is not ActivityKind.WAITING for each in own):
                continue
            lanes = [each for each in whole.lanes if each.segments]
            first, last = min(each.began for each in lanes), max(each.ended for each in lanes)
            idle = START if since < first else END if since >= last else NOTHING
            why = own or [each for each in now if each.stage is not Stage.BUFFER] or now or [idle]
            for each in why:
                expected[each] = expected.get(each, Fraction(0)) + Fraction(until - since, len(why))
        if not any(each.segments for each in whole.lanes) and whole.total:
            expected = {START: Fraction(whole.total)}
        measured = whole.stages[stage].idle
        for cause in {*expected, *measured}:
            assert abs(expected.get(cause, 0) - measured.get(cause, 0)) <= len(cuts), cause.label


@given(
    length=st.integers(1, 10**12),
    counts=st.dictionaries(st.integers(0, 6), st.integers(1, 9), min_size=1),
)
def test_a_division_adds_up_and_is_fair(length: int, counts) -> None:
    parts = divide_proportionally(length, counts)
    assert sum(parts.values()) == length
    for each, count in counts.items():
        assert abs(parts.get(each, 0) - length * count / sum(counts.values())) <= 1


# ---- causes -----------------------------------------------------------------------------------------------------


def test_engines_that_wait_for_an_environment() -> None:
    timeline = build_timeline(
        [simple("a", [span(Stage.RESET, 1, 3), span(Stage.GENERATE, 3, 4), span(Stage.STEP, 4, 9)])]
    )
    assert idle(timeline) == {STEPPING: 5.0, RESETTING: 2.0, START: 1.0}
    assert [gap.length / SECOND for gap in timeline.stages[Stage.GENERATE].gaps] == [3.0, 5.0]
    assert timeline.stages[Stage.GENERATE].busy_share == pytest.approx(1 / 9)
    assert idle(timeline, Stage.STEP) == {RESETTING: 2.0, WRITING: 1.0, START: 1.0}


def test_a_gap_is_divided_among_those_that_explain_it() -> None:
    a = simple("a", [span(Stage.STEP, 0, 4)])
    b = simple("b", [span(Stage.REWARD, 0, 4)])
    c = simple("c", [span(Stage.STEP, 2, 4)])
    assert idle(build_timeline([a, b, c])) == {
        STEPPING: pytest.approx(2 * 1 / 2 + 2 * 2 / 3),
        REWARDING: pytest.approx(1 + 2 / 3),
    }


def test_what_is_short_is_called_by_its_name() -> None:
    waiting = simple("a", [span(Stage.STEP, 0, 4, 3.0, "cpu@node-0")])
    assert idle(build_timeline([waiting])) == {
        Activity(ActivityKind.WAITING, Stage.STEP, "cpu@node-0"): 3.0,
        STEPPING: 1.0,
    }
    assert Activity(ActivityKind.WAITING, Stage.STEP, "cpu@node-0").label == "waiting for cpu@node-0"
    nameless = build_timeline([simple("a", [span(Stage.GENERATE, 0, 2, 2.0)])])
    assert [cause.label for cause in nameless.stages[Stage.GENERATE].idle] == ["waiting for an engine"]


def test_a_request_that_waits_for_admission_explains_the_gap_alone() -> None:
    a = simple("a", [span(Stage.GENERATE, 0, 4, 4.0, "weights")])
    b = simple("b", [span(Stage.STEP, 0, 4)])
    assert idle(build_timeline([a, b])) == {Activity(ActivityKind.WAITING, Stage.GENERATE, "weights"): 4.0}


def test_the_buffer_explains_only_the_rest() -> None:
    done = simple("a", [span(Stage.GENERATE, 0, 1), span(Stage.BUFFER, 1, 8)])
    slow = simple("b", [span(Stage.STEP, 0, 5)])
    assert idle(build_timeline([done, slow])) == {STEPPING: 4.0, IN_BUFFER: 3.0}


def test_a_pause_between_trajectories_is_one_without_anything_to_play() -> None:
    a = simple("a", [span(Stage.GENERATE, 0, 1)])
    b = simple("b", [span(Stage.GENERATE, 3, 4)])
    timeline = build_timeline([a, b], ended_s=10.0)
    assert idle(timeline) == {END: 6.0, NOTHING: 2.0}
    assert timeline.stages[Stage.GENERATE].counts == ((0, 1, 0), (SECOND, 0, 0), (3 * SECOND, 1, 0), (4 * SECOND, 0, 0))


def test_the_loop_itself_and_futile_attempts_are_distinguished() -> None:
    failed = Span(stage=Stage.STEP, began_s=1.0, ended_s=2.0, failed="lost")
    timeline = build_timeline([simple("a", [span(Stage.GENERATE, 0, 0.5), failed, span(Stage.STEP, 2, 3)])])
    assert idle(timeline) == {Activity(ActivityKind.FAILED, Stage.STEP): 1.0, STEPPING: 1.0, BETWEEN: 0.5}
    assert timeline.stages[Stage.STEP].busy == 2 * SECOND


def test_of_spans_that_overlap_the_last_to_begin_counts() -> None:
    timeline = build_timeline([simple("a", [span(Stage.GENERATE, 0, 4), span(Stage.STEP, 1, 2)], ended_s=4.0)])
    assert timeline.tasks[0].parts == {WRITING: 3 * SECOND, STEPPING: SECOND}


def test_causes_of_a_gap_are_listed_longest_first() -> None:
    members = [simple(f"m{n}", [span(Stage.STEP, 0, n + 1)]) for n in range(5)]
    timeline = build_timeline([*members, simple("last", [span(Stage.GENERATE, 5, 6)])])
    (gap,) = timeline.stages[Stage.GENERATE].gaps
    assert [(name, activity) for name, activity, _ in timeline.explainers(gap)] == [
        ("m4", STEPPING),
        ("m3", STEPPING),
        ("m2", STEPPING),
    ]


def test_the_wait_for_a_group_is_added_unless_recorded() -> None:
    plain = simple("a", [span(Stage.STEP, 0, 1)])
    assert with_buffer_wait(plain, 3.0).spans[-1] == span(Stage.BUFFER, 1, 3)
    assert with_buffer_wait(plain, 1.0) == plain
    known = simple("a", [span(Stage.BUFFER, 0, 1)])
    assert with_buffer_wait(known, 3.0) == known


def test_nothing_takes_no_time() -> None:
    timeline = build_timeline([])
    assert timeline.total == 0 and timeline.tasks == () and idle(timeline) == {}
    assert idle(build_timeline([], ended_s=2.0)) == {START: 2.0}
    assert "no time" in headline(timeline.stages[Stage.GENERATE])


@pytest.mark.parametrize(
    "wrong",
    [
        span(Stage.STEP, 2, 1),
        span(Stage.STEP, -1, 1),
        span(Stage.STEP, 0, float("nan")),
        span(Stage.STEP, 0, 1, float("inf")),
        span(Stage.STEP, 0, 1e300),
    ],
)
def test_times_that_cannot_be_are_refused(wrong: Span) -> None:
    with pytest.raises(InvalidTrace, match=r"seconds from 0|at least began_s"):
        build_timeline([simple("a", [wrong], began_s=0.0, ended_s=1.0)])


# ---- the page ---------------------------------------------------------------------------------------------------


@given(members=many)
def test_any_text_of_a_rollout_is_escaped_in_the_page(members) -> None:
    page = timeline_page(build_timeline(members), "run.jsonl", "tangram rl timeline run.jsonl")
    assert page == timeline_page(build_timeline(members), "run.jsonl", "tangram rl timeline run.jsonl")
    assert page.count("<script") == page.count("</script>") == 2
    for bad in ("<img", "window.owned = 1</", "\x1b", "\x9b", "\x00", "\u202e"):
        assert bad not in page
    page.encode()


def test_the_page_loads_nothing_and_appears_whole(tmp_path: Path) -> None:
    timeline = build_timeline([recordings.played("chain", "random", 3)])
    write_timeline(tmp_path / "t.html", timeline, "run.jsonl", "again")
    page = (tmp_path / "t.html").read_text()
    assert "http://" not in page and "https://" not in page and "src=" not in page
    assert "No engine was decoding for" in page and "chain/0/0.0" in page
    assert [each.name for each in tmp_path.iterdir()] == ["t.html"]


# ---- the Chrome trace -------------------------------------------------------------------------------------------


def test_the_trace_has_every_stage_and_trajectory_and_all_of_its_time() -> None:
    spans = [span(Stage.GENERATE, 1, 3), span(Stage.STEP, 3, 6, 1.0), span(Stage.GENERATE, 6, 7)]
    events = trace_of_timeline(
        build_timeline([simple("chain/0/0.0", spans), simple("chain/0/1.0", spans[:1])])
    ).events()
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(lanes.values()) == {*(stage.value for stage in Stage), "chain/0/0.0", "chain/0/1.0"}
    complete = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] > 0.0 for event in complete)
    assert [event["ts"] for event in complete] == sorted(event["ts"] for event in complete)
    for name, total_s in (("chain/0/0.0", 7.0), ("generate", 7.0)):
        own = [event["dur"] for event in complete if lanes[event["pid"], event["tid"]] == name]
        assert sum(own) == pytest.approx(total_s * 1e6, abs=1e6), name
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert "generate: trajectories" in counters
