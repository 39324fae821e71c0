"""The Docker engine, as its HTTP API over a unix socket shows it.

Owns every byte that goes to the engine and comes from it. Knows nothing of sandboxes. Promises that what the engine
refuses is an EngineRefused that says why, and that an engine which does not answer, or a library which is missing, is a
ManagerError that says what to do.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, TypeVar

from tangram.errors import ManagerError

if TYPE_CHECKING:
    import aiohttp

API_VERSION = (1, 41)
"""Of the engine 20.10. An engine that no longer speaks it is spoken to in the oldest version that it does."""
REQUEST_S = 120.0
"""For one request. Making a container takes a fraction of a second; a loaded machine takes its time."""
CONNECT_S = 10.0
SILENCE_S = 600.0
"""In which nothing is heard of a file that goes to the engine or comes from it. Longer than any disk takes."""
CONNECTIONS_MAX = 64
"""Requests under way at once; a further one waits. The streams of programs do not count."""
REASON_BYTES_MAX = 4096
"""Of what the engine says about a failure."""
PIECE_BYTES = 1 << 16
"""Of a stream, read at once."""
UPLOAD_BYTES = 1 << 20
"""Of a file that is sent, read at once."""
FRAME = struct.Struct(">BxxxI")
"""Before each piece of output: which stream, and how many bytes."""

T = TypeVar("T")
Json = Any
Query = Mapping[str, str] | Sequence[tuple[str, str]]


class EngineRefused(ManagerError):
    """The engine answered, and the answer is no."""

    def __init__(self, status: int, what: str, reason: str) -> None:
        self.status = status
        self.answer = reason
        super().__init__(f"the Docker engine refused to {what}: {reason} (status {status})", retry=status >= 500)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """The whole of it, even if the caller is cancelled meanwhile; the cancellation is felt afterwards.

    What was begun at the engine goes on there whether or not somebody listens, so it is awaited before it is undone.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # it has been seen
        raise


