"""How verbs talk to a shared service: where it is, who asks, and what went wrong in words.

Owns the options that all such verbs have and the requests. Keeps nothing, repeats nothing and follows no redirect: a
token goes to the address that was given and nowhere else. Promises that whatever fails is one line that says what to
do, and that nothing which came from elsewhere reaches a terminal as anything but text.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, Self
from urllib.parse import quote, urlsplit

import typer

from tangram.client.connection_errors import broken_off, no_service, reason, unknown_token, wants_token, without_tls
from tangram.errors import InvalidConfig, ManagerError, TangramError

if TYPE_CHECKING:
    import aiohttp

    from tangram.runtime.error_records import Fault
    from tangram.runtime.views import View

URL = "http://127.0.0.1:7433"
"""Where `tangram serve` listens unless its config says otherwise."""
CONNECT_S, ANSWER_S = 10.0, 60.0
PIECE_S = 60.0
"""Between two pieces of a download, which may take long as a whole."""
SILENT_S = 1.0
"""A request that takes longer says on a terminal what it waits for."""
ANSWER_BYTES_MAX = 256 << 20
TOKEN_BYTES_MAX = 4096

Url = Annotated[
    str,
    typer.Option(
        "--url",
        metavar="URL",
        envvar="TANGRAM_URL",
        show_envvar=False,
        help=f"The service. Default: what TANGRAM_URL says, else {URL}.",
    ),
]
Token = Annotated[
    str | None,
    typer.Option("--token", metavar="TOKEN", help="Of a run, or of the admin. Default: what TANGRAM_TOKEN says."),
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="A file with the token in place of --token.")
]
Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca", metavar="FILE", help="The certificate that signed the service's, where this machine does not know it."
    ),
]


class Unreachable(ManagerError):
    """Nobody answers there now. Somebody may, later."""


class NotThere(ManagerError):
    """The service answers that there is no such thing."""


class Refused(TangramError):
    """The service does not do this; `fault` has the parts of what it says."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(plain(fault.message))


class Target(NamedTuple):
    """A service, and as whom to ask it."""

    url: str
    token: str
    ca: str


def target(url: str, token: str | None, token_file: Path | None, ca: Path | None) -> Target:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise InvalidConfig("url", url, f"an address such as {URL} or https://tangram.example:7433")
    return Target(url.rstrip("/"), _token(token, token_file), "" if ca is None else str(ca))


def _token(token: str | None, file: Path | None) -> str:
    """Never shown, not even where it is wrong."""
    if token is not None and file is not None:
        raise InvalidConfig("token-file", str(file), "no --token beside it")
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
        raise TangramError(f"{source} holds no token: expected one as `tangram token create` prints it")
    return token


# ---- asking -----------------------------------------------------------------------------------------------------


