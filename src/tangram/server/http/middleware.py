"""HTTP middleware: authentication, limits on size, time and concurrency, and errors as JSON.

Treats all input as hostile; executes nothing itself. Promises that a bad request gets a response that names the error
and has no effect, and that no response tells one run about another.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tangram.config.validators import is_loopback
from tangram.errors import AdmissionRefused, FileFailed, InvalidAction, InvalidInput, ManagerError, TangramError
from tangram.runtime.error_records import Draining, ErrorRecord, NotFound, Unauthorized, error_record_of
from tangram.runtime.wire import WAIT_S, WAIT_S_MAX, Caps, ErrorResponse
from tangram.server.http.auth import RunRegistry, TokenBucket, WrongTokenLimiter
from tangram.server.http.decode_errors import to_invalid_action
from tangram.server.journal.journal import JournalConflict, JournalFailed
from tangram.server.observe.metrics import ReportedMetrics
from tangram.server.tenants import Principal, Revocation

BODY_TIMEOUT_S = 30.0
BODY_BYTES_PER_S_MIN = 64 << 10
"""Time for a body, plus its size at that speed; a slower sender is cut off."""
CHUNK_BYTES = 256 << 10
SPOOL_BYTES = 8 << 20
"""Size of one part of a stream; more goes through a temporary file."""
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Disk errors of a temporary file that the server reports."""
LARGE_BYTES = 256 << 10
"""Larger bodies and responses need a slot: memory would not hold that much per connection."""
BODIES_MAX, BODIES_PER_TENANT_MAX = 16, 4
"""Large bodies in memory at once, over all runs and per run."""
UPLOADS_MAX, UPLOADS_PER_TENANT_MAX = 64, 8
"""Bodies in temporary files at once: each may fill disk."""
LARGE_RESPONSES_MAX, LARGE_RESPONSES_PER_TENANT_MAX = 64, 8
"""Large responses at once, until they are taken: each may fill disk."""
RETRY_AFTER_S_MAX = 3600.0
"""Largest value of Retry-After."""
SAFE_INTEGER_MAX = 1 << 53
"""Beyond 2^53 a float, as most clients use, cannot represent every integer."""

R = TypeVar("R")

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
"""HTTP status by error code. Codes are stable."""


class ApiError(Exception):
    def __init__(self, code: str, message: str, *, wait_s: float = 0.0, limit: str = "") -> None:
        super().__init__(message)
        retry = code in ("rate", "draining", "journal_failed", "too_slow")
        self.error_record = ErrorRecord(code=code, message=message, limit=limit, retry=retry)
        self.wait_s = wait_s
        self.status = STATUS_BY_CODE[code]


class ConcurrencyLimiter:
    """Limits concurrency over all tenants and per tenant: a slow client delays only its own tenant."""

    def __init__(self, total_max: int, per_tenant_max: int) -> None:
        self._semaphore = asyncio.Semaphore(total_max)
        self._per_tenant_max = per_tenant_max
        self._semaphore_by_tenant: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def acquire(self, caller: Principal) -> AsyncIterator[None]:
        """Raises Unauthorized if the run was revoked before its turn."""
        own = self._semaphore_by_tenant.get(caller.tenant) or asyncio.Semaphore(self._per_tenant_max)
        self._semaphore_by_tenant[caller.tenant] = own
        async with own, self._semaphore:
            caller.require_not_revoked()
            yield


