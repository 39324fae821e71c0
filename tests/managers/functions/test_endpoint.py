"""HTTP function endpoints that answer well, badly, late or never."""

from __future__ import annotations

import asyncio
import email.utils
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.managers.functions.conftest import Bench

from tangram.client.functions import endpoint
from tangram.errors import ActionLost, FunctionFailed, InvalidAction
from tangram.managers.functions import endpoint as module
from tangram.managers.functions.work import EndpointSpec

Run = Callable[..., None]
Say = Callable[["Request"], Awaitable[None]]


class Request:
    """What came, and where the answer goes."""

    def __init__(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.head = head
        self.body = body
        self._writer = writer

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def say(self, status: int, body: bytes = b"", **headers: str) -> None:
        more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        await self.raw(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body)


class Server:
    """Answers each request as its script says; the last line of that goes on for ever."""

    def __init__(self, *script: Say) -> None:
        self._script = script
        self.requests: list[Request] = []
        self.under_way = self.most = 0

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/score"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(line for line in head.split("\r\n") if line.lower().startswith("content-length"))
            request = Request(head, await reader.readexactly(int(length.split(":")[1])), writer)
            self.requests.append(request)
            await self._script[min(len(self.requests), len(self._script)) - 1](request)
        finally:
            self.under_way -= 1
            writer.close()


def says(status: int, body: bytes = b"", **headers: str) -> Say:
    return lambda request: request.say(status, body, **headers)


async def adds(request: Request) -> None:
    body = json.loads(request.body)
    await request.say(200, json.dumps({"score": body["left"] + body["right"]}).encode())


async def never(request: Request) -> None:
    await asyncio.sleep(600)


async def garbage(request: Request) -> None:
    await request.raw(b"\x00\x01 this is no HTTP at all\r\n\r\n")


async def breaks_off(request: Request) -> None:
    await request.raw(b"HTTP/1.1 200 X\r\nContent-Length: 100\r\n\r\n[1,")


async def pours(request: Request) -> None:
    await request.raw(b"HTTP/1.1 200 X\r\nContent-Length: 99999999999\r\n\r\n")
    while True:
        await request.raw(b" " * (1 << 20))


def played(run: Run, script: tuple[Say, ...], test: Callable[[Bench, Server], Awaitable[None]], **options: Any) -> None:
    async def inside(bench: Bench) -> None:
        async with Server(*script) as server:
            await test(bench, server)

    run(inside, **options)


def at(server: Server, **options: Any) -> EndpointSpec:
    return endpoint(server.url, **(dict(timeout_s=10.0, retries=2) | options))


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)


def test_json_goes_in_by_name_or_as_one_value_and_json_comes_back(run: Run) -> None:
    async def test(bench: Bench, server: Server) -> None:
        score = at(server)
        assert await bench.call(score, left=1, right=2) == {"score": 3}
        assert await bench.call(score, {"left": "a", "right": "b"}) == {"score": "ab"}
        first, second = server.requests
        assert first.head.startswith("POST /score HTTP/1.1") and "application/json" in first.head
        assert "Idempotency-Key: test-call-1\r\n" in first.head and "Idempotency-Key: test-call-2\r\n" in second.head
        with pytest.raises(InvalidAction, match="JSON"):
            await bench.call(score, left=object())
        with pytest.raises(InvalidAction, match="one JSON value"):
            await bench.call(score, 1, 2)

    played(run, (adds,), test)


def test_calls_run_up_to_the_concurrency_of_the_endpoint(run: Run) -> None:
    async def test(bench: Bench, server: Server) -> None:
        score = at(server, max_concurrency=2)
        await asyncio.gather(*(bench.call(score, left=1, right=number) for number in range(10)))
        assert server.most == 2 and len(server.requests) == 10

    async def slowly(request: Request) -> None:
        await asyncio.sleep(0.02)
        await adds(request)

    played(run, (slowly,), test)


def test_two_calls_with_one_key_post_once(run: Run) -> None:
    async def test(bench: Bench, server: Server) -> None:
        score = at(server)
        for _ in range(2):
            assert await bench.call(score, left=1, right=2, idempotency_key="k") == {"score": 3}
        assert len(server.requests) == 1 and "Idempotency-Key: k\r\n" in server.requests[0].head

    played(run, (adds,), test)


