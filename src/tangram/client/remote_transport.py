"""The transport to a shared service over HTTP.

Owns the actions in flight, and the objects that this client has open at the service. Promises what every transport
promises: the client chooses the id of an action, which is an idempotency key, so a request with a lost response is
repeated and nothing is executed twice. When the retry time of the connection has passed, the actions in flight are lost
to this client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self
from urllib.parse import quote

import msgspec

from tangram.cancellation import run_to_completion
from tangram.client.connection_errors import broken_off, no_service, without_tls
from tangram.client.remote_connection import RECONNECT_S, RETRY_S, ReconnectTimeout, RemoteConnection, RequestRetryable
from tangram.client.remote_files import RemoteFiles, RemoteImages
from tangram.client.transport import CallableService, Pending
from tangram.core.action import Action, Outcome, Status
from tangram.core.messages import Pool
from tangram.errors import AdmissionRefused, InvalidAction, ManagerError
from tangram.managers.base import Files, Images
from tangram.managers.http import (
    CertificateRejected,
    Disconnected,
    HttpError,
    InvalidUrl,
    ResponseTooLarge,
    TlsFailed,
)
from tangram.managers.quotas.manager import Quota
from tangram.managers.work import Close, Commit, HoldGrant, Open, Work
from tangram.processes.streams import STDERR, STDOUT, Output
from tangram.runtime.orchestrator import SettledAction
from tangram.runtime.views import PoolUsageView
from tangram.runtime.wire import (
    Acknowledgement,
    ActionReply,
    OutputChunk,
    QuotaRelease,
    QuotasReply,
    ServerInfo,
    ServiceReply,
    ServicesReply,
    UpstreamResponse,
    WeightRequest,
    settled_action_of,
    submission_of,
)

SHUTDOWN_TIMEOUT_S = 30.0
"""Time limit for closing everything that a connection has open."""
LONG_POLL_S = 30.0
"""Duration of one long poll."""
ACKNOWLEDGE_INTERVAL_S = 0.5
ACKNOWLEDGE_BATCH_MAX = 1000
"""Received results are acknowledged after this time, or when this many are pending."""
LINE_BYTES_MAX = 64 << 20

_decode_reply = msgspec.json.Decoder(ActionReply).decode
_decode_chunk = msgspec.json.Decoder(OutputChunk).decode


class RemotePending:
    """An action that was submitted to the service."""

    def __init__(self, transport: RemoteTransport, action: Action, work: Work, output: Output | None) -> None:
        self._transport = transport
        self._connection = transport.connection
        self.action = action
        self.work = work
        self._output = output
        self._path = f"/v1/actions/{_quoted(action.id)}"
        loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[None] = loop.create_future()
        """Done when the service has accepted the action, or never will."""
        self._settled: asyncio.Future[SettledAction] = loop.create_future()
        self._settled.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self._started: asyncio.Task[bool] | None = None
        transport.start_task(self._run())

    async def _run(self) -> None:
        try:
            settled = await self._submit_and_wait()
        except asyncio.CancelledError:
            self._settled.cancel()
            raise
        except ReconnectTimeout as error:
            outcome = Outcome(action=self.action.id, status=Status.LOST, reason=str(error))
            self._settled.set_result(SettledAction(outcome=outcome))
        except Exception as error:
            self._settled.set_exception(error)
        else:
            if settled.fault is not None:
                self._settled.set_exception(settled.fault.to_exception())
            else:
                self._settled.set_result(settled)
        finally:
            if not self._accepted.done():
                self._accepted.set_result(None)
            self._transport.on_settled(self)

    async def _submit_and_wait(self) -> SettledAction:
        stays = isinstance(self.work, HoldGrant) or self.action.kind == "server"
        wait_s = 0.0 if stays or self._output is not None else LONG_POLL_S
        submission = submission_of(self.action, self.work, follow=self._output is not None)  # type: ignore[arg-type]
        closing = isinstance(self.work, Close)
        reply = _decode_reply(
            await self._connection.call("POST", "/v1/actions", submission, wait_s=wait_s, closing=closing)
        )
        self._accepted.set_result(None)
        if self._output is not None:
            await self._follow_output(self._output)
        while reply.settled is None:
            reply = _decode_reply(await self._connection.call("GET", self._path, wait_s=LONG_POLL_S, closing=closing))
        self._transport.on_result(self.action.id)
        return settled_action_of(reply.settled)

    async def _follow_output(self, output: Output) -> None:
        """Streams the output to its end. Output that is no longer available is not waited for."""
        after = 0

        async def once() -> None:
            nonlocal after
            query = {"after": str(after)}
            async with await self._connection.send("GET", f"{self._path}/output", None, query, None) as response:
                if response.status >= 400:
                    self._connection.check_response(response.status, await response.read())
                async for line in response.lines(LINE_BYTES_MAX):
                    chunk = _decode_chunk(line)
                    if not chunk.stream:
                        return
                    after = chunk.offset + len(chunk.data)
                    output(STDOUT if chunk.stream == "stdout" else STDERR, chunk.data)
                raise RequestRetryable("the output broke off")

        with contextlib.suppress(ManagerError):  # the service restarted; the result has the output that was kept
            await self._connection.retry_until_answered(once)

    async def started(self) -> bool:
        if self._started is None:
            self._started = asyncio.ensure_future(self._wait_started())
            self._transport.track_task(self._started)
        return await asyncio.shield(self._started)

    async def _wait_started(self) -> bool:
        await asyncio.shield(self._accepted)
        while not self._settled.done():
            try:
                reply = _decode_reply(
                    await self._connection.call("GET", self._path, wait_s=LONG_POLL_S, until="started")
                )
            except ManagerError:
                break  # the result has more information
            if reply.state in ("running", "stopping"):
                return True
            if reply.settled is not None:
                return reply.settled.outcome.execution_s > 0.0
        settled = await asyncio.shield(self._settled)
        return settled.outcome.execution_s > 0.0

    async def settled(self) -> SettledAction:
        try:
            return await asyncio.shield(self._settled)
        except asyncio.CancelledError:
            if self._settled.cancelled():
                raise ManagerError("the connection to the service was closed", retry=False) from None
            self.cancel()
            # A cancelled caller returns when the action has settled, unless the service does not respond.
            await run_to_completion(asyncio.wait({self._settled}, timeout=SHUTDOWN_TIMEOUT_S))
            raise

    async def settled_shielded(self) -> SettledAction:
        return await asyncio.shield(self._settled)

    def cancel(self) -> None:
        self._transport.start_task(self._cancel())

    async def _cancel(self) -> None:
        """A submission that waits for the result has no response yet, so cancelling is retried until the action is
        accepted."""
        while not self._settled.done():
            try:
                await self._connection.call("POST", f"{self._path}/cancel", closing=True)
                return
            except (ManagerError, InvalidAction):
                if self._accepted.done():
                    return
                await asyncio.sleep(RETRY_S)

    async def stop(self) -> None:
        """Cancel it, and wait until it has settled."""
        self.cancel()
        await asyncio.wait({self._settled})

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        self._settled.add_done_callback(lambda _: callback())


class RemoteTransport:
    by_value = True

    def __init__(self, url: str, token: str = "", *, ca: str = "", reconnect_s: float = RECONNECT_S) -> None:
        self.connection = RemoteConnection(url, token, ca, reconnect_s)
        self._files = RemoteFiles(self.connection)
        self._images = RemoteImages(self.connection)
        self._quotas: dict[str, Quota] = {}
        self._services: dict[str, ServiceReply] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._pending: dict[RemotePending, None] = {}
        self._sandboxes: dict[str, None] = {}
        """Sandboxes that were opened over this connection and not closed."""
        self._unacknowledged: list[str] = []
        self._acknowledge_timer: asyncio.TimerHandle | None = None
        self._is_closing = False

    # ---- opening and closing

    async def __aenter__(self) -> Self:
        await self.connection.open()
        try:
            msgspec.json.decode(await self._fetch_about(), type=ServerInfo)  # it is a service of this version
            quotas = msgspec.json.decode(await self.connection.call("GET", "/v1/quotas"), type=QuotasReply).quotas
            services = msgspec.json.decode(
                await self.connection.call("GET", "/v1/services"), type=ServicesReply
            ).services
        except BaseException as error:
            await self.connection.close()
            if isinstance(error, msgspec.MsgspecError):
                message = f"{self.connection.url} is not a service of this version of Tangram: {error}"
                raise ManagerError(message, retry=False) from None
            raise
        self._quotas = {quota.name: quota for quota in quotas}
        self._services = {service.name: service for service in services}
        return self

    async def _fetch_about(self) -> bytes:
        """Fails immediately instead of retrying: a service that never responded may not exist."""
        url = self.connection.url
        try:
            return await self.connection.call_once("GET", "/v1/about", None, {}, 0.0)
        except (ResponseTooLarge, CertificateRejected, InvalidUrl) as error:
            raise self.connection.permanent_error(error) from None
        except TlsFailed:
            raise ManagerError(without_tls(url), retry=False) from None
        except Disconnected as error:
            raise ManagerError(broken_off(url, error.reason)) from None
        except HttpError as error:
            raise ManagerError(no_service(url, error.reason)) from None
        except RequestRetryable as error:
            raise ManagerError(no_service(url, str(error))) from None

    async def __aexit__(self, *error: object) -> None:
        """End everything that this connection has open at the service, like the end of an embedded one."""
        self._is_closing = True
        try:
            await run_to_completion(self._shut_down())
        finally:
            await self.connection.close()

    async def _shut_down(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await self._end_all()
        if self._acknowledge_timer is not None:
            self._acknowledge_timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _end_all(self) -> None:
        """Ends actions first, then sandboxes, then images committed from them."""
        await asyncio.gather(*(pending.stop() for pending in list(self._pending)))
        await asyncio.gather(
            *(self._call_best_effort("DELETE", f"/v1/sandboxes/{_quoted(name)}") for name in list(self._sandboxes))
        )
        images = [name for name in self._images.committed if name not in self._images.remembered]
        await asyncio.gather(*(self._call_best_effort("DELETE", f"/v1/images/{_quoted(name)}") for name in images))
        await self._acknowledge()

    def start_task(self, doing: Coroutine[Any, Any, Any]) -> None:
        self.track_task(asyncio.ensure_future(doing))

    def track_task(self, task: asyncio.Future[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- actions ----

    def submit(self, action: Action, work: Work, output: Output | None = None) -> Pending:
        if self._is_closing:
            raise AdmissionRefused("closing", "the connection is closing; it accepts no more actions")
        pending = RemotePending(self, action, work, output)
        self._pending[pending] = None
        if isinstance(work, Open):
            self._sandboxes[action.sandbox] = None
        return pending

    def on_settled(self, pending: RemotePending) -> None:
        self._pending.pop(pending, None)
        if isinstance(pending.work, Close):
            self._sandboxes.pop(pending.action.sandbox, None)
        elif isinstance(pending.work, Commit):
            self._images.committed[pending.work.image] = None

    def on_result(self, id: str) -> None:
        """The result has arrived, so the service need not keep it."""
        self._unacknowledged.append(id)
        if len(self._unacknowledged) >= ACKNOWLEDGE_BATCH_MAX:
            self._flush_acknowledged()
        elif self._acknowledge_timer is None:
            self._acknowledge_timer = asyncio.get_running_loop().call_later(
                ACKNOWLEDGE_INTERVAL_S, self._flush_acknowledged
            )

    def _flush_acknowledged(self) -> None:
        if self._acknowledge_timer is not None:
            self._acknowledge_timer.cancel()
            self._acknowledge_timer = None
        self.start_task(self._acknowledge())

    async def _acknowledge(self) -> None:
        ids, self._unacknowledged = self._unacknowledged, []
        if ids:
            await self._call_best_effort("POST", "/v1/acknowledge", Acknowledgement(actions=ids))

    # ---- quotas, services, functions ----

    def ensure_pool(self, pool: Pool) -> None:
        """Does nothing: the service creates pools of functions itself."""

    async def set_weight(self, run: str, weight: float) -> None:
        await self.connection.call("PUT", f"/v1/weights/{_quoted(run)}", WeightRequest(weight=weight))

    async def add_quota(self, quota: Quota) -> None:
        await self.connection.call("PUT", "/v1/quotas", quota)
        self._quotas[quota.name] = quota

    def quota(self, name: str) -> Quota:
        quota = self._quotas.get(name) if isinstance(name, str) else None
        if quota is None:
            known = ", ".join(map(repr, self._quotas)) or "none"
            raise InvalidAction("quota", name, f"one that the service had when this connection was made: {known}")
        return quota

    def service(self, name: str) -> CallableService:
        service = self._services.get(name) if isinstance(name, str) else None
        if service is None:
            known = ", ".join(map(repr, self._services)) or "none"
            raise InvalidAction("service", name, f"one that the service has: {known}")
        return service

    def release_quota(self, action: str, spent: dict[str, int] | None) -> None:
        self.start_task(
            self._call_best_effort("POST", f"/v1/actions/{_quoted(action)}/release", QuotaRelease(spent=spent))
        )

    def report_upstream_response(self, quota: str, status: int, headers: Mapping[str, str], action: str) -> None:
        record = UpstreamResponse(status=status, headers=dict(headers), action=action)
        self.start_task(self._call_best_effort("POST", f"/v1/quotas/{_quoted(quota)}/responses", record))

    async def _call_best_effort(self, method: str, path: str, record: Any = None) -> None:
        """A request whose result is not awaited. If it never arrives, the service releases the resource after its own
        timeout."""
        with contextlib.suppress(ManagerError, InvalidAction):
            await self.connection.call(method, path, record, closing=True)

    def pool_usage(self) -> asyncio.Future[PoolUsageView]:
        reading = asyncio.ensure_future(self._read_pool_usage())
        self.track_task(reading)
        return reading

    async def _read_pool_usage(self) -> PoolUsageView:
        return msgspec.json.decode(await self.connection.call("GET", "/v1/pool-usage"), type=PoolUsageView)

    # ---- files and images ----

    def files(self, sandbox: str) -> Files:
        return self._files

    @property
    def images(self) -> Images:
        return self._images


def _quoted(name: str) -> str:
    return quote(name, safe="")
