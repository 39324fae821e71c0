"""The request context: one request with its caller, its parameters and the limit of its large bodies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast
from weakref import WeakValueDictionary

from starlette.requests import Request

from tangram.errors import InvalidAction
from tangram.runtime.wire import WAIT_S, WAIT_S_MAX
from tangram.server.http.responses import ApiError
from tangram.server.tenants import Principal

SAFE_INTEGER_MAX = 1 << 53
"""Beyond 2^53 a float, as most clients use, cannot represent every integer."""


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
