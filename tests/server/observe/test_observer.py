"""What the service shows: true to the scheduler, bounded, and to a run no names of other runs."""

from __future__ import annotations

import asyncio
import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.clock import SimClock
from tangram.core.action import Action, Outcome, Status, Usage
from tangram.core.demand import CPU, EXCLUSIVE_CORE, GPU, Amounts, Demand, cores, fixed, learned, one_of
from tangram.core.limits import Limits
from tangram.core.messages import (
    Cancel,
    Concluded,
    Effect,
    Event,
    Evicted,
    Finished,
    NodeChanged,
    NodeState,
    Pool,
    PoolChanged,
    Release,
    Reserve,
    Resident,
    RunChanged,
    Started,
    StartFailed,
    Submit,
    Tick,
    Window,
    cpu_node,
)
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.managers.fake import FakeManager
from tangram.managers.work import Exec, Open, SandboxSpec
from tangram.runtime.latency_histogram import CELL_BOUNDS_S, LatencyHistogram
from tangram.runtime.orchestrator import Orchestrator
from tangram.runtime.views import BUCKET_S, BUCKETS_MAX, HIDDEN_NAME, PoolView, RunView, Story, View
from tangram.server.observe import accounts, stories
from tangram.server.observe.accounts import OTHER
from tangram.server.observe.history import SLICE_S, SLICES, LastHour
from tangram.server.observe.state_observer import SettledActionLog, StateObserver

API = Pool(kind="api", total=1)


class World:
    """A scheduler with a picture, driven by hand."""

    def __init__(self, *pools: Pool, scheduling: str = "fcfs", limits: Limits | None = None) -> None:
        self.scheduler = Scheduler(policy(scheduling), pools, limits=limits)
        self.clock = SimClock()
        self.picture = StateObserver(self.scheduler, clock=self.clock, calendar=lambda: 1e9, version="1.2")

    def wait(self, seconds: float) -> None:
        self.clock.set(self.clock.now() + seconds)

    def send(self, event: Event) -> list[Effect]:
        effects = self.scheduler.handle(event, self.clock.now())
        self.picture(self.clock.now(), event, effects)
        return effects

    def submit(self, id: str, demand: dict[str, Amounts] | None = None, **fields: object) -> list[Effect]:
        demand = demand or {CPU: cores(1)}
        return self.send(Submit(action=Action(id=id, demand=Demand(demand), **fields)))  # type: ignore[arg-type]

    def finish(self, id: str, seconds: float = 0.0, **usage: float) -> list[Effect]:
        self.send(Started(action=id))
        self.wait(seconds)
        return self.send(Finished(action=id, usage=Usage(**usage)))  # type: ignore[arg-type]

    def run(self, id: str, seconds: float = 0.0, **fields: object) -> None:
        self.submit(id, **fields)  # type: ignore[arg-type]
        self.finish(id, seconds)

    def pool(self, name: str, run: str | None = None) -> PoolView:
        return next(pool for pool in self.picture.view(run).pools if pool.name == name)

    def of_run(self, name: str, run: str | None = None) -> RunView:
        return next(one for one in self.picture.view(run).runs if one.name == name)

    def story(self, id: str, run: str | None = None) -> Story:
        lines = self.picture.story(id, run)
        assert lines is not None
        return lines


def texts(story: Story) -> list[str]:
    return [line.text for line in story.lines]


# ---- what settled ----


def test_a_row_has_the_times_and_the_status_of_an_action() -> None:
    world = World(*cpu_node("n0", 2))
    world.submit("r/a", run="r", trajectory="t", task="swe", key="tests")
    world.wait(1.0)
    world.finish("r/a", 4.0, overhead_s=0.5)
    timeline = world.picture.timeline(0, 10, None)
    [row] = timeline.rows
    assert (row.seq, row.id, row.run, row.trajectory, row.name) == (1, "r/a", "r", "t", "swe/exec/tests")
    assert (row.status, row.submitted_s, row.granted_s, row.ended_s) == ("succeeded", 0.0, 0.0, 5.0)
    assert (row.waiting_s, row.execution_s, row.overhead_s, row.cpu, row.node) == (0.0, 3.5, 1.5, 1000, "n0")
    assert (timeline.last, timeline.forgotten, timeline.instance) == (1, 0, world.picture.instance)


