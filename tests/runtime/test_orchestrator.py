"""The orchestrator on a fake manager: every way that an action can end, and what its caller gets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tangram.core.action import Action, Status, Usage
from tangram.core.demand import CPU, Demand, cores, fixed, learned
from tangram.core.limits import Limits
from tangram.core.messages import Effect, Event, Finished, Grant, Pool, Settle, Start, Used
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.errors import AdmissionRefused, InvariantError, ManagerError
from tangram.managers.base import Lease
from tangram.managers.fake import FakeManager, FakeScript
from tangram.managers.work import Close, Exec, HoldGrant, Open, SandboxSpec, Work
from tangram.processes.streams import Output
from tangram.runtime.orchestrator import MEASURE_FIRST_S, ActionTicket, Orchestrator, SettledAction

DEADLINE_S = 60.0


class Rig:
    """An orchestrator with one node of two cores, and a sandbox that is open."""

    def __init__(
        self, scripts: dict[str, FakeScript] | None = None, *, manager: type[FakeManager] = FakeManager, **limits: Any
    ) -> None:
        self.manager = manager(scripts or {}, cores=2)
        pools = self.manager.pools()
        self.node = pools[0].node
        self.scheduler = Scheduler(policy("adaptive"), pools, limits=Limits(**limits))
        self.observed: list[tuple[Event, list[Effect]]] = []
        self.orchestrator = Orchestrator(self.scheduler, {self.node: self.manager}, observers=[self._observe])
        self._number = 0

    def _observe(self, now: float, event: Event, effects: list[Effect]) -> None:
        self.observed.append((event, list(effects)))

    async def open(self) -> None:
        action = Action(id="open", demand=Demand({CPU: cores(1)}), sandbox="box", kind="open")
        settled = await self.orchestrator.wait_settled(self.orchestrator.submit(action, Open(spec=SandboxSpec())))
        assert settled.outcome.status is Status.SUCCEEDED

    def submit(self, key: str = "", *, cpus: float | None = 1, command: str = "echo hi", **fields: Any) -> ActionTicket:
        self._number += 1
        demand = Demand({CPU: learned() if cpus is None else cores(cpus)})
        action = Action(id=f"a{self._number}", demand=demand, sandbox="box", key=key, **fields)
        return self.orchestrator.submit(action, Exec(command=command))

    async def run(self, key: str = "", **fields: Any) -> SettledAction:
        return await self.orchestrator.wait_settled(self.submit(key, **fields))

    def events(self, kind: type) -> list[Any]:
        return [event for event, _ in self.observed if isinstance(event, kind)]


def with_rig(test: Callable[[Rig], Awaitable[None]], rig: Callable[[], Rig] = Rig) -> Rig:
    """The test inside the orchestrator, with a sandbox that is open; then everything must have settled."""

    async def main() -> Rig:
        made = rig()
        async with asyncio.timeout(DEADLINE_S):
            async with made.orchestrator:
                await made.open()
                await test(made)
        made.scheduler.check()
        statistics = made.scheduler.statistics()
        assert statistics.waiting == statistics.holding == 0
        return made

    return asyncio.run(main())


def test_an_action_runs_and_its_caller_gets_what_came_of_it() -> None:
    async def test(rig: Rig) -> None:
        settled = await rig.run(command="echo hello; exit 3")
        assert settled.outcome.status is Status.SUCCEEDED
        assert settled.executed is not None
        assert (settled.executed.exit_code, settled.executed.stdout) == (3, b"hello\n")

    rig = with_rig(test)
    assert [type(event).__name__ for event, _ in rig.observed][-3:] == ["Submit", "Started", "Finished"]


def test_an_observer_sees_every_event_until_it_is_removed() -> None:
    async def test(rig: Rig) -> None:
        events: list[Event] = []
        before = len(rig.observed)
        remove = rig.orchestrator.observe(lambda now, event, effects: events.append(event))
        await rig.run()
        assert events == [event for event, _ in rig.observed[before:]]
        remove()
        remove()
        count = len(events)
        await rig.run()
        assert len(events) == count

    with_rig(test)


def test_actions_that_do_not_fit_wait_their_turn() -> None:
    async def test(rig: Rig) -> None:
        tickets = [rig.submit("held", cpus=1) for _ in range(3)]
        await tickets[0].started
        await tickets[1].started
        assert not tickets[2].started.done()
        assert not tickets[2].settled.done()
        rig.orchestrator.cancel("a1")
        assert (await rig.orchestrator.wait_settled(tickets[0])).outcome.status is Status.CANCELLED
        await tickets[2].started

    with_rig(test, lambda: Rig({"held": FakeScript(ends=False)}))


def test_a_timeout_stops_the_action_and_is_reported_as_one() -> None:
    async def test(rig: Rig) -> None:
        settled = await rig.run("held", timeout_s=0.01)
        assert settled.outcome.status is Status.TIMED_OUT
        assert [call.method for call in rig.manager.calls if call.subject == "a1"] == ["start", "stop", "ended"]

    with_rig(test, lambda: Rig({"held": FakeScript(ends=False)}))


def test_what_is_stopping_holds_its_units_until_nothing_is_left() -> None:
    async def test(rig: Rig) -> None:
        slow = rig.submit("slow", cpus=2)
        await slow.started
        rig.orchestrator.cancel("a1")
        following = rig.submit(cpus=2)
        await rig.orchestrator.wait_settled(following)
        order = [call.method for call in rig.manager.calls if call.subject in ("a1", "a2")]
        assert order.index("ended") < order.index("start", 1)

    with_rig(test, lambda: Rig({"slow": FakeScript(ends=False, stop_s=0.05)}))


def test_a_start_that_fails_is_tried_again_and_then_given_up() -> None:
    async def test(rig: Rig) -> None:
        assert (await rig.run("flaky")).outcome.attempts == 3
        given_up = (await rig.run("broken")).outcome
        assert given_up.status is Status.LOST and "start failed 3 times" in given_up.reason

    with_rig(test, lambda: Rig({"flaky": FakeScript(start_failures=2), "broken": FakeScript(start_failures=9)}))


def test_what_our_side_lost_runs_again_only_if_it_may() -> None:
    async def test(rig: Rig) -> None:
        lost = (await rig.run("lost")).outcome
        assert (lost.status, lost.attempts) == (Status.LOST, 1)
        again = (await rig.run("lost", idempotent=True)).outcome
        assert (again.status, again.attempts) == (Status.LOST, 3)

    with_rig(test, lambda: Rig({"lost": FakeScript(ends=False, lost_after_s=0.001)}))


def test_a_caller_that_is_cancelled_cancels_the_action_and_waits_for_its_end() -> None:
    async def test(rig: Rig) -> None:
        task = asyncio.create_task(rig.run("slow"))
        await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert rig.scheduler.statistics().settled["cancelled"] == 1

    with_rig(test, lambda: Rig({"slow": FakeScript(ends=False, stop_s=0.05)}))


def test_leaving_ends_all_that_is_under_way() -> None:
    tickets: list[ActionTicket] = []

    async def test(rig: Rig) -> None:
        tickets.extend(rig.submit("held") for _ in range(5))
        await tickets[0].started

    with_rig(test, lambda: Rig({"held": FakeScript(ends=False)}))
    assert {ticket.settled.result().outcome.status for ticket in tickets} == {Status.CANCELLED}


def test_nothing_is_taken_in_while_it_closes() -> None:
    async def test(rig: Rig) -> None:
        pass

    rig = with_rig(test)

    async def late() -> None:
        rig.submit()

    with pytest.raises(AdmissionRefused, match="closing"):
        asyncio.run(late())


def test_a_refusal_settles_the_action_with_its_reason() -> None:
    async def test(rig: Rig) -> None:
        refused = (await rig.run(cpus=64)).outcome
        assert refused.status is Status.REFUSED and "64 cores" in refused.reason
        second = Action(id="second", demand=Demand({CPU: cores(1)}), sandbox="second", kind="open")
        with pytest.raises(AdmissionRefused, match="sandboxes"):
            rig.orchestrator.submit(second, Open(spec=SandboxSpec()))

    with_rig(test, lambda: Rig(sandboxes_max=1))


def test_an_id_that_is_live_is_not_taken_twice() -> None:
    async def test(rig: Rig) -> None:
        ticket = rig.submit("held")
        with pytest.raises(AdmissionRefused, match="already live"):
            rig.orchestrator.submit(ticket.action, Exec(command="true"))

    with_rig(test, lambda: Rig({"held": FakeScript(ends=False)}))


def test_an_undeclared_demand_is_measured_while_it_runs() -> None:
    async def test(rig: Rig) -> None:
        await rig.run("idle", cpus=None)
        await rig.run("idle", cpus=1)

    script = FakeScript(duration_s=MEASURE_FIRST_S * 1.5, usage=Usage(cpu_s=0.003))
    rig = with_rig(test, lambda: Rig({"idle": script}))
    assert [event.action for event in rig.events(Used)] == ["a1"]
    assert rig.events(Used)[0].cpu_s == pytest.approx(0.002, abs=0.001)


def test_files_are_those_of_the_node_where_the_sandbox_is() -> None:
    async def test(rig: Rig) -> None:
        assert rig.orchestrator.manager_of("box") is rig.manager
        with pytest.raises(ManagerError, match="no sandbox other"):
            rig.orchestrator.manager_of("other")
        action = Action(id="close", demand=Demand({CPU: cores(1)}), sandbox="box", kind="close")
        await rig.orchestrator.wait_settled(rig.orchestrator.submit(action, Close()))
        with pytest.raises(ManagerError, match="no sandbox box"):
            rig.orchestrator.manager_of("box")

    with_rig(test)


def test_a_bug_in_the_scheduler_reaches_every_waiter_and_every_context() -> None:
    tasks: list[asyncio.Task[SettledAction]] = []

    async def main() -> None:
        rig = Rig({"held": FakeScript(ends=False)})
        async with rig.orchestrator:
            await rig.open()
            waiting = asyncio.create_task(rig.run("held"))
            await asyncio.sleep(0.01)

            def broken(event: Event, now: float) -> list[Effect]:
                raise InvariantError("the books do not add up")

            rig.scheduler.handle = broken  # type: ignore[method-assign]
            with pytest.raises(InvariantError, match="books"):
                rig.submit()
            tasks.append(waiting)
            await asyncio.sleep(DEADLINE_S)

    with pytest.raises(InvariantError, match="books"):
        asyncio.run(main())
    assert isinstance(tasks[0].exception(), InvariantError)


def test_what_the_caller_raises_comes_out_as_it_is() -> None:
    async def test(rig: Rig) -> None:
        rig.submit("held")
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        with_rig(test, lambda: Rig({"held": FakeScript(ends=False)}))


def test_every_start_is_answered_by_one_end() -> None:
    async def test(rig: Rig) -> None:
        tickets = [rig.submit(("", "flaky", "lost")[n % 3], cpus=(None, 1, 0.5)[n % 3]) for n in range(60)]
        for ticket in tickets[::7]:
            rig.orchestrator.cancel(ticket.action.id)
        for ticket in tickets:
            await rig.orchestrator.wait_settled(ticket)

    scripts = {"flaky": FakeScript(start_failures=1), "lost": FakeScript(duration_s=0.01, lost_after_s=0.001)}
    rig = with_rig(test, lambda: Rig(scripts))
    started = [effect.action.id for _, effects in rig.observed for effect in effects if isinstance(effect, Start)]
    settled = [effect.outcome.action for _, effects in rig.observed for effect in effects if isinstance(effect, Settle)]
    assert len(settled) == len(set(settled)) == 61
    assert len(rig.events(Finished)) <= len(started)


# ---- executors -----------------------------------------------------------------------------------------------------


class SlowToStart:
    """An executor whose start never returns, and records when it was cancelled."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.starts = 0
        self.given_up = 0

    def pools(self) -> tuple[Pool, ...]:
        return (Pool(kind="slow", total=1),)

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        self.starts += 1
        self.begun.set()
        try:
            await asyncio.sleep(3600.0)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        raise AssertionError("the wait was not cancelled")

    async def __aenter__(self) -> SlowToStart:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


