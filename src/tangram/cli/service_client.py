"""The client of the verbs that call a shared service: its options, requests and error messages.

    @option_group(target=parse_target)
    def verb(target: ServiceTarget) -> None:
        view = fetch_view(target)

Keeps no state and follows no redirect: a token is sent only to the given address. Promises that every failure is one
line that names the remedy, and that text from the service is printed as text.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, Self
from urllib.parse import quote, urlsplit

import typer

from tangram.client.connection_errors import broken_off, no_service, token_required, unknown_token, without_tls
from tangram.errors import InvalidConfig, ManagerError, TangramError
from tangram.managers.http import (
    CertificateRejected,
    ConnectFailed,
    ConnectTimeout,
    HttpClient,
    HttpError,
    HttpStream,
    InvalidUrl,
    ResponseTimeout,
    ResponseTooLarge,
    Timeouts,
    TlsFailed,
)
from tangram.reports import live
from tangram.reports.printable import escape_unprintable

if TYPE_CHECKING:
    from tangram.runtime.error_records import ErrorRecord
    from tangram.runtime.views import View

URL = "http://127.0.0.1:7433"
"""The default address of `tangram serve`."""
RESPONSE_S = 60.0
CHUNK_S = 60.0
"""Timeout between two chunks of a download; the whole download has none."""
STATUS_DELAY_S = 1.0
"""A request that takes longer shows on a terminal what it waits for."""
RESPONSE_BYTES_MAX = 256 << 20
TOKEN_BYTES_MAX = 4096

Url = Annotated[
    str,
    typer.Option(
        "--url",
        metavar="URL",
        envvar="TANGRAM_URL",
        show_envvar=False,
        help=f"The address of the service. Default: TANGRAM_URL, or {URL}.",
    ),
]
Token = Annotated[
    str | None,
    typer.Option("--token", metavar="TOKEN", help="The token of a run or of the admin. Default: TANGRAM_TOKEN."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="A file with the token, instead of --token."),
]
Ca = Annotated[
    Path | None,
    typer.Option("--ca", metavar="FILE", help="The CA certificate of the service, if this machine does not trust it."),
]


class ServiceUnreachable(ManagerError):
    """No service answers at the address; a later request may succeed."""


class ResourceNotFound(ManagerError):
    """The service responded that the requested object does not exist."""


class RequestRejected(TangramError):
    """The service refused the request; `fault` is its error record."""

    def __init__(self, fault: ErrorRecord) -> None:
        self.fault = fault
        super().__init__(escape_unprintable(fault.message))


class ServiceTarget(NamedTuple):
    """The address of a service and the credentials for it."""

    url: str
    token: str
    ca: str


def parse_target(url: Url = URL, token: Token = None, token_file: TokenFile = None, ca: Ca = None) -> ServiceTarget:
    """Read the options of a verb that calls a service. Raises InvalidConfig for an invalid address or token file."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise InvalidConfig("url", url, f"an address such as {URL} or https://tangram.example:7433")
    return ServiceTarget(url.rstrip("/"), _token(token, token_file), "" if ca is None else str(ca))


def _token(token: str | None, file: Path | None) -> str:
    """Read the token. It is never printed, not even in an error."""
    if token is not None and file is not None:
        raise InvalidConfig("token-file", str(file), "either --token or --token-file")
    source = "--token"
    if file is not None:
        source = str(file)
        try:
            with file.open("rb") as opened:
                token = opened.read(TOKEN_BYTES_MAX).decode(errors="replace").strip()
        except OSError as error:
            raise InvalidConfig("token-file", str(file), f"a file that can be read ({error.strerror})") from None
    elif token is None:
        source, token = "TANGRAM_TOKEN", os.environ.get("TANGRAM_TOKEN", "").strip()
        if not token:
            return ""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise TangramError(f"{source} is not a token: expected one that `tangram token create` printed")
    return token


# ---- requests ---------------------------------------------------------------------------------------------------


