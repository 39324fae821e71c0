"""Quotas as pools: what an API allows is granted, and never more in any stretch of time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tangram.clock import VirtualLoop
from tangram.core.action import Action, Status
from tangram.core.demand import Demand
from tangram.core.messages import RunChanged
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.errors import InvalidAction, InvalidConfig
from tangram.managers.quotas.adaptive_rate import RateLimitAdvice
from tangram.managers.quotas.manager import Quota, QuotaManager, Rate
from tangram.managers.work import HoldGrant
from tangram.runtime.event_sink import EventSink
from tangram.runtime.orchestrator import ActionTicket, Orchestrator, SettledAction


class Harness:
    """An orchestrator that has quotas alone, on virtual time."""

    def __init__(self, *quotas: Quota) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        sink = EventSink()
        self.quotas = QuotaManager(quotas, sink.send)
        self.scheduler = Scheduler(policy("adaptive"), self.quotas.pools())
        self.orchestrator = Orchestrator(self.scheduler, {}, {HoldGrant: self.quotas}, clock=loop.clock, sink=sink)
        self._number = 0

    def request(
        self, name: str, *, requests: int = 1, tokens: int = 0, run: str = "default", at_once: bool = True,
        deadline_s: float | None = None,
    ) -> ActionTicket:  # fmt: skip
        self._number += 1
        demand = Demand(self.quotas.get(name).demand(requests=requests, tokens=tokens))
        action = Action(
            id=f"a{self._number}", demand=demand, run=run, kind="quota", at_once=at_once, deadline_s=deadline_s
        )
        return self.orchestrator.submit(action, HoldGrant())

    async def use(
        self, name: str, seconds: float, on_start: Callable[[float], object] = lambda at: None,
        *, requests: int = 1, tokens: int = 0, spent: dict[str, int] | None = None, run: str = "default",
    ) -> SettledAction:  # fmt: skip
        ticket = self.request(name, requests=requests, tokens=tokens, run=run)
        await ticket.started
        on_start(asyncio.get_running_loop().time())
        await asyncio.sleep(seconds)
        self.quotas.release(ticket.action.id, spent)
        return await self.orchestrator.wait_settled(ticket)


def at_desk(test: Callable[[Harness], Awaitable[None]], *quotas: Quota) -> None:
    async def main() -> None:
        harness = Harness(*quotas)
        async with harness.orchestrator:
            try:
                await test(harness)
            finally:
                harness.quotas.close()
        harness.scheduler.check()
        statistics = harness.scheduler.statistics()
        assert statistics.waiting == statistics.holding == 0

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def most_within(times: list[float], seconds: float) -> int:
    """The most that happened in any stretch of that many seconds."""
    times = sorted(times)
    first = most = 0
    for last, at in enumerate(times):
        while times[first] <= at - seconds:
            first += 1
        most = max(most, last - first + 1)
    return most


def test_no_more_requests_are_under_way_than_allowed() -> None:
    under_way, most = 0, 0

    async def test(harness: Harness) -> None:
        async def one() -> None:
            nonlocal under_way, most

            def started(_: float) -> None:
                nonlocal under_way, most
                under_way += 1
                most = max(most, under_way)

            await harness.use("search", 1.0, started)
            under_way -= 1

        await asyncio.gather(*(one() for _ in range(50)))
        assert asyncio.get_running_loop().time() == pytest.approx(10.0, rel=0.01)

    at_desk(test, Quota("search", concurrent=5))
    assert most == 5


def test_no_stretch_of_a_window_sees_more_requests_than_allowed_and_hardly_fewer() -> None:
    arrivals: list[float] = []
    draw = random.Random(3)

    async def test(harness: Harness) -> None:
        async def one() -> None:
            seconds = draw.choice((0.01, 0.2, 3.0))
            await harness.use("search", seconds, lambda at: arrivals.append(at + draw.uniform(0.0, min(seconds, 1.0))))

        await asyncio.gather(*(one() for _ in range(1000)))

    at_desk(test, Quota("search", requests=Rate(100, 30.0)))
    assert most_within(arrivals, 30.0 - 1e-6) <= 100
    assert max(arrivals) <= 9 * 31.0 + 1.5, "ten windows of requests take hardly more than nine windows of time"


def test_a_bucket_never_gives_more_than_it_has() -> None:
    arrivals: list[float] = []

    async def test(harness: Harness) -> None:
        await asyncio.gather(*(harness.use("search", 0.01, arrivals.append) for _ in range(1000)))

    at_desk(test, Quota("search", requests=Rate(100, 10.0)))
    level, before = 100.0, 0.0
    for at in arrivals:
        level = min(100.0, level + (at - before) * 10.0) - 1.0
        before = at
        assert level > -1e-6
    assert max(arrivals) < 91.0


def test_tokens_are_charged_by_estimate_and_corrected() -> None:
    async def test(harness: Harness) -> None:
        for really in (100, 900):
            await harness.use("judge", 1.0, tokens=500, spent={"judge/tokens": really})
        assert harness.scheduler.statistics().pools["judge/tokens"]["spent"] == 1000
        began = asyncio.get_running_loop().time()
        await harness.use("judge", 1.0, tokens=1)
        assert asyncio.get_running_loop().time() - began > 50.0, "nothing is left of this minute"

    at_desk(test, Quota("judge", tokens=Rate(1000, 60.0)))


def test_an_action_may_use_several_limits_of_an_api_at_once() -> None:
    async def test(harness: Harness) -> None:
        ticket = harness.request("judge", requests=2, tokens=30)
        await ticket.started
        pools = harness.scheduler.statistics().pools
        assert (pools["judge"]["held"], pools["judge/requests"]["spent"], pools["judge/tokens"]["spent"]) == (2, 2, 30)
        harness.quotas.release(ticket.action.id)
        assert (await harness.orchestrator.wait_settled(ticket)).outcome.status is Status.SUCCEEDED

    at_desk(test, Quota("judge", concurrent=4, requests=Rate(10, 1.0), tokens=Rate(100, 1.0)))


def test_runs_share_a_quota_by_weight() -> None:
    starts: dict[str, list[float]] = {"large": [], "small": []}

    async def test(harness: Harness) -> None:
        harness.orchestrator.send(RunChanged(run="large", weight=3.0))
        await asyncio.gather(
            *(harness.use("search", 0.1, starts[run].append, run=run) for run in starts for _ in range(300))
        )

    at_desk(test, Quota("search", requests=Rate(40, 10.0)))
    both = {run: sum(15.0 < at < 75.0 for at in times) for run, times in starts.items()}
    assert both["large"] / both["small"] == pytest.approx(3.0, rel=0.15), "while both want more than there is"


def test_a_quota_that_is_cut_to_a_tenth_while_a_thousand_wait_is_kept() -> None:
    starts: list[float] = []

    async def test(harness: Harness) -> None:
        waiting = [asyncio.create_task(harness.use("search", 0.1, starts.append)) for _ in range(1000)]
        await asyncio.sleep(15.0)
        harness.quotas.add(Quota("search", requests=Rate(10, 10.0)))
        await asyncio.sleep(100.0)
        harness.quotas.add(Quota("search", requests=Rate(1000, 10.0)))
        await asyncio.gather(*waiting)

    at_desk(test, Quota("search", requests=Rate(100, 10.0)))
    assert len(starts) == 1000
    before = [at for at in starts if at < 15.0]
    cut = [at for at in starts if 15.0 < at < 115.0]
    assert len(before) == 200 and most_within(before, 10.0 - 1e-6) == 100
    assert most_within([at for at in starts if at < 115.0 and at > 20.2], 10.0 - 1e-6) == 10
    counted = [sum(begin < at <= begin + 11.0 for at in cut) for begin in range(20, 104, 11)]
    assert all(count >= 10 for count in counted), "in every window, and the time of a request, all of it is used"


# ---- an API that says no -------------------------------------------------------------------------------------------


class Limiter:
    """An API that counts by itself, in the seconds before each request, and has its own idea of what it allows."""

    def __init__(self, harness: Harness, allowed: int, window_s: float, retry_after_s: float | None) -> None:
        self.allowed = allowed
        self.let_through: list[float] = []
        self.refused: list[float] = []
        self._desk = harness
        self._window_s = window_s
        self._retry_after_s = retry_after_s

    async def request(self) -> bool:
        """One call through the quota; returns the response."""
        ticket = self._desk.request("search")
        await asyncio.shield(ticket.started)
        action = ticket.action.id
        try:
            await asyncio.sleep(0.02)
            fine = self._enter(asyncio.get_running_loop().time())
            await asyncio.sleep(0.02)
            advice = RateLimitAdvice() if fine else RateLimitAdvice(refused=True, wait_s=self._retry_after_s)
            self._desk.quotas.advise("search", advice, self._desk.quotas.granted_at(action))
        finally:
            self._desk.quotas.release(action)
            await asyncio.shield(ticket.settled)
        return fine

    def _enter(self, now: float) -> bool:
        recent = sum(at > now - self._window_s for at in self.let_through[-self.allowed :])
        fine = recent < self.allowed
        (self.let_through if fine else self.refused).append(now)
        return fine


@contextlib.asynccontextmanager
async def saturated(limiter: Limiter, askers: int) -> AsyncIterator[None]:
    """More calls than the quota admits, without end."""

    async def ask() -> None:
        while True:
            await limiter.request()

    tasks = [asyncio.create_task(ask()) for _ in range(askers)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("part", "window_s", "retry_after"),
    [(0.1, 1.0, None), (0.1, 60.0, None), (0.1, 10.0, 0.2), (0.1, 10.0, 1.0), (0.5, 10.0, None)],
)
def test_an_api_that_cuts_its_rate_is_used_for_the_rest_and_probed_for_more(
    part: float, window_s: float, retry_after: float | None
) -> None:
    """`retry_after` is in windows."""
    units = 100
    allowed = round(part * units)

    async def test(harness: Harness) -> None:
        limiter = Limiter(harness, units, window_s, None if retry_after is None else retry_after * window_s)
        async with saturated(limiter, 2 * units):
            await asyncio.sleep(2.5 * window_s)
            assert not limiter.refused
            limiter.allowed, before = allowed, len(limiter.let_through)
            await asyncio.sleep(10.0 * window_s)
            used = (len(limiter.let_through) - before) / (10 * allowed)
            assert 0.75 <= used <= 1.01, "of what it allows, over ten windows"
            assert len(limiter.refused) <= units - allowed + 5, "what it could not take when it changed, and a few"
            refused = len(limiter.refused)
            await asyncio.sleep(20.0 * window_s)
            assert 0 < len(limiter.refused) - refused <= 0.02 * 20 * allowed + 5, "a few show where the limit is"
            limiter.allowed, refused = units, len(limiter.refused)
            await asyncio.sleep(25.0 * window_s)
            before = len(limiter.let_through)
            await asyncio.sleep(4.0 * window_s)
            assert len(limiter.let_through) - before >= 3 * units, "all of it is used again"
            assert len(limiter.refused) == refused

    at_desk(test, Quota("search", requests=Rate(units, window_s)))


def test_a_retry_after_outlives_the_quota_that_it_was_received_for() -> None:
    starts: list[float] = []

    async def test(harness: Harness) -> None:
        harness.quotas.advise("search", RateLimitAdvice(refused=True, wait_s=20.0))
        harness.quotas.add(Quota("search", requests=Rate(5, 10.0)))
        waiting = [asyncio.create_task(harness.use("search", 0.1, starts.append)) for _ in range(60)]
        await asyncio.gather(*waiting)
        harness.quotas.add(Quota("search", requests=Rate(7, 10.0)))
        assert harness.scheduler.statistics().pools["search/requests"]["total"] == 7, "the last complaint was long ago"

    at_desk(test, Quota("search", requests=Rate(100, 10.0)))
    assert min(starts) >= 20.0, "the pause stays"
    assert sum(at < 30.0 for at in starts) == 3, "then a part is used"
    assert most_within(starts, 10.0 - 1e-6) == 5, "of the new quota, and never of the old one"


def test_a_long_pause_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test(harness: Harness) -> None:
        with caplog.at_level(logging.WARNING, logger="tangram"):
            harness.quotas.advise("search", RateLimitAdvice(refused=True, wait_s=1.0))
            assert not caplog.messages, "a second is nothing to speak of"
            for _ in range(50):
                harness.quotas.advise("search", RateLimitAdvice(refused=True, wait_s=1800.0))
        assert len(caplog.messages) == 1
        assert "search" in caplog.messages[0] and "1800 s" in caplog.messages[0]

    at_desk(test, Quota("search", concurrent=5))


def test_a_complaint_pauses_all_calls_for_a_while_and_the_quota_recovers() -> None:
    starts: list[float] = []

    async def test(harness: Harness) -> None:
        waiting = [asyncio.create_task(harness.use("search", 0.1, starts.append)) for _ in range(2000)]
        await asyncio.sleep(12.0)
        harness.quotas.advise("search", RateLimitAdvice(refused=True, wait_s=20.0))
        await asyncio.gather(*waiting)

    at_desk(test, Quota("search", requests=Rate(100, 10.0)))
    rates = [sum(begin <= at < begin + 10.0 for at in starts) for begin in range(0, 130, 10)]
    assert rates[:2] == [100, 100], "before"
    assert sum(12.0 < at < 32.0 for at in starts) == 0, "as long as it asked for"
    assert 60 <= rates[4] <= 80, "then a part"
    assert rates[12] >= 95, "and in the end all of it"


# ---- holders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["cancellation", "deadline"])
def test_a_hold_that_is_stopped_stays_held_until_its_holder_leaves(by: str) -> None:
    async def test(harness: Harness) -> None:
        ticket = harness.request("judge", deadline_s=5.0 if by == "deadline" else None)
        await ticket.started
        if by == "cancellation":
            harness.orchestrator.cancel(ticket.action.id)
        await asyncio.sleep(10.0)
        pools = harness.scheduler.statistics().pools
        assert (pools["judge"]["held"], ticket.settled.done()) == (1, False)
        harness.quotas.release(ticket.action.id)
        expected = Status.CANCELLED if by == "cancellation" else Status.TIMED_OUT
        assert (await harness.orchestrator.wait_settled(ticket)).outcome.status is expected
        assert harness.scheduler.statistics().pools["judge"]["held"] == 0
        harness.quotas.release(ticket.action.id)

    at_desk(test, Quota("judge", concurrent=4, requests=Rate(10, 1.0)))


def test_what_waits_is_stopped_at_once() -> None:
    async def test(harness: Harness) -> None:
        holding, waiting, late = (
            harness.request("judge"),
            harness.request("judge"),
            harness.request("judge", deadline_s=3.0),
        )
        await holding.started
        harness.orchestrator.cancel(waiting.action.id)
        assert (await harness.orchestrator.wait_settled(waiting)).outcome.status is Status.CANCELLED
        assert (await harness.orchestrator.wait_settled(late)).outcome.status is Status.TIMED_OUT
        assert asyncio.get_running_loop().time() == pytest.approx(3.0)
        harness.quotas.release(holding.action.id)

    at_desk(test, Quota("judge", concurrent=1))


def test_what_is_not_sent_at_once_counts_from_its_end() -> None:
    sent: list[float] = []

    async def test(harness: Harness) -> None:
        async def one_by_one(gap_s: float) -> None:
            ticket = harness.request("search", requests=10, at_once=False)
            await ticket.started
            for _ in range(10):
                sent.append(asyncio.get_running_loop().time())
                await asyncio.sleep(gap_s)
            harness.quotas.release(ticket.action.id)

        await asyncio.gather(*(one_by_one(gap_s) for gap_s in (6.0, 0.01, 2.0, 0.01)))

    at_desk(test, Quota("search", requests=Rate(10, 30.0)))
    assert len(sent) == 40
    assert most_within(sent, 30.0 - 1e-6) == 10


def test_holders_of_a_quota_are_ended_at_shutdown() -> None:
    tickets: list[ActionTicket] = []

    async def test(harness: Harness) -> None:
        tickets.extend(harness.request("search", deadline_s=deadline_s) for deadline_s in (1.0, None, None, None, None))
        await tickets[0].started
        await asyncio.sleep(2.0)
        assert not tickets[0].settled.done(), "it was stopped, and is still held"

    at_desk(test, Quota("search", concurrent=2))
    statuses = [ticket.settled.result().outcome.status for ticket in tickets]
    assert statuses == [Status.TIMED_OUT, *[Status.CANCELLED] * 4]


def test_what_cannot_be_meant_is_refused() -> None:
    for make in (
        lambda: Quota("search"),
        lambda: Quota("a/b", concurrent=1),
        lambda: Quota("cpu", concurrent=1),
        lambda: Quota("search", concurrent=0),
        lambda: Quota("search", requests=5),  # type: ignore[arg-type]
        lambda: Rate(0, 1.0),
        lambda: Rate(1, 0.0),
    ):
        with pytest.raises(InvalidConfig):
            make()
    judge = Quota("judge", concurrent=2, tokens=Rate(100, 1.0))
    for asked in ({"requests": 0}, {"requests": 3, "tokens": 1}, {"tokens": 0}, {"tokens": 101}, {"tokens": 1.5}):
        with pytest.raises(InvalidAction):
            judge.demand(**asked)  # type: ignore[arg-type]
    with pytest.raises(InvalidAction, match="counts no tokens"):
        Quota("search", concurrent=1).demand(tokens=5)


def test_a_quota_of_another_kind_does_not_replace_one() -> None:
    async def test(harness: Harness) -> None:
        with pytest.raises(InvalidConfig, match="same kinds of limits"):
            harness.quotas.add(Quota("search", requests=Rate(5, 1.0)))
        with pytest.raises(InvalidAction, match="one of 'search'"):
            harness.request("serach")
        harness.quotas.add(Quota("judge", concurrent=1))
        await harness.use("judge", 1.0)

    at_desk(test, Quota("search", concurrent=2))
