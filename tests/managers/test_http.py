"""The HTTP client: errors, limits, streams and aborts, against real servers on this machine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tangram.errors import InvalidConfig, ManagerError
from tangram.managers.http import (
    BlockingHttpClient,
    ConnectFailed,
    Disconnected,
    HttpClient,
    InvalidUrl,
    ResponseBroken,
    ResponseTimeout,
    ResponseTooLarge,
    Timeouts,
    TlsFailed,
    backoff_s,
)

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(answer: Answer, use: Callable[[HttpClient, str], Awaitable[None]]) -> None:
    """Runs `use` with a client and the address of a server whose connections `answer` handles."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        client = HttpClient()
        try:
            await use(client, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        finally:
            await client.close()
            server.close()

    asyncio.run(main())


def sends(*chunks: bytes, length: int | None = None) -> Answer:
    """Answers a request with these chunks as the body."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        total = sum(map(len, chunks)) if length is None else length
        writer.write(
            f"HTTP/1.1 200 OK\r\nX-Name: value\r\nConnection: close\r\nContent-Length: {total}\r\n\r\n".encode()
        )
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()

    return answer


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_whole_response() -> None:
    async def use(client: HttpClient, url: str) -> None:
        response = await client.request("GET", url, timeout_s=30.0, bytes_max=100)
        assert (response.status, response.content, response.ok) == (200, b'{"a": 1}', True)
        assert response.headers["x-name"] == "value" and response.json() == {"a": 1}

    run(sends(b'{"a"', b": 1}"), use)


def test_a_body_above_its_limit_is_not_read() -> None:
    async def use(client: HttpClient, url: str) -> None:
        with pytest.raises(ResponseTooLarge, match="responded 200 with more than 10 bytes") as failed:
            await client.request("GET", url, timeout_s=30.0, bytes_max=10)
        assert not failed.value.retry

    run(sends(b"x" * 100_000), use)


def test_lines_of_a_stream_and_their_limit() -> None:
    async def use(client: HttpClient, url: str) -> None:
        async with await client.send("GET", url, timeouts=Timeouts(30.0)) as response:
            assert [line async for line in response.lines(1 << 20)] == [b"one", b"", b"two"]
        async with await client.send("GET", url, timeouts=Timeouts(30.0)) as response:
            with pytest.raises(ResponseTooLarge, match="a line of more than 2 bytes"):
                assert [line async for line in response.lines(2)]

    run(sends(b"on", b"e\n\ntwo\nrest"), use)


def test_an_unreachable_server_cannot_have_received_the_request() -> None:
    async def use(client: HttpClient, url: str) -> None:
        with pytest.raises(ConnectFailed, match="cannot be reached") as failed:
            await client.request("GET", f"http://127.0.0.1:{free_port()}", timeout_s=30.0, bytes_max=10)
        assert failed.value.retry and failed.value.reason == "Connection refused"
        with pytest.raises(TlsFailed, match="cannot be reached"):
            await client.request("GET", url.replace("http:", "https:"), timeout_s=30.0, bytes_max=10)

    run(hangs_up_at_once, use)


async def hangs_up_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await writer.drain()


def test_a_server_that_disconnects_may_have_received_the_request() -> None:
    async def use(client: HttpClient, url: str) -> None:
        with pytest.raises(Disconnected) as failed:
            await client.request("GET", url, timeout_s=30.0, bytes_max=10)
        assert not failed.value.retry

    run(hangs_up, use)


def test_a_body_that_ends_early() -> None:
    async def use(client: HttpClient, url: str) -> None:
        with pytest.raises(ResponseBroken):
            await client.request("GET", url, timeout_s=30.0, bytes_max=1000)

    run(sends(b"half", length=100), use)


def test_a_silent_server_times_out() -> None:
    async def use(client: HttpClient, url: str) -> None:
        with pytest.raises(ResponseTimeout, match=r"did not respond within 0.2 s"):
            await client.request("GET", url, timeout_s=0.2, bytes_max=10)
        with pytest.raises(ResponseTimeout, match=r"did not respond within 0.2 s"):
            await client.send("GET", url, timeouts=Timeouts(read_s=0.2))

    run(silent, use)


@pytest.mark.parametrize("url", ["", "example.com/x", "ftp://example.com", "http://", 7])
def test_an_address_that_cannot_be_requested(url: str) -> None:
    async def use(client: HttpClient, _: str) -> None:
        with pytest.raises(InvalidUrl, match="such as https://"):
            await client.request("GET", url, timeout_s=1.0, bytes_max=10)

    run(silent, use)


def test_a_file_that_holds_no_certificates(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for path in (tmp_path / "ca.pem", tmp_path / "gone.pem"):
        with pytest.raises(InvalidConfig, match=r"ca: expected a file of certificates in PEM"):
            asyncio.run(HttpClient(ca=str(path)).open())


def test_a_response_that_is_no_json() -> None:
    async def use(client: HttpClient, url: str) -> None:
        response = await client.request("GET", url, timeout_s=30.0, bytes_max=100)
        with pytest.raises(ManagerError, match="not JSON"):
            response.json()

    run(sends(b"hello"), use)


def test_a_blocked_request_is_aborted_by_another_thread() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = BlockingHttpClient(f"http://127.0.0.1:{server.getsockname()[1]}")
        failures: list[OSError] = []

        def request() -> None:
            try:
                client.request("GET", "/", timeout_s=60.0)
            except OSError as error:
                failures.append(error)

        thread = threading.Thread(target=request)
        thread.start()
        connection, _ = server.accept()
        with connection:
            connection.recv(1)  # it waits for the response now
            client.abort()
            thread.join(60.0)
    assert len(failures) == 1


def test_backoff_doubles_up_to_its_limit() -> None:
    for tried, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (10, 5.0)):
        pauses = [backoff_s(tried, 1.0, 5.0) for _ in range(100)]
        assert longest / 2 <= min(pauses) and max(pauses) <= longest
