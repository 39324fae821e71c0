"""The transport to a shared service, over HTTP.

Owns the connections, what is under way over them, and what this client has left open there. Promises what every
transport does, whatever happens between: each action is submitted under an id that this side chose, so that whoever
lost an answer asks again and gets it, and nothing is done twice. A service that is down is waited for, up to
RECONNECT_S; then what it has under way is lost to this client, and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote

import msgspec

from tangram.client.connection_errors import broken_off, no_service, reason, unknown_token, wants_token, without_tls
from tangram.client.remote_files import RemoteFiles, RemoteImages
from tangram.client.transport import Pending
from tangram.core.action import Action, Outcome, Status
from tangram.core.messages import Pool
from tangram.errors import AdmissionRefused, InvalidAction, InvalidConfig, ManagerError
from tangram.managers.base import Files, Images
from tangram.managers.models import Service
from tangram.managers.quotas.manager import Quota
from tangram.managers.work import Close, Commit, Hold, Open, Work
from tangram.processes.streams import STDERR, STDOUT, Output
from tangram.runtime.orchestrator import Settled, undisturbed
from tangram.runtime.wire import (
    About,
    Acknowledged,
    Chunk,
    Heard,
    LetGo,
    Problem,
    Quotas,
    Reply,
    ServiceReply,
    Services,
    WeightRequest,
    settled_of,
    submission_of,
)

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

RECONNECT_S = 300.0
"""A service that is restarted is back within seconds; a machine takes minutes."""
RETRY_S, RETRY_S_MAX = 0.1, 5.0
"""Before the first repetition, doubled with each, less a part by chance."""
CLOSING_S = 10.0
"""For what the service closes by itself after a time."""
LEAVING_S = 30.0
"""For all that a connection leaves there."""
WAIT_S = 30.0
"""Of one long poll."""
ANSWER_S = 60.0
"""For an answer beyond what was waited for."""
CONNECT_S = 10.0
ACKNOWLEDGE_S = 0.5
ACKNOWLEDGED_MAX = 1000
"""Results that arrived are acknowledged so often, or when they are so many."""
LINE_BYTES_MAX = 64 << 20

_encode = msgspec.json.Encoder().encode
_reply = msgspec.json.Decoder(Reply).decode
_chunk = msgspec.json.Decoder(Chunk).decode


class Unreachable(ManagerError):
    """The service did not answer in all the time that it was waited for."""


class _Again(Exception):
    """It may be answered when it is asked again."""


class Wire:
    """Requests to one service, repeated until they are answered."""

    def __init__(self, url: str, token: str, ca: str, reconnect_s: float) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._ca = ca
        self._reconnect_s = reconnect_s
        self._session: aiohttp.ClientSession | None = None
        self._is_down = False
        """Something could not be closed, because nobody answered."""

    async def open(self) -> None:
        import aiohttp

        secure: ssl.SSLContext | bool = True
        if self._ca:
            try:
                secure = ssl.create_default_context(cafile=self._ca)
            except (OSError, ssl.SSLError) as error:
                raise InvalidConfig("ca", self._ca, f"a file of certificates in PEM ({error})") from None
        # No limit on connections: each action that is waited for has one.
        connector = aiohttp.TCPConnector(limit=0, ssl=secure, keepalive_timeout=60.0)
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
            await asyncio.sleep(0)  # transports end in the next turn of the loop

    async def ask(
        self,
        method: str,
        place: str,
        record: Any = None,
        *,
        wait_s: float | None = None,
        closing: bool = False,
        **query: str,
    ) -> bytes:
        """The body of the answer. Raises what the service says was wrong, and Unreachable. `closing`: the service takes
        back by itself what does not arrive, so it is not waited for long."""
        body = None if record is None else _encode(record)
        if wait_s is not None:
            query["wait_s"] = str(wait_s)
        once = functools.partial(self._once, method, place, body, query, wait_s or 0.0)
        return await (self._closing(once) if closing else self.until_answered(once))

    async def _closing(self, once: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """All that is closed while the service is down waits together no longer than one would."""
        try:
            answer = await self.until_answered(once, 0.0 if self._is_down else CLOSING_S)
        except Unreachable:
            self._is_down = True
            raise
        self._is_down = False
        return answer

    async def _once(self, method: str, path: str, body: Any, query: Mapping[str, Any], wait_s: float) -> bytes:
        async with self.request(method, path, body, query, wait_s + ANSWER_S) as response:
            content = await response.read()
        return self.checked(response.status, content)

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, body: Any, query: Mapping[str, Any], timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Raises _Again for what did not arrive."""
        import aiohttp

        if self._session is None:
            raise ManagerError("the connection to the service is closed", retry=False)
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        headers = {"content-type": "application/json"} if isinstance(body, bytes) else {}
        try:
            async with self._session.request(
                method, self.url + path, data=body, params=query, timeout=limit, headers=headers, allow_redirects=False
            ) as response:
                yield response
        except aiohttp.ClientConnectorCertificateError as error:
            said = "a certificate that this machine trusts, or `ca`: a file with the one that signed it"
            raise InvalidConfig("url", self.url, f"{said} ({error.certificate_error})") from None
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise InvalidConfig("url", self.url, f"an address such as https://tangram.example:7433 ({error})") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Again(str(error) or type(error).__name__) from error

    def checked(self, status: int, content: bytes) -> bytes:
        """Raises what the answer says was wrong."""
        if status < 400:
            return content
        try:
            fault = msgspec.json.decode(content, type=Problem).error
        except msgspec.MsgspecError:
            if status in (502, 503, 504):  # somebody in between says so, or too many are connected
                raise _Again(f"status {status}") from None
            shown = content[:200].decode(errors="replace")
            said = f"{self.url} answered {status}, which is none of Tangram: {shown!r}"
            raise ManagerError(said, retry=False) from None
        if fault.code in ("draining", "journal_failed", "rate", "too_slow") and fault.limit != "wrong_tokens":
            raise _Again(fault.message)
        if fault.code == "unauthorized":
            how = "give it to connect(url, token=...), or set TANGRAM_TOKEN"
            raise ManagerError(unknown_token(self.url) if self._token else wants_token(self.url, how), retry=False)
        raise fault.exception()

    async def until_answered(self, once: Callable[[], Coroutine[Any, Any, T]], patience_s: float | None = None) -> T:
        loop = asyncio.get_running_loop()
        patience_s = self._reconnect_s if patience_s is None else patience_s
        give_up_s, pause_s = loop.time() + patience_s, RETRY_S
        while True:
            try:
                return await once()
            except _Again as error:
                if loop.time() >= give_up_s:
                    raise Unreachable(f"{self.url} did not answer for {patience_s:.0f} s: {error}") from error.__cause__
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2.0 * pause_s, RETRY_S_MAX)