class ServiceConnection:
    """A connection to one service, open within its context."""

    def __init__(self, target: ServiceTarget) -> None:
        self._target = target
        headers = {"authorization": f"Bearer {target.token}"} if target.token else {}
        self._http = HttpClient(headers=headers, ca=target.ca, resend=True)

    async def __aenter__(self) -> Self:
        await self._http.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def request(self, method: str, path: str, record: Any = None, kind: Any = None) -> Any:
        """Send a request and return the response, decoded as a record of this kind; None without a kind."""
        import msgspec

        body = None if record is None else msgspec.json.encode(record)
        async with self._send(method, path, body, total_s=RESPONSE_S) as response:
            content = await response.read(RESPONSE_BYTES_MAX)
        if response.status >= 400:
            self._raise_error_response(response.status, content)
        if kind is None:
            return None
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            message = (
                f"{self._target.url} is not a service of this version of Tangram: {escape_unprintable(str(error))}"
            )
            raise ManagerError(message, retry=False) from None

    async def download(self, path: str, write: Callable[[bytes], object], report: Callable[[int, int], None]) -> int:
        """Pass a response on in chunks. Returns its size in bytes; raises if it is incomplete."""
        async with self._send("GET", path, None, total_s=None) as response:
            if response.status >= 400:
                self._raise_error_response(response.status, await response.read(RESPONSE_BYTES_MAX))
            done, total = 0, response.length
            async for chunk in response.chunks():
                write(chunk)
                done += len(chunk)
                report(done, max(done, total))
        return done

    @asynccontextmanager
    async def _send(
        self, method: str, path: str, body: bytes | None, *, total_s: float | None
    ) -> AsyncIterator[HttpStream]:
        headers = {"content-type": "application/json"} if body is not None else None
        timeouts = Timeouts(total_s, read_s=CHUNK_S)
        try:
            # `encoded`: a normalised path could name something else.
            async with await self._http.send(
                method, self._target.url + path, timeouts=timeouts, headers=headers, content=body, encoded=True
            ) as response:
                yield response
        except ResponseTooLarge:
            raise ManagerError("the response is too large to be one of Tangram's", retry=False) from None
        except HttpError as error:
            raise self._error_without_response(error) from None
        except InvalidUrl:
            raise InvalidConfig("url", self._target.url, f"an address such as {URL}") from None

    def _error_without_response(self, error: HttpError) -> TangramError:
        url, why = self._target.url, escape_unprintable(error.reason)
        match error:
            case CertificateRejected():
                return TangramError(
                    f"the certificate of {url} is not trusted ({why}): give --ca FILE, the certificate that signed it"
                )
            case TlsFailed():
                return TangramError(without_tls(url))
            case ConnectTimeout() | ResponseTimeout():
                return ServiceUnreachable(f"{url} did not answer in time: look at the log of the service")
            case ConnectFailed():
                return ServiceUnreachable(f"{no_service(url, why)} with --url or TANGRAM_URL")
        return ServiceUnreachable(broken_off(url, why))

    def _raise_error_response(self, status: int, content: bytes) -> NoReturn:
        import msgspec

        from tangram.runtime.wire import ErrorResponse

        url = self._target.url
        try:
            fault = msgspec.json.decode(content, type=ErrorResponse).error
        except (msgspec.MsgspecError, UnicodeDecodeError):
            if status in (502, 503, 504):
                raise ServiceUnreachable(f"{url} answered {status}: the service is down or overloaded") from None
            message = f"{url} answered {status}, which is no response of Tangram: is --url the address of the service?"
            raise ManagerError(message, retry=False) from None
        raise self._error_of(fault)

    def _error_of(self, fault: ErrorRecord) -> TangramError:
        url, message = self._target.url, escape_unprintable(fault.message)
        if fault.code == "unauthorized" and self._target.token:
            return TangramError(unknown_token(url))
        if fault.code == "unauthorized":
            return TangramError(token_required(url, "give --token-file FILE, or set TANGRAM_TOKEN"))
        if fault.code == "forbidden":
            token_state = "that of a run" if self._target.token else "missing"
            return TangramError(f"only the admin may do this, and the token is {token_state}: give the admin's token")
        if fault.code == "not_found" and (path := urlsplit(url).path):
            return TangramError(f"{message}; {url} has a path: is {url.removesuffix(path)} the address of the service?")
        if fault.code == "not_found":
            return ResourceNotFound(message, retry=False)
        if fault.code in ("draining", "journal_failed"):
            return ServiceUnreachable(message)
        if fault.code == "rate":
            return ServiceUnreachable(f"{url} limits its requests: {message}; try again in a moment")
        return RequestRejected(fault)


def request(target: ServiceTarget, method: str, path: str, record: Any = None, kind: Any = None) -> Any:
    """Send one request. After a second, a terminal shows that it waits."""

    async def send() -> Any:
        async with ServiceConnection(target) as connection:
            return await connection.request(method, path, record, kind)

    return asyncio.run(_with_status(send(), target.url))


async def _with_status(request: Any, url: str) -> Any:
    task = asyncio.ensure_future(request)
    try:
        await asyncio.wait({task}, timeout=STATUS_DELAY_S)
        if not task.done():
            with live.spinner(f"waiting for {url}"):
                await asyncio.wait({task})
        return await task
    finally:
        task.cancel()


def fetch_view(target: ServiceTarget) -> View:
    from tangram.runtime.views import View

    view = request(target, "GET", "/v1/view", kind=View)
    assert isinstance(view, View)
    return view


def quote_part(name: str) -> str:
    """Quote a name as one segment of a path."""
    return quote(name, safe="")
