"""The HTTP client: connection pool, timeouts per phase, bounded bodies, streams of lines, TLS, one error tree.

Owns connections. Never follows a redirect and never repeats a request: its callers do that, and quotas count it.
`backoff_s` is the pause before a repetition; `quotas/adaptive_rate.py` parses `Retry-After` and related headers.

    ManagerError
      HttpError             no response, or a broken one; `retry`: whether the server cannot have received the request
        ConnectFailed       refused, unknown host, ...
          ConnectTimeout
          TlsFailed
            CertificateRejected
        ResponseTimeout
        Disconnected        the server closed the connection instead of responding
        ResponseBroken      other errors, such as a body that ends too early
        ResponseTooLarge
    InvalidAction
      InvalidUrl
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import importlib
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

import msgspec

from tangram.errors import InvalidAction, InvalidConfig, ManagerError

if TYPE_CHECKING:
    import aiohttp

CONNECT_S_MAX = 10.0
KEEP_ALIVE_S = 60.0
"""Time for which an idle connection stays in the pool."""
OVERLOADED = 529
"""Sent by services and proxies that are overloaded; no standard defines it."""
NOT_EXECUTED_STATUSES = (
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.TOO_EARLY,
    OVERLOADED,
)
"""Statuses of a server that has not executed the request."""
RETRYABLE_STATUSES = (
    *NOT_EXECUTED_STATUSES,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.GATEWAY_TIMEOUT,
)
"""Statuses after which the same request may succeed later. It may have been executed."""


# ---- errors ---------------------------------------------------------------------------------------------------


class HttpError(ManagerError):
    """The request got no response, or a broken one."""

    def __init__(self, message: str, *, reason: str = "", retry: bool = False) -> None:
        self.reason = reason or message
        """The message without the address."""
        super().__init__(message, retry=retry)


class ConnectFailed(HttpError):
    """No connection could be made."""


class ConnectTimeout(ConnectFailed):
    """The connection was not made in time."""


class TlsFailed(ConnectFailed):
    """The TLS handshake failed: the server may expect plain HTTP."""


class CertificateRejected(TlsFailed):
    """The certificate of the server is not trusted."""


class ResponseTimeout(HttpError):
    """The response did not arrive in time."""


class Disconnected(HttpError):
    """The server closed the connection without a response."""


class ResponseBroken(HttpError):
    """The response is malformed or incomplete, or the connection broke."""


class ResponseTooLarge(HttpError):
    """The response has more bytes than the caller accepts."""


class InvalidUrl(InvalidAction):
    """The address cannot be requested."""


@contextmanager
def _translated(url: str, timeouts: Timeouts) -> Iterator[None]:
    """Raises errors of aiohttp as HttpError or InvalidUrl."""
    import aiohttp

    try:
        yield
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise _invalid_url(url, error) from error
    except (aiohttp.ClientError, OSError) as error:
        raise _http_error(error, url, timeouts) from error


def _http_error(error: Exception, url: str, timeouts: Timeouts) -> HttpError:
    import aiohttp

    unreachable = f"{url} cannot be reached: {error}"
    match error:
        case aiohttp.ClientConnectorCertificateError() | ssl.SSLCertVerificationError():
            cause = getattr(error, "certificate_error", error)
            reason = str(getattr(cause, "verify_message", "") or cause)
            return CertificateRejected(unreachable, reason=reason, retry=True)
        case aiohttp.ClientConnectorSSLError() | ssl.SSLError():
            return TlsFailed(unreachable, reason=str(error), retry=True)
        case aiohttp.ClientConnectorError():
            return ConnectFailed(unreachable, reason=_os_reason(error.os_error), retry=True)
        case aiohttp.ConnectionTimeoutError():
            return ConnectTimeout(unreachable, reason=str(error), retry=True)
        case TimeoutError():
            seconds = timeouts.total_s if timeouts.total_s is not None else timeouts.read_s or 0.0
            return ResponseTimeout(f"{url} did not respond within {seconds:g} s")
        case aiohttp.ServerDisconnectedError():
            return Disconnected(f"{url}: {type(error).__name__}: {error}", reason=str(error))
    return ResponseBroken(f"{url}: {type(error).__name__}: {error}", reason=str(error) or type(error).__name__)


def _os_reason(error: OSError) -> str:
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or str(error)


def _invalid_url(url: object, error: Exception) -> InvalidUrl:
    return InvalidUrl("url", url, f"an address such as https://api.example.com/search ({error})")


# ---- responses ------------------------------------------------------------------------------------------------


class HttpResponse(msgspec.Struct, frozen=True):
    status: int
    headers: dict[str, str]
    """Names in lower case."""
    content: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        try:
            return msgspec.json.decode(self.content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ManagerError(f"the response is not JSON ({error}): {self.text[:200]!r}", retry=False) from None


class HttpStream:
    """A response with an unread body, as a context manager. Its methods raise HttpError.

    At the end of the block its connection returns to the pool if the body was read to its end, and is closed otherwise.
    """

    __slots__ = ("_response", "_timeouts", "status")

    def __init__(self, response: aiohttp.ClientResponse, timeouts: Timeouts) -> None:
        self._response = response
        self._timeouts = timeouts
        self.status = response.status

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._response.__aexit__(None, None, None)

    @property
    def headers(self) -> Mapping[str, str]:
        """Names in any case."""
        return self._response.headers

    @property
    def reason(self) -> str:
        """The reason phrase of the status; may be empty."""
        return self._response.reason or ""

    @property
    def length(self) -> int:
        """Bytes of the body, as the server announced them; 0 if unknown."""
        return self._response.content_length or 0

    async def read(self, bytes_max: int | None = None) -> bytes:
        """The whole body. Raises ResponseTooLarge."""
        if bytes_max is None:
            with self._errors():
                return await self._response.read()
        content = bytearray()
        async for chunk in self.chunks():
            content += chunk
            if len(content) > bytes_max:
                self.close()
                message = f"{self._response.url} responded {self.status} with more than {bytes_max} bytes"
                raise ResponseTooLarge(message)
        return bytes(content)

    async def read_up_to(self, bytes_max: int) -> bytes:
        """The beginning of the body, such as for an error message."""
        with self._errors():
            return await self._response.content.read(bytes_max)

    async def chunk(self) -> bytes:
        """The next bytes of the body, as they arrive; empty at its end."""
        with self._errors():
            return await self._response.content.readany()

    async def chunks(self) -> AsyncIterator[bytes]:
        while content := await self.chunk():
            yield content

    async def lines(self, bytes_max: int) -> AsyncIterator[bytes]:
        """The complete lines of the body, without their newline, as they arrive. Raises ResponseTooLarge for a line of
        more bytes."""
        rest = b""
        async for chunk in self.chunks():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line
            if len(rest) > bytes_max:
                raise ResponseTooLarge(f"{self._response.url} sent a line of more than {bytes_max} bytes")

    def close(self) -> None:
        """Close the connection instead of returning it to the pool: the server notices the abort."""
        self._response.close()

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return _translated(str(self._response.url), self._timeouts)


# ---- the client -----------------------------------------------------------------------------------------------


class Timeouts(NamedTuple):
    """Limits of one request, by phase; None: unlimited."""

    total_s: float | None = None
    connect_s: float | None = CONNECT_S_MAX
    read_s: float | None = None
    """The longest silence while reading."""


@functools.lru_cache
def _client_timeout(timeouts: Timeouts) -> aiohttp.ClientTimeout:
    import aiohttp

    return aiohttp.ClientTimeout(total=timeouts.total_s, sock_connect=timeouts.connect_s, sock_read=timeouts.read_s)


class HttpClient:
    """A pool of connections to any number of servers, opened on first use. `close` it in the same event loop."""

    def __init__(
        self,
        *,
        headers: Mapping[str, str] | None = None,
        ca: str = "",
        unix_socket: str = "",
        connections_max: int = 0,
        resend: bool = False,
    ) -> None:
        """headers: sent with every request.
        ca: a file of certificates in PEM, to verify servers instead of those of the system.
        unix_socket: connect to it, and ignore the host of addresses.
        connections_max: 0 is unlimited; pools of the scheduler limit requests.
        resend: repeat an idempotent request immediately if its pooled connection turns out to be closed. Not for
        requests that a quota counts."""
        self._headers = dict(headers or {})
        self._ca = ca
        self._unix_socket = unix_socket
        self._connections_max = connections_max
        self._resend = resend
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Open the pool now. Raises InvalidConfig for `ca`."""
        # The import takes a while; a thread keeps the event loop running.
        await asyncio.to_thread(importlib.import_module, "aiohttp")
        if self._session is not None:
            return
        import aiohttp

        connector: aiohttp.BaseConnector
        if self._unix_socket:
            connector = aiohttp.UnixConnector(self._unix_socket, limit=self._connections_max)
        else:
            connector = aiohttp.TCPConnector(
                limit=self._connections_max, ssl=_tls(self._ca), keepalive_timeout=KEEP_ALIVE_S
            )
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        self._session._retry_connection = self._resend

    async def close(self) -> None:
        """Close all connections; a request that is under way fails. A later request opens a new pool."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            await asyncio.sleep(0)  # transports end in the next iteration of the loop

    async def send(
        self,
        method: str,
        url: str,
        *,
        timeouts: Timeouts,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | AsyncIterator[bytes] | None = None,
        encoded: bool = False,
        **options: Any,
    ) -> HttpStream:
        """Send a request and return its response once the headers have arrived: `async with await send(...)`.

        encoded: use the path of the address as it is, without normalizing `..` or escapes.
        options: `json`, `params`, `data` and others of aiohttp.
        Raises HttpError and InvalidUrl.
        """
        if self._session is None:
            await self.open()
        assert self._session is not None
        address: Any = url
        if encoded:
            from yarl import URL

            try:
                address = URL(url, encoded=True)
            except (TypeError, ValueError) as error:
                raise _invalid_url(url, error) from error
        if content is not None:
            options["data"] = content
        if query:
            options["params"] = query
        if headers:
            options["headers"] = headers
        with _translated(url, timeouts):
            response = await self._session.request(
                method, address, timeout=_client_timeout(timeouts), allow_redirects=False, **options
            )
        return HttpStream(response, timeouts)

    async def request(self, method: str, url: str, *, timeout_s: float, bytes_max: int, **options: Any) -> HttpResponse:
        """Send a request and read its whole response. Raises HttpError and InvalidUrl."""
        timeouts = Timeouts(timeout_s, min(timeout_s, CONNECT_S_MAX))
        try:
            async with await self.send(method, url, timeouts=timeouts, **options) as response:
                content = await response.read(bytes_max)
                return HttpResponse(
                    response.status, {name.lower(): value for name, value in response.headers.items()}, content
                )
        except TypeError as error:
            if isinstance(url, str):
                raise
            raise _invalid_url(url, error) from error
        except ValueError as error:
            raise ResponseBroken(f"{url}: {type(error).__name__}: {error}") from error


def _tls(ca: str) -> ssl.SSLContext | bool:
    if not ca:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig("ca", ca, f"a file of certificates in PEM ({error.strerror or error})") from None


class BlockingHttpClient:
    """The client for threads and for code without an event loop: a connection for each request."""

    def __init__(self, url: str, *, unix_socket: str = "") -> None:
        self._url = urlsplit(url)
        self._unix_socket = unix_socket
        self._connections: set[http.client.HTTPConnection] = set()

    def request(
        self, method: str, path: str, body: bytes = b"", *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body of the response. Raises OSError."""
        connection = self._connection(timeout_s)
        self._connections.add(connection)
        try:
            connection.request(method, self._url.path.rstrip("/") + path, body or None, dict(headers or {}))
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            if isinstance(error, OSError):
                raise
            raise OSError(f"{type(error).__name__}: {error}") from error
        finally:
            self._connections.discard(connection)
            connection.close()

    def abort(self) -> None:
        """Break the connections of all requests that other threads wait for."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=timeout_s)
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        if self._unix_socket:
            connection.sock = socket.socket(socket.AF_UNIX)
            try:
                connection.sock.settimeout(timeout_s)
                connection.sock.connect(self._unix_socket)
            except BaseException:
                connection.close()
                raise
        return connection


# ---- repetition -----------------------------------------------------------------------------------------------


def backoff_s(tried: int, first_s: float, most_s: float) -> float:
    """The pause before the next try: exponential backoff with jitter."""
    return min(first_s * 2.0 ** (tried - 1), most_s) * random.uniform(0.5, 1.0)