class RequestContext:
    """One request with its authenticated caller."""

    __slots__ = ("body_limiter", "caller", "request")

    def __init__(self, request: Request, caller: Principal, body_limiter: ConcurrencyLimiter) -> None:
        self.request = request
        self.caller = caller
        self.body_limiter = body_limiter
        """Limits large bodies."""

    def path_param(self, name: str) -> str:
        return cast(str, self.request.path_params[name])

    def query_text(self, name: str, default: str | None = None) -> str:
        values = self.request.query_params.getlist(name)
        if len(values) > 1 or (not values and default is None):
            raise InvalidAction(name, values, "once in the query")
        return values[0] if values else cast(str, default)

    def query_float(self, name: str, default: float, most: float) -> float:
        text = self.query_text(name, str(default))
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0.0 <= value <= most:
            raise InvalidAction(name, text, f"a number from 0 to {most:g}")
        return value

    def query_int(self, name: str, default: int, most: int) -> int:
        text = self.query_text(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
            raise InvalidAction(name, text, f"a whole number from 0 to {most}")
        return int(text)

    def bytes_max(self, most: int) -> int:
        """The caller's limit, at most that of the server."""
        return min(most, self.query_int("bytes_max", most, SAFE_INTEGER_MAX))

    def query_octal(self, name: str, default: int) -> int:
        text = self.query_text(name, f"{default:04o}")
        if not re.fullmatch("[0-7]{3,4}", text, re.ASCII):
            raise InvalidAction(name, text, "three or four octal digits, such as 0644")
        return int(text, 8)

    def wait_s(self) -> float:
        return self.query_float("wait_s", WAIT_S, WAIT_S_MAX)

    def require_admin(self) -> None:
        if not self.caller.is_admin:
            raise ApiError("forbidden", "only the admin's token may do that")


Handler = Callable[[RequestContext], Awaitable[Response]]


def json_response(record: Any, status: int = 200) -> Response:
    return Response(encode(record), status, media_type="application/json")


def no_content() -> Response:
    return Response(status_code=204)


def problem_response(error_record: ErrorRecord, status: int, wait_s: float = 0.0) -> Response:
    headers = (
        {"retry-after": str(max(1, round(min(wait_s, RETRY_AFTER_S_MAX))))} if wait_s or error_record.retry else {}
    )
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(encode(ErrorResponse(error=error_record)), status, headers, media_type="application/json")


class ApiMiddleware:
    """Wraps every handler."""

    def __init__(
        self,
        runs: RunRegistry,
        metrics: ReportedMetrics,
        *,
        requests_per_s: float,
        requests_burst: int,
        now: Callable[[], float],
    ) -> None:
        self._runs = runs
        self._metrics = metrics
        self._now = now
        self._per_s, self._burst = requests_per_s, requests_burst
        self._buckets: dict[str, TokenBucket] = {}
        self._wrong_token_limiter = WrongTokenLimiter(now)
        self._body_limiter = ConcurrencyLimiter(BODIES_MAX, BODIES_PER_TENANT_MAX)

    def wrap(
        self, handler: Handler, route: str, *, is_public: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            began = time.perf_counter()
            try:
                caller = ANONYMOUS if is_public else self._authenticate(request)
                response = await handler(RequestContext(request, caller, self._body_limiter))
            except Exception as error:
                response = self._error_response(request, error)
            self._metrics.on_response(route, response.status_code, time.perf_counter() - began)
            return response

        return answer

    def _authenticate(self, request: Request) -> Principal:
        address = request.client.host if request.client is not None else ""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme and scheme.lower() != "bearer":
            raise ApiError("unauthorized", "expected the header 'Authorization: Bearer TOKEN'")
        caller = self._runs.authenticate(token.strip())
        if caller is None:
            wait_s = self._wrong_token_limiter.retry_after_s(address) if token else 0.0
            if wait_s:  # a valid token is accepted: many callers may share an address
                raise ApiError("rate", "too many wrong tokens from this address", limit="wrong_tokens", wait_s=wait_s)
            if token:
                self._wrong_token_limiter.record_failure(address)
                log.warning("wrong token address=%r", address)
            raise Unauthorized
        if not token:
            _require_local_origin(request)
        self._check_rate_limit(caller)
        run = request.query_params.get("run") if caller.is_admin else None
        return caller if run is None else self._runs.impersonate(run)

    def _check_rate_limit(self, caller: Principal) -> None:
        now = self._now()
        per_s = caller.caps.requests_per_s or self._per_s
        bucket = self._buckets.get(caller.tenant)
        if bucket is None or bucket.per_s != per_s:
            burst = max(1.0, self._burst * per_s / self._per_s)
            bucket = self._buckets[caller.tenant] = TokenBucket(per_s, burst, now)
        wait_s = bucket.take(now)
        if wait_s:
            reason = f"more than {per_s:g} requests per second"
            raise ApiError("rate", reason, limit="requests_per_s", wait_s=wait_s)

    def _error_response(self, request: Request, error: Exception) -> Response:
        if isinstance(error, ApiError):
            if error.error_record.limit:
                self._metrics.on_refused(error.error_record.limit)
            return problem_response(error.error_record, error.status, error.wait_s)
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        error_record = _to_error_record(error)
        if error_record is not None:
            if error_record.limit:
                self._metrics.on_refused(error_record.limit)
            return problem_response(error_record, STATUS_BY_CODE[error_record.code])
        log.error("request failed method=%s path=%r", request.method, request.url.path, exc_info=error)
        return problem_response(
            ErrorRecord(code="internal", message="a bug in Tangram; see the log of the service"), 500
        )


def _require_local_origin(request: Request) -> None:
    """Where no token is needed, rejects requests that a local browser makes for other sites: of another origin, or to a
    name that was made to resolve to this machine (DNS rebinding)."""
    host = request.headers.get("host", "")
    origin = request.headers.get("origin", "")
    try:
        is_here = is_loopback(urlsplit(f"//{host}").hostname or "")
        is_own = not origin or urlsplit(origin).netloc == host
    except ValueError:
        is_here = is_own = False
    if not (is_here and is_own):
        reason = "without a token only local programs may send requests, to an address such as http://127.0.0.1:7433"
        raise ApiError("forbidden", f"{reason}, not {host[:100]!r} from {origin[:100]!r}")


def _to_error_record(error: Exception) -> ErrorRecord | None:
    """None for a bug."""
    if isinstance(error, NotFound):
        return ErrorRecord(code="not_found", message=str(error))
    if isinstance(error, Unauthorized):
        return ErrorRecord(code="unauthorized", message=str(error))
    if isinstance(error, Draining):
        return ErrorRecord(code="draining", message=str(error), retry=True)
    if isinstance(error, JournalConflict):
        return ErrorRecord(
            code="conflict", message="another action of this run has that id, with different content", field="id"
        )
    if isinstance(error, JournalFailed):
        return ErrorRecord(
            code="journal_failed", message="the service cannot write its journal and is stopping", retry=True
        )
    if isinstance(error, InvalidInput | AdmissionRefused | FileFailed | ManagerError):
        return error_record_of(error)
    return None


ANONYMOUS = Principal("", "", False, Caps(), Revocation())
"""The caller of a public route."""


# ---- bodies -----------------------------------------------------------------------------------------------------


@functools.cache
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


async def read_json(context: RequestContext, kind: type[R], bytes_max: int) -> R:
    """Raises InvalidAction for a malformed record, and Unauthorized if the run was revoked meanwhile."""
    media_type = context.request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if media_type not in (JSON, FORM):
        raise ApiError("wrong_content_type", f"expected a body of {JSON}, got {media_type[:100]!r}")
    body = await _read_body(context, bytes_max)
    context.caller.require_not_revoked()
    try:
        record: R = _json_decoder(cast(Any, kind)).decode(body)
        return record
    except msgspec.ValidationError as error:
        inner = error.__cause__
        if isinstance(inner, TangramError):
            raise inner from None
        raise to_invalid_action(error, body, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError("invalid_json", f"the body is not JSON: {error}") from None


JSON = "application/json"
OCTET_STREAM = "application/octet-stream"
FORM = "application/x-www-form-urlencoded"
"""The content type that curl sends by default; the body is read as JSON all the same."""


async def _read_body(context: RequestContext, bytes_max: int) -> bytes:
    """Reads a body; a possibly large one waits for its slot."""
    async with AsyncExitStack() as stack:
        length = _content_length(context.request)
        if length < 0 or LARGE_BYTES < length <= bytes_max:
            await stack.enter_async_context(context.body_limiter.acquire(context.caller))
        parts = [part async for part in body_chunks(context.request, bytes_max, "body_bytes_max")]
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _content_length(request: Request) -> int:
    """The announced size of the body; -1 if there is none."""
    length = request.headers.get("content-length", "")
    if length.isdigit():
        return int(length)
    return -1 if "transfer-encoding" in request.headers else 0


async def body_chunks(request: Request, bytes_max: int, limit: str) -> AsyncIterator[bytes]:
    """Reads a body within its limits of size and time."""
    if _content_length(request) > bytes_max:
        raise _too_large(bytes_max, limit)
    size, end_s, more = 0, asyncio.get_running_loop().time() + BODY_TIMEOUT_S, True
    while more:
        part, more = await _receive_chunk(request, end_s + size / BODY_BYTES_PER_S_MIN)
        size += len(part)
        if size > bytes_max:
            raise _too_large(bytes_max, limit)
        if part:
            yield part


async def _receive_chunk(request: Request, end_s: float) -> tuple[bytes, bool]:
    """Returns a part, and whether more follows. Reads from the ASGI server directly, which delivers most bodies as one
    part."""
    try:
        async with asyncio.timeout_at(end_s):
            message = await request.receive()
    except TimeoutError:
        raise ApiError("too_slow", f"the body arrived slower than {BODY_BYTES_PER_S_MIN} bytes per second") from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


def _too_large(bytes_max: int, limit: str) -> ApiError:
    return ApiError("too_large", f"the body has more than {bytes_max} bytes, the maximum ({limit})", limit=limit)


@contextmanager
def _map_disk_errors() -> Iterator[None]:
    """A full disk of the server is neither the sender's fault nor a bug."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRNOS:
            raise
        log.error("no room for temporary files folder=%r: %s", tempfile.gettempdir(), error)
        raise ManagerError(
            f"the disk of the service's temporary files (TMPDIR) is full: {error.strerror}; try again"
            " later, or in smaller parts"
        ) from error


class UploadSpool:
    """Bodies that go through a temporary file."""

    def __init__(self) -> None:
        self._limiter = ConcurrencyLimiter(UPLOADS_MAX, UPLOADS_PER_TENANT_MAX)

    async def spool(self, context: RequestContext, bytes_max: int, use: Callable[[BinaryIO], Awaitable[Any]]) -> Any:
        """Returns what `use` makes of the body, as a file at its start. Raises Unauthorized if the run was revoked
        before the body was complete."""
        async with self._limiter.acquire(context.caller):
            with _map_disk_errors(), tempfile.SpooledTemporaryFile(SPOOL_BYTES) as spool:
                file = cast(BinaryIO, spool)
                async for part in body_chunks(context.request, bytes_max, "file_bytes_max"):
                    if len(part) + file.tell() > SPOOL_BYTES:
                        await asyncio.to_thread(file.write, part)
                    else:
                        file.write(part)
                file.seek(0)
                context.caller.require_not_revoked()
                return await use(file)


# ---- responses ----------------------------------------------------------------------------------------------------


class ResponseSpool:
    """Large responses, through a temporary file. The slot is held until the response is taken, so one that is not read
    uses neither memory nor the slot of another run."""

    def __init__(self) -> None:
        self._limiter = ConcurrencyLimiter(LARGE_RESPONSES_MAX, LARGE_RESPONSES_PER_TENANT_MAX)

    async def spool(
        self,
        context: RequestContext,
        write: Callable[[BinaryIO], Awaitable[None]],
        media_type: str = OCTET_STREAM,
        status: int = 200,
    ) -> Response:
        """Sends what `write` writes into its file."""
        with _map_disk_errors():
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._limiter.acquire(context.caller))
                if await context.request.is_disconnected():
                    raise ClientDisconnect  # the client may have gone while it waited
                spool = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115 - until the answer is sent
                file = cast(BinaryIO, stack.enter_context(spool))
                await write(file)
                size = file.seek(0, 2)
                file.seek(0)
                if size <= LARGE_BYTES:
                    return Response(file.read(), status, media_type=media_type)
                return OpenFileResponse(file, size, stack.pop_all(), media_type, status)


class OpenFileResponse(StreamingResponse):
    """Sends a file. Its slot is released when it was sent or its client has gone."""

    def __init__(
        self, file: BinaryIO, size: int, resources: AsyncExitStack, media_type: str = OCTET_STREAM, status: int = 200
    ) -> None:
        async def content() -> AsyncIterator[bytes]:
            while part := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield part

        super().__init__(content(), status, {"content-length": str(size)}, media_type)
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await super().__call__(scope, receive, send)
