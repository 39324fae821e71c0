"""Timers: what is due runs once, in order, unless its action settled before; settled ones do not pile up."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.conftest import counted

from tangram.core.action import Action
from tangram.core.demand import Demand, cores
from tangram.core.lanes import Entry
from tangram.core.ledger import Ledger
from tangram.core.messages import Cancel, Finished, Started, Submit, cpu_node
from tangram.core.policies import policy
from tangram.core.queue import Queue
from tangram.core.recent_events import RECENT_EVENTS_MAX
from tangram.core.scheduler import Scheduler
from tangram.core.timers import EARLY_S, STALE_SPARE, Timers

RUN = Queue(Ledger(), 600.0).run("default")


def an_entry(number: int) -> Entry:
    return Entry(Action(id=f"a{number}", demand=Demand({"cpu": cores(1)})), RUN, None, number, 0.0)


class Log:
    """What was called, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def of_entry(self, entry: Entry, *arguments: Any) -> None:
        self.calls.append((entry.id, *arguments))

    def pool_waiters(self, pool: str) -> None:
        self.calls.append((pool,))


def test_what_is_due_runs_in_order_of_time_then_of_setting() -> None:
    timers, log = Timers(), Log()
    first, second = an_entry(1), an_entry(2)
    timers.set(5.0, log.of_entry, second, "late")
    timers.set(3.0, log.of_entry, second, "x")
    timers.set(3.0, log.of_entry, first, "y")
    timers.fire(2.9)
    assert log.calls == []
    timers.fire(4.0)
    assert log.calls == [("a2", "x"), ("a1", "y")]
    timers.fire(100.0)
    assert log.calls[2:] == [("a2", "late")]
    timers.fire(200.0)
    assert len(log.calls) == 3


def test_the_timers_of_a_settled_action_never_run() -> None:
    timers, log = Timers(), Log()
    settled, other = an_entry(1), an_entry(2)
    timers.set(1.0, log.of_entry, settled)
    timers.set(2.0, log.of_entry, settled)
    timers.set(2.0, log.of_entry, other)
    timers.drop(settled)
    timers.fire(10.0)
    assert log.calls == [("a2",)]


def test_a_timer_may_set_the_next_one_and_settle_its_action() -> None:
    timers, log = Timers(), Log()
    entry, other = an_entry(1), an_entry(2)

    def again(subject: Entry) -> None:
        log.of_entry(subject, "again")
        timers.set(2.0, log.of_entry, subject, "second")
        timers.drop(other)

    timers.set(1.0, again, entry)
    timers.set(1.5, log.of_entry, other)
    timers.fire(2.0)
    assert log.calls == [("a1", "again"), ("a1", "second")]


# ---- announcements ----------------------------------------------------------------------------------------------


def test_a_time_is_announced_once_and_a_later_one_after_its_tick() -> None:
    timers, log = Timers(), Log()
    timers.set(5.0, log.of_entry, an_entry(1))
    timers.set(9.0, log.of_entry, an_entry(2))
    assert timers.announce() == 5.0
    assert timers.announce() is None
    timers.fire(5.0)
    assert timers.announce() == 9.0
    timers.fire(9.0)
    assert timers.announce() is None


def test_an_earlier_time_is_announced_although_a_later_one_was() -> None:
    timers, log = Timers(), Log()
    timers.set(5.0, log.of_entry, an_entry(1))
    assert timers.announce() == 5.0
    timers.set(2.0, log.of_entry, an_entry(2))
    assert timers.announce() == 2.0
    timers.fire(2.0)
    # The tick at 5 is still to come: no need to ask for it again.
    assert timers.announce() is None


def test_an_early_tick_is_requested_again() -> None:
    timers, log = Timers(), Log()
    timers.set(5.0, log.of_entry, an_entry(1))
    assert timers.announce() == 5.0
    timers.fire(5.0 - EARLY_S / 2)
    assert log.calls == []
    assert timers.announce() == 5.0
    timers.fire(5.0)
    assert log.calls == [("a1",)]


