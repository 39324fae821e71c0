"""Model services under the scheduler: grants, batches, losses and limits as callers see them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from tests.managers.models.bytes_engine import expected
from tests.managers.models.conftest import DEADLINE_S, SIZE, Flag, devices, own_children, service, until

from tangram.core.action import Action, Status
from tangram.core.demand import GPU, Demand, fixed, one_of
from tangram.core.messages import Effect, Event, Pool, PoolChanged, Resident
from tangram.core.policies import policy
from tangram.core.residents import RESTORE_PRIOR_S
from tangram.core.scheduler import Scheduler
from tangram.errors import AdmissionRefused
from tangram.managers.models import Emulated, Infer, ModelManager, Service
from tangram.managers.models import batch_lease as turns_module
from tangram.runtime.event_sink import EventSink
from tangram.runtime.orchestrator import ActionTicket, Orchestrator, SettledAction


class Harness:
    """An orchestrator with nothing but model services."""

    def __init__(self, services: Sequence[Service], specs: Sequence[Emulated], decides: Any = None) -> None:
        sink = EventSink()
        self.manager = ModelManager(services, specs, sink.send)
        self.scheduler = Scheduler(decides or policy("adaptive"), self.manager.pools())
        self.orchestrator = Orchestrator(
            self.scheduler, {}, {Infer: self.manager}, observers=[self._observe], sink=sink
        )
        self.events: list[Event] = []
        self.messages: list[Event | Effect] = []
        self._number = 0

    def _observe(self, now: float, event: Event, effects: list[Effect]) -> None:
        self.events.append(event)
        self.messages.extend((event, *effects))

    def submit(self, name: str, payload: bytes = b"x", demand: Any = None, **fields: Any) -> ActionTicket:
        self._number += 1
        amounts = Demand({GPU: demand or fixed(1)})
        action = Action(id=f"a{self._number}", demand=amounts, service=name, kind="infer", **fields)
        return self.orchestrator.submit(action, Infer(payload=payload))

    async def call(self, name: str, payload: bytes = b"x", demand: Any = None, **fields: Any) -> SettledAction:
        return await self.orchestrator.wait_settled(self.submit(name, payload, demand, **fields))


def run(harness: Callable[[], Harness], test: Callable[[Harness], Awaitable[None]]) -> Harness:
    async def main() -> Harness:
        made = harness()
        async with asyncio.timeout(DEADLINE_S):
            async with made.orchestrator:
                await test(made)
        made.scheduler.check()
        return made

    made = asyncio.run(main())
    assert own_children() == []
    return made


def test_services_share_few_devices_and_every_answer_is_right() -> None:
    async def test(harness: Harness) -> None:
        names = [number % 5 for number in range(40)]
        ends = await asyncio.gather(*(harness.call(f"s{seed}", demand=one_of(1, 2)) for seed in names))
        for seed, settled in zip(names, ends, strict=True):
            assert settled.outcome.status is Status.SUCCEEDED
            assert settled.answer == expected(seed, SIZE, b"x")
        places = {
            (place.service, place.devices)
            for place in harness.manager.statistics().residents
            if place.devices in harness.scheduler.residents.devices(place.service, "local")
        }
        assert places == {(place.service, place.devices) for place in harness.manager.statistics().residents}

    services = [service(f"s{seed}", seed, degrees=(1, 2)) for seed in range(5)]
    run(lambda: Harness(services, devices(2, memory_bytes=2 * SIZE)), test)


def test_what_a_restore_took_is_learned_from_loads_alone() -> None:
    async def test(harness: Harness) -> None:
        assert harness.scheduler.residents.restore_s("a") == RESTORE_PRIOR_S
        first = await harness.call("a")
        learned_s = harness.scheduler.residents.restore_s("a")
        assert first.outcome.overhead_s >= learned_s != RESTORE_PRIOR_S
        await harness.call("a")
        assert harness.scheduler.residents.restore_s("a") == learned_s

    run(lambda: Harness([service("a")], devices(1)), test)


def test_calls_that_wait_together_are_called_together_across_runs() -> None:
    async def test(harness: Harness) -> None:
        calls = (harness.call("a", str(number).encode(), run=f"run-{number % 2}") for number in range(9))
        ends = await asyncio.gather(*calls)
        assert [json.loads(s.answer)["payload"] for s in ends] == [str(n).encode().hex() for n in range(9)]
        assert [json.loads(s.answer)["batch"] for s in ends] == [1] + [8] * 8, "how many ride is known once it is there"

    run(lambda: Harness([service("a", batch_max=8)], devices(1)), test)


def test_what_is_called_most_is_back_before_its_next_call() -> None:
    async def test(harness: Harness) -> None:
        for name in [*"a" * 200, "b"]:  # so often that it is worth more, however long each load happens to take
            await harness.call(name)
        await until(lambda: [place.service for place in harness.manager.statistics().residents] == ["a"])
        assert harness.manager.statistics().loads == 3
        assert (await harness.call("a")).answer == expected(0, SIZE, b"x")
        assert harness.manager.statistics().loads == 3

    services = [service(name, seed) for seed, name in enumerate("ab")]
    run(lambda: Harness(services, devices(1, memory_bytes=SIZE)), test)


def test_a_service_that_cannot_be_restored_ahead_is_not_tried_without_end(flag: Flag) -> None:
    async def test(harness: Harness) -> None:
        for name in ("a", "a", "a", "a"):
            await harness.call(name)
        flag.raise_it()  # from now on it cannot be loaded
        for _ in range(8):
            assert (await harness.call("b")).outcome.status is Status.SUCCEEDED
        before = len(harness.events)
        await asyncio.sleep(0.2)
        assert len(harness.events) <= before + 1
        assert [place.service for place in harness.manager.statistics().residents] == ["b"]

    services = [service("a", 0, load=f"fail:{flag}"), service("b")]
    run(lambda: Harness(services, devices(1, memory_bytes=SIZE)), test)


def test_a_call_that_lacks_something_else_finds_its_service_restored(flag: Flag) -> None:
    def both(harness: Harness, name: str, payload: str) -> ActionTicket:
        action = Action(id=name, demand=Demand({GPU: fixed(1), "api": fixed(1)}), service=name, kind="infer")
        return harness.orchestrator.submit(action, Infer(payload=payload.encode()))

    async def test(harness: Harness) -> None:
        harness.orchestrator.send(PoolChanged(pool=Pool(kind="api", total=1)))
        holds = both(harness, "b", f"slow:{flag}")
        await until(flag.is_up)
        await harness.call("c")
        waits = both(harness, "a", "x")
        await until(lambda: [p.service for p in harness.manager.statistics().residents] == ["b", "a"])
        assert "waits for 1 unit of api" in harness.scheduler.explain("a")
        flag.lower()
        for ticket in (holds, waits):
            assert (await harness.orchestrator.wait_settled(ticket)).outcome.status is Status.SUCCEEDED
        loaded = [event.service for event in harness.events if isinstance(event, Resident)]
        assert loaded.count("a") == 1

    services = [service(name, seed) for seed, name in enumerate("abc")]
    run(lambda: Harness(services, devices(2, memory_bytes=SIZE)), test)


def test_a_call_that_was_lost_is_repeated_if_it_may_be(flag: Flag) -> None:
    async def test(harness: Harness) -> None:
        lost = harness.submit("a", f"slow:{flag}".encode())
        await until(flag.is_up)
        os.kill(harness.manager.process_ids()[0], signal.SIGKILL)
        settled = await harness.orchestrator.wait_settled(lost)
        assert settled.outcome.status is Status.LOST
        assert "signal 9" in settled.outcome.reason
        flag.lower()
        again = harness.submit("a", f"slow:{flag}".encode(), idempotent=True)
        await until(flag.is_up)
        os.kill(harness.manager.process_ids()[0], signal.SIGKILL)
        flag.lower()
        await until(flag.is_up)
        flag.lower()
        settled = await harness.orchestrator.wait_settled(again)
        assert (settled.outcome.status, settled.outcome.attempts) == (Status.SUCCEEDED, 2)

    run(lambda: Harness([service("a")], devices(1)), test)


def test_a_call_beyond_its_time_limit_is_stopped_even_if_it_hangs(flag: Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "STOP_GRACE_S", 0.1)

    async def test(harness: Harness) -> None:
        settled = await harness.call("a", f"stubborn:{flag}".encode(), timeout_s=0.2)
        assert settled.outcome.status is Status.TIMED_OUT
        assert (await harness.call("a")).answer == expected(1, SIZE, b"x")

    run(lambda: Harness([service("a")], devices(1)), test)


def test_callers_get_the_error_of_a_service_that_keeps_failing(flag: Flag) -> None:
    async def test(harness: Harness) -> None:
        flag.raise_it()
        ends = [await asyncio.gather(harness.call("a"), return_exceptions=True) for _ in range(4)]
        reasons = [str(end.outcome.reason) if isinstance(end, SettledAction) else str(end) for [end] in ends]
        assert all("load fails" in words for words in reasons)
        assert isinstance(ends[0][0], SettledAction) and ends[0][0].outcome.status is Status.LOST
        assert isinstance(ends[3][0], AdmissionRefused) and "service a failed 3 times in a row" in reasons[3]
        assert (await harness.call("b")).answer == expected(2, SIZE, b"x")

    services = [service("a", load=f"raise:{flag}"), service("b", 2)]
    run(lambda: Harness(services, devices(1)), test)
