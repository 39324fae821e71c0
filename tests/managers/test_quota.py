"""Quotas as pools: what an API allows is granted, and never more in any stretch of time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from tangram.clock import VirtualLoop
from tangram.core.action import Action, Status
from tangram.core.demand import Demand
from tangram.core.messages import RunChanged
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.errors import InvalidAction, InvalidConfig
from tangram.managers.pace import Advice
from tangram.managers.quota import Quota, QuotaManager, Rate
from tangram.managers.work import Hold
from tangram.service.orchestrator import Orchestrator, Settled, Ticket


class Desk:
    """An orchestrator that has quotas alone, on virtual time."""

    def __init__(self, *quotas: Quota) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.quotas = QuotaManager(quotas, lambda event: self.orchestrator.tell(event))
        self.scheduler = Scheduler(policy("adaptive"), self.quotas.pools())
        self.orchestrator = Orchestrator(self.scheduler, {}, {Hold: self.quotas}, clock=loop.clock)
        self._number = 0

    def ask(self, name: str, *, requests: int = 1, tokens: int = 0, run: str = "default") -> Ticket:
        self._number += 1
        demand = Demand(self.quotas.get(name).demand(requests=requests, tokens=tokens))
        action = Action(id=f"a{self._number}", demand=demand, run=run, kind="quota")
        return self.orchestrator.submit(action, Hold())

    async def use(
        self, name: str, seconds: float, on_start: Callable[[float], object] = lambda at: None,
        *, requests: int = 1, tokens: int = 0, spent: dict[str, int] | None = None, run: str = "default",
    ) -> Settled:  # fmt: skip
        ticket = self.ask(name, requests=requests, tokens=tokens, run=run)
        await ticket.started
        on_start(asyncio.get_running_loop().time())
        await asyncio.sleep(seconds)
        self.quotas.let_go(ticket.action.id, spent)
        return await self.orchestrator.settle(ticket)


def at_desk(test: Callable[[Desk], Awaitable[None]], *quotas: Quota) -> None:
    async def main() -> None:
        desk = Desk(*quotas)
        async with desk.orchestrator:
            await test(desk)
        desk.scheduler.check()
        statistics = desk.scheduler.statistics()
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

    async def test(desk: Desk) -> None:
        async def one() -> None:
            nonlocal under_way, most

            def started(_: float) -> None:
                nonlocal under_way, most
                under_way += 1
                most = max(most, under_way)

            await desk.use("search", 1.0, started)
            under_way -= 1

        await asyncio.gather(*(one() for _ in range(50)))
        assert asyncio.get_running_loop().time() == pytest.approx(10.0, rel=0.01)

    at_desk(test, Quota("search", concurrent=5))
    assert most == 5


def test_no_stretch_of_a_window_sees_more_requests_than_allowed_and_hardly_fewer() -> None:
    arrivals: list[float] = []
    draw = random.Random(3)

    async def test(desk: Desk) -> None:
        async def one() -> None:
            seconds = draw.choice((0.01, 0.2, 3.0))
            await desk.use("search", seconds, lambda at: arrivals.append(at + draw.uniform(0.0, min(seconds, 1.0))))

        await asyncio.gather(*(one() for _ in range(1000)))

    at_desk(test, Quota("search", requests=Rate(100, 30.0)))
    assert most_within(arrivals, 30.0 - 1e-6) <= 100
    assert max(arrivals) <= 9 * 31.0 + 1.5, "ten windows of requests take hardly more than nine windows of time"


def test_a_bucket_is_never_asked_for_more_than_it_has() -> None:
    arrivals: list[float] = []

    async def test(desk: Desk) -> None:
        await asyncio.gather(*(desk.use("search", 0.01, arrivals.append) for _ in range(1000)))

    at_desk(test, Quota("search", requests=Rate(100, 10.0)))
    level, before = 100.0, 0.0
    for at in arrivals:
        level = min(100.0, level + (at - before) * 10.0) - 1.0
        before = at
        assert level > -1e-6
    assert max(arrivals) < 91.0


def test_tokens_are_charged_by_estimate_and_corrected() -> None:
    async def test(desk: Desk) -> None:
        for really in (100, 900):
            await desk.use("judge", 1.0, tokens=500, spent={"judge/tokens": really})
        assert desk.scheduler.statistics().pools["judge/tokens"]["spent"] == 1000
        began = asyncio.get_running_loop().time()
        await desk.use("judge", 1.0, tokens=1)
        assert asyncio.get_running_loop().time() - began > 50.0, "nothing is left of this minute"

    at_desk(test, Quota("judge", tokens=Rate(1000, 60.0)))


def test_an_action_may_use_several_limits_of_an_api_at_once() -> None:
    async def test(desk: Desk) -> None:
        ticket = desk.ask("judge", requests=2, tokens=30)
        await ticket.started
        pools = desk.scheduler.statistics().pools
        assert (pools["judge"]["held"], pools["judge/requests"]["spent"], pools["judge/tokens"]["spent"]) == (2, 2, 30)
        desk.quotas.let_go(ticket.action.id)
        assert (await desk.orchestrator.settle(ticket)).outcome.status is Status.SUCCEEDED

    at_desk(test, Quota("judge", concurrent=4, requests=Rate(10, 1.0), tokens=Rate(100, 1.0)))


def test_runs_share_a_quota_by_weight() -> None:
    starts: dict[str, list[float]] = {"large": [], "small": []}

    async def test(desk: Desk) -> None:
        desk.orchestrator.tell(RunChanged(run="large", weight=3.0))
        await asyncio.gather(
            *(desk.use("search", 0.1, starts[run].append, run=run) for run in starts for _ in range(300))
        )

    at_desk(test, Quota("search", requests=Rate(40, 10.0)))
    both = {run: sum(15.0 < at < 75.0 for at in times) for run, times in starts.items()}
    assert both["large"] / both["small"] == pytest.approx(3.0, rel=0.15), "while both want more than there is"


def test_a_quota_that_is_cut_to_a_tenth_while_a_thousand_wait_is_kept() -> None:
    starts: list[float] = []

    async def test(desk: Desk) -> None:
        waiting = [asyncio.create_task(desk.use("search", 0.1, starts.append)) for _ in range(1000)]
        await asyncio.sleep(15.0)
        assert len(starts) == 200
        desk.quotas.add(Quota("search", requests=Rate(10, 10.0)))
        await asyncio.sleep(100.0)
        assert 90 <= len(starts) - 200 <= 110
        desk.quotas.add(Quota("search", requests=Rate(1000, 10.0)))
        await asyncio.gather(*waiting)

    at_desk(test, Quota("search", requests=Rate(100, 10.0)))
    assert len(starts) == 1000


def test_a_complaint_stops_everybody_for_a_while_and_the_quota_recovers() -> None:
    starts: list[float] = []

    async def test(desk: Desk) -> None:
        waiting = [asyncio.create_task(desk.use("search", 0.1, starts.append)) for _ in range(2000)]
        await asyncio.sleep(12.0)
        desk.quotas.advise("search", Advice(refused=True, wait_s=20.0))
        await asyncio.gather(*waiting)

    at_desk(test, Quota("search", requests=Rate(100, 10.0)))
    rates = [sum(begin <= at < begin + 10.0 for at in starts) for begin in range(0, 130, 10)]
    assert rates[:2] == [100, 100], "before"
    assert sum(12.0 < at < 32.0 for at in starts) == 0, "as long as it asked for"
    assert 60 <= rates[4] <= 80, "then a part"
    assert rates[12] >= 95, "and in the end all of it"


def test_a_hold_that_is_cancelled_gives_back_what_is_held_and_keeps_what_is_spent() -> None:
    async def test(desk: Desk) -> None:
        ticket = desk.ask("judge")
        await ticket.started
        desk.orchestrator.cancel(ticket.action.id)
        assert (await desk.orchestrator.settle(ticket)).outcome.status is Status.CANCELLED
        pools = desk.scheduler.statistics().pools
        assert (pools["judge"]["held"], pools["judge/requests"]["spent"]) == (0, 1)
        desk.quotas.let_go(ticket.action.id)

    at_desk(test, Quota("judge", concurrent=4, requests=Rate(10, 1.0)))


def test_those_who_hold_a_quota_when_all_ends_are_ended_too() -> None:
    tickets: list[Ticket] = []

    async def test(desk: Desk) -> None:
        tickets.extend(desk.ask("search") for _ in range(5))
        await tickets[0].started

    at_desk(test, Quota("search", concurrent=2))
    assert [ticket.settled.result().outcome.status for ticket in tickets] == [Status.CANCELLED] * 5


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
    async def test(desk: Desk) -> None:
        with pytest.raises(InvalidConfig, match="same kinds of limits"):
            desk.quotas.add(Quota("search", requests=Rate(5, 1.0)))
        with pytest.raises(InvalidAction, match="one of 'search'"):
            desk.ask("serach")
        desk.quotas.add(Quota("judge", concurrent=1))
        await desk.use("judge", 1.0)

    at_desk(test, Quota("search", concurrent=2))
