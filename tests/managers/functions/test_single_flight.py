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
from tangram.core.action import Outcome, Status
from tangram.runtime.orchestrator import SettledAction

Run = Callable[..., None]

CALLERS = 60
"""In half a second: few enough that all callers leave some run."""


def keyed(bench: Bench, *paths: Path, **options: float) -> asyncio.Task[object]:
    return asyncio.create_task(bench.try_call(rewards.noted, *map(str, paths), idempotency_key="a", **options))


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
        await bench.call(rewards.noted, str(tmp_path / "other"))  # it is warm
        results = await asyncio.gather(*(keyed(bench, log, never, deadline_s=3.0 + number / 10) for number in range(2)))
        assert [result.kind for result in results] == ["timed_out"] * 2  # type: ignore[attr-defined]
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
        found = [await second, await third]
        assert [result.value for result in found] == [int(lines(log)[1])] * 2  # type: ignore[attr-defined]
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
        found = await asyncio.gather(*calls)
        assert [settled.outcome.status for settled in found] == [Status.REFUSED, Status.SUCCEEDED]

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(5))
def test_no_run_exists_twice_and_none_with_waiters_is_stopped(seed: int) -> None:
    chance = random.Random(seed)
    under_way: set[Made] = set()
    stopped: list[Made] = []

    async def main() -> None:
        sharing, loop = SingleFlight(), asyncio.get_running_loop()

        def begin() -> Made:
            assert not under_way, "two at a time"
            made = Made(on_cancel)
            under_way.add(made)
            made.ended.add_done_callback(lambda _: under_way.discard(made))
            loop.call_later(0.05 * chance.random(), made.end, Status.SUCCEEDED)
            return made

        def on_cancel(made: Made) -> None:
            if not made.ended.done():
                assert made.watching == 0, "others wait for it"
                stopped.append(made)
                loop.call_later(0.02 * chance.random(), made.end, Status.CANCELLED)

        async def caller(number: int) -> None:
            await asyncio.sleep(0.5 * chance.random())
            deadline_s = chance.choice([None, 0.03 * chance.random() + 1e-6])
            task = asyncio.create_task(sharing.run(b"k", begin, str(number), deadline_s))
            if deadline_s is None and chance.random() < 0.5:
                await asyncio.sleep(0.03 * chance.random())
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                status = (await task).outcome.status
                assert status is Status.SUCCEEDED or (status is Status.TIMED_OUT and deadline_s is not None)

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            for number in range(CALLERS):
                group.create_task(caller(number))

    asyncio.run(main())
    assert stopped  # what it is about came about
