"""The values that a function may return: those that reach the caller unchanged.

Needs only Python: it is also sent into sandboxes, with the program that makes the calls.
"""

from __future__ import annotations

import enum
import json
import sys
from typing import Any

try:
    from msgspec.msgpack import encode
except ImportError:  # in a sandbox whose image has no msgspec
    from .msgpack_encoder import encode  # type: ignore[assignment]

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
"""Types whose values reach the caller unchanged."""


class UnserialisableValue(Exception):
    """A value would reach the caller as another type: `result["when"]: datetime`."""

    def __init__(self, value: Any) -> None:
        self.kind = type(value).__qualname__
        self.steps: list[str] = []
        """The path from the value to the returned one."""

    def __str__(self) -> str:
        return f"result{''.join(reversed(self.steps))}: {self.kind}"


def encode_value(value: Any) -> bytes:
    """Encodes a value as msgpack. Raises UnserialisableValue, and the errors of msgspec for a value that does not
    fit."""
    return encode(plain(value))


def plain(value: Any) -> Any:
    """Returns the value in plain types. Numbers of NumPy, which rewards often are, and subclasses of plain types become
    the plain value that they equal; a tuple becomes a list. Raises UnserialisableValue for other types: a datetime or a
    decimal would become text, a record a dict, a set a list in any order."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is list or kind is tuple:
        return value if ATOMS.issuperset(map(type, value)) else [_part(part, at) for at, part in enumerate(value)]
    if kind is dict:
        if ATOMS.issuperset(map(type, value)) and ATOMS.issuperset(map(type, value.values())):
            return value
        return {_key(key): _part(part, key) for key, part in value.items()}
    return plain(_equal(value))


def _part(value: Any, step: object) -> Any:
    if type(value) in ATOMS:
        return value
    try:
        return plain(value)
    except UnserialisableValue as error:
        error.steps.append(f"[{json.dumps(step, ensure_ascii=False) if isinstance(step, str) else repr(step)}]")
        raise


def _key(key: Any) -> Any:
    """A tuple stays a tuple, so that it can be a key."""
    if type(key) is tuple:
        return tuple(map(_key, key))
    try:
        return plain(key)
    except UnserialisableValue as error:
        error.steps.append(" (a key)")
        raise


def _equal(value: Any) -> Any:
    """The value of a plain type that is equal to it. Raises UnserialisableValue."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        item = value.item()
        kinds = (numpy.number, numpy.bool_, str, bytes)
        if type(item) in ATOMS and isinstance(value, kinds) and not isinstance(value, numpy.timedelta64):
            return item
    elif isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    elif not isinstance(value, enum.Enum):
        plain_kinds: tuple[Any, ...] = (int, float, str, bytes, list, dict)
        for kind in plain_kinds:
            if isinstance(value, kind):
                return kind(value)
    raise UnserialisableValue(value)
