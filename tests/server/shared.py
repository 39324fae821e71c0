"""A shared service inside the process of a test, and connections to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tangram.client.client import Client, connect
from tangram.client.remote_connection import RemoteConnection
from tangram.client.remote_transport import RemoteTransport
from tangram.clock import Clock
from tangram.config import (
    Config,
    DeviceConfig,
    ModelConfig,
    NodeConfig,
    QuotaConfig,
    RateConfig,
    RunLimits,
    ServiceConfig,
)
from tangram.core.action import Action
from tangram.core.demand import CPU, Demand, cores
from tangram.core.limits import Limits
from tangram.core.messages import Grant
from tangram.managers.base import Lease
from tangram.managers.fake import FakeManager
from tangram.managers.quotas.manager import Quota, Rate
from tangram.managers.work import Close, Exec, Open, SandboxSpec, Work
from tangram.processes.streams import Output
from tangram.server.journal.adapter import encode
from tangram.server.journal.journal import Journal
from tangram.server.serve import RunningServer, running_server
from tangram.server.tenants import tenant_of


def config_of(
    folder: Path,
    *,
    backend: str = "fake",
    cores: float | None = None,
    warm: int = 0,
    quotas: Iterable[Quota] = (),
    services: Iterable[ModelConfig] = (),
    devices: Iterable[DeviceConfig] = (),
    limits: RunLimits | None = None,
    scheduler: Limits | None = None,
    memory: int | None = None,
    **service: Any,
) -> Config:
    """The config of a service whose files are all below a folder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fields: dict[str, Any] = dict(
        listen="127.0.0.1:0", journal=str(folder / "journal.db"), sandboxes_on_stop="close", drain_s=0.3
    )
    return Config(
        service=ServiceConfig(**fields | service),
        node=NodeConfig(
            backend=backend,  # type: ignore[arg-type]
            cores=cores,
            memory=memory,
            state=str(folder / "state"),
            warm=warm,
        ),
        limits=limits or RunLimits(),
        scheduler=scheduler or Limits(),
        quotas=tuple(_quota(each) for each in quotas),
        services=tuple(services),
        devices=tuple(devices),
    )


def _quota(quota: Quota) -> QuotaConfig:
    def rate(given: Rate | None) -> RateConfig | None:
        return None if given is None else RateConfig(**msgspec.structs.asdict(given))

    return QuotaConfig(
        name=quota.name, concurrent=quota.concurrent, requests=rate(quota.requests), tokens=rate(quota.tokens)
    )


@asynccontextmanager
async def shared(folder: Path, **options: Any) -> AsyncIterator[Client]:
    """A connection to a service of its own."""
    async with serving(folder, **options) as up, connect(up.address) as client:
        yield client


def wire_of(client: Client) -> RemoteConnection:
    """The HTTP connection of a client to its service."""
    assert isinstance(client.transport, RemoteTransport)
    return client.transport.connection


@asynccontextmanager
async def serving(folder: Path, *, clock: Clock | None = None, **options: Any) -> AsyncIterator[RunningServer]:
    async with running_server(config_of(folder, **options), clock) as up:
        yield up


def keeping(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """The fake manager has kept these sandboxes beyond the service before. Returns those that are closed, as they
    are."""
    spec, closed = SandboxSpec(), list[str]()
    enter, start = FakeManager.__aenter__, FakeManager.start

    async def starting(
        self: FakeManager, action: Action, grant: Grant, work: Work, output: Output | None = None
    ) -> Lease:
        if isinstance(work, Close):
            closed.append(action.sandbox)
        return await start(self, action, grant, work, output)

    async def entered(self: FakeManager) -> FakeManager:
        for name in names:
            action = Action(id=f"open-{name}", demand=Demand({CPU: cores(1)}), sandbox=name)
            await start(self, action, Grant(action.id, "local", (), 0), Open(spec=spec))
        return await enter(self)

    monkeypatch.setattr(FakeManager, "adopted", dict.fromkeys(names, spec), raising=False)
    monkeypatch.setattr(FakeManager, "missing", {}, raising=False)
    monkeypatch.setattr(FakeManager, "start", starting)
    monkeypatch.setattr(FakeManager, "__aenter__", entered)
    return closed


async def note_exec(
    journal: Journal, id: str, *, sandbox: str, started: bool = False, idempotent: bool = False
) -> None:
    """A program of the tenant in the prefix of its id, waiting or running."""
    space = tenant_of(id)
    action = Action(
        id=id, demand=Demand({CPU: cores(1)}), run=space, sandbox=f"{space}/{sandbox}", idempotent=idempotent
    )
    await journal.record_submission(id, space, encode(action), encode(Exec(command="echo hidden")))
    if started:
        await journal.record_start(id, 1)


async def note_box(journal: Journal, name: str) -> None:
    await journal.record_sandbox_opened(name, tenant_of(name), "local", encode(SandboxSpec()))
