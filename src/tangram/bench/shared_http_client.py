"""Clients of a shared service for benchmarks: plain HTTP with the requests of the SDK.

Owns the connections and the pending acknowledgements. An unexpected response raises, so that counted responses are
correct ones.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from types import TracebackType
from typing import Self

import msgspec

from tangram.core.action import Status
from tangram.core.demand import Demand
from tangram.errors import ManagerError
from tangram.managers.http import HttpClient, Timeouts
from tangram.managers.work import MIB, Open, SandboxSpec
from tangram.runtime.wire import Acknowledgement, ActionReply, AnyWork, Submission

WAIT_S = 60.0
"""Timeout of one long poll: the maximum of the service."""
RESPONSE_TIMEOUT_S = 300.0
ACKNOWLEDGE_S = 0.5
"""Pause between two acknowledgements, as in the SDK."""
MEMORY_MIB = 16
SPEC = SandboxSpec(memory_bytes=MEMORY_MIB * MIB)

_encode = msgspec.json.Encoder().encode
_reply = msgspec.json.Decoder(ActionReply).decode


class SharedHttpClient:
    """Clients of one process, which share connections and acknowledgements, as those of one SDK do."""

    _prefixes = itertools.count(1)

    def __init__(self, url: str) -> None:
        self._url = url
        self._names = itertools.count(1)
        self._prefix = f"{os.getpid()}-{time.monotonic_ns()}-{next(self._prefixes)}"
        self._unacknowledged: list[str] = []
        self._http = HttpClient(resend=True)
        self._acknowledging: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._acknowledging = asyncio.create_task(self._acknowledge_loop())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._acknowledging.cancel()
        await asyncio.gather(self._acknowledging, return_exceptions=True)
        await self.acknowledge()
        await self._http.close()

    def new_id(self) -> str:
        return f"{self._prefix}-{next(self._names)}"

    async def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Send a request. Raises ManagerError for every error response."""
        headers = {"content-type": "application/json"} if body is not None else None
        async with await self._http.send(
            method, self._url + path, timeouts=Timeouts(RESPONSE_TIMEOUT_S), headers=headers, content=body
        ) as response:
            content = await response.read()
            if response.status >= 400:
                shown = content[:300].decode(errors="replace")
                raise ManagerError(f"{method} {path} was answered with {response.status}: {shown}", retry=False)
            return content

    async def run_action(
        self,
        work: AnyWork,
        sandbox: str,
        *,
        id: str = "",
        demand: Demand | None = None,
        run: str = "",
        task: str = "",
        trajectory: str = "",
    ) -> ActionReply:
        """Run an action to its end. Raises ManagerError if it did not succeed."""
        id = id or self.new_id()
        submission = Submission(
            id=id, work=work, sandbox=sandbox, demand=demand, run=run, task=task, trajectory=trajectory
        )
        reply = _reply(await self.request("POST", f"/v1/actions?wait_s={WAIT_S:g}", _encode(submission)))
        while reply.settled is None:
            reply = _reply(await self.request("GET", f"/v1/actions/{id}?wait_s={WAIT_S:g}"))
        if reply.id != id or reply.settled.outcome.status is not Status.SUCCEEDED:
            raise ManagerError(f"expected {id} to succeed, got {reply}", retry=False)
        self._unacknowledged.append(id)
        return reply

    async def acknowledge(self) -> None:
        ids, self._unacknowledged = self._unacknowledged, []
        if ids:
            await self.request("POST", "/v1/acknowledge", _encode(Acknowledgement(actions=ids)))

    async def _acknowledge_loop(self) -> None:
        while True:
            await asyncio.sleep(ACKNOWLEDGE_S)
            await self.acknowledge()

    async def open_sandbox(self) -> str:
        """Return the name of a new sandbox."""
        name = self.new_id()
        await self.run_action(Open(spec=SPEC), name)
        return name