class RemotePending:
    """An action that was sent to the service."""

    def __init__(self, transport: RemoteTransport, action: Action, work: Work, output: Output | None) -> None:
        self._transport = transport
        self._wire = transport.wire
        self._action = action
        self._work = work
        self._output = output
        self._path = f"/v1/actions/{quote(action.id, safe='')}"
        loop = asyncio.get_running_loop()
        self._taken: asyncio.Future[None] = loop.create_future()
        """Done when the service has it, or never will."""
        self._settled: asyncio.Future[Settled] = loop.create_future()
        self._settled.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self._started: asyncio.Task[bool] | None = None
        transport.begin(self._live())

    async def _live(self) -> None:
        try:
            settled = await self._brought()
        except asyncio.CancelledError:
            self._settled.cancel()
            raise
        except Unreachable as error:
            self._settled.set_result(_lost(self._action.id, str(error)))
        except Exception as error:
            self._settled.set_exception(error)
        else:
            if settled.fault is not None:
                self._settled.set_exception(settled.fault.exception())
            else:
                self._settled.set_result(settled)
        finally:
            if not self._taken.done():
                self._taken.set_result(None)
            self._transport.ended(self)

    async def _brought(self) -> Settled:
        stays = isinstance(self._work, Hold) or self._action.kind == "server"
        wait_s = 0.0 if stays or self._output is not None else WAIT_S
        submission = submission_of(self._action, self._work, follow=self._output is not None)  # type: ignore[arg-type]
        closing = isinstance(self._work, Close)
        reply = _reply(await self._wire.ask("POST", "/v1/actions", submission, wait_s=wait_s, closing=closing))
        self._taken.set_result(None)
        if self._output is not None:
            await self._follow(self._output)
        while reply.settled is None:
            reply = _reply(await self._wire.ask("GET", self._path, wait_s=WAIT_S, closing=closing))
        self._transport.arrived(self._action.id)
        return settled_of(reply.settled)

    async def _follow(self, output: Output) -> None:
        """What it writes, to the end. What cannot be had any more is not waited for."""
        after = 0

        async def once() -> None:
            nonlocal after
            query = {"after": str(after)}
            async with self._wire.request("GET", f"{self._path}/output", None, query, None) as response:
                if response.status >= 400:
                    self._wire.checked(response.status, await response.read())
                async for line in _lines(response):
                    chunk = _chunk(line)
                    if not chunk.stream:
                        return
                    after = chunk.offset + len(chunk.data)
                    output(STDOUT if chunk.stream == "stdout" else STDERR, chunk.data)
                raise _Again("the output broke off")

        with contextlib.suppress(ManagerError):  # the service was restarted: its end tells what was kept
            await self._wire.until_answered(once)

    async def started(self) -> bool:
        if self._started is None:
            self._started = asyncio.ensure_future(self._until_started())
            self._transport.keep(self._started)
        return await asyncio.shield(self._started)

    async def _until_started(self) -> bool:
        await asyncio.shield(self._taken)
        while not self._settled.done():
            try:
                reply = _reply(await self._wire.ask("GET", self._path, wait_s=WAIT_S, until="started"))
            except ManagerError:
                break  # how it ends tells more
            if reply.state in ("running", "stopping"):
                return True
            if reply.settled is not None:
                return reply.settled.outcome.execution_s > 0.0
        settled = await asyncio.shield(self._settled)
        return settled.outcome.execution_s > 0.0

    async def settled(self) -> Settled:
        try:
            return await asyncio.shield(self._settled)
        except asyncio.CancelledError:
            if self._settled.cancelled():
                raise ManagerError("the connection to the service was closed", retry=False) from None
            self.cancel()
            # Whoever is cancelled goes when the action has settled, unless nobody there says so.
            await undisturbed(asyncio.wait({self._settled}, timeout=LEAVING_S))
            raise

    async def _ended(self) -> None:
        await asyncio.wait({self._settled})

    async def watched(self) -> Settled:
        return await asyncio.shield(self._settled)

    def cancel(self) -> None:
        self._transport.begin(self._cancel())

    async def _cancel(self) -> None:
        """Whoever waits for its end holds the answer to its submission back; so it is asked for until it is there."""
        while not self._settled.done():
            try:
                await self._wire.ask("POST", f"{self._path}/cancel", closing=True)
                return
            except (ManagerError, InvalidAction):
                if self._taken.done():
                    return
                await asyncio.sleep(RETRY_S)

    async def stop(self) -> None:
        """Have it cancelled, and wait until it has settled."""
        self.cancel()
        await self._ended()

    def when_settled(self, tell: Callable[[], object]) -> None:
        self._settled.add_done_callback(lambda _: tell())


