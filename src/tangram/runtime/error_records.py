"""Error records: exceptions in a form that can be stored in a journal and sent over a wire.

Owns the stable codes. Decoding raises an exception of the same class with the same message.
"""

from __future__ import annotations

import msgspec

from tangram.errors import (
    AdmissionRefused,
    FileFailed,
    InvalidAction,
    InvalidConfig,
    InvalidInput,
    ManagerError,
    TangramError,
)


class NotFound(ManagerError):
    """No such object that the caller may access."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(f"there is no {what} {name}: it does not exist, or no longer", retry=False)


class Draining(ManagerError):
    def __init__(self) -> None:
        super().__init__("the service is shutting down; try again when it is back")


class Unauthorized(ManagerError):
    """The token is unknown or was revoked."""

    def __init__(self) -> None:
        super().__init__("expected a valid token: 'Authorization: Bearer TOKEN'", retry=False)


VALUE_CHARACTERS_MAX = 500
"""Limit on a wrong value and on its name: both may be as large as a request."""


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong. `code` is for programs and is stable; `message` is for people."""

    code: str
    message: str
    field: str = ""
    """The wrong field, for codes `invalid_...`,"""
    value: str = ""
    """its value,"""
    expected: str = ""
    """and what was expected."""
    limit: str = ""
    """The name of the limit, for `refused`, `rate` and `too_large`."""
    path: str = ""
    """The file, for `file_failed`."""
    retry: bool = False
    """The same request may succeed later."""

    def to_exception(self) -> TangramError:
        if self.code in _INVALID_INPUT_BY_CODE:
            return _INVALID_INPUT_BY_CODE[self.code](self.field, Verbatim(self.value), self.expected)
        if self.code in ("refused", "too_large"):
            return AdmissionRefused(self.limit, self.message)
        if self.code == "file_failed":
            return FileFailed(self.path, self.message)
        return ManagerError(self.message, retry=self.retry)


class Verbatim(str):
    """A value known only as text; its repr is that text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_INVALID_INPUT_BY_CODE: dict[str, type[InvalidInput]] = {
    "invalid_action": InvalidAction,
    "invalid_config": InvalidConfig,
    "invalid_input": InvalidInput,
}


def error_record_of(error: TangramError) -> ErrorRecord:
    if isinstance(error, InvalidInput):
        code = next(code for code, kind in _INVALID_INPUT_BY_CODE.items() if isinstance(error, kind))
        field, value = _truncated(error.field), _truncated(repr(error.value))
        message = f"{field}: expected {error.expected}, got {value}"
        return ErrorRecord(code=code, message=message, field=field, value=value, expected=error.expected)
    if isinstance(error, AdmissionRefused):
        return ErrorRecord(code="refused", message=error.reason, limit=error.limit)
    if isinstance(error, FileFailed):
        return ErrorRecord(code="file_failed", message=error.reason, path=error.path)
    if isinstance(error, ManagerError):
        return ErrorRecord(code="manager_failed", message=str(error), retry=error.retry)
    return ErrorRecord(code="failed", message=str(error))


def _truncated(text: str) -> str:
    if len(text) <= VALUE_CHARACTERS_MAX:
        return text
    return f"{text[:VALUE_CHARACTERS_MAX]}... ({len(text)} characters)"