def test_an_action_that_is_stopped_while_its_executor_starts_it_does_not_wait_for_that() -> None:
    async def main() -> None:
        slow = SlowToStart()
        scheduler = Scheduler(policy("adaptive"), slow.pools())
        orchestrator = Orchestrator(scheduler, {}, {HoldGrant: slow})
        demand = Demand({"slow": fixed(1)})
        async with asyncio.timeout(DEADLINE_S), orchestrator:
            ticket = orchestrator.submit(Action(id="a", demand=demand), HoldGrant())
            await slow.begun.wait()
            orchestrator.cancel("a")
            assert (await orchestrator.wait_settled(ticket)).outcome.status is Status.CANCELLED
            late = orchestrator.submit(Action(id="b", demand=demand, deadline_s=0.05), HoldGrant())
            assert (await orchestrator.wait_settled(late)).outcome.status is Status.TIMED_OUT
            slow.begun.clear()
            orchestrator.submit(Action(id="c", demand=demand), HoldGrant())
            await slow.begun.wait()
        assert slow.given_up == slow.starts, "leaving ends what has not started as well"
        scheduler.check()

    asyncio.run(main())


class Buggy(FakeManager):
    """A manager with a bug."""

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        if action.key == "found":
            raise ValueError("a digit too many")
        return await super().start(action, grant, work, output)


