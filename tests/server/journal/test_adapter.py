"""The orchestrator with a journal: the order of records, and what a pause leaves to the next owner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tangram.core.action import Action, Status
from tangram.core.demand import CPU, Demand, cores
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.errors import AdmissionRefused, ManagerError
from tangram.managers.fake import FakeManager, FakeScript
from tangram.managers.work import Close, Exec, Open, SandboxSpec, Work
from tangram.runtime.orchestrator import ActionTicket, Orchestrator, SettledAction

DEADLINE_S = 60.0


class Noting:
    """A memory that can be made to wait or to fail, and knows what the manager had done by then."""

    def __init__(self, manager: FakeManager) -> None:
        self.manager = manager
        self.recorded: list[tuple[str, str]] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.failure: Exception | None = None

    async def record_start(self, ticket: ActionTicket) -> None:
        await self._note("starting", ticket)
        assert self.done(ticket, "start") < ticket.attempt, "it was launched before it was written down"

    async def record_settled(self, ticket: ActionTicket, settled: SettledAction) -> SettledAction:
        assert not ticket.settled.done(), "its caller was notified before it was recorded"
        await self._note(settled.outcome.status.value, ticket)
        return settled

    async def _note(self, what: str, ticket: ActionTicket) -> None:
        await self.go_on.wait()
        if self.failure is not None:
            raise self.failure
        self.recorded.append((ticket.action.id, what))

    def done(self, ticket: ActionTicket, what: str) -> int:
        return sum(call.method == what and call.subject == ticket.action.id for call in self.manager.calls)


class Rig:
    def __init__(self, scripts: dict[str, FakeScript] | None = None) -> None:
        self.manager = FakeManager(scripts or {}, cores=2)
        self.scheduler = Scheduler(policy("adaptive"), self.manager.pools())
        self.memory = Noting(self.manager)
        self.orchestrator = Orchestrator(self.scheduler, {"fake": self.manager}, journal=self.memory)

    def submit(self, id: str, work: Work, *, key: str = "", cpus: float = 1, sandbox: str = "box") -> ActionTicket:
        action = Action(id=id, demand=Demand({CPU: cores(cpus)}), sandbox=sandbox, key=key)
        return self.orchestrator.submit(action, work)

    async def run(self, id: str, work: Work, **options: Any) -> SettledAction:
        return await self.orchestrator.wait_settled(self.submit(id, work, **options))

    async def open(self) -> None:
        assert (await self.run("open", OPEN)).outcome.status is Status.SUCCEEDED


OPEN, TRUE = Open(spec=SandboxSpec()), Exec(command="true")
HELD = {"held": FakeScript(ends=False)}


def play(test: Callable[[Rig], Awaitable[None]], scripts: dict[str, FakeScript] | None = None) -> Rig:
    async def main() -> Rig:
        rig = Rig(scripts)
        async with asyncio.timeout(DEADLINE_S), rig.orchestrator:
            await rig.open()
            await test(rig)
        return rig

    return asyncio.run(main())


def test_a_start_is_recorded_before_it_is_made_and_an_end_before_it_is_announced() -> None:
    async def test(rig: Rig) -> None:
        rig.memory.go_on.clear()
        ticket = rig.submit("a", TRUE)
        await asyncio.sleep(0.01)
        assert rig.memory.done(ticket, "start") == 0
        rig.memory.go_on.set()
        await rig.orchestrator.wait_settled(ticket)
        assert rig.memory.recorded[-2:] == [("a", "starting"), ("a", "succeeded")]

    play(test)


def test_every_attempt_is_written_down() -> None:
    async def test(rig: Rig) -> None:
        await rig.run("a", TRUE, key="flaky")
        assert [what for id, what in rig.memory.recorded if id == "a"] == [
            "starting",
            "starting",
            "starting",
            "succeeded",
        ]

    play(test, {"flaky": FakeScript(start_failures=2)})


def test_a_memory_that_fails_at_a_start_ends_everything_and_starts_nothing() -> None:
    rigs: list[Rig] = []

    async def test(rig: Rig) -> None:
        rigs.append(rig)
        rig.memory.failure = ManagerError("the disk is full")
        await rig.run("a", TRUE)

    with pytest.raises(ManagerError, match="disk is full"):
        play(test)
    assert not any(call.method == "start" and call.subject == "a" for call in rigs[0].manager.calls)


def test_a_journal_that_fails_at_an_end_fails_the_waiters() -> None:
    async def test(rig: Rig) -> None:
        ticket = rig.submit("a", TRUE, key="held")
        await ticket.started
        rig.memory.failure = ManagerError("the disk is full")
        rig.orchestrator.cancel("a")
        with pytest.raises(ManagerError, match="disk is full"):
            await asyncio.shield(ticket.settled)
        raise LookupError("told")

    with pytest.raises((LookupError, ManagerError)):
        play(test, HELD)


def test_an_id_is_taken_until_its_end_is_written_down() -> None:
    async def test(rig: Rig) -> None:
        ticket = rig.submit("a", TRUE, key="held")
        await ticket.started
        rig.memory.go_on.clear()
        rig.orchestrator.cancel("a")
        await asyncio.sleep(0.01)
        with pytest.raises(AdmissionRefused, match="already live"):
            rig.submit("a", TRUE)
        rig.memory.go_on.set()
        assert (await rig.orchestrator.wait_settled(ticket)).outcome.status is Status.CANCELLED

    play(test, HELD)


# ---- a pause ------------------------------------------------------------------------------------------------------


def test_a_pause_lets_what_runs_end_and_leaves_what_waits_to_the_memory() -> None:
    tickets: list[ActionTicket] = []

    async def test(rig: Rig) -> None:
        tickets.extend(rig.submit(f"a{n}", TRUE, key="short") for n in range(6))
        await tickets[0].started
        assert await rig.orchestrator.drain(DEADLINE_S) == 0
        with pytest.raises(AdmissionRefused, match="closing"):
            rig.submit("late", TRUE)

    rig = play(test, {"short": FakeScript(duration_s=0.02)})
    succeeded = {id for id, what in rig.memory.recorded if what == "succeeded"} - {"open"}
    begun = {id for id, what in rig.memory.recorded if what == "starting"} - {"open"}
    assert succeeded == begun and 0 < len(succeeded) < 6, "what was begun was not let end, or everything was begun"
    for ticket in tickets:
        if ticket.action.id not in succeeded:
            with pytest.raises(ManagerError, match="continues when it is back"):
                ticket.settled.result()


def test_a_pause_waits_no_longer_than_its_limit_and_settles_nothing_that_still_runs() -> None:
    async def test(rig: Rig) -> None:
        ticket = rig.submit("a", TRUE, key="held")
        await ticket.started
        assert await rig.orchestrator.drain(0.01) == 1

    rig = play(test, HELD)
    assert [what for id, what in rig.memory.recorded if id == "a"] == ["starting"]


# ---- sandboxes ----------------------------------------------------------------------------------------------------


def test_a_sandbox_that_could_not_be_opened_gives_its_memory_back() -> None:
    async def test(rig: Rig) -> None:
        missing = Open(spec=SandboxSpec(image="none", memory_bytes=12 << 30))
        for n in range(3):  # together more than there is
            with pytest.raises(Exception, match="none"):
                await rig.run(f"open{n}", missing, sandbox=f"other{n}")
        assert (await rig.run("large", Open(spec=SandboxSpec(memory_bytes=12 << 30)), sandbox="large")).outcome.status

    play(test)


def test_a_sandbox_is_gone_when_its_closing_has_settled_in_any_status() -> None:
    async def test(rig: Rig) -> None:
        both = [rig.submit(f"held{n}", TRUE, key="held") for n in range(2)]
        for ticket in both:
            await ticket.started
        action = Action(
            id="close", demand=Demand({CPU: cores(1)}), sandbox="box", kind="close", deadline_s=0.01, idempotent=True
        )
        settled = await rig.orchestrator.wait_settled(rig.orchestrator.submit(action, Close()))
        assert settled.outcome.status is not Status.SUCCEEDED, "there was no core for it"
        with pytest.raises(ManagerError, match="no sandbox"):
            rig.orchestrator.manager_of("box")
        assert (await rig.run("again", Close())).outcome.status is Status.SUCCEEDED

    play(test, HELD)
