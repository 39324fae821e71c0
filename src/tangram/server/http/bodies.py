"""Request and response bodies, within limits on size, time, memory and temporary files.

Errors of a malformed record name the field as in the body, its value and what was expected. A large or hostile body
costs no more than its decoding.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, BinaryIO, TypeVar, cast

import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tangram.errors import InvalidAction, ManagerError, TangramError
from tangram.runtime.error_records import Verbatim
from tangram.runtime.wire import DESCRIPTION_BY_PATTERN
from tangram.server.http.request_context import ConcurrencyLimiter, RequestContext
from tangram.server.http.responses import ApiError

BODY_TIMEOUT_S = 30.0
BODY_BYTES_PER_S_MIN = 64 << 10
"""A body must arrive within BODY_TIMEOUT_S plus its size at this speed; a slower sender is disconnected."""
CHUNK_BYTES = 256 << 10
SPOOL_BYTES = 8 << 20
"""A larger body or response goes through a temporary file; a smaller one stays in memory."""
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Disk errors of a temporary file that the server reports."""
LARGE_BYTES = 256 << 10
"""Larger bodies and responses need a slot: memory does not suffice for one per connection."""
UPLOADS_MAX, UPLOADS_PER_TENANT_MAX = 64, 8
"""Concurrent bodies in temporary files: each may use much disk space."""
LARGE_RESPONSES_MAX, LARGE_RESPONSES_PER_TENANT_MAX = 64, 8
"""Concurrent large responses, until their clients have read them: each may use much disk space."""

R = TypeVar("R")

log = logging.getLogger("tangram.http")


# ---- requests ---------------------------------------------------------------------------------------------------


@functools.cache
def _json_decoder(record_type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(record_type)


async def read_json(context: RequestContext, record_type: type[R], bytes_max: int) -> R:
    """Raises InvalidAction for a malformed record, and Unauthorized if the run was revoked meanwhile."""
    media_type = context.request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if media_type not in (JSON, FORM):
        raise ApiError("wrong_content_type", f"expected a body of {JSON}, got {media_type[:100]!r}")
    body = await _read_body(context, bytes_max)
    context.caller.require_not_revoked()
    try:
        record: R = _json_decoder(cast(Any, record_type)).decode(body)
        return record
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, TangramError):
            raise cause from None
        raise _to_invalid_action(error, body, record_type) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError("invalid_json", f"the body is not JSON: {error}") from None


JSON = "application/json"
OCTET_STREAM = "application/octet-stream"
FORM = "application/x-www-form-urlencoded"
"""The content type that curl sends by default; the body is decoded as JSON nevertheless."""


async def _read_body(context: RequestContext, bytes_max: int) -> bytes:
    """Reads a body; a possibly large one waits for its slot."""
    async with AsyncExitStack() as stack:
        length = _content_length(context.request)
        if length < 0 or LARGE_BYTES < length <= bytes_max:
            await stack.enter_async_context(context.body_limiter.acquire(context.caller))
        parts = [part async for part in body_chunks(context.request, bytes_max, "body_bytes_max")]
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _content_length(request: Request) -> int:
    """The announced size of the body: 0 without a body, -1 if it is chunked."""
    length = request.headers.get("content-length", "")
    if length.isdigit():
        return int(length)
    return -1 if "transfer-encoding" in request.headers else 0


async def body_chunks(request: Request, bytes_max: int, limit_name: str) -> AsyncIterator[bytes]:
    """Reads a body within its limits of size and time."""
    if _content_length(request) > bytes_max:
        raise _too_large(bytes_max, limit_name)
    size, end_s, more = 0, asyncio.get_running_loop().time() + BODY_TIMEOUT_S, True
    while more:
        part, more = await _receive_chunk(request, end_s + size / BODY_BYTES_PER_S_MIN)
        size += len(part)
        if size > bytes_max:
            raise _too_large(bytes_max, limit_name)
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


def _too_large(bytes_max: int, limit_name: str) -> ApiError:
    return ApiError(
        "too_large", f"the body has more than {bytes_max} bytes, the maximum ({limit_name})", limit=limit_name
    )


