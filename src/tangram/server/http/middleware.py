"""HTTP middleware: wraps every handler with authentication, rate limits, and errors as JSON.

Treats all input as hostile; executes nothing itself. Promises that a bad request has no effect and gets a response that
names the error, and that no response reveals anything of another run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tangram.config.validators import is_loopback
from tangram.errors import AdmissionRefused, FileFailed, InvalidInput, ManagerError
from tangram.runtime.error_records import Draining, ErrorRecord, NotFound, Unauthorized, error_record_of
from tangram.runtime.wire import Caps
from tangram.server.http.auth import RunRegistry, TokenBucket, WrongTokenLimiter
from tangram.server.http.request_context import ConcurrencyLimiter, RequestContext
from tangram.server.http.responses import STATUS_BY_CODE, ApiError, problem_response
from tangram.server.journal.journal import JournalConflict, JournalFailed
from tangram.server.observe.metrics import ReportedMetrics
from tangram.server.tenants import Principal, Revocation

BODIES_MAX, BODIES_PER_TENANT_MAX = 16, 4
"""Concurrent large bodies in memory, over all runs and per run."""

log = logging.getLogger("tangram.http")

Handler = Callable[[RequestContext], Awaitable[Response]]


class ApiMiddleware:
    """A decorator of handlers."""

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
        async def handle(request: Request) -> Response:
            began = time.perf_counter()
            try:
                caller = ANONYMOUS if is_public else self._authenticate(request)
                response = await handler(RequestContext(request, caller, self._body_limiter))
            except Exception as error:
                response = self._error_response(request, error)
            self._metrics.on_response(route, response.status_code, time.perf_counter() - began)
            return response

        return handle

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
        """The rate limiter: rejects the request if the token bucket of its tenant is empty."""
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
    """Rejects requests without a token that a local browser makes for other sites: of another origin, or to a name
    that was made to resolve to this machine (DNS rebinding)."""
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
    """Returns None for a bug."""
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
