"""The HTTP API of a Docker engine over a unix socket.

Owns all communication with the engine. Has no notion of sandboxes. A refusal of the engine raises EngineRefused with
its reason; an engine that does not respond, or a missing library, raises ManagerError with a remedy.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from tangram.errors import ManagerError
from tangram.managers.http import HttpClient, HttpError, HttpStream, Timeouts

API_VERSION = (1, 41)
"""The version of engine 20.10. An engine that no longer supports it is used with the oldest version that it does."""
REQUEST_S = 120.0
"""Time limit for one request. Creating a container takes a fraction of a second; a loaded machine takes longer."""
CONNECT_S = 10.0
READ_TIMEOUT_S = 600.0
"""Silence during the transfer of a file. Longer than any disk takes."""
REQUEST = Timeouts(REQUEST_S, connect_s=None)
TRANSFER = Timeouts(connect_s=CONNECT_S, read_s=READ_TIMEOUT_S)
EVENT_BYTES_MAX = 1 << 20
CONNECTIONS_MAX = 64
"""Concurrent requests; a further one waits. Streams of programs do not count."""
REASON_BYTES_MAX = 4096
"""Size limit of the engine's description of a failure."""
CHUNK_BYTES = 1 << 16
"""Bytes per read of a stream."""
UPLOAD_BYTES = 1 << 20
"""Bytes per read of a file that is uploaded."""
FRAME = struct.Struct(">BxxxI")
"""The header of each piece of output: the stream, and the number of bytes."""

Json = Any
Query = Mapping[str, str] | Sequence[tuple[str, str]]


class EngineRefused(ManagerError):
    """The engine responded with an error."""

    def __init__(self, status: int, purpose: str, reason: str) -> None:
        self.status = status
        self.reason = reason
        super().__init__(f"the Docker engine refused to {purpose}: {reason} (status {status})", retry=status >= 500)