PAGE = b"<html><h1>500 Internal Server Error</h1><hr>nginx</html>"
OVERLOADED = b'{"error": {"type": "overloaded_error"}}'


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (502, b""),
        (503, b""),
        (504, b"{}"),
        (429, b""),
        (500, b""),
        (500, PAGE),
        (520, PAGE),
        (529, OVERLOADED),
        (599, b""),
    ],
)
def test_a_value_after_two_busy_responses_is_a_value(run: Run, status: int, body: bytes) -> None:
    async def test(bench: Bench, server: Server) -> None:
        result = await bench.try_call(at(server), left=1, right=2)
        assert result.value == {"score": 3} and len(server.requests) == 3
        assert len({request.head.split("Idempotency-Key: ")[1].split("\r\n")[0] for request in server.requests}) == 1

    played(run, (says(status, body), says(status, body), adds), test)


def test_retry_after_is_followed_unless_it_is_too_long(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waited.append(seconds)
        await sleep(0)

    async def test(bench: Bench, server: Server) -> None:
        monkeypatch.setattr(module.asyncio, "sleep", note)
        try:
            result = await bench.try_call(at(server), left=1, right=2)
        finally:
            monkeypatch.undo()
        assert result.kind == "lost" and "with Retry-After of 3600 s" in result.reason
        pauses = [seconds for seconds in waited if seconds > 1]
        assert pauses[0] == 7.0 and 20.0 < pauses[1] <= 30.0

    async def says_date(request: Request) -> None:
        await request.say(429, Retry_After=email.utils.formatdate(time.time() + 30, usegmt=True))

    played(run, (says(429, Retry_After="7"), says_date, says(429, Retry_After="3600")), test)


def test_a_500_with_json_and_a_4xx_are_errors_of_the_function_at_once(run: Run) -> None:
    async def test(bench: Bench, server: Server) -> None:
        score = at(server)
        for status in (500, 501, 505, 422, 404, 302):
            result = await bench.try_call(score)
            assert result.kind == "error" and result.error is not None
            assert (result.error.kind, result.error.message) == ("answer", f"it responded with {status}")
        assert result.error.traceback == "moved"
        assert len(server.requests) == 6
        with pytest.raises(FunctionFailed, match="it responded with 302"):
            await bench.call(score)

    script = (
        says(500, b'"ValueError"'),
        says(501, PAGE),
        says(505),
        says(422, b"left is missing"),
        says(404),
        says(302, b"moved", Location="/x"),
    )
    played(run, script, test)


@pytest.mark.parametrize("body", [b"<html>", b"", b'{"a": 1', b"\xff\xfe", b"1" + b"0" * 40])
def test_an_answer_that_is_no_json_is_an_error_of_the_function(run: Run, body: bytes) -> None:
    async def test(bench: Bench, server: Server) -> None:
        result = await bench.try_call(at(server))
        assert result.kind == "error" and "it responded with 200, and" in result.reason
        assert len(server.requests) == 1

    played(run, (says(200, body),), test)


def test_an_answer_that_is_too_large_is_an_error_of_the_function(run: Run) -> None:
    async def test(bench: Bench, server: Server) -> None:
        result = await bench.try_call(at(server))
        assert result.kind == "error" and "more than 16777216 bytes" in result.reason
        assert len(server.requests) == 1

    async def gives_up(request: Request) -> None:
        with pytest.raises(ConnectionError):
            await pours(request)

    played(run, (gives_up,), test)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (never, "did not respond within 0.2 s"),
        (garbage, "Error: "),
        (breaks_off, "Error: "),
        (says(503), "responded with 503"),
        (says(500, PAGE), "responded with 500"),
        (says(520, PAGE), "responded with 520"),
    ],
)
def test_a_call_without_any_response_is_lost_after_its_retries(run: Run, script: Say, said: str) -> None:
    async def test(bench: Bench, server: Server) -> None:
        score = at(server, **({"timeout_s": 0.2} if script is never else {}))
        result = await bench.try_call(score)
        assert result.kind == "lost" and said in result.reason and "after 3 attempts" in result.reason
        assert len(server.requests) == 3
        with pytest.raises(ActionLost):
            await bench.call(score)

    played(run, (script,), test)