def test_one_that_never_got_in_has_a_row_without_a_place() -> None:
    world = World(API)
    world.submit("holder", {"api": fixed(1)})
    world.wait(2.0)
    world.submit("waits", {"api": fixed(1)})
    world.wait(3.0)
    world.send(Cancel(action="waits"))
    [row] = world.picture.timeline(0, 10, None).rows
    assert (row.status, row.submitted_s, row.granted_s, row.ended_s, row.node) == ("cancelled", 2.0, 5.0, 5.0, "")


def test_the_timeline_goes_on_where_it_was_left() -> None:
    world = World(*cpu_node("n0", 2))
    for number in range(7):
        world.run(f"a{number}", run=f"r{number % 2}")
    first = world.picture.timeline(0, 3, None)
    rest = world.picture.timeline(first.last, 100, None)
    assert [row.seq for row in (*first.rows, *rest.rows)] == [1, 2, 3, 4, 5, 6, 7]
    assert world.picture.timeline(rest.last, 100, None).rows == ()
    assert world.picture.timeline(10**9, 100, None).last == 7
    mine = world.picture.timeline(0, 2, "r1")
    assert [row.id for row in mine.rows] == ["a1", "a3"]
    assert [row.id for row in world.picture.timeline(mine.last, 100, "r1").rows] == ["a5"]
    assert world.picture.timeline(0, 100, "unknown").rows == ()


@given(st.integers(0, 30), st.integers(0, 40), st.integers(0, 12), st.sampled_from([None, "r0", "r1"]))
def test_the_ring_of_rows_answers_as_a_list_of_all_would(count: int, after: int, limit: int, run: str | None) -> None:
    rows, kept = SettledActionLog(rows_max=8), []
    world = World(*cpu_node("n0", 2))
    for number in range(count):
        world.run(f"a{number % 10}", run=f"r{number % 2}")
        past = world.picture.settled_actions.find(f"a{number % 10}", None)
        assert past is not None
        rows.append(past)
        kept.append(past)
    remembered = [past.row for past in kept[-8:] if past.row.seq > after]
    mine = [row for row in remembered if run in (None, row.run)]
    timeline = rows.after(after, limit, run, "i")
    assert list(timeline.rows) == mine[:limit]
    assert timeline.forgotten == max(0, min(count - 8, count) - after)
    rest = rows.after(timeline.last, 100, run, "i")
    assert [*timeline.rows, *rest.rows] == mine
    for past in kept[-8:]:
        newest = [other for other in kept if other.row.id == past.row.id][-1]
        assert rows.find(past.row.id, None) is newest
        assert rows.find(past.row.id, "another") is None
    assert all(rows.find(f"a{number}", None) is None for number in range(10, 12))


def test_a_new_run_under_the_name_of_an_ended_one_sees_none_of_its_rows() -> None:
    world = World(*cpu_node("n0", 2))
    world.run("a", run="r")
    world.run("b", run="other")
    world.picture.hide_run("r")
    world.run("c", run="r")
    assert [row.id for row in world.picture.timeline(0, 10, "r").rows] == ["c"]
    assert world.picture.story("a", "r") is None and world.picture.story("c", "r") is not None
    assert [row.id for row in world.picture.timeline(0, 10, None).rows] == ["a", "b", "c"]


def test_a_new_run_under_the_name_of_an_ended_one_begins_at_zero() -> None:
    world = World(*cpu_node("n0", 2))
    world.run("a", 2.0, run="r", task="t")
    world.run("b", run="other")
    world.picture.hide_run("r")
    world.run("c", 1.0, run="r", task="u")
    run = world.of_run("r")
    assert run.settled == {"succeeded": 1} and run.time_breakdown.execution_s == 1.0
    assert [one.name for one in world.picture.view("r").classes] == ["u/exec"]
    assert world.of_run("other").settled == {"succeeded": 1}


def test_settled_actions_are_counted_by_run_and_status() -> None:
    world = World(*cpu_node("n0", 1), limits=Limits(run_queue_max=1))
    world.run("a", run="r")
    world.submit("b", run="r")
    world.submit("c", run="r")
    world.submit("d", run="r")
    world.send(Cancel(action="c"))
    assert world.of_run("r").settled == {"succeeded": 1, "refused": 1, "cancelled": 1}
    assert world.picture.refusals == {"run_queue_max": 1}


