from __future__ import annotations

import asyncio

import pytest

from tangram.cancellation import run_to_completion


def test_work_completes_before_a_cancellation_is_raised() -> None:
    async def main() -> None:
        allowed, steps = asyncio.Event(), []

        async def work() -> None:
            await allowed.wait()
            steps.append("done")

        caller = asyncio.create_task(run_to_completion(work()))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
        allowed.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert steps == ["done"]

    asyncio.run(main())


def test_a_cancellation_in_the_moment_at_which_the_work_ends_is_raised() -> None:
    async def main() -> None:
        allowed = asyncio.get_running_loop().create_future()

        async def work() -> None:
            await allowed

        caller = asyncio.create_task(run_to_completion(work()))
        for _ in range(3):  # the caller begins, the work begins, the work waits
            await asyncio.sleep(0)
        allowed.set_result(None)
        await asyncio.sleep(0)  # the work has ended; its waiter is not resumed yet
        assert len(asyncio.all_tasks()) == 2
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller

    asyncio.run(main())


def test_work_that_is_cancelled_itself_raises_in_its_caller() -> None:
    async def main() -> None:
        async def work() -> None:
            raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(run_to_completion(work()), 10.0)

    asyncio.run(main())
