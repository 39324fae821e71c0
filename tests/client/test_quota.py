"""Quotas and APIs as a caller sees them, against real servers that count."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tangram import Client, Quota, Rate, Status, connect, connect_sync
from tangram.bench.quota_server import BUCKET, FIXED, Gate, ServerProcess
from tangram.client import api as api_module
from tangram.client import transport as transport_module
from tangram.client.api import Answer, Api
from tangram.errors import ActionLost, AdmissionRefused, InvalidAction, InvalidConfig, ManagerError, TangramError

DEADLINE_S = 60.0
SEARCH = Quota("search", concurrent=4)

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


def play(tmp_path: Path, test: Callable[[Client], Awaitable[None]], *quotas: Quota) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            async with connect(backend="process", state=tmp_path / "state", quotas=quotas or (SEARCH,)) as t:
                await test(t)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", reply)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "BACKOFF_S", 0.001)


# ---- around a client of one's own ----------------------------------------------------------------------------------


def test_a_quota_is_held_inside_and_free_outside(tmp_path: Path) -> None:
    under_way, most = 0, 0

    async def test(t: Client) -> None:
        async def one() -> None:
            nonlocal under_way, most
            async with t.quota("search", run="swe", trajectory="t1"):
                under_way += 1
                most = max(most, under_way)
                await asyncio.sleep(0.001)
                under_way -= 1

        await t.gather(*(one() for _ in range(40)))

    play(tmp_path, test)
    assert (most, under_way) == (4, 0)


def test_an_error_or_a_cancellation_inside_gives_the_quota_back(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        for _ in range(8):
            with pytest.raises(ZeroDivisionError):
                async with t.quota("search", requests=4):
                    raise ZeroDivisionError

        async def hold() -> None:
            async with t.quota("search", requests=4):
                await asyncio.sleep(1000)

        holder = asyncio.create_task(hold())
        waiter = asyncio.create_task(hold())
        await asyncio.sleep(0.01)
        for task in (waiter, holder):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with t.quota("search", requests=4):
            pass

    play(tmp_path, test)


def test_tokens_are_estimated_and_then_corrected(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        for _ in range(5):
            async with t.quota("judge", tokens=600) as use:
                use.spent(tokens=100)
        with pytest.raises(TangramError, match="deadline"):
            async with t.quota("judge", tokens=600, deadline_s=0.05):
                raise AssertionError("there are only five hundred left")
        with pytest.raises(TangramError, match="is closed"):
            use.spent(tokens=1)

    play(tmp_path, test, Quota("judge", tokens=Rate(1000, 3600.0)))


def test_what_cannot_be_asked_of_a_quota_is_said_at_once(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        for wrong in (
            lambda: t.quota("serach"),
            lambda: t.quota("search", requests=5),
            lambda: t.quota("search", requests=0),
            lambda: t.quota("search", tokens=5),
            lambda: t.api("serach"),
            lambda: t.api("search", retries=-1),
        ):
            with pytest.raises(InvalidAction):
                wrong()
        with pytest.raises(InvalidConfig):
            t.add_quota("search")  # type: ignore[arg-type]
        t.add_quota(Quota("other", concurrent=1))
        async with t.quota("other"):
            pass

    play(tmp_path, test)
    with pytest.raises(InvalidConfig):
        connect(backend="process", quotas=[SEARCH, SEARCH])


def test_a_quota_is_not_used_after_the_connection(tmp_path: Path) -> None:
    left: list[Any] = []

    async def test(t: Client) -> None:
        left.append(t.quota("search"))
        left.append(t.api("search", "http://127.0.0.1:9"))

    async def later() -> None:
        play_use, api = left
        for doing in (play_use.__aenter__(), api.get("x")):
            with pytest.raises(TangramError, match="is closed"):
                await doing

    async def main() -> None:
        async with connect(backend="process", state=tmp_path / "state", quotas=[SEARCH]) as t:
            await test(t)
        await later()

    asyncio.run(main())


def test_a_command_in_a_sandbox_waits_for_its_cores_and_its_quota_together(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="64MiB") as box, box.session() as shell:
            async with t.quota("search", requests=4):
                waiting = [
                    asyncio.create_task(box.exec("echo 1", cpus=0.5, quotas={"search": 1})),
                    asyncio.create_task(shell.exec("echo 1", cpus=0.5, quotas={"search": 1})),
                ]
                assert (await box.exec("echo 2", cpus=0.5)).stdout == "2\n"
                assert not any(task.done() for task in waiting)
            assert [(await task).stdout for task in waiting] == ["1\n", "1\n"]
            with pytest.raises(InvalidAction):
                await box.exec("true", quotas={"serach": 1})
            with pytest.raises(InvalidAction):
                await box.exec("true", quotas=["search"])  # type: ignore[arg-type]

    play(tmp_path, test)


# ---- the convenience -----------------------------------------------------------------------------------------------


def test_an_answer_is_returned_as_it_came(tmp_path: Path) -> None:
    async def reply(request: web.Request) -> web.Response:
        said = {"path": request.path, "q": request.query.get("q", ""), "body": await request.text()}
        return web.json_response(said, status=int(request.headers.get("want", "200")))

    async def test(t: Client) -> None:
        async with serving(reply) as url:
            api = t.api("search", url)
            assert (await api.get("a/b", params={"q": "x y"})).json() == {"path": "/a/b", "q": "x y", "body": ""}
            assert (await api.post("/p", json={"n": 1})).json()["body"] == '{"n":1}'
            assert (await api.post(f"{url}/p", content=b"raw")).json()["body"] == "raw"
            for status in (301, 400, 404, 500):
                answer = await api.request("GET", "x", headers={"want": str(status)})
                assert (answer.status, answer.ok) == (status, False), "is the API's own word"

    play(tmp_path, test)


@pytest.mark.usefixtures("impatient")
def test_what_passes_is_tried_again_and_what_does_not_is_lost(tmp_path: Path) -> None:
    asked: dict[str, int] = {}

    async def reply(request: web.Request) -> web.StreamResponse:
        name = request.path.strip("/")
        asked[name] = asked.get(name, 0) + 1
        if name == "twice" and asked[name] <= 2:
            return web.Response(status=503)
        if name == "down":
            return web.Response(status=502, text="bad gateway")
        if name == "cut" and request.transport is not None:
            request.transport.close()
        return web.Response(text="fine")

    async def test(t: Client) -> None:
        async with serving(reply) as url:
            api = t.api("search", url, retries=3)
            assert (await api.post("twice", idempotent=False)).text == "fine"
            with pytest.raises(ActionLost, match=r"given up after 4 tries.*502 'bad gateway'"):
                await api.get("down")
            with pytest.raises(ActionLost, match="given up after 4 tries"):
                await api.get("cut")
            with pytest.raises(ActionLost, match="given up after 1 tries"):
                await api.post("cut")
        with pytest.raises(ActionLost, match="cannot be reached"):
            await api.post("gone")
        async with t.quota("search", requests=4):
            pass

    play(tmp_path, test)
    assert asked == {"twice": 3, "down": 4, "cut": 5}


@pytest.mark.usefixtures("impatient")
def test_answers_that_never_come_or_make_no_sense_are_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "BYTES_MAX", 1000)

    async def reply(request: web.Request) -> web.StreamResponse:
        if request.path == "/silent":
            await asyncio.sleep(1.0)  # much longer than anybody waits for it
        if request.path == "/large":
            return web.Response(body=b"x" * 1001)
        return web.Response(text="<html>")

    async def test(t: Client) -> None:
        async with serving(reply) as url:
            with pytest.raises(ActionLost, match=r"did not answer within 0\.05 s"):
                await t.api("search", url, timeout_s=0.05, retries=1).get("silent")
            api = t.api("search", url, retries=1)
            with pytest.raises(ActionLost, match="more than 1000 bytes"):
                await api.get("large")
            with pytest.raises(ManagerError, match="no JSON"):
                (await api.get("html")).json()
            with pytest.raises(InvalidAction, match="url"):
                await t.api("search").get("not an address")

    play(tmp_path, test)


def test_tokens_of_an_answer_correct_the_estimate(tmp_path: Path) -> None:
    async def reply(_: web.Request) -> web.Response:
        return web.json_response({"usage": {"total_tokens": 7}})

    async def test(t: Client) -> None:
        async with serving(reply) as url:
            judge = t.api("judge", url)
            for _ in range(20):
                await judge.post("x", json={}, tokens=800, used=lambda answer: answer.json()["usage"]["total_tokens"])

    play(tmp_path, test, Quota("judge", tokens=Rate(1000, 3600.0)))


@pytest.mark.usefixtures("impatient")
def test_a_server_that_complains_is_left_alone_for_as_long_as_it_asks(tmp_path: Path) -> None:
    times: list[float] = []
    refused = asyncio.Event()

    async def reply(_: web.Request) -> web.Response:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            refused.set()
            return web.Response(status=429, headers={"Retry-After": "0.3"})
        return web.Response(text="fine")

    async def test(t: Client) -> None:
        async with serving(reply) as url:
            api = t.api("search", url)
            answers = await t.gather(api.get("first"), *(after(api) for _ in range(3)))
            assert all(answer.ok for answer in answers)

    async def after(api: Api) -> Answer:
        await refused.wait()
        await asyncio.sleep(0.05)
        return await api.get("later")

    play(tmp_path, test)
    assert min(times[1:]) - times[0] >= 0.29


@pytest.mark.parametrize("bucket", [False, True])
def test_a_server_that_counts_never_has_to_refuse(tmp_path: Path, bucket: bool) -> None:
    async def test(t: Client) -> None:
        async with ServerProcess(60, 0.6, bucket=bucket) as server:
            t.add_quota(Quota("counted", requests=Rate(60, 0.6)))
            apis = [t.api("counted", server.url, run=f"run-{number}", retries=0) for number in range(3)]
            await t.gather(*(api.get("call") for api in apis for _ in range(80)))
            served = await server.served()
            assert (len(served.arrivals), served.rejected) == (240, 0)

    play(tmp_path, test)


def test_a_gate_counts_as_it_says() -> None:
    fixed = Gate(2, 10.0, FIXED, 0.0)
    assert [fixed.enter(at) for at in (8.0, 9.0, 9.5, 10.0, 10.0, 10.0)] == [0.0, 0.0, 0.5, 0.0, 0.0, 10.0]
    bucket = Gate(2, 10.0, BUCKET, 0.0)
    assert [bucket.enter(at) for at in (0.0, 0.0, 2.5, 5.0, 8.75)] == [0.0, 0.0, 2.5, 0.0, 1.25]


def test_a_clock_of_the_calendar_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter([0.0, 4e9, 1e9, 2e9] * 100)
    monkeypatch.setattr(transport_module.time, "time", lambda: next(jumps))

    async def test(t: Client) -> None:
        async with ServerProcess(60, 0.6, bucket=False) as server:
            api = t.api("search", server.url, retries=0)
            await t.gather(*(api.get("call") for _ in range(120)))
            assert (await server.served()).rejected == 0

    play(tmp_path, test, Quota("search", requests=Rate(60, 0.6)))


def test_the_same_without_await(tmp_path: Path) -> None:
    with connect_sync(backend="process", state=tmp_path / "state", quotas=[SEARCH]) as t:
        with t.quota("search", requests=2) as use:
            use.heard(200, {})
        t.add_quota(Quota("judge", tokens=Rate(10, 1.0)))
        with t.quota("judge", tokens=3) as use:
            use.spent(tokens=2)
        with pytest.raises(ActionLost, match="cannot be reached"):
            t.api("search", "http://127.0.0.1:9", retries=0).get("x")
        with t.sandbox(memory="64MiB") as box:
            assert box.exec("true", quotas={"search": 1}).status is Status.SUCCEEDED


def test_a_quota_that_waits_too_long_is_refused_or_timed_out(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        async with t.quota("search", requests=4):
            with pytest.raises((AdmissionRefused, TangramError)):
                async with t.quota("search", deadline_s=0.05):
                    raise AssertionError("all of it is held")

    play(tmp_path, test)
