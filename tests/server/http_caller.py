"""HTTP requests to a service by hand: requests that no client of ours would send."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec
import pytest
from tests.server.shared import serving
from yarl import URL

from tangram.server.http.listener import TimeoutHttpProtocol
from tangram.server.serve import RunningServer

ADMIN_TOKEN = "0123456789abcdef" * 4
DEADLINE_S = 60.0
"""Of a test: a hang is a failure."""


class Answer(NamedTuple):
    status: int
    content: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.content)

    @property
    def error(self) -> dict[str, Any]:
        """What a refusal says; it is always JSON of one form."""
        assert self.status >= 400 and self.headers["content-type"] == "application/json", self
        document = self.json
        assert set(document) == {"error"} and document["error"]["code"] and document["error"]["message"], self
        return document["error"]

    @property
    def code(self) -> str:
        return str(self.error["code"])


class Caller:
    """Requests with one token, or none. Paths go out as they are written."""

    def __init__(self, session: aiohttp.ClientSession, address: str, token: str = "", name: str = "") -> None:
        self.session = session
        self.address = address
        self.token = token
        self.name = name

    async def request(
        self,
        method: str,
        path: str,
        record: Any = None,
        /,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        **query: object,
    ) -> Answer:
        sent = {"authorization": f"Bearer {self.token}"} if self.token else {}
        if record is not None:
            body, sent["content-type"] = msgspec.json.encode(record), "application/json"
        if isinstance(body, bytes):
            body = io.BytesIO(body)  # as aiohttp wants what is large
        sent.update(headers or {})
        words = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in query.items())
        url = URL(f"{self.address}{path}{'?' + words if words else ''}", encoded=True)
        async with self.session.request(method, url, data=body, headers=sent, allow_redirects=False) as response:
            return Answer(
                response.status,
                await response.read(),
                {name.lower(): value for name, value in response.headers.items()},
            )

    async def submit(self, id: str, work: Mapping[str, Any], wait_s: float = 30.0, **more: Any) -> Answer:
        return await self.request("POST", "/v1/actions", {"id": id, "work": work, **more}, wait_s=wait_s)

    async def open(self, name: str = "box", **spec: Any) -> None:
        response = await self.submit(f"open-{name}", {"type": "Open", "spec": spec}, sandbox=name)
        assert response.json["settled"]["outcome"]["status"] == "succeeded", response

    async def run(self, id: str, command: str, *, sandbox: str = "box", wait_s: float = 30.0, **more: Any) -> Answer:
        return await self.submit(id, {"type": "Exec", "command": command}, wait_s, sandbox=sandbox, **more)

    async def until(self, id: str, state: str) -> None:
        """Until an action has come that far."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                response = await self.request("GET", f"/v1/actions/{id}", wait_s=0)
                if response.status == 200 and response.json["state"] == state:
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def open_caller(address: str, token: str = "") -> AsyncIterator[Caller]:
    connector = aiohttp.TCPConnector(limit=0)
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(connector=connector) as session:
        yield Caller(session, address, token)


@asynccontextmanager
async def local_service(folder: Path, **options: Any) -> AsyncIterator[Caller]:
    """A client on the machine of a service without tokens."""
    async with serving(folder, **options) as up, open_caller(up.address) as caller:
        yield caller


class Tenants(NamedTuple):
    up: RunningServer
    admin: Caller
    a: Caller
    b: Caller


@asynccontextmanager
async def tenants(folder: Path, caps: Mapping[str, Any] | None = None, **options: Any) -> AsyncIterator[Tenants]:
    """A service with an admin and two runs with distinctive names."""
    async with (
        serving(folder, admin_token_file=str(token_file(folder)), **options) as up,
        open_caller(up.address, ADMIN_TOKEN) as admin,
    ):
        callers = [await make_run(admin, name, caps) for name in ("alphaville", "bogota")]
        yield Tenants(up, admin, *callers)


async def make_run(admin: Caller, name: str, caps: Mapping[str, Any] | None = None) -> Caller:
    made = await admin.request("POST", f"/v1/runs/{name}", {"caps": dict(caps or {})})
    assert made.status == 201, made
    return Caller(admin.session, admin.address, made.json["token"], name)


def token_file(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "token"
    path.write_text(ADMIN_TOKEN + "\n")
    path.chmod(0o600)
    return path


# ---- by bytes -----------------------------------------------------------------------------------------------------


class Line:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @property
    def port(self) -> int:
        return int(self.writer.get_extra_info("sockname")[1])

    def stop_reading(self) -> None:
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """The status and the body of the next answer, which says its length."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        return int(lines[0].split()[1]), await self.reader.readexactly(int(headers.get("content-length", "0")))

    async def ended(self) -> bytes:
        """Until the service has hung up: what came before."""
        content = b""
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                while part := await self.reader.read(1 << 16):
                    content += part
        return content


@asynccontextmanager
async def line(address: str, **options: Any) -> AsyncIterator[Line]:
    parts = urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, **options)
    try:
        yield Line(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def open_ports(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The ports of clients that are connected to a service of this process now."""
    ports: set[int] = set()
    made, lost = TimeoutHttpProtocol.connection_made, TimeoutHttpProtocol.connection_lost

    def connection_made(self: TimeoutHttpProtocol, transport: asyncio.Transport) -> None:
        made(self, transport)
        ports.add(transport.get_extra_info("peername")[1])

    def connection_lost(self: TimeoutHttpProtocol, error: Exception | None) -> None:
        ports.discard(self.transport.get_extra_info("peername")[1])
        lost(self, error)

    monkeypatch.setattr(TimeoutHttpProtocol, "connection_made", connection_made)
    monkeypatch.setattr(TimeoutHttpProtocol, "connection_lost", connection_lost)
    return ports


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():  # noqa: ASYNC110 - the conditions have no events
            await asyncio.sleep(0.01)
