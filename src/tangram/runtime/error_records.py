"""Faults: exceptions as records, so that they can be kept in a journal and go over a wire.

Owns the stable codes. Promises that what is raised on the other side is of the same class and says the same.
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
    """There is none of that name, as far as its caller can know."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(f"there is no {what} {name}: it never was, or is gone", retry=False)


class Draining(ManagerError):
    def __init__(self) -> None:
        super().__init__("the service is being stopped and takes nothing more; try again when it is back")


class Unauthorized(ManagerError):
    """Nobody has that token, or not any more."""

    def __init__(self) -> None:
        super().__init__("expected a valid token: 'Authorization: Bearer TOKEN'", retry=False)


VALUE_CHARACTERS_MAX = 500
"""Of a value that was wrong, and of its name: both may be as large as a request."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong. `code` is for programs and stays the same; `message` is for people."""

    code: str
    message: str
    field: str = ""
    """`invalid_...`: what is wrong,"""
    value: str = ""
    """what it is,"""
    expected: str = ""
    """and what would be right."""
    limit: str = ""
    """`refused`, `rate` and `too_large`: the name of the limit."""
    path: str = ""
    """`file_failed`: the file."""
    retry: bool = False
    """The same request may succeed later."""

    def exception(self) -> TangramError:
        if self.code in _INVALID:
            return _INVALID[self.code](self.field, _Shown(self.value), self.expected)
        if self.code in ("refused", "too_large"):
            return AdmissionRefused(self.limit, self.message)
        if self.code == "file_failed":
            return FileFailed(self.path, self.message)
        return ManagerError(self.message, retry=self.retry)


class _Shown(str):
    """A value of which only the text is known: it is shown as it was there."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_INVALID: dict[str, type[InvalidInput]] = {
    "invalid_action": InvalidAction,
    "invalid_config": InvalidConfig,
    "invalid_input": InvalidInput,
}


def fault_of(error: TangramError) -> Fault:
    if isinstance(error, InvalidInput):
        code = next(code for code, kind in _INVALID.items() if isinstance(error, kind))
        field, value = _shortened(error.field), _shortened(repr(error.value))
        message = f"{field}: expected {error.expected}, got {value}"
        return Fault(code=code, message=message, field=field, value=value, expected=error.expected)
    if isinstance(error, AdmissionRefused):
        return Fault(code="refused", message=error.reason, limit=error.limit)
    if isinstance(error, FileFailed):
        return Fault(code="file_failed", message=error.reason, path=error.path)
    if isinstance(error, ManagerError):
        return Fault(code="manager_failed", message=str(error), retry=error.retry)
    return Fault(code="failed", message=str(error))


def _shortened(text: str) -> str:
    if len(text) <= VALUE_CHARACTERS_MAX:
        return text
    return f"{text[:VALUE_CHARACTERS_MAX]}... ({len(text)} characters)"
