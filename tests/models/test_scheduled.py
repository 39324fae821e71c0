"""Model services under the scheduler: grants, batches, losses and limits as callers see them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
from tests.models.bytes_engine import expected
from tests.models.conftest import DEADLINE_S, SIZE, Flag, devices, own_children, service, until

from tangram.core.action import Action, Status
from tangram.core.demand import GPU, Demand, fixed, one_of
from tangram.core.messages import Effect, Event
from tangram.core.policies import policy
from tangram.core.policies.base import ArrivalOrder, Begin, Decision
from tangram.core.residents import RESTORE_PRIOR_S
from tangram.core.scheduler import Scheduler
from tangram.core.snapshot import Snapshot
from tangram.errors import AdmissionRefused
from tangram.managers.models import Emulated, Infer, ModelManager, Service
from tangram.managers.models import turns as turns_module
from tangram.service.orchestrator import Orchestrator, Settled, Ticket


class Riding(ArrivalOrder):
    """First come, first served, with up to three riders."""

    name = "riding"

    def plan(self, snapshot: Snapshot) -> Iterator[Decision]:
        for candidate in snapshot.candidates():
            entry = candidate.entry
            assert entry.lane is not None
            found = snapshot.waiting_for_service(entry.lane, entry.action.service, 4)
            yield Begin(entry, candidate.node, riders=tuple(other for other in found if other is not entry))


class Desk:
    """An orchestrator with model services alone."""

    def __init__(self, services: Sequence[Service], specs: Sequence[Emulated], decides: Any = None) -> None:
        self.manager = ModelManager(services, specs, lambda event: self.orchestrator.tell(event))
        self.scheduler = Scheduler(decides or policy("adaptive"), self.manager.pools())
        self.orchestrator = Orchestrator(self.scheduler, {}, {Infer: self.manager}, observer=self._observe)
        self.events: list[Event] = []
        self._number = 0

    def _observe(self, now: float, event: Event, effects: list[Effect]) -> None:
        self.events.append(event)

    def submit(self, name: str, payload: bytes = b"x", demand: Any = None, **fields: Any) -> Ticket:
        self._number += 1
        amounts = Demand({GPU: demand or fixed(1)})
        action = Action(id=f"a{self._number}", demand=amounts, service=name, kind="infer", **fields)
        return self.orchestrator.submit(action, Infer(payload=payload))

    async def call(self, name: str, payload: bytes = b"x", demand: Any = None, **fields: Any) -> Settled:
        return await self.orchestrator.settle(self.submit(name, payload, demand, **fields))


def run(desk: Callable[[], Desk], test: Callable[[Desk], Awaitable[None]]) -> Desk:
    async def main() -> Desk:
        made = desk()
        async with asyncio.timeout(DEADLINE_S):
            async with made.orchestrator:
                await test(made)
        made.scheduler.check()
        return made

    made = asyncio.run(main())
    assert own_children() == []
    return made


def test_services_share_few_devices_and_every_answer_is_right() -> None:
    async def test(desk: Desk) -> None:
        names = [number % 5 for number in range(40)]
        ends = await asyncio.gather(*(desk.call(f"s{seed}", demand=one_of(1, 2)) for seed in names))
        for seed, settled in zip(names, ends, strict=True):
            assert settled.outcome.status is Status.SUCCEEDED
            assert settled.answer == expected(seed, SIZE, b"x")
        told = {
            (place.service, place.devices)
            for place in desk.manager.statistics().residents
            if place.devices in desk.scheduler.residents.devices(place.service, "local")
        }
        assert told == {(place.service, place.devices) for place in desk.manager.statistics().residents}

    services = [service(f"s{seed}", seed, degrees=(1, 2)) for seed in range(5)]
    run(lambda: Desk(services, devices(2, memory_bytes=2 * SIZE)), test)


def test_what_a_restore_took_is_learned_from_loads_alone() -> None:
    async def test(desk: Desk) -> None:
        assert desk.scheduler.residents.restore_s("a") == RESTORE_PRIOR_S
        first = await desk.call("a")
        learned_s = desk.scheduler.residents.restore_s("a")
        assert first.outcome.overhead_s >= learned_s != RESTORE_PRIOR_S
        await desk.call("a")
        assert desk.scheduler.residents.restore_s("a") == learned_s

    run(lambda: Desk([service("a")], devices(1)), test)


def test_riders_that_the_scheduler_sends_together_are_called_together() -> None:
    async def test(desk: Desk) -> None:
        ends = await asyncio.gather(*(desk.call("a", str(number).encode()) for number in range(9)))
        assert [json.loads(s.answer)["payload"] for s in ends] == [str(n).encode().hex() for n in range(9)]
        assert max(json.loads(settled.answer)["batch"] for settled in ends) == 4

    run(lambda: Desk([service("a", batch_max=8)], devices(1), Riding()), test)


def test_a_call_that_was_lost_is_repeated_if_it_may_be(flag: Flag) -> None:
    async def test(desk: Desk) -> None:
        lost = desk.submit("a", f"slow:{flag}".encode())
        await until(flag.is_up)
        os.kill(desk.manager.process_ids()[0], signal.SIGKILL)
        settled = await desk.orchestrator.settle(lost)
        assert settled.outcome.status is Status.LOST
        assert "signal 9" in settled.outcome.reason
        flag.lower()
        again = desk.submit("a", f"slow:{flag}".encode(), idempotent=True)
        await until(flag.is_up)
        os.kill(desk.manager.process_ids()[0], signal.SIGKILL)
        flag.lower()
        await until(flag.is_up)
        flag.lower()
        settled = await desk.orchestrator.settle(again)
        assert (settled.outcome.status, settled.outcome.attempts) == (Status.SUCCEEDED, 2)

    run(lambda: Desk([service("a")], devices(1)), test)


def test_a_call_beyond_its_time_limit_is_stopped_even_if_it_hangs(flag: Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "STOP_GRACE_S", 0.1)

    async def test(desk: Desk) -> None:
        settled = await desk.call("a", f"stubborn:{flag}".encode(), timeout_s=0.2)
        assert settled.outcome.status is Status.TIMED_OUT
        assert (await desk.call("a")).answer == expected(1, SIZE, b"x")

    run(lambda: Desk([service("a")], devices(1)), test)


def test_callers_hear_that_a_service_keeps_failing(flag: Flag) -> None:
    async def test(desk: Desk) -> None:
        flag.raise_it()
        settled = await desk.call("a")
        assert settled.outcome.status is Status.LOST
        assert "load fails" in settled.outcome.reason
        with pytest.raises(AdmissionRefused, match="service a failed 3 times in a row"):
            await desk.call("a")
        assert (await desk.call("b")).answer == expected(2, SIZE, b"x")

    services = [service("a", load=f"raise:{flag}"), service("b", 2)]
    run(lambda: Desk(services, devices(1)), test)