def test_an_unreachable_endpoint_is_lost(run: Run) -> None:
    async def test(bench: Bench, server: Server) -> None:
        await server.__aexit__()
        result = await bench.try_call(at(server, retries=1))
        assert result.kind == "lost" and "after 2 attempts" in result.reason

    played(run, (adds,), test)


def test_a_slow_response_within_the_timeout_is_a_value(run: Run) -> None:
    async def slowly(request: Request) -> None:
        await asyncio.sleep(0.3)
        await adds(request)

    async def test(bench: Bench, server: Server) -> None:
        assert await bench.call(at(server), left=1, right=2) == {"score": 3}
        assert len(server.requests) == 1

    played(run, (slowly,), test)


def test_a_call_cancelled_while_it_waits_for_a_response_ends_at_once(run: Run) -> None:
    async def test(bench: Bench, server: Server) -> None:
        task = asyncio.create_task(bench.call(at(server)))
        while not server.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        late = await bench.try_call(at(server, timeout_s=60.0), deadline_s=0.1)
        assert late.kind == "timed_out"

    played(run, (never,), test)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x", "127.0.0.1:9000", 5, "http://h:abc/", "http://h:99999/", "http://h:0/", "http:///x", "http://",
        "http://x/a\nb", "http://x /a", "http://[::1/x", "http://..x/", "http://x\udcff/",
    ],
)  # fmt: skip
def test_an_invalid_url_is_rejected_where_it_is_declared(url: Any) -> None:
    with pytest.raises(InvalidAction, match="url"):
        endpoint(url)


@pytest.mark.parametrize(
    "headers",
    [
        ["a"], "a", 0, {"a": 1}, {1: "a"}, {"a": "b\nc"}, {"a": "b\r\nHost: c"}, {"a": "b\0"}, {"a b": "c"}, {"": "c"},
        {"a:": "c"}, {"a": "\udcff"}, {"content-length": "5"}, {"Transfer-Encoding": "chunked"},
    ],
)  # fmt: skip
def test_an_invalid_header_is_rejected_where_it_is_declared(headers: Any) -> None:
    with pytest.raises(InvalidAction, match="headers"):
        endpoint("http://x", headers=headers)


def test_invalid_options_of_an_endpoint_are_rejected_where_they_are_declared() -> None:
    assert endpoint("http://süß.example:80/ä?b=c", headers={"X-Key": "süß\t"}).max_concurrency == 16
    for options in ({"retries": -1}, {"max_concurrency": 0}, {"timeout_s": 0}):
        with pytest.raises(InvalidAction, match=next(iter(options))):
            endpoint("http://x", **options)


def test_headers_override_the_defaults_in_any_case(run: Run) -> None:
    async def test(bench: Bench, server: Server) -> None:
        headers = {"content-type": "application/x-ours", "X-Key": "süß"}
        await bench.call(at(server, headers=headers), left=1, right=2)
        head = server.requests[0].head
        assert head.lower().count("content-type:") == 1 and "application/x-ours" in head and "X-Key: süß\r\n" in head

    played(run, (adds,), test)


@pytest.mark.parametrize("key", ["a\nb", "a\r\nHost: b", "\udcff", "\0"])
def test_a_key_that_no_header_can_hold_is_rejected_at_once(run: Run, key: str) -> None:
    async def test(bench: Bench, server: Server) -> None:
        with pytest.raises(InvalidAction, match="idempotency_key"):
            await bench.call(at(server), left=1, right=2, idempotency_key=key)
        assert server.requests == []

    played(run, (adds,), test)


@pytest.mark.parametrize(
    ("said", "where"),
    [
        (float("nan"), r"arguments: nan"),
        ({"a": None, "score": [1.0, float("-inf")]}, r"arguments\['score'\]\[1\]: -inf"),
    ],
)
def test_numbers_that_json_lacks_are_rejected_at_once(run: Run, said: object, where: str) -> None:
    async def test(bench: Bench, server: Server) -> None:
        with pytest.raises(InvalidAction, match=where):
            await bench.call(at(server), said)
        assert server.requests == []
        assert await bench.call(at(server), {"left": "null", "right": "", "more": None}) == {"score": "null"}

    played(run, (adds,), test)
