"""The HTTP door: requests in, answers out, errors as JSON.

Owns how a request is read: who sends it, how large it may be, how long it may take. Decides nothing: the desk does what
it asks. Treats everything that comes as hostile. Promises that a bad request gets an answer which says what is wrong,
loses nothing and changes nothing, and that no answer tells one run about another.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tangram.config.valid import is_loopback
from tangram.errors import AdmissionRefused, FileFailed, InvalidAction, InvalidInput, ManagerError, TangramError
from tangram.runtime.error_records import Draining, Fault, NotFound, Unauthorized, fault_of
from tangram.runtime.wire import WAIT_S, WAIT_S_MAX, Caps, Problem
from tangram.server.http.auth import Bucket, Caller, Guesses, Runs, Standing
from tangram.server.http.decode_errors import malformed
from tangram.server.journal.journal import JournalConflict, JournalFailed

BODY_S = 30.0
BODY_BYTES_PER_S = 64 << 10
"""A body may take so long, and longer by its size at that speed: who sends slower than this is cut off."""
PIECE_BYTES = 256 << 10
SPOOL_BYTES = 8 << 20
"""Of what is streamed in or out; more goes through a temporary file."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""What the disk of a temporary file may say."""
LARGE_BYTES = 256 << 10
"""Bodies and answers beyond take turns: so much on every connection is what memory is there for."""
BODIES_MAX, BODIES_OF_RUN_MAX = 16, 4
"""Large bodies that are read into memory at once, over all runs and of one run."""
UPLOADS_MAX, UPLOADS_OF_RUN_MAX = 64, 8
"""Bodies that go through a file at once: each may take disk."""
ANSWERS_MAX, ANSWERS_OF_RUN_MAX = 64, 8
"""Large answers under way at once, until they are taken: each may take disk."""
WAIT_SAID_S_MAX = 3600.0
"""What a client is told to wait at most."""
WHOLE_MAX = 1 << 53
"""The last whole number that every client can tell from its neighbours."""

log = logging.getLogger("tangram.http")

encode = msgspec.json.Encoder().encode

STATUS_BY_CODE = {
    "invalid_http": 400,
    "invalid_json": 400,
    "invalid_action": 422,
    "invalid_config": 422,
    "invalid_input": 422,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "no_such_method": 405,
    "too_slow": 408,
    "conflict": 409,
    "too_large": 413,
    "wrong_content_type": 415,
    "file_failed": 422,
    "refused": 429,
    "rate": 429,
    "manager_failed": 502,
    "failed": 500,
    "internal": 500,
    "draining": 503,
    "journal_failed": 503,
}
"""Every code that an answer can have. They stay the same."""


class Refusal(Exception):
    """An answer that is none."""

    def __init__(self, code: str, message: str, *, wait_s: float = 0.0, limit: str = "", status: int = 0) -> None:
        super().__init__(message)
        retry = code in ("rate", "draining", "journal_failed", "too_slow")
        self.fault = Fault(code=code, message=message, limit=limit, retry=retry)
        self.wait_s = wait_s
        self.status = status or STATUS_BY_CODE[code]


class Turns:
    """So many at once, over all runs and of one: whoever is slow holds up its own ones only."""

    def __init__(self, most: int, of_run_max: int) -> None:
        self._turn = asyncio.Semaphore(most)
        self._of_run_max = of_run_max
        self._turn_by_space: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, caller: Caller) -> AsyncIterator[None]:
        """Raises Unauthorized if the run was revoked before it came."""
        own = self._turn_by_space.get(caller.space) or asyncio.Semaphore(self._of_run_max)
        self._turn_by_space[caller.space] = own
        async with own, self._turn:
            caller.require_standing()
            yield


