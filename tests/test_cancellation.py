from __future__ import annotations

import asyncio
import logging

import pytest

from tangram.cancellation import run_to_completion, unwrap_first


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


def test_an_error_of_work_whose_caller_was_cancelled_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        allowed = asyncio.Event()

        async def work() -> None:
            await allowed.wait()
            raise OSError("the disk is full")

        caller = asyncio.create_task(run_to_completion(work()))
        await asyncio.sleep(0)
        caller.cancel()
        allowed.set()
        with pytest.raises(asyncio.CancelledError):
            await caller

    with caplog.at_level(logging.WARNING, "tangram"):
        asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == [
        "an operation failed after its caller was cancelled: the disk is full"
    ]


def test_the_first_error_of_a_group_names_the_others() -> None:
    first = unwrap_first(BaseExceptionGroup("several", [ValueError("one"), OSError("two")]))
    assert repr(first) == "ValueError('one')"
    assert first.__notes__ == ["Another task failed too: OSError: two"]
