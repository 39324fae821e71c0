"""The scheduler: the life of an action, event by event, and what comes out at each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from tangram.core.action import Action, Outcome, Status, Usage
from tangram.core.demand import Demand, cores, fixed
from tangram.core.limits import Limits
from tangram.core.messages import (
    Cancel,
    Concluded,
    Evicted,
    Finished,
    Grant,
    NodeChanged,
    NodeState,
    Pool,
    Refuse,
    Release,
    Reserve,
    Resize,
    Resized,
    Settle,
    Share,
    Start,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tick,
    WakeAt,
    Window,
    cpu_node,
)
from tangram.core.policies import policy
from tangram.core.policies.base import Adjust, ArrivalOrder, Begin, Decision
from tangram.core.recent_events import RECENT_EVENTS_MAX
from tangram.core.scheduler import Scheduler
from tangram.core.snapshot import Snapshot
from tangram.errors import InvalidConfig, InvalidInput, InvariantError

Make = Callable[..., Any]

NODE = cpu_node("n0", 4)
API = Pool(kind="api", total=2)
TOKENS = Pool(kind="tokens", total=10, window=Window(seconds=60.0))

ONE = {"cpu": cores(1)}
FOUR = {"cpu": cores(4)}


# ---- submit, start, finish --------------------------------------------------------------------------------------


def test_an_action_that_fits_starts_at_once() -> None:
    scheduler = Scheduler(policy("fcfs"), NODE)
    action = Action(id="a", demand=Demand({"cpu": cores(1)}))
    grant = Grant("a", "n0", (Share("cpu@n0", 1000, 1000),), 1000)
    assert scheduler.handle(Submit(action=action), 0.0) == [Start(action=action, grant=grant)]
    assert scheduler.handle(Started(action="a"), 1.0) == []
    usage = Usage(cpu_s=3.0, overhead_s=0.5)
    outcome = Outcome(
        action="a", status=Status.SUCCEEDED, execution_s=4.5, overhead_s=1.5, usage=usage, attempts=1
    )  # fmt: skip
    assert scheduler.handle(Finished(action="a", usage=usage), 6.0) == [Settle(outcome=outcome)]
    assert scheduler.entries == {}


def test_an_action_that_does_not_fit_waits_and_starts_when_it_does(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", {"cpu": cores(3)})
    assert c.submit("b", {"cpu": cores(2)}) == []
    c.now = 10.0
    c.run("a")
    assert c.starts() == ["b"]
    c.now = 12.0
    c.started("b")
    c.now = 15.0
    outcome = c.finished("b")[0].outcome
    assert (outcome.waiting_s, outcome.overhead_s, outcome.execution_s) == (10.0, 2.0, 3.0)
    assert outcome.act_s == 15.0


def test_settling_comes_before_the_starts_that_it_made_room_for(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    c.submit("b", {"cpu": cores(2)})
    c.submit("c", {"cpu": cores(2)})
    c.run("a")
    assert [type(effect) for effect in c.effects] == [Settle, Start, Start]
    assert c.starts() == ["b", "c"]


def test_an_action_needs_all_of_its_pools_or_gets_none(cluster: Make) -> None:
    c = cluster(*NODE, API)
    c.submit("a", {"api": fixed(2)})
    assert c.submit("b", {"cpu": cores(4), "api": fixed(1)}) == []
    assert c.free("cpu@n0") == 4000, "what it cannot use it does not hold"
    c.run("a")
    assert [share.pool for share in c.start("b").grant.shares] == ["cpu@n0", "api"]
    assert (c.free("cpu@n0"), c.free("api")) == (0, 1)


def test_an_action_that_cannot_start_blocks_only_actions_that_need_what_it_lacks(cluster: Make) -> None:
    c = cluster(*NODE, API)
    c.submit("all", FOUR)
    c.submit("blocked", {"cpu": cores(2), "api": fixed(1)})
    assert c.submit("behind", ONE) == [], "first come, first served on that pool"
    c.submit("elsewhere", {"api": fixed(1)})
    assert c.starts() == ["elsewhere"]


def test_cores_are_free_between_the_actions_of_a_trajectory(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("first", FOUR, trajectory="t")
    c.run("first", 1.0)
    assert c.free("cpu@n0") == 4000
    assert c.scheduler.statistics().holding == 0


# ---- refusals ---------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_names_the_limit(cluster: Make) -> None:
    c = cluster(*NODE, queue_max=2)
    for name in "abc":
        c.submit(name, FOUR)
    c.submit("d", FOUR)
    assert c.refusal() == ("queue_max", "the queue holds 2 actions; wait until some have settled")
    c.run("a")
    c.submit("d", FOUR)
    assert c.effects == []


def test_a_run_with_a_full_queue_is_refused_and_other_runs_are_not(cluster: Make) -> None:
    c = cluster(*NODE, run_queue_max=1)
    c.submit("a", FOUR, run="x")
    c.submit("b", FOUR, run="x")
    c.submit("c", FOUR, run="x")
    assert c.refusal() == ("run_queue_max", "run x has 1 waiting actions; wait until some have settled")
    c.submit("d", FOUR, run="y")
    assert c.effects == []


def test_an_id_that_is_live_is_refused_and_may_be_used_again_later(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", ONE)
    c.submit("a", ONE)
    assert c.refusal() == ("id", "an action with the id a is already live; ids must be unique")
    c.run("a")
    c.submit("a", ONE)
    assert c.starts() == ["a"]


def test_an_action_that_no_pool_could_hold_is_refused_with_the_capacities(cluster: Make) -> None:
    c = cluster(*NODE, Pool(kind="gpu", node="g0", total=6), API)
    c.submit("a", {"cpu": cores(5)})
    assert c.refusal() == ("capacity", "a requests at least 5 cores of cpu; the largest such pool has 4 cores")
    c.submit("b", {"gpu": fixed(5)})
    assert c.refusal() == (
        "capacity",
        "b requests at least 5 devices (a chunk of 8) of gpu; the largest such pool has 6 devices",
    )
    c.submit("c", {"cpu": cores(1), "gpu": fixed(1)})
    assert c.refusal()[1] == "c requests 1 core of cpu, 1 device of gpu together; no node that is up has all of them"
    c.submit("d", {"tpu": fixed(1)})
    assert c.refusal()[1] == "d requests pool kind tpu, which does not exist; kinds: api, cpu, gpu"
    c.submit("e", {"api": fixed(3)})
    assert c.refusal()[1] == "e requests at least 3 units of api; the largest such pool has 2 units"


def test_a_sandbox_must_be_reserved_first(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", ONE, sandbox="box")
    assert c.refusal() == ("sandbox", "sandbox box is not reserved; send Reserve first")


def test_a_refused_action_leaves_nothing_behind(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", {"cpu": cores(5)}, deadline_s=5.0)
    assert c.pass_time(10.0) == []
    assert c.scheduler.entries == {}


@pytest.mark.parametrize("field", Limits.__struct_fields__)
def test_a_limit_is_a_positive_number(field: str) -> None:
    with pytest.raises(InvalidConfig, match=f"limits.{field}"):
        Limits(**{field: 0})


# ---- cancel -----------------------------------------------------------------------------------------------------


def test_cancelled_while_waiting_it_settles_at_once(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    c.submit("b", FOUR)
    c.now = 3.0
    c.cancel("b")
    outcome = Outcome(action="b", status=Status.CANCELLED, reason="cancelled by the caller", waiting_s=3.0)
    assert c.effects == [Settle(outcome=outcome)]


def test_cancelled_while_starting_it_is_stopped_and_holds_its_units_until_it_has_stopped(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    c.submit("b", FOUR)
    assert c.cancel("a") == [Stop(action="a", reason="cancelled by the caller")]
    assert c.free("cpu@n0") == 0
    c.now = 1.0
    assert c.started("a") == [], "it may have started before the word reached it"
    c.now = 5.0
    c.finished("a")
    [settled] = c.outcomes()
    assert (settled.status, settled.execution_s, settled.overhead_s) == (Status.CANCELLED, 4.0, 1.0)
    assert c.starts() == ["b"]


def test_cancelled_while_running_still_holds_its_units(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    c.submit("b", FOUR)
    c.started("a")
    assert c.cancel("a") == [Stop(action="a", reason="cancelled by the caller")]
    assert c.cancel("a") == [], "once is enough"
    assert c.free("cpu@n0") == 0
    c.finished("a", cpu_s=2.0)
    [settled] = c.outcomes()
    assert (settled.status, settled.usage.cpu_s) == (Status.CANCELLED, 2.0)
    assert c.starts() == ["b"]


def test_a_start_that_fails_while_stopping_is_the_end(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    c.cancel("a")
    c.start_failed("a")
    assert c.outcome().status is Status.CANCELLED


def test_an_action_lost_while_stopping_ends_as_requested(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR, idempotent=True)
    c.started("a")
    c.cancel("a")
    c.finished("a", lost="killed")
    assert c.outcome().status is Status.CANCELLED


def test_events_about_what_is_over_are_counted_and_change_nothing(cluster: Make) -> None:
    c = cluster(*NODE)
    for event in (
        Cancel(action="x"), Started(action="x"), StartFailed(action="x", reason="?"), Finished(action="x"),
        Resized(action="x", limit=1), Release(sandbox="x"),
    ):  # fmt: skip
        assert c.send(event) == []
    assert c.scheduler.statistics().late_events == 6
    assert c.send(Evicted(service="x", node="n0", devices=(0,))) == []


# ---- starts that fail, and what our side lost -------------------------------------------------------------------


def test_a_failed_start_is_tried_again_in_its_old_turn(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    c.submit("b", FOUR)
    c.now = 2.0
    c.start_failed("a")
    assert c.starts() == ["a"], "it came first"
    assert c.start("a").grant.attempt == 2
    c.now = 3.0
    c.run("a", 4.0)
    [settled] = c.outcomes()
    assert (settled.attempts, settled.waiting_s, settled.overhead_s, settled.execution_s) == (2, 2.0, 1.0, 4.0)


def test_a_start_that_keeps_failing_is_given_up_as_lost_with_the_last_reason(cluster: Make) -> None:
    c = cluster(*NODE, attempts_max=3)
    c.submit("a", FOUR)
    c.start_failed("a", "first")
    c.start_failed("a", "second")
    c.start_failed("a", "third")
    assert c.outcome().status is Status.LOST
    assert c.outcome().reason == "start failed 3 times, last: third"
    assert c.free("cpu@n0") == 4000


def test_a_start_that_cannot_be_helped_is_not_tried_again(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    c.start_failed("a", "no such image", retry=False)
    assert c.outcome().reason == "start failed 1 times, last: no such image"


def test_a_failed_start_refunds_what_it_was_charged(cluster: Make) -> None:
    c = cluster(TOKENS)
    c.submit("a", {"tokens": fixed(7)})
    assert c.free("tokens") == 3
    c.start_failed("a", retry=False)
    assert c.free("tokens") == 10


def test_a_failed_start_is_refunded_before_it_is_tried_again(cluster: Make) -> None:
    c = cluster(TOKENS)
    c.submit("a", {"tokens": fixed(7)})
    c.start_failed("a")
    assert c.starts() == ["a"]
    assert c.free("tokens") == 3


def test_what_our_side_lost_runs_again_only_if_the_caller_allows_it(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("once", {"cpu": cores(2)})
    c.submit("again", {"cpu": cores(2)}, idempotent=True)
    c.started("once", "again")
    c.finished("once", lost="killed")
    assert (c.outcome().status, c.outcome().reason) == (Status.LOST, "killed")
    c.finished("again", lost="killed")
    assert c.outcomes() == []
    assert c.start("again").grant.attempt == 2


def test_what_is_lost_again_and_again_is_given_up(cluster: Make) -> None:
    c = cluster(*NODE, attempts_max=2)
    c.submit("a", FOUR, idempotent=True)
    c.started("a")
    c.finished("a", lost="first")
    c.finished("a", lost="second")
    assert (c.outcome().status, c.outcome().reason, c.outcome().attempts) == (Status.LOST, "second", 2)


def test_a_lost_action_waits_for_its_next_attempt_and_may_be_cancelled_meanwhile(cluster: Make) -> None:
    c = cluster(*NODE, API)
    c.submit("a", {"cpu": cores(4), "api": fixed(2)}, idempotent=True)
    c.started("a")
    c.submit("b", {"api": fixed(2)}, priority=1)
    c.now = 5.0
    c.finished("a", lost="killed")
    assert c.starts() == ["b"], "it goes first by priority"
    c.now = 7.0
    c.cancel("a")
    assert (c.outcome().waiting_s, c.outcome().execution_s, c.outcome().attempts) == (7.0, 0.0, 1)


def test_last_words_of_an_earlier_attempt_are_not_believed_of_the_present_one(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR, idempotent=True)
    c.started("a")
    c.finished("a", lost="node unreachable")
    assert c.start("a").grant.attempt == 2
    for event in (
        Started(action="a", attempt=1), StartFailed(action="a", reason="late", attempt=1),
        Finished(action="a", attempt=1), Resized(action="a", limit=1, attempt=1),
    ):  # fmt: skip
        assert c.send(event) == []
    assert c.scheduler.statistics().late_events == 4
    c.send(Started(action="a", attempt=2))
    c.send(Finished(action="a", attempt=2))
    assert c.outcome().status is Status.SUCCEEDED


# ---- time limits ------------------------------------------------------------------------------------------------


def test_a_timeout_counts_from_started(cluster: Make) -> None:
    c = cluster(*NODE)
    assert c.wakes() == []
    c.submit("a", FOUR, timeout_s=10.0)
    c.now = 5.0
    assert c.started("a") == [WakeAt(at=15.0)]
    c.now = 14.9
    assert c.send(Tick()) == []
    c.now = 15.0
    assert c.send(Tick()) == [Stop(action="a", reason="timeout of 10 s passed")]
    c.now = 16.0
    c.finished("a")
    assert (c.outcome().status, c.outcome().execution_s) == (Status.TIMED_OUT, 11.0)


def test_a_timeout_while_its_reserved_cpu_was_missing_is_our_failure(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR, timeout_s=10.0)
    c.started("a")
    c.pass_time(10.0)
    c.finished("a", starved_s=1.5)
    assert (c.outcome().status, c.outcome().reason) == (Status.LOST, "starved: 1.5 s without its reserved CPU")


def test_a_moment_without_cpu_does_not_excuse_a_timeout(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR, timeout_s=10.0)
    c.started("a")
    c.pass_time(10.0)
    c.finished("a", starved_s=0.9)
    assert c.outcome().status is Status.TIMED_OUT


def test_a_timeout_of_a_past_attempt_does_not_affect_the_next(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR, timeout_s=10.0, idempotent=True)
    c.started("a")
    c.now = 5.0
    c.finished("a", lost="killed")
    c.started("a")
    assert c.pass_time(5.0) == [WakeAt(at=15.0)]
    assert c.pass_time(5.0) == [Stop(action="a", reason="timeout of 10 s passed")]


def test_a_deadline_counts_from_submission_and_may_pass_while_waiting(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    assert c.submit("b", FOUR, deadline_s=8.0) == [WakeAt(at=8.0)]
    c.pass_time(8.0)
    outcome = Outcome(
        action="b", status=Status.TIMED_OUT, reason="deadline of 8 s passed while it waited", waiting_s=8.0
    )  # fmt: skip
    assert c.effects == [Settle(outcome=outcome)]


def test_a_deadline_may_pass_while_running(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR, deadline_s=8.0)
    c.started("a")
    assert c.pass_time(8.0) == [Stop(action="a", reason="deadline of 8 s passed while it ran")]
    c.finished("a")
    assert c.outcome().status is Status.TIMED_OUT


def test_time_limits_of_settled_actions_request_nothing(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR, timeout_s=5.0, deadline_s=100.0)
    c.run("a")
    assert c.pass_time(200.0) == []


def test_wakes_are_announced_once_and_earlier_ones_as_they_come(cluster: Make) -> None:
    c = cluster(*NODE)
    assert c.submit("a", FOUR, deadline_s=50.0) == [c.start("a"), WakeAt(at=50.0)]
    assert c.submit("b", FOUR, deadline_s=80.0) == []
    assert c.submit("c", FOUR, deadline_s=20.0) == [WakeAt(at=20.0)]
    c.pass_time(20.0)
    assert c.outcome().action == "c"
    assert c.wakes() == [], "50 is announced already"
    c.pass_time(30.0)
    assert c.wakes() == [80.0]


def test_a_clock_that_steps_back_is_read_as_standing_still(cluster: Make) -> None:
    c = cluster(*NODE)
    c.now = 100.0
    c.submit("a", FOUR, timeout_s=10.0)
    c.now = 60.0
    assert c.started("a") == [WakeAt(at=110.0)]
    c.now = 70.0
    c.finished("a")
    assert (c.outcome().act_s, c.outcome().execution_s) == (0.0, 0.0)
    assert c.scheduler.statistics().now == 100.0


# ---- quotas -----------------------------------------------------------------------------------------------------


def test_a_spent_quota_is_looked_at_again_when_its_window_ends(cluster: Make) -> None:
    c = cluster(TOKENS)
    c.submit("a", {"tokens": fixed(7)})
    assert c.submit("b", {"tokens": fixed(7)}) == [WakeAt(at=60.0)]
    c.run("a")
    assert c.starts() == [], "spent units do not come back with Finished"
    c.now = 59.0
    assert c.send(Tick()) == []
    c.now = 60.0
    c.send(Tick())
    assert c.starts() == ["b"]


def test_a_bucket_starts_the_next_call_as_soon_as_it_has_enough(cluster: Make) -> None:
    c = cluster(Pool(kind="calls", total=5, window=Window(seconds=10.0, bucket=True)))
    c.submit("a", {"calls": fixed(5)})
    assert c.submit("b", {"calls": fixed(2)}) == [WakeAt(at=4.0)]
    c.pass_time(4.0)
    assert c.starts() == ["b"]


def test_a_call_that_was_overtaken_is_tried_again_when_the_bucket_has_enough_for_it(cluster: Make) -> None:
    c = cluster(Pool(kind="calls", total=5, window=Window(seconds=10.0, bucket=True)), policy="adaptive")
    c.submit("a", {"calls": fixed(5)})
    assert c.submit("b", {"calls": fixed(5)}) == [WakeAt(at=10.0)]
    c.now = 4.0
    c.submit("c", {"calls": fixed(2)}, priority=1)
    assert c.starts() == ["c"]
    c.now = 10.0
    c.send(Tick())
    assert (c.starts(), c.wakes()) == ([], [14.0])
    c.now = 14.0
    c.send(Tick())
    assert c.starts() == ["b"]


def test_what_was_really_spent_corrects_the_estimate(cluster: Make) -> None:
    c = cluster(TOKENS)
    c.submit("a", {"tokens": fixed(7)})
    c.submit("b", {"tokens": fixed(7)})
    c.started("a")
    c.finished("a", spent={"tokens": 2})
    assert c.starts() == ["b"], "five tokens came free at once"
    c.started("b")
    c.finished("b", spent={"tokens": 9})
    assert c.free("tokens") == -1
    c.pass_time(60.0)
    c.submit("c", {"tokens": fixed(1)})
    assert c.free("tokens") == 9


def test_what_a_lost_attempt_spent_is_corrected_too(cluster: Make) -> None:
    c = cluster(TOKENS)
    c.submit("a", {"tokens": fixed(4)}, idempotent=True)
    c.started("a")
    c.finished("a", lost="connection reset", spent={"tokens": 1})
    assert c.free("tokens") == 10 - 1 - 4


@pytest.mark.parametrize("at_once", [True, False])
def test_a_program_in_a_sandbox_that_lacks_a_sliding_quota_starts_when_that_comes_back(
    cluster: Make, at_once: bool
) -> None:
    api = Pool(kind="api", total=1, window=Window(seconds=2.0, sliding=True, arrival_s=1.0))
    c = cluster(*cpu_node("n0", 2, memory_gib=1), api)
    c.send(Reserve(sandbox="box", memory=16))
    both = {"cpu": cores(1), "api": fixed(1)}
    c.submit("first", both, sandbox="box", at_once=at_once)
    c.started("first")
    c.submit("second", both, sandbox="box", at_once=at_once)
    assert c.starts() == []
    c.now = 0.5
    wakes = [effect.at for effect in c.finished("first") if isinstance(effect, WakeAt)]
    assert wakes == [2.5]
    c.now = 2.5
    c.send(Tick())
    assert c.starts() == ["second"]


def test_a_quota_by_concurrency_comes_back_with_finished(cluster: Make) -> None:
    c = cluster(API)
    for name in "abc":
        c.submit(name, {"api": fixed(1)})
    assert c.running() == ["a", "b"]
    c.run("a")
    assert c.starts() == ["c"]


# ---- wrong plans and wrong events stop everything, with the story -----------------------------------------------


class Planned(ArrivalOrder):
    """A policy whose plan is a function of the test."""

    name = "planned"

    def __init__(self, plan: Callable[[Snapshot], Iterator[Decision]]) -> None:
        self.plan = plan


def test_a_plan_that_oversells_stops_with_the_story_of_the_action(cluster: Make) -> None:
    def plan(snapshot: Snapshot) -> Iterator[Decision]:
        for candidate in snapshot.candidates():
            yield Begin(candidate.entry, candidate.node, 5000)

    c = cluster(*NODE, policy=Planned(plan))
    with pytest.raises(InvariantError, match=r"plan oversells cpu@n0: 5000 units wanted, 4000 of 4000 free") as caught:
        c.submit("greedy", {"cpu": cores(1, 5)}, key="tests")
    assert "Submit       exec tests of run default requests cpu 1000 to 5000" in str(caught.value)
    assert len(caught.value.story) == 1


def test_a_plan_that_gives_what_the_demand_does_not_admit_stops(cluster: Make) -> None:
    def plan(snapshot: Snapshot) -> Iterator[Decision]:
        for candidate in snapshot.candidates():
            yield Begin(candidate.entry, candidate.node, 1500)

    c = cluster(*NODE, policy=Planned(plan))
    with pytest.raises(InvariantError, match="plan gives a 1500 units of cpu, which its demand does not admit"):
        c.submit("a", {"cpu": cores(1, 2)})


@pytest.mark.parametrize(("width", "admitted"), [(2000, True), (1500, False), (3000, False)])
def test_a_plan_may_give_parts_of_cores_to_a_program_that_sees_whole_ones(
    cluster: Make, width: int, admitted: bool
) -> None:
    def plan(snapshot: Snapshot) -> Iterator[Decision]:
        for candidate in snapshot.candidates():
            yield Begin(candidate.entry, candidate.node, 1500, width=width)

    c = cluster(*NODE, policy=Planned(plan))
    with nullcontext() if admitted else pytest.raises(InvariantError, match="does not admit"):
        c.submit("a", {"cpu": cores(1, 2)})
        assert c.start("a").grant.width == 2000


def test_a_plan_that_starts_an_action_twice_stops(cluster: Make) -> None:
    def plan(snapshot: Snapshot) -> Iterator[Decision]:
        for candidate in snapshot.candidates():
            yield Begin(candidate.entry, candidate.node)
            yield Begin(candidate.entry, candidate.node)

    c = cluster(*NODE, policy=Planned(plan))
    with pytest.raises(InvariantError, match="a is starting, not queued, when plan starts it") as caught:
        c.submit("a", ONE)
    assert len(caught.value.story) == 2


def test_a_policy_that_withholds_an_idle_pool_stops(cluster: Make) -> None:
    def look_but_do_not_start(snapshot: Snapshot) -> Iterator[Decision]:
        yield from ()
        for _ in snapshot.candidates():
            pass

    def do_not_even_look(snapshot: Snapshot) -> Iterator[Decision]:
        return iter(())

    for plan in (look_but_do_not_start, do_not_even_look):
        c = cluster(*NODE, policy=Planned(plan))
        with pytest.raises(InvariantError, match=r"policy planned passed over a although cpu@n0 is unused") as caught:
            c.submit("a", ONE)
        assert caught.value.story


def test_a_policy_may_leave_a_pool_to_the_actions_that_use_it(cluster: Make) -> None:
    def one_at_a_time(snapshot: Snapshot) -> Iterator[Decision]:
        for candidate in snapshot.candidates():
            if not snapshot.pool("cpu", candidate.node).held:
                yield Begin(candidate.entry, candidate.node)

    c = cluster(*NODE, policy=Planned(one_at_a_time))
    for name in "abc":
        c.submit(name, ONE)
    assert c.running() == ["a"]
    c.run("a")
    assert c.starts() == ["b"]


def test_what_a_policy_left_waiting_for_a_spent_quota_is_offered_again_when_time_gives_it_back(cluster: Make) -> None:
    def one_in_each_window(snapshot: Snapshot) -> Iterator[Decision]:
        for candidate in snapshot.candidates():
            if not snapshot.pool("tokens", "").spent:
                yield Begin(candidate.entry, candidate.node)

    c = cluster(TOKENS, policy=Planned(one_in_each_window))
    c.submit("a", {"tokens": fixed(1)})
    assert c.submit("b", {"tokens": fixed(1)}) == [WakeAt(at=60.0)]
    c.run("a")
    c.pass_time(60.0)
    assert c.starts() == ["b"]


def test_a_policy_that_stops_after_a_start_is_called_again(cluster: Make) -> None:
    def one_decision(snapshot: Snapshot) -> Iterator[Decision]:
        for candidate in snapshot.candidates():
            yield Begin(candidate.entry, candidate.node)
            return

    c = cluster(*NODE, policy=Planned(one_decision))
    c.submit("all", FOUR)
    for name in "abcd":
        c.submit(name, ONE)
    c.run("all")
    assert c.starts() == ["a", "b", "c", "d"]


def test_finished_without_started_stops_with_the_story(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", ONE)
    with pytest.raises(InvariantError, match="a is starting, not running, when Finished came") as caught:
        c.finished("a")
    assert [line.split()[2] for line in caught.value.story] == ["Submit", "Start", "Finished"]


def test_a_start_that_fails_while_it_runs_stops(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", ONE)
    c.started("a")
    with pytest.raises(InvariantError, match="a is running, not starting, when StartFailed came"):
        c.start_failed("a")


def test_a_transition_that_is_not_in_the_table_stops_with_the_story(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    c.submit("b", FOUR)
    with pytest.raises(
        InvariantError, match="action b cannot go from queued to running; allowed from there:"
    ) as caught:
        c.started("b")
    assert [line.split()[2] for line in caught.value.story] == ["Submit", "Started"]
    with pytest.raises(InvariantError, match="cannot go from running to running"):
        c.started("a", "a")


# ---- seeing -----------------------------------------------------------------------------------------------------


def test_statistics_count_what_waits_holds_and_has_settled(cluster: Make) -> None:
    c = cluster(*cpu_node("n0", 4, memory_gib=1.0))
    c.send(Reserve(sandbox="box", memory=256, run="x"))
    c.submit("a", FOUR, run="x", sandbox="box")
    c.submit("b", FOUR, run="y")
    c.run("a", 5.0)
    statistics = c.scheduler.statistics()
    assert (statistics.now, statistics.waiting, statistics.holding, statistics.sandboxes) == (5.0, 0, 1, 1)
    assert statistics.settled["succeeded"] == 1
    assert statistics.pools["memory@n0"] == {"total": 1024, "free": 768, "held": 256, "spent": 0}
    assert statistics.runs["y"] == {"waiting": 0, "share": 1.0, "weight": 1.0}


def test_an_action_that_ended_elsewhere_is_counted_once_and_requests_nothing(cluster: Make) -> None:
    c = cluster(Pool(kind="search", total=1))
    action = Action(id="a", demand=Demand({"search": fixed(1)}), run="before")
    lost = Concluded(action=action, outcome=Outcome(action="a", status=Status.LOST, reason="it went away"))
    assert c.send(lost) == []
    statistics = c.scheduler.statistics()
    assert (statistics.settled["lost"], statistics.waiting, statistics.holding) == (1, 0, 0)
    assert "before" in statistics.runs and c.scheduler.story("a")
    c.submit("a", {"search": fixed(1)})
    with pytest.raises(InvariantError, match="a is starting, but was reported as ended elsewhere"):
        c.send(lost)


def test_a_story_lists_what_happened_to_one_action(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR, key="tests")
    c.submit("other", ONE)
    c.run("a", 2.0)
    words = [line.split()[2] for line in c.scheduler.story("a")]
    assert words == ["Submit", "Start", "Started", "Finished", "Settle"]


def test_the_memory_of_stories_is_bounded(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", ONE)
    for _ in range(RECENT_EVENTS_MAX):
        c.scheduler.handle(Tick(), 0.0)
    assert c.scheduler.story("a") == []


def test_check_finds_an_action_that_is_lost_from_the_queue(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    c.submit("b", FOUR)
    c.scheduler.entries["b"].lane = None
    with pytest.raises(InvariantError):
        c.scheduler.check()


def test_a_node_may_be_announced_before_its_pools(cluster: Make) -> None:
    c = cluster()
    assert c.send(NodeChanged(node="n0", state=NodeState.DRAINING)) == []
    assert c.scheduler.ledger.nodes == {"n0": NodeState.DRAINING}


# ---- the door ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("event", "now"), [("x", 0.0), (Tick(), math.nan), (Tick(), math.inf)])
def test_what_is_no_event_or_comes_at_no_time_is_refused_and_changes_nothing(event: Any, now: float) -> None:
    scheduler = Scheduler(policy("adaptive"), cpu_node("n0", 2))
    with pytest.raises(InvalidInput, match="expected an event"):
        scheduler.handle(event, now)
    assert scheduler.statistics().now == 0.0


def test_a_refused_action_leaves_no_run_behind() -> None:
    scheduler = Scheduler(policy("adaptive"), cpu_node("n0", 2), limits=Limits(runs_max=1))
    scheduler.handle(Submit(action=Action(id="a", run="one", demand=Demand({"cpu": cores(1)}))), 0.0)
    effects = scheduler.handle(Submit(action=Action(id="b", run="two", demand=Demand({"cpu": cores(1)}))), 0.0)
    assert [effect.limit for effect in effects if isinstance(effect, Refuse)] == ["runs_max"]
    assert list(scheduler.statistics().runs) == ["one"]


def test_an_action_that_one_event_resizes_twice_gets_one_resize_to_its_final_width(cluster: Make) -> None:
    def plan(snapshot: Snapshot) -> Iterator[Decision]:
        for entry in list(snapshot.running(snapshot.pools["cpu@n0"]).values()):
            yield Adjust(entry, 1000, 1000)
        for candidate in snapshot.candidates():
            yield Begin(candidate.entry, candidate.node)
        for entry in list(snapshot.running(snapshot.pools["cpu@n0"]).values()):
            yield Adjust(entry, 1500, 1500)

    c = cluster(*NODE, policy=Planned(plan))
    c.submit("a", {"cpu": cores(1, 2)})
    c.started("a")
    effects = c.submit("b", {"cpu": cores(1)})
    resized = [(effect.action, effect.reserved) for effect in effects if isinstance(effect, Resize)]
    assert resized == [("a", 1500)]
    assert c.scheduler.entries["a"].reserved == 1500
