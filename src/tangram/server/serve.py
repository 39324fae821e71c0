"""The server: start-up and shutdown of the shared service.

Starts in this order: journal, managers, scheduler, recovery of the journal, HTTP. Shuts down in this order: new actions
are refused; running actions may end within a limit; waiting actions stay in the journal; requests to managers are
refused. Sandboxes are kept for the next start or closed, as the config says.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tangram.clock import Clock, WallClock
from tangram.config import Config, require_files
from tangram.errors import ManagerError, TangramError
from tangram.managers.models.preparation import require_importable
from tangram.runtime.orchestrator import Orchestrator
from tangram.server.actions.service import SWEEP_INTERVAL_S, ActionService
from tangram.server.components import (
    Components,
    create_model_manager,
    create_node_manager,
    map_config_errors,
    require_capacity,
)
from tangram.server.http.app import create_app
from tangram.server.http.listener import bind, serving
from tangram.server.journal.journal import Journal, JournalFailed
from tangram.server.observe.metrics import ReportedMetrics
from tangram.server.recovery import RecoveryReport, recover

COMPACTION_INTERVAL_S = 120.0
"""Interval at which acknowledged and expired results are deleted."""
DRAIN_GATE_TIMEOUT_S = 10.0
"""Time for requests about files, sandboxes and images that are in flight when no action runs any more."""

log = logging.getLogger("tangram.server")


class RunningServer:
    def __init__(self, action_service: ActionService, address: str, recovery_report: RecoveryReport) -> None:
        self.action_service = action_service
        self.address = address
        self.recovery_report = recovery_report
        self.stop = asyncio.Event()
        """Setting it ends the server as SIGTERM does."""
        self.stop_now = asyncio.Event()
        """Setting it ends the server without waiting for running actions."""


async def serve(config: Config, *, on_started: Callable[[RunningServer], None] = lambda server: None) -> None:
    """Serves until SIGTERM or Ctrl-C. Raises errors of start-up and of the running server."""
    loop = asyncio.get_running_loop()
    async with running_server(config) as server:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _on_signal, server, number)
        try:
            _tune_garbage_collector()
            on_started(server)
            _notify_systemd("READY=1")
            await server.stop.wait()
            _notify_systemd("STOPPING=1")
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def _tune_garbage_collector() -> None:
    """Excludes all current objects from collection; later ones are mostly freed by reference counts, so collections can
    be rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def _on_signal(server: RunningServer, number: int) -> None:
    if server.stop.is_set():
        server.stop_now.set()
    server.stop.set()
    log.info("stopping signal=%s", signal.Signals(number).name)


def _notify_systemd(state: str) -> None:
    """Notifies systemd if it supervises this process."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


@asynccontextmanager
async def running_server(config: Config, clock: Clock | None = None) -> AsyncIterator[RunningServer]:
    """Runs a server inside this process; leaving the context drains it. `clock` drives rate limits, idle timeouts and
    the scheduler; the default is real time."""
    require_files(config)
    listening = bind(config.listen_host, config.listen_port)
    async with AsyncExitStack() as stack:
        stack.enter_context(map_config_errors(config))
        stack.callback(listening.close)
        path = Path(config.service.journal)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        service = config.service
        metrics = ReportedMetrics()
        journal = Journal(path, service.durability, retention_s=service.results_keep_s, on_commit=metrics.on_commit)
        await stack.enter_async_context(journal)
        components = Components(config, journal, metrics, clock or WallClock())
        if components.event_log is not None:
            stack.callback(components.event_log.close)
        async with components.orchestrator:
            # The action service recovers the journal before HTTP accepts requests, and HTTP accepts requests before a
            # recovered action can end.
            for run in components.runs.replies():
                components.action_service.set_caps(run.name, run.caps)
            ending = components.runs.ending
            report = await recover(
                components.action_service, journal.recovered, components.manager, config.node.name, ending
            )
            journal.drop_recovered()  # recovered actions are in memory now, results on disk
            for name in ending:
                await _finish_revocation(components, name)
            for run in components.runs.replies():
                components.action_service.set_weight(run.name, run.weight)
            components.observer.on_recovered(str(report))
            app = create_app(components.handlers, components.middleware)
            http = serving(
                app,
                listening,
                connections_max=config.limits.connections_max,
                certificate=service.tls_certificate,
                key=service.tls_key,
            )
            await stack.enter_async_context(http)
            scheme = "https" if service.tls_certificate else "http"
            server = RunningServer(components.action_service, f"{scheme}://{_address_of(listening)}", report)
            log.info("up address=%s backend=%s recovered=%r", server.address, config.node.backend, str(report))
            async with _sweeper(components.action_service, journal):
                try:
                    yield server
                finally:
                    components.drain_gate.begin_draining()
                    await _drain(components.orchestrator, server, service.drain_s)
                    aborted = await components.drain_gate.close(
                        0.0 if server.stop_now.is_set() else DRAIN_GATE_TIMEOUT_S
                    )
                    if aborted:
                        log.warning("requests aborted: %d did not end within %g s", aborted, DRAIN_GATE_TIMEOUT_S)


async def _finish_revocation(components: Components, name: str) -> None:
    """Finishes a revocation that the previous server began. On failure the name of the run stays reserved, and the
    server starts nevertheless."""
    try:
        async with components.runs.revoking(name):
            await components.action_service.end_run(name)
        log.info("run revoked run=%s", name)
    except JournalFailed:
        raise
    except ManagerError as error:
        log.error("run not ended run=%s: %s", name, error)


def require_usable(config: Config) -> None:
    """Raises InvalidConfig for errors that can be detected without creating anything."""
    require_files(config)
    with map_config_errors(config):
        require_capacity(create_node_manager(config, ()).pools())
        create_model_manager(config, lambda event: None)
        for service in config.services:
            require_importable(service.name, service.engine)


async def _drain(orchestrator: Orchestrator, server: RunningServer, limit_s: float) -> None:
    began_at_s = time.monotonic()
    draining = asyncio.create_task(orchestrator.drain(limit_s))
    stop_requested = asyncio.create_task(server.stop_now.wait())
    try:
        await asyncio.wait({draining, stop_requested}, return_when=asyncio.FIRST_COMPLETED)
        running = draining.result() if draining.done() else await orchestrator.drain(0.0)
    finally:
        for task in (draining, stop_requested):
            task.cancel()
    log.info("drained seconds=%.1f left_running=%d", time.monotonic() - began_at_s, running)


@asynccontextmanager
async def _sweeper(action_service: ActionService, journal: Journal) -> AsyncIterator[None]:
    async def sweep() -> None:
        next_compact = time.monotonic() + COMPACTION_INTERVAL_S
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                await action_service.sweep()
                if time.monotonic() >= next_compact:
                    await journal.compact()
                    next_compact = time.monotonic() + COMPACTION_INTERVAL_S
            except JournalFailed as error:
                action_service.orchestrator.fail(error)
                return
            except TangramError as error:
                log.error("sweeping failed: %s", error)

    task = asyncio.create_task(sweep(), name="sweeping")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