def test_nothing_is_announced_for_a_settled_action() -> None:
    timers, log = Timers(), Log()
    settled = an_entry(1)
    timers.set(1.0, log.of_entry, settled)
    timers.set(7.0, log.of_entry, an_entry(2))
    timers.drop(settled)
    assert timers.announce() == 7.0


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "pool", "drop", "pass"]), st.integers(0, 5), st.integers(1, 40)), max_size=60
    )
)
def test_answering_every_announcement_misses_no_timer(steps: list[tuple[str, int, int]]) -> None:
    """A caller that sends a Tick exactly when requested: every live timer runs at its time."""
    timers, now = Timers(), 0.0
    entries = [an_entry(number) for number in range(6)]
    live = dict.fromkeys(range(6), True)
    pending: list[tuple[float, str]] = []
    ticks: list[float] = []

    def ran(entry: Entry, at: float) -> None:
        assert now == at
        pending.remove((at, entry.id))

    def announced() -> None:
        wake_at = timers.announce()
        if wake_at is not None:
            ticks.append(wake_at)

    for step, number, after in steps:
        if step == "set" and live[number]:
            timers.set(now + after, ran, entries[number], now + after)
            pending.append((now + after, entries[number].id))
        elif step == "pool":
            timers.set_pool(now + after, lambda pool: None, f"pool{number}")
        elif step == "drop":
            live[number] = False
            timers.drop(entries[number])
            pending = [timer for timer in pending if timer[1] != entries[number].id]
        announced()
        end = now + after if step == "pass" else now
        while ticks and min(ticks) <= end:
            now = min(ticks)
            ticks.remove(now)
            timers.fire(now)
            announced()
        now = end
        assert all(at > now for at, _ in pending)


# ---- pools ------------------------------------------------------------------------------------------------------


def test_a_pool_is_looked_at_again_at_the_earliest_time_set() -> None:
    timers, log = Timers(), Log()
    timers.set_pool(5.0, log.pool_waiters, "search")
    timers.set_pool(8.0, log.pool_waiters, "search")
    timers.set_pool(3.0, log.pool_waiters, "search")
    assert timers.announce() == 3.0
    timers.fire(3.0)
    assert log.calls == [("search",)]
    timers.set_pool(9.0, log.pool_waiters, "search")
    timers.fire(9.0)
    assert log.calls[-1] == ("search",)


# ---- bounds -----------------------------------------------------------------------------------------------------


def bytes_of(timers: Timers) -> int:
    """Memory of the containers that it keeps."""
    return sum(sys.getsizeof(getattr(timers, slot)) for slot in Timers.__slots__)


def test_timers_of_settled_actions_do_not_accumulate() -> None:
    timers, log = Timers(), Log()
    waiting = an_entry(0)
    timers.set(1e9, log.of_entry, waiting)
    most = 0
    for number in range(1, 20_000):
        entry = an_entry(number)
        timers.set(1e6 + number, log.of_entry, entry)
        timers.set(2e6 + number, log.of_entry, entry)
        timers.drop(entry)
        most = max(most, bytes_of(timers))
    # A slot of a list is 8 bytes; without clearing there would be 40,000 of them.
    assert most < 8 * 8 * STALE_SPARE
    timers.fire(2e9)
    assert log.calls == [("a0",)]


@pytest.mark.parametrize("ending", ["finished", "cancelled"])
def test_a_scheduler_that_settled_many_actions_with_deadlines_keeps_none_of_them(ending: str) -> None:
    scheduler = Scheduler(policy("fcfs"), cpu_node("n0", 1))
    for number in range(3000):
        now = float(number)
        action = Action(id=f"a{number}", demand=Demand({"cpu": cores(1)}), deadline_s=1e6, timeout_s=1e6)
        scheduler.handle(Submit(action=action), now)
        scheduler.handle(Started(action=action.id), now)
        if ending == "cancelled":
            scheduler.handle(Cancel(action=action.id), now)
        scheduler.handle(Finished(action=action.id), now + 0.5)
    assert sum(scheduler.statistics().settled.values()) == 3000
    # Four elements for each event of the story; without clearing there would also be 6,000 timers.
    assert counted(scheduler, 4000.0) < 5 * RECENT_EVENTS_MAX