def test_a_refused_id_does_not_touch_the_action_that_has_it() -> None:
    world = World(*cpu_node("n0", 2))
    world.submit("a", run="r", key="mine")
    world.submit("a", run="s", key="forged")
    assert world.story("a").name == "exec/mine"
    world.finish("a")
    [row] = world.picture.timeline(0, 10, None).rows
    assert (row.run, row.name) == ("r", "exec/mine")
    assert world.of_run("r").running == 0


# ---- stories ----


def test_the_story_of_an_action_from_its_submission_to_its_end() -> None:
    world = World(*cpu_node("n0", 2))
    world.submit("holder", {CPU: cores(2)})
    world.submit("a", {CPU: cores(1, 2)}, run="r", timeout_s=5.0)
    world.wait(1.0)
    assert world.story("a").explanation == "a waits for 1 core of cpu@n0, where 0 cores of 2 cores are free"
    world.finish("holder", 2.0)
    assert world.story("a").status == "starting"
    world.send(Started(action="a"))
    world.wait(5.0)
    world.send(Tick())
    assert world.story("a").status == "stopping"
    world.send(Finished(action="a", usage=Usage(cpu_s=1.25)))
    story = world.story("a", "r")
    assert (story.status, story.explanation) == ("timed_out", "timeout of 5 s passed")
    assert [line.at_s for line in story.lines] == [0.0, 0.0, 3.0, 3.0, 8.0, 8.0]
    assert texts(story) == [
        "submitted by run r: requests 1 to 2 cores of cpu",
        "waits for cpu",
        "granted 1 core of cpu@n0",
        "started",
        "stopping: timeout of 5 s passed",
        "timed out: timeout of 5 s passed; waited 3.000 s, ran 5.000 s, overhead 0.000 s, used 1.250 CPU seconds",
    ]


def test_a_story_lists_every_attempt() -> None:
    world = World(API)
    world.submit("a", {"api": fixed(1)})
    world.send(StartFailed(action="a", reason="no image"))
    world.send(StartFailed(action="a", reason="late words of the first", attempt=1))
    world.finish("a")
    assert texts(world.story("a"))[1:] == [
        "granted 1 unit of api",
        "the attempt failed: no image; queued again in its old position",
        "attempt 2: granted 1 unit of api",
        "started",
        "succeeded in 2 attempts; waited 0.000 s, ran 0.000 s, overhead 0.000 s",
    ]


def test_a_node_that_goes_down_is_in_the_story_of_what_ran_there() -> None:
    world = World(*cpu_node("n0", 1))
    world.submit("again", idempotent=True)
    world.send(Started(action="again"))
    world.wait(2.0)
    world.send(NodeChanged(node="n0", state=NodeState.DOWN))
    assert texts(world.story("again"))[-2:] == [
        "the attempt failed: node n0 went down; queued again in its old position",
        "waits for cpu",
    ]
    assert world.of_run("default").waiting == 1 and world.of_run("default").running == 0


def test_a_story_of_thousands_of_resizes_stays_short() -> None:
    world = World(*cpu_node("n0", 8), scheduling="adaptive")
    world.submit("elastic", {CPU: cores(1, 8)}, duration_s=1e6)
    world.send(Started(action="elastic"))
    for number in range(200):
        world.wait(30.0)
        world.submit(f"a{number}", {CPU: cores(1, 8)}, duration_s=100.0)
        world.finish(f"a{number}", 20.0)
    life = world.picture.tracker.by_id["elastic"]
    assert len(life.notes) == stories.NOTES_MAX and life.dropped_notes > 0
    assert any(text.startswith("resized: ") for text in texts(world.story("elastic")))
    assert texts(world.story("elastic"))[-1] == f"{life.dropped_notes} more events are not kept"


# ---- visibility ----


def two_tenants() -> World:
    """`mine` waits behind `theirs`, which holds a unit, a sandbox and a place in the queue."""
    world = World(*cpu_node("n0", 2, memory_gib=1), API, limits=Limits(ageing_s=10.0))
    world.send(Reserve(sandbox="theirs/box", memory=512, run="theirs"))
    world.send(Reserve(sandbox="mine/box", memory=256, run="mine"))
    world.run("theirs/done", run="theirs", key="secret", trajectory="theirs-t")
    world.run("mine/done", run="mine", key="known")
    world.submit("theirs/held", {CPU: cores(1), "api": fixed(1)}, run="theirs", sandbox="theirs/box", key="secret")
    world.submit("mine/held", run="mine", sandbox="mine/box", key="known")
    world.submit("theirs/blocks", {CPU: cores(2)}, run="theirs", key="secret")
    world.wait(50.0)  # elders close what they lack
    world.send(Tick())
    world.submit("mine/waits", {CPU: cores(2)}, run="mine", key="known")
    return world


