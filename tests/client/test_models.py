"""Model services as a caller sees them, on emulated devices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.managers.models.bytes_engine import expected
from tests.managers.models.conftest import SIZE, devices, own_children, service

from tangram import Client, Emulated, Service, Status, connect, connect_sync
from tangram.errors import ActionLost, ActionTimedOut, AdmissionRefused, InvalidAction, InvalidConfig, TangramError

DEADLINE_S = 60.0
JUDGE, TEACHER = service("judge", 1, degrees=(1, 2)), service("teacher", 2)


def play(tmp_path: Path, test: Callable[[Client], Awaitable[None]], *services: Service) -> None:
    """Two devices, each with room for one service."""

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            async with connect(
                backend="process",
                state=tmp_path / "state",
                services=services or (JUDGE, TEACHER),
                devices=devices(2, SIZE + 4096),
            ) as t:
                await test(t)

    asyncio.run(main())
    assert own_children() == []


def test_services_answer_from_their_own_weights_after_each_swap(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        calls = [("judge" if n % 3 else "teacher", f"p{n}".encode()) for n in range(24)]
        results = await t.gather(*(t.infer(name, payload, run=f"run-{name}") for name, payload in calls))
        for (name, payload), one in zip(calls, results, strict=True):
            assert one.ok and one.check() == expected(1 if name == "judge" else 2, SIZE, payload)
            assert one.service == name and one.timing.act_s > 0.0

    play(tmp_path, test)


def test_a_service_runs_on_the_given_number_of_devices(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        for count in (1, 2, None):
            assert (await t.infer("judge", "text", devices=count)).check() == expected(1, SIZE, b"text")
        with pytest.raises(InvalidAction, match="one of 1, 2"):
            await t.infer("judge", "text", devices=4)

    play(tmp_path, test)


def test_payloads_are_bytes_text_or_json_and_answers_can_be_read_as_json(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        for payload, sent in ((b"a", b"a"), (bytearray(b"a"), b"a"), ("ä", "ä".encode()), ({"n": [1]}, b'{"n":[1]}')):
            assert (await t.infer("judge", payload)).json()["payload"] == sent.hex()
        with pytest.raises(InvalidAction, match="payload"):
            await t.infer("judge", object())

    play(tmp_path, test)


def test_errors_of_the_caller_and_of_the_service_have_different_types(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        with pytest.raises(InvalidAction, match="a payload that is good"):
            await t.infer("judge", "bad")
        lost = await t.infer("judge", "raise", idempotent=False)
        assert lost.status is Status.LOST and "no such token" in lost.reason
        with pytest.raises(ActionLost):
            lost.check()
        crashed = await t.infer("judge", "crash", idempotent=False)
        assert crashed.status is Status.LOST
        late = await t.infer("teacher", f"wait:{tmp_path / 'begun'}", timeout_s=0.3)
        assert late.status is Status.TIMED_OUT
        with pytest.raises(ActionTimedOut):
            late.json()
        assert (await t.infer("teacher", "x")).ok, "it is there again"

    play(tmp_path, test)


def test_a_call_that_is_cancelled_ends(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        begun = tmp_path / "begun"
        calling = asyncio.create_task(t.infer("judge", f"wait:{begun}"))
        while not begun.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert (await t.infer("judge", "x")).ok

    play(tmp_path, test)


def test_a_service_that_keeps_failing_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        for _ in range(3):
            assert (await t.infer("judge", "raise", idempotent=False)).status is Status.LOST
        with pytest.raises(AdmissionRefused, match="no such token"):
            (await t.infer("judge", "x")).check()
        assert (await t.infer("teacher", "x")).ok

    play(tmp_path, test)


def test_invalid_arguments_are_rejected_before_anything_runs(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        with pytest.raises(InvalidAction, match="one of 'judge', 'teacher'"):
            await t.infer("jugde", "x")

    play(tmp_path, test)
    for wrong in (
        {"services": [JUDGE]},
        {"services": ["judge"], "devices": devices(1)},
        {"services": [JUDGE, JUDGE], "devices": devices(2)},
        {"services": [service("large", memory_bytes=2 * SIZE)], "devices": devices(2, SIZE)},
    ):
        with pytest.raises(InvalidConfig):
            connect(backend="process", **wrong)  # type: ignore[arg-type]

    async def without() -> None:
        async with connect(backend="process", state=tmp_path / "state") as t:
            with pytest.raises(InvalidAction, match="this connection has none"):
                await t.infer("judge", "x")
        with pytest.raises(TangramError, match="is closed"):
            await t.infer("judge", "x")

    asyncio.run(without())


def test_the_same_without_await(tmp_path: Path) -> None:
    emulated = [Emulated(memory_bytes=SIZE + 4096, bandwidth=1e12)]
    with connect_sync(backend="process", state=tmp_path / "state", services=[TEACHER], devices=emulated) as t:
        assert json.loads(t.infer("teacher", "x").check()) == json.loads(expected(2, SIZE, b"x"))
