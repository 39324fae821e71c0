"""Clocks never go backwards."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.clock import Clock, SimClock, VirtualLoop, WallClock
from tangram.errors import InvariantError

times = st.floats(allow_nan=False, allow_infinity=False)


def read(clock: Clock) -> float:
    return clock.now()


def test_wall_clock_reads_monotonic_time() -> None:
    before = time.monotonic()
    reading = read(WallClock())
    after = time.monotonic()
    assert before <= reading <= after


def test_sim_clock_stands_still_until_it_is_set() -> None:
    clock = SimClock(5.0)
    assert [read(clock), read(clock)] == [5.0, 5.0]
    clock.set(7.5)
    assert read(clock) == 7.5


def test_sim_clock_starts_at_zero() -> None:
    assert read(SimClock()) == 0.0


def test_sim_clock_may_be_set_to_the_present() -> None:
    clock = SimClock(5.0)
    clock.set(5.0)
    assert read(clock) == 5.0


@given(start=times, target=times)
def test_sim_clock_moves_forward_or_refuses_and_stays(start: float, target: float) -> None:
    clock = SimClock(start)
    if target >= start:
        clock.set(target)
        assert read(clock) == target
    else:
        with pytest.raises(InvariantError, match="cannot go back"):
            clock.set(target)
        assert read(clock) == start


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_sim_clock_refuses_what_is_not_a_time(wrong: float) -> None:
    clock = SimClock(1.0)
    with pytest.raises(InvariantError, match="finite"):
        clock.set(wrong)
    with pytest.raises(InvariantError, match="finite"):
        SimClock(wrong)
    assert read(clock) == 1.0


# ---- the loop on virtual time --------------------------------------------------------------------------------------


def test_waiting_takes_no_time_in_a_virtual_loop_and_keeps_its_order() -> None:
    order = []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((seconds, asyncio.get_running_loop().time()))

    async def main() -> None:
        async with asyncio.timeout(10_000):
            await asyncio.gather(wait(3600.0), wait(0.0), wait(60.0))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    assert [seconds for seconds, _ in order] == [0.0, 60.0, 3600.0]
    assert all(at == pytest.approx(seconds) for seconds, at in order)


def test_a_virtual_loop_in_which_nothing_can_happen_any_more_raises() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(InvariantError, match="no time brings"), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