def test_a_run_finds_no_name_of_another_anywhere() -> None:
    world = two_tenants()
    shown = [world.picture.view("mine"), world.picture.timeline(0, 100, "mine"), world.story("mine/waits", "mine")]
    for record in shown:
        assert b"theirs" not in msgspec.json.encode(record)
        assert b"secret" not in msgspec.json.encode(record)
    assert b"theirs/held" in msgspec.json.encode(world.picture.view(None))


def test_a_run_sees_that_units_are_held_by_another_run() -> None:
    world = two_tenants()
    holders = {(one.id, one.run): one.units for one in world.pool("cpu@n0", "mine").holders}
    assert holders == {(HIDDEN_NAME, HIDDEN_NAME): 1000, ("mine/held", "mine"): 1000}
    assert {(one.id, one.units) for one in world.pool("memory@n0", "mine").holders} == {
        (HIDDEN_NAME, 512),
        ("mine/box", 256),
    }
    view = world.picture.view("mine")
    others = world.of_run(HIDDEN_NAME, "mine")
    assert [run.name for run in view.runs] == ["mine", HIDDEN_NAME]
    assert (others.share, others.waiting, others.running, others.sandboxes, others.settled) == (1.0, 1, 1, 1, {})
    assert [entry.id for entry in view.waiting] == ["mine/waits"] and view.waiting_total == 1
    assert [entry.id for entry in view.running] == ["mine/held"] and view.running_total == 1
    assert [box.name for box in view.sandboxes] == ["mine/box"] and view.sandboxes_total == 1
    assert [one.name for one in view.classes] == ["exec/known"]


def test_the_reason_of_a_wait_does_not_name_the_action_of_another_run_that_goes_first() -> None:
    world = two_tenants()
    [waits] = world.picture.view("mine").waiting
    assert waits.reason.startswith(f"mine/waits waits behind {HIDDEN_NAME}, which goes first and waits for 2 cores")
    full = {entry.id: entry.reason for entry in world.picture.view(None).waiting}
    assert "behind theirs/blocks, which" in full["mine/waits"]


def test_hidden_and_missing_actions_have_the_same_error() -> None:
    world = two_tenants()
    for id in ("theirs/held", "theirs/done", "theirs/blocks", "unknown/nothing"):
        assert world.picture.story(id, "mine") is None
        assert (world.picture.story(id, None) is None) == (id == "unknown/nothing")
    unknown = world.picture.view("unknown")
    assert (unknown.waiting, unknown.running, unknown.sandboxes, unknown.classes) == ((), (), (), ())
    assert all(bucket.ended == 0 for bucket in unknown.history)


def test_the_history_of_a_run_is_its_own() -> None:
    world = World(*cpu_node("n0", 2))
    for number in range(6):
        world.run(f"a{number}", 0.5, run="r" if number % 3 else "s")
    world.wait(BUCKET_S)
    ended = {run: [bucket.ended for bucket in world.picture.view(run).history] for run in (None, "r", "s", "t")}
    assert ended == {None: [6], "r": [4], "s": [2], "t": [0]}


# ---- names that tenants choose ----


def test_runs_and_classes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "RUNS_MAX", 3)
    monkeypatch.setattr(accounts, "CLASSES_MAX", 8)
    monkeypatch.setattr(accounts, "CLASSES_PER_RUN_MAX", 4)
    monkeypatch.setattr(accounts, "TASKS_PER_RUN_MAX", 2)
    world = World(*cpu_node("n0", 2))
    for run, number in itertools.product(("a", "b", "c", "d", "e", OTHER), range(6)):
        world.run(f"{run}{number}", 1.0, run=run, task=f"item{number}", key="k" if number < 5 else "l")
    names = [account.name for account in world.picture.accounts.classes.values() if account.run.name == "a"]
    assert names == ["item0/exec/k", "item1/exec/k", "*/exec/k", "*/exec/l"]
    view = world.picture.view(None)
    assert [run.name for run in view.runs] == ["a", "b", "c", OTHER]
    assert sum(run.act.count for run in view.runs) == 36
    assert world.of_run(OTHER).settled == {"succeeded": 18}
    assert len(world.picture.accounts.classes) <= 8 + 4
    # Runs that are counted together see nothing of each other.
    for run in ("d", OTHER):
        assert world.of_run(run, run).settled == {} and world.picture.view(run).classes == ()


