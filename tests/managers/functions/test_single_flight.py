"""Callers that share a run: each keeps its own deadline and cancellation, and no run exists twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.managers.functions import rewards
from tests.managers.functions.conftest import DEADLINE_S, Bench, lines, living, until

from tangram.client.functions import function
from tangram.client.single_flight import SingleFlight
from tangram.clock import VirtualLoop
from tangram.core.action import Outcome, Status
from tangram.errors import AdmissionRefused, ManagerError
from tangram.runtime.orchestrator import SettledAction

Run = Callable[..., None]

CALLERS = 60
"""In half a second of virtual time: few enough that all callers leave some run."""
STEP_S = 2**-10
"""Between moments of virtual time: sums of it are exact."""


def keyed(bench: Bench, *paths: Path, **options: float) -> asyncio.Task[object]:
    return asyncio.create_task(bench.try_call(rewards.noted, *map(str, paths), idempotency_key="a", **options))


async def pass_events() -> None:
    """Until every task waits for the test: no other task, timer or process is involved."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("impatient_first", [True, False])
def test_the_deadline_of_one_caller_is_not_that_of_another(run: Run, tmp_path: Path, impatient_first: bool) -> None:
    log, go = tmp_path / "log", tmp_path / "go"

    async def test(bench: Bench) -> None:
        deadlines = ({"deadline_s": 0.3}, {}) if impatient_first else ({}, {"deadline_s": 0.3})
        first, second = [keyed(bench, log, go, **options) for options in deadlines]
        impatient, patient = (first, second) if impatient_first else (second, first)
        late = await impatient
        assert (late.kind, late.reason) == ("timed_out", "deadline of 0.3 s passed")  # type: ignore[attr-defined]
        await until(lambda: lines(log))
        go.touch()
        assert (await patient).value == int(lines(log)[0])  # type: ignore[attr-defined]
        assert len(lines(log)) == 1

    run(test)


def test_the_deadline_of_the_last_one_ends_the_run(run: Run, tmp_path: Path) -> None:
    log, never = tmp_path / "log", tmp_path / "never"

    async def test(bench: Bench) -> None:
        patient = keyed(bench, log, never)
        await until(lambda: lines(log))
        impatient = [keyed(bench, log, never, deadline_s=0.1 + number / 10) for number in range(2)]
        await pass_events()
        patient.cancel()
        assert [result.kind for result in await asyncio.gather(*impatient)] == ["timed_out"] * 2  # type: ignore[attr-defined]
        assert patient.cancelled()
        assert len(lines(log)) == 1 and not living(int(lines(log)[0]))

    run(test)


