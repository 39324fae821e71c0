"""A service that several runs share: the faults of one run do not affect another."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.managers.models.bytes_engine import BytesEngine, expected
from tests.managers.models.conftest import DEADLINE_S, SIZE, Flag, devices, own_children, service, until

from tangram import Client, Quota, Service, Status, connect
from tangram.client import models as client_models
from tangram.errors import ActionTimedOut, AdmissionRefused, InvalidAction, InvalidConfig
from tangram.managers.models import batch_lease as turns_module
from tangram.managers.models.service import CALL_S_MAX


def play(tmp_path: Path, test: Callable[[Client], Awaitable[None]], *services: Service, **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            async with connect(
                backend="process", state=tmp_path / "state", services=services, devices=devices(1), **options
            ) as t:
                await test(t)

    asyncio.run(main())
    assert own_children() == []


@pytest.mark.parametrize("bad", ["raise", "bad"])
def test_ten_bad_payloads_of_one_run_cost_another_run_nothing(tmp_path: Path, bad: str) -> None:
    async def test(t: Client) -> None:
        async def good() -> None:
            assert (await t.infer("judge", "x", run="A")).check() == expected(1, SIZE, b"x")

        async def wrong() -> None:
            if bad == "bad":
                with pytest.raises(InvalidAction, match="a payload that is good"):
                    await t.infer("judge", bad, run="B")
            else:
                lost = await t.infer("judge", bad, run="B")
                assert (lost.status, lost.attempts) == (Status.LOST, 3)

        await good()
        for _ in range(10):
            await wrong()
        await good()
        for _ in range(10):
            await wrong()
            await good()
        await t.gather(*(doing() for _ in range(10) for doing in (wrong, good)))

    play(tmp_path, test, service("judge"))


def test_calls_batched_with_bad_payloads_are_answered(tmp_path: Path, flag: Flag) -> None:
    async def test(t: Client) -> None:
        await t.infer("judge", "x")
        first = asyncio.create_task(t.infer("judge", f"slow:{flag}"))
        await until(flag.is_up)
        payloads = ["x", "crash", "y", "raise", "z"] * 2
        calls = asyncio.gather(*(t.infer("judge", payload, run=payload) for payload in payloads))
        await asyncio.sleep(0)
        flag.lower()
        await first
        statuses = [one.status for one in await calls]
        wanted = [Status.LOST if payload in ("crash", "raise") else Status.SUCCEEDED for payload in payloads]
        assert statuses == wanted

    play(tmp_path, test, service("judge", batch_max=16))


def test_a_payload_that_kills_the_process_shuts_the_service_after_three_actions(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        await t.infer("judge", "x")
        for _ in range(2):
            lost = await t.infer("judge", "crash", run="B")
            assert (lost.status, lost.attempts) == (Status.LOST, 3)
        assert (await t.infer("judge", "crash", run="B", idempotent=False)).status is Status.LOST
        refused = await t.infer("judge", "x", run="A")
        assert refused.status is Status.REFUSED and "failed 3 times in a row" in refused.reason
        with pytest.raises(AdmissionRefused, match="service judge: service judge failed 3 times"):
            refused.check()

    play(tmp_path, test, service("judge"))


def test_a_call_that_hangs_is_stopped_after_the_time_of_its_service(
    tmp_path: Path, flag: Flag, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "STOP_GRACE_S", 0.1)

    async def test(t: Client) -> None:
        late = await t.infer("judge", f"stubborn:{flag}")
        assert (late.status, late.reason) == (Status.TIMED_OUT, "timeout of 0.3 s passed")
        flag.lower()
        late = await t.infer("judge", f"stubborn:{flag}", timeout_s=0.2)
        assert late.reason == "timeout of 0.2 s passed"
        assert (await t.infer("judge", "x", timeout_s=30.0)).ok

    assert service("judge").call_s_max == CALL_S_MAX == 600.0
    play(tmp_path, test, Service(name="judge", engine=BytesEngine(size=SIZE), call_s_max=0.3))


def test_a_call_needs_its_device_and_its_quota_at_once(tmp_path: Path, flag: Flag) -> None:
    async def test(t: Client) -> None:
        async with t.quota("search"):
            waits = asyncio.create_task(t.infer("judge", "x", quotas={"search": 1}))
            assert (await t.infer("judge", "y")).ok, "the device is not held while the quota is waited for"
            assert not waits.done()
        assert (await waits).check() == expected(1, SIZE, b"x")
        holds = asyncio.create_task(t.infer("judge", f"slow:{flag}", quotas="search"))
        await until(flag.is_up)
        refused = t.quota("search", deadline_s=0.1)
        with pytest.raises(ActionTimedOut, match="deadline"):
            await refused.__aenter__()
        flag.lower()
        assert (await holds).ok
        for wrong in ({"search": "1"}, {"serach": 1}, ["search"]):
            with pytest.raises(InvalidAction):
                await t.infer("judge", "x", quotas=wrong)  # type: ignore[arg-type]

    play(tmp_path, test, service("judge"), quotas=[Quota("search", concurrent=1)])


def test_nan_and_infinities_are_sent_unchanged(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        sent = {"scores": [math.nan, math.inf, -math.inf, 1.5], "text": "ä"}
        document = (await t.infer("echo", sent)).json()
        assert math.isnan(document["scores"][0])
        assert (document["scores"][1:], document["text"]) == ([math.inf, -math.inf, 1.5], "ä")

    play(tmp_path, test, Service(name="echo", engine="tests.managers.models.test_manager:Echo"))


def test_an_invalid_service_or_device_is_named_in_the_error(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        with pytest.raises(InvalidAction, match="service: expected one of 'judge'"):
            await t.infer(["judge"], "x")  # type: ignore[arg-type]
        for wrong in ("1", 1.0, True, [1]):
            with pytest.raises(InvalidAction, match="devices: expected one of 1"):
                await t.infer("judge", "x", devices=wrong)  # type: ignore[arg-type]

    judge = service("judge")
    play(tmp_path, test, judge)
    for field, wrong in (("services", judge), ("services", 3), ("devices", 2), ("devices", ["cuda:0"])):
        arguments = {"services": [judge], "devices": devices(1), field: wrong}
        with pytest.raises(InvalidConfig, match=f"{field}: expected a list of"):
            connect(backend="process", **arguments)  # type: ignore[arg-type]


def test_connecting_logs_what_it_prepares(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(t: Client) -> None:
        pass

    with caplog.at_level(logging.INFO, logger="tangram"):
        play(tmp_path, test, service("judge"))
    assert "preparing service judge" in caplog.messages


def test_payloads_are_json_of_python() -> None:
    assert client_models.payload_of([math.nan, {1: b"x"}]) == b'[NaN,{"1":"eA=="}]'
    with pytest.raises(InvalidAction, match="payload"):
        client_models.payload_of({"a": object()})