def test_names_without_activity_for_an_hour_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "RUNS_MAX", 2)
    world = World(*cpu_node("n0", 4))
    world.run("old", run="old")
    world.submit("busy", run="busy")
    world.run("no room", run="new")
    world.wait(SLICE_S * (SLICES + 1))
    world.run("room", run="new")
    assert list(world.picture.accounts.runs) == ["busy", "new"]
    world.finish("busy")
    assert world.of_run("busy").settled == {"succeeded": 1}
    world.picture.accounts.forget(0)
    assert world.of_run("new").settled == {"succeeded": 1}


# ---- percentiles ----


@given(st.lists(st.floats(0.0, 9e4), min_size=1, max_size=200))
def test_percentiles_lie_within_a_cell_of_the_true_ones(seconds: list[float]) -> None:
    latencies = LatencyHistogram()
    for each in seconds:
        latencies.add(0.0, each, 0.0)
    percentiles = latencies.percentiles()
    assert percentiles.count == len(seconds) and percentiles.mean_s == pytest.approx(sum(seconds) / len(seconds))
    ordered = sorted(seconds)
    for part, value in ((0.5, percentiles.p50_s), (0.95, percentiles.p95_s), (0.99, percentiles.p99_s)):
        # The smallest that at least this part did not exceed.
        true = ordered[max(0, -(-round(part * 100) * len(seconds) // 100) - 1)]
        upper = next(bound for bound in CELL_BOUNDS_S if bound >= true)
        lower = max([bound for bound in CELL_BOUNDS_S if bound < true], default=0.0)
        assert lower <= value <= upper


def test_bounds_grow_by_less_than_a_sixth() -> None:
    assert all(1.0 < high / low < 1.16 for low, high in itertools.pairwise(CELL_BOUNDS_S))


def test_the_hour_forgets() -> None:
    hour, chosen = LastHour(), random.Random(1)
    for number in range(40):
        latencies = LatencyHistogram()
        for _ in range(10):
            latencies.add(chosen.random(), chosen.random(), 0.1)
        hour.forget(number)
        hour.add(latencies, number)
    assert hour.total.count == SLICES * 10
    assert sum(hour.total.cells.values()) == SLICES * 10
    hour.forget(100)
    assert (hour.total.count, hour.total.cells, hour.total.total_s) == (0, {}, 0.0)


def test_percentiles_of_run_and_class_cover_the_last_hour() -> None:
    world = World(*cpu_node("n0", 2))
    for number in range(20):
        world.run(f"a{number}", 2.0, key="k")
    view = world.picture.view(None)
    assert view.runs[0].act.count == view.classes[0].act.count == 20
    assert view.classes[0].name == "exec/k" and view.classes[0].execution_s == pytest.approx(2.0)
    assert 1.8 <= view.runs[0].act.p50_s <= 2.0
    world.wait(SLICE_S * SLICES + 60.0)
    view = world.picture.view(None)
    assert view.runs[0].act.count == 0 and view.classes == ()
    assert view.runs[0].settled == {"succeeded": 20}


# ---- history ----


def test_a_bucket_has_what_ended_in_it_and_how_busy_the_pools_were() -> None:
    world = World(*cpu_node("n0", 2), API)
    world.submit("a", {CPU: cores(1)})
    world.finish("a", 2.0)
    world.wait(1.0)
    world.submit("b", {CPU: cores(2)})
    world.submit("c", {CPU: cores(2)})
    world.wait(4.0)  # 3 s of the next bucket begin
    first, *rest = world.picture.view(None).history
    assert rest == []
    assert (first.from_s, first.ended, first.waiting, first.running) == (0.0, 1, 1, 1)
    # One of two cores for 2 s, then both for 2 s.
    assert first.busy == {"cpu@n0": pytest.approx(0.6)}
    assert first.execution_s == pytest.approx(2.0)


def test_buckets_in_which_nothing_happens_are_there_too() -> None:
    world = World(*cpu_node("n0", 2))
    world.submit("a", {CPU: cores(1)})
    world.wait(4.5 * BUCKET_S)
    history = world.picture.view(None).history
    assert [bucket.from_s for bucket in history] == [0.0, 5.0, 10.0, 15.0]
    assert [(bucket.running, bucket.busy["cpu@n0"]) for bucket in history] == [(1, pytest.approx(0.5))] * 4


@pytest.mark.parametrize("pause_s", [BUCKETS_MAX * BUCKET_S, 10 * BUCKETS_MAX * BUCKET_S])
def test_history_is_an_hour_however_long_nothing_happened(pause_s: float) -> None:
    world = World(*cpu_node("n0", 2))
    world.run("a", 1.0)
    world.submit("b")
    world.wait(pause_s)
    history = world.picture.view(None).history
    assert len(history) == BUCKETS_MAX
    assert [bucket.from_s for bucket in history] == [history[0].from_s + i * BUCKET_S for i in range(BUCKETS_MAX)]
    assert history[-1].from_s <= world.clock.now() - BUCKET_S < history[-1].from_s + BUCKET_S
    assert all(0.49 < bucket.busy["cpu@n0"] < 0.51 for bucket in history[1:])


# ---- pools ----


def test_pools_show_numa_nodes_devices_and_models() -> None:
    world = World(
        *cpu_node("n0", 4, memory_gib=1, numa_nodes=2),
        Pool(kind=GPU, node="n0", total=4),
        Pool(kind=EXCLUSIVE_CORE, node="n0", total=4, numa=(2, 2)),
        Pool(kind="api/tokens", total=100, window=Window(seconds=60.0)),
    )
    world.send(Resident(service="judge", node="n0", devices=(2, 3)))
    world.send(Resident(service="gone", node="n0", devices=(1,)))
    world.send(Evicted(service="gone", node="n0", devices=(1,)))
    world.submit("gpu", {GPU: one_of(1, 2)}, service="judge")
    world.submit("cpu", {CPU: cores(2)})
    world.submit("core", {EXCLUSIVE_CORE: fixed(1)})
    world.submit("tokens", {"api/tokens": fixed(30)})
    cpu, gpu, core, tokens = (world.pool(name) for name in ("cpu@n0", "gpu@n0", "core@n0", "api/tokens"))
    assert (cpu.unit, gpu.unit, core.unit, tokens.unit) == ("milli-cores", "devices", "units", "tokens")
    assert [(part.index, part.total, part.held) for part in cpu.parts] == [(0, 2000, 2000), (1, 2000, 0)]
    assert [part.service for part in gpu.parts] == ["", "", "judge", "judge"]
    assert sum(part.held for part in gpu.parts) == gpu.held == len(gpu.holders[0].parts)
    assert [(part.total, part.held) for part in core.parts] == [(2, 1), (2, 0)] and core.holders[0].parts == (0,)
    assert (tokens.spent, tokens.free, tokens.window_s) == (30, 70, 60.0)


@pytest.mark.parametrize(
    ("window", "after"),
    [
        (Window(seconds=10.0), {0.0: 8, 9.9: 8, 10.0: 0}),
        (Window(seconds=10.0, bucket=True), {0.0: 8, 5.0: 3, 8.0: 0}),
        (Window(seconds=10.0, sliding=True), {0.0: 8, 9.9: 8, 10.0: 0}),
    ],
)
def test_a_quota_shows_its_refilled_units_without_observers(window: Window, after: dict[float, int]) -> None:
    world = World(Pool(kind="api", total=10, window=window))
    world.submit("a", {"api": fixed(8)})
    world.finish("a")
    for seconds, spent in after.items():
        world.clock.set(seconds)
        pool = world.pool("api")
        assert (pool.spent, pool.free) == (spent, 10 - spent)
    before = world.scheduler.ledger.pools["api"].spent
    world.send(Tick())
    assert before == 8


def test_a_share_of_a_quota_ends_when_its_units_are_refilled_without_observers() -> None:
    world = World(*cpu_node("n0", 4), Pool(kind="api", total=10, window=Window(seconds=10.0, sliding=True)))
    world.submit("a", {"api": fixed(8)}, run="r")
    world.finish("a")
    world.submit("b", {CPU: cores(1)}, run="r")
    assert world.of_run("r").share == 0.8
    world.wait(BUCKET_S)
    assert max(bucket.busy.get("api", 0.0) for bucket in world.picture.view(None).history) == pytest.approx(0.8)
    world.wait(10.0 + 2 * BUCKET_S)
    assert world.of_run("r").share == 0.25
    assert world.picture.view(None).history[-1].busy["api"] == 0.0


def test_an_action_that_waits_for_memory_waits_for_that_and_not_for_cores() -> None:
    world = World(*cpu_node("n0", 4, memory_gib=1.0))
    world.send(Reserve(sandbox="s", run="r", memory=1024))
    world.submit("a", {CPU: cores(1)}, sandbox="s", run="r")
    world.send(Reserve(sandbox="u", run="r", memory=512))
    world.submit("b", {CPU: cores(1)}, sandbox="u", run="r")
    assert world.pool("memory@n0").waiting == 1 and world.pool("cpu@n0").waiting == 0
    world.submit("c", {CPU: cores(4)}, run="r")
    assert world.pool("memory@n0").waiting == 1 and world.pool("cpu@n0").waiting == 1


def test_a_share_is_of_the_pool_of_which_a_run_holds_most_without_its_weight() -> None:
    world = World(*cpu_node("n0", 4), Pool(kind="api", total=2))
    world.send(RunChanged(run="r", weight=4.0))
    world.submit("a", {CPU: cores(1), "api": fixed(1)}, run="r")
    run = world.of_run("r")
    assert (run.weight, run.share, run.running) == (4.0, 0.5, 1)
    world.send(PoolChanged(pool=Pool(kind="api", total=0)))
    assert world.of_run("r").share == 1.0


def test_what_rides_in_one_batch_is_held_once() -> None:
    world = World(Pool(kind=GPU, node="n0", total=2), scheduling="adaptive")
    world.send(Resident(service="judge", node="n0", devices=(0,), batch_max=4))
    world.submit("blocks", {GPU: fixed(2)})
    for number in range(3):
        world.submit(f"a{number}", {GPU: fixed(1)}, service="judge", run=f"r{number}")
    world.finish("blocks", 1.0)
    riding = [entry for entry in world.picture.view(None).running if entry.units]
    assert len(riding) == 3
    pool = world.pool("gpu@n0")
    assert sum(holder.units for holder in pool.holders) == pool.held


# ---- the queue and sandboxes ----


def test_the_queue_is_shown_from_its_front() -> None:
    world = World(*cpu_node("n0", 1), limits=Limits(ageing_s=100.0))
    world.submit("elder", run="rich")
    world.submit("held", run="rich")
    world.wait(250.0)
    world.submit("low", run="poor", priority=-1)
    world.submit("first", run="poor", priority=1)
    world.submit("second", run="poor")
    world.submit("last", run="rich")
    order = [entry.id for entry in world.picture.view(None).waiting]
    assert order == ["held", "first", "second", "low", "last"]
    assert world.picture.view(None).waiting_total == 5


def test_the_front_of_a_long_queue_is_that_of_all_of_it() -> None:
    world = World(*cpu_node("n0", 1))
    for number in range(1000):
        world.submit(f"a{number}", priority=number % 5, run=f"r{number % 2}")
    whole = sorted(
        [entry for entry in world.scheduler.entries.values() if entry.lane is not None],
        key=lambda e: (e.run.usage.share, e.run.served, -e.action.priority, e.key, e.seq),
    )
    view = world.picture.view(None)
    assert [entry.id for entry in view.waiting] == [entry.id for entry in whole[:200]]
    assert all(entry.reason.startswith(f"{entry.id} waits") for entry in view.waiting)


def test_sandboxes_from_their_opening_to_their_end() -> None:
    world = World(*cpu_node("n0", 2, memory_gib=1))
    world.send(Reserve(sandbox="s", memory=512, run="r"))
    world.send(Reserve(sandbox="s", memory=512, run="forged"))
    world.send(Reserve(sandbox="too large", memory=99999, run="r"))
    world.wait(1.0)
    world.submit("a", run="r", sandbox="s")
    [box] = world.picture.view(None).sandboxes
    assert (box.name, box.run, box.node, box.memory_mib) == ("s", "r", "n0", 512)
    assert (box.opened_s, box.active, box.actions, box.last_used_s) == (0.0, 1, 1, 1.0)
    world.finish("a", 2.0)
    assert [(box.active, box.last_used_s) for box in world.picture.view(None).sandboxes] == [(0, 3.0)]
    world.submit("b", run="r", sandbox="s")
    world.send(Release(sandbox="s"))
    assert world.of_run("r").sandboxes == 1, "it holds its memory until its last action has ended"
    world.send(Finished(action="b"))
    assert world.picture.view(None).sandboxes == () and world.of_run("r").sandboxes == 0
    assert world.picture.accounts.run("r").active == 0


def test_sandboxes_go_with_their_node() -> None:
    world = World(*cpu_node("n0", 2, memory_gib=1))
    world.send(Reserve(sandbox="s", memory=512))
    world.submit("a", sandbox="s")
    world.send(NodeChanged(node="n0", state=NodeState.DOWN))
    account = world.picture.accounts.run("default")
    assert (account.sandboxes, account.active, account.running) == (0, 0, 0)
    assert world.picture.view(None).sandboxes == ()


def test_an_instance_is_shown_once_the_call_that_waited_for_its_memory_is_granted() -> None:
    world = World(*cpu_node("n0", 2, memory_gib=1))
    world.send(Reserve(sandbox="full", memory=800, run="other", node="n0"))
    world.submit("call", run="r")
    world.send(StartFailed(action="call", reason="no memory", attempt=1, sandbox="instance", memory=300))
    assert [box.name for box in world.picture.view(None).sandboxes] == ["full"]
    world.send(Release(sandbox="full"))
    [box] = world.picture.view(None).sandboxes
    assert (box.name, box.run, box.node, box.memory_mib) == ("instance", "r", "n0", 300)
    world.finish("call", 1.0)
    assert [box.name for box in world.picture.view(None).sandboxes] == ["instance"]
    world.send(Release(sandbox="instance"))
    assert world.picture.view(None).sandboxes == ()


# ---- all of it together ----


def test_actions_that_ended_with_the_previous_service_are_counted_and_listed_but_not_timed() -> None:
    world = World(*cpu_node("n0", 4))
    world.run("a", 2.0)
    action = Action(id="b", demand=Demand({CPU: cores(1)}), run="default")
    world.send(Concluded(action=action, outcome=Outcome(action="b", status=Status.LOST, reason="it was restarted")))
    (run,) = world.picture.view(None).runs
    assert run.settled == {"succeeded": 1, "lost": 1} and (run.act.count, run.running, run.waiting) == (1, 0, 0)
    assert [row.id for row in world.picture.timeline(0, 10, None).rows] == ["a", "b"]
    story = world.picture.story("b", None)
    assert story is not None and (story.status, story.explanation) == ("lost", "it was restarted")
    assert [line.text for line in story.lines][-1] == "lost: it was restarted"
    assert world.picture.story("b", "another") is None


def test_memory_does_not_grow_with_the_number_of_actions() -> None:
    world = World(*cpu_node("n0", 2))
    picture = world.picture
    for number in range(3000):
        world.run(f"a{number}", 0.01, run=f"r{number % 400}", task=f"item{number}", trajectory=f"t{number % 10}")
    kept = (picture.tracker.by_id, picture.sandboxes.by_name, picture.tracker.trajectories)
    assert [len(each) for each in kept[:2]] == [0, 0]
    assert len(picture.accounts.runs) == accounts.RUNS_MAX
    assert len(picture.accounts.classes) <= accounts.CLASSES_MAX + accounts.RUNS_MAX + 1
    assert sum(run.act.count for run in picture.view(None).runs) == 3000


def test_it_sees_a_real_orchestrator() -> None:
    manager = FakeManager({}, cores=2)
    pools = manager.pools()
    scheduler = Scheduler(policy("adaptive"), pools)
    picture = StateObserver(scheduler, version="0")

    async def main() -> View:
        async with (
            asyncio.timeout(60.0),
            Orchestrator(scheduler, {pools[0].node: manager}, observers=[picture]) as running,
        ):
            opening = Action(id="open", demand=Demand({CPU: cores(1)}), sandbox="box", kind="open")
            await running.wait_settled(running.submit(opening, Open(spec=SandboxSpec())))
            for number in range(5):
                action = Action(id=f"a{number}", demand=Demand({CPU: learned()}), sandbox="box")
                settled = await running.wait_settled(running.submit(action, Exec(command="echo hi")))
                assert settled.outcome.status is Status.SUCCEEDED
            return picture.view(None)

    view = asyncio.run(main())
    assert view.runs[0].settled == {"succeeded": 6}
    [box] = view.sandboxes
    assert (box.name, box.actions, box.active) == ("box", 6, 0)
    assert 0.0 <= view.now_s < 60.0 and view.service.state == "up"
    breakdown = view.runs[0].time_breakdown
    assert breakdown.total_s == pytest.approx(
        sum(breakdown.waiting_s.values()) + breakdown.execution_s + breakdown.overhead_s + breakdown.thinking_s
    )
    assert msgspec.json.decode(msgspec.json.encode(view), type=View) == view