class ExecStreams:
    """The streams of one program: its output as frames, and its input."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, callback: Callable[[int, bytes], None]) -> None:
        """Call back with STDOUT or STDERR and a piece of output, until all processes have closed them or the engine has
        ended."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                stream, size = FRAME.unpack(await self._reader.readexactly(FRAME.size))
                while size:
                    piece = await self._reader.readexactly(min(size, CHUNK_BYTES))
                    size -= len(piece)
                    callback(stream, piece)

    async def write(self, content: bytes) -> None:
        """Blocks while the program does not read."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(content)
            await self._writer.drain()

    def close_input(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write_eof()

    async def close(self) -> None:
        """Close immediately: input that the program has not read is lost."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class DockerEngine:
    """One engine. To be used between `connect` and `close`."""

    def __init__(self, socket: str) -> None:
        self.socket = socket
        self._http: HttpClient | None = None
        self._prefix = ""

    async def connect(self) -> None:
        self._http = HttpClient(unix_socket=self.socket, connections_max=CONNECTIONS_MAX, resend=True)
        try:
            self._prefix = version_prefix(await self.request_json("GET", "/version", purpose="report its version"))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    # ---- requests ----

    async def request_json(
        self, method: str, path: str, *, purpose: str, query: dict[str, str] | None = None, body: Json = None
    ) -> Json:
        """The decoded response; None if it is empty. `purpose` names the operation in the message of a refusal."""
        async with self._request(method, path, purpose, query, json=body) as response:
            content = await response.read()
        return json.loads(content) if content else None

    async def upload(self, method: str, path: str, tar: AsyncIterator[bytes], *, purpose: str, query: Query) -> bytes:
        kind = {"Content-Type": "application/x-tar"}
        async with self._request(
            method, path, purpose, query, content=tar, headers=kind, timeouts=TRANSFER
        ) as response:
            return await response.read()

    @contextlib.asynccontextmanager
    async def download(
        self, path: str, *, purpose: str, query: dict[str, str]
    ) -> AsyncIterator[tuple[Json, AsyncIterator[bytes]]]:
        """The engine's description of a path, and its content as a tar."""
        async with self._request("GET", path, purpose, query, timeouts=TRANSFER) as response:
            yield _path_stat(response), response.chunks()

    async def path_stat(self, path: str, *, purpose: str, query: dict[str, str]) -> Json:
        async with self._request("HEAD", path, purpose, query) as response:
            return _path_stat(response)

    async def events(
        self, filters: dict[str, list[str]], listening: Callable[[], None], callback: Callable[[Json], None]
    ) -> None:
        """Report every event until the engine ends the stream. `listening` is called once no event can be missed."""
        query = {"filters": json.dumps(filters)}
        async with self._request(
            "GET", "/events", "stream its events", query, timeouts=Timeouts(connect_s=CONNECT_S)
        ) as response:
            listening()
            async for line in response.lines(EVENT_BYTES_MAX):
                callback(json.loads(line))

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        purpose: str,
        query: Query | None = None,
        timeouts: Timeouts = REQUEST,
        **options: Any,
    ) -> AsyncIterator[HttpStream]:
        if self._http is None:
            raise ManagerError("the docker manager is not open: use it inside `async with`", retry=False)
        try:
            url = f"http://engine{self._prefix}{path}"
            async with await self._http.send(method, url, timeouts=timeouts, params=query, **options) as response:
                if response.status >= 400:
                    raise EngineRefused(response.status, purpose, await _reason(response))
                yield response
        except HttpError as error:
            raise ManagerError(
                f"no Docker engine answered at {self.socket} when asked to {purpose} ({error.reason}); "
                "start one (systemctl start docker) or name the socket of one that runs",
                retry=bool(self._prefix),
            ) from error

    # ---- programs ----

    async def start_exec(self, exec_id: str) -> ExecStreams:
        """Start a program and take over the connection, which then carries its streams."""
        body = b'{"Detach":false,"Tty":false}'
        head = (
            f"POST {self._prefix}/exec/{exec_id}/start HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_unix_connection(self.socket, limit=CHUNK_BYTES), CONNECT_S
            )
        except (OSError, TimeoutError) as error:
            raise ManagerError(f"no Docker engine answers at {self.socket}: {error}") from error
        try:
            writer.write(head.encode() + body)
            response_head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_S)
            status = int(response_head.split(b" ", 2)[1])
            if status not in (101, 200):
                rest = await asyncio.wait_for(reader.read(REASON_BYTES_MAX), REQUEST_S)
                raise EngineRefused(status, "start a program", _message(rest))
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
            writer.close()
            raise ManagerError(
                f"the Docker engine closed the connection while it started a program: {error!r}"
            ) from error
        except BaseException:
            writer.close()
            raise
        return ExecStreams(reader, writer)


def version_prefix(version: Json) -> str:
    """The prefix of all request paths, from the response of `/version`. Raises ManagerError for an engine that is too
    old."""
    newest = _version(version["ApiVersion"])
    oldest = _version(version.get("MinAPIVersion", version["ApiVersion"]))
    if newest < API_VERSION:
        raise ManagerError(
            f"the Docker engine speaks API {newest[0]}.{newest[1]}; expected at least "
            f"{API_VERSION[0]}.{API_VERSION[1]}: install Docker 20.10 or later",
            retry=False,
        )
    major, minor = max(API_VERSION, oldest)
    return f"/v{major}.{minor}"


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def _path_stat(response: HttpStream) -> Json:
    return json.loads(base64.b64decode(response.headers["X-Docker-Container-Path-Stat"]))


async def _reason(response: HttpStream) -> str:
    return _message(await response.read_up_to(REASON_BYTES_MAX)) or response.reason or "no reason given"


def _message(content: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(content)["message"])
    return content.decode(errors="replace").strip()


async def gather_bounded(count_max: int, work: Iterable[Awaitable[Any]]) -> list[BaseException | None]:
    """Run all of them, at most `limit` at once; returns their failures."""
    room = asyncio.Semaphore(count_max)

    async def one(job: Awaitable[Any]) -> None:
        async with room:
            await job

    return await asyncio.gather(*(one(job) for job in work), return_exceptions=True)


async def read_chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    """The whole file, for an upload."""
    await asyncio.to_thread(file.seek, 0)
    while piece := await asyncio.to_thread(file.read, UPLOAD_BYTES):
        yield piece