def test_a_bug_in_a_manager_costs_only_the_action_that_hit_it(caplog: pytest.LogCaptureFixture) -> None:
    async def test(rig: Rig) -> None:
        other = rig.submit("held")
        lost = await rig.run("found")
        assert lost.outcome.status is Status.LOST and "bug" in lost.outcome.reason
        assert (await rig.orchestrator.wait_settled(other)).outcome.status is Status.SUCCEEDED

    with_rig(test, lambda: Rig({"held": FakeScript(duration_s=0.02)}, manager=Buggy))
    assert "a digit too many" in caplog.text


def slowed_openings(rig: Rig) -> tuple[asyncio.Event, asyncio.Event]:
    """Set when a sandbox is being opened, and to be set so that it goes on."""
    opening, go_on = asyncio.Event(), asyncio.Event()
    start = rig.manager.start

    async def slowly(action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        if isinstance(work, Open):
            opening.set()
            await go_on.wait()
        return await start(action, grant, work, output)

    rig.manager.start = slowly  # type: ignore[method-assign]
    return opening, go_on


def test_a_closing_comes_after_the_opening_that_is_under_way_and_leaves_nothing() -> None:
    async def test(rig: Rig) -> None:
        opening, go_on = slowed_openings(rig)
        demand = Demand({CPU: cores(1)})
        opened = rig.orchestrator.submit(
            Action(id="o", demand=demand, sandbox="late", kind="open"), Open(spec=SandboxSpec())
        )
        await opening.wait()
        closed = rig.orchestrator.submit(Action(id="c", demand=demand, sandbox="late", kind="close"), Close())
        rig.orchestrator.cancel("c")
        assert not closed.settled.done()
        go_on.set()
        for ticket in (opened, closed):
            assert (await rig.orchestrator.wait_settled(ticket)).outcome.status is Status.SUCCEEDED
        with pytest.raises(ManagerError, match="no sandbox late"):
            await rig.manager.list("late", ".")
        assert list(rig.scheduler.sandboxes.by_id) == ["box"]

    with_rig(test)


def test_a_closing_comes_after_an_opening_that_waits_for_its_turn() -> None:
    async def test(rig: Rig) -> None:
        held = rig.submit("held", cpus=2)
        await held.started
        demand = Demand({CPU: cores(1)})
        opened = rig.orchestrator.submit(
            Action(id="o", demand=demand, sandbox="late", kind="open"), Open(spec=SandboxSpec())
        )
        closed = rig.orchestrator.submit(Action(id="c", demand=demand, sandbox="late", kind="close"), Close())
        rig.orchestrator.cancel("a1")
        for ticket in (opened, closed):
            assert (await rig.orchestrator.wait_settled(ticket)).outcome.status is Status.SUCCEEDED
        with pytest.raises(ManagerError, match="no sandbox late"):
            await rig.manager.list("late", ".")
        assert list(rig.scheduler.sandboxes.by_id) == ["box"]

    with_rig(test, lambda: Rig({"held": FakeScript(ends=False)}))