def test_a_caller_that_joins_a_stopping_run_gets_another_one_after_it(run: Run, tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"

    async def test(bench: Bench) -> None:
        def call(**options: float) -> asyncio.Task[object]:
            return asyncio.create_task(
                bench.try_call(rewards.stubborn, str(log), str(go), idempotency_key="a", **options)
            )

        first = call()
        await until(lambda: lines(log))
        first.cancel()
        await asyncio.sleep(0.01)
        assert not first.done()  # it does not want to go
        hasty, second, third = call(deadline_s=0.05), call(), call()
        assert (await hasty).kind == "timed_out"  # type: ignore[attr-defined]
        await until(lambda: len(lines(log)) == 2)
        assert not living(int(lines(log)[0])) and first.cancelled()
        go.touch()
        results = [await second, await third]
        assert [result.value for result in results] == [int(lines(log)[1])] * 2  # type: ignore[attr-defined]
        assert len(lines(log)) == 2

    run(test)


def test_a_pure_function_with_another_time_limit_does_not_share_that(run: Run, tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"

    async def test(bench: Bench) -> None:
        plain = rewards.noted.__tangram_function__
        short, long = (function(cpus=0.1, pure=True, timeout_s=limit)(plain) for limit in (0.3, 60.0))
        patient = asyncio.create_task(bench.try_call(long, str(log), str(go)))
        assert (await bench.try_call(short, str(log), str(go))).kind == "timed_out"
        go.touch()
        assert (await patient).kind == "value"

    run(test)


# ---- without processes ----


class Made:
    """A run that ends when the test says so."""

    def __init__(self, on_cancel: Callable[[Made], None] = lambda made: None) -> None:
        self.ended: asyncio.Future[SettledAction] = asyncio.get_running_loop().create_future()
        self.watching = 0
        """Those who wait for it now."""
        self._on_cancel = on_cancel

    def end(self, status: Status) -> None:
        if not self.ended.done():
            self.ended.set_result(SettledAction(outcome=Outcome(action="made", status=status)))

    async def started(self) -> bool:
        return True

    async def settled(self) -> SettledAction:
        return await asyncio.shield(self.ended)

    async def settled_shielded(self) -> SettledAction:
        self.watching += 1
        try:
            return await asyncio.shield(self.ended)
        finally:
            self.watching -= 1

    def cancel(self) -> None:
        self._on_cancel(self)

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        self.ended.add_done_callback(lambda _: callback())


def test_a_caller_that_joins_a_refused_run_submits_its_own() -> None:
    async def main() -> None:
        sharing, made = SingleFlight(), [Made(), Made()]
        made[0].end(Status.REFUSED)
        made[1].end(Status.SUCCEEDED)
        ahead = iter(made)
        calls = [sharing.run(b"k", lambda: next(ahead), name, None) for name in ("a", "b")]
        results = await asyncio.gather(*calls)
        assert [settled.outcome.status for settled in results] == [Status.REFUSED, Status.SUCCEEDED]

    asyncio.run(main())


def test_a_refusal_that_is_raised_concerns_only_the_caller_that_submitted() -> None:
    """As over HTTP, where the submission itself may be refused."""

    async def main() -> None:
        sharing, made = SingleFlight(), [Made(), Made()]
        ahead = iter(made)
        calls = [asyncio.create_task(sharing.run(b"k", lambda: next(ahead), name, None)) for name in ("a", "b")]
        await pass_events()
        made[0].ended.set_exception(AdmissionRefused("waiting_max", "the queue is full"))
        with pytest.raises(AdmissionRefused, match="the queue is full"):
            await calls[0]
        made[1].end(Status.SUCCEEDED)
        assert (await calls[1]).outcome.status is Status.SUCCEEDED

    asyncio.run(main())


def test_after_a_stopping_run_that_is_refused_the_next_caller_submits_its_own() -> None:
    async def main() -> None:
        sharing, made = SingleFlight(), [Made(), Made()]
        ahead = iter(made)
        first = asyncio.create_task(sharing.run(b"k", lambda: next(ahead), "a", None))
        await pass_events()
        first.cancel()
        await pass_events()
        second = asyncio.create_task(sharing.run(b"k", lambda: next(ahead), "b", None))
        await pass_events()
        made[0].ended.set_exception(AdmissionRefused("waiting_max", "the queue is full"))
        made[1].end(Status.SUCCEEDED)
        assert (await second).outcome.status is Status.SUCCEEDED
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(main())


def test_a_cancelled_caller_stays_cancelled_when_its_run_is_lost() -> None:
    async def main() -> None:
        sharing, made = SingleFlight(), Made()
        caller = asyncio.create_task(sharing.run(b"k", lambda: made, "a", None))
        await pass_events()
        caller.cancel()
        await pass_events()
        assert not caller.done()
        made.ended.set_exception(ManagerError("the service does not respond", retry=False))
        with pytest.raises(asyncio.CancelledError):
            await caller

    asyncio.run(main())


def test_a_caller_between_the_end_of_a_stopping_run_and_its_callbacks_starts_one_that_is_shared() -> None:
    """The callback of the ended run must not remove the run that took its place."""

    async def main() -> None:
        sharing, made = SingleFlight(), [Made(), Made()]
        ahead = iter(made)

        def begin() -> Made:
            return next(ahead)

        first = asyncio.create_task(sharing.run(b"k", begin, "a", None))
        await pass_events()
        first.cancel()
        await pass_events()

        async def come() -> SettledAction:
            made[0].end(Status.CANCELLED)  # its callbacks run in the next iteration of the loop
            return await sharing.run(b"k", begin, "b", None)

        second = asyncio.create_task(come())
        await pass_events()
        third = asyncio.create_task(sharing.run(b"k", begin, "c", None))
        await pass_events()
        assert first.cancelled() and made[1].watching == 2
        made[1].end(Status.SUCCEEDED)
        assert [(await task).outcome.status for task in (second, third)] == [Status.SUCCEEDED] * 2

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_no_run_exists_twice_and_none_with_waiters_is_stopped(seed: int) -> None:
    """In virtual time, whose few moments are shared by many events, in every order of the iterations of the loop."""
    chance = random.Random(seed)
    begun: list[Made] = []
    stopped: list[Made] = []

    def moment(most_s: float) -> float:
        return chance.randrange(round(most_s / STEP_S)) * STEP_S

    async def main() -> None:
        sharing, loop = SingleFlight(), asyncio.get_running_loop()

        def begin() -> Made:
            assert all(made.ended.done() for made in begun), "two at a time"
            made = Made(on_cancel)
            begun.append(made)
            end_later(made, 0.05, Status.SUCCEEDED)
            return made

        def end_later(made: Made, most_s: float, status: Status) -> None:
            loop.call_later(moment(most_s), end_after, chance.randrange(6), made, status)

        def end_after(iterations: int, made: Made, status: Status) -> None:
            if iterations:
                loop.call_soon(end_after, iterations - 1, made, status)
            else:
                made.end(status)

        def on_cancel(made: Made) -> None:
            if not made.ended.done():
                assert made.watching == 0, "others wait for it"
                stopped.append(made)
                end_later(made, 0.02, Status.CANCELLED)

        async def caller(number: int) -> None:
            await asyncio.sleep(moment(0.5))
            deadline_s = chance.choice([None, moment(0.03) + STEP_S])
            task = asyncio.create_task(sharing.run(b"k", begin, str(number), deadline_s))
            if deadline_s is None and chance.random() < 0.5:
                await asyncio.sleep(moment(0.03))
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                status = (await task).outcome.status
                assert status is Status.SUCCEEDED or (status is Status.TIMED_OUT and deadline_s is not None)

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            for number in range(CALLERS):
                group.create_task(caller(number))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    assert stopped  # what it is about came about
