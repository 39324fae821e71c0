"""Quotas and APIs as a caller sees them, against real servers that count."""

from __future__ import annotations

import asyncio
import contextlib
import email.message
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tangram import Client, Limits, Quota, Rate, Status, connect, connect_sync
from tangram.bench.quota_server import BUCKET, FIXED, QuotaServerProcess, RequestLimiter
from tangram.client import api as api_module
from tangram.client import transport as transport_module
from tangram.client.api import Api, HttpResponse
from tangram.client.transport import LocalTransport
from tangram.core.action import State
from tangram.core.scheduler import Scheduler, Statistics
from tangram.errors import (
    ActionLost,
    ActionTimedOut,
    AdmissionRefused,
    InvalidAction,
    InvalidConfig,
    ManagerError,
    TangramError,
)
from tangram.managers.quotas import adaptive_rate as pace_module

DEADLINE_S = 60.0
SEARCH = Quota("search", concurrent=4)

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


def play(tmp_path: Path, test: Callable[[Client], Awaitable[None]], *quotas: Quota) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            async with connect(backend="process", state=tmp_path / "state", quotas=quotas or (SEARCH,)) as t:
                await test(t)

    asyncio.run(main())


async def until(true: Callable[[], bool]) -> None:
    """Soon, and within the deadline of the test."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def scheduler(t: Client) -> Scheduler:
    assert isinstance(t.transport, LocalTransport)
    decider = t.transport.orchestrator.decider
    assert isinstance(decider, Scheduler)
    return decider


def statistics(t: Client) -> Statistics:
    return scheduler(t).statistics()


def stopping(t: Client) -> int:
    return sum(entry.state is State.STOPPING for entry in scheduler(t).entries.values())


def pending(t: Client) -> list[str]:
    """Pools of which units will be spent at a time that is not known yet."""
    return [name for name, pool in scheduler(t).ledger.pools.items() if pool.pending]


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

        inside = asyncio.Event()

        async def hold() -> None:
            async with t.quota("search", requests=4):
                inside.set()
                await asyncio.sleep(1000)

        holder = asyncio.create_task(hold())
        await inside.wait()
        waiter = asyncio.create_task(hold())
        await until(lambda: statistics(t).waiting == 1)
        for task in (waiter, holder):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with t.quota("search", requests=4):
            pass

    play(tmp_path, test)


def test_cancelling_the_entry_at_any_moment_leaves_nothing_held(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        async def enter() -> None:
            async with t.quota("search", requests=4, deadline_s=30.0):
                await asyncio.sleep(1000)

        for turns in range(12):
            task = asyncio.create_task(enter())
            for _ in range(turns):  # of the loop, each of which brings it a little further
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
        assert statistics(t).holding == statistics(t).waiting == 0

    play(tmp_path, test)


def test_a_deadline_bounds_the_wait_and_not_the_block(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        async with t.quota("search", requests=4, deadline_s=0.5):
            with pytest.raises(ActionTimedOut, match=r"deadline of 0\.05 s passed while it waited"):
                async with t.quota("search", deadline_s=0.05):
                    raise AssertionError("all of it is held")
            await until(lambda: stopping(t) == 1)
            with pytest.raises(ActionTimedOut):
                async with t.quota("search", deadline_s=0.05):
                    raise AssertionError("all of it is still held, long after the deadline")
        async with t.quota("search", requests=4):
            pass

    play(tmp_path, test)


def test_closing_a_connection_does_not_wait_for_holders_of_quotas(tmp_path: Path) -> None:
    async def main() -> None:
        inside, closed = asyncio.Event(), asyncio.Event()

        async def hold(t: Client, deadline_s: float | None) -> None:
            async with t.quota("search", deadline_s=deadline_s):
                inside.set()
                with contextlib.suppress(TimeoutError):  # a connection that waits is a failure, not a hanging test
                    await asyncio.wait_for(closed.wait(), 10.0)
            assert closed.is_set()

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            async with connect(backend="process", state=tmp_path / "state", quotas=[SEARCH]) as t:
                for deadline_s in (None, 0.5):
                    tasks.create_task(hold(t, deadline_s))
                await inside.wait()
                await until(lambda: stopping(t) == 1)
            closed.set()

    asyncio.run(main())


def test_several_quotas_are_granted_together_without_deadlock(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        async def both(first: str, second: str) -> None:
            for _ in range(20):
                async with t.quota({first: 1, second: {"requests": 1, "tokens": 5} if second == "judge" else 1}):
                    assert statistics(t).pools["search"]["held"] == 1
                    await asyncio.sleep(0)

        await t.gather(both("search", "other"), both("other", "search"))
        async with t.quota({"search": 1, "judge": {"tokens": 600}}) as use:
            assert statistics(t).pools["judge/tokens"]["spent"] == 600
            use.spent(tokens=100)
            use.report_response(200, {}, "search")
            with pytest.raises(InvalidAction, match="'search' or 'judge'"):
                use.report_response(200, {})
            with pytest.raises(InvalidAction, match="the name of one quota"):
                use.spent(tokens=100, name="search")
        assert statistics(t).pools["judge/tokens"]["spent"] == 100
        async with t.quota("search"):
            with pytest.raises(ActionTimedOut):
                async with t.quota({"search": 1, "other": 1}, deadline_s=0.05):
                    raise AssertionError("one of them is held")
            assert statistics(t).pools["other"]["held"] == 0, "all or nothing"

    play(
        tmp_path, test, Quota("search", concurrent=1), Quota("other", concurrent=1),
        Quota("judge", tokens=Rate(1000, 3600.0)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "at_once"),
    [
        (lambda t: t.quota("search"), True),
        (lambda t: t.quota("search", requests=2), False),
        (lambda t: t.quota({"search": 1, "other": 1}), False),
        (lambda t: t.quota("search", at_once=False), False),
        (lambda t: t.quota("search", requests=2, at_once=True), True),
    ],
)
def test_one_request_counts_from_entering_and_more_count_from_leaving(
    tmp_path: Path, asked: Callable[[Client], Any], at_once: bool
) -> None:
    async def test(t: Client) -> None:
        async with asked(t):
            inside = set(pending(t))
        assert inside == (set() if at_once else {"search/requests"})

    play(tmp_path, test, Quota("search", requests=Rate(4, 60.0)), Quota("other", concurrent=1))


def test_a_program_in_a_sandbox_may_take_quota_at_any_time_until_it_ends(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="64MiB") as box, box.session() as shell:
            for run in (box.exec, shell.exec):
                asking = asyncio.create_task(
                    run("while [ ! -e go ]; do sleep 0.01; done; rm go", cpus=0.5,
                        quotas={"judge": {"requests": 2, "tokens": 30}})
                )  # fmt: skip
                await until(lambda: set(pending(t)) == {"judge/requests", "judge/tokens"})
                await box.write("go", "")
                assert (await asking).ok
                assert not pending(t)
            pools = statistics(t).pools
            assert (pools["judge/requests"]["spent"], pools["judge/tokens"]["spent"]) == (4, 60)
            with pytest.raises(InvalidAction, match="counts tokens"):
                await box.exec("true", quotas="judge")

    play(tmp_path, test, Quota("judge", requests=Rate(10, 3600.0), tokens=Rate(100, 3600.0)))


def test_runs_share_a_quota_by_their_weights(tmp_path: Path) -> None:
    order: list[str] = []

    async def test(t: Client) -> None:
        await t.weigh("large", 2.0)

        async def one(run: str) -> None:
            async with t.quota("search", run=run):
                order.append(run)
                await asyncio.sleep(0.001)

        async with t.quota("search", requests=6):
            waiting = [asyncio.create_task(one(run)) for _ in range(90) for run in ("small", "large")]
            await until(lambda: statistics(t).waiting == 180)
        await asyncio.gather(*waiting)
        with pytest.raises(InvalidConfig, match="weight of run large"):
            await t.weigh("large", 0)

    play(tmp_path, test, Quota("search", concurrent=6))
    both_wait = order[:120]
    assert both_wait.count("large") == pytest.approx(80, abs=6), "two to one, while both want more than there is"


def test_tokens_are_estimated_and_then_corrected(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        for _ in range(5):
            async with t.quota("judge", tokens=600) as use:
                use.spent(tokens=100)
        with pytest.raises(ActionTimedOut, match="deadline"):
            async with t.quota("judge", tokens=600, deadline_s=0.05):
                raise AssertionError("there are only five hundred left")
        with pytest.raises(TangramError, match="is closed"):
            use.spent(tokens=1)

    play(tmp_path, test, Quota("judge", tokens=Rate(1000, 3600.0)))


def test_invalid_requests_of_a_quota_are_rejected_at_once(tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        for wrong in (
            lambda: t.quota("serach"),
            lambda: t.quota("search", requests=5),
            lambda: t.quota("search", requests=0),
            lambda: t.quota("search", tokens=5),
            lambda: t.quota(["search"]),  # type: ignore[arg-type]
            lambda: t.quota(None),  # type: ignore[arg-type]
            lambda: t.quota({}),
            lambda: t.quota({"search": None}),  # type: ignore[dict-item]
            lambda: t.quota({"search": 1.0}),  # type: ignore[dict-item]
            lambda: t.quota({"search": True}),
            lambda: t.quota({"search": {"request": 1}}),
            lambda: t.quota({"search": {"requests": "1"}}),  # type: ignore[dict-item]
            lambda: t.quota({1: 1}),  # type: ignore[dict-item]
            lambda: t.quota({"search": 1}, requests=2),
            lambda: t.quota("search", at_once="no"),  # type: ignore[arg-type]
            lambda: t.quota("search", deadline_s=-1),
            lambda: t.api("serach"),
            lambda: t.api(["search"]),  # type: ignore[arg-type]
            lambda: t.api("search", retries=-1),
            lambda: t.api("search", timeout_s=0),
            lambda: t.api("search", timeout_s="3"),  # type: ignore[arg-type]
            lambda: t.api("search", timeout_s=float("inf")),
            lambda: t.api("search", None),  # type: ignore[arg-type]
            lambda: t.api("search", headers={"a": 1}),  # type: ignore[dict-item]
            lambda: t.api("search", headers=["a"]),  # type: ignore[arg-type]
            lambda: t.api("search", headers={"a": "b\nc"}),
            lambda: t.api("search", headers={"a b": "c"}),
        ):
            with pytest.raises(InvalidAction):
                wrong()
        async with t.quota("search") as use:
            for status, headers in (
                ("429", {}), (None, {}), (429.0, {}), (1, {}), (429, None), (429, {"Retry-After": 5}),
                (429, [("Retry-After", "1")]), (429, {b"Retry-After": b"1"}), (429, dict),
            ):  # fmt: skip
                with pytest.raises(InvalidAction, match=r"(status|headers): expected"):
                    use.report_response(status, headers)  # type: ignore[arg-type]
            with pytest.raises(InvalidAction, match="of a quota that counts tokens"):
                use.spent(tokens=5)
            message = email.message.Message()
            message["Retry-After"] = "1"
            use.report_response(200, message)  # type: ignore[arg-type]  # as urllib has it
        async with t.quota("search", deadline_s=DEADLINE_S):
            pass
        with pytest.raises(InvalidConfig):
            await t.add_quota("search")  # type: ignore[arg-type]
        await t.add_quota(Quota("other", concurrent=1))
        async with t.quota("other"):
            pass

    play(tmp_path, test)
    for quotas in ([SEARCH, SEARCH], SEARCH, {"search": 1}, 5, None):
        with pytest.raises(InvalidConfig, match=r"quotas: expected a list of tangram\.Quota"):
            connect(backend="process", quotas=quotas)  # type: ignore[arg-type]


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
            with pytest.raises(InvalidAction, match="numbers by name"):
                await box.exec("true", quotas=["search"])  # type: ignore[arg-type]

    play(tmp_path, test)


# ---- the convenience -----------------------------------------------------------------------------------------------


def test_an_answer_is_returned_as_it_came(tmp_path: Path) -> None:
    async def reply(request: web.Request) -> web.Response:
        content = {"path": request.path, "q": request.query.get("q", ""), "body": await request.text()}
        return web.json_response(content, status=int(request.headers.get("want", "200")))

    async def test(t: Client) -> None:
        async with serving(reply) as url:
            api = t.api("search", url)
            assert (await api.get("a/b", params={"q": "x y"})).json() == {"path": "/a/b", "q": "x y", "body": ""}
            assert (await api.post("/p", json={"n": 1})).json()["body"] == '{"n":1}'
            assert (await api.post(f"{url}/p", content=b"raw")).json()["body"] == "raw"
            for status in (301, 400, 404):
                answer = await api.request("GET", "x", headers={"want": str(status)})
                assert (answer.status, answer.ok) == (status, False), "is the API's own word"

    play(tmp_path, test)


@pytest.mark.usefixtures("impatient")
def test_what_passes_is_tried_again_and_what_does_not_is_lost(tmp_path: Path) -> None:
    counts: dict[str, int] = {}

    async def reply(request: web.Request) -> web.StreamResponse:
        name = request.path.strip("/")
        counts[name] = counts.get(name, 0) + 1
        if name == "twice" and counts[name] <= 2:
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
            with pytest.raises(ActionLost, match=r"failed after 4 tries.*502 'bad gateway'"):
                await api.get("down")
            with pytest.raises(ActionLost, match="failed after 4 tries"):
                await api.get("cut")
            with pytest.raises(ActionLost, match="failed after one try"):
                await api.post("cut")
        with pytest.raises(ActionLost, match=r"failed after 4 tries.*cannot be reached"):
            await api.post("gone")
        async with t.quota("search", requests=4):
            pass

    play(tmp_path, test)
    assert counts == {"twice": 3, "down": 4, "cut": 5}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("status", [500, 502, 504, 520, 408])
def test_what_may_have_been_carried_out_is_repeated_only_if_it_may_be(tmp_path: Path, status: int) -> None:
    paths: list[str] = []

    async def reply(request: web.Request) -> web.StreamResponse:
        paths.append(request.method)
        return web.Response(status=status, text="oops")

    async def test(t: Client) -> None:
        async with serving(reply) as url:
            api = t.api("search", url, retries=1)
            for method in ("GET", "PUT", "DELETE", "head", "POST", "PATCH"):
                with pytest.raises(ActionLost, match=f"answered {status}"):
                    await api.request(method, "x")
            with pytest.raises(ActionLost, match=f"failed after 2 tries.*answered {status} 'oops'"):
                await api.post("x", idempotent=True)
            with pytest.raises(ActionLost, match="failed after one try"):
                await api.request("GET", "x", idempotent=False)

    play(tmp_path, test)
    twice = [method for method in ("GET", "PUT", "DELETE", "HEAD") for _ in range(2)]
    assert paths == [*twice, "POST", "PATCH", "POST", "POST", "GET"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("status", [429, 503, 529])
def test_what_was_refused_is_repeated_whatever_it_is(
    tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace_module, "PAUSE_S", 0.01)
    calls = 0

    async def reply(_: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        return web.Response(status=status)

    async def test(t: Client) -> None:
        async with serving(reply) as url:
            with pytest.raises(ActionLost, match=f"failed after 2 tries.*answered {status}"):
                await t.api("search", url, retries=1).post("x", json={})

    play(tmp_path, test)
    assert calls == 2


def test_a_deadline_ends_a_call_with_all_its_waiting_and_repetitions(tmp_path: Path) -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        if request.path == "/silent":
            await asyncio.sleep(1.0)  # much longer than any timeout
        if request.path == "/later":
            return web.Response(status=429, headers={"Retry-After": "3600"})
        return web.Response(status=503)

    async def test(t: Client) -> None:
        async with serving(reply) as url:
            api = t.api("search", url, retries=1000)
            for path in ("silent", "busy", "later", "later"):
                with pytest.raises(ActionTimedOut, match=rf"{path}: not answered within 0\.1 s"):
                    await api.get(path, deadline_s=0.1)
            with pytest.raises(ActionTimedOut):
                await api.post("silent", json={}, deadline_s=0.1)
            for wrong in (0, -1.0, "5", float("nan")):
                with pytest.raises(InvalidAction, match="deadline_s"):
                    await api.request("GET", "x", deadline_s=wrong)  # type: ignore[arg-type]
        assert statistics(t).holding == statistics(t).waiting == 0

    play(tmp_path, test)


def test_a_request_that_cannot_be_meant_is_refused_and_not_lost(tmp_path: Path) -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.json_response({"query": list(request.query.items()), "body": await request.text()})

    async def test(t: Client) -> None:
        async with serving(reply) as url:
            api = t.api("search", url, retries=0)
            for wrong in (
                lambda: api.get(None),  # type: ignore[arg-type]
                lambda: api.get("ftp://x/y"),
                lambda: api.get("http://127.0.0.1:99999/x"),
                lambda: api.get("x", params={"a": None}),  # type: ignore[dict-item]
                lambda: api.get("x", params={"a": True}),
                lambda: api.get("x", params={"a": [None]}),  # type: ignore[list-item]
                lambda: api.get("x", params={"a": float("nan")}),
                lambda: api.get("x", params={1: "a"}),  # type: ignore[dict-item]
                lambda: api.get("x", params="a=1"),  # type: ignore[arg-type]
                lambda: api.request("FOO BAR", "x"),
                lambda: api.request(None, "x"),  # type: ignore[arg-type]
                lambda: api.request("GET", "x", headers={"a": "b\nc"}),
                lambda: api.request("GET", "x", headers={"a": "\ud800"}),
                lambda: api.request("GET", "x", headers={"a\n": "b"}),
                lambda: api.post("x", json=object()),
                lambda: api.post("x", json={"a": [float("nan")]}),
                lambda: api.post("x", json=float("inf")),
                lambda: api.post("x", content=5),  # type: ignore[arg-type]
                lambda: api.post("x", json={}, content=b""),
            ):
                with pytest.raises(InvalidAction):
                    await wrong()
            answer = await api.get("x", params={"a": 1, "b": "ü &", "c": [1, "2"], "d": 0.5})
            assert answer.json()["query"] == [["a", "1"], ["b", "ü &"], ["c", "1"], ["c", "2"], ["d", "0.5"]]
            assert (await api.post("x", json={"n": ["ü", 1.5, None]})).json()["body"] == '{"n":["ü",1.5,null]}'
            assert (await api.post("x", content="text")).json()["body"] == "text"
        async with t.quota("search", requests=4):
            pass

    play(tmp_path, test)


@pytest.mark.usefixtures("impatient")
def test_answers_that_never_come_or_make_no_sense_are_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "BYTES_MAX", 1000)
    fetched = 0

    async def reply(request: web.Request) -> web.StreamResponse:
        nonlocal fetched
        if request.path == "/silent":
            await asyncio.sleep(1.0)  # much longer than any timeout
        if request.path == "/large":
            fetched += 1
            return web.Response(body=b"x" * 1001)
        return web.Response(text="<html>")

    async def test(t: Client) -> None:
        async with serving(reply) as url:
            with pytest.raises(ActionLost, match=r"did not respond within 0\.05 s"):
                await t.api("search", url, timeout_s=0.05, retries=1).get("silent")
            api = t.api("search", url, retries=1)
            with pytest.raises(ActionLost, match="more than 1000 bytes"):
                await api.get("large")
            assert fetched == 1, "it would not be smaller the next time"
            with pytest.raises(ManagerError, match="not JSON"):
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
def test_a_server_that_refuses_is_left_alone_for_its_retry_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float] = []
    refused = asyncio.Event()
    report = LocalTransport.report_upstream_response

    def reported(transport: LocalTransport, quota: str, status: int, headers: Mapping[str, str], action: str) -> None:
        report(transport, quota, status, headers, action)
        if status == 429:
            refused.set()

    monkeypatch.setattr(LocalTransport, "report_upstream_response", reported)

    async def reply(_: web.Request) -> web.Response:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            return web.Response(status=429, headers={"Retry-After": "0.3"})
        return web.Response(text="fine")

    async def test(t: Client) -> None:
        async with serving(reply) as url:
            api = t.api("search", url)
            answers = await t.gather(api.get("first"), *(after(api) for _ in range(3)))
            assert all(answer.ok for answer in answers)

    async def after(api: Api) -> HttpResponse:
        await refused.wait()
        return await api.get("later")

    play(tmp_path, test)
    assert min(times[1:]) - times[0] >= 0.29


@pytest.mark.parametrize("bucket", [False, True])
def test_a_server_that_counts_never_has_to_refuse(tmp_path: Path, bucket: bool) -> None:
    async def test(t: Client) -> None:
        async with QuotaServerProcess(60, 0.6, bucket=bucket) as server:
            await t.add_quota(Quota("counted", requests=Rate(60, 0.6)))
            apis = [t.api("counted", server.url, run=f"run-{number}", retries=0) for number in range(3)]
            await t.gather(*(api.get("call") for api in apis for _ in range(80)))
            served = await server.stats()
            assert (len(served.arrivals), served.rejected) == (240, 0)

    play(tmp_path, test)


def test_a_gate_counts_by_its_definition() -> None:
    fixed = RequestLimiter(2, 10.0, FIXED, 0.0)
    assert [fixed.try_acquire(at) for at in (8.0, 9.0, 9.5, 10.0, 10.0, 10.0)] == [0.0, 0.0, 0.5, 0.0, 0.0, 10.0]
    bucket = RequestLimiter(2, 10.0, BUCKET, 0.0)
    assert [bucket.try_acquire(at) for at in (0.0, 0.0, 2.5, 5.0, 8.75)] == [0.0, 0.0, 2.5, 0.0, 1.25]


def test_a_clock_of_the_calendar_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter([0.0, 4e9, 1e9, 2e9] * 100)
    monkeypatch.setattr(transport_module.time, "time", lambda: next(jumps))

    async def test(t: Client) -> None:
        async with QuotaServerProcess(60, 0.6, bucket=False) as server:
            api = t.api("search", server.url, retries=0)
            await t.gather(*(api.get("call") for _ in range(120)))
            assert (await server.stats()).rejected == 0

    play(tmp_path, test, Quota("search", requests=Rate(60, 0.6)))


def test_the_same_without_await(tmp_path: Path) -> None:
    with connect_sync(backend="process", state=tmp_path / "state", quotas=[SEARCH]) as t:
        with t.quota("search", requests=2) as use:
            use.report_response(200, {})
        t.add_quota(Quota("judge", tokens=Rate(10, 1.0)))
        with t.quota("judge", tokens=3) as use:
            use.spent(tokens=2)
        with pytest.raises(ActionLost, match="cannot be reached"):
            t.api("search", "http://127.0.0.1:9", retries=0).get("x")
        with t.sandbox(memory="64MiB") as box:
            assert box.exec("true", quotas={"search": 1}).status is Status.SUCCEEDED


def test_a_quota_that_too_many_wait_for_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        limits = Limits(queue_max=1)
        async with (
            asyncio.timeout(DEADLINE_S),
            connect(backend="process", state=tmp_path / "state", quotas=[SEARCH], limits=limits) as t,
            t.quota("search", requests=4),
        ):
            waiting = asyncio.create_task(t.quota("search").__aenter__())
            await until(lambda: statistics(t).waiting == 1)
            with pytest.raises(AdmissionRefused, match="queue"):
                async with t.quota("search"):
                    raise AssertionError("the queue is full")
            waiting.cancel()
            await asyncio.wait({waiting})

    asyncio.run(main())