class RemoteTransport:
    by_value = True

    def __init__(self, url: str, token: str = "", *, ca: str = "", reconnect_s: float = RECONNECT_S) -> None:
        self.wire = Wire(url, token, ca, reconnect_s)
        self._files = RemoteFiles(self.wire)
        self._images = RemoteImages(self.wire)
        self._quotas: dict[str, Quota] = {}
        self._services: dict[str, ServiceReply] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._pending: dict[RemotePending, None] = {}
        self._boxes: dict[str, None] = {}
        """Sandboxes that were opened over it and not closed."""
        self._arrived: list[str] = []
        self._acknowledge: asyncio.TimerHandle | None = None
        self._closing = False
        self.about: About

    # ---- its life ----

    async def __aenter__(self) -> Self:
        await self.wire.open()
        try:
            self.about = msgspec.json.decode(await self._first_answer(), type=About)
            quotas = msgspec.json.decode(await self.wire.ask("GET", "/v1/quotas"), type=Quotas).quotas
            services = msgspec.json.decode(await self.wire.ask("GET", "/v1/services"), type=Services).services
        except BaseException as error:
            await self.wire.close()
            if isinstance(error, msgspec.MsgspecError):
                said = f"{self.wire.url} is no service of this version of Tangram: {error}"
                raise ManagerError(said, retry=False) from None
            raise
        self._quotas = {quota.name: quota for quota in quotas}
        self._services = {service.name: service for service in services}
        return self

    async def _first_answer(self) -> bytes:
        """Whoever is not there at all is not waited for."""
        import aiohttp

        url = self.wire.url
        try:
            return await self.wire._once("GET", "/v1/about", None, {}, 0.0)
        except _Again as error:
            cause = error.__cause__
            if isinstance(cause, aiohttp.ClientConnectorSSLError):
                raise ManagerError(without_tls(url), retry=False) from None
            if isinstance(cause, aiohttp.ServerDisconnectedError):
                raise ManagerError(broken_off(url, str(cause))) from None
            why = reason(cause.os_error) if isinstance(cause, aiohttp.ClientConnectorError) else str(error)
            raise ManagerError(no_service(url, why)) from None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all that this connection has there, as the end of an embedded one does."""
        self._closing = True
        try:
            await undisturbed(self._leave())
        finally:
            await self.wire.close()

    async def _leave(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVING_S):
                await self._end_all()
        if self._acknowledge is not None:
            self._acknowledge.cancel()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _end_all(self) -> None:
        """Actions first, then sandboxes, then images that were made of them."""
        await asyncio.gather(*(pending.stop() for pending in list(self._pending)))
        await asyncio.gather(*(self._quietly("DELETE", f"/v1/sandboxes/{_part(name)}") for name in list(self._boxes)))
        images = [name for name in self._images.committed if name not in self._images.remembered]
        await asyncio.gather(*(self._quietly("DELETE", f"/v1/images/{_part(name)}") for name in images))
        await self._acknowledge_quietly()

    def begin(self, doing: Coroutine[Any, Any, Any]) -> None:
        self.keep(asyncio.ensure_future(doing))

    def keep(self, task: asyncio.Future[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- actions ----

    def submit(self, action: Action, work: Work, output: Output | None = None) -> Pending:
        if self._closing:
            raise AdmissionRefused("closing", "the connection is being closed; nothing more is taken in")
        pending = RemotePending(self, action, work, output)
        self._pending[pending] = None
        if isinstance(work, Open):
            self._boxes[action.sandbox] = None
        return pending

    def ended(self, pending: RemotePending) -> None:
        self._pending.pop(pending, None)
        if isinstance(pending._work, Close):
            self._boxes.pop(pending._action.sandbox, None)
        elif isinstance(pending._work, Commit):
            self._images.committed[pending._work.image] = None

    def arrived(self, id: str) -> None:
        """Its result is here, and need not be kept there."""
        self._arrived.append(id)
        if len(self._arrived) >= ACKNOWLEDGED_MAX:
            self._flush()
        elif self._acknowledge is None:
            self._acknowledge = asyncio.get_running_loop().call_later(ACKNOWLEDGE_S, self._flush)

    def _flush(self) -> None:
        if self._acknowledge is not None:
            self._acknowledge.cancel()
            self._acknowledge = None
        self.begin(self._acknowledge_quietly())

    async def _acknowledge_quietly(self) -> None:
        with contextlib.suppress(ManagerError):  # they are kept a while longer then
            await self._send_acknowledged()

    async def _send_acknowledged(self) -> None:
        ids, self._arrived = self._arrived, []
        if ids:
            await self.wire.ask("POST", "/v1/acknowledge", Acknowledged(actions=ids), closing=True)

    # ---- quotas, services, functions ----

    def announce(self, pool: Pool) -> None:
        """The service knows its functions."""

    async def weigh(self, run: str, weight: float) -> None:
        await self.wire.ask("PUT", f"/v1/weights/{quote(run, safe='')}", WeightRequest(weight=weight))

    async def add_quota(self, quota: Quota) -> None:
        await self.wire.ask("PUT", "/v1/quotas", quota)
        self._quotas[quota.name] = quota

    def quota(self, name: str) -> Quota:
        found = self._quotas.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(map(repr, self._quotas)) or "none"
            raise InvalidAction("quota", name, f"one that the service had when this connection was made: {known}")
        return found

    def service(self, name: str) -> Service:
        found = self._services.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(map(repr, self._services)) or "none"
            raise InvalidAction("service", name, f"one that the service has: {known}")
        return Service(name=found.name, engine="elsewhere:engine", degrees=found.degrees, call_s_max=found.call_s_max)

    def let_go(self, action: str, spent: dict[str, int] | None) -> None:
        self.begin(self._quietly("POST", f"/v1/actions/{quote(action, safe='')}/release", LetGo(spent=spent)))

    def heard(self, quota: str, status: int, headers: Mapping[str, str], action: str) -> None:
        record = Heard(status=status, headers=dict(headers), action=action)
        self.begin(self._quietly("POST", f"/v1/quotas/{_part(quota)}/heard", record))

    async def _quietly(self, method: str, path: str, record: Any = None) -> None:
        """What nobody waits for: if it never arrives, the service finds out by itself that nobody is there."""
        with contextlib.suppress(ManagerError, InvalidAction):
            await self.wire.ask(method, path, record, closing=True)

    # ---- files and images ----

    def files(self, sandbox: str) -> Files:
        return self._files

    @property
    def images(self) -> Images:
        return self._images


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """As they come; the reader of aiohttp takes none of more than 64 KiB."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > LINE_BYTES_MAX:
            raise ManagerError("a line of the output is too long", retry=False)


def _lost(action: str, reason: str) -> Settled:
    return Settled(outcome=Outcome(action=action, status=Status.LOST, reason=reason))


def _part(name: str) -> str:
    return quote(name, safe="")