class Ask:
    """One request, with who sends it."""

    __slots__ = ("bodies", "caller", "request")

    def __init__(self, request: Request, caller: Caller, bodies: Turns) -> None:
        self.request = request
        self.caller = caller
        self.bodies = bodies
        """Of large ones."""

    def part(self, name: str) -> str:
        """Of the path."""
        return cast(str, self.request.path_params[name])

    def text(self, name: str, default: str | None = None) -> str:
        """Of the query."""
        found = self.request.query_params.getlist(name)
        if len(found) > 1 or (not found and default is None):
            raise InvalidAction(name, found, "once in the query")
        return found[0] if found else cast(str, default)

    def number(self, name: str, default: float, most: float) -> float:
        text = self.text(name, str(default))
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0.0 <= value <= most:
            raise InvalidAction(name, text, f"a number from 0 to {most:g}")
        return value

    def whole(self, name: str, default: int, most: int) -> int:
        text = self.text(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
            raise InvalidAction(name, text, f"a whole number from 0 to {most}")
        return int(text)

    def at_most(self, name: str, most: int) -> int:
        """A bound of the caller's, below ours."""
        return min(most, self.whole(name, most, WHOLE_MAX))

    def octal(self, name: str, default: int) -> int:
        text = self.text(name, f"{default:04o}")
        if not re.fullmatch("[0-7]{3,4}", text, re.ASCII):
            raise InvalidAction(name, text, "three or four octal digits, such as 0644")
        return int(text, 8)

    def wait_s(self) -> float:
        return self.number("wait_s", WAIT_S, WAIT_S_MAX)

    def require_admin(self) -> None:
        if not self.caller.admin:
            raise Refusal("forbidden", "only the admin's token may do that")


Handler = Callable[[Ask], Awaitable[Response]]


def json_answer(record: Any, status: int = 200) -> Response:
    return Response(encode(record), status, media_type="application/json")


def nothing() -> Response:
    return Response(status_code=204)


def problem(fault: Fault, status: int, wait_s: float = 0.0) -> Response:
    headers = {"retry-after": str(max(1, round(min(wait_s, WAIT_SAID_S_MAX))))} if wait_s or fault.retry else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(encode(Problem(error=fault)), status, headers, media_type="application/json")


class Door:
    """What stands before every handler."""

    def __init__(self, runs: Runs, *, requests_per_s: float, requests_burst: int, now: Callable[[], float]) -> None:
        self._runs = runs
        self._now = now
        self._per_s, self._burst = requests_per_s, requests_burst
        self._buckets: dict[str, Bucket] = {}
        self._guesses = Guesses(now)
        self._bodies = Turns(BODIES_MAX, BODIES_OF_RUN_MAX)
        self.observe: Callable[[str, int, float], None] = lambda route, status, seconds: None
        """Told each request that was answered: metrics."""
        self.refused: Callable[[str], None] = lambda limit: None
        """Told the limit that kept a request out."""

    def open(self, handler: Handler, route: str, *, public: bool = False) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            began = time.perf_counter()
            try:
                caller = NOBODY if public else self._caller(request)
                found = await handler(Ask(request, caller, self._bodies))
            except Exception as error:
                found = self._failed(request, error)
            self.observe(route, found.status_code, time.perf_counter() - began)
            return found

        return answer

    def _caller(self, request: Request) -> Caller:
        address = request.client.host if request.client is not None else ""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme and scheme.lower() != "bearer":
            raise Refusal("unauthorized", "expected the header 'Authorization: Bearer TOKEN'")
        caller = self._runs.caller(token.strip())
        if caller is None:
            wait_s = self._guesses.wait_s(address) if token else 0.0
            if wait_s:  # who has a right token is let in all the same: many may have one address
                raise Refusal("rate", "too many wrong tokens from this address", limit="wrong_tokens", wait_s=wait_s)
            if token:
                self._guesses.wrong(address)
                log.warning("wrong token address=%r", address)
            raise Unauthorized
        if not token:
            _require_this_machine(request)
        self._require_rate(caller)
        run = request.query_params.get("run") if caller.admin else None
        return caller if run is None else self._runs.acting(run)

    def _require_rate(self, caller: Caller) -> None:
        now = self._now()
        per_s = caller.caps.requests_per_s or self._per_s
        bucket = self._buckets.get(caller.space)
        if bucket is None or bucket.per_s != per_s:
            burst = max(1.0, self._burst * per_s / self._per_s)
            bucket = self._buckets[caller.space] = Bucket(per_s, burst, now)
        wait_s = bucket.take(now)
        if wait_s:
            said = f"more than {per_s:g} requests per second"
            raise Refusal("rate", said, limit="requests_per_s", wait_s=wait_s)

    def _failed(self, request: Request, error: Exception) -> Response:
        if isinstance(error, Refusal):
            if error.fault.limit:
                self.refused(error.fault.limit)
            return problem(error.fault, error.status, error.wait_s)
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        fault = _fault(error)
        if fault is not None:
            if fault.limit:
                self.refused(fault.limit)
            return problem(fault, STATUS_BY_CODE[fault.code])
        log.error("request failed method=%s path=%r", request.method, request.url.path, exc_info=error)
        return problem(Fault(code="internal", message="a bug in Tangram; the log of the service has more"), 500)


def _require_this_machine(request: Request) -> None:
    """Where nobody needs a token, a browser of this machine must not act for the pages of others: not for one of
    another origin, nor for one whose name was made to lead here."""
    host = request.headers.get("host", "")
    origin = request.headers.get("origin", "")
    try:
        is_here = is_loopback(urlsplit(f"//{host}").hostname or "")
        is_own = not origin or urlsplit(origin).netloc == host
    except ValueError:
        is_here = is_own = False
    if not (is_here and is_own):
        said = "without a token only programs of this machine may ask, at an address such as http://127.0.0.1:7433"
        raise Refusal("forbidden", f"{said}, not {host[:100]!r} from {origin[:100]!r}")


def _fault(error: Exception) -> Fault | None:
    """None: it is a bug."""
    if isinstance(error, NotFound):
        return Fault(code="not_found", message=str(error))
    if isinstance(error, Unauthorized):
        return Fault(code="unauthorized", message=str(error))
    if isinstance(error, Draining):
        return Fault(code="draining", message=str(error), retry=True)
    if isinstance(error, JournalConflict):
        return Fault(code="conflict", message="another action of this run has that id, with other content", field="id")
    if isinstance(error, JournalFailed):
        return Fault(code="journal_failed", message="the service cannot write its journal and is stopping", retry=True)
    if isinstance(error, InvalidInput | AdmissionRefused | FileFailed | ManagerError):
        return fault_of(error)
    return None


NOBODY = Caller("", "", False, Caps(), Standing())
"""Who asks for what everybody may see."""


# ---- bodies -----------------------------------------------------------------------------------------------------


async def read_json(ask: Ask, decoder: msgspec.json.Decoder[Any], bytes_max: int) -> Any:
    """Raises InvalidAction for what is no such record, and Unauthorized if its run was revoked meanwhile."""
    kind = ask.request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind not in (JSON, FORM):
        raise Refusal("wrong_content_type", f"expected a body of {JSON}, got {kind[:100]!r}")
    body = await _body(ask, bytes_max)
    ask.caller.require_standing()
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        inner = error.__cause__
        if isinstance(inner, TangramError):
            raise inner from None
        raise malformed(error, body, decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal("invalid_json", f"the body is no JSON: {error}") from None


JSON = "application/json"
OCTETS = "application/octet-stream"
FORM = "application/x-www-form-urlencoded"
"""What curl says of whatever it sends; it is read as JSON all the same."""


async def _body(ask: Ask, bytes_max: int) -> bytes:
    """One that may be large is read when it is its turn."""
    async with AsyncExitStack() as stack:
        length = _length(ask.request)
        if length < 0 or LARGE_BYTES < length <= bytes_max:
            await stack.enter_async_context(ask.bodies.turn(ask.caller))
        parts = [part async for part in pieces(ask.request, bytes_max, "body_bytes_max")]
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _length(request: Request) -> int:
    """What it says of its body; -1: nothing."""
    said = request.headers.get("content-length", "")
    if said.isdigit():
        return int(said)
    return -1 if "transfer-encoding" in request.headers else 0


async def pieces(request: Request, bytes_max: int, limit: str) -> AsyncIterator[bytes]:
    """Of a body, within its limits of size and time."""
    if _length(request) > bytes_max:
        raise _too_large(bytes_max, limit)
    size, end_s, more = 0, asyncio.get_running_loop().time() + BODY_S, True
    while more:
        part, more = await _received(request, end_s + size / BODY_BYTES_PER_S)
        size += len(part)
        if size > bytes_max:
            raise _too_large(bytes_max, limit)
        if part:
            yield part


async def _received(request: Request, end_s: float) -> tuple[bytes, bool]:
    """A part, and whether more follows. Asked of the server itself, which hands over most bodies as one part."""
    try:
        async with asyncio.timeout_at(end_s):
            message = await request.receive()
    except TimeoutError:
        raise Refusal("too_slow", f"the body came slower than {BODY_BYTES_PER_S} bytes per second") from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


def _too_large(bytes_max: int, limit: str) -> Refusal:
    return Refusal("too_large", f"it has more than {bytes_max} bytes, which is the most ({limit})", limit=limit)


@contextmanager
def _spooling() -> Iterator[None]:
    """Of what goes through a file: whether it finds room there is not its sender's fault, nor a bug."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        log.error("no room for temporary files folder=%r: %s", tempfile.gettempdir(), error)
        raise ManagerError(
            f"the service has no room for it on the disk of its temporary files (TMPDIR): {error.strerror}; try again"
            " later, or in smaller parts"
        ) from error


class Uploads:
    """Bodies that go through a file."""

    def __init__(self) -> None:
        self._turns = Turns(UPLOADS_MAX, UPLOADS_OF_RUN_MAX)

    async def spooled(self, ask: Ask, bytes_max: int, use: Callable[[BinaryIO], Awaitable[Any]]) -> Any:
        """What `use` makes of the body, as a file at its beginning. Raises Unauthorized if its run was revoked before
        all of it was there."""
        async with self._turns.turn(ask.caller):
            with _spooling(), tempfile.SpooledTemporaryFile(SPOOL_BYTES) as spool:
                file = cast(BinaryIO, spool)
                async for part in pieces(ask.request, bytes_max, "file_bytes_max"):
                    if len(part) + file.tell() > SPOOL_BYTES:
                        await asyncio.to_thread(file.write, part)
                    else:
                        file.write(part)
                file.seek(0)
                ask.caller.require_standing()
                return await use(file)


# ---- answers ----------------------------------------------------------------------------------------------------


class Answers:
    """Answers that may be large. They go through a file, and a turn lasts until its answer is taken: one that nobody
    reads takes neither memory nor the turn of another run."""

    def __init__(self) -> None:
        self._turns = Turns(ANSWERS_MAX, ANSWERS_OF_RUN_MAX)

    async def spooled(
        self, ask: Ask, write: Callable[[BinaryIO], Awaitable[None]], media_type: str = OCTETS, status: int = 200
    ) -> Response:
        """What `write` has written into the file that it is given."""
        with _spooling():
            return await self._spooled(ask, write, media_type, status)

    async def _spooled(
        self, ask: Ask, write: Callable[[BinaryIO], Awaitable[None]], media_type: str, status: int
    ) -> Response:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._turns.turn(ask.caller))
            if await ask.request.is_disconnected():
                raise ClientDisconnect  # while it waited: nothing is read for nobody
            spool = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115 - until the answer is sent
            file = cast(BinaryIO, stack.enter_context(spool))
            await write(file)
            size = file.seek(0, 2)
            file.seek(0)
            if size <= LARGE_BYTES:
                return Response(file.read(), status, media_type=media_type)
            return FileAnswer(file, size, stack.pop_all(), media_type, status)


class FileAnswer(StreamingResponse):
    """All of a file. What it stands on, such as a turn, is let go when it was sent or its client has gone."""

    def __init__(
        self, file: BinaryIO, size: int, held: AsyncExitStack, media_type: str = OCTETS, status: int = 200
    ) -> None:
        async def content() -> AsyncIterator[bytes]:
            while part := await asyncio.to_thread(file.read, PIECE_BYTES):
                yield part

        super().__init__(content(), status, {"content-length": str(size)}, media_type)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)