class Streams:
    """The streams of one program: what it writes as frames, and its input."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, tell: Callable[[int, bytes], None]) -> None:
        """Tell STDOUT or STDERR and a piece of it, until nobody holds them open any more, or the engine is gone."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                stream, size = FRAME.unpack(await self._reader.readexactly(FRAME.size))
                while size:
                    piece = await self._reader.readexactly(min(size, PIECE_BYTES))
                    size -= len(piece)
                    tell(stream, piece)

    async def write(self, content: bytes) -> None:
        """Waits while the program does not read."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(content)
            await self._writer.drain()

    def close_input(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write_eof()

    async def close(self) -> None:
        """At once: what the program has not read, it never will."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Engine:
    """One engine. Use after `connect` and before `close`."""

    def __init__(self, socket: str) -> None:
        self.socket = socket
        self._session: aiohttp.ClientSession | None = None
        self._prefix = ""
        self._library_errors: tuple[type[BaseException], ...] = ()

    async def connect(self) -> None:
        import aiohttp  # takes longer to import than all else

        self._library_errors = (aiohttp.ClientError, TimeoutError, OSError)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(self.socket, limit=CONNECTIONS_MAX),
            base_url="http://engine",
            timeout=aiohttp.ClientTimeout(total=REQUEST_S),
        )
        try:
            self._prefix = version_prefix(await self.json("GET", "/version", what="say its version"))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # ---- requests ----

    async def json(
        self, method: str, path: str, *, what: str, query: dict[str, str] | None = None, body: Json = None
    ) -> Json:
        """The answer, decoded; None if it is empty. `what` is what was wanted, for the message of a refusal."""
        async with self._request(method, path, what, query, json=body) as answer:
            content = await answer.read()
        return json.loads(content) if content else None

    async def upload(self, method: str, path: str, tar: AsyncIterator[bytes], *, what: str, query: Query) -> bytes:
        kind = {"Content-Type": "application/x-tar"}
        async with self._request(method, path, what, query, data=tar, headers=kind, timeout=self._timeout()) as answer:
            return await answer.read()

    @contextlib.asynccontextmanager
    async def download(
        self, path: str, *, what: str, query: dict[str, str]
    ) -> AsyncIterator[tuple[Json, AsyncIterator[bytes]]]:
        """What the engine says about the path, and its content as a tar."""
        async with self._request("GET", path, what, query, timeout=self._timeout()) as answer:
            yield _path_stat(answer), answer.content.iter_chunked(PIECE_BYTES)

    async def path_stat(self, path: str, *, what: str, query: dict[str, str]) -> Json:
        async with self._request("HEAD", path, what, query) as answer:
            return _path_stat(answer)

    async def events(
        self, filters: dict[str, list[str]], listening: Callable[[], None], tell: Callable[[Json], None]
    ) -> None:
        """Tell every event until the engine ends the stream. `listening` is called when none is missed any more."""
        query = {"filters": json.dumps(filters)}
        async with self._request("GET", "/events", "tell its events", query, timeout=self._timeout(None)) as answer:
            listening()
            async for line in answer.content:
                tell(json.loads(line))

    def _timeout(self, silence_s: float | None = SILENCE_S) -> aiohttp.ClientTimeout:
        """Of what lasts as long as it lasts."""
        import aiohttp

        return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, what: str, query: Query | None = None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise ManagerError("the docker manager is not open: use it inside `async with`", retry=False)
        try:
            async with self._session.request(method, self._prefix + path, params=query, **options) as answer:
                if answer.status >= 400:
                    raise EngineRefused(answer.status, what, await _reason(answer))
                yield answer
        except self._library_errors as error:
            raise ManagerError(
                f"no Docker engine answered at {self.socket} when asked to {what} ({type(error).__name__}: {error}); "
                "start one (systemctl start docker) or name the socket of one that runs",
                retry=bool(self._prefix),
            ) from error

    # ---- programs ----

    async def start_exec(self, exec_id: str) -> Streams:
        """Start it and take over the connection: from then on it carries the streams of the program."""
        body = b'{"Detach":false,"Tty":false}'
        head = (
            f"POST {self._prefix}/exec/{exec_id}/start HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_unix_connection(self.socket, limit=PIECE_BYTES), CONNECT_S
            )
        except (OSError, TimeoutError) as error:
            raise ManagerError(f"no Docker engine answers at {self.socket}: {error}") from error
        try:
            writer.write(head.encode() + body)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_S)
            status = int(answer.split(b" ", 2)[1])
            if status not in (101, 200):
                rest = await asyncio.wait_for(reader.read(REASON_BYTES_MAX), REQUEST_S)
                raise EngineRefused(status, "start a program", _message(rest))
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
            writer.close()
            raise ManagerError(f"the Docker engine broke off the start of a program: {error!r}") from error
        except BaseException:
            writer.close()
            raise
        return Streams(reader, writer)


def version_prefix(answer: Json) -> str:
    """Of the paths of all requests, by the answer of `/version`. Raises ManagerError for an engine that is too old."""
    newest = _version(answer["ApiVersion"])
    oldest = _version(answer.get("MinAPIVersion", answer["ApiVersion"]))
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


def _path_stat(answer: aiohttp.ClientResponse) -> Json:
    return json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))


async def _reason(answer: aiohttp.ClientResponse) -> str:
    return _message(await answer.content.read(REASON_BYTES_MAX)) or answer.reason or "no reason given"


def _message(content: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(content)["message"])
    return content.decode(errors="replace").strip()


async def gather_bounded(count_max: int, work: Iterable[Awaitable[Any]]) -> list[BaseException | None]:
    """All of them, at most so many at once; their failures."""
    room = asyncio.Semaphore(count_max)

    async def one(job: Awaitable[Any]) -> None:
        async with room:
            await job

    return await asyncio.gather(*(one(job) for job in work), return_exceptions=True)


async def pieces_of(file: IO[bytes]) -> AsyncIterator[bytes]:
    """The whole of a file, for an upload."""
    await asyncio.to_thread(file.seek, 0)
    while piece := await asyncio.to_thread(file.read, UPLOAD_BYTES):
        yield piece