@contextmanager
def _map_disk_errors() -> Iterator[None]:
    """Converts a full or failing disk of the server into a retryable error: neither the sender nor a bug causes it."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRNOS:
            raise
        log.error("cannot write temporary files folder=%r: %s", tempfile.gettempdir(), error)
        raise ManagerError(
            f"the service cannot write its temporary files (TMPDIR): {error.strerror}; try again later, or in smaller"
            " parts"
        ) from error


class UploadSpool:
    """Bodies that go through a temporary file."""

    def __init__(self) -> None:
        self._limiter = ConcurrencyLimiter(UPLOADS_MAX, UPLOADS_PER_TENANT_MAX)

    async def spool(self, context: RequestContext, bytes_max: int, handle: Callable[[BinaryIO], Awaitable[Any]]) -> Any:
        """Passes the body to `handle` as a file, from its start, and returns the result. Raises Unauthorized if the run
        was revoked before the body was complete."""
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
                return await handle(file)


# ---- malformed records ------------------------------------------------------------------------------------------


REDECODED_BYTES_MAX = 64 << 10
"""Size of a body that is decoded again to find the wrong value."""
_AT_PATTERN = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`\Z")
_MISSING_PATTERN = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_INVALID_CHOICE_PATTERN = re.compile(r"Invalid (?:enum )?value .*", re.DOTALL)
_UNKNOWN_PATTERN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_DESCRIPTION_BY_EXPECTED = {
    f"`str` matching regex {pattern!r}": description for pattern, description in DESCRIPTION_BY_PATTERN.items()
}


def _to_invalid_action(error: msgspec.ValidationError, body: bytes, record_type: Any) -> InvalidAction:
    """`record_type`: what the body should be."""
    text, field = str(error), ""
    match = _AT_PATTERN.search(text)
    if match is not None:
        text, field = text[: match.start()], match[1]
    for pattern, expected in (
        (_MISSING_PATTERN, "this required field"),
        (_UNKNOWN_PATTERN, "no field of this name"),
    ):
        named = pattern.fullmatch(text)
        if named is not None:
            path = f"{field}.{named[1]}".lstrip(".")
            return InvalidAction(
                path, _value_at(body, path) if pattern is _UNKNOWN_PATTERN else Verbatim("none"), expected
            )
    choices = (
        ", ".join(repr(choice) for choice in _choices(record_type, field))
        if _INVALID_CHOICE_PATTERN.fullmatch(text)
        else ""
    )
    if choices:
        return InvalidAction(field, _value_at(body, field), f"one of {choices}")
    if not text.startswith("Expected "):
        return InvalidAction(field or "body", Verbatim(text), "a value as in the API reference")
    expected, _, actual = text.removeprefix("Expected ").partition(", got ")
    return InvalidAction(
        field or "body",
        Verbatim(actual) if actual else _value_at(body, field),
        _DESCRIPTION_BY_EXPECTED.get(expected, expected),
    )


def _choices(record_type: Any, field: str) -> list[Any]:
    """The allowed values of an enumeration, else nothing."""
    *parents, last = re.sub(r"\[[^]]*\]", ".[]", field).split(".")
    kinds = list(_flatten_union(inspect.type_info(record_type)))
    for name in parents:
        kinds = [child for parent in kinds for child in _child_types(parent, name)]
    tags = [kind.tag for kind in kinds if isinstance(kind, inspect.StructType) and kind.tag_field == last]
    children = [child for parent in kinds for child in _child_types(parent, last)]
    literals = [value for child in children if isinstance(child, inspect.LiteralType) for value in child.values]
    return sorted(tags or literals, key=str)


def _child_types(kind: inspect.Type, name: str) -> Iterator[inspect.Type]:
    """The type of a field or an element."""
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            if field.encode_name == name:
                yield from _flatten_union(field.type)
    elif name == "[]" and isinstance(kind, inspect.DictType):
        yield from _flatten_union(kind.value_type)
    elif name == "[]" and isinstance(kind, inspect.CollectionType):
        yield from _flatten_union(kind.item_type)


def _flatten_union(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The members of a union."""
    if isinstance(kind, inspect.Metadata):
        yield from _flatten_union(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _flatten_union(member)
    else:
        yield kind


def _value_at(body: bytes, field: str) -> Any:
    """The value of the body at that path, if it is easily found."""
    try:
        value = msgspec.json.decode(body) if len(body) <= REDECODED_BYTES_MAX else None
        for name in field.replace("[", ".").replace("]", "").split("."):
            value = value[int(name)] if isinstance(value, list) else value[name]  # type: ignore[index]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError, TypeError, ValueError):
        return Verbatim("something else")
    return value


# ---- responses ----------------------------------------------------------------------------------------------------


class ResponseSpool:
    """Large responses, through a temporary file. The slot is held until the client has read the response, so an unread
    one uses at most SPOOL_BYTES of memory and no slot of another run."""

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
                    raise ClientDisconnect  # the client may have disconnected while it waited
                spool = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115 - until the answer is sent
                file = cast(BinaryIO, stack.enter_context(spool))
                await write(file)
                size = file.seek(0, 2)
                file.seek(0)
                if size <= LARGE_BYTES:
                    return Response(file.read(), status, media_type=media_type)
                return OpenFileResponse(file, size, stack.pop_all(), media_type, status)


class OpenFileResponse(StreamingResponse):
    """Sends a file. Releases its slot when it was sent or its client has disconnected."""

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
