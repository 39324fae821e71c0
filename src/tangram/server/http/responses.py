"""Responses: records and errors as JSON, and the HTTP status of each error code."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from tangram.runtime.error_records import ErrorRecord
from tangram.runtime.wire import ErrorResponse

RETRY_AFTER_S_MAX = 3600.0
"""Largest value of Retry-After."""

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
