"""Connections of this machine: to real sandboxes, which must leave nothing behind, and to plain processes."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from tests.server.shared import serving

from tangram.client.client import Client, connect
from tangram.client.transport import LocalTransport
from tangram.runtime.orchestrator import Orchestrator

Connected = Callable[[Callable[[Client], Awaitable[None]]], None]

DEADLINE_S = 60.0
"""Of a test: a hang is a failure."""


def why_not() -> str:
    """What keeps this machine from running sandboxes; empty if nothing does."""
    missing = [name for name in ("bwrap", "catatonit", "setpriv") if shutil.which(name) is None]
    if os.geteuid() != 0:
        return "sandboxes need root"
    return f"missing: {', '.join(missing)}" if missing else ""


@pytest.fixture(params=["embedded", "shared"])
def transport(request: pytest.FixtureRequest) -> str:
    """How a client reaches its orchestrator: the same tests hold for each."""
    return str(request.param)


@asynccontextmanager
async def connection(transport: str, folder: Path, **options: Any) -> AsyncIterator[Client]:
    if transport == "embedded":
        async with connect(state=folder / "state", **options) as client:
            yield client
    else:
        record = options.pop("record", None)
        async with (
            serving(folder, event_log=str(record or ""), **options) as up,
            connect(up.address) as client,
        ):
            _orchestrators[client] = up.action_service.orchestrator
            yield client


_orchestrators: WeakKeyDictionary[Client, Orchestrator] = WeakKeyDictionary()
"""Those of the services that clients are connected to."""


def orchestrator_of(client: Client) -> Orchestrator:
    """The one that executes its actions, in this process either way."""
    if isinstance(client.transport, LocalTransport):
        return client.transport.orchestrator
    return _orchestrators[client]


@pytest.fixture
def connected(tmp_path: Path, transport: str) -> Callable[..., None]:
    """Runs `test(client)` on a connection of its own and checks that its owner has left nothing."""
    reason = why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)

    def run(test: Callable[[Client], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            async with connection(transport, tmp_path, backend="sandbox", **options) as client:
                await test(client)

        asyncio.run(main())
        assert list((tmp_path / "state" / "owners").iterdir()) == []

    return run


@pytest.fixture
def plain(tmp_path: Path, transport: str) -> Callable[..., None]:
    """Runs `test(client)` on a connection of its own, to plain processes: for what has nothing to do with isolation."""

    def run(test: Callable[[Client], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            async with (
                asyncio.timeout(DEADLINE_S),
                connection(transport, tmp_path, backend="process", **options) as client,
            ):
                await test(client)

        asyncio.run(main())

    return run
