"""Clients of a shared service for benchmarks: plain HTTP, with the same requests that the SDK makes.

Owns their connections and what they have to acknowledge. Promises that every answer which is not the expected one is
raised, so that whoever counts answers counts right ones.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from tangram.core.action import Status
from tangram.core.demand import Demand
from tangram.errors import ManagerError
from tangram.managers.work import MIB, Open, SandboxSpec
from tangram.runtime.wire import Acknowledged, AnyWork, Reply, Submission

if TYPE_CHECKING:
    import aiohttp

WAIT_S = 60.0
"""Of one long poll: the most that the service takes."""
ACKNOWLEDGE_S = 0.5
"""As the SDK does."""
MEMORY_MIB = 16
SPEC = SandboxSpec(memory_bytes=MEMORY_MIB * MIB)

_encode = msgspec.json.Encoder().encode
_reply = msgspec.json.Decoder(Reply).decode


class Caller:
    """Clients of one process, which share their connections and acknowledge together, as those of one SDK do."""

    _prefixes = itertools.count(1)

    def __init__(self, url: str) -> None:
        self._url = url
        self._names = itertools.count(1)
        self._prefix = f"{os.getpid()}-{time.monotonic_ns()}-{next(self._prefixes)}"
        self._arrived: list[str] = []
        self._session: aiohttp.ClientSession
        self._acknowledging: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        import aiohttp

        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0))
        self._acknowledging = asyncio.create_task(self._acknowledge_often())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._acknowledging.cancel()
        await asyncio.gather(self._acknowledging, return_exceptions=True)
        await self.acknowledge()
        await self._session.close()
        await asyncio.sleep(0)

    def name(self) -> str:
        return f"{self._prefix}-{next(self._names)}"

    async def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Raises ManagerError for every answer that is none."""
        headers = {"content-type": "application/json"} if body is not None else {}
        async with self._session.request(method, self._url + path, data=body, headers=headers) as response:
            content = await response.read()
            if response.status >= 400:
                shown = content[:300].decode(errors="replace")
                raise ManagerError(f"{method} {path} was answered with {response.status}: {shown}", retry=False)
            return content

    async def do(
        self,
        work: AnyWork,
        sandbox: str,
        *,
        id: str = "",
        demand: Demand | None = None,
        run: str = "",
        task: str = "",
        trajectory: str = "",
    ) -> Reply:
        """Its end. Raises ManagerError if it did not succeed."""
        id = id or self.name()
        submission = Submission(
            id=id, work=work, sandbox=sandbox, demand=demand, run=run, task=task, trajectory=trajectory
        )
        reply = _reply(await self.ask("POST", f"/v1/actions?wait_s={WAIT_S:g}", _encode(submission)))
        while reply.settled is None:
            reply = _reply(await self.ask("GET", f"/v1/actions/{id}?wait_s={WAIT_S:g}"))
        if reply.id != id or reply.settled.outcome.status is not Status.SUCCEEDED:
            raise ManagerError(f"asked for {id}, which should succeed, and got {reply}", retry=False)
        self._arrived.append(id)
        return reply

    async def acknowledge(self) -> None:
        ids, self._arrived = self._arrived, []
        if ids:
            await self.ask("POST", "/v1/acknowledge", _encode(Acknowledged(actions=ids)))

    async def _acknowledge_often(self) -> None:
        while True:
            await asyncio.sleep(ACKNOWLEDGE_S)
            await self.acknowledge()

    async def opened(self) -> str:
        """The name of a new sandbox."""
        name = self.name()
        await self.do(Open(spec=SPEC), name)
        return name