class Connection:
    """To one service, for as long as its context lasts."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        import aiohttp

        secure: ssl.SSLContext | bool = True
        if self._target.ca:
            try:
                secure = ssl.create_default_context(cafile=self._target.ca)
            except (OSError, ssl.SSLError) as error:
                said = f"a file of certificates in PEM ({error.strerror or error})"
                raise InvalidConfig("ca", self._target.ca, said) from None
        token = self._target.token
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=secure), headers=headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()
        await asyncio.sleep(0)  # transports end in the next turn of the loop

    async def ask(self, method: str, path: str, record: Any = None, kind: Any = None) -> Any:
        """The answer, decoded as a record of that kind; None for an answer without one."""
        import msgspec

        body = None if record is None else msgspec.json.encode(record)
        async with self._asked(method, path, body, total_s=ANSWER_S) as response:
            content = await _whole(response)
        if response.status >= 400:
            self._refused(response.status, content)
        if kind is None:
            return None
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            said = f"{self._target.url} is no service of this version of Tangram: {plain(str(error))}"
            raise ManagerError(said, retry=False) from None

    async def download(self, path: str, write: Callable[[bytes], object], tell: Callable[[int, int], None]) -> int:
        """Hand the answer on, piece by piece. Returns its bytes; raises unless all came."""
        async with self._asked("GET", path, None, total_s=None) as response:
            if response.status >= 400:
                self._refused(response.status, await _whole(response))
            done, total = 0, response.content_length or 0
            async for piece in response.content.iter_any():
                write(piece)
                done += len(piece)
                tell(done, max(done, total))
        return done

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: bytes | None, *, total_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        import aiohttp
        from yarl import URL as Address

        assert self._session is not None
        limit = aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_S, sock_read=PIECE_S)
        headers = {"content-type": "application/json"} if body is not None else {}
        # As it is: a path that is tidied up would be that of something else.
        address = Address(self._target.url + path, encoded=True)
        try:
            async with self._session.request(
                method, address, data=body, timeout=limit, headers=headers, allow_redirects=False
            ) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError) as error:
            self._failed(error)

    def _failed(self, error: Exception) -> NoReturn:
        import aiohttp

        url = self._target.url
        if isinstance(error, aiohttp.ClientConnectorCertificateError | ssl.SSLCertVerificationError):
            why = getattr(error, "certificate_error", error)
            why = getattr(why, "verify_message", "") or why
            said = f"the certificate of {url} is not trusted ({plain(str(why))}): give --ca FILE, the certificate that"
            raise TangramError(f"{said} signed it") from None
        if isinstance(error, aiohttp.ClientConnectorSSLError | ssl.SSLError):
            raise TangramError(without_tls(url)) from None
        if isinstance(error, aiohttp.ClientConnectorError):
            said = no_service(url, plain(reason(error.os_error)))
            raise Unreachable(f"{said} with --url or TANGRAM_URL") from None
        if isinstance(error, TimeoutError):
            raise Unreachable(f"{url} did not answer in time: look at the log of the service") from None
        if isinstance(error, aiohttp.InvalidURL | ValueError):
            raise InvalidConfig("url", url, f"an address such as {URL} ({plain(str(error))})") from None
        raise Unreachable(broken_off(url, plain(str(error) or type(error).__name__))) from None

    def _refused(self, status: int, content: bytes) -> NoReturn:
        import msgspec

        from tangram.runtime.wire import Problem

        url = self._target.url
        try:
            fault = msgspec.json.decode(content, type=Problem).error
        except (msgspec.MsgspecError, UnicodeDecodeError):
            if status in (502, 503, 504):
                raise Unreachable(f"{url} answered {status}: the service is down, or too many ask it") from None
            said = f"{url} answered {status}, which is none of Tangram's answers: is --url the address of the service?"
            raise ManagerError(said, retry=False) from None
        raise self._told(fault)

    def _told(self, fault: Fault) -> TangramError:
        url, message = self._target.url, plain(fault.message)
        if fault.code == "unauthorized" and self._target.token:
            return TangramError(unknown_token(url))
        if fault.code == "unauthorized":
            return TangramError(wants_token(url, "give --token-file FILE, or set TANGRAM_TOKEN"))
        if fault.code == "forbidden":
            said = "that of a run" if self._target.token else "none"
            return TangramError(f"only the admin may do this, and the token is {said}: give the admin's token")
        if fault.code == "not_found" and (path := urlsplit(url).path):
            return TangramError(f"{message}; {url} has a path: is {url.removesuffix(path)} the address of the service?")
        if fault.code == "not_found":
            return NotThere(message, retry=False)
        if fault.code in ("draining", "journal_failed"):
            return Unreachable(message)
        if fault.code == "rate":
            return Unreachable(f"{url} is asked too often: {message}; try again in a moment")
        return Refused(fault)


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for piece in response.content.iter_any():
        content += piece
        if len(content) > ANSWER_BYTES_MAX:
            raise ManagerError("the answer is too large to be one of Tangram's", retry=False)
    return bytes(content)


def asked(target: Target, method: str, path: str, record: Any = None, kind: Any = None) -> Any:
    """One request. One that takes long says so on a terminal."""

    async def ask() -> Any:
        async with Connection(target) as connection:
            return await connection.ask(method, path, record, kind)

    return asyncio.run(_shown(ask(), target.url))


async def _shown(asking: Any, url: str) -> Any:
    task = asyncio.ensure_future(asking)
    try:
        await asyncio.wait({task}, timeout=SILENT_S)
        if not task.done() and sys.stderr.isatty():
            from rich.console import Console

            with Console(stderr=True).status(f"waiting for {url}"):
                await asyncio.wait({task})
        return await task
    finally:
        task.cancel()


def view_of(target: Target) -> View:
    from tangram.runtime.views import View

    found = asked(target, "GET", "/v1/view", kind=View)
    assert isinstance(found, View)
    return found


def part(name: str) -> str:
    """Of a path."""
    return quote(name, safe="")


# ---- words ------------------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """What somebody else chose, with what could steer a terminal made visible."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
